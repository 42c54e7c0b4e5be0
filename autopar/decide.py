"""decide: the solver's picks become a `Plan`, and an independent referee prices the plan again from its steps alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from autopar.assemble import DEVICE, Assembled, output_name
from autopar.graph import Graph, Node, Ref, Result, TensorType
from autopar.layout import REPLICATE, Layout
from autopar.liveness import holds_storage, liveness
from autopar.plan import Choice, Delivery, Plan, read_once
from autopar.price import Pricer
from autopar.reshard import Reshard
from autopar.strategy import Strategy, operand_types
from cost_models.steps import Comm, Step


class RefereeError(AssertionError):
    """The solver's objective and the price of its plan disagree: a defect of autopar, never of the user."""


def picked(assembled: Assembled, picks: Sequence[int]) -> Callable[[str], Strategy]:
    """node or output name -> the strategy that was picked for it."""
    return lambda name: assembled.options[assembled.item_of[name]][picks[assembled.item_of[name]]]


def choose(
    graph: Graph, pick: Callable[[str], Strategy], pricer: Pricer
) -> tuple[dict[str, Choice], tuple[Delivery | None, ...]]:
    """Spell every choice out: strategies, and the layout changes between them."""
    node_of = graph.by_name
    strategy_of = {node.name: pick(node.name) for node in graph.nodes}
    layout_of = {node.target: strategy_of[node.name].gives[0] for node in graph.nodes if node.op == "parameter"}
    choices: dict[str, Choice] = {}
    for node in graph.nodes:
        strategy = strategy_of[node.name]
        reads = tuple(
            pricer.resharder.path(type, strategy_of[ref.name].gives[ref.index], takes)
            for ref, type, takes in zip(node.operands, operand_types(node, node_of), strategy.takes, strict=True)
        )
        choices[node.name] = Choice(
            strategy.roles,
            strategy.takes,
            strategy.gives,
            strategy.body,
            strategy.body_axes,
            strategy.body_size,
            strategy.steps,
            reads,
        )

    def deliver(result: Result) -> Delivery | None:
        if result.ref is None:
            return None
        type, gives = graph.type_of(result.ref), strategy_of[result.ref.name].gives[result.ref.index]
        match result.kind:
            case "gradient":
                layout = layout_of[result.target]
                return Delivery(pricer.delivery(type, gives, layout), layout)
            case "output":
                layout = pick(output_name(result.target)).gives[0]
            case "buffer":
                layout = (REPLICATE,) * len(pricer.mesh.sizes)
        return Delivery(pricer.resharder.path(type, gives, layout), layout)

    return choices, tuple(deliver(result) for result in graph.results)


@dataclass(frozen=True, slots=True)
class Holding:
    """`tenant` holds `nbytes` of the device during the instants start <= t < end."""

    tenant: str
    start: int
    end: int
    nbytes: int


def peak_of(holdings: Sequence[Holding]) -> tuple[int, int]:
    """(bytes, first instant) of the highest point."""
    change: dict[int, int] = defaultdict(int)
    for held in holdings:
        change[held.start] += held.nbytes
        change[held.end] -= held.nbytes
    level, peak, at = 0, 0, 0
    for instant in sorted(change):
        level += change[instant]
        if level > peak:
            peak, at = level, instant
    return peak, at


