"""Closed forms: flops, bytes and memory as expressions in the sizes that grow and in the sizes of the mesh axes.

`operator_forms` has them for one strategy of one operator, in the factors of its rule; `totals` for a whole plan. Both
run the code that computes the numbers, on symbols. What holds for a closed form: pieces are even, and of more than one
row, so that a layout change copies where it would in general (a dim with one row left needs no copy).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from autopar.assemble.liveness import holds_storage
from autopar.ir.attention import OPERANDS_OF_ATTENTION
from autopar.ir.batch_norm import IN_PARTS, IN_PARTS_BACKWARD
from autopar.ir.graph import Node, Ref, TensorType
from autopar.ir.layout import local_type
from autopar.ir.mesh import Mesh
from autopar.ir.work import flops_of, temporary_bytes
from autopar.lower import Lowering, Program
from autopar.lower.memory import changes
from autopar.lower.placed import Placing
from autopar.lower.program import Buffer, Kind, Launch, Run
from autopar.plan.plan import Plan
from autopar.plan.value import Decision
from autopar.price.pricer import Pricer
from autopar.propose.strategies import make_strategy, operand_types
from autopar.rules.notation import Dim, Rule
from autopar.scale.elsewhere import elsewhere
from autopar.scale.growth import Growth
from cost_models.formulas import Form, Powers, at, form_of, symbol, terms
from cost_models.steps import COLLECTIVES, Comm, Compute, Move, Step

Payload = Mapping[tuple[str, str], Any]  # (collective, axis) -> bytes that one rank passes to it

STATES, ACTIVATIONS = "parameters, gradients, optimizer states", "activations and temporaries"
KINDS_OF_STATES = {
    Kind.PARAMETER, Kind.CAST, Kind.BUFFER, Kind.GRADIENT, Kind.STATES, Kind.COUNT, Kind.ADDED_UP,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What one rank does: `flops`, `moved` (bytes in device memory), `payload`; `mesh` has the sizes of the axes.

    `carried`: bytes from one tier of memory to another, by (from, to).
    """

    flops: Any
    moved: Any
    payload: Payload
    mesh: Mesh
    carried: Payload = field(default_factory=dict[tuple[str, str], Any])

    @property
    def received(self) -> dict[tuple[str, str], Any]:
        """(collective, axis) -> bytes that one rank receives. `received_bytes` cuts each phase to whole bytes."""
        return {
            (collective, axis): COLLECTIVES[collective].received(self.mesh.size(axis), nbytes)
            for (collective, axis), nbytes in self.payload.items()
        }


def work_of(steps: Iterable[Step], mesh: Mesh) -> Work:
    """The sum over steps (without loops, which no plan has)."""
    flops: Any = 0
    moved: Any = 0
    payload: dict[tuple[str, str], Any] = defaultdict(int)
    carried: dict[tuple[str, str], Any] = defaultdict(int)
    for step in steps:
        match step:
            case Compute():
                flops, moved = flops + step.flops, moved + step.nbytes
            case Comm():
                if step.ranks > 1:
                    payload[step.collective, step.axis] += step.nbytes
            case Move():
                carried[step.src, step.dst] += step.nbytes
            case _:
                raise ValueError(f"no closed form of a {type(step).__name__}")
    return Work(flops, moved, dict(sorted(payload.items())), mesh, dict(sorted(carried.items())))


# --- one operator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperatorForms:
    """One strategy in closed form: the work of one rank, and the bytes of the results that it holds.

    `sizes`: the present value of every symbol that stands for a factor.
    """

    work: Work
    held: Any
    sizes: Mapping[str, int]


def operator_forms(node: Node, rule: Rule, roles: tuple[str, ...], mesh: Mesh, dtypes: Sequence[str]) -> OperatorForms:
    """The closed forms of the strategy that splits as `roles` say. Factors become symbols in capitals, axes of `mesh`
    with more than one rank symbols of their own names; `dtypes` are those of the operands.

    A batch norm in parts is one of this mesh: how many parts a rank holds, and with it what it does, is a number.
    """
    parts = {"g"} if node.op in (IN_PARTS, IN_PARTS_BACKWARD) else set[str]()
    symbols = {factor: _capitals(factor, mesh) for factor in rule.sizes if factor not in parts}

    def size(factor: str) -> Any:
        return symbol(symbols[factor]) if factor in symbols else rule.sizes[factor]

    def shape(dims: Sequence[Dim]) -> tuple[Any, ...]:
        return tuple(math.prod(size(factor) for factor in dim) for dim in dims)

    types = tuple(TensorType(shape(dims), dtype) for dims, dtype in zip(rule.inputs, dtypes, strict=True))
    outputs = tuple(
        None if type is None else TensorType(shape(dims), type.dtype)
        for dims, type in zip(rule.outputs, node.outputs, strict=True)
    )
    node, axes = replace(node, outputs=outputs), mesh if parts else symbolic(mesh)
    strategy = make_strategy(node, types, rule, roles, axes, *flops_of(node, types))
    held: Any = 0
    if holds_storage(node.op):
        for type, layout in zip(outputs, strategy.gives, strict=True):
            held += 0 if type is None else local_type(type, layout, axes).nbytes
    return OperatorForms(
        work_of(strategy.steps, axes), held, {name: rule.sizes[factor] for factor, name in symbols.items()}
    )


