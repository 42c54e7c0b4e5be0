"""Gradients as a step's micro-batches add them up, those that are partial sums in rows, which are summed over ranks
behind the last one (`autopar.lower.sums`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._compat import group_named
from autopar.emit import Emitted
from autopar.ir.graph import TensorType
from autopar.ir.layout import Shard
from autopar.lower.sums import Row, rows_of
from autopar.plan import Plan
from autopar.price.reshard import Reshard

C10D = torch.ops._c10d_functional


@dataclass(frozen=True)
class Rows:
    """`types`: of the sums, in the order of the program's gradients (`Emitted.added_up`); None: there is none. `rows`:
    with the places of their gradients in it. `groups`: axis -> process group.
    """

    types: tuple[TensorType | None, ...]
    rows: tuple[tuple[Row, tuple[int, ...]], ...]
    groups: Mapping[str, str]

    @staticmethod
    def of(plan: Plan, program: Emitted, groups: Mapping[str, str]) -> Rows:
        place = {result.target: at for at, (result, _) in enumerate(program.gradients)}
        types = program.added_up or (None,) * len(program.gradients)
        told = ((row, [plan.graph.results[one].target for one in row.places]) for row in rows_of(plan))
        return Rows(types, tuple((row, tuple(place[target] for target in of)) for row, of in told), groups)

    def begun(self, device: torch.device) -> tuple[list[Tensor | None], list[Tensor]]:
        """(sums of no gradients yet, and the rows in which some of them lie)."""
        found: list[Tensor | None] = [None] * len(self.types)
        rows: list[Tensor] = []
        for _, places in self.rows:
            types = [type for place in places if (type := self.types[place]) is not None]
            rows.append(torch.zeros(sum(type.numel for type in types), dtype=_dtype(types[0]), device=device))
            parts = rows[-1].split([type.numel for type in types])
            for place, type, part in zip(places, types, parts, strict=True):
                found[place] = part.view(type.shape)
        for place, type in enumerate(self.types):
            if type is not None and found[place] is None:
                found[place] = torch.zeros(type.shape, dtype=_dtype(type), device=device)
        return found, rows

    def sum(self, so_far: list[Tensor | None], rows: Sequence[Tensor]) -> None:
        """Sum them over ranks, where they lie: all at once, but on a CPU one by one, as gloo needs it. In front of
        that, those of parameters that are stored in more pieces than they are read in: of each a rank gets its piece,
        in the place of the whole.
        """
        left: list[tuple[Tensor, Sequence[Reshard]]] = []
        for row, (told, places) in zip(rows, self.rows, strict=True):
            if not told.scatters:
                left.append((row, told.changes))
                continue
            (place,) = places
            value = so_far[place]
            assert value is not None
            so_far[place] = self.changed(value, told.changes)
        while left:
            waits = list[dist.Work]()
            for row, (change, *_) in left:
                work = dist.all_reduce(row, group=group_named(self.groups[change.axis]), async_op=True)
                assert work is not None
                if row.is_cuda:
                    waits.append(work)
                else:
                    work.wait()
            for work in waits:
                work.wait()
            left = [(row, rest) for row, (_, *rest) in left if rest]

    def changed(self, value: Tensor, changes: Sequence[Reshard]) -> Tensor:
        """A rank's piece, behind these layout changes: gathers, and sums over ranks of which each gets all, or one."""
        for change in changes:
            group = self.groups[change.axis]
            match change.before, change.after:
                case Shard(dim), _:
                    value = gathered(value, dim, group)
                case _, Shard(dim):
                    value = scattered(value, dim, group)
                case _:
                    dist.all_reduce(value, group=group_named(group))
        return value


def gathered(piece: Tensor, dim: int, group: str) -> Tensor:
    """The pieces of the ranks of a group, one behind the other along a dim."""
    ranks = dist.get_world_size(group_named(group))
    made = C10D.wait_tensor(C10D.all_gather_into_tensor(piece.contiguous(), ranks, group))
    return torch.cat(made.chunk(ranks), dim) if dim else made


def scattered(value: Tensor, dim: int, group: str) -> Tensor:
    """This rank's piece, along a dim, of the sum of the values of a group."""
    ranks = dist.get_world_size(group_named(group))
    pieces = torch.cat(value.chunk(ranks, dim)) if dim else value.contiguous()
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(pieces, "sum", ranks, group))


def _dtype(type: TensorType) -> torch.dtype:
    return getattr(torch, type.dtype)
