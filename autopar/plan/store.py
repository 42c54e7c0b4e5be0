"""The plan's file: JSON, versioned, hashed, checked on reading, and never seen half-written.

    {"autopar_plan": 2, "digest": ..., "mesh": ..., ..., "choices": [...], "nodes": [...], "results": [...]}

One node per line, so that two plans can be compared with diff. Equal choices stand once in `choices`, and nodes point
to them by index. Layouts are written as `layout.encode` does (`R S0 P`), types as `float32[4, 16]`, a reference as
`{"ref": "mm"}` or `{"ref": ["split", 2]}`, a torch constant as `{"const": ["dtype", "float32"]}`, a complex number as
`{"const": ["complex", "2-1j"]}`, and a float that JSON lacks as `{"float": "-inf"}`. `digest` is over everything else.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from autopar.errors import PlanMismatch
from autopar.ir.graph import Arg, Const, Node, Ref, Result
from autopar.ir.layout import encode
from autopar.ir.outside import Rules
from autopar.ir.rounds import Rounds
from autopar.plan.fit import check
from autopar.plan.reader import Json, Reader, cut
from autopar.plan.value import AGAIN, Choice, Delivery, PlanValue, shortened
from autopar.price.reshard import Reshard
from cost_models.steps import Comm, Compute, Loop, Move, Step
from cost_models.whole_file import read_whole, write_whole

__all__ = ["VERSION", "check", "dumps", "load", "loads", "save"]

VERSION = 2
P = TypeVar("P", bound=PlanValue)
DEEPEST = 64  # lists in lists; steps and arguments need a few


# --- writing -------------------------------------------------------------------------------------------------------


def dumps(plan: PlanValue) -> str:
    """The plan as text: the same text for the same plan, in any process."""
    numbers: dict[Choice, int] = {}
    nodes: list[dict[str, Json]] = []
    for node in plan.graph.nodes:
        number = numbers.setdefault(plan.choices[node.name], len(numbers))
        nodes.append({**_node(node), "choice": number})
    if len(plan.choices) != len(nodes):
        raise ValueError(f"the plan has {len(plan.choices)} choices for {len(nodes)} nodes")
    content: dict[str, Json] = {
        "mesh": {"names": list(plan.mesh.names), "sizes": list(plan.mesh.sizes)},
        "hardware": plan.hardware,
        "hardware_digest": plan.hardware_digest,
        "optimizer": plan.optimizer,
        "memory_limit": _number(plan.memory_limit),
        "outputs": plan.outputs,
        "step_seconds": _number(plan.step_seconds),
        "bound": _number(plan.bound),
        "peak_bytes": {tier: plan.peak_bytes[tier] for tier in sorted(plan.peak_bytes)},
        "seconds_by": {part: _number(plan.seconds_by[part]) for part in sorted(plan.seconds_by)},
        "notes": list(plan.notes),
        "prefetch": plan.prefetch,
        "bucket_bytes": plan.bucket_bytes,
        "search": {name: _number(plan.search[name]) for name in sorted(plan.search)},
        "simulated_seconds": _number(plan.simulated_seconds),
        "candidates": [[*map(_number, astuple(candidate))] for candidate in plan.candidates],
        **({"residence": dict(sorted(plan.residence.items()))} if plan.residence else {}),
        **({"rounds": _rounds(plan.graph.rounds)} if plan.graph.rounds.count > 1 else {}),
        **({"tf32": list(plan.tf32)} if plan.tf32 else {}),
        **({"rules": [list(one) for one in plan.rules]} if plan.rules else {}),
        "choices": [_choice(choice) for choice in numbers],
        "nodes": nodes,
        "results": [_result(*pair) for pair in zip(plan.graph.results, plan.deliveries, strict=True)],
    }
    lines = [f'{{"autopar_plan": {VERSION}', f'"digest": "{_digest(content)}"']
    for name, value in content.items():
        if name in ("choices", "nodes", "results"):
            rows = ",\n".join(_text(row) for row in value)
            lines.append(f'"{name}": [\n{rows}\n]')
        else:
            lines.append(f'"{name}": {_text(value)}')
    return ",\n".join(lines) + "}\n"


def save(plan: PlanValue, path: str | Path) -> None:
    """Write the plan. Whoever looks at `path` sees the old file or the whole new one, also after a crash."""
    write_whole(path, dumps(plan))


def _text(value: Json) -> str:
    return json.dumps(value, allow_nan=False, separators=(", ", ": "))


def _digest(content: dict[str, Json]) -> str:
    told = json.dumps(content, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(told.encode()).hexdigest()


def _number(value: Json) -> Json:
    """A finite number stays itself (JSON's shortest spelling reads back exactly); inf and nan are spelled out."""
    return {"float": repr(float(value))} if isinstance(value, float) and not math.isfinite(value) else value


def _arg(arg: Arg) -> Json:
    if isinstance(arg, tuple):
        return [_arg(part) for part in cast("tuple[Arg, ...]", arg)]
    match arg:
        case Ref():
            return {"ref": [arg.name, arg.index] if arg.index else arg.name}
        case Const():
            return {"const": [arg.kind, arg.value]}
        case complex():
            return {"const": ["complex", repr(arg)]}
        case None | bool() | int() | str() | float():
            return _number(arg)
        case _:
            raise TypeError(f"an argument of type {type(arg).__name__} has no place in a plan: {arg!r}")


def _node(node: Node) -> dict[str, Json]:
    """What is empty is left out; so is the phase of a forward node."""
    row: dict[str, Json] = {"name": node.name, "op": node.op}
    if node.args:
        row["args"] = _arg(node.args)
    if node.kwargs:
        row["kwargs"] = [[key, _arg(value)] for key, value in node.kwargs]
    row["outputs"] = [None if type is None else str(type) for type in node.outputs]
    if node.phase != "forward":
        row["phase"] = node.phase
    for name, value in (("target", node.target), ("module", node.module), ("source", node.source)):
        if value:
            row[name] = value
    return row


def _choice(choice: Choice) -> dict[str, Json]:
    stored: dict[str, Json] = {"stored": encode(choice.stored)} if choice.stored else {}
    return stored | {
        "roles": list(choice.roles),
        "takes": [encode(layout) for layout in choice.takes],
        "gives": [encode(layout) for layout in choice.gives],
        "body": choice.body,
        "body_axes": list(choice.body_axes),
        "body_size": choice.body_size,
        "steps": [_step(step) for step in choice.steps],
        "reads": [_changes(read) for read in choice.reads],
    }


def _step(step: Step) -> list[Json]:
    match step:
        case Compute():
            measured = [] if step.seconds is None else [step.seconds]
            return ["compute", step.op, step.flops, step.nbytes, step.dtype, step.kernels, step.kind, *measured]
        case Comm():
            return ["comm", step.collective, step.axis, step.ranks, step.nbytes]
        case Move():
            return ["move", step.src, step.dst, step.nbytes]
        case Loop():
            return ["loop", step.rounds, step.overlap, [_step(part) for part in step.body]]


def _changes(changes: Sequence[Reshard]) -> list[Json]:
    return [[c.axis, encode((c.before,)), encode((c.after,)), str(c.local)] for c in changes]


def _rounds(rounds: Rounds) -> Json:
    told = {"count": rounds.count, "cut": dict(sorted(rounds.cut.items())), "joined": list(rounds.joined)}
    told |= {"stored": dict(sorted(rounds.stored.items()))} if rounds.stored else {}
    return told | ({"reduces_once": True} if rounds.reduces_once else {})


def _result(result: Result, delivery: Delivery | None) -> dict[str, Json]:
    row: dict[str, Json] = {"kind": result.kind, "target": result.target}
    if result.ref is not None:
        row["ref"] = [result.ref.name, result.ref.index]
    if delivery is not None:
        row["layout"] = encode(delivery.layout)
        row["changes"] = _changes(delivery.changes)
        row |= {"once": _changes(delivery.once)} if delivery.once else {}
    return row


# --- reading -------------------------------------------------------------------------------------------------------


def load(path: str | Path, make: type[P], rules: Sequence[Rules] = ()) -> P:
    """Read and check; `make`: the class of the plan; `rules`: of users' packages (`autopar.rules.outside.given`).

    Raises PlanMismatch where the file is cut short, edited, of another version or inconsistent, or was made with other
    rules, and OSError where there is no file to be read.
    """
    try:
        text = read_whole(path).decode()
    except UnicodeDecodeError as error:
        raise PlanMismatch(f"{path} is not a text file (byte {error.start} is not UTF-8); {AGAIN}") from None
    return loads(text, str(path), make, rules)


def loads(text: str, origin: str, make: type[P], rules: Sequence[Rules] = ()) -> P:
    """The plan in `text`, of the class `make`. `origin` names it in errors: a path, or the rank that sent it. `rules`:
    as in `load`.
    """
    content = _parse(text, origin)
    version = content.pop("autopar_plan", None)
    if "autopar_pipeline" in content:
        raise PlanMismatch(
            f"{origin} has a step in pipeline stages, and what is wanted is a plan without: autopar.diff, what_if and "
            "scale have none with. autopar.compile runs it on a mesh whose first axis is `pipe`, autopar.measure times "
            "it; for other hardware or memory search again (python -m autopar.search)"
        )
    if version is None:
        raise PlanMismatch(f"{origin} is JSON, but no autopar plan (it has no field autopar_plan); {AGAIN}")
    if type(version) is not int or version != VERSION:
        raise PlanMismatch(
            f"{origin} is a plan of version {cut(version)}, this autopar reads version {VERSION}; {AGAIN}"
        )
    stored = content.pop("digest", None)
    found = _digest(content)
    if stored != found:
        told = stored[:8] if isinstance(stored, str) and stored.isalnum() else cut(stored)
        raise PlanMismatch(
            f"{origin} was edited or damaged: it says digest {told}, its content has {found[:8]}; "
            f"undo the edit, or {AGAIN}"
        )
    return Reader(origin, tuple(rules)).plan(content, make)


def _parse(text: str, origin: str) -> dict[str, Json]:
    def once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError(f"a field stands twice among {sorted(name for name, _ in pairs)[:12]}")
        return found

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    def finite(digits: str) -> float:
        if not math.isfinite(number := float(digits)):
            raise ValueError(f"{digits[:20]} is too large for a float")
        return number

    try:
        content = json.loads(text, object_pairs_hook=once, parse_constant=no_constant, parse_float=finite)
    except json.JSONDecodeError as error:
        told = f"{error.msg.removesuffix(' at')} at line {error.lineno}"
        raise PlanMismatch(f"{origin} is not complete JSON ({told}): it was cut short or edited; {AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise PlanMismatch(f"{origin} was edited or damaged ({shortened(error, 200)}); {AGAIN}") from None
    if not isinstance(content, dict):
        raise PlanMismatch(f"{origin} is JSON, but no autopar plan (it holds a {type(content).__name__}); {AGAIN}")
    if not _is_shallow(content):
        raise PlanMismatch(f"{origin} was edited or damaged (more than {DEEPEST} lists lie in each other); {AGAIN}")
    return content  # pyright: ignore[reportUnknownVariableType]


def _is_shallow(content: Json) -> bool:
    """Whether what follows can go down into all of it."""
    level: list[Json] = [content]
    for _ in range(DEEPEST):
        inside: list[Json] = []
        for part in level:
            if isinstance(part, dict):
                inside += cast("dict[str, Json]", part).values()
            elif isinstance(part, list):
                inside += cast("list[Json]", part)
        if not inside:
            return True
        level = inside
    return False