def _capitals(factor: str, mesh: Mesh) -> str:
    name = factor.upper()
    return f"{name}_" if name in mesh.names else name


def symbolic(mesh: Mesh, taken: Collection[str] = ()) -> Mesh:
    """The mesh with a symbol for the size of every axis of more than one rank: the axis' name, if it is not `taken`."""
    names = _axis_symbols(mesh, taken)
    sizes = tuple(
        symbol(names[axis]) if axis in names else size for axis, size in zip(mesh.names, mesh.sizes, strict=True)
    )
    return Mesh(mesh.names, sizes)


def _axis_symbols(mesh: Mesh, taken: Collection[str]) -> dict[str, str]:
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    return {axis: f"{axis}_ranks" if axis in taken else axis for axis, size in sizes.items() if size > 1}


# --- a whole plan ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """What an attention of these local types, which are forms, holds while it runs. It works on whole blocks, of which
    there is no sum of powers: in the closed forms it is a symbol, whose value is found where the sizes are numbers.
    """

    node: Node
    types: tuple[TensorType, ...]

    def nbytes(self, values: Mapping[str, int]) -> int:
        return temporary_bytes(
            self.node,
            [TensorType(tuple(int(at(size, values)) for size in type.shape), type.dtype) for type in self.types],
        )


@dataclass(frozen=True)
class Totals:
    """One training step of one rank, in closed form.

    `work`: the operators, layout changes and the optimizer. `peaks`: the instants at which memory may peak, each with
    the bytes of `STATES` and of `ACTIVATIONS`; memory is the maximum over them. `here`: the plan's values of all
    symbols but those of `scores`, which stand in `peaks` alone.
    """

    work: Work
    peaks: tuple[Mapping[str, Any], ...]
    here: Mapping[str, int]
    scores: Mapping[str, Scores] = field(default_factory=dict[str, Scores])

    def peak(self, values: Mapping[str, int]) -> Fraction:
        """Bytes of device memory at the highest instant."""
        known = {**values, **self._blocks(values)}
        return max(_bytes_at(one, known) for one in self.peaks)

    def highest(self, values: Mapping[str, int]) -> Mapping[str, Any]:
        """The instant that is the highest at these values, with the blocks of attention as large as they are there."""
        blocks = self._blocks(values)
        highest = max(self.peaks, key=lambda one: _bytes_at(one, {**values, **blocks}))
        return {kind: _with_numbers(form, blocks) for kind, form in highest.items()}

    def _blocks(self, values: Mapping[str, int]) -> dict[str, int]:
        return {name: one.nbytes(values) for name, one in self.scores.items()}


def totals(plan: Plan, growth: Growth, pricer: Pricer) -> Totals:
    """The plan's closed forms, in the sizes that grow and the axes of its mesh."""
    mesh = symbolic(plan.mesh, growth.base)
    there = elsewhere(plan, growth, {name: symbol(name) for name in growth.base}, mesh)
    axes = {name: plan.mesh.size(axis) for axis, name in _axis_symbols(plan.mesh, growth.base).items()}
    pricer = replace(pricer, mesh=mesh, bucket_bytes=0)
    here = {**growth.base, **axes}
    workspaces, scores = _blocks_of_attention(there, here)
    return replace(totals_of(there, pricer, here, workspaces, Placing(plan)), scores=scores)


def _blocks_of_attention(there: Decision, here: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Scores]]:
    """(node -> what it holds while it runs, a symbol; what the symbols are). Nodes that hold the same share one."""
    workspaces: dict[str, Any] = {}
    name_of: dict[object, str] = {}
    scores: dict[str, Scores] = {}
    for node in there.graph.nodes:
        if node.op not in OPERANDS_OF_ATTENTION:
            continue
        pairs = zip(operand_types(node, there.graph.by_name), there.choices[node.name].takes, strict=True)
        one = Scores(node, tuple(local_type(*pair, there.mesh) for pair in pairs))
        if not one.nbytes(here):  # which kernel runs does not hang on what grows
            workspaces[node.name] = 0
            continue
        asked = tuple(None if isinstance(arg, Ref) else arg for arg in node.args)
        key = node.op, asked, one.types
        if key not in name_of:
            name_of[key] = f"scores of {node.name}"
            scores[name_of[key]] = one
        workspaces[node.name] = symbol(name_of[key])
    return workspaces, scores


