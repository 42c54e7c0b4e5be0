"""Cost, certified gap and wall time of the solver, over a folder of contest files or on made-up problems of our shape.

    python -m benchmarks.solver ../shared/iopddl --contest --threads 2 --write docs/benchmarks/solver.md
    python -m benchmarks.solver ../shared/iopddl --only AG --time-limit 60
    python -m benchmarks.solver --shape 3000x6 --shape 400x36

A made-up problem is a training step: a chain of forward items, a mirrored chain of backward items, an edge from each
forward item to its mirror, a few skips, matrices shared by repeated layers. It is solved with ample memory, then with
its limit between the least and the unlimited peak.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np

from solver import Edge, Problem, Solution, Usage, evaluate, solve
from solver.contest import read_contest
from solver.store import write_whole

# Of the eight public instances of google/iopddl (ASPLOS 2025): seconds allowed, the best team's cost, the best cost and
# the best lower bound published by anyone with any time and machine (S: Gurobi, 25.7 h; V: Gurobi, 2,767 s).
CONTEST = {
    "A": (60, 6_548_641_531, 6_548_553_650, 6_513_812_172),
    "C": (60, 84_102_445_244, 84_102_392_579, 82_509_087_987),
    "G": (120, 217_039, 217_039, 216_931),
    "K": (180, 2_274_276_676, 2_242_635_784, 2_065_623_588),
    "M": (180, 49_928_460_991, 49_928_157_537, 49_407_421_919),
    "P": (240, 662_197_407_330, 651_833_115_436, 616_246_285_727),
    "S": (240, 1_534_613_444, 1_511_377_982, 1_511_240_136),
    "V": (300, 1_632_051, 1_617_084, 1_617_084),
}
COLUMNS = ("problem", "nodes", "core", "core pairs", "status", "cost", "best known / ours", "team / ours", "bound",
           "gap", "published bound", "limit s", "s")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what was solved, how well, in what time."""

    name: str
    items: int
    time_limit_s: float
    solution: Solution
    seconds: float  # with reading the file

    @property
    def letter(self) -> str:
        """The contest's name of the instance, if it is one."""
        return self.name[-1] if "iopddl" in self.name else ""

    def cells(self) -> tuple[str, ...]:
        """The text of each column."""
        stats, solution = self.solution.stats, self.solution
        known = CONTEST.get(self.letter)
        share = [f"{known[k] / solution.cost:.5f}" if known else "" for k in (2, 1)]
        return (
            self.name.removeprefix("asplos-2025-iopddl-"),
            str(self.items),
            f"{stats.get('core_items', 0):.0f}",
            f"{stats.get('core_pairs', 0):.0f}",
            solution.status,
            f"{solution.cost:.12g}",
            *share,
            f"{solution.bound:.12g}",
            f"{solution.gap:.2g}",
            str(known[3]) if known else "",
            f"{self.time_limit_s:g}",
            f"{self.seconds:.1f}",
        )


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


def report(name: str, problem: Problem, given: argparse.Namespace, began: float, time_limit_s: float) -> Row:
    """Solve and print one line."""
    left_s = time_limit_s - (time.monotonic() - began)
    solution = solve(problem, time_limit_s=left_s, gap=given.gap, threads=given.threads)
    row = Row(name, len(problem.costs), time_limit_s, solution, time.monotonic() - began)
    print(" | ".join(f"{cell:>{len(column)}}" for cell, column in zip(row.cells(), COLUMNS, strict=True)), flush=True)
    return row


def report_shape(shape: str, given: argparse.Namespace) -> list[Row]:
    """A made-up problem with ample memory, then with less and less of it."""
    items, options = (int(part) for part in shape.split("x"))
    problem = training_step(items, options)
    rows = [report(f"{shape} ample", problem, given, time.monotonic(), given.time_limit)]
    picks = rows[0].solution.picks
    if picks is None:
        return rows
    peak = evaluate(problem, picks).peak["hbm"]
    least = evaluate(problem, [int(usage.nbytes.argmin()) for usage in problem.usages] + [0] * (items - items // 2))
    for share in (0.8, 0.5, 0.2):
        limit = least.peak["hbm"] + share * (peak - least.peak["hbm"])
        tight = replace(problem, limits={"hbm": limit})
        rows.append(report(f"{shape} {share:.0%} of peak", tight, given, time.monotonic(), given.time_limit))
    return rows


def report_folder(folder: Path, given: argparse.Namespace) -> list[Row]:
    """Every contest file in the folder; time counts from before the file is read."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.json*")):
        name = path.name.split(".")[0]
        if not given.only or name[-1] in given.only:
            known = CONTEST.get(name[-1]) if given.contest else None
            began = time.monotonic()
            rows.append(report(name, read_contest(path), given, began, known[0] if known else given.time_limit))
    return rows


def markdown(rows: list[Row], given: argparse.Namespace) -> str:
    """The table with machine, date and command, and the mean that the contest scores."""
    lines = [
        "# The solver on public problems",
        "",
        f"`python -m benchmarks.solver {' '.join(sys.argv[1:])}`, {date.today()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {given.threads} threads. Seconds are wall clock, "
        "with reading the file.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
    ]
    known = [CONTEST[row.letter][2] / row.solution.cost for row in rows if row.letter in CONTEST]
    if known:
        lines += ["", f"Mean of best known / ours over {len(known)}: {sum(known) / len(known):.5f}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="folder of contest files, .json or .json.gz")
    parser.add_argument("--only", default="", help="letters of the instances to run, such as ACG")
    parser.add_argument("--contest", action="store_true", help="the contest's time limit for each instance")
    parser.add_argument("--shape", action="append", default=[], help="made-up problem, ITEMSxOPTIONS")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--gap", type=float, default=0.0, help="stop at this relative gap (0)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as markdown, too")
    given = parser.parse_args()
    print(" | ".join(COLUMNS))
    rows = report_folder(given.folder, given) if given.folder else []
    for shape in given.shape:
        rows += report_shape(shape, given)
    text = markdown(rows, given)
    print(text.splitlines()[-1])
    if given.write:
        write_whole(given.write, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
