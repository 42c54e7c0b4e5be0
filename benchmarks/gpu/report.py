"""docs/benchmarks/gpu.md out of what the stages found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.gpu.stage import Row

DONE, SKIPPED, FAILED, WRONG = "done", "skipped", "failed", "wrong"
HEAD = """# On a GPU

`python -m benchmarks.gpu`, whose stages are in the order of their worth; `--nproc 8` runs those of a node. "off" is the
largest difference in units of the largest entry of what was wanted. This page is written by the command, which stops at
the first wrong number.
"""


def report(state: Mapping[str, Any], order: Sequence[str]) -> str:
    return "\n".join(_lines(state, order)) + "\n"


def _lines(state: Mapping[str, Any], order: Sequence[str]) -> Iterator[str]:
    yield HEAD
    yield from ("| stage | | machine | date | seconds |", "|---|---|---|---|--:|")
    for name in order:
        if found := state.get(name):
            told = f"{found['machine']} | {found['date']} | {found['seconds']:.0f}"
            yield f"| [{name}](#{name.replace('.', '')}) | {found['status']} | {told} |"
        else:
            yield f"| {name} | not run | | | |"
    for name in order:
        if found := state.get(name):
            yield f"\n## {name}\n"
            reason = f" {found['status'].capitalize()}: {found['reason']}" if found["reason"] else ""
            yield f"{found['shows'][0].upper()}{found['shows'][1:]}.{reason}"
            yield from _tables(found["rows"])


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    """One for each run of rows with the same names."""
    for names, group in groupby(rows, key=lambda row: tuple(row)):
        yield ""
        yield f"| {' | '.join(names)} |"
        yield f"|{'---|' * len(names)}"
        for row in group:
            yield f"| {' | '.join(_cell(row[name]) for name in names)} |"


def _cell(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
    return " ".join(text.split()).replace("|", "/")
