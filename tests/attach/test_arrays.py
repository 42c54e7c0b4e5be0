"""Arrays of numpy that forward or a hook makes of tensors: kept and returned in each call, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 2)
        self.last: Any = None
        self.history: list[Any] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        hidden = torch.relu(self.inner(x))
        self.last = hidden.detach().cpu().numpy()
        self.history.append(hidden.mean().detach().numpy())
        return self.outer(hidden).square().mean(), hidden.detach().numpy()


def same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs) is np.ndarray
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outputs", ["global", "sharded"])
def test_what_forward_and_hooks_keep_and_return(one: DeviceMesh, outputs: Any) -> None:
    plain, found = Keeps(), dict[str, list[Any]](plain=[], parallel=[])
    parallel = autopar.compile(copy.deepcopy(plain), one, outputs=outputs)
    for name, model in (("plain", plain), ("parallel", parallel)):
        model.outer.register_forward_hook(
            lambda _, __, made, name=name: found[name].append(made.detach().cpu().numpy().copy())
        )
    for step in range(3):
        x = torch.randn(4, 8)
        (loss, array), (ours, made) = plain(x), parallel(x)
        torch.testing.assert_close(ours, loss)
        same(made, array)
        same(parallel.last, plain.last)
        for name in ("history",):
            for one_of_ours, one_of_theirs in zip(getattr(parallel, name), getattr(plain, name), strict=True):
                same(one_of_ours, one_of_theirs)
        assert len(found["parallel"]) == step + 1
        same(found["parallel"][-1], found["plain"][-1])


COMPUTES: dict[str, Callable[[Tensor], Any]] = {
    "a method": lambda h: h.detach().numpy().mean(),
    "a function": lambda h: np.mean(h.detach().numpy()),
    "an operator": lambda h: h.detach().numpy() * 2,
    "with a tensor": lambda h: h * h.detach().numpy(),
    "an element": lambda h: h.detach().numpy()[0, 0],
    "a length": lambda h: len(h.detach().numpy()),
    "a loop": lambda h: [*h.detach().numpy()],
    "text": lambda h: f"{h.detach().numpy()}",
    "a tensor again": lambda h: torch.tensor(h.detach().numpy()),
    "the same memory": lambda h: torch.from_numpy(h.detach().numpy()),
    "of what requires grad": lambda h: h.numpy(),
}


@pytest.mark.parametrize("what", COMPUTES)
def test_what_computes_with_them_is_refused(one: DeviceMesh, what: str) -> None:
    class Computes(Keeps):
        def forward(self, x: Tensor) -> Any:
            hidden = self.inner(x)
            COMPUTES[what](hidden)
            return hidden.square().mean()

    with pytest.raises(TraceError, match=r"test_arrays.py.*numpy.*make an array of it behind the call"):
        autopar.compile(Computes(), one)(torch.randn(4, 8))
