"""Problems and solutions as JSON of our own: every resource, interval and usage on edges, inf written as null.

Arrays that several edges share are written once and shared again after reading. Files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from solver.document import cut, fields, listed, numbers, read_as, whole
from solver.problem import Array, Edge, EdgeUsage, Problem, Usage
from solver.solution import Solution

FORMAT = "autopar-problem-1"


def problem_document(problem: Problem) -> dict[str, Any]:
    """Plain dicts and lists."""
    number: dict[int, int] = {}
    matrices: list[Any] = []
    for edge in problem.edges:
        if id(edge.cost) not in number:
            number[id(edge.cost)] = len(matrices)
            matrices.append([_nullable(row) for row in edge.cost])
    return {
        "format": FORMAT,
        "names": list(problem.names),
        "costs": [_nullable(cost) for cost in problem.costs],
        "matrices": matrices,
        "edges": [[edge.src, edge.dst, number[id(edge.cost)]] for edge in problem.edges],
        "usages": [[u.item, u.resource, u.start, u.end, u.nbytes.tolist()] for u in problem.usages],
        "edge_usages": [[u.edge, u.resource, u.start, u.end, u.nbytes.tolist()] for u in problem.edge_usages],
        "limits": dict(problem.limits),
    }


def problem_from_document(document: Any) -> Problem:
    """The problem again. Raises ValueError naming what is wrong."""
    if not isinstance(document, dict) or cast(dict[str, Any], document).get("format") != FORMAT:
        raise ValueError(f"this is not a problem file: its field 'format' is not {FORMAT!r}")
    body = fields(document, "the problem file", _NEEDS, _MAY)
    shared = enumerate(listed(body["matrices"], "matrices"))
    matrices = [_matrix(matrix, f"matrices[{k}]") for k, matrix in shared]
    return Problem(
        costs=tuple(_costs(cost, f"costs[{k}]") for k, cost in enumerate(listed(body["costs"], "costs"))),
        edges=tuple(
            Edge(whole(src, what), whole(dst, what), _number_of(k, matrices, what))
            for what, (src, dst, k) in _rows(body["edges"], "edges", 3)
        ),
        usages=tuple(
            Usage(*_held(what, item, resource, start, end), numbers(held, f"bytes of {what}"))
            for what, (item, resource, start, end, held) in _rows(body["usages"], "usages", 5)
        ),
        edge_usages=tuple(
            EdgeUsage(*_held(what, edge, resource, start, end), _matrix(held, f"bytes of {what}", forbids=False))
            for what, (edge, resource, start, end, held) in _rows(body.get("edge_usages", []), "edge_usages", 5)
        ),
        limits=_limits(body["limits"]),
        names=tuple(_text(name, "a name") for name in listed(body.get("names", []), "names")),
    )


_NEEDS = ("format", "costs", "matrices", "edges", "usages", "limits")
_MAY = ("edge_usages", "names")


def _rows(value: Any, what: str, length: int) -> Iterator[tuple[str, list[Any]]]:
    for number, row in enumerate(listed(value, what)):
        if len(parts := listed(row, f"{what}[{number}]")) != length:
            raise ValueError(f"{what}[{number}] has {len(parts)} entries, not {length}")
        yield f"{what}[{number}]", parts


def _held(what: str, holder: Any, resource: Any, start: Any, end: Any) -> tuple[int, str, int, int]:
    return whole(holder, what), _text(resource, what), whole(start, what), whole(end, what)


def _number_of(number: Any, matrices: list[Array], what: str) -> Array:
    if not 0 <= (place := whole(number, what)) < len(matrices):
        raise ValueError(f"{what} has costs number {place}, but there are {len(matrices)} matrices")
    return matrices[place]


def _matrix(rows: Any, what: str, forbids: bool = True) -> Array:
    read = _costs if forbids else numbers
    made = [read(row, f"row {k} of {what}") for k, row in enumerate(listed(rows, what))]
    if len({len(row) for row in made}) != 1:
        raise ValueError(f"{what} has no rows, or rows of different lengths")
    return np.array(made)


def _costs(values: Any, what: str) -> Array:
    """null forbids."""
    return numbers([np.inf if value is None else value for value in listed(values, what)], what, most=np.inf)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{what} is {cut(value)}, not a text that can be shown")
    return value


def _limits(limits: Any) -> dict[str, float]:
    if not isinstance(limits, dict):
        raise ValueError(f"limits is {cut(limits)}, not an object")
    told = cast(dict[str, Any], limits)
    return {_text(name, "a limit"): float(numbers([value], "limits", most=np.inf)[0]) for name, value in told.items()}


def _nullable(values: Array) -> list[float | None]:
    return [None if value == np.inf else value for value in values.tolist()]


def write_problem(problem: Problem, path: str | Path) -> None:
    """Write the problem; compressed if the name ends in .gz."""
    write_whole(path, json.dumps(problem_document(problem), allow_nan=False).encode())


def read_problem(path: str | Path) -> Problem:
    """Read what `write_problem` wrote. Raises ValueError naming what is wrong, OSError."""
    return read_as(path, problem_from_document)


def solution_document(solution: Solution) -> Mapping[str, Any]:
    """What `python -m solver` prints: numbers that are not finite become null.

    `price_per_gib`: the cost that one more GiB of a resource would save at first, by the prices of its binding limits.
    """

    def finite(value: float) -> float | None:
        return value if abs(value) < np.inf else None

    return {
        "status": solution.status,
        "cost": finite(solution.cost),
        "bound": finite(solution.bound),
        "gap": finite(solution.gap),
        "seconds": round(solution.seconds, 3),
        "price_per_gib": {
            name: sum(price for (resource, _), price in solution.prices.items() if resource == name) * 2**30
            for name in sorted({resource for resource, _ in solution.prices})
        },
        "choice": [] if solution.picks is None else list(solution.picks),
    }


def write_whole(path: str | Path, content: bytes) -> None:
    """Write to a temporary file beside the target, then rename: no reader ever sees half a file."""
    path = Path(path)
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
