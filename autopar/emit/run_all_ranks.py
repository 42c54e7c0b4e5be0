"""Runs a plan's program for all ranks in one process, without a process group: the main numeric check of a plan.

Every value is a `LocalTensor` that holds one piece per rank, and collectives really exchange the pieces. What this
cannot see are hangs and differences in order between real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar._compat import FakeStore, LocalTensor, LocalTensorMode, groups_like
from autopar.emit.emit import emit
from autopar.emit.emitted import Emitted
from autopar.emit.groups import name_groups
from autopar.emit.seeded import pieces_of, seeds
from autopar.emit.sends import mirror, shift
from autopar.ir.graph import Result, TensorType
from autopar.ir.layout import Layout, Partial, Shard
from autopar.ir.mesh import Mesh
from autopar.plan import Plan


@shift.register_torch_dispatch(LocalTensorMode)
def _(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
    """What each rank has once all ranks have passed on theirs."""
    value, group = args
    return _exchanged(value, group, lambda at: at - 1)


@mirror.register_torch_dispatch(LocalTensorMode)
def _(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
    value, group = args
    return _exchanged(value, group, lambda at: -1 - at)


def _exchanged(value: Any, group: Any, source: Callable[[int], int]) -> Tensor:
    """`source` (place in the group): of whom a rank has what it has afterwards."""
    held = value._local_tensors
    return LocalTensor(
        {rank: held[ranks[source(at)]].clone() for ranks in groups_like(group) for at, rank in enumerate(ranks)}
    )


@dataclass(frozen=True)
class Ran:
    """Whole values of every result, under (kind, target); a layout with several holders of a piece was checked to
    agree.
    """

    results: Mapping[tuple[str, str], Tensor | None]


@contextmanager
def fake_ranks(mesh: Mesh) -> Iterator[DeviceMesh]:
    """A process group of `mesh.ranks` ranks of which only one exists, and the device mesh over it."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; simulate in a process without one")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.ranks)
    try:
        yield init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    finally:
        dist.destroy_process_group()


def shard(value: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """The piece of `value` that `rank` holds in `layout` (which has no partial axes)."""
    for placement, size, index in zip(layout, mesh.sizes, mesh.coordinate(rank), strict=True):
        if isinstance(placement, Shard):
            value = value.chunk(size, placement.dim)[index]
    return value.clone(memory_format=torch.contiguous_format)


def unshard(pieces: Mapping[int, Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The whole value from the pieces of all ranks. Raises AssertionError where holders of one piece differ."""
    held = dict(pieces)
    for axis in reversed(range(len(mesh.sizes))):
        placement = layout[axis]
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for rank in sorted(held):
            where = mesh.coordinate(rank)
            groups.setdefault((*where[:axis], 0, *where[axis + 1 :]), []).append(held[rank])
        stride = 1
        for size in mesh.sizes[axis + 1 :]:
            stride *= size
        merged: dict[int, Tensor] = {}
        for rank in sorted(held):
            where = mesh.coordinate(rank)
            if where[axis]:
                continue
            parts = groups[where]
            match placement:
                case Shard(dim):
                    merged[rank] = torch.cat(parts, dim)
                case Partial():
                    assert placement.op == "sum", "a result of a program is never partial but in sums"
                    merged[rank] = torch.stack(parts).sum(0)
                case _:
                    for part in parts[1:]:
                        assert torch.equal(part.nan_to_num(), parts[0].nan_to_num()), (
                            "ranks disagree on a replicated value"
                        )
                    merged[rank] = parts[0]
        held = merged
    return held[0]


def run(
    plan: Plan, device_mesh: DeviceMesh, values: Mapping[str, Tensor], program: Emitted | None = None, seed: int = 0
) -> Ran:
    """One forward (and backward) of `plan` from whole tensors, by node name: parameters, buffers, inputs, tangents.

    A tangent that is not given is 1 (the derivative of a loss by itself). `seed`: of the numbers that are drawn.
    """
    mesh = plan.mesh
    program = program or emit(plan, name_groups({}, plan.groups(), device_mesh, mesh))
    ranks = range(mesh.ranks)

    def local(name: str, value: Tensor) -> Tensor:
        layout = plan.choices[name].gives[0]
        return LocalTensor({rank: shard(value, layout, mesh, rank) for rank in ranks})

    inputs = [local(node.name, values[node.name].detach()) for node in program.inputs]
    indices = [mesh.indices(mesh.coordinate(rank)) for rank in ranks]
    coordinates = [LocalTensor(dict(enumerate(map(torch.tensor, one)))) for one in zip(*indices, strict=True)]
    ranks_own = [*coordinates, *_seeds(program, mesh, seed)]
    tangents: list[Tensor] = []
    for node in program.tangents:
        (type,) = node.outputs
        assert type is not None
        given = values.get(node.name, torch.ones(type.shape, dtype=getattr(torch, type.dtype)))
        tangents.append(local(node.name, given))
    with LocalTensorMode(frozenset(ranks)), torch.no_grad():
        outputs = program.forward(*inputs, *ranks_own)
        done = list(zip(program.results, outputs, strict=False))
        for (result, _), value in done:
            if result.kind == "buffer":  # is written where it lies, in front of backward
                place = next(
                    at for at, one in enumerate(program.inputs) if one.op == "buffer" and one.target == result.target
                )
                inputs[place].copy_(value)
        saved = list(outputs[len(program.results) :])
        if program.backward is not None:
            so_far = [None if type is None else _zeros(type, mesh) for type in program.added_up]
            gradients = program.backward(saved, *tangents, *ranks_own, *([so_far] if so_far else []))
            gradients = [total if given is None else given for given, total in zip_longest(gradients, so_far)]
            done += zip(program.gradients, gradients, strict=True)
            assert not saved, "the backward leaves saved values behind"
    whole: dict[tuple[str, str], Tensor | None] = {}
    told = zip(plan.graph.results, plan.deliveries, strict=True)
    summed = [result for result, delivery in told if delivery is not None and delivery.once]
    for (result, layout), value in done:
        if any(isinstance(placement, Partial) for placement in layout):
            assert result in summed, f"{result.kind} {result.target} is partial, and nobody sums it"
        whole[_key(result)] = None if value is None else unshard(_pieces(value, mesh), layout, mesh)
    return Ran(whole)


def _zeros(type: TensorType, mesh: Mesh) -> Tensor:
    return LocalTensor({rank: torch.zeros(type.shape, dtype=getattr(torch, type.dtype)) for rank in range(mesh.ranks)})


def _seeds(program: Emitted, mesh: Mesh, seed: int) -> list[Tensor]:
    if not program.drawing:
        return []
    ranks = range(mesh.ranks)
    return [
        LocalTensor({rank: seeds(seed, 0, pieces_of(program.drawing, mesh, mesh.coordinate(rank))) for rank in ranks})
    ]


def _pieces(value: Tensor, mesh: Mesh) -> dict[int, Tensor]:
    if isinstance(value, LocalTensor):
        return dict(value._local_tensors)
    return {rank: value for rank in range(mesh.ranks)}


def _key(result: Result) -> tuple[str, str]:
    return result.kind, result.target
