"""What a call draws from Python's and numpy's own generators ahead of its program: the same on all ranks, rank 0's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.attach.prepared import Prepared
from autopar.trace.asked import put_together
from autopar.trace.outside import go_on_from, states_outside, undrawn


def drawn_ahead(prepared: Prepared, given: Sequence[Tensor], device_mesh: DeviceMesh) -> list[Tensor]:
    """What the program takes of what is drawn in this call. `given`: its arguments. The generators of other ranks go on
    as if they drew, too; of programs that are for one answer alone they only do if they are as rank 0's, as how much is
    drawn, and of which shape, hangs on what is drawn.
    """
    ask = partial(_value, prepared, _arguments(prepared, given))
    if not prepared.asked.of_draws or dist.get_world_size() == 1:
        return _of_rank_0(prepared.drawn.tensors(prepared.modules, ask), device_mesh)
    with drawing_as_rank_0(device_mesh) as is_as_here:
        found = prepared.drawn.tensors(prepared.modules, ask)
        behind = states_outside()
    if is_as_here:
        go_on_from(behind)
    return [value.to(device_mesh.device_type) for value in found]


def serves(
    prepared: Prepared, given: Sequence[Tensor], device_mesh: DeviceMesh, known: dict[int, Any] | None = None
) -> bool:
    """Whether the program is the one of a call that is made now: it fits (`known`: as `Prepared.fits` has it), and what
    is drawn is what it was made for. All ranks have to call it.
    """
    if prepared.fits(given, known) is not None:
        return False
    if not prepared.asked.of_draws:
        return True
    values = _arguments(prepared, given)

    def goes_on(path: str, drawn: Tensor) -> bool:
        values[path] = drawn
        return prepared.asked.is_as_drawn(values, path)

    with drawing_as_rank_0(device_mesh):
        return prepared.drawn.are_alike(prepared.modules, partial(_value, prepared, values), goes_on)


def _arguments(prepared: Prepared, given: Sequence[Tensor]) -> dict[str, Tensor]:
    """Those that are asked, whole, where what is drawn may hang on some. All ranks have to call it: not all of them may
    ask.
    """
    if not prepared.asked.given and not prepared.asked.of_draws:
        return {}
    return {path: put_together(given[at]) for path, at in prepared.asks.items()}


def _value(prepared: Prepared, arguments: Mapping[str, Tensor], number: int, more: Mapping[str, Tensor]) -> Tensor:
    """One of `Asked.given`, of these arguments and `more`, which is drawn by then."""
    return prepared.asked.value(number, {**arguments, **more})


@contextlib.contextmanager
def drawing_as_rank_0(device_mesh: DeviceMesh) -> Iterator[bool]:
    """Inside, the generators are as rank 0's; gives whether they are outside. All ranks have to call it."""
    if dist.get_world_size() == 1:
        with undrawn():
            yield True
        return
    pythons, (name, keys, *rest) = states_outside()
    numbers = [*pythons[1], *map(int, keys), int(rest[0]), int(rest[1])]
    left = [0.0 if pythons[2] is None else pythons[2], float(pythons[2] is not None), float(rest[2])]
    own = [torch.tensor(numbers), torch.tensor(left, dtype=torch.float64)]
    told = [one.cpu() for one in _of_rank_0([one.clone() for one in own], device_mesh)]
    numbers, left = (one.tolist() for one in told)
    count, normal = len(pythons[1]), left[0] if left[1] else None
    found = np.array(numbers[count:-2], keys.dtype), *numbers[-2:], left[2]
    with undrawn(((pythons[0], tuple(numbers[:count]), normal), (name, *found))):
        yield all(map(torch.equal, own, told))


def _of_rank_0(values: Sequence[Tensor], device_mesh: DeviceMesh) -> list[Any]:
    if not values or dist.get_world_size() == 1:
        return [*values]
    sent = [value.to(device_mesh.device_type) for value in values]
    for value in sent:
        dist.broadcast(value, 0)
    return sent
