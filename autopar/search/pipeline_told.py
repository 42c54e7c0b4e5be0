"""A pipeline in text, and as one JSON object."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from autopar.ir.graph import Node
from autopar.ir.precision import told
from autopar.ir.words import count_of
from autopar.ir.work import VIEWS
from autopar.pipeline import in_flight_of_stages
from autopar.plan.axes import words
from autopar.plan.explain import saving
from autopar.plan.listing import columns
from autopar.plan.reading import is_weighted, ms, parameters_of, percent, weights_of, wrapped
from autopar.plan.tell import human
from autopar.plan.utilisation import Utilisation, utilisation
from autopar.rewrite.stages import forward_order
from autopar.search.pipeline_value import PipelineValue
from cost_models.reserve import Room

HEADINGS = "stage", "rank", "parameters", "forward", "backward", "sends", "in flight", "peak", "modules"
MAX_NOTES = 4


def explain(pipeline: PipelineValue, limit: float | None = None) -> str:
    """What it is and takes, and a line for each stage; all times are simulated. `limit`: bytes of tensors per rank."""
    whole = pipeline.whole
    lines = [*wrapped(
        f"mesh {pipeline.mesh} ({count_of(pipeline.mesh.ranks, 'rank')}) on {whole.hardware}, optimizer "
        f"{whole.optimizer}"
    )]  # fmt: skip
    if casts := told(whole.graph):
        lines += wrapped(f"precision: {casts}")
    lines += [*_figures(pipeline, limit)]
    for line in utilisation_of(pipeline).told():
        lines += wrapped(line)
    lines += [*saving(whole), *words(whole), *columns([HEADINGS, *_rows(pipeline)])]
    lines += [
        "  forward, backward: of one micro-batch; sends: of one micro-batch, one way, each device of the stage;",
        "  in flight: most micro-batches of which a stage holds what backward needs; peak: of the rank, with all its",
        "  stages",
    ]
    for name, stages in tied_in(pipeline).items():
        lines += wrapped(f"tied: {name} is in stages {', '.join(map(str, stages))}; its gradients are added up")
    for note in whole.notes[:MAX_NOTES]:
        lines += wrapped(f"note: {note}")
    return "\n".join(part for line in lines for part in wrapped(line, "    ")) + "\n"


def summary(pipeline: PipelineValue) -> str:
    """The one line that says how good it is."""
    return (
        f"step time {ms(pipeline.step_seconds)}, simulated: {_counted(pipeline)}, "
        f"{count_of(pipeline.schedule.micro_batches, 'micro-batch', 'micro-batches')}, schedule "
        f"{pipeline.schedule.name}, bubble {100 * pipeline.bubble:.1f} %, memory peak {human(pipeline.peak_bytes)} per "
        "rank"
    )


def _counted(pipeline: PipelineValue) -> str:
    stages, ranks = pipeline.schedule.stages, pipeline.schedule.ranks
    return count_of(stages, "stage") + ("" if stages == ranks else f" on {count_of(ranks, 'rank')}")


def _figures(pipeline: PipelineValue, limit: float | None) -> Iterator[str]:
    yield from wrapped(summary(pipeline))
    played = pipeline.played.makespan
    yield (
        f"  the schedule {ms(played)}, sums of gradients and updates behind it {ms(pipeline.step_seconds - played)}; "
        f"no order of these stages takes less than {ms(pipeline.least_seconds)}"
    )
    if limit is not None:
        yield f"  {percent(pipeline.peak_bytes, limit)} of the {human(limit)} that tensors may take on each device"


def utilisation_of(pipeline: PipelineValue) -> Utilisation:
    """What the simulated step makes of all ranks."""
    return replace(utilisation(pipeline.whole), seconds=pipeline.step_seconds, ranks=pipeline.mesh.ranks)


# --- stages ----------------------------------------------------------------------------------------------------------


def modules_of(pipeline: PipelineValue) -> tuple[str, ...]:
    """Of each stage, the layers and other modules with parameters that run in it, in their order: `transformer.wte,
    transformer.h.0..3`; one that is cut is `(part)` in both.
    """
    order = forward_order(pipeline.whole.graph)
    bounds = [0, *pipeline.ends, len(order)]
    weight_of, found = weights_of(pipeline.whole.graph), list[dict[str, None]]()
    node_of = pipeline.whole.graph.by_name

    def label(node: Node) -> str:
        """A parameter of the model itself has no module, and stands by its own name."""
        read = (weight_of[ref.name] for ref in node.operands if ref.name in weight_of)
        return _layer(node.module or next((node_of[name].target for name in read), ""))

    for first, last in pairwise(bounds):
        labels = [(label(node), is_weighted(node, weight_of)) for node in order[first:last] if node.op not in VIEWS]
        found.append(dict.fromkeys(one for one, weighted in labels if weighted or re.search(r"\d$", one)))
    shared = [label for one, other in pairwise(found) for label in one if label in other]
    return tuple(", ".join(_ranges(names, shared)) or "-" for names in found)


def _layer(module: str) -> str:
    """The layer that a module is in, by the first number in its name: `transformer.h.3`; else the module."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", module)
    return found[0] if found else module


