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
from autopar.lower.sums import Row, rows_of
from autopar.plan import Plan


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

    def sum(self, rows: Sequence[Tensor]) -> None:
        """Sum them over ranks, where they lie: all at once, but on a CPU one by one, as gloo needs it."""
        left = [(row, told.changes) for row, (told, _) in zip(rows, self.rows, strict=True)]
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


def _dtype(type: TensorType) -> torch.dtype:
    return getattr(torch, type.dtype)
