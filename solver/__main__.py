"""python -m solver FILE: solve a problem file (the contest's JSON or our own, .gz allowed), print one JSON object.

Ctrl-C ends the search early: the best picks and bound so far are printed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

from solver.contest import contest_problem
from solver.document import read_as
from solver.driver import solve
from solver.problem import Problem
from solver.store import problem_from_document, solution_document


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 with an answer (also "infeasible"), 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m solver", description=__doc__)
    parser.add_argument("file", help="problem, .json or .json.gz; - reads JSON from standard input")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds of wall clock (60)")
    parser.add_argument("--gap", type=float, default=0.0, help="stop at this relative gap (0)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of the backend (1)")
    parser.add_argument("--backend", default="auto", help="auto, highs, lagrange, pulp_highs or exhaustive")
    given = parser.parse_args(arguments)
    try:
        problem = _problem(json.load(sys.stdin)) if given.file == "-" else read_as(given.file, _problem)
        with _until_pressed() as stop:
            solution = solve(
                problem,
                time_limit_s=given.time_limit,
                gap=given.gap,
                threads=given.threads,
                backend=given.backend,
                stop=stop,
            )
    except (ValueError, OSError) as error:
        print(f"python -m solver: {error}", file=sys.stderr)
        return 2
    if solution.explanation is not None:
        print(solution.explanation.text, file=sys.stderr)
    print(json.dumps(solution_document(solution)))
    return 0


@contextmanager
def _until_pressed() -> Generator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; pressed twice, it is the usual KeyboardInterrupt."""
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _problem(document: Any) -> Problem:
    if isinstance(document, dict) and "format" in cast(dict[str, Any], document):
        return problem_from_document(document)
    return contest_problem(document)


if __name__ == "__main__":
    sys.exit(main())
