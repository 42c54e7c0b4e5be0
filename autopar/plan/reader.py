"""A plan's JSON back into values: every field is what it has to be, or the place and the cause are told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, NoReturn, TypeVar, cast

from autopar.errors import PlanMismatch
from autopar.ir.graph import ITEMSIZE, Arg, Const, Graph, Node, Ref, Result, TensorType
from autopar.ir.layout import TERMS, Layout, Placement, decode
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Identity, Rules
from autopar.ir.rounds import LAST, ONE, SUM, Rounds
from autopar.plan.parts import flaw_of
from autopar.plan.value import AGAIN, OUTPUTS, Candidate, Choice, Delivery, PlanValue, shortened
from autopar.price.pricer import OPTIMIZER_STATES
from autopar.price.reshard import Reshard
from autopar.rules.outside import check_same
from cost_models.hardware import TF32_KINDS
from cost_models.steps import TIERS, Comm, Compute, Loop, Move, Step

Json = Any
Float = int | float
T = TypeVar("T")

LARGEST = 2**63  # no count, size or number of bytes reaches it
SLACK = 1e-6  # relative: sums of seconds in another order

_TYPE = re.compile(r"(\w+)\[((?:\d{1,19}(?:, \d{1,19})*)?)\]", re.ASCII)
_PART = "(?:R|S0|S[1-9][0-9]?|P(?:" + "|".join(TERMS[1:]) + ")?)"
_LAYOUT = re.compile(f"{_PART}(?: {_PART})*", re.ASCII)
# Control characters, halves of surrogate pairs, and what changes lines or their direction: no terminal is shown those.
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_CONSTANTS = ("dtype", "device", "layout", "memory_format")


P = TypeVar("P", bound=PlanValue)


@dataclass
class Reader:
    """JSON back into values. Every method takes the place it reads, such as `nodes[17].args`, for the error."""

    origin: str
    rules: tuple[Rules, ...] = ()
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])
    layouts: dict[str, Layout] = field(default_factory=dict[str, Layout])

    def fail(self, place: str, cause: str) -> NoReturn:
        raise PlanMismatch(f"{self.origin}: {shortened(place, 150)} {shortened(cause, 250)}; {AGAIN}")

    def a(self, kind: type[T], value: Json, place: str) -> T:
        """`value`, if it is a `kind`. A bool is not an int."""
        if type(value) is not kind:
            self.fail(place, f"is {cut(value)}, not {_SPELLED[kind]}")
        return value

    def array(self, value: Json, place: str) -> list[Json]:
        return self.a(cast("type[list[Json]]", list), value, place)

    def object(self, value: Json, place: str) -> dict[str, Json]:
        return self.a(cast("type[dict[str, Json]]", dict), value, place)

    def natural(self, value: Json, place: str) -> int:
        if self.a(int, value, place) < 0:
            self.fail(place, f"is {cut(value)}, which is negative")
        if value >= LARGEST:
            self.fail(place, f"is {cut(value)}, which is too large")
        return value

    def number(self, value: Json, place: str) -> Float:
        if isinstance(value, dict):
            told = self.row(value, place, ("float",))["float"]
            if told not in ("inf", "-inf", "nan"):
                self.fail(place, f"is {cut(told)}, not inf, -inf or nan")
            return nan if told == "nan" else float(told)  # one object: it equals itself in tuples, as graphs compare
        if type(value) not in (int, float):
            self.fail(place, f"is {cut(value)}, not a number")
        if type(value) is int and abs(value) >= LARGEST:
            self.fail(place, f"is {cut(value)}, which is too large")
        return value

    def seconds(self, value: Json, place: str) -> Float:
        """Predicted, by somebody."""
        found = self.number(value, place)
        if not 0 <= found < inf:
            self.fail(place, f"is {found}, which is no time")
        return found

    def items(self, value: Json, place: str, read: Callable[[Json, str], T]) -> tuple[T, ...]:
        return tuple([read(part, f"{place}[{i}]") for i, part in enumerate(self.array(value, place))])

    def table(self, value: Json, place: str, read: Callable[[Json, str], T]) -> dict[str, T]:
        found = self.object(value, place)
        return {self.text(name, place): read(part, f"{place}.{name}") for name, part in found.items()}

    def text(self, value: Json, place: str) -> str:
        """What is shown to people, or names something."""
        if _UNSEEN.search(self.a(str, value, place)):
            self.fail(place, f"is {cut(value)}, which has characters that cannot be shown")
        return value

    def one_of(self, known: Iterable[str], value: Json, place: str) -> str:
        if self.text(value, place) not in known:
            self.fail(place, f"is {cut(value)}, not {' or '.join(known)}")
        return value

    def row(self, value: Json, place: str, needs: Iterable[str], may: Iterable[str] = ()) -> dict[str, Json]:
        """An object with all of the fields `needs`, perhaps those of `may`, and no other."""
        found = self.object(value, place)
        for name in needs:
            if name not in found:
                self.fail(place, f"has no field {name!r}")
        if unknown := sorted(found.keys() - {*needs, *may}):
            self.fail(place, f"has the unknown field {cut(unknown[0])}")
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
            self.fail(place, f"is not possible ({shortened(error, 200)})")

    # --- the parts of a plan -----------------------------------------------------------------------------------------

    def plan(self, content: dict[str, Json], make: type[P]) -> P:
        self.row(content, "the plan", _FIELDS, _MAY)
        mesh = self.mesh(content["mesh"], "mesh")
        table = self.items(content["choices"], "choices", self.choice)
        rows = self.items(content["nodes"], "nodes", lambda row, place: self.node(row, place, table))
        ends = self.items(content["results"], "results", self.result)
        nodes, results = tuple(node for node, _ in rows), tuple(end for end, _ in ends)
        rounds = self.rounds(content["rounds"], "rounds") if "rounds" in content else ONE
        graph = self.making("the graph", lambda: Graph(nodes, results, rounds))
        graph = graph.under(self.rules)
        check_same(self.items(content.get("rules", []), "rules", self.identity), self.rules, graph, self.origin, AGAIN)
        limit = self.perhaps(content["memory_limit"], "memory_limit", self.number)
        if limit is not None and not limit > 0:
            self.fail("memory_limit", f"is {limit}, which is no room")
        step_seconds, bound = (
            self.seconds(content["step_seconds"], "step_seconds"),
            self.number(content["bound"], "bound"),
        )
        if not bound <= step_seconds * (1 + SLACK):
            self.fail("bound", f"is {bound}, and the step takes {step_seconds}: no bound of what plans take at least")
        peaks = self.table(content["peak_bytes"], "peak_bytes", self.natural)
        if TIERS[0] not in peaks or {*peaks} - {*TIERS}:
            self.fail(
                "peak_bytes",
                f"is of {cut(sorted(peaks))}; it must be of {TIERS[0]}, and may be of {', '.join(TIERS[1:])}",
            )
        plan = make(
            graph,
            mesh,
            self.text(content["hardware"], "hardware"),
            self.text(content["hardware_digest"], "hardware_digest"),
            self.one_of(OPTIMIZER_STATES, content["optimizer"], "optimizer"),
            limit,
            self.one_of(OUTPUTS, content["outputs"], "outputs"),
            {node.name: choice for node, choice in rows},
            tuple(delivery for _, delivery in ends),
            step_seconds,
            bound,
            peaks,
            self.table(content["seconds_by"], "seconds_by", self.seconds),
            self.items(content["notes"], "notes", self.text),
            prefetch=None if content["prefetch"] is None else self.natural(content["prefetch"], "prefetch"),
            bucket_bytes=self.natural(content["bucket_bytes"], "bucket_bytes"),
            search=self.table(content["search"], "search", self.fact),
            simulated_seconds=self.perhaps(content.get("simulated_seconds"), "simulated_seconds", self.seconds),
            candidates=self.items(content.get("candidates", []), "candidates", self.candidate),
            residence=self.table(content.get("residence", {}), "residence", self.text),
            tf32=self.items(content.get("tf32", []), "tf32", lambda kind, place: self.one_of(TF32_KINDS, kind, place)),
        )
        if (flaw := flaw_of(plan)) is not None:
            self.fail(*flaw)
        return plan

    def perhaps(self, value: Json, place: str, read: Callable[[Json, str], T]) -> T | None:
        return None if value is None else read(value, place)

    def candidate(self, value: Json, place: str) -> Candidate:
        name, step, simulated, peak, prefetch, why = self.short(value, place, 6)
        seconds = [self.perhaps(of, place, self.seconds) for of in (step, simulated)]
        counts = [self.perhaps(of, place, self.natural) for of in (peak, prefetch)]
        return Candidate(self.text(name, place), seconds[0], seconds[1], counts[0], counts[1], self.text(why, place))

    def identity(self, value: Json, place: str) -> Identity:
        package, version, digest = (self.text(part, place) for part in self.short(value, place, 3))
        return package, version, digest

    def fact(self, value: Json, place: str) -> Float | str:
        return self.text(value, place) if isinstance(value, str) else self.number(value, place)

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
                self.fail(place, f"is {cut(told)}, not a type such as float32[4, 16]")
            type = TensorType(tuple(int(size) for size in found[2].split(", ") if size), found[1])
            if type.nbytes >= LARGEST:
                self.fail(place, f"is {cut(told)}, which is too large")
            self.types[told] = type
        return self.types[told]

    def dtype(self, value: Json, place: str) -> str:
        return self.one_of(tuple(ITEMSIZE), value, place)

    def layout(self, value: Json, place: str) -> Layout:
        told = self.text(value, place)
        if told not in self.layouts:
            layout = self.making(place, lambda: decode(told))
            if _LAYOUT.fullmatch(told) is None:
                self.fail(place, f"is {cut(told)}, not a layout such as 'R S0 P'")
            self.layouts[told] = layout
        return self.layouts[told]

    def placement(self, value: Json, place: str) -> Placement:
        layout = self.layout(value, place)
        if len(layout) != 1:
            self.fail(place, f"is {cut(value)}, not one placement")
        return layout[0]

    def arg(self, value: Json, place: str) -> Arg:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list():
                return self.items(value, place, self.arg)  # pyright: ignore[reportUnknownArgumentType]
            case {"ref": str(name), **rest} if not rest:
                return Ref(self.text(name, place))
            case {"ref": [str(name), int(index)], **rest} if not rest:
                return Ref(self.text(name, place), self.natural(index, place))
            case {"const": [str(kind), str(told)], **rest} if not rest:
                if kind == "complex":
                    return self.making(place, lambda: complex(told))
                return Const(self.one_of(_CONSTANTS, kind, place), self.text(told, place))
            case {"float": _}:
                return self.number(value, place)
            case _:
                self.fail(place, f"is {cut(value)}, which is no argument")

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
            self.fail(f"{place}.phase", f"is {cut(phase)}, not forward or backward")
        target, module, source = (
            self.text(row.get(name, ""), f"{place}.{name}") for name in ("target", "module", "source")
        )
        node = Node(
            self.text(row["name"], f"{place}.name"),
            self.text(row["op"], f"{place}.op"),
            self.items(row.get("args", []), f"{place}.args", self.arg),
            self.items(row.get("kwargs", []), f"{place}.kwargs", self.keyword),
            self.items(row["outputs"], f"{place}.outputs", lambda t, at: None if t is None else self.type(t, at)),
            phase,
            target,
            module,
            source,
        )
        return node, table[number]

    def choice(self, value: Json, place: str) -> Choice:
        row = self.row(value, place, _CHOICE_FIELDS, ("stored",))
        return Choice(
            self.items(row["roles"], f"{place}.roles", self.text),
            self.items(row["takes"], f"{place}.takes", self.layout),
            self.items(row["gives"], f"{place}.gives", self.layout),
            self.text(row["body"], f"{place}.body"),
            self.items(row["body_axes"], f"{place}.body_axes", self.text),
            self.natural(row["body_size"], f"{place}.body_size"),
            self.items(row["steps"], f"{place}.steps", self.step),
            self.items(row["reads"], f"{place}.reads", self.changes),
            self.layout(row["stored"], f"{place}.stored") if "stored" in row else (),
        )

    def rounds(self, value: Json, place: str) -> Rounds:
        row = self.row(value, place, ("count", "cut", "joined"), ("stored", "reduces_once"))
        count = self.natural(row["count"], f"{place}.count")
        cut = self.table(row["cut"], f"{place}.cut", self.natural)
        joined = self.items(row["joined"], f"{place}.joined", self.join)
        stored = self.table(row.get("stored", {}), f"{place}.stored", self.dtype)
        once = self.a(bool, row.get("reduces_once", False), f"{place}.reduces_once")
        return self.making(place, lambda: Rounds(count, cut, joined, stored, once))

    def join(self, value: Json, place: str) -> str | int:
        return self.one_of((SUM, LAST), value, place) if isinstance(value, str) else self.natural(value, place)

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
                self.fail(place, f"is {cut(row)}, which is no step that this autopar knows")

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
        row = self.row(value, place, ("kind", "target"), ("ref", "layout", "changes", "once"))
        kind = row["kind"]
        if kind not in ("output", "gradient", "buffer"):
            self.fail(f"{place}.kind", f"is {cut(kind)}, not output, gradient or buffer")
        ref = None
        if "ref" in row:
            name, index = self.short(row["ref"], f"{place}.ref", 2)
            ref = Ref(self.text(name, f"{place}.ref"), self.natural(index, f"{place}.ref"))
        delivery = None
        if "layout" in row or "changes" in row:
            self.row(row, place, ("layout", "changes"), row)
            layout = self.layout(row["layout"], f"{place}.layout")
            once = self.changes(row.get("once", []), f"{place}.once")
            delivery = Delivery(self.changes(row["changes"], f"{place}.changes"), layout, once)
        return Result(kind, self.text(row["target"], f"{place}.target"), ref), delivery


_SPELLED: dict[object, str] = {
    int: "a whole number",
    str: "a text",
    list: "a list",
    dict: "an object",
    bool: "true or false",
}
_FIELDS = (
    "mesh", "hardware", "hardware_digest", "optimizer", "memory_limit", "outputs", "step_seconds", "bound",
    "peak_bytes", "seconds_by", "notes", "prefetch", "bucket_bytes", "search", "choices", "nodes", "results",
)  # fmt: skip
_MAY = ("simulated_seconds", "candidates", "residence", "tf32", "rules", "rounds")  # came later
_NODE_MAY = ("args", "kwargs", "phase", "target", "module", "source")
_CHOICE_FIELDS = ("roles", "takes", "gives", "body", "body_axes", "body_size", "steps", "reads")


def cut(value: Json) -> str:
    if type(value) is int and abs(value) >= 10**50:
        return f"a number of {value.bit_length()} bits"
    told = repr(value)
    return told if len(told) <= 60 else f"{told[:57]}..."
