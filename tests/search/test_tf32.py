"""TF32 in the search: read from torch or given, priced, told, kept in the plan and part of what it is known by."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar import Plan, PlanMismatch
from autopar.machine.device import tf32_here, tf32_set
from autopar.search.__main__ import main
from autopar.simulate.timeline import pricer_of
from cost_models.hardware import Hardware

MODEL = """
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.down = nn.Conv2d(64, 64, 3, padding=1), nn.Linear(64 * 32 * 32, 512)

    def forward(self, x):
        return self.down(self.conv(x).flatten(1)).square().mean()

def build():
    with torch.device("meta"):
        return Wide(), (torch.empty(64, 64, 32, 32),)

def high():
    torch.backends.cuda.matmul.allow_tf32 = True
    return build()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "wide.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def search(*more: str, factory: str = "build", hardware: str = "h100-sxm") -> int:
    return main([f"wide.py:{factory}", "--mesh", "a=1", "--hardware", hardware, "--quiet", "--no-simulation", *more])


def found(*more: str, factory: str = "build", hardware: str = "h100-sxm") -> Plan:
    assert search("-o", "plan.json", *more, factory=factory, hardware=hardware) == 0
    return Plan.load("plan.json")


def test_by_itself_torch_allows_convolutions() -> None:
    assert tf32_set() == ("conv",)
    torch.backends.cuda.matmul.allow_tf32 = True
    assert tf32_set() == ("matmul", "conv")
    torch.backends.cudnn.allow_tf32 = False
    assert tf32_set() == ("matmul",)
    torch.set_float32_matmul_precision("highest")
    assert tf32_set() == ()
    torch.set_float32_matmul_precision("medium")
    assert tf32_set() == ("matmul",) and tf32_here("cpu") == ()


def test_what_is_allowed_is_quicker_and_told(folder: Path) -> None:
    plans = {kinds: found("--tf32", kinds) for kinds in ("none", "conv", "matmul", "matmul,conv")}
    times = {kinds: plan.step_seconds for kinds, plan in plans.items()}
    assert times["none"] > max(times["conv"], times["matmul"])
    assert min(times["conv"], times["matmul"]) > times["matmul,conv"]
    assert plans["conv"].tf32 == ("conv",) and "tf32: conv of float32 runs as TF32" in plans["conv"].explain()
    assert "tf32: conv and matmul of float32 run as TF32" in plans["matmul,conv"].explain()
    assert "tf32" not in plans["none"].explain() and plans["none"].tf32 == ()
    assert len({plan.hardware_digest for plan in plans.values()}) == len(plans)


def test_without_the_option_it_is_as_torch_is_set_once_the_model_is_built(folder: Path) -> None:
    assert found().tf32 == ("conv",)
    assert found(factory="high").tf32 == ("matmul", "conv")
    assert found("--tf32", "none", factory="high").tf32 == ()


def test_a_plan_is_priced_again_as_it_was(folder: Path) -> None:
    plan = found("--tf32", "matmul,conv")
    assert pricer_of(plan).hardware.tf32 == ("matmul", "conv")
    with pytest.raises(PlanMismatch, match="the plan was priced on h100-sxm with figures"):
        pricer_of(replace(plan, tf32=("conv",)))


def test_on_a_cpu_there_is_none(folder: Path) -> None:
    plans = [found("--tf32", kinds, hardware="cpu-gloo") for kinds in ("none", "matmul,conv")]
    assert plans[0] == plans[1] and plans[0].hardware_digest == Hardware.load("cpu-gloo").digest
    assert "tf32" not in Path("plan.json").read_text()


def test_bf16_has_no_products_of_float32_to_tell_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tf32" not in found("--precision", "bf16").explain()
    capsys.readouterr()
    assert search("--json") == 0
    assert json.loads(capsys.readouterr().out)["tf32"] == ["conv"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--tf32", "attention"), "--tf32 'attention' is not known; choose some of matmul, conv, or none alone"),
        (("--tf32", "none,conv"), "--tf32 'none' is not known"),
        (("--tf32", "conv", "--profile"), "leave --tf32 out"),
    ],
)
def test_what_cannot_be_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], given: tuple[str, ...], told: str
) -> None:
    assert search(*given) == 2
    assert told in capfd.readouterr().err


def test_a_forged_kind_is_refused(folder: Path) -> None:
    found("--tf32", "conv")
    text = Path("plan.json").read_text().replace('"tf32": ["conv"]', '"tf32": ["all"]')
    Path("plan.json").write_text(text)
    with pytest.raises(PlanMismatch, match="edited or damaged"):
        Plan.load("plan.json")
