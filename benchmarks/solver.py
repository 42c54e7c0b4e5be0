"""Cost, certified gap and wall time of the solver, over a folder of contest files or on made-up problems of our shape.

    python -m benchmarks.solver ../shared/iopddl --time-limit 60
    python -m benchmarks.solver --shape 3000x6 --shape 400x36

A made-up problem is a training step: a chain of forward items, a mirrored chain of backward items, an edge from each
forward item to its mirror, a few skips, matrices shared by repeated layers. It is solved with ample memory, then with
its limit between the least and the unlimited peak.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from solver import Edge, Problem, Usage, evaluate, solve
from solver.contest import read_contest

COLUMNS = (("items", 7), ("core", 7), ("pairs", 10), ("status", 11), ("cost", 16), ("gap", 10), ("read s", 8), ("s", 9))
HEADER = f"{'problem':<22}" + "".join(f"{name:>{width}}" for name, width in COLUMNS)


def training_step(items: int, options: int, seed: int = 0, kinds: int = 12) -> Problem:
    """See the module. Seconds and bytes of the order of a real step; `kinds` different operators repeat."""
    rng = np.random.default_rng(seed)
    half = items // 2
    pool = [rng.choice([0.0, 1.0], (options, options), p=[0.3, 0.7]) for _ in range(kinds)]
    reshard = [1e-4 * hop * rng.uniform(0.5, 2.0, (options, options)) for hop in pool]
    unary = [1e-3 * rng.uniform(0.5, 2.0, options) for _ in range(kinds)]
    held = [1e8 * 2.0 ** rng.integers(-3, 1, options) for _ in range(kinds)]
    costs, edges, usages = [], [], []
    for item in range(items):
        kind = (item if item < half else items - 1 - item) % kinds
        costs.append(unary[kind])
        if item:
            edges.append(Edge(item - 1, item, reshard[kind]))
        if item < half:
            usages.append(Usage(item, "hbm", item, items - item, held[kind]))  # until its mirror has run
        elif items - 1 - item < half:
            edges.append(Edge(items - 1 - item, item, reshard[(kind + 1) % kinds]))
        if item >= 4 and item % 8 == 0:
            edges.append(Edge(item - 4, item, reshard[(kind + 2) % kinds]))  # a residual
    return Problem(tuple(costs), tuple(edges), tuple(usages))


def report(name: str, problem: Problem, time_limit_s: float, gap: float, read_s: float = 0.0) -> tuple[int, ...] | None:
    """Solve and print one line; the picks."""
    solution = solve(problem, time_limit_s=time_limit_s, gap=gap)
    stats = solution.stats
    print(
        f"{name:<22}{len(problem.costs):>7}{stats.get('core_items', 0):>7.0f}{stats.get('core_pairs', 0):>10.0f}"
        f"{solution.status:>11}{solution.cost:>16.9g}{solution.gap:>10.2g}{read_s:>8.2f}{solution.seconds:>9.2f}",
        flush=True,
    )
    return solution.picks


def report_shape(shape: str, time_limit_s: float, gap: float) -> None:
    """A made-up problem with ample memory, then with less and less of it."""
    items, options = (int(part) for part in shape.split("x"))
    problem = training_step(items, options)
    picks = report(f"{shape} ample", problem, time_limit_s, gap)
    if picks is None:
        return
    peak = evaluate(problem, picks).peak["hbm"]
    least = evaluate(problem, [int(usage.nbytes.argmin()) for usage in problem.usages] + [0] * (items - items // 2))
    for share in (0.8, 0.5, 0.2):
        limit = least.peak["hbm"] + share * (peak - least.peak["hbm"])
        report(f"{shape} {share:.0%} of peak", replace(problem, limits={"hbm": limit}), time_limit_s, gap)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="folder of contest files, .json or .json.gz")
    parser.add_argument("--only", default="", help="letters of the instances to run, such as ACG")
    parser.add_argument("--shape", action="append", default=[], help="made-up problem, ITEMSxOPTIONS")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S")
    parser.add_argument("--gap", type=float, default=0.0, help="stop at this relative gap (0)")
    given = parser.parse_args()
    print(HEADER)
    for path in sorted(given.folder.glob("*.json*")) if given.folder else []:
        name = path.name.split(".")[0]
        if not given.only or name[-1] in given.only:
            began = time.monotonic()
            problem = read_contest(path)
            report(name, problem, given.time_limit, given.gap, time.monotonic() - began)
    for shape in given.shape:
        report_shape(shape, given.time_limit, given.gap)
    return 0


if __name__ == "__main__":
    sys.exit(main())
