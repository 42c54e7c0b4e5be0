"""The plan's file: JSON, versioned, hashed, checked on reading, and never seen half-written.

    {"autopar_plan": 1, "digest": ..., "mesh": ..., ..., "choices": [...], "nodes": [...], "results": [...]}

One node per line, so that two plans can be compared with diff. Equal choices stand once in `choices`, and nodes point
to them by index. Layouts are written as `layout.encode` does (`R S0 P`), types as `float32[4, 16]`, a reference as
`{"ref": "mm"}` or `{"ref": ["split", 2]}`, a torch constant as `{"const": ["dtype", "float32"]}`, a complex number as
`{"const": ["complex", "2-1j"]}`, and a float that JSON lacks as `{"float": "-inf"}`. `digest` is over everything else.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from autopar.graph import ITEMSIZE, Arg, Const, Graph, Node, Ref, Result, TensorType
from autopar.layout import Layout, Placement, decode, encode
from autopar.mesh import Mesh
from autopar.plan.fit import AGAIN, check, flaw_of
from autopar.plan.plan import Candidate, Choice, Delivery, Plan, PlanMismatch
from autopar.reshard import Reshard
from cost_models.steps import Comm, Compute, Loop, Move, Step
from cost_models.whole_file import write_whole

__all__ = ["VERSION", "check", "dumps", "load", "loads", "save"]

VERSION = 1

Json = Any
Float = int | float
T = TypeVar("T")


# --- writing -------------------------------------------------------------------------------------------------------


def dumps(plan: Plan) -> str:
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


def save(plan: Plan, path: str | Path) -> None:
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
    return {
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


def _result(result: Result, delivery: Delivery | None) -> dict[str, Json]:
    row: dict[str, Json] = {"kind": result.kind, "target": result.target}
    if result.ref is not None:
        row["ref"] = [result.ref.name, result.ref.index]
    if delivery is not None:
        row["layout"] = encode(delivery.layout)
        row["changes"] = _changes(delivery.changes)
    return row


# --- reading -------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Plan:
    """Read and check. Raises PlanMismatch where the file is cut short, edited, of another version or inconsistent."""
    try:
        text = Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise PlanMismatch(f"{path} is not a text file (byte {error.start} is not UTF-8); {AGAIN}") from None
    return loads(text, str(path))


def loads(text: str, origin: str) -> Plan:
    """The plan that `text` holds. `origin` names it in errors: a path, or the rank that sent it."""
    content = _parse(text, origin)
    version = content.pop("autopar_plan", None)
    if version is None:
        raise PlanMismatch(f"{origin} is JSON, but no autopar plan (it has no field autopar_plan); {AGAIN}")
    if type(version) is not int or version != VERSION:
        raise PlanMismatch(f"{origin} is a plan of version {version!r}, this autopar reads version {VERSION}; {AGAIN}")
    stored = content.pop("digest", None)
    found = _digest(content)
    if stored != found:
        told = str(stored)[:8] if isinstance(stored, str) else repr(stored)
        raise PlanMismatch(
            f"{origin} was edited or damaged: it says digest {told}, its content has {found[:8]}; "
            f"undo the edit, or {AGAIN}"
        )
    return _Reader(origin).plan(content)


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
        raise PlanMismatch(
            f"{origin} is not complete JSON ({error.msg} at line {error.lineno}): it was cut short or edited; {AGAIN}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanMismatch(f"{origin} was edited or damaged ({error}); {AGAIN}") from None
    if not isinstance(content, dict):
        raise PlanMismatch(f"{origin} is JSON, but no autopar plan (it holds a {type(content).__name__}); {AGAIN}")
    return content  # pyright: ignore[reportUnknownVariableType]


_TYPE = re.compile(r"(\w+)\[((?:\d+(?:, \d+)*)?)\]", re.ASCII)


@dataclass
class _Reader:
    """JSON back into values. Every method takes the place it reads, such as `nodes[17].args`, for the error."""

    origin: str
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])
    layouts: dict[str, Layout] = field(default_factory=dict[str, Layout])

    def fail(self, place: str, cause: str) -> NoReturn:
        raise PlanMismatch(f"{self.origin}: {place} {cause}; {AGAIN}")

    def a(self, kind: type[T], value: Json, place: str) -> T:
        """`value`, if it is a `kind`. A bool is not an int."""
        if type(value) is not kind:
            self.fail(place, f"is {_cut(value)}, not {_SPELLED[kind]}")
        return value

    def array(self, value: Json, place: str) -> list[Json]:
        return self.a(cast("type[list[Json]]", list), value, place)

    def object(self, value: Json, place: str) -> dict[str, Json]:
        return self.a(cast("type[dict[str, Json]]", dict), value, place)

    def natural(self, value: Json, place: str) -> int:
        if self.a(int, value, place) < 0:
            self.fail(place, f"is {value}, which is negative")
        return value

    def number(self, value: Json, place: str) -> Float:
        if isinstance(value, dict):
            told = self.row(value, place, ("float",))["float"]
            if told not in ("inf", "-inf", "nan"):
                self.fail(place, f"is {_cut(told)}, not inf, -inf or nan")
            return float(told)
        if type(value) not in (int, float):
            self.fail(place, f"is {_cut(value)}, not a number")
        return value

    def items(self, value: Json, place: str, read: Callable[[Json, str], T]) -> tuple[T, ...]:
        return tuple([read(part, f"{place}[{i}]") for i, part in enumerate(self.array(value, place))])

    def table(self, value: Json, place: str, read: Callable[[Json, str], T]) -> dict[str, T]:
        return {name: read(part, f"{place}.{name}") for name, part in self.object(value, place).items()}

    def text(self, value: Json, place: str) -> str:
        return self.a(str, value, place)

    def row(self, value: Json, place: str, needs: Iterable[str], may: Iterable[str] = ()) -> dict[str, Json]:
        """An object with all of the fields `needs`, perhaps those of `may`, and no other."""
        found = self.object(value, place)
        for name in needs:
            if name not in found:
                self.fail(place, f"has no field {name!r}")
        if unknown := sorted(found.keys() - {*needs, *may}):
            self.fail(place, f"has the unknown field {unknown[0]!r}")
        return found

    def short(self, value: Json, place: str, length: int) -> list[Json]:
        found = self.array(value, place)
        if len(found) != length:
            self.fail(place, f"has {len(found)} entries, not {length}")
        return found

    def making(self, place: str, make: Callable[[], T]) -> T:
        """What `make` gives; its ValueError becomes ours."""
        try:
            return make()
        except PlanMismatch:
            raise
        except ValueError as error:
            self.fail(place, f"is not possible ({error})")

    # --- the parts of a plan -----------------------------------------------------------------------------------------

    def plan(self, content: dict[str, Json]) -> Plan:
        self.row(content, "the plan", _FIELDS, _MAY)
        mesh = self.mesh(content["mesh"], "mesh")
        table = self.items(content["choices"], "choices", self.choice)
        rows = self.items(content["nodes"], "nodes", lambda row, place: self.node(row, place, table))
        ends = self.items(content["results"], "results", self.result)
        graph = self.making("the graph", lambda: Graph(tuple(node for node, _ in rows), tuple(end for end, _ in ends)))
        limit = content["memory_limit"]
        plan = Plan(
            graph,
            mesh,
            self.text(content["hardware"], "hardware"),
            self.text(content["hardware_digest"], "hardware_digest"),
            self.text(content["optimizer"], "optimizer"),
            None if limit is None else self.number(limit, "memory_limit"),
            self.text(content["outputs"], "outputs"),
            {node.name: choice for node, choice in rows},
            tuple(delivery for _, delivery in ends),
            self.number(content["step_seconds"], "step_seconds"),
            self.number(content["bound"], "bound"),
            self.table(content["peak_bytes"], "peak_bytes", self.natural),
            self.table(content["seconds_by"], "seconds_by", self.number),
            self.items(content["notes"], "notes", self.text),
            prefetch=None if content["prefetch"] is None else self.natural(content["prefetch"], "prefetch"),
            bucket_bytes=self.natural(content["bucket_bytes"], "bucket_bytes"),
            search=self.table(content["search"], "search", self.fact),
            simulated_seconds=self.perhaps(content.get("simulated_seconds"), "simulated_seconds", self.number),
            candidates=self.items(content.get("candidates", []), "candidates", self.candidate),
            residence=self.table(content.get("residence", {}), "residence", self.text),
        )
        if (flaw := flaw_of(plan)) is not None:
            self.fail(*flaw)
        return plan

    def perhaps(self, value: Json, place: str, read: Callable[[Json, str], T]) -> T | None:
        return None if value is None else read(value, place)

    def candidate(self, value: Json, place: str) -> Candidate:
        name, step, simulated, peak, prefetch, why = self.short(value, place, 6)
        seconds = [self.perhaps(of, place, self.number) for of in (step, simulated)]
        counts = [self.perhaps(of, place, self.natural) for of in (peak, prefetch)]
        return Candidate(self.text(name, place), seconds[0], seconds[1], counts[0], counts[1], self.text(why, place))

    def fact(self, value: Json, place: str) -> Float | str:
        return value if isinstance(value, str) else self.number(value, place)

    def mesh(self, value: Json, place: str) -> Mesh:
        row = self.row(value, place, ("names", "sizes"))
        names = self.items(row["names"], f"{place}.names", self.text)
        sizes = self.items(row["sizes"], f"{place}.sizes", self.natural)
        return self.making(place, lambda: Mesh(names, sizes))

    def type(self, value: Json, place: str) -> TensorType:
        told = self.text(value, place)
        if told not in self.types:
            found = _TYPE.fullmatch(told)
            if found is None or found[1] not in ITEMSIZE:
                self.fail(place, f"is {_cut(told)}, not a type such as float32[4, 16]")
            self.types[told] = TensorType(tuple(int(size) for size in found[2].split(", ") if size), found[1])
        return self.types[told]

    def layout(self, value: Json, place: str) -> Layout:
        told = self.text(value, place)
        if told not in self.layouts:
            layout = self.making(place, lambda: decode(told))
            if encode(layout) != told:
                self.fail(place, f"is {_cut(told)}, not a layout such as 'R S0 P'")
            self.layouts[told] = layout
        return self.layouts[told]

    def placement(self, value: Json, place: str) -> Placement:
        layout = self.layout(value, place)
        if len(layout) != 1:
            self.fail(place, f"is {_cut(value)}, not one placement")
        return layout[0]

    def arg(self, value: Json, place: str) -> Arg:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list():
                return self.items(value, place, self.arg)  # pyright: ignore[reportUnknownArgumentType]
            case {"ref": str(name), **rest} if not rest:
                return Ref(name)
            case {"ref": [str(name), int(index)], **rest} if not rest:
                return Ref(name, self.natural(index, place))
            case {"const": [str(kind), str(told)], **rest} if not rest:
                return self.making(place, lambda: complex(told)) if kind == "complex" else Const(kind, told)
            case {"float": _}:
                return self.number(value, place)
            case _:
                self.fail(place, f"is {_cut(value)}, which is no argument")

    def keyword(self, value: Json, place: str) -> tuple[str, Arg]:
        name, arg = self.short(value, place, 2)
        return self.text(name, place), self.arg(arg, place)

    def node(self, value: Json, place: str, table: Sequence[Choice]) -> tuple[Node, Choice]:
        row = self.row(value, place, ("name", "op", "outputs", "choice"), _NODE_MAY)
        number = self.natural(row["choice"], f"{place}.choice")
        if number >= len(table):
            self.fail(f"{place}.choice", f"is {number}, but there are {len(table)} choices")
        phase = row.get("phase", "forward")
        if phase not in ("forward", "backward"):
            self.fail(f"{place}.phase", f"is {_cut(phase)}, not forward or backward")
        node = Node(
            self.text(row["name"], f"{place}.name"),
            self.text(row["op"], f"{place}.op"),
            self.items(row.get("args", []), f"{place}.args", self.arg),
            self.items(row.get("kwargs", []), f"{place}.kwargs", self.keyword),
            self.items(row["outputs"], f"{place}.outputs", lambda t, at: None if t is None else self.type(t, at)),
            phase,
            *(self.text(row.get(name, ""), f"{place}.{name}") for name in ("target", "module", "source")),
        )
        return node, table[number]

    def choice(self, value: Json, place: str) -> Choice:
        row = self.row(value, place, _CHOICE_FIELDS)
        return Choice(
            self.items(row["roles"], f"{place}.roles", self.text),
            self.items(row["takes"], f"{place}.takes", self.layout),
            self.items(row["gives"], f"{place}.gives", self.layout),
            self.text(row["body"], f"{place}.body"),
            self.items(row["body_axes"], f"{place}.body_axes", self.text),
            self.natural(row["body_size"], f"{place}.body_size"),
            self.items(row["steps"], f"{place}.steps", self.step),
            self.items(row["reads"], f"{place}.reads", self.changes),
        )

    def step(self, value: Json, place: str) -> Step:
        row = self.array(value, place)
        match row:
            case ["compute", str(op), flops, nbytes, str(dtype), kernels, str(kind), *measured] if len(measured) < 2:
                work = self.number(flops, place), self.number(nbytes, place)
                launched = self.natural(kernels, place)
                seconds = self.number(measured[0], place) if measured else None
                return self.making(place, lambda: Compute(op, work[0], work[1], dtype, launched, kind, seconds))
            case ["comm", str(collective), str(axis), ranks, nbytes]:
                counted = self.natural(ranks, place), self.natural(nbytes, place)
                return self.making(place, lambda: Comm(collective, axis, counted[0], counted[1]))
            case ["move", str(src), str(dst), nbytes]:
                moved = self.natural(nbytes, place)
                return self.making(place, lambda: Move(src, dst, moved))
            case ["loop", rounds, bool(overlap), body]:
                repeat, parts = self.natural(rounds, place), self.items(body, place, self.step)
                return self.making(place, lambda: Loop(repeat, parts, overlap))
            case _:
                self.fail(place, f"is {_cut(row)}, which is no step that this autopar knows")

    def changes(self, value: Json, place: str) -> tuple[Reshard, ...]:
        return self.items(value, place, self.change)

    def change(self, value: Json, place: str) -> Reshard:
        axis, before, after, local = self.short(value, place, 4)
        change = Reshard(
            self.text(axis, place), self.placement(before, place), self.placement(after, place), self.type(local, place)
        )
        self.making(place, lambda: change.kind)
        return change

    def result(self, value: Json, place: str) -> tuple[Result, Delivery | None]:
        row = self.row(value, place, ("kind", "target"), ("ref", "layout", "changes"))
        kind = row["kind"]
        if kind not in ("output", "gradient", "buffer"):
            self.fail(f"{place}.kind", f"is {_cut(kind)}, not output, gradient or buffer")
        ref = None
        if "ref" in row:
            name, index = self.short(row["ref"], f"{place}.ref", 2)
            ref = Ref(self.text(name, f"{place}.ref"), self.natural(index, f"{place}.ref"))
        delivery = None
        if "layout" in row or "changes" in row:
            self.row(row, place, ("layout", "changes"), row)
            layout = self.layout(row["layout"], f"{place}.layout")
            delivery = Delivery(self.changes(row["changes"], f"{place}.changes"), layout)
        return Result(kind, self.text(row["target"], f"{place}.target"), ref), delivery


_SPELLED: dict[object, str] = {int: "a whole number", str: "a text", list: "a list", dict: "an object"}
_FIELDS = (
    "mesh", "hardware", "hardware_digest", "optimizer", "memory_limit", "outputs", "step_seconds", "bound",
    "peak_bytes", "seconds_by", "notes", "prefetch", "bucket_bytes", "search", "choices", "nodes", "results",
)  # fmt: skip
_MAY = ("simulated_seconds", "candidates", "residence")  # came later
_NODE_MAY = ("args", "kwargs", "phase", "target", "module", "source")
_CHOICE_FIELDS = ("roles", "takes", "gives", "body", "body_axes", "body_size", "steps", "reads")


def _cut(value: Json) -> str:
    told = repr(value)
    return told if len(told) <= 60 else f"{told[:57]}..."
