"""A pipeline as a picture for Graphviz, and its played step for a viewer of traces."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from autopar.pipeline.play import simulated
from autopar.plan.reading import ms
from autopar.plan.tell import human
from autopar.search.pipeline_told import stages_of, summary, tied_in
from autopar.search.pipeline_value import PipelineValue
from cost_models.trace_file import write_trace

FILLS = ("#8dd3c7", "#bebada", "#80b1d3", "#fdb462", "#b3de69", "#fccde5")  # ColorBrewer's Set3, light enough for text


def to_dot(pipeline: PipelineValue) -> str:
    """Graphviz source: a cluster for each rank of `pipe` with its stages and modules, edges with what crosses a cut,
    and dashed ones for weights that stages share. The same pipeline gives the same text.
    """
    return "\n".join(_lines(pipeline)) + "\n"


def _lines(pipeline: PipelineValue) -> Iterator[str]:
    rows = stages_of(pipeline)
    yield "digraph pipeline {"
    yield '  graph [fontname="Helvetica", fontsize=13, labelloc=t, rankdir=LR, nodesep=0.3, ranksep=0.9,'
    yield f"    label=<<B>{escape(f'mesh {pipeline.mesh} on {pipeline.whole.hardware}: {summary(pipeline)}')}</B>>];"
    yield '  node [fontname="Helvetica", fontsize=10, shape=box, style="filled,rounded", margin="0.15,0.06"];'
    yield '  edge [fontname="Helvetica", fontsize=9, color="#666666", arrowsize=0.6];'
    for rank in range(pipeline.schedule.ranks):
        own = [row for row in rows if row["rank"] == rank]
        called = f"stage{'s' * (len(own) > 1)} {', '.join(str(row['stage']) for row in own)}"
        yield f'  subgraph "cluster_{rank}" {{'
        yield f'    label="{called}, rank {rank} of pipe"; fontname="Helvetica"; fontsize=12; style=rounded;'
        for row in own:
            told = [
                f"<B>{escape(row['modules'])}</B>".replace(", ", ",<BR/>"),
                f"{row['parameters']:,} parameters",
                f"forward {ms(row['forward_seconds'])}, backward {ms(row['backward_seconds'])}",
                f"{row['in_flight']} in flight, peak {human(row['peak_bytes'])}",
            ]
            fill = FILLS[rank % len(FILLS)]
            yield f'    stage{row["stage"]} [fillcolor="{fill}", label=<{"<BR/>".join(told)}>];'
        yield "  }"
    for row in rows[:-1]:
        at: int = row["stage"]
        sends = "on one rank"
        if row["sent_bytes"] is not None:
            sends = f"{human(row['sent_bytes'])} on, {human(row['returned_bytes'])} back"
            sends += f"<BR/>{ms(pipeline.durations.send[at])}, {ms(pipeline.durations.returning[at])}"
        yield f"  stage{at} -> stage{at + 1} [dir=both, label=<{sends}>];"
    for name, (first, *others) in tied_in(pipeline).items():
        for other in others:
            yield f"  stage{first} -> stage{other} [dir=both, style=dashed, constraint=false, label=<{escape(name)}>];"
    yield "}"


def to_trace(pipeline: PipelineValue, path: str | Path) -> None:
    """Write the schedule as a trace that chrome://tracing and ui.perfetto.dev open: a row for each rank of `pipe` and
    each link between two, one micro-batch's F, B, I, W or message an event. The updates behind it are not in it.
    """
    _, timeline = simulated(pipeline.schedule, pipeline.durations)
    about = {
        "mesh": str(pipeline.mesh), "hardware": pipeline.whole.hardware, "schedule": pipeline.schedule.name,
        "micro_batches": pipeline.schedule.micro_batches, "with_updates_seconds": pipeline.step_seconds,
    }  # fmt: skip
    write_trace(timeline, path, process=f"ranks of pipe, {pipeline.mesh} on {pipeline.whole.hardware}", about=about)
