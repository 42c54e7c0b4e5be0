"""A pipeline's file: JSON, versioned, hashed, checked on reading, and never seen half-written.

    {"autopar_pipeline": 4, "digest": ..., "mesh": ..., "schedule": ..., ..., "stages": [...], "whole": ...}

`whole` and the plan of each stage are plans as in files of their own (`autopar.plan.store`), each with its digest; the
schedule's lists are written as `0F0 0SA0 0F1`, a text for each rank. What follows from the rest (times of the played
schedule, bytes along the lists) is not written. `digest` is over everything else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

from autopar.errors import PlanMismatch
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Rules
from autopar.pipeline import Action, Durations, Schedule, StageBytes, memory, play, verify
from autopar.plan import Plan
from autopar.plan.store import dumps as plan_text
from autopar.plan.value import AGAIN, shortened
from autopar.rewrite.stages import Stage, cut_in_stages
from autopar.search.pipeline_value import PipelineValue
from cost_models.whole_file import read_whole, write_whole

P = TypeVar("P", bound=PipelineValue)
VERSION = 4


def save(pipeline: PipelineValue, path: str | Path) -> None:
    """Write it. Whoever looks at `path` sees the old file or the whole new one, also after a crash."""
    write_whole(path, dumps(pipeline))


def dumps(pipeline: PipelineValue) -> str:
    """The pipeline as text: the same text for the same pipeline, in any process."""
    schedule = pipeline.schedule
    content: dict[str, Any] = {
        "mesh": {"names": list(pipeline.mesh.names), "sizes": list(pipeline.mesh.sizes)},
        "ends": list(pipeline.ends),
        "schedule": {
            "name": schedule.name,
            "micro_batches": schedule.micro_batches,
            "rank_of": list(schedule.rank_of),
            "lists": [schedule.text(rank) for rank in range(schedule.ranks)],
        },
        "durations": asdict(pipeline.durations),
        "bytes": asdict(pipeline.nbytes),
        "step_seconds": pipeline.step_seconds,
        "stages": [
            {name: list(getattr(stage, name)) for name in CHANNELS} | {"plan": json.loads(plan_text(plan))}
            for stage, plan in zip(pipeline.stages, pipeline.plans, strict=True)
        ],
        "whole": json.loads(plan_text(pipeline.whole)),
    }
    head = {"autopar_pipeline": VERSION, "digest": _digest(content)}
    rows = [f'"{name}": {json.dumps(value, allow_nan=False)}' for name, value in (head | content).items()]
    return "{" + ",\n".join(rows) + "}\n"


def is_pipeline(path: str | Path) -> bool:
    """Whether the file is one of a pipeline, by how it begins. Raises OSError where there is none to be read."""
    with open(path, "rb") as file:
        return file.read(len(BEGINS)) == BEGINS


BEGINS = b'{"autopar_pipeline"'
CHANNELS = "receives", "gives_back", "sends", "gets_back", "tied"


def load(path: str | Path, make: type[P], rules: Sequence[Rules] = ()) -> P:
    """Read and check: the stages are those of the whole plan's graph with these ends, the lists are a schedule. `make`:
    the class of the pipeline; `rules`: of users' packages (`autopar.rules.outside.given`).

    Raises PlanMismatch where the file is cut short, edited, of another version or inconsistent, and OSError where there
    is no file to be read.
    """
    try:
        text = read_whole(path).decode()
    except UnicodeDecodeError as error:
        raise PlanMismatch(f"{path} is not a text file (byte {error.start} is not UTF-8); {AGAIN}") from None
    return loads(text, str(path), make, rules)


def loads(text: str, origin: str, make: type[P], rules: Sequence[Rules] = ()) -> P:
    """The pipeline in `text`, of the class `make`. `origin` names it in errors: a path, or the rank that sent it."""
    found: Any
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanMismatch(f"{origin} is not complete JSON ({shortened(error, 200)}); {AGAIN}") from None
    content = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if "autopar_plan" in content:
        raise PlanMismatch(
            f"{origin} is a plan without pipeline stages; give a mesh without the axis `pipe`, or the file of a search "
            "with it"
        )
    if content.pop("autopar_pipeline", None) != VERSION:
        raise PlanMismatch(f"{origin} is no pipeline of version {VERSION}; {AGAIN}")
    stored = content.pop("digest", None)
    if stored != _digest(content):
        raise PlanMismatch(f"{origin} was edited or damaged: its content has another digest than it says; {AGAIN}")
    try:
        return _read(content, origin, make, rules)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanMismatch(f"{origin} is inconsistent ({shortened(error, 200)}); {AGAIN}") from error


def _read(content: dict[str, Any], origin: str, make: type[P], rules: Sequence[Rules]) -> P:
    def plan(of: dict[str, Any], what: str) -> Plan:
        return Plan.loads(json.dumps(of), f"{what} of {origin}", rules)

    whole = plan(content["whole"], "the whole plan")
    ends, given = tuple(content["ends"]), content["schedule"]
    lists = tuple(tuple(_action(text) for text in row.split()) for row in given["lists"])
    schedule = Schedule(given["name"], given["micro_batches"], tuple(given["rank_of"]), lists)
    verify(schedule)
    stages = cut_in_stages(whole.graph, ends, inputs_first=schedule.splits_backward)
    plans = tuple(plan(row["plan"], f"stage {at}") for at, row in enumerate(content["stages"]))
    for at, (stage, row, one) in enumerate(zip(stages, content["stages"], plans, strict=True)):
        _check(at, stage, row, one)
    if schedule.micro_batches != whole.graph.rounds.count or schedule.stages != len(stages):
        raise ValueError("its schedule has other numbers of stages or micro-batches than its plan")
    durations = Durations(**{name: entries and tuple(entries) for name, entries in content["durations"].items()})
    held: dict[str, Any] = {name: None if of is None else tuple(of) for name, of in content["bytes"].items()}
    nbytes = StageBytes(**held)
    mesh = Mesh(tuple(content["mesh"]["names"]), tuple(content["mesh"]["sizes"]))
    return make(
        mesh, stages, plans, ends, schedule, durations, play(schedule, durations), memory(schedule, nbytes),
        content["step_seconds"], whole, nbytes,
    )  # fmt: skip


def _check(at: int, stage: Stage, row: dict[str, Any], plan: Plan) -> None:
    if plan.graph != stage.graph or any([*getattr(stage, name)] != row[name] for name in CHANNELS):
        raise ValueError(f"stage {at} is not the one that these ends cut off the whole plan")


def _action(text: str) -> Action:
    found = re.fullmatch(r"(\d+)(F|B|I|W|SA|RA|SG|RG)(\d+)", text)
    if found is None:
        raise ValueError(f"{text!r} is no action of a schedule")
    return Action(found[2], int(found[1]), int(found[3]))  # pyright: ignore[reportArgumentType]


def _digest(content: dict[str, Any]) -> str:
    told = json.dumps(content, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(told.encode()).hexdigest()
