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
from autopar import TraceError
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


class Counts(nn.Module):
    """Keeps and gives how many rows there are, as logs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hard, self.part = nn.Linear(6, 6).double(), 0, 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        made = self.inner(x)
        rows = made[made[:, 0] > 0]
        count, width = rows.shape
        self.hard, self.part = self.hard + count, count / len(x)
        told = {
            "rows": count,
            "numbers": rows.numel(),
            "size": rows.size(0),
            "shape": tuple(rows.shape),
            "width": width,
        }
        loss = rows.sum() / max(count, 1) + rows.view(count, 2, -1).expand(rows.size(0), 2, 3).square().mean()
        return loss * (rows.numel() / made.numel()), told


def test_how_many_rows_there_are_is_a_number_of_python(one: DeviceMesh) -> None:
    plain = Counts()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(8, 6).double()
        (ours, told), (wanted, wanted_told) = parallel(x), plain(x)
        torch.testing.assert_close(ours, wanted)
        assert told == wanted_told and {type(one) for one in told.values()} == {int, tuple}
        assert (parallel.hard, parallel.part) == (plain.hard, plain.part) and type(parallel.part) is float


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


class Keeps(nn.Module):
    def __init__(self, kept: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.kept, self.inner, self.last, self.log, self.table = kept, nn.Linear(4, 4), None, [], {}

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        self.kept(self, made[made[:, 0] > 0])
        return made.sum()


KEPT: dict[str, Callable[[Any, Tensor], None]] = {
    "last": lambda model, rows: setattr(model, "last", rows.detach()),
    "log": lambda model, rows: model.log.append(rows[:, 0].tolist()),
    "table": lambda model, rows: model.table.update(rows={"of": (rows, 3)}),
}


@pytest.mark.parametrize("name", KEPT)
def test_rows_that_forward_keeps_are_refused(name: str, one: DeviceMesh) -> None:
    model = Keeps(KEPT[name])
    parallel = autopar.compile(model, one)
    with pytest.raises(TraceError, match=rf"keeps rows that a mask picks, or a list of them, in self\.{name}"):
        parallel(torch.randn(5, 4))
    assert parallel.last is None and not parallel.log and not parallel.table
