"""What a user settles by name, at both doors: `compile` in one process, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.plan import Plan
from autopar.plan.tell import RECOMPUTED, modes_of
from autopar.search.__main__ import main
from tests.support.tiny import BUILD, TINY


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_compile_obeys_and_means_the_same(one: DeviceMesh, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, 16)
    pin = {"layers.1": "recompute", "layers.*.weight": "offload-parameters"}
    parallel = autopar.compile(model, one, pin=pin, cache=tmp_path)
    loss = parallel(x)
    loss.backward()
    wanted = model(x)
    wanted.backward()
    assert torch.allclose(loss, wanted)
    assert all(
        torch.allclose(full(a.grad), b.grad) for a, b in zip(parallel.parameters(), model.parameters(), strict=True)
    )
    assert parallel.plan.residence == {"layers.0.weight": "host", "layers.2.weight": "host"}
    assert RECOMPUTED in modes_of(parallel.plan).values()
    with torch.no_grad():
        assert torch.allclose(parallel.eval()(x), wanted)
    autopar.compile(model, one, example_inputs=(x,), cache=tmp_path)
    assert autopar.compile(model, one, example_inputs=(x,), cache=tmp_path).plan.residence == {}
    with pytest.raises(ValueError, match="pin 'nothing' is no module or parameter"):
        autopar.compile(model, one, example_inputs=(x,), pin={"nothing": "save"})


def test_a_later_call_goes_without_pins_that_nothing_in_it_can_obey(one: DeviceMesh, tmp_path: Path) -> None:
    """A part of the module is another one then; the step goes on, and a warning says why."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, 16)
    parallel: Any = autopar.compile(model, one, pin={"layers.1": "recompute", "layers.2": "device"}, cache=tmp_path)
    parallel(x).backward()
    parallel.zero_grad()
    parallel.layers[1] = model.layers[1] = nn.Identity()
    with pytest.warns(UserWarning, match=r"goes without pins that nothing in it can obey: pin 'layers.1' is no module"):
        loss = parallel(x)
    loss.backward()
    wanted = torch.autograd.grad(model(x), model.layers[0].weight)[0]  # type: ignore[arg-type]
    assert torch.allclose(full(parallel.layers[0].weight.grad), wanted)
    with pytest.raises(ValueError, match=r"pin 'layers.1' is no module"):
        autopar.compile(model, one, pin={"layers.1": "recompute"}, cache=tmp_path)(x)


def test_a_plan_is_pinned_where_it_is_searched(one: DeviceMesh) -> None:
    parallel = autopar.compile(Layers(), one, example_inputs=(torch.randn(8, 16),))
    with pytest.raises(ValueError, match=r"pin= is for a search, and plan= is the answer of one"):
        autopar.compile(Layers(), one, plan=parallel.plan, pin={"layers.1": "recompute"})


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_the_command_obeys_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.py").write_text(TINY + BUILD)
    monkeypatch.chdir(tmp_path)
    good = ("tiny.py:build", "--mesh", "a=2", "--hardware", "h100-sxm", "--quiet")
    assert main([*good, "--pin", "*.weight=offload-parameters", "--baselines", "-o", "plan.json"]) == 0
    plan = Plan.load("plan.json")
    assert set(plan.residence) == {name for name in plan.parameters if name.endswith(".weight")}
    assert "updated there" in (told := capsys.readouterr().out) and "memory is not what limits it" not in told
    for wrong, sentence in (("weight", "--pin 'weight' is not NAME=WORD"), ("x=save", "pin 'x' is no module")):
        assert main([*good, "--pin", wrong]) == 2
        assert sentence in capsys.readouterr().err