def totals_of(
    there: Decision, pricer: Pricer, here: Mapping[str, int], workspaces: Mapping[str, Any] | None = None,
    placing: Placing | None = None,
) -> Totals:  # fmt: skip
    """Totals of a plan whose sizes are forms, or numbers. `pricer`: one of its mesh; the rest is as in `Lowering`."""

    def number(form: Any) -> float:
        return float(at(form, here))

    program = Lowering(there, pricer, workspaces, placing, number).program(None)
    return Totals(work_of(_all_steps(program), there.mesh), _peaks(program), here)


def _all_steps(program: Program) -> Iterable[Step]:
    for _, instruction in program:
        match instruction:
            case Run(steps=steps, share=share):
                yield from steps if share == 1.0 else (_part_of(step, share) for step in steps)
            case Launch(step=step):
                yield step
            case _:
                pass


def _part_of(step: Step, share: float) -> Step:
    """That share of a copy: the rest stands behind the collective."""
    assert isinstance(step, Compute) and not step.flops, step
    return replace(step, nbytes=step.nbytes * Fraction(share))


def _with_numbers(form: Form | int, numbers: Mapping[str, int]) -> Form:
    """The form with these numbers in the place of their symbols."""
    found: dict[Powers, Fraction] = defaultdict(Fraction)
    for powers, times in terms(form).items():
        left = tuple((name, power) for name, power in powers if name not in numbers)
        found[left] += times * math.prod(Fraction(numbers[name]) ** power for name, power in powers if name in numbers)
    return form_of({powers: times for powers, times in found.items() if times})


def _bytes_at(one: Mapping[str, Any], values: Mapping[str, int]) -> Fraction:
    return sum((at(form, values) for form in one.values()), Fraction(0))


Level = dict[tuple[str, Powers], Fraction]


def _peaks(program: Program) -> tuple[Mapping[str, Any], ...]:
    """Of all instants those that are not below another one whatever the sizes: no term of theirs is larger there."""
    level: Level = defaultdict(Fraction)
    kept: list[tuple[dict[Powers, Fraction], Level]] = []

    def change(buffer: Buffer, sign: int) -> None:
        kind = STATES if buffer.kind in KINDS_OF_STATES else ACTIVATIONS
        for powers, times in terms(buffer.nbytes).items():
            level[kind, powers] += sign * times

    def look() -> None:
        nonlocal kept
        total: dict[Powers, Fraction] = defaultdict(Fraction)
        for (_, powers), times in level.items():
            total[powers] += times
        if not any(_is_below(total, other) for other, _ in kept):
            kept = [(other, at) for other, at in kept if not _is_below(other, total)]
            kept.append((total, dict(level)))

    for buffer in program.resident:
        change(buffer, 1)
    look()
    grows = False
    for _, buffer, sign in changes(program):
        if grows and sign < 0:  # the top of a rise
            look()
        grows = sign > 0
        change(buffer, sign)
    look()
    return tuple(
        {
            kind: form_of({powers: times for (of, powers), times in level.items() if of == kind and times})
            for kind in (STATES, ACTIVATIONS)
        }
        for _, level in kept
    )


def _is_below(one: Mapping[Powers, Fraction], other: Mapping[Powers, Fraction]) -> bool:
    return all(one.get(powers, 0) <= other.get(powers, 0) for powers in {*one, *other})


# --- as text ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """One product of a sum: `times` * `powers`, which is `value` now."""

    times: Fraction
    powers: Powers
    value: Fraction

    def spelled(self) -> str:
        """` * batch * sequence^2 / (data * tensor)`; empty where nothing grows."""

        def words(sign: int) -> list[str]:
            return [
                name if power * sign == 1 else f"{name}^{power * sign}"
                for name, power in self.powers
                if power * sign > 0
            ]

        above, below = words(1), words(-1)
        under = f" / ({' * '.join(below)})" if len(below) > 1 else f" / {below[0]}" if below else ""
        return "".join(f" * {word}" for word in above) + under


def terms_of(form: Form | int | float, here: Mapping[str, int]) -> list[Term]:
    """The largest first."""
    found = [Term(times, powers, at(form_of({powers: times}), here)) for powers, times in terms(form).items()]
    return sorted(found, key=lambda term: (-abs(term.value), term.powers))
