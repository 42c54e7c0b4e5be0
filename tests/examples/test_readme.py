"""What the README shows is true: its example runs and prints what it says, its commands and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_example_prints_the_loss_that_the_readme_names(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (told,) = re.findall(r"`loss ([0-9.]+)`", README)
    (tmp_path / "train.py").write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    loss = re.search(r"^loss ([0-9.]+)$", ran.stdout, re.MULTILINE)
    assert loss is not None, ran.stdout
    # Other processors round differently, which 20 steps amplify; the last digit shown is already 1e-4 of it.
    assert float(loss[1]) == pytest.approx(float(told), rel=1e-3)


def test_links_and_targets_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)(?=[`\s]*(?:#|`|\n))", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_factories_and_profiles_that_are_named_exist() -> None:
    for file, function in re.findall(r"(examples/\w+\.py):(\w+)", README):
        assert f"def {function}(" in (ROOT / file).read_text(), f"{file}:{function}"
    for profile in re.findall(r"--hardware ([\w-]+)", README):
        assert (ROOT / "cost_models" / "profiles" / f"{profile}.toml").exists(), profile


def test_it_is_short() -> None:
    assert len(README.split()) <= 1200
