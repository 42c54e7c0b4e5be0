"""Quick incumbents: start anywhere, repair what does not fit, then improve by changing one item at a time.

Deterministic, exact in what it claims (the caller prices the picks again), and without any promise: it may fail to
find picks although there are some.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from solver.backends.lowering import Lowered
from solver.problem import Array, Problem


class Neighbourhood:
    """Picks of a core with the cost of every option of every item given what its neighbours pick now."""

    def __init__(self, core: Problem, lowered: Lowered, picks: Sequence[int]) -> None:
        self.picks = list(picks)
        finite = sum(float(cost.max()) for cost in core.costs)
        largest: dict[int, float] = {}
        for edge in core.edges:
            if id(edge.cost) not in largest:
                largest[id(edge.cost)] = float(np.where(edge.cost < np.inf, np.abs(edge.cost), 0.0).max())
            finite += largest[id(edge.cost)]
        self.forbidden = 2 * abs(finite) + 1.0  # dearer than any allowed change
        self._matrices: dict[int, tuple[Array, Array]] = {}
        self.near: list[list[tuple[int, Array]]] = [[] for _ in core.costs]
        for edge in core.edges:
            if id(edge.cost) not in self._matrices:
                priced = np.where(edge.cost < np.inf, edge.cost, self.forbidden)
                self._matrices[id(edge.cost)] = (priced, priced.T)
            rows, columns = self._matrices[id(edge.cost)]
            self.near[edge.src].append((edge.dst, rows))
            self.near[edge.dst].append((edge.src, columns))
        self.answer = [cost.copy() for cost in core.costs]
        for item, edges in enumerate(self.near):
            for other, matrix in edges:
                self.answer[item] += matrix[:, self.picks[other]]
        self.profiles = lowered.profiles
        self.held: list[list[tuple[int, int, int, Array]]] = [[] for _ in core.costs]
        self.use: list[Array] = []
        number = {profile.resource: r for r, profile in enumerate(self.profiles)}
        for usage in core.usages:
            if usage.resource in number and len(usage.nbytes) > 1:
                r = number[usage.resource]
                first, last = np.searchsorted(self.profiles[r].instants, (usage.start, usage.end))
                if first < last:
                    self.held[usage.item].append((r, int(first), int(last), usage.nbytes - usage.nbytes.min()))
        for profile in self.profiles:
            self.use.append(np.zeros(len(profile.instants)))
        spans = [(item, *span[:3]) for item, held in enumerate(self.held) for span in held]
        self._spans = np.array(spans, dtype=np.intp).reshape(-1, 4)  # item, resource, first, last
        for item, pick in enumerate(self.picks):
            for r, first, last, nbytes in self.held[item]:
                self.use[r][first:last] += nbytes[pick]

    def change(self, item: int, option: int) -> None:
        """Let `item` pick `option`."""
        old = self.picks[item]
        for other, matrix in self.near[item]:
            self.answer[other] += matrix[option] - matrix[old]
        for r, first, last, nbytes in self.held[item]:
            self.use[r][first:last] += nbytes[option] - nbytes[old]
        self.picks[item] = option

    def fitting(self, item: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Which options of the item fit, given all other picks (intervals of one item taken one at a time)."""
        fits = np.ones(len(self.answer[item]), dtype=bool)
        for r, first, last, nbytes in self.held[item]:
            room = (self.profiles[r].room[first:last] - self.use[r][first:last]).min()
            fits &= nbytes - nbytes[self.picks[item]] <= room
        return fits

    def repair(self, deadline: float) -> bool:
        """Free memory where it is most exceeded, at the least cost per byte; whether all fits in the end."""
        for _ in range(4 * len(self.picks) + 10):
            excess = [
                (float((use - p.room).max()), r)
                for r, (use, p) in enumerate(zip(self.use, self.profiles, strict=True))
                if len(use)
            ]
            worst, r = max(excess, default=(0.0, 0))
            if worst <= 0:
                return True
            position = int((self.use[r] - self.profiles[r].room).argmax())
            best: tuple[float, int, int] | None = None
            spans = self._spans
            there = (spans[:, 1] == r) & (spans[:, 2] <= position) & (position < spans[:, 3])
            for item in sorted({int(item) for item in spans[there, 0]}):
                pick = self.picks[item]
                freed = np.zeros(len(self.answer[item]))
                for resource, first, last, nbytes in self.held[item]:
                    if resource == r and first <= position < last:
                        freed += nbytes[pick] - nbytes
                if freed.max() <= 0:
                    continue
                dearer = self.answer[item] - self.answer[item][pick]
                with np.errstate(divide="ignore", invalid="ignore"):
                    rate = np.where(freed > 0, dearer / np.minimum(freed, worst), np.inf)
                option = int(rate.argmin())
                if best is None or rate[option] < best[0]:
                    best = (float(rate[option]), item, option)
            if best is None or time.monotonic() > deadline:
                return False
            self.change(best[1], best[2])
        return False

    def improve(self, deadline: float) -> None:
        """Change single items while that saves cost and fits; needs picks that fit."""
        waiting = list(range(len(self.picks)))
        queued = set(waiting)
        while waiting and time.monotonic() < deadline:
            item = waiting.pop()
            queued.discard(item)
            answer, pick = self.answer[item], self.picks[item]
            if len(answer) == 1 or answer.min() >= answer[pick]:
                continue
            allowed = np.where(self.fitting(item), answer, np.inf) if self.held[item] else answer
            option = int(allowed.argmin())
            if allowed[option] < answer[pick] - 1e-12 * abs(answer[pick]):
                self.change(item, option)
                for other, _ in self.near[item]:
                    if other not in queued:
                        queued.add(other)
                        waiting.append(other)


def improve(core: Problem, lowered: Lowered, picks: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Repair and improve `picks`; what comes back may still be infeasible."""
    neighbourhood = Neighbourhood(core, lowered, picks)
    neighbourhood.improve(deadline) if _fits(neighbourhood) else None
    if neighbourhood.repair(deadline):
        neighbourhood.improve(deadline)
    return tuple(neighbourhood.picks)


def _fits(neighbourhood: Neighbourhood) -> bool:
    pairs = zip(neighbourhood.use, neighbourhood.profiles, strict=True)
    return all(not len(use) or bool((use <= profile.room).all()) for use, profile in pairs)
