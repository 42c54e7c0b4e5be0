"""What the README shows is true: its example runs and prints what it says, its commands and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.plan import Plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide" / "search.md").read_text()
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
NEAR = 0.01  # relative: another torch may write the same model with other operators


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


# --- its commands that need no cluster -------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Every search that stands by itself in a block of the page."""
    found = re.findall(r"^    python -m (autopar\.search .*)$", text, re.MULTILINE)
    return [line.partition("   #")[0].split() for line in found]


def printed(command: list[str], tmp_path: Path) -> str:
    command = [str(tmp_path / word) if word.endswith(".json") else word for word in command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", *command, "--quiet"], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def is_like(told: str, line: str) -> bool:
    """The same words, and numbers that are near; `[...]` stands for the rest of a line."""
    if told.endswith("[...]"):
        told = told.removesuffix("[...]").rstrip()
        line = line[: len(told)]
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (told, line)]
    return NUMBER.sub("#", told).split() == NUMBER.sub("#", line).split() and numbers[1] == pytest.approx(
        numbers[0], rel=NEAR, abs=0.011
    )


def test_lines_are_compared_by_words_and_near_numbers() -> None:
    assert is_like("step 10.83 ms: gap 16.6 %", "step 10.85 ms:  gap 16.6 %")
    assert not is_like("step 10.83 ms", "step 10.99 ms") and not is_like("step 10.83 ms", "step 10.83 s")
    assert is_like("each rank [...]", "each rank computes a part") and not is_like("each rank [...]", "each host has")


@pytest.mark.slow
def test_the_search_prints_what_the_readme_and_the_guide_show(tmp_path: Path) -> None:
    """The guide's command is the README's with the baselines, which change no plan."""
    (of_readme, of_memory), (of_guide, *_) = commands(README), commands(GUIDE)
    assert set(of_guide) - set(of_readme) == {"--baselines"} and "--memory" in of_memory
    lines = printed(of_guide, tmp_path).splitlines()
    (block,) = re.findall(r"```\n(mesh .*?)\n```", GUIDE, re.DOTALL)
    shown = block.splitlines()
    assert len(shown) == len(lines)
    assert [told for told, line in zip(shown, lines, strict=True) if not is_like(told, line)] == []
    (excerpt,) = re.findall(r"\n\n((?:    .*\n)*    step time .*\n(?:    .*\n)*)", README)
    for told in excerpt.splitlines():
        assert any(is_like(told.strip(), line.strip()) for line in lines), told


@pytest.mark.slow
def test_in_little_memory_the_readmes_command_costs_what_it_says(tmp_path: Path) -> None:
    """In sum, as the README says, beside all of the device."""
    (_, of_memory) = commands(README)
    at = of_memory.index("--memory")
    ample, little = (
        Plan.load(tmp_path / name)
        for name, more in (("ample.json", []), ("little.json", of_memory[at : at + 2]))
        if printed([*of_memory[:at], *more, "--no-simulation", "-o", name], tmp_path)
    )
    takes = re.search(r"Llama-8B takes (\d+) GiB", README)
    grows = re.search(r"of 44 GiB the sum of its times grows by (\d+) %", README)
    assert takes is not None and grows is not None and of_memory[at + 1] == "44GiB"
    assert f"{ample.peak_bytes['hbm'] / 2**30:.0f}" == takes[1]
    assert f"{100 * (little.step_seconds / ample.step_seconds - 1):.0f}" == grows[1]
    assert little.peak_bytes["hbm"] < 44 * 2**30 and "recomputed in backward: " in little.explain()
