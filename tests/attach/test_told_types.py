"""What stands for tensors, lists and arrays in a trace says that it is one."""

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
from tests.processes.compare import both_backward


class Told(nn.Module):
    """Adds up, of rows that a mask picks, a list of their places and a number, what is told to be a tensor."""

    def __init__(self, is_one: Callable[[Any], bool]) -> None:
        super().__init__()
        self.is_one, self.inner = is_one, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        picked = made[made[:, 0] > 0]
        parts = {"rows": picked.square().sum(1), "places": picked.tolist(), "count": 3, "all": made}
        told = [name for name, part in parts.items() if self.is_one(part)]
        assert told == ["rows", "all"]
        return sum((parts[name].mean() for name in told), torch.zeros(()))


def of_several(part: Any) -> bool:
    return isinstance(part, (dict, Tensor)) and not isinstance(part, list | int)


WAYS: dict[str, Callable[[Any], bool]] = {
    "isinstance": lambda part: isinstance(part, Tensor),
    "of several": of_several,
    "is_tensor": torch.is_tensor,
    "type": lambda part: type(part) is Tensor,
    "no list": lambda part: type(part) not in (list, int),
}


@pytest.mark.parametrize("name", WAYS)
def test_rows_that_a_mask_picks_are_tensors(name: str, one: DeviceMesh) -> None:
    plain = Told(WAYS[name])
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(3):
        torch.manual_seed(step)
        both_backward(plain, parallel, torch.randn(9, 4))


class Arrays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        made = self.inner(x)
        parts = [made.detach().numpy(), made.detach().mean(0)]
        return made.sum(), [part for part in parts if isinstance(part, np.ndarray)]


def test_arrays_of_tensors_are_arrays(one: DeviceMesh) -> None:
    plain, x = Arrays(), torch.randn(3, 4)
    (_, wanted), (_, ours) = plain(x), autopar.compile(copy.deepcopy(plain), one)(x)
    assert len(ours) == len(wanted) == 1 and np.allclose(ours[0], wanted[0], atol=1e-6)
