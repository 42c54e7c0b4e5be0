"""The events of one rank's training step, in the order in which the emitted program issues them.

For every node: the layout changes of what it reads, its own steps, and the layout changes of the results it makes; then
the optimizer's pass over each parameter. Collectives run on the stream of their axis, the rest where `stream_of` says.

    overlap=False   every collective is waited for at once, as `emit` writes it: one event at a time, so that the step
                    takes plan.step_seconds, and device memory peaks at plan.peak_bytes.
    overlap=True    a collective is waited for by its first reader; the reduction of a gradient by the optimizer alone.
                    It starts no earlier than the kernels issued before it have ended, as NCCL's streams do. Gathers of
                    parameters are launched `prefetch` operators ahead of their use, counted in operators that use the
                    matrix units. A copy behind an un-waited collective is issued that many operators later, so as not
                    to hold up the kernels in between. A body waits for its own collectives.

Memory is what `decide.Referee` counts, written down a second time, from events. With overlap, what a collective makes
is held from the instant at which it is issued, and what it reads until it has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.graph import Node, Phase, Ref, Result, TensorType
from autopar.layout import Layout, Shard
from autopar.liveness import holds_storage, liveness
from autopar.plan.plan import Choice, Delivery, Plan
from autopar.price import Pricer
from autopar.reshard import Reshard, travels_together
from cost_models.price import stream_of
from cost_models.simulator import COMPUTE, Event, Hold
from cost_models.steps import MATRIX_KINDS, Comm, Compute, Loop, Step

About = tuple[tuple[str, str | int], ...]
Pending = tuple[Result, Delivery]

OPTIMIZER = "optimizer"  # the phase behind forward and backward


def events_of(plan: Plan, pricer: Pricer, *, overlap: bool = False, prefetch: int = 1) -> list[Event]:
    """The events of one step; see the module for what `overlap` and `prefetch` mean."""
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}; it counts operators, from 0")
    return _Program(plan, pricer, overlap, prefetch).events()


@dataclass(slots=True)
class _Chain:
    """The steps of one sequence of layout changes, issued up to `place`.

    `reads`: the node whose value it starts from. `ready`: the events behind which the next step comes. `first`, `last`:
    its first and last event; `since`: the kernel after which it was issued.
    """

    label: str
    phase: Phase
    reads: str
    steps: Sequence[tuple[Step, float]]
    ready: tuple[int, ...]
    about: About
    place: int = 0
    first: int | None = None
    last: int | None = None
    since: int | None = None

    @property
    def is_done(self) -> bool:
        return self.place == len(self.steps)


@dataclass(slots=True)
class _Held:
    """A hold whose end is not yet an event. `end`: the program point before which it ends, as in `Referee.holdings`;
    `reads`: the node whose un-waited readers also keep it; `until`: or a chain that does."""

    event: int
    tenant: str
    nbytes: int
    end: int
    since: int | None = None
    reads: str = ""
    until: _Chain | None = None
    resident: bool = False


@dataclass(slots=True)
class _Draft:
    name: str
    stream: str
    seconds: float
    after: tuple[int, ...]
    phase: str
    about: About
    holds: list[Hold] = field(default_factory=list[Hold])


class _Program:
    def __init__(self, plan: Plan, pricer: Pricer, overlap: bool, prefetch: int) -> None:
        self.plan, self.pricer, self.overlap, self.prefetch = plan, pricer, overlap, prefetch
        self.nodes, self.node_of = plan.graph.nodes, plan.graph.by_name
        self.operands = {node.name: node.operands for node in self.nodes}
        self.live = liveness(plan.graph)
        self.drafts: list[_Draft] = []
        self.held: list[_Held] = []
        self.kernel = 0  # the last event on the compute stream
        self.ready: dict[str, tuple[int, ...]] = {}  # node -> the events that make its value
        self.opening = [0] * len(self.nodes)  # node -> its first event
        self.made = [0] * len(self.nodes)  # node -> the event at whose start its results are allocated
        self.closing = [0] * len(self.nodes)  # node -> the event at whose end it has run
        self.readers: dict[str, list[int]] = defaultdict(list)  # node -> un-waited events that read its storage
        self.delivered: dict[str, _Chain] = {}  # parameter -> how its gradient arrived
        self.unfinished: list[tuple[int, _Chain]] = []  # (due at this matrix operator, chain)
        self.products = 0  # operators on the matrix units so far
        self.seconds_of: dict[Step, float] = {}
        self.below: dict[str, tuple[str, ...]] = {}  # node -> itself, and for a view the storages under it
        for node in self.nodes:
            under = () if holds_storage(node.op) else tuple(ref.name for ref in self.operands[node.name])
            self.below[node.name] = (node.name, *dict.fromkeys(name for one in under for name in self.below[one]))

    # --- the order of the program --------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        self._issue("step begins", COMPUTE, 0.0, (), "forward", ())
        launches = self._launches() if self.overlap and self.prefetch else {}
        ahead: dict[tuple[int, int], _Chain] = {}
        deliveries = self._deliveries()
        for phase in ("forward", "backward"):
            for result, delivery in deliveries.get((phase, None), []):
                self._deliver(result, delivery, phase)
            for index, node in enumerate(self.nodes):
                if node.phase == phase:
                    self._node(index, node, launches.get(index, []), ahead, deliveries.get((phase, node.name), []))
        while self.unfinished:
            self._continue()
        self._hold_storages()
        self._update_parameters()
        return self._finished()

    def _deliveries(self) -> dict[tuple[Phase, str | None], list[Pending]]:
        """Results by phase and the node behind which they leave; None: at the head of the phase, as `emit` does it."""
        found: dict[tuple[Phase, str | None], list[Pending]] = {}
        for result, delivery in zip(self.plan.graph.results, self.plan.deliveries, strict=True):
            if result.ref is None or delivery is None:
                continue
            phase: Phase = "backward" if result.kind == "gradient" else "forward"
            node = self.node_of[result.ref.name]
            here = node.phase == phase and not (node.is_source and phase == "forward")
            found.setdefault((phase, node.name if here else None), []).append((result, delivery))
        return found

    def _node(
        self, index: int, node: Node, launches: list[tuple[int, int]], ahead: dict[tuple[int, int], _Chain],
        results: list[Pending],
    ) -> None:  # fmt: skip
        choice, begun = self.plan.choices[node.name], len(self.drafts)
        about = _about(node)
        self._continue(self.products)
        for key in launches:
            ahead[key] = self._read(self.nodes[key[0]], key[1])
            self._advance(ahead[key])
        chains: dict[int, _Chain] = {}
        for position in _distinct(self.operands[node.name], choice.takes):
            if choice.reads[position]:
                if (index, position) in ahead:
                    chains[position] = ahead.pop((index, position))
                else:
                    chains[position] = self._read(node, position)
                    self._advance(chains[position])
                if not self.overlap:
                    self._finish(chains[position])
        for chain in chains.values():
            self._finish(chain)
        self.products += _is_product(choice)
        self.made[index] = len(self.drafts)
        self._steps(node, choice, chains, about)
        has_run = self.kernel >= begun if self.overlap else len(self.drafts) > begun
        if not has_run and (not node.is_source or node.op == "tangent" or results):
            self._issue(node.name, COMPUTE, 0.0, (), node.phase, about)  # takes no time, but is an instant
        last = len(self.drafts) - 1
        self.opening[index], self.made[index] = min(begun, last), min(self.made[index], last)
        self.closing[index] = self.kernel if self.overlap else last
        for position, chain in chains.items():
            self._hold_read(index, node, position, chain)
        for result, delivery in results:
            self._deliver(result, delivery, node.phase)
        if not self.overlap:
            self.closing[index] = len(self.drafts) - 1

    def _steps(self, node: Node, choice: Choice, chains: Mapping[int, _Chain], about: About) -> None:
        """The operator's own steps, one behind the other."""
        first = _first_place(self.operands[node.name], choice.takes)
        ready: list[int] = []
        for position, ref in enumerate(self.operands[node.name]):
            chain = chains.get(first[position])
            ready += self.ready[ref.name] if chain is None else chain.ready
        after = tuple(dict.fromkeys(ready))
        for number, step in enumerate(choice.steps):
            if isinstance(step, Comm) and step.ranks == 1:
                continue
            name = node.name if number == 0 else f"{node.name}: {_told(step)}"
            stream = COMPUTE if isinstance(step, Loop) else stream_of(step)
            told = (*about, *_payload(step))
            after = (self._issue(name, stream, self._seconds(step), after, node.phase, told),)
        if self.overlap and after and choice.steps and self.drafts[after[0]].stream != COMPUTE:
            after = (self._issue(f"{node.name}: waits", COMPUTE, 0.0, after, node.phase, about),)
        self.ready[node.name] = after

    def _update_parameters(self) -> None:
        trained = {
            result.target for result in self.plan.graph.results if result.kind == "gradient" and result.ref is not None
        }
        for node in self.nodes:
            if node.op == "parameter" and node.target in trained:
                step = self.pricer.update_step(
                    self._bytes(Ref(node.name), self._gives(node)), self._type(Ref(node.name)).dtype
                )
                after = self.delivered[node.target].ready
                self._issue(f"update {node.target}", COMPUTE, self._seconds(step), after, OPTIMIZER, _about(node))
        latest = {draft.stream: number for number, draft in enumerate(self.drafts)}
        self._issue("step ends", COMPUTE, 0.0, tuple(latest.values()), OPTIMIZER, ())

    # --- layout changes ------------------------------------------------------------------------------------------

    def _read(self, node: Node, position: int) -> _Chain:
        ref, changes = self.operands[node.name][position], self.plan.choices[node.name].reads[position]
        about = (("value", ref.name), ("reader", node.name), *_about(node))
        return _Chain(ref.name, node.phase, ref.name, self._in_order(changes), self.ready[ref.name], about)

    def _deliver(self, result: Result, delivery: Delivery, phase: Phase) -> None:
        assert result.ref is not None
        ref, node = result.ref, self.node_of[result.ref.name]
        label = f"{result.kind} {result.target}"
        about = (("value", ref.name), ("result", label), *_about(node))
        gathered = travels_together(delivery.changes, self.plan.mesh, self.plan.bucket_bytes)
        together = result.kind == "gradient" and gathered
        steps = self.pricer.delivered(delivery.changes) if together else self._in_order(delivery.changes)
        chain = _Chain(label, phase, ref.name, steps, self.ready.get(ref.name, ()), about)
        if self.overlap:
            self._advance(chain)
            if not chain.is_done:
                self.unfinished.append((self.products + max(1, self.prefetch), chain))
        else:
            self._finish(chain)
        if result.kind == "gradient":
            self.delivered[result.target] = chain
        if delivery.changes:
            at = self.live.at[ref.name]
            end = at + 1 if result.kind == "gradient" else self.live.instants
            until = chain if self.overlap and result.kind == "gradient" else None
            held = _Held(-1, label, self._bytes(ref, delivery.layout), end, until=until)
            self._hold_chain(held, chain, at, node.phase == phase and chain.first is not None)

    def _hold_chain(self, held: _Held, chain: _Chain, index: int, is_here: bool) -> None:
        """From the chain's first event, or from where it was issued; without overlap, where the referee counts it."""
        if self.overlap and chain.first is not None:
            held.event, held.since = chain.first, chain.since
        else:
            held.event = chain.first if is_here and chain.first is not None else self.opening[index]
        self.held.append(held)

    def _in_order(self, changes: Sequence[Reshard]) -> list[tuple[Step, float]]:
        """Each step with its seconds, copies where the emitted code makes them.

        In front of a reduce-scatter; of an all-to-all on the sides whose dim is not the leading one; else behind.
        """
        steps: list[tuple[Step, float]] = []
        for change in changes:
            found = change.steps(self.pricer.mesh.size(change.axis))
            comms = [(step, 1.0) for step in found if isinstance(step, Comm)]
            copies = [(step, 1.0) for step in found if not isinstance(step, Comm)]
            comms = [(step, share) for step, share in comms if step.ranks > 1]
            match change.kind, change.before, change.after:
                case "reduce_scatter", _, _:
                    steps += [*copies, *comms]
                case "all_to_all", Shard(src), Shard(dst) if src and dst:
                    half = [(step, 0.5) for step, _ in copies]
                    steps += [*half, *comms, *half]
                case "all_to_all", _, Shard(dst) if dst:
                    steps += [*copies, *comms]
                case _:
                    steps += [*comms, *copies]
        return [(step, share * self._seconds(step)) for step, share in steps]

    def _advance(self, chain: _Chain) -> None:
        """Issue what needs no waiting: copies, then the collectives up to the next copy."""
        sent = False
        while not chain.is_done:
            step, seconds = chain.steps[chain.place]
            is_comm = isinstance(step, Comm)
            if sent and not is_comm:
                return
            sent |= is_comm
            name = f"{_told(step)} {chain.label}"
            stream = COMPUTE if isinstance(step, Loop) else stream_of(step)
            after = (*chain.ready, self.kernel) if is_comm else chain.ready
            since = self.kernel
            number = self._issue(name, stream, seconds, after, chain.phase, (*chain.about, *_payload(step)))
            if chain.first is None:
                chain.first, chain.since = number, since if is_comm else None
                for storage in self.below[chain.reads] if is_comm else ():
                    self.readers[storage].append(number)
            chain.ready, chain.last = (number,), number
            chain.place += 1

    def _finish(self, chain: _Chain) -> None:
        while not chain.is_done:
            self._advance(chain)

    def _continue(self, product: int | None = None) -> None:
        """The next part of unfinished chains that are due, or of all."""
        due = [chain for when, chain in self.unfinished if product is None or when <= product]
        if due:
            self.unfinished = [
                (when, chain) for when, chain in self.unfinished if product is not None and when > product
            ]
            for chain in due:
                self._advance(chain)
            later = self.products + max(1, self.prefetch)
            self.unfinished += [(later, chain) for chain in due if not chain.is_done]

    def _launches(self) -> dict[int, list[tuple[int, int]]]:
        """node -> the reads (node, position) launched just before it: gathers of what is made of parameters alone."""
        weights: set[str] = set()
        made: dict[str, int] = {}
        products: list[int] = []  # places of the operators on matrix units
        begins: dict[Phase, int] = {}
        launches: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            made[node.name] = index
            begins.setdefault(node.phase, index)
            refs, choice = self.operands[node.name], self.plan.choices[node.name]
            if node.op == "parameter" or (refs and all(ref.name in weights for ref in refs)):
                weights.add(node.name)
            for position in _distinct(refs, choice.takes):
                if refs[position].name in weights and any(
                    isinstance(step, Comm) for step, _ in self._in_order(choice.reads[position])
                ):
                    place = products[-self.prefetch] if len(products) >= self.prefetch else 0
                    place = max(place, made[refs[position].name] + 1, begins[node.phase])
                    if place < index:
                        launches[place].append((index, position))
            if _is_product(choice):
                products.append(index)
        return launches

    # --- memory --------------------------------------------------------------------------------------------------

    def _hold_read(self, index: int, node: Node, position: int, chain: _Chain) -> None:
        """The new tensor of a layout change: until the reader has run, or for as long as a view of it is held."""
        ref = self.operands[node.name][position]
        at_once = holds_storage(node.op)
        end = index + 1 if at_once else self.live.end_of[node.name]
        nbytes = self._bytes(ref, self.plan.choices[node.name].takes[position])
        held = _Held(
            -1,
            f"{_called(self.node_of[ref.name])} resharded for {node.name}",
            nbytes,
            end,
            reads="" if at_once else node.name,
        )
        self._hold_chain(held, chain, index, True)

    def _hold_storages(self) -> None:
        last = self.live.instants
        for index, node in enumerate(self.nodes):
            if not holds_storage(node.op):
                continue
            choice = self.plan.choices[node.name]
            nbytes = sum(
                self.pricer.local_bytes(type, layout)
                for type, layout in zip(node.outputs, choice.gives, strict=True)
                if type is not None
            )
            is_given = node.is_source and node.op != "tangent"
            event = 0 if is_given else self.made[index]
            if node.op == "tangent" and not self.overlap:  # counted from its place among the nodes
                event = next(
                    (self.opening[i] for i in range(index, len(self.nodes)) if not self.nodes[i].is_source), event
                )
            tenant = f"{node.op} {node.target}" if node.is_source else _called(node)
            resident = node.op in ("parameter", "buffer", "constant")
            self.held.append(
                _Held(event, tenant, nbytes, self.live.end_of[node.name], reads=node.name, resident=resident)
            )
            if node.op == "parameter" and (grad_at := self.live.grad_at.get(node.target)) is not None:
                states = f"optimizer states of {node.target}"
                self.held.append(_Held(0, states, self.pricer.state_bytes(nbytes), last, resident=True))
                arrived = self.delivered[node.target].last if self.overlap else None
                since = self.closing[grad_at] if arrived is None else max(arrived, self.closing[grad_at])
                self.held.append(_Held(since, f"gradient of {node.target}", nbytes, last, since=since))

    def _finished(self) -> list[Event]:
        for held in self.held:
            if not held.nbytes:
                continue
            if held.end == self.live.instants:
                until = None
            elif held.until is not None:
                until = () if held.until.last is None else (held.until.last,)
            else:
                until = tuple(dict.fromkeys((self.closing[held.end - 1], *self.readers.get(held.reads, ()))))
            hold = Hold(held.tenant, held.nbytes, "hbm", held.since, until, held.resident)
            self.drafts[held.event].holds.append(hold)
        return [Event(d.name, d.stream, d.seconds, d.after, tuple(d.holds), d.phase, d.about) for d in self.drafts]

    # --- small ones ----------------------------------------------------------------------------------------------

    def _issue(
        self, name: str, stream: str, seconds: float, after: tuple[int, ...], phase: str,
        about: About,
    ) -> int:  # fmt: skip
        number = len(self.drafts)
        if not self.overlap:
            after = (number - 1,) if number else ()
        self.drafts.append(_Draft(name, stream, seconds, tuple(dict.fromkeys(after)), phase, about))
        if stream == COMPUTE:
            self.kernel = number
        return number

    def _seconds(self, step: Step) -> float:
        if step not in self.seconds_of:
            self.seconds_of[step] = self.pricer.seconds((step,))
        return self.seconds_of[step]

    def _type(self, ref: Ref) -> TensorType:
        type = self.node_of[ref.name].outputs[ref.index]
        assert type is not None, ref
        return type

    def _gives(self, node: Node) -> Layout:
        return self.plan.choices[node.name].gives[0]

    def _bytes(self, ref: Ref, layout: Layout) -> int:
        return self.pricer.local_bytes(self._type(ref), layout)


