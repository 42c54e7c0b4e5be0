"""docs/adding.md, "A hardware profile": one file more in a folder of profiles, found by name, by path and by device."""

from __future__ import annotations

import json
import random
import re
import shutil
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.machine.device import hardware_or_here
from autopar.search.__main__ import main
from cost_models import Comm, Hardware, Move, known_hardware, links_of, seconds
from tests.support.tiny import BUILD, TINY

NAME, LIKE = "toy-9000", "h100-sxm"
FIGURE = re.compile(r"\{ value = ([\d.e+-]+), source = .*\}")


def copied_and_changed(text: str, name: str, seed: int) -> str:
    """What the guide asks for: the profile next to it, every figure another, curves left out, another device."""
    rng = random.Random(seed)

    def another(found: re.Match[str]) -> str:
        return f'{{ value = {int(float(found[1]) * rng.uniform(0.3, 0.9)) or 1e-6}, source = "drawn for a toy" }}'

    text = text.partition("# Attention has kernels")[0]
    text = text.replace(f'name = "{LIKE}"', f'name = "{name}"').replace('device = "H100"', 'device = "Toy 9000"')
    return FIGURE.sub(another, text)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in a copy of the folder that stands for the folder of the package."""
    package = resources.files("cost_models")
    with resources.as_file(package / "profiles") as profiles:
        shutil.copytree(profiles, tmp_path / "profiles")
    original = resources.files
    monkeypatch.setattr(resources, "files", lambda of: tmp_path if of == "cost_models" else original(of))
    path = tmp_path / "profiles" / f"{NAME}.toml"
    path.write_text(copied_and_changed((tmp_path / "profiles" / f"{LIKE}.toml").read_text(), NAME, 1))
    return path


def test_it_is_known_by_the_name_of_its_file_and_shares_no_figure_with_the_one_it_was_copied_from(added: Path) -> None:
    before, toy = Hardware.load(LIKE), Hardware.load(NAME)
    assert NAME in known_hardware() and toy == Hardware.load(added) == Hardware.load(str(added))
    assert toy.name == NAME and toy.figures.keys() == before.figures.keys()
    assert [name for name in toy.figures if toy.figures[name] == before.figures[name]] == []
    assert toy.sources.keys() == {*toy.figures, "overlaps"} and toy.digest != before.digest
    with pytest.raises(ValueError, match=f"did you mean {NAME}"):
        Hardware.load("toy-900")


def test_prices_on_it_are_those_of_its_figures(added: Path) -> None:
    toy, nbytes = Hardware.load(NAME), random.Random(2).randrange(10**6, 10**8)
    link = toy.links["intra"]
    gather = seconds(Comm("all_gather", "x", 2, nbytes), toy, links_of(toy, ["x"], [2]))
    assert gather == pytest.approx(link.latency_s + nbytes / 2 / link.bytes_per_s, rel=1e-12)
    fetch = seconds(Move("host", "hbm", nbytes), toy, {})
    assert fetch == pytest.approx(toy.launch_s + nbytes / toy.host_link.h2d_bytes_per_s, rel=1e-12)


def test_a_search_finds_it_by_name_and_by_path_and_plans_for_that_machine(
    added: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny.py"
    model.write_text(TINY + BUILD)
    told: dict[str, dict[str, Any]] = {}
    for hardware in (NAME, str(added), LIKE):
        plan = tmp_path / "plan.json"
        assert main([f"{model}:build", "--mesh", "data=2", "--hardware", hardware, "-o", str(plan)]) == 0
        told[hardware] = json.loads(plan.read_text())
    assert capsys.readouterr().out.count(NAME) >= 2
    by_name, by_path, other = told.values()
    assert by_name["hardware"] == by_path["hardware"] == NAME and other["hardware"] == LIKE
    assert by_name["step_seconds"] == by_path["step_seconds"] != other["step_seconds"]
    assert by_name["hardware_digest"] == by_path["hardware_digest"] != other["hardware_digest"]


def test_the_device_pattern_finds_it_and_of_two_the_one_with_the_most_memory_that_there_is(
    added: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = added.with_name("toy-9000-large.toml")
    text = added.read_text().replace(f'"{NAME}"', '"toy-9000-large"')
    capacity = Hardware.load(NAME).tiers["hbm"].capacity_bytes
    large.write_text(text.replace(f"capacity_bytes = {{ value = {capacity},", "capacity_bytes = { value = 9e12,"))
    device = SimpleNamespace(total_memory=capacity + 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Toy 9000 PCIe")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert hardware_or_here(None, "cuda", calibrated=False).name == NAME
    device.total_memory = 10**13
    assert hardware_or_here(None, "cuda", calibrated=False).name == "toy-9000-large"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Toy 8000")
    with pytest.raises(ValueError, match=f"no hardware profile fits device 'NVIDIA Toy 8000'.*{NAME}"):
        hardware_or_here(None, "cuda", calibrated=False)
