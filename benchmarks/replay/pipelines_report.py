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
    """A line for each row. `held`: the most that tensors of a rank take; `for backward`: of it what layers keep;
    `fits`: published, and predicted of what is held (and beside tensors, where that is fitted).
    """
    cells = [["row", "mesh", "schedule", "micro-batches", "recompute", "published", "unit", "predicted", "time error",
              "GB", "predicted GB", "held GB", "for backward GiB", "fits"]]  # fmt: skip
    for one in found:
        row = one.row
        is_fit = row.name in table.fitted.values()
        error, rate = "-", "-"
        if row.rate is not None and row.seconds is not None and one.error is not None:
            rate = f"{row.rate * (one.seconds / row.seconds) ** (1 if row.unit == 's' else -1):.3g}"
            error = "fitted on" if is_fit else f"{100 * one.error:+.1f} %"
        cells.append([
            row.name, str(row.mesh), f"{row.schedule} {row.chunks}", f"{row.micro_batches} x {row.micro}",
            row.recompute, "-" if row.rate is None else f"{row.rate:g}", row.unit, rate, error,
            "-" if row.bytes is None else f"{row.bytes / GB:.1f}",
            "fitted on" if row.name in table.beside.values() else f"{one.bytes / GB:.1f}",
            f"{one.held / GB:.1f}", f"{one.activations / GIB:.2f}", _label(one),
        ])  # fmt: skip
    return cells


def _label(one: Predicted) -> str:
    said = "yes" if one.row.fits else "no"
    return said if one.fits == one.row.fits else f"{said}; predicted {'yes' if one.fits else 'no'}"


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
        reported = [one.error for one in mine if one.error is not None and one.row.name not in table.fitted.values()]
        if reported:
            lines.append(
                f"time, {source}: {len(reported)} rows, median error {100 * median(map(abs, reported)):.1f} %, worst "
                f"{100 * max(reported, key=abs):+.1f} % ({about['url']}, {about['about']})"
            )
    lines += _memories(table, found)
    lines += _labels(found)
    lines += _orders(found)
    lines += _between_schedules(found)
    return lines


def _memories(table: PipelineTable, found: Sequence[Predicted]) -> list[str]:
    lines: list[str] = []
    beside = {one.row.source: one.beside for one in found if one.beside}
    for source, bytes_ in beside.items():
        lines.append(f"{source}: {bytes_ / GB:.1f} GB beside tensors, fitted on {table.beside[source]}")
    for source in table.sources:
        off = [
            one.bytes / one.row.bytes - 1 for one in found
            if one.row.source == source and one.row.bytes is not None and one.row.name not in table.beside.values()
        ]  # fmt: skip
        if off:
            lines.append(f"memory, {source}: {len(off)} rows, median error "
                         f"{100 * median(map(abs, off)):.1f} %, worst {100 * max(off, key=abs):+.1f} %")  # fmt: skip
    return lines


def _labels(found: Sequence[Predicted]) -> list[str]:
    """How many of the runs that fitted, and of those that did not, are predicted to."""
    lines: list[str] = []
    for fits, words in ((True, "fitted"), (False, "did not fit")):
        mine = [one for one in found if one.row.fits == fits]
        if mine:
            wrong = [one.row.name for one in mine if one.fits != fits]
            told = f"; not of {', '.join(wrong)}" if wrong else ""
            lines.append(f"labels: {len(mine) - len(wrong)} of {len(mine)} runs that {words} are predicted to{told}")
    return lines


def _orders(found: Sequence[Predicted]) -> list[str]:
    """Whether flops per second and GPU come in the published order, of sources that have rows of several sizes."""
    lines: list[str] = []
    for source in ("sc21", "llama3", "titan-405b", "bloom-fp16", "bloom-bf16"):
        mine = [
            (one.row.flops / one.row.seconds / one.row.mesh.ranks, one.row.flops / one.seconds / one.row.mesh.ranks)
            for one in found if one.row.source == source and one.row.seconds is not None
        ]  # fmt: skip
        if len(mine) > 1:
            rank = float(spearmanr(*zip(*mine, strict=True))[0])
            lines.append(f"order, {source}: rank correlation of {len(mine)} rows {rank:.2f}")
    return lines


def _between_schedules(found: Sequence[Predicted]) -> list[str]:
    off: list[tuple[float, str, str]] = []
    for one, other in combinations([one for one in found if one.row.source == "zero-bubble"], 2):
        if one.row.name.split("-")[:3] == other.row.name.split("-")[:3]:
            assert one.error is not None and other.error is not None
            low, high = sorted((1 + one.error, 1 + other.error))
            off.append((high / low - 1, one.row.name, other.row.name))
    if not off:
        return []
    worst = max(off)
    return [
        f"ratios between schedules of one model and number of micro-batches: {len(off)}, median "
        f"{100 * median(entry[0] for entry in off):.1f} % off, worst {100 * worst[0]:.1f} % ({worst[1]} to {worst[2]})"
    ]
