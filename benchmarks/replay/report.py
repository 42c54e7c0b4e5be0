"""Published, predicted, error: as plain text, and as a section of docs/benchmarks/replay.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations
from pathlib import Path
from statistics import median

import torch

from benchmarks.replay.predict import Prediction
from benchmarks.replay.rows import Row, Table, machine
from cost_models.whole_file import write_whole

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "replay.md"
PAGES = {"pipelines": "pipelines.md"}  # sections that stand on another page
GIB = 2**30


@dataclass(frozen=True)
class Outcome:
    """A modelled row, what was predicted of it, and the seconds that the profile gives with nothing fitted."""

    row: Row
    prediction: Prediction
    unfitted_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.row.tokens_per_s * self.row.seconds / self.prediction.seconds

    @property
    def time_error(self) -> float:
        return self.prediction.seconds / self.row.seconds - 1

    @property
    def memory_error(self) -> float | None:
        published = self.row.memory_gib
        return None if published is None else self.prediction.reserved / GIB / published - 1


Cells = Sequence[Sequence[str]]


def outcome_cells(outcomes: Iterable[Outcome]) -> list[list[str]]:
    """One line per row; times are of the fitted machine, except in the column that says so."""
    head = ["row", "machine", "model", "mesh", "batch", "recompute", "compile", "tokens/s/GPU", "predicted",
            "time error", "not fitted", "GiB", "held", "predicted", "error"]  # fmt: skip
    cells = [head]
    for one in outcomes:
        row = one.row
        is_fit = row.use == "fit"
        told = [f"{nbytes / GIB:.1f}" for nbytes in (one.prediction.held, one.prediction.reserved)]
        memory = ["-", *told, "-"]
        if row.memory_gib is not None and one.memory_error is not None:
            memory = [f"{row.memory_gib:g}", *told, percent(one.memory_error)]
        cells.append([
            row.name, row.source.hardware, f"{row.model} {row.sequence}", str(row.mesh), str(row.local_batch),
            row.recompute, "yes" if row.compile else "no", f"{row.tokens_per_s:g}", f"{one.tokens_per_s:.0f}",
            "fitted on" if is_fit else percent(one.time_error), percent(one.unfitted_s / row.seconds - 1), *memory,
        ])  # fmt: skip
    return cells


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Median and worst of the reported rows of each kind, and how far ratios between such rows of one table are off."""
    reported = [one for one in outcomes if one.row.use == "reported"]
    lines: list[str] = []
    groups = {(one.row.source.hardware, one.row.kind) for one in reported}
    for name, kind in sorted(sorted(groups), key=lambda group: group[0], reverse=True):
        errors = [one.time_error for one in reported if (one.row.source.hardware, one.row.kind) == (name, kind)]
        lines.append(f"time, {name}{kind and ', '}{kind}: {_told(errors)}")
    errors = [one.memory_error for one in outcomes if one.memory_error is not None]
    if errors:
        lines.append(f"memory: {_told(errors)}")
    for url, kind in dict.fromkeys((one.row.source.url, one.row.kind) for one in reported):
        mine = [one for one in reported if (one.row.source.url, one.row.kind) == (url, kind)]
        if len(mine) > 1:
            off, one, other = max(((_ratio_off(*pair), *pair) for pair in _pairs(mine)), key=lambda found: found[0])
            lines.append(
                f"ratios between the {len(mine)} rows of {url.rsplit('/', 1)[-1]}{kind and ', '}{kind}: at most "
                f"{100 * off:.1f} % off ({one.row.name} to {other.row.name})"
            )
    return lines


def _pairs(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    return list(combinations(outcomes, 2))


def _ratio_off(one: Outcome, other: Outcome) -> float:
    low, high = sorted((1 + one.time_error, 1 + other.time_error))
    return high / low - 1


def _told(errors: Sequence[float]) -> str:
    middle = median(abs(error) for error in errors)
    worst = max(errors, key=abs)
    return f"{len(errors)} rows, median error {100 * middle:.1f} %, worst {percent(worst)}"


def fits(table: Table, rates: Mapping[str, float]) -> list[str]:
    """What was fitted on what."""
    lines: list[str] = []
    for profile, rate in rates.items():
        hardware, row = machine(profile), table.fitted_on[profile]
        lines.append(
            f"{profile}: bfloat16 products at {rate / 1e12:.0f} TFLOP/s, fitted on the time of {row.name} "
            f"({row.source.url}); "
            f"the profile has {hardware.rate('bfloat16', 'matmul') / 1e12:.0f} from short benchmarks, "
            f"{hardware.flops_per_s['bfloat16'] / 1e12:.0f} is the peak"
        )
    return lines


def not_modelled(table: Table) -> list[list[str]]:
    cells = [["row", "model", "mesh", "tokens/s/GPU", "GiB", "why it is not modelled"]]
    for row in table.rows:
        if row.use == "not modelled":
            memory = "-" if row.memory_gib is None else f"{row.memory_gib:g}"
            cells.append(
                [row.name, f"{row.model} {row.sequence}", str(row.mesh), f"{row.tokens_per_s:g}", memory, row.why]
            )
    return cells


# --- text and page ---------------------------------------------------------------------------------------------------


def text(cells: Cells) -> str:
    """Columns in fixed widths: numbers to the right, words to the left."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    is_number = [column > 0 and cells[-1][column][:1] in "+-0123456789" for column in range(len(cells[0]))]
    lines: list[str] = []
    for line in cells:
        columns = zip(line, widths, is_number, strict=True)
        lines.append("  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in columns).rstrip())
    return "\n".join(lines) + "\n"


def markdown(cells: Cells) -> str:
    head, *body = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([head, "|" + "---|" * len(cells[0]), *body]) + "\n"


def write(section: str, body: str, seconds: float) -> None:
    """Put a generated section into its place on the page; what stands around it is written by hand."""
    begin, end = f"<!-- {section}: generated -->", f"<!-- {section}: end -->"
    path = PAGE.with_name(PAGES.get(section, PAGE.name))
    page = path.read_text(encoding="utf-8")
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{path} must have the lines {begin!r} and {end!r} once")
    before, after = page.split(begin)[0], page.split(end)[1]
    about = (
        f"`python -m benchmarks.replay {section} --write`, {date.today()}, torch {torch.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores, no GPU; {seconds:.0f} CPU seconds."
    )
    write_whole(path, f"{before}{begin}\n\n{about}\n\n{body}\n{end}{after}")


def percent(error: float) -> str:
    return f"{100 * error:+.1f} %"
