"""What the replay of the Optimus paper says: its rows, and the ratios that the paper is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.replay.optimus import OptimusPrediction, OptimusTable, most_sequences, own_step
from benchmarks.replay.report import Cells, percent
from cost_models.hardware import Hardware

RANKS = (4, 16, 36, 64)
MOST = 0.9  # of a device's memory, for tensors
PUBLISHED_FORWARD = 1.78  # Optimus over Megatron on 64 ranks, without backward
PUBLISHED_MOST = {"optimus": 480, "megatron": 60}  # sequences in a batch, on 64 ranks


def optimus_cells(predictions: Iterable[OptimusPrediction]) -> Cells:
    """Optimus has two ends: tree broadcasts, and pipelined ones."""
    cells = [["row", "ranks", "width", "batch", "sequences/s", "predicted", "time error", "pipelined", "time error"]]
    for one in predictions:
        row, found = one.row, one.step.training
        error = row.sequences_per_s / found - 1
        other = ["-", "-"]
        if one.pipelined is not None:
            pipelined = one.pipelined.training
            other = [f"{pipelined:.2f}", percent(row.sequences_per_s / pipelined - 1)]
        cells.append([
            row.name, str(row.ranks), str(row.width), str(row.batch), f"{row.sequences_per_s:.2f}",
            f"{found:.2f}", "fitted on" if row.use == "fit" else percent(error), *other,
        ])  # fmt: skip
    return cells


def optimus_notes(table: OptimusTable, hardware: Hardware, predictions: Sequence[OptimusPrediction]) -> list[str]:
    """What was fitted on what, the ratios, the largest batches, and what the search finds there."""
    by_name = {one.row.name: one for one in predictions}
    intra, inter = hardware.links["intra"].bytes_per_s, hardware.links["inter"].bytes_per_s * hardware.ranks_per_node
    lines = [
        f"{table.hardware}: {intra / 1e9:.2f} GB/s inside a node, fitted on {table.fitted['links.intra.bytes_per_s']}; "
        f"{inter / 1e9:.2f} GB/s of a node, fitted on {table.fitted['links.inter.bytes_per_s']}; products at "
        f"{hardware.rate('float32', 'matmul') / 1e12:.2f} TFLOP/s, 0.7 of the peak, assumed",
    ]
    for ranks in RANKS:
        if found := _ratio(by_name, ranks, "training"):
            one, other = (by_name[f"{scheme}-{ranks}"].row.sequences_per_s for scheme in ("optimus", "megatron"))
            lines.append(f"Optimus over Megatron on {ranks} ranks: published {one / other:.2f}, predicted {found}")
    if found := _ratio(by_name, RANKS[-1], "forward"):
        lines.append(
            f"the forward pass by itself on {RANKS[-1]} ranks: published {PUBLISHED_FORWARD}, predicted {found}"
        )
        lines += [_batches(table, hardware, by_name), *_own(table, hardware, by_name)]
    return lines


def _ratio(by_name: Mapping[str, OptimusPrediction], ranks: int, part: str) -> str:
    """Of sequences per second, with both kinds of broadcasts; nothing where a row is missing."""
    one, other = by_name.get(f"optimus-{ranks}"), by_name.get(f"megatron-{ranks}")
    if one is None or other is None or one.pipelined is None:
        return ""
    below = getattr(other.step, part)
    tree, pipelined = (getattr(step, part) / below for step in (one.step, one.pipelined))
    return f"{tree:.2f} with tree broadcasts, {pipelined:.2f} pipelined"


def _batches(table: OptimusTable, hardware: Hardware, by_name: Mapping[str, OptimusPrediction]) -> str:
    memory = MOST * hardware.tiers["hbm"].capacity_bytes
    most = {
        scheme: most_sequences(by_name[f"{scheme}-{RANKS[-1]}"], table, memory) for scheme in ("optimus", "megatron")
    }
    told = "; ".join(f"{scheme} published {PUBLISHED_MOST[scheme]}, predicted {most[scheme]:.0f}" for scheme in most)
    published = PUBLISHED_MOST["optimus"] / PUBLISHED_MOST["megatron"]
    return (
        f"largest batch on {RANKS[-1]} ranks, tensors in {MOST:g} of the memory: {told}; ratio published "
        f"{published:.1f}, predicted {most['optimus'] / most['megatron']:.1f}"
    )


def _own(table: OptimusTable, hardware: Hardware, by_name: Mapping[str, OptimusPrediction]) -> list[str]:
    lines: list[str] = []
    for ranks in RANKS:
        if (one := by_name.get(f"optimus-{ranks}")) is None or one.pipelined is None:
            continue
        step, plan = own_step(one.row, table, hardware)
        lines.append(
            f"the plan of the search on {plan.mesh}, batch {one.row.batch}: {step.training:.2f} sequences/s, "
            f"{step.training / max(one.step.training, one.pipelined.training):.2f} times Optimus at its best, "
            f"{step.training / by_name[f'megatron-{ranks}'].step.training:.2f} times Megatron"
        )
    return lines