def _distinct(refs: Sequence[Ref], takes: Sequence[Layout]) -> list[int]:
    """The places at which a (value, layout) stands for the first time: it is brought there once."""
    return sorted(set(_first_place(refs, takes)))


def _first_place(refs: Sequence[Ref], takes: Sequence[Layout]) -> list[int]:
    first: dict[tuple[Ref, Layout], int] = {}
    return [first.setdefault(key, place) for place, key in enumerate(zip(refs, takes, strict=True))]


def _is_product(choice: Choice) -> bool:
    return any(isinstance(step, Compute) and step.kind in MATRIX_KINDS for step in choice.steps)


def _called(node: Node) -> str:
    if node.is_source:
        return node.target
    return f"{node.name} ({node.module})" if node.module else node.name


def _about(node: Node) -> About:
    told = (
        ("node", node.name),
        ("op", node.op),
        ("target", node.target),
        ("module", node.module),
        ("source", node.source),
    )
    return tuple((key, value) for key, value in told if value)


def _told(step: Step) -> str:
    match step:
        case Comm():
            return step.collective
        case Compute():
            return step.op
        case Loop():
            return "loop"
        case _:
            return "move"


def _payload(step: Step) -> About:
    if isinstance(step, Comm):
        return ("collective", step.collective), ("axis", step.axis), ("ranks", step.ranks), ("bytes", step.nbytes)
    return ()
