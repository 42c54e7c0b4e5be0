"""decide: the solver's picks become a `Plan`, and an independent referee prices the plan again from its steps alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import isclose
from typing import Any

from autopar.assemble import DEVICE, HOST, Assembled, output_name
from autopar.graph import Graph, Node, Ref, Result, TensorType
from autopar.layout import REPLICATE, Layout, local_type
from autopar.liveness import Liveness, Read, holds_storage, liveness
from autopar.plan import Choice, Delivery, Plan, read_once
from autopar.price import Pricer
from autopar.reshard import Reshard, travels_together
from autopar.settle import settled
from autopar.strategy import Strategy, operand_types
from autopar.work import FETCH, STORE, temporary_bytes
from cost_models.price import stream_of
from cost_models.steps import Comm, Move, Step

ROW = "gradients in a row"


class RefereeError(AssertionError):
    """The solver's objective and the price of its plan disagree: a defect of autopar, never of the user."""


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
    """`tenant` holds `nbytes` of a memory tier during the instants start <= t < end.

    `node`, `index`: the result that it is; or the view through which it is read, or the copy to or from the host that
    reads it, whose every result is meant (None). `read`: the layout changes that made it, of an operand or of a
    result of the graph; `part`: its place among what they make on the way, None for the new tensor.
    `taken_over`: it lies there since the reader before this one, of several that each hold it by themselves.
    """

    tenant: str
    start: float
    end: float
    nbytes: int
    node: str = ""
    index: int | None = None
    read: Read | int | None = None
    part: int | None = None
    tier: str = DEVICE
    taken_over: bool = False


