"""What the recipes show is true: links lead somewhere, and the whole script among them learns the same on any ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide" / "scripts.md"
PAGES = [*sorted(GUIDE.parent.glob("*.md")), ROOT / "docs" / "benchmarks" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for file in re.findall(r"`((?:examples|tests)/[\w/]+\.py)`", text):
        assert (ROOT / file).exists(), file


@pytest.mark.slow
def test_the_loader_learns_the_same_on_one_process_and_on_two(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    losses: list[list[float]] = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        command = [sys.executable, *launcher, "train.py"]
        environment["PYTHONPATH"] = str(ROOT)
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        losses.append([float(loss) for loss in re.findall(r"^loss ([0-9.]+)$", ran.stdout, re.MULTILINE)])
    assert len(losses[0]) == 8
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)  # of what is printed, the last digit
