"""Backends: one file each, found by its name, imported only when used.

A backend is a module with one function

    run(core: Problem, budget: Budget) -> Outcome

A core is a problem after normalising: no self loops, at most one edge per pair of items, no +inf in item costs, and
items with a single option have no edges. To add a backend: add its file, its name to BACKENDS; tests try it then.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from solver.problem import Problem
from solver.solution import Outcome, Prices

QUICK_PAIRS = 20_000  # of options, above which a linear program takes seconds rather than one

BACKENDS = ("exhaustive", "highs", "lagrange", "pulp_highs")


@dataclass(frozen=True, slots=True)
class Budget:
    """What a backend may spend: wall clock until `deadline` (of time.monotonic), relative gap to stop at, threads.

    `start` are picks to begin from, `prices` prices of memory, if any are known. `nodes`: at most so many nodes of a
    search tree, which ends a search at the same place on every run; None: no such limit. `generations`: likewise of a
    race for better picks. `quick`: only what takes some
    seconds, see `solver.solve`. `stop` says, whenever asked, whether to stop now with what is known.
    """

    deadline: float
    gap: float = 0.0
    threads: int = 1
    start: tuple[int, ...] | None = None
    prices: Prices = field(default_factory=dict[tuple[str, int], float])
    nodes: int | None = None
    generations: int | None = None
    quick: bool = False
    stop: Callable[[], bool] | None = None

    def left_s(self) -> float:
        """Seconds until the deadline, never negative; none once it is time to stop."""
        if self.stop is not None and self.stop():
            return 0.0
        return max(0.0, self.deadline - time.monotonic())


def run(backend: str, core: Problem, budget: Budget) -> Outcome:
    """Solve `core` with the backend of that name. Raises ValueError for an unknown name."""
    if backend not in BACKENDS:
        raise ValueError(f"no backend {backend!r}; known backends: auto, {', '.join(BACKENDS)}")
    module = importlib.import_module(f"solver.backends.{backend}")
    return cast(Outcome, module.run(core, budget))