def peak_of(holdings: Sequence[Holding], tier: str = DEVICE) -> tuple[int, int]:
    """(bytes, first instant) of the highest point."""
    change: dict[float, int] = defaultdict(int)
    for held in holdings:
        if held.tier == tier:
            change[held.start] += held.nbytes
            change[held.end] -= held.nbytes
    level, peak, at = 0, 0, 0.0
    for instant in sorted(change):
        level += change[instant]
        if level > peak:
            peak, at = level, instant
    return peak, int(at)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of gradients: `made`, (instant, bytes) of each; `sent_at[place]`, when the row of that result is summed;
    `places`, the results in each.
    """

    made: list[tuple[int, int]]
    sent_at: dict[int, int]
    places: list[tuple[int, ...]]


class Referee:
    """Prices a plan from its steps, by plain loops that share nothing with the solver's matrices.

    `residence`: as in `Plan`.
    """

    def __init__(
        self, graph: Graph, choices: Mapping[str, Choice], deliveries: Sequence[Delivery | None], pricer: Pricer,
        residence: Mapping[str, str] | None = None,
    ):  # fmt: skip
        self.graph, self.choices, self.deliveries, self.pricer = graph, choices, deliveries, pricer
        self.residence = residence or {}
        self.node_of = graph.by_name

    def seconds_by(self) -> dict[str, float]:
        """Seconds of one step: compute, optimizer, reorder (copies of layout changes), communication per axis, and
        copies between device and host, each way.
        """
        total: dict[str, float] = {"compute": 0.0, "optimizer": 0.0, "copies": 0.0}

        def count(steps: Sequence[Step], part: str) -> None:
            for step in steps:
                add(step, self.pricer.seconds((step,)), part)

        def add(step: Step, seconds: float, part: str) -> None:
            name = stream_of(step) if isinstance(step, Comm | Move) else part
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
                count(self.pricer.update_steps(nbytes, type.dtype, self.resides(node.target)), "optimizer")
        for result, delivery in zip(self.graph.results, self.deliveries, strict=True):
            if delivery is not None and result.kind == "gradient":
                for step, seconds in self.pricer.delivered(delivery.changes):
                    add(step, seconds, "copies")
            elif delivery is not None:
                count(self._steps(delivery.changes), "copies")
        return total

    def unfilled(self) -> dict[str, float]:
        """Axis -> seconds that rows of gradients take beyond the shares of full rows at which each gradient is priced.
        A row that is not full waits as long as one that is.
        """
        beyond: dict[str, float] = defaultdict(float)
        for places in self._rows(self.live).places:
            row = [delivery.changes for place in places if (delivery := self.deliveries[place]) is not None]
            shares = [(step, -seconds) for changes in row for step, seconds in self.pricer.delivered(changes)]
            for step, seconds in (*self.pricer.row(row), *shares):
                if isinstance(step, Comm):
                    beyond[step.axis] += seconds
        return dict(beyond)

    def holdings(self, *, overlap: bool = False) -> list[Holding]:
        """Everything that one rank holds in a step: who, from which instant until before which, how many bytes, and
        in which tier.

        Layout changes of one value share an instant: what they make on the way counts once, the most of it, less what
        they start from where that is gone by then. `overlap`: each counts by itself, as `autopar.holds` knows when.
        """
        live, rows = self.live, self._rows(self.live)
        held: list[Holding] = []

        def hold(
            tenant: str, start: float, end: float, nbytes: int, node: str = "",
            read: Read | int | None = None, part: int | None = None, tier: str = DEVICE, index: int | None = None,
            taken_over: bool = False,
        ) -> None:  # fmt: skip
            if nbytes and end > start:
                held.append(Holding(tenant, start, end, nbytes, node, index, read, part, tier, taken_over))

        def change(
            tenant: str, node: str, by: Read | int, span: tuple[int, int], new: int, changes: Sequence[Reshard]
        ) -> None:
            """What layout changes of one value make; sizes that are forms have no largest, so each has its own time."""
            start, end = span
            rooms: list[Any] = self.pricer.rooms(changes)
            if overlap:
                rooms = [max(pair) for pair in zip(rooms[::2], rooms[1::2], strict=True)]
            elif (gone := live.gone.get(by)) is not None:
                rooms[1:] = [room - gone.of(changes[0].local.nbytes) for room in rooms[1:]]
            if not overlap and all(isinstance(room, int) for room in rooms):
                rooms = [max(rooms)]
            for part, room in enumerate(rooms):
                hold(tenant, start + part / len(rooms), start + (part + 1) / len(rooms), room, "", by, part)
            hold(tenant, start + 1, end, new, node, by)

        for node in self.graph.nodes:
            choice = self.choices[node.name]
            for index, (type, layout) in enumerate(zip(node.outputs, choice.gives, strict=True)):
                if type is not None and (span := live.made.get(Ref(node.name, index))) is not None:
                    nbytes = self.pricer.local_bytes(type, layout)
                    hold(tenant_name(node), *span, nbytes, node.name, tier=self.tier_of(node), index=index)
            if node.op == "parameter" and node.target in live.update_at:
                held += self._optimizers(node, self._new_bytes(Ref(node.name), choice.gives[0]))
            through = node.name if not holds_storage(node.op) or node.op in (STORE, FETCH) else ""
            types = operand_types(node, self.node_of)
            if temporary_bytes(node, types):  # of few operators, whatever the layouts
                local = [local_type(t, layout, self.pricer.mesh) for t, layout in zip(types, choice.takes, strict=True)]
                hold(tenant_name(node), live.at[node.name], live.at[node.name] + 1, temporary_bytes(node, local))
            seen: set[object] = set()
            for position, (ref, layout) in enumerate(zip(node.operands, choice.takes, strict=True)):
                by, changes = (node.name, position), choice.reads[position]
                if changes and (ref, layout) not in seen:
                    new = self._new_bytes(ref, layout)
                    tenant = f"{_told(self.node_of[ref.name])} resharded for {node.name}"
                    change(tenant, through, by, (live.read_at[by], live.new_until[by]), new, changes)
                seen.add((ref, layout))
                if (turn := live.turn_of.get(by)) is not None:
                    maker = self.node_of[ref.name]
                    nbytes = self._made_bytes(turn.storage)
                    tier = self.tier_of(maker)
                    hold(tenant_name(maker), turn.start, turn.end, nbytes, through, tier=tier, taken_over=True)
        for place, (result, delivery) in enumerate(zip(self.graph.results, self.deliveries, strict=True)):
            if result.ref is None or delivery is None:
                continue
            new, is_gradient = self._new_bytes(result.ref, delivery.layout), result.kind == "gradient"
            tenant = {"gradient": "gradient of ", "output": "output ", "buffer": "new "}[result.kind] + result.target
            span = live.sent_at[place], live.sent_until[place]
            leaves = is_gradient and self.resides(result.target) == HOST
            if is_gradient and self._travels(delivery):
                hold(tenant, span[0] + 1, rows.sent_at[place] + 1 if leaves else span[1], new, "", place)
            elif delivery.changes:
                change(tenant, "", place, span, new, delivery.changes)
            if (turn := live.sent_turn.get(place)) is not None:
                of = (result.ref.name, None) if leaves else ("", place)
                hold(tenant, turn.start, turn.end, self._made_bytes(turn.storage), *of)
            if leaves:
                hold(tenant, rows.sent_at.get(place, span[0]), live.instants, new, "", place, tier=HOST)
        for start, nbytes in rows.made:
            hold(ROW, start, start + 1, nbytes)
        hold("coordinates", 0, live.instants, self.pricer.coordinate_bytes)
        return held

    def resides(self, parameter: str) -> str:
        return self.residence.get(parameter, "device")

    def tier_of(self, node: Node) -> str:
        """Where the results of a node lie."""
        hosted = node.op == STORE or (node.op == "parameter" and self.resides(node.target) == HOST)
        return HOST if hosted else DEVICE

    def _optimizers(self, node: Node, nbytes: Any) -> list[Holding]:
        """The optimizer's states for a parameter of so many bytes, and what it makes and drops while it updates it.

        Those of one residence are stepped together, or one after the other; those that stream each by itself.
        """
        live, pricer, made, resides = self.live, self.pricer, self.pricer.temporaries, self.resides(node.target)
        at, tier = live.update_at[node.target], HOST if resides == HOST else DEVICE
        states, beside = f"optimizer states of {node.target}", f"optimizer's temporaries for {node.target}"
        all_states = pricer.state_bytes(nbytes)
        found = [
            Holding(states, 0, live.instants, all_states, tier=DEVICE if resides == "device" else HOST),
            Holding(f"count of updates of {node.target}", 0, live.instants, pricer.counter_bytes),
        ]
        if resides == "stream":
            own = made.together if pricer.updates_together else made.own
            spans = [(at, at + 1, own)]
            found.append(Holding(f"streamed states of {node.target}", at, at + 1, all_states))
        elif resides == "device" and pricer.updates_together:
            spans = [(live.gathered_at + 1, live.instants, made.together)]
        else:
            later = (other for name, other in live.update_at.items() if other > at and self.resides(name) == resides)
            spans = [(at, at + 1, made.own), *((other, other + 1, made.left) for other in islice(later, 1))]
        found += [Holding(beside, start, end, times * nbytes, tier=tier) for start, end, times in spans]
        return [held for held in found if held.nbytes]

    @cached_property
    def live(self) -> Liveness:
        """When each storage lives, with the layout changes of these choices."""
        changed: set[Read | int] = {
            (node.name, position)
            for node in self.graph.nodes
            for position, read in enumerate(self.choices[node.name].reads)
            if read
        }
        changed |= {
            place for place, delivery in enumerate(self.deliveries) if delivery is not None and delivery.changes
        }
        leaving = [
            place
            for place, result in enumerate(self.graph.results)
            if result.kind == "gradient" and self.resides(result.target) == HOST
        ]
        return liveness(self.graph, changed, leaving)

    def _travels(self, delivery: Delivery) -> bool:
        return travels_together(delivery.changes, self.pricer.mesh, self.pricer.bucket_bytes)

    def _rows(self, live: Liveness) -> _Rows:
        """The copies that gradients are made of before they are summed together."""
        rows: dict[object, list[int]] = defaultdict(list)
        nbytes: dict[object, int] = defaultdict(int)
        found = _Rows([], {}, [])
        for place, at in sorted(live.sent_at.items(), key=lambda item: item[1]):
            result, delivery = self.graph.results[place], self.deliveries[place]
            if result.kind != "gradient" or delivery is None or not self._travels(delivery):
                continue
            local = delivery.changes[0].local
            leaves = self.resides(result.target) == HOST
            key = tuple(change.axis for change in delivery.changes), local.dtype, leaves
            rows[key].append(place)
            nbytes[key] += local.nbytes
            if nbytes[key] >= self.pricer.bucket_bytes:
                found.made.append((at, nbytes.pop(key)))
                found.places.append(tuple(rows.pop(key)))
                found.sent_at.update(dict.fromkeys(found.places[-1], at))
        if nbytes:
            found.made.append((live.gathered_at, max(nbytes.values())))
        found.sent_at.update({place: live.gathered_at for places in rows.values() for place in places})
        found.places.extend(map(tuple, rows.values()))
        return found

    def _steps(self, changes: Sequence[Reshard]) -> list[Step]:
        return [step for change in changes for step in change.steps(self.pricer.mesh.size(change.axis))]

    def _type(self, ref: Ref) -> TensorType:
        type = self.node_of[ref.name].outputs[ref.index]
        assert type is not None
        return type

    def _made_bytes(self, ref: Ref) -> int:
        """Of a storage as its maker gives it."""
        return self._new_bytes(ref, self.choices[ref.name].gives[ref.index])

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
    found = settled(graph, assembled, picks, pricer.mesh)
    choices, deliveries = choose(found.graph, found.pick, pricer)
    return refereed(
        found.graph, choices, deliveries, pricer,
        objective=objective, bound=bound, memory=memory, outputs=outputs, notes=notes, search=search,
        residence=found.residence,
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
    residence: Mapping[str, str] | None = None,
) -> Plan:
    """A plan of given choices with the referee's own prices; `objective` is what somebody claims it costs."""
    referee = Referee(graph, choices, deliveries, pricer, residence)
    seconds_by = referee.seconds_by()
    total = sum(seconds_by.values())
    if objective is not None and not isclose(total, objective, rel_tol=1e-6, abs_tol=1e-12):
        raise RefereeError(f"the solver claims {objective:.9g} s a step, its plan costs {total:.9g} s")
    holdings = referee.holdings()
    peaks = {tier: peak_of(holdings, tier)[0] for tier in sorted({DEVICE, *(held.tier for held in holdings)})}
    peak = peaks[DEVICE]
    if memory is not None and objective is not None and peak > memory * (1 + 1e-9):
        raise RefereeError(f"the solver's plan needs {peak} bytes, the limit is {memory:.0f}")
    # Where transfers overlap compute, only the timeline tells what they delay.
    played = total + sum(referee.unfilled().values()) if pricer.bucket_bytes and not pricer.hardware.overlaps else None
    return Plan(
        graph, pricer.mesh, pricer.hardware.name, pricer.hardware.digest, pricer.optimizer, memory, outputs,
        choices, deliveries, total, min(bound, total), peaks, seconds_by, tuple(notes),
        bucket_bytes=pricer.bucket_bytes, search=dict(search or {}), simulated_seconds=played,
        residence=dict(sorted(referee.residence.items())), tf32=pricer.hardware.tf32,
    )  # fmt: skip
