"""python -m solver FILE: solve a problem file (the contest's JSON or our own, .gz allowed), print one JSON object.

Ctrl-C ends the search early, with what a time limit at that moment would have given. Pressed twice, it ends at once.

exit status: 0 an answer, proven or with its gap; 2 bad input; 3 nothing fits; 4 no answer in time; 130 interrupted
(where there was time, the object is printed).
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, cast

from solver.backends import BACKENDS
from solver.contest import contest_problem
from solver.document import read_as
from solver.driver import solve
from solver.pressed import until_pressed
from solver.problem import Problem
from solver.solution import Solution
from solver.store import problem_from_document, solution_document

AGAIN = "python -m solver: stopping with the best so far; Ctrl-C again ends at once"
BAD_INPUT, INFEASIBLE, NO_ANSWER, INTERRUPTED = 2, 3, 4, 130


def main(arguments: list[str] | None = None) -> int:
    """The exit status, as the module's words say."""
    given = _parser().parse_args(arguments)
    try:
        problem = _problem(json.load(sys.stdin)) if given.file == "-" else read_as(given.file, _problem)
        with until_pressed(lambda: print(AGAIN, file=sys.stderr)) as stop:
            solution = solve(
                problem,
                time_limit_s=given.time_limit,
                gap=given.gap,
                threads=given.threads,
                backend=given.backend,
                stop=stop,
            )
            return _told(solution, stop())  # within, so that Ctrl-C does not tear the object apart
    except (ValueError, OSError) as error:
        print(f"python -m solver: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("python -m solver: interrupted before there was an answer", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m solver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="problem, .json or .json.gz; - reads JSON from standard input")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds of wall clock (60)")
    parser.add_argument("--gap", type=float, default=0.0, help="stop at this relative gap (0)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of the backend (1)")
    parser.add_argument("--backend", default="auto", help=f"auto, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}")
    return parser


def _told(solution: Solution, was_pressed: bool) -> int:
    """Print the answer; the exit status. What is proven is so however the search ended, all else Ctrl-C cut short."""
    if solution.explanation is not None:
        print(solution.explanation.text, file=sys.stderr)
    if was_pressed:
        print("python -m solver: interrupted; this is what was known by then", file=sys.stderr)
    print(json.dumps(solution_document(solution)), flush=True)
    if solution.status == "infeasible":
        return INFEASIBLE
    if solution.status == "optimal":
        return 0
    if was_pressed:
        return INTERRUPTED
    return NO_ANSWER if solution.picks is None else 0


def _problem(document: Any) -> Problem:
    if isinstance(document, dict) and "format" in cast(dict[str, Any], document):
        return problem_from_document(document)
    return contest_problem(document)


if __name__ == "__main__":
    sys.exit(main())
