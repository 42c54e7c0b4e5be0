"""Gradients that are added up in rows, and summed over ranks behind the last micro-batch (`autopar.lower.sums`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._compat import group_named
from autopar.attach.rounds import widened
from autopar.lower.sums import Row, rows_of
from autopar.plan import Plan


@dataclass(frozen=True)
class Rows:
    """`rows`: with the places of their gradients among those that a rank adds up; `groups`: axis -> process group."""

    rows: tuple[tuple[Row, tuple[int, ...]], ...]
    groups: Mapping[str, str]

    @staticmethod
    def of(plan: Plan, targets: Sequence[str], groups: Mapping[str, str]) -> Rows:
        """`targets`: of the gradients that a rank adds up, in order."""
        place = {target: at for at, target in enumerate(targets)}
        told = ((row, [plan.graph.results[one].target for one in row.places]) for row in rows_of(plan))
        return Rows(tuple((row, tuple(place[target] for target in of)) for row, of in told), groups)

    def begun(self, made: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor]]:
        """(tensors of their own that begin with the gradients of the first micro-batch, and the rows)."""
        found: list[Tensor | None] = [None] * len(made)
        rows: list[Tensor] = []
        for told, places in self.rows:
            first = [one for place in places if (one := made[place]) is not None]
            assert len(first) == len(places)
            dtype = getattr(torch, told.changes[0].local.dtype)
            row = torch.cat([one.reshape(-1) for one in first]).to(dtype)
            parts = row.split([one.numel() for one in first])
            for place, one, part in zip(places, first, parts, strict=True):
                found[place] = part.view(one.shape)
            rows.append(row)
        in_rows = {place for _, places in self.rows for place in places}
        for place, one in enumerate(made):
            if one is not None and place not in in_rows:
                found[place] = widened(one)
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
