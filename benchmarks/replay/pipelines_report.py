"""Published, predicted, error of runs in pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

from scipy.stats import spearmanr

from benchmarks.replay.pipelines import PipelineTable, Predicted
from benchmarks.replay.rows import machine

GIB, GB = 2**30, 1e9


def pipeline_cells(table: PipelineTable, found: Sequence[Predicted]) -> list[list[str]]:
    """A line for each row. `held`: the most that tensors of a rank take; `for backward`: of it what layers keep."""
    cells = [["row", "mesh", "schedule", "micro-batches", "recompute", "published", "unit", "predicted", "time error",
              "GB", "held GB", "for backward GiB"]]  # fmt: skip
    for one in found:
        row = one.row
        is_fit = row.name in table.fitted.values()
        rate = row.rate * (one.seconds / row.seconds) ** (1 if row.unit == "s" else -1)
        cells.append([
            row.name, str(row.mesh), f"{row.schedule} {row.chunks}", f"{row.micro_batches} x {row.micro}",
            row.recompute, f"{row.rate:g}", row.unit, f"{rate:.3g}",
            "fitted on" if is_fit else f"{100 * one.error:+.1f} %", "-" if row.gb is None else f"{row.gb:g}",
            f"{one.held / GB:.1f}", f"{one.activations / GIB:.2f}",
        ])  # fmt: skip
    return cells


def pipeline_notes(table: PipelineTable, found: Sequence[Predicted], rates: Mapping[str, float]) -> list[str]:
    """What was fitted, errors by source, memory, and ratios between schedules."""
    lines: list[str] = []
    for source, rate in rates.items():
        one = next(one.row for one in found if one.row.source == source)
        lines.append(
            f"{source}: {one.dtype} products at {rate / 1e12:.0f} TFLOP/s, fitted on {table.fitted[source]}; "
            f"{one.hardware} has {machine(one.hardware).rate(one.dtype, 'matmul') / 1e12:.0f}"
        )
    for source, about in table.sources.items():
        mine = [one for one in found if one.row.source == source]
        reported = [one.error for one in mine if one.row.name not in table.fitted.values()]
        if reported:
            lines.append(
                f"time, {source}: {len(reported)} rows, median error {100 * median(map(abs, reported)):.1f} %, worst "
                f"{100 * max(reported, key=abs):+.1f} % ({about['url']}, {about['about']})"
            )
    for source in dict.fromkeys(one.row.source for one in found if one.row.gb is not None):
        memory = [
            one.held / GB / one.row.gb - 1 for one in found if one.row.source == source and one.row.gb is not None
        ]
        worst = max(memory, key=abs)
        lines.append(f"memory, {source}: {len(memory)} rows, median error "
                     f"{100 * median(map(abs, memory)):.1f} %, worst {100 * worst:+.1f} %")  # fmt: skip
    lines += _orders(found)
    lines += _between_schedules(found)
    return lines


def _orders(found: Sequence[Predicted]) -> list[str]:
    """Whether rates come in the published order, where a source has rows of several sizes."""
    lines: list[str] = []
    for source in ("sc21", "llama3", "titan-405b"):
        mine = [one for one in found if one.row.source == source]
        if len(mine) > 1:
            published, predicted = [one.row.rate for one in mine], [one.row.rate / (1 + one.error) for one in mine]
            rank = float(spearmanr(published, predicted)[0])
            lines.append(f"order, {source}: rank correlation of {len(mine)} rows {rank:.2f}")
    return lines


def _between_schedules(found: Sequence[Predicted]) -> list[str]:
    off: list[tuple[float, str, str]] = []
    for one, other in combinations([one for one in found if one.row.source == "zero-bubble"], 2):
        if one.row.name.split("-")[:3] == other.row.name.split("-")[:3]:
            low, high = sorted((1 + one.error, 1 + other.error))
            off.append((high / low - 1, one.row.name, other.row.name))
    if not off:
        return []
    worst = max(off)
    return [
        f"ratios between schedules of one model and number of micro-batches: {len(off)}, median "
        f"{100 * median(entry[0] for entry in off):.1f} % off, worst {100 * worst[0]:.1f} % ({worst[1]} to {worst[2]})"
    ]