def _ranges(names: dict[str, None], shared: Sequence[str]) -> Iterator[str]:
    run: list[str] = []

    def told() -> str:
        return run[0] if len(run) == 1 else f"{run[0]}..{run[-1].rpartition('.')[2]}"

    for name in names:
        before, _, number = name.rpartition(".")
        if name not in shared and run and number.isdecimal() and run[-1] == f"{before}.{int(number) - 1}":
            run.append(name)
            continue
        if run:
            yield told()
        run = []
        if name in shared:
            yield f"{name} (part)"
        else:
            run = [name]
    if run:
        yield told()


def _rows(pipeline: PipelineValue) -> Iterator[tuple[str, ...]]:
    for row in stages_of(pipeline):
        sends = "-" if row["sent_bytes"] is None else human(row["sent_bytes"])
        yield (
            str(row["stage"]), str(row["rank"]), f"{row['parameters']:,}", ms(row["forward_seconds"]),
            ms(row["backward_seconds"]), sends, str(row["in_flight"]), human(row["peak_bytes"]), row["modules"],
        )  # fmt: skip


def stages_of(pipeline: PipelineValue) -> list[dict[str, Any]]:
    """A row for each stage; what is held and sent is of one device, the peak of all stages of its rank."""
    flying, durations, rank_of = in_flight_of_stages(pipeline.schedule), pipeline.durations, pipeline.schedule.rank_of
    last = len(pipeline.plans) - 1
    return [
        {
            "stage": at,
            "rank": rank_of[at],
            "modules": modules,
            "parameters": sum(type.numel for _, type in parameters_of(plan)),
            "forward_seconds": durations.forward[at],
            "backward_seconds": durations.whole[at],
            "sent_bytes": pipeline.nbytes.sent[at] if at < last and pipeline.schedule.crosses(at) else None,
            "returned_bytes": pipeline.nbytes.gradients[at] if at < last and pipeline.schedule.crosses(at) else None,
            "in_flight": flying[at],
            "fixed_bytes": pipeline.nbytes.fixed[at],
            "saved_bytes": pipeline.nbytes.saved[at],
            "peak_bytes": round(pipeline.memory[rank_of[at]].peak),
        }
        for at, (modules, plan) in enumerate(zip(modules_of(pipeline), pipeline.plans, strict=True))
    ]


def tied_in(pipeline: PipelineValue) -> dict[str, list[int]]:
    """Parameter that several stages hold -> these."""
    found: dict[str, list[int]] = {}
    for at, stage in enumerate(pipeline.stages):
        for name in stage.tied:
            found.setdefault(name, []).append(at)
    return found


# --- JSON ------------------------------------------------------------------------------------------------------------


def document(model: str, pipeline: PipelineValue, room: Room | None = None) -> dict[str, Any]:
    """What --json prints; every figure is predicted, for one rank and one step."""
    whole = pipeline.whole
    return {
        "model": model,
        "mesh": dict(zip(pipeline.mesh.names, pipeline.mesh.sizes, strict=True)),
        "hardware": whole.hardware,
        "optimizer": whole.optimizer,
        "outputs": whole.outputs,
        "precision": told(whole.graph) or None,
        "tf32": list(whole.tf32),
        "memory_limit": None if room is None else room.limit,
        "reserve_bytes": None if room is None else room.left,
        "micro_batches": pipeline.schedule.micro_batches,
        "schedule": pipeline.schedule.name,
        "stages_per_rank": pipeline.schedule.stages_per_rank,
        "simulated_seconds": pipeline.step_seconds,
        "schedule_seconds": pipeline.played.makespan,
        "least_schedule_seconds": pipeline.least_seconds,
        "bubble": pipeline.bubble,
        "peak_bytes": pipeline.peak_bytes,
        "utilisation": utilisation_of(pipeline).to_json(),
        "parameters": sum(type.numel for _, type in parameters_of(whole)),
        "ends": list(pipeline.ends),
        "stages": stages_of(pipeline),
        "tied": tied_in(pipeline),
        "gap": whole.gap if math.isfinite(whole.gap) else None,
        "notes": list(whole.notes),
    }
