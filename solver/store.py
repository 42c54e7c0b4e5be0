"""Problems and solutions as JSON of our own: every resource, interval and usage on edges, inf written as null.

Arrays that several edges share are written once and shared again after reading. Files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

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
    body = cast(dict[str, Any], document) if isinstance(document, dict) else {}
    if body.get("format") != FORMAT:
        raise ValueError(f"this is not a problem file: its field 'format' is not {FORMAT!r}")
    if missing := [name for name in ("costs", "matrices", "edges", "usages", "limits") if name not in body]:
        raise ValueError(f"the problem file has no field {missing[0]!r}")
    try:
        matrices: list[Array] = [_array(matrix) for matrix in cast(list[Any], body["matrices"])]
        return Problem(
            costs=tuple(_array(cost) for cost in cast(list[Any], body["costs"])),
            edges=tuple(Edge(src, dst, matrices[int(k)]) for src, dst, k in body["edges"]),
            usages=tuple(Usage(u, r, start, end, np.array(held)) for u, r, start, end, held in body["usages"]),
            edge_usages=tuple(
                EdgeUsage(e, r, start, end, np.array(held)) for e, r, start, end, held in body.get("edge_usages", [])
            ),
            limits=body["limits"],
            names=tuple(body.get("names", ())),
        )
    except (TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"the problem file is malformed: {error}") from error


def _nullable(values: Array) -> list[float | None]:
    return [None if value == np.inf else value for value in values.tolist()]


def _array(values: Any) -> Array:
    array = np.array(values, dtype=np.float64)  # null becomes nan
    return np.where(np.isnan(array), np.inf, array)


def write_problem(problem: Problem, path: str | Path) -> None:
    """Write the problem; compressed if the name ends in .gz."""
    write_whole(path, json.dumps(problem_document(problem), allow_nan=False).encode())


def read_document(path: str | Path) -> Any:
    """Parsed JSON of a .json or .json.gz file. Raises ValueError naming the file, OSError."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error


def read_problem(path: str | Path) -> Problem:
    """Read what `write_problem` wrote. Raises ValueError naming what is wrong, OSError."""
    return problem_from_document(read_document(path))


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
