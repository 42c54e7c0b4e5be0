"""lower: a plan becomes one rank's program.

The order is that of `autopar.lower.schedule`; a layout change becomes its parts, a bucket of gradients is put together,
summed and taken apart. Behind backward the optimizer updates each parameter. Then every buffer is allocated in front of
what makes it and freed behind the last instruction that needs it. Nothing is priced here, and nothing decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from autopar.assemble.liveness import holds_storage
from autopar.ir.graph import Node, Phase, Ref, TensorType
from autopar.ir.layout import Layout, local_type
from autopar.ir.work import STORE
from autopar.lower.listing import Listing
from autopar.lower.loops import lowered
from autopar.lower.placed import Placing
from autopar.lower.program import (
    GIVEN,
    OPTIMIZER,
    Buffer,
    Copy,
    Free,
    Instruction,
    Kind,
    Launch,
    Local,
    Operator,
    Program,
    Read,
    Run,
    Send,
    Transfer,
    Wait,
)
from autopar.lower.results import (
    OWNER_OF_RESULT,
    RESULT_KIND,
    given_as_made,
    joined,
    of_the_step_before,
    owner_of,
    told,
)
from autopar.lower.schedule import Advance, Facts, Turn, schedule
from autopar.lower.sums import AddedUp, summed_once
from autopar.lower.taken import in_body_of, takes_of
from autopar.lower.transfers import changes_of, in_a_bucket, leaves, leaving
from autopar.lower.updates import Trained, Updates, left_by, read_once_a_step
from autopar.plan.plan import Plan
from autopar.plan.value import Decision
from autopar.price.pricer import Pricer
from autopar.price.reshard import Part, Reshard, Work, travels_together
from autopar.propose.strategies import operand_types
from autopar.rules.looped import Offer
from autopar.rules.patterns import is_pattern, offered
from cost_models.steps import DEVICE, HOST, Comm, Move

BUCKET = "gradients in a bucket"


def lower(plan: Decision | Plan, prefetch: int | None, pricer: Pricer | None = None) -> Program:
    """One rank's step, with transfers `prefetch` products ahead (`autopar.lower.schedule`); None: none runs beside
    compute.

    `pricer`: of the optimizer that updates the parameters; None: forward and backward alone, as code is made of them.
    """
    return Lowering(plan, pricer).program(prefetch)


class Lowering:
    """`lower` of one plan, as often as one likes: what is the same each time is found out once.

    Where sizes are forms, they do not say all: `workspaces`, node -> bytes that it takes while it runs; `placing`, how
    values lie in memory; `number`: what a form comes to.
    """

    def __init__(
        self, plan: Decision | Plan, pricer: Pricer | None = None, workspaces: Mapping[str, Any] | None = None,
        placing: Placing | None = None, number: Callable[[Any], float] = float,
    ) -> None:  # fmt: skip
        self.plan, self.pricer, self.facts, self.number = plan, pricer, Facts(plan), number
        self.workspaces, self.placing = workspaces or {}, placing or Placing(plan)
        self.parts_of: dict[Reshard, tuple[Part, ...]] = {}
        self.bytes_of: dict[tuple[TensorType, Layout], Any] = {}
        self.offers: dict[str, Offer] = {}
        self.taken: dict[str, Any] = {}

    def program(self, prefetch: int | None) -> Program:
        if prefetch is not None and prefetch < 0:
            raise ValueError(f"prefetch is {prefetch}; it counts operators, from 0")
        return _Program(self, prefetch).made()

    def parts(self, change: Reshard) -> tuple[Part, ...]:
        if change not in self.parts_of:
            self.parts_of[change] = change.parts(self.plan.mesh.size(change.axis))
        return self.parts_of[change]

    def offer(self, node: Node, pattern: str) -> Offer:
        """What the pattern offers that was chosen."""
        if node.name not in self.offers:
            types, roles = operand_types(node, self.plan.graph.by_name), self.plan.choices[node.name].roles
            offer = offered(node, types, self.plan.mesh, pattern, roles)
            assert offer is not None, f"%{node.name} has no {pattern} {roles}"
            self.offers[node.name] = offer
        return self.offers[node.name]

    def workspace(self, node: Node) -> Any:
        """Bytes that a node takes while it runs, copies of its operands among them."""
        if node.name not in self.taken:
            given = self.workspaces.get(node.name)
            self.taken[node.name] = takes_of(node, self.plan) if given is None else given
            types, takes = operand_types(node, self.plan.graph.by_name), self.plan.choices[node.name].takes
            self.taken[node.name] += sum(self.nbytes(types[at], takes[at]) for at in self.placing.copied(node.name))
        return self.taken[node.name]

    def nbytes(self, type: TensorType, layout: Layout) -> Any:
        """Of the piece of one rank."""
        key = type, layout
        if key not in self.bytes_of:
            self.bytes_of[key] = local_type(type, layout, self.plan.mesh).nbytes
        return self.bytes_of[key]


@dataclass(slots=True)
class _Way:
    """A transfer on its way: `values`, what it has come to (several before and after a bucket), and what is left of it.

    `in_flight`: launches that nobody has waited for.
    """

    values: tuple[int, ...]
    parts: Iterator[tuple[Part, Reshard | None]]
    owner: str
    kind: Kind
    in_flight: list[Launch] = field(default_factory=list[Launch])
    in_bucket: bool = False


class _Program:
    def __init__(self, lowering: Lowering, prefetch: int | None) -> None:
        self.lowering, self.prefetch, self.pricer = lowering, prefetch, lowering.pricer
        plan = self.plan = lowering.plan
        self.graph, self.mesh = plan.graph, plan.mesh
        self.node_of = plan.graph.by_name
        self.listing = Listing()
        self.value_of: dict[Ref, int] = {}
        self.ways: dict[Transfer, _Way] = {}
        self.results: dict[int, int] = {}
        self.added_up = AddedUp(plan, self.listing, lowering.nbytes)
        coordinates = Buffer(self.mesh.coordinate_bytes, Kind.COORDINATES, "coordinates")
        self.resident = [coordinates, *self.added_up.stay]
        self.tangents: list[Buffer] = []
        self.casts = [*self.added_up.go]  # and all else that is there from the first micro-batch to the last
        self.stored: dict[str, int] = {}  # parameters of which something else is read
        self.given = given_as_made(plan, self._moves)

    def made(self) -> Program:
        sources, listing = self._sources(), self.listing
        phases: tuple[Phase, ...] = ("forward", "backward")
        gone, before = list[Buffer](), list[Buffer]()
        for phase in phases:
            self._phase(phase)
            listing.ends[phase] = len(listing.done)
            gone += joined(self.graph, self.results, listing, phase, self.resident)
            if phase == "forward":
                before = of_the_step_before(self.graph, self.results, listing)
            if phase == "forward" or self.graph.rounds.count > 1:  # rounds run both phases in one call
                listing.keep(before)
        listing.keep([*self.tangents, *self.casts])
        updates = [] if self.pricer is None else self._update_parameters(self.pricer)
        resident = {*self.resident}
        given = dict.fromkeys(buffer for value in self.results.values() for buffer in listing.values[value])
        kept = [buffer for buffer in given if buffer not in resident and buffer not in gone]
        opens = {"forward": [*before, *self.casts], "backward": self.tangents}
        instructions = listing.with_memory({*resident, *kept}, opens)
        instructions[OPTIMIZER] = (*updates, *map(Free, left_by(updates, kept)))
        return Program(instructions, tuple(self.resident), tuple(listing.values), sources, dict(self.results))

    def _phase(self, phase: Phase) -> None:
        for action in schedule(self.lowering.facts, phase, self.prefetch):
            match action:
                case Turn(name):
                    if not (node := self.node_of[name]).is_source:
                        self._node(node)
                case Advance(transfer):
                    self._advance(transfer)
        if phase == "backward":
            self._take_apart()

    # --- values ------------------------------------------------------------------------------------------------------

    def _sources(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for node in self.graph.nodes:
            if node.is_source and node.outputs[0] is not None:
                piece = self.lowering.nbytes(node.outputs[0], self.plan.choices[node.name].gives[0])
                nbytes, tier = self.graph.rounds.held(node.name) * piece, self._tier_of(node)
                buffer = Buffer(nbytes, Kind(node.op), owner_of(node), tier)
                if node.name in self.graph.rounds.stored or self.plan.choices[node.name].stored:
                    self.resident.append(replace(buffer, nbytes=self._stored_bytes(node)))
                    self.stored[node.name] = self.listing.given(self.resident[-1])
                    self.casts.append(buffer := replace(buffer, kind=Kind.CAST, owner=f"{buffer.owner} as it is read"))
                else:
                    (self.resident if buffer.kind in GIVEN else self.tangents).append(buffer)
                found[node.name] = self.value_of[Ref(node.name)] = self.listing.given(buffer)
        return found

    def _stored_bytes(self, node: Node) -> Any:
        return self.lowering.nbytes(self.graph.stored_type(node), self.plan.choices[node.name].lies)

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        choice, brought = self.plan.choices[node.name], dict[tuple[Ref, Layout], int]()
        reads: list[int] = []
        for position, (ref, layout) in enumerate(zip(node.operands, choice.takes, strict=True)):
            if (ref, layout) not in brought:
                brought[ref, layout] = self._brought(Read(node.name, position), ref)
            reads.append(brought[ref, layout])
        if is_pattern(choice.body):
            self._loop(node, choice.body, reads)
            return
        makes: list[int | None] = []
        looked_at = (
            () if holds_storage(node.op) else tuple(dict.fromkeys(b for v in reads for b in self.listing.values[v]))
        )
        for index, (type, layout) in enumerate(zip(node.outputs, choice.gives, strict=True)):
            if type is None:
                makes.append(None)
                continue
            if looked_at:
                value = self.listing.value(looked_at)
            else:
                kind, owner = self.given.get(Ref(node.name, index), (Kind.VALUE, owner_of(node)))
                value = self.listing.new(self.lowering.nbytes(type, layout), kind, owner, self._tier_of(node))
            makes.append(value)
            self.value_of[Ref(node.name, index)] = value
        steps = tuple(step for step in choice.steps if not isinstance(step, Comm) or step.ranks > 1)
        takes = (Buffer(size, Kind.WORKSPACE, owner_of(node)),) if (size := self.lowering.workspace(node)) else ()
        run = Run(Operator(node.name), steps, tuple(reads), tuple(makes), takes=takes)
        self.listing.do(run, makes, takes, in_body_of(node, self.plan, self.lowering.number))

    def _loop(self, node: Node, pattern: str, reads: Sequence[int]) -> None:
        offer = self.lowering.offer(node, pattern)
        refs = {name: Ref(node.name, index) for index, name in enumerate(offer.loop.gives)}
        results = {name: self.given.get(ref, (Kind.VALUE, owner_of(node))) for name, ref in refs.items()}
        ranks, beside = self.mesh.size(offer.axis), self.prefetch is not None
        made = lowered(self.listing, node, owner_of(node), offer, ranks, reads, results, beside=beside)
        self.value_of |= {ref: made[name] for name, ref in refs.items()}

    def _brought(self, read: Read, ref: Ref) -> int:
        """The operand in the layout in which it is read."""
        way = self.ways.pop(read, None)
        if way is None:
            return self.value_of[ref]
        (value,) = way.values
        return value

    # --- transfers ---------------------------------------------------------------------------------------------------

    def _advance(self, transfer: Transfer) -> None:
        """Wait for what is in flight, then go on up to the next launch."""
        if transfer not in self.ways:
            self.ways[transfer] = self._begin(transfer)
        way = self.ways[transfer]
        for launch in way.in_flight:
            self.listing.do(Wait(launch.number, transfer))
        way.in_flight = []
        for part, change in way.parts:
            if part.what is None:
                self._launch(transfer, way, part, change)
                return
            self._run(transfer, way, part, part.what, change)
        self._arrive(transfer, way)

    def _begin(self, transfer: Transfer) -> _Way:
        match transfer:
            case Read(reader, position):
                ref = self.node_of[reader].operands[position]
                owner = f"{told(self.node_of[ref.name])} resharded for {reader}"
                parts = self._parts(changes_of(self.plan, transfer))
                return _Way((self.value_of[ref],), parts, owner, Kind.RESHARDED)
            case Copy(name):
                node = self.node_of[name]
                value = self._brought(Read(name, 0), node.operands[0])
                parts = iter([(Part(None, self.plan.choices[name].steps), None)])
                return _Way((value,), parts, owner_of(node), Kind.VALUE)
            case Send():
                return self._sending(transfer)

    def _sending(self, send: Send) -> _Way:
        """Results on their way. Gradients that travel together are put in one row; one alone is priced as if it was."""
        places, first = send.results, send.results[0]
        results = [self.graph.results[place] for place in places]
        refs = [result.ref for result in results if result.ref is not None]
        changes, is_gradient = changes_of(self.plan, send), results[0].kind == "gradient"
        in_bucket = is_gradient and travels_together(changes, self.mesh, self.plan.bucket_bytes)
        parts = in_a_bucket(self.plan, places) if in_bucket else self._parts(changes)
        owner = BUCKET if len(places) > 1 else OWNER_OF_RESULT[results[0].kind] + results[0].target
        kind = Kind.BUCKET if len(places) > 1 else RESULT_KIND[results[0].kind]
        if is_gradient and leaves(self.plan, first):
            parts = chain(parts, leaving(self.plan, places))
        values = tuple(self.value_of[ref] for ref in refs)
        return _Way(values, parts, owner, kind, in_bucket=in_bucket)

    def _parts(self, changes: Sequence[Reshard]) -> Iterator[tuple[Part, Reshard | None]]:
        for change in changes:
            for part in self.lowering.parts(change):
                yield part, change

    def _run(self, transfer: Transfer, way: _Way, part: Part, work: Work, change: Reshard | None) -> None:
        if work is Work.UNFLATTEN:
            assert isinstance(transfer, Send)
            makes = tuple(self.listing.view(way.values[0]) for _ in transfer.results)
        elif part.made is None:
            makes = (self.listing.view(way.values[0]),)
        else:
            makes = (self.listing.new(part.made, way.kind, way.owner),)
        what = Local(work, transfer, part.dim, change)
        self.listing.do(Run(what, part.steps, way.values, makes, part.share), makes)
        way.values = makes

    def _launch(self, transfer: Transfer, way: _Way, part: Part, change: Reshard | None) -> None:
        """One collective; or the copies of all values, each by itself."""
        made: list[int] = []
        for value, one in zip(way.values, part.steps, strict=True):
            if isinstance(one, Move):
                kind, owner = way.kind, way.owner
                if isinstance(transfer, Send):
                    target = self.graph.results[transfer.results[len(made)]].target
                    kind, owner = Kind.GRADIENT, f"gradient of {target}"
                new = self.listing.new(one.nbytes, kind, owner, one.dst)
            elif part.made is None:
                new = self.listing.view(value)
            else:
                new = self.listing.new(part.made, way.kind, way.owner)
            assert isinstance(one, Comm | Move)
            is_comm = isinstance(one, Comm)
            launch = Launch(
                self.listing.launches, one, transfer, (value,), (new,), change,
                in_place=is_comm and part.made is None, in_bucket=is_comm and way.in_bucket,
            )  # fmt: skip
            self.listing.do(launch, (new,))
            way.in_flight.append(launch)
            made.append(new)
        way.values = tuple(made)

    def _arrive(self, transfer: Transfer, way: _Way) -> None:
        match transfer:
            case Read():
                pass  # its reader takes it
            case Copy(name):
                (self.value_of[Ref(name)],) = way.values
            case Send(places):
                for place, value in zip(places, way.values, strict=True):
                    self.results[place] = self.added_up.add(place, value)

    def _take_apart(self) -> None:
        """Whoever is given a gradient may write to it: copy those that look at what somebody else has."""
        taken: set[Buffer] = set()
        for place, (result, delivery) in enumerate(zip(self.graph.results, self.plan.deliveries, strict=True)):
            given = result.kind == "gradient" and delivery is not None and place not in self.added_up.so_far
            if not given or result.ref is None or delivery is None or self._moves(delivery.changes):
                continue
            value = self.results[place]
            buffer = self.listing.values[value][0]
            if buffer in taken or not self.listing.is_made_behind(buffer, "forward"):
                nbytes = self.lowering.nbytes(self.graph.type_of(result.ref), delivery.layout)
                copy = self.listing.new(nbytes, Kind.GRADIENT, f"gradient of {result.target}")
                self.listing.do(Run(Local(Work.CLONE, Send((place,))), (), (value,), (copy,)), (copy,))
                self.results[place] = copy
            taken.add(buffer)

    def _moves(self, changes: Sequence[Reshard]) -> bool:
        """Whether layout changes make a new tensor."""
        return any(self.mesh.size(change.axis) > 1 for change in changes)

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def _update_parameters(self, pricer: Pricer) -> list[Instruction]:
        places = {result.target: place for place, result in enumerate(self.graph.results) if result.kind == "gradient"}
        parameters, gradients = list[Trained](), dict(self.results)
        for node in self.graph.trained:
            dtype, resides = self.graph.stored_type(node).dtype, self.plan.residence.get(node.target, "device")
            value, place = self.stored.get(node.name, self.value_of[Ref(node.name)]), places[node.target]
            parameters.append(Trained(node.target, place, self._stored_bytes(node), dtype, resides, value))
        sums = summed_once(self.plan, self.listing, gradients, beside=self.prefetch is not None)
        done = [*read_once_a_step(self.plan, self.lowering.nbytes, pricer, self.listing), *sums]
        updates = Updates(pricer, self.prefetch is not None, gradients, self.listing.launches)
        self.resident += updates.of(parameters)
        return [*done, *updates.done]

    def _tier_of(self, node: Node) -> str:
        hosted = node.op == "parameter" and self.plan.residence.get(node.target) == HOST
        return HOST if hosted or node.op == STORE else DEVICE
