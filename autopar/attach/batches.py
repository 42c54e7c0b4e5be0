"""Batches: whole ones, which have to be the same on every rank, and parts, of which every rank brings its own.

A rank that passes another batch than the others would train on a mixture that nobody meant. So a fingerprint of what is
passed is compared over ranks: at the first call of each program, and at every `EVERY`-th call after that. On a CPU that
is done at once; on a device the sample is copied beside what the device does, and compared at the call after.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar._compat import pytree
from autopar.attach.tensors import layout_of, mesh_of
from autopar.emit.seeded import piece_number
from autopar.errors import PlanMismatch
from autopar.ir.graph import Graph
from autopar.rewrite.batch_dims import batch_dims
from autopar.trace.records import make_known, tensors_within

EVERY = 100  # calls
SAMPLE = 4096  # elements of a tensor that are looked at, spread over all of it


def from_local(batch: Any, device_mesh: DeviceMesh, *, averages: bool) -> Any:
    """Each rank's own part of a batch -> DTensors of the whole batch, in which parts stand in the order of the ranks
    along dim 0. Tensors without dims and what is no tensor have to be the same on every rank and stay as they are.

    A part that requires grad gets the gradient of the whole batch's loss; with `averages` that of the loss of its
    rank's rows alone, of which the whole one is the average.
    """

    def joined(part: Any) -> Any:
        if not isinstance(part, Tensor) and not callable(part) and tensors_within(part):
            raise PlanMismatch(
                f"the batch has an object of a class of its own ({type(part).__qualname__}), whose tensors are not "
                "seen: pass what is in it, or make it a dataclass"
            )
        if not isinstance(part, Tensor) or isinstance(part, DTensor) or not part.ndim:
            return part
        shape = torch.Size((part.shape[0] * device_mesh.size(), *part.shape[1:]))
        given = part if torch.is_grad_enabled() and part.requires_grad else part.detach()
        return _FromLocal.apply(given, device_mesh, shape, averages)

    make_known(batch)
    leaves, spec = pytree.tree_flatten(batch)
    made = {id(leaf): joined(leaf) for leaf in leaves}  # one that is given twice stays one
    return pytree.tree_unflatten([made[id(leaf)] for leaf in leaves], spec)


class _FromLocal(torch.autograd.Function):
    """`DTensor.from_local`, whose backward would make zeros of no gradient, and go on to what made the part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, device_mesh: DeviceMesh, shape: torch.Size, averages: bool) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.placements, ctx.times = [Shard(0)] * device_mesh.ndim, device_mesh.size() if averages else 1
        return DTensor.from_local(
            part.detach().to(device_mesh.device_type).contiguous(), device_mesh, ctx.placements, run_check=False,
            shape=shape, stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if gradient is None:
            return None, None, None, None
        return gradient.redistribute(placements=ctx.placements).to_local() * ctx.times, None, None, None


def is_split_by_rows(part: Any) -> bool:
    """Whether it came out of `from_local`, so that each rank has rows of its own."""
    return isinstance(part, DTensor) and part.ndim > 0 and part.placements[0] == Shard(0)


def batch_dims_of(
    graph: Graph, given: Sequence[Any], places: Mapping[str, int], device_mesh: DeviceMesh, changed: Mapping[int, int]
) -> dict[str, int]:
    """Index of an output of which each rank gets its own rows -> the dim along which they lie. `given`: the tensors of
    a call; `places`: of each input among them; `changed`: outputs that are written back to some of them.
    """
    inputs = {node.name for node in graph.nodes if node.op == "input" and is_split_by_rows(given[places[node.target]])}
    lies = batch_dims(graph, inputs, device_mesh.size())
    as_given = {str(leaf): 0 for leaf, place in changed.items() if is_split_by_rows(given[place])}
    return {target: dim for target, dim in lies.items() if isinstance(dim, int)} | as_given


def tell_other_rows(leaves: Sequence[tuple[str, Any]], ranks: int) -> None:
    """Warn of a tensor of `inputs="local"` that has not as many rows as the first one, so that it may hold none."""
    held = [(path, part.shape[0] // ranks) for path, part in leaves if is_split_by_rows(part)]
    for path, rows in held[1:]:
        if rows != held[0][1]:
            warnings.warn(
                "inputs='local' puts dim 0 of every tensor together over the ranks, as rows of one batch, and argument "
                f"{held[0][0]} has {held[0][1]} of them, {path} has {rows}: make what holds no rows (a mask, "
                "positions, an index) a buffer, or pass DTensor.from_local(x, mesh, [Replicate()])",
                stacklevel=2,
            )
            return


@dataclass
class _Sampled:
    """What is compared of one call: samples on the host, which may still be on their way there."""

    key: Hashable
    samples: list[Tensor]
    pieces: list[int]
    without_dims: list[bool]
    there: Any = None


class SameBatches:
    """Compares what the ranks pass to one module."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self._device_mesh = device_mesh
        self._ranks = dist.get_world_size()
        self._calls = 0
        self._left: _Sampled | None = None

    def compare(self, key: Hashable, tensors: Sequence[Tensor], *, is_new: bool) -> None:
        """Raises PlanMismatch, on all ranks alike, where ranks that should pass the same pass something else."""
        if self._ranks == 1:
            return
        self._calls += 1
        if self._left is not None:
            left, self._left = self._left, None
            self._exchange(left)
        if not is_new and self._calls % EVERY:
            return
        sampled = self._sample(key, tensors)
        if sampled.there is None or is_new:
            self._exchange(sampled)
        else:
            self._left = sampled

    def _sample(self, key: Hashable, tensors: Sequence[Tensor]) -> _Sampled:
        mesh = mesh_of(self._device_mesh)
        coordinate = self._device_mesh.get_coordinate()
        assert coordinate is not None
        samples, pieces, on_device = list[Tensor](), list[int](), False
        for tensor in tensors:
            pieces.append(piece_number(layout_of(tensor), mesh, coordinate) if isinstance(tensor, DTensor) else 0)
            flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLE)]
            on_device = on_device or sample.is_cuda
            samples.append(sample.to("cpu", non_blocking=True) if sample.is_cuda else sample)
        there = torch.cuda.Event() if on_device else None
        if there is not None:
            there.record()
        return _Sampled(key, samples, pieces, [not one.ndim for one in tensors], there)

    def _exchange(self, sampled: _Sampled) -> None:
        if sampled.there is not None:
            sampled.there.synchronize()
        told = [_fingerprint(sample) for sample in sampled.samples]
        mine = torch.tensor(
            [
                zlib.crc32(repr(sampled.key).encode()),
                *(n for pair in zip(sampled.pieces, told, strict=True) for n in pair),
            ]
        )
        lengths = _gathered(torch.tensor([len(mine)]), self._device_mesh)
        if len({int(one) for one in lengths}) > 1:
            raise PlanMismatch("ranks call the module with other arguments: some pass more tensors than others")
        every = _gathered(mine, self._device_mesh)
        for rank, theirs in enumerate(every):
            if theirs[0] != every[0][0]:
                raise PlanMismatch(
                    f"ranks 0 and {rank} call the module with arguments of other shapes or dtypes, of which others "
                    "require grad, or with other values that are no tensors; every rank has to make the same call "
                    "(parts of a batch are as long on all ranks: drop_last=True in the loader)"
                )
        for place in range(len(told)):
            first: dict[int, tuple[int, int]] = {}
            for rank, theirs in enumerate(every):
                piece, print_ = int(theirs[1 + 2 * place]), int(theirs[2 + 2 * place])
                before, known = first.setdefault(piece, (rank, print_))
                if known != print_ and sampled.without_dims[place]:
                    raise PlanMismatch(
                        f"tensor {place} of the call has no dims and differs between ranks {before} and {rank}: what "
                        "has no rows has to be the same on every rank (of inputs='local', too); average it first"
                    )
                if known != print_:
                    raise PlanMismatch(
                        f"tensor {place} of the call differs between ranks {before} and {rank}, but plain tensors are "
                        "the whole batch, the same on every rank. Does each rank load a part of its own "
                        "(DistributedSampler)? Then compile with inputs='local' or pass parallel.from_local(batch) (in "
                        "stages it is part parallel.data_rank: the ranks of all stages take the same rows); "
                        "else let all ranks draw the same batch (one seed for the loader)"
                    )


def _fingerprint(sample: Tensor) -> int:
    values = torch.view_as_real(sample) if sample.is_complex() else sample
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().tobytes(), len(sample))


def _gathered(mine: Tensor, device_mesh: DeviceMesh) -> list[Tensor]:
    """Everybody's numbers, through the host where the group can."""
    device = "cpu" if "gloo" in str(dist.get_backend_config()) else device_mesh.device_type
    mine = mine.to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [one.cpu() for one in every]
