"""Numbers and tensors that forward keeps in objects, counters, and tensors that it writes to in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near
from tests.support.meters import MODELS, Keeps, Metered, kept, same


@pytest.mark.filterwarnings("ignore:the model is traced and planned for the 4th time")
@pytest.mark.parametrize("kind", MODELS)
def test_what_forward_keeps_is_as_on_one_process(kind: type[Keeps], one: DeviceMesh) -> None:
    """In more calls than programs are kept, with one that does not train in between, and set by the script once."""
    torch.manual_seed(0)
    plain = kind()
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    held = [getattr(parallel, name) for name in kind.held]
    models = (plain, parallel)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for call in range(10):
        losses = list[Tensor]()
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(call)
            loss = model(torch.randn(3, 4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        near(losses[1], losses[0], 1e-5, f"call {call}")
        same(kept(parallel), kept(plain))
    assert len(parallel._autopar.prepared()) == kind.programs
    for before, name in zip(held, kind.held, strict=True):
        if hasattr(before, "__dict__") and not isinstance(before, Tensor) and name != "schedule":
            assert getattr(parallel, name) is before


def test_a_script_may_reset_a_meter(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Metered()
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for call in range(6):
        for model in (plain, parallel):
            if call == 4:
                model.losses.reset()
            torch.manual_seed(call)
            model.loss = model(torch.randn(3, 4)).item()
        assert parallel.loss == pytest.approx(plain.loss, rel=1e-5)
        assert parallel.losses.count == plain.losses.count
        assert parallel.losses.mean == pytest.approx(plain.losses.mean)
    again = copy.deepcopy(parallel)
    again(torch.randn(3, 4))
    assert (again.losses.count, parallel.losses.count) == (9, 6)  # rows


outside = torch.zeros(4)


class Outside(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        outside.add_(1)
        return (self.layer(x) + outside).square().mean()


def test_tensors_that_are_held_elsewhere_too_are_not_written_to(one: DeviceMesh) -> None:
    parallel = autopar.compile(Outside(), one)
    with pytest.raises(TraceError, match=r"changes outside \(in .*\), which is no attr.* make .* a buffer"):
        parallel(torch.randn(3, 4))