class Referee:
    """Prices a plan from its steps, by plain loops that share nothing with the solver's matrices."""

    def __init__(
        self, graph: Graph, choices: Mapping[str, Choice], deliveries: Sequence[Delivery | None], pricer: Pricer
    ):
        self.graph, self.choices, self.deliveries, self.pricer = graph, choices, deliveries, pricer
        self.node_of = graph.by_name

    def seconds_by(self) -> dict[str, float]:
        """Seconds of one step: compute, optimizer, reorder (copies of layout changes), and communication per axis."""
        total: dict[str, float] = {"compute": 0.0, "optimizer": 0.0, "copies": 0.0}

        def count(steps: Sequence[Step], part: str) -> None:
            for step in steps:
                add(step, self.pricer.seconds((step,)), part)

        def add(step: Step, seconds: float, part: str) -> None:
            name = f"comm:{step.axis}" if isinstance(step, Comm) else part
            total[name] = total.get(name, 0.0) + seconds

        for node in self.graph.nodes:
            for read in read_once(node, self.choices[node.name]):
                count(self._steps(read), "copies")
            count(self.choices[node.name].steps, "compute")
        trained = {r.target for r in self.graph.results if r.kind == "gradient" and r.ref is not None}
        for node in self.graph.nodes:
            if node.op == "parameter" and node.target in trained:
                type = self._type(Ref(node.name))
                nbytes = self.pricer.local_bytes(type, self.choices[node.name].gives[0])
                count((self.pricer.update_step(nbytes, type.dtype),), "optimizer")
        for result, delivery in zip(self.graph.results, self.deliveries, strict=True):
            if delivery is not None and result.kind == "gradient":
                for step, seconds in self.pricer.delivered(delivery.changes):
                    add(step, seconds, "copies")
            elif delivery is not None:
                count(self._steps(delivery.changes), "copies")
        return total

    def holdings(self) -> list[Holding]:
        """Everything that one rank's device holds in a step: who, from which instant until before which, how many
        bytes.
        """
        live = liveness(self.graph)
        held: list[Holding] = []

        def hold(tenant: str, start: int, end: int, nbytes: int) -> None:
            if nbytes:
                held.append(Holding(tenant, start, end, nbytes))

        for node in self.graph.nodes:
            at, end = live.at[node.name], live.end_of[node.name]
            choice = self.choices[node.name]
            if holds_storage(node.op):
                nbytes = sum(
                    self.pricer.local_bytes(type, layout)
                    for type, layout in zip(node.outputs, choice.gives, strict=True)
                    if type is not None
                )
                start = 0 if node.is_source and node.op != "tangent" else at
                hold(tenant_name(node), start, end, nbytes)
                if node.op == "parameter" and node.target in live.grad_at:
                    hold(f"optimizer states of {node.target}", 0, live.instants, self.pricer.state_bytes(nbytes))
                    hold(f"gradient of {node.target}", live.grad_at[node.target] + 1, live.instants, nbytes)
            seen: set[object] = set()
            for ref, layout, read in zip(node.operands, choice.takes, choice.reads, strict=True):
                if read and (ref, layout) not in seen:
                    until = at + 1 if holds_storage(node.op) else end
                    hold(
                        f"{_told(self.node_of[ref.name])} resharded for {node.name}",
                        at,
                        until,
                        self._new_bytes(ref, layout),
                    )
                    seen.add((ref, layout))
        for result, delivery in zip(self.graph.results, self.deliveries, strict=True):
            if result.ref is not None and delivery is not None and delivery.changes:
                at = live.at[result.ref.name]
                end = at + 1 if result.kind == "gradient" else live.instants
                hold(f"{result.kind} {result.target}", at, end, self._new_bytes(result.ref, delivery.layout))
        return held

    def _steps(self, changes: Sequence[Reshard]) -> list[Step]:
        return [step for change in changes for step in change.steps(self.pricer.mesh.size(change.axis))]

    def _type(self, ref: Ref) -> TensorType:
        type = self.node_of[ref.name].outputs[ref.index]
        assert type is not None
        return type

    def _new_bytes(self, ref: Ref, layout: Layout) -> int:
        return self.pricer.local_bytes(self._type(ref), layout)


def tenant_name(node: Node) -> str:
    return f"{node.op} {node.target}" if node.is_source else _told(node)


def _told(node: Node) -> str:
    if node.is_source:
        return node.target
    return f"{node.name} ({node.module})" if node.module else node.name


def decide(
    graph: Graph,
    assembled: Assembled,
    picks: Sequence[int],
    pricer: Pricer,
    *,
    objective: float,
    bound: float,
    memory: float | None,
    outputs: str,
    notes: Sequence[str],
    search: Mapping[str, float | int | str],
) -> Plan:
    """The plan of the solver's picks, refereed. Raises RefereeError where objective and price, or memory and limit,
    disagree.
    """
    choices, deliveries = choose(graph, picked(assembled, picks), pricer)
    return refereed(
        graph, choices, deliveries, pricer,
        objective=objective, bound=bound, memory=memory, outputs=outputs, notes=notes, search=search,
    )  # fmt: skip


def refereed(
    graph: Graph,
    choices: Mapping[str, Choice],
    deliveries: tuple[Delivery | None, ...],
    pricer: Pricer,
    *,
    objective: float | None,
    bound: float,
    memory: float | None,
    outputs: str,
    notes: Sequence[str] = (),
    search: Mapping[str, float | int | str] | None = None,
) -> Plan:
    """A plan of given choices with the referee's own prices; `objective` is what somebody claims it costs."""
    referee = Referee(graph, choices, deliveries, pricer)
    seconds_by = referee.seconds_by()
    total = sum(seconds_by.values())
    if objective is not None and not isclose(total, objective, rel_tol=1e-6, abs_tol=1e-12):
        raise RefereeError(f"the solver claims {objective:.9g} s a step, its plan costs {total:.9g} s")
    peak, _ = peak_of(referee.holdings())
    if memory is not None and objective is not None and peak > memory * (1 + 1e-9):
        raise RefereeError(f"the solver's plan needs {peak} bytes, the limit is {memory:.0f}")
    return Plan(
        graph, pricer.mesh, pricer.hardware.name, pricer.hardware.digest, pricer.optimizer, memory, outputs,
        choices, deliveries, total, min(bound, total), {DEVICE: peak}, seconds_by, tuple(notes),
        bucket_bytes=pricer.bucket_bytes, search=dict(search or {}),
    )  # fmt: skip
