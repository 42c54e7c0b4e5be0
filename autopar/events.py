"""The events of one rank's training step, in the order in which the emitted program issues them.

For every node: the layout changes of what it reads, its own steps, and the layout changes of the results it makes; then
the optimizer's pass over each parameter. Collectives run on the stream of their axis, the rest where `stream_of` says.

    overlap=False   every collective is waited for at once, as `emit` writes it: one event at a time, so that the step
                    takes plan.step_seconds, and device memory peaks at plan.peak_bytes.
    overlap=True    collectives are launched and waited for in the order of `autopar.schedule`, which `emit` writes for
                    plan.prefetch = `prefetch`. A wait holds up the compute stream, and is an event of it. A collective
                    starts no earlier than the kernels and waits issued before it have ended, as NCCL's streams do. A
                    body waits for its own collectives. Copies between device and host go the same way, on a stream for
                    each direction.

The host updates its parameters once all their gradients have arrived; states that stream to the device and back do so
for one parameter at a time.

Memory is what `decide.Referee` counts, its instants told in events (`autopar.holds`). With overlap, what a collective
makes is held from the instant at which it is issued, and what it reads until it has been waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.assemble import DEVICE, HOST
from autopar.decide import Holding, Referee
from autopar.graph import Node, Phase, Ref, Result, TensorType
from autopar.holds import Marks, Way, holds_of
from autopar.layout import Layout, Shard
from autopar.liveness import holds_storage
from autopar.plan.plan import Choice, Delivery, Plan
from autopar.price import Pricer
from autopar.reshard import Reshard, travels_together
from autopar.schedule import Advance, Copy, Read, Run, Send, Transfer, schedule
from autopar.work import STORE
from cost_models.price import stream_of
from cost_models.simulator import COMPUTE, Event, Hold
from cost_models.steps import Comm, Compute, Loop, Move, Step

About = tuple[tuple[str, str | int], ...]

PHASES: tuple[Phase, ...] = ("forward", "backward")
OPTIMIZER = "optimizer"  # the phase behind them


def events_of(plan: Plan, pricer: Pricer, *, overlap: bool = False, prefetch: int = 1) -> list[Event]:
    """The events of one step; see the module for what `overlap` and `prefetch` mean."""
    return Staged(plan, pricer).events(overlap=overlap, prefetch=prefetch)


class Staged:
    """A plan with all that is the same in whatever way it is played: who holds what, at which instants."""

    def __init__(self, plan: Plan, pricer: Pricer) -> None:
        self.plan, self.pricer = plan, pricer
        self.nodes, self.node_of = plan.graph.nodes, plan.graph.by_name
        self.operands = {node.name: node.operands for node in self.nodes}
        self.referee = Referee(plan.graph, plan.choices, plan.deliveries, pricer, plan.residence)
        self.live = self.referee.live
        self._holdings: dict[bool, list[Holding]] = {}  # by whether collectives overlap
        self.about = {node.name: _about(node) for node in self.nodes}
        self.first = {
            node.name: _first_place(self.operands[node.name], plan.choices[node.name].takes) for node in self.nodes
        }
        self.below: dict[str, tuple[Ref, ...]] = {}  # view -> what it looks at, down to what it holds by itself
        for node in self.nodes:
            under = () if holds_storage(node.op) else self._held_for(node)
            self.below[node.name] = tuple(dict.fromkeys(ref for one in under for ref in (one, *self.below[one.name])))

    def _held_for(self, view: Node) -> list[Ref]:
        """What must stay as long as the view is read: its operands, but for those that it holds by itself."""
        turns = self.live.turn_of
        return [ref for place, ref in enumerate(self.operands[view.name]) if (view.name, place) not in turns]

    def holdings(self, overlap: bool) -> list[Holding]:
        if overlap not in self._holdings:
            self._holdings[overlap] = self.referee.holdings(overlap=overlap)
        return self._holdings[overlap]

    def events(self, *, overlap: bool = False, prefetch: int = 1) -> list[Event]:
        if prefetch < 0:
            raise ValueError(f"prefetch is {prefetch}; it counts operators, from 0")
        return _Program(self, overlap, prefetch).events()


class _Timed(NamedTuple):
    """A step with its seconds; `part`: the layout change, by its place in the sequence, that it is of."""

    step: Step
    seconds: float
    part: int = 0


@dataclass(slots=True)
class _Chain:
    """The steps of one sequence of layout changes, issued up to `place`.

    `reads`: the values it starts from. `ready`: the events behind which the next step comes. `ways`: the events so far
    of each of its layout changes. `in_flight`: its last event is a collective or copy that nobody has waited for yet.
    """

    label: str
    phase: Phase
    reads: tuple[Ref, ...]
    steps: Sequence[_Timed]
    ready: tuple[int, ...]
    about: About
    place: int = 0
    ways: dict[int, Way] = field(default_factory=dict[int, Way])
    in_flight: bool = False
    has_let_go: bool = False  # of what it reads

    @property
    def is_done(self) -> bool:
        return self.place == len(self.steps) and not self.in_flight


@dataclass(slots=True)
class _Draft:
    name: str
    stream: str
    seconds: float
    after: tuple[int, ...]
    phase: str
    about: About


class _Program:
    def __init__(self, staged: Staged, overlap: bool, prefetch: int) -> None:
        self.staged, self.overlap, self.prefetch = staged, overlap, prefetch
        self.plan, self.pricer, self.referee, self.live = staged.plan, staged.pricer, staged.referee, staged.live
        self.nodes, self.node_of, self.operands = staged.nodes, staged.node_of, staged.operands
        self.drafts: list[_Draft] = []
        self.marks = Marks()
        self.kernel = 0  # the last event on the compute stream
        self.ready: dict[str, tuple[int, ...]] = {}  # node -> the events that make its value
        self.delivered: dict[str, _Chain] = {}  # parameter -> how its gradient arrived
        self.chains: dict[Transfer, _Chain] = {}
        self.rows: list[tuple[_Chain, int]] = []  # gradients that are summed as one, and the bytes of their row
        self.seconds_of: dict[Step, float] = {}

    # --- the order of the program --------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        self._issue("step begins", COMPUTE, 0.0, (), "forward", ())
        for phase in PHASES:
            for action in schedule(self.plan, phase, self.prefetch if self.overlap else None, rows=self.overlap):
                match action:
                    case Run(name):
                        self._node(self.node_of[name])
                    case Advance(transfer):
                        match transfer:
                            case Read():
                                self._bring(transfer)
                            case Send():
                                self._send(transfer, phase)
                            case Copy():
                                self._copy(self.node_of[transfer.node])
        if not self.overlap:  # where the last gradients gather
            number = self._issue("backward ends", COMPUTE, 0.0, (), "backward", ())
            self.marks.mark(self.live.gathered_at, number, number)
        self._update_parameters()
        return self._finished()

    def _bring(self, read: Read) -> None:
        begun = len(self.drafts)
        if read not in self.chains:
            self.chains[read] = self._read(self.node_of[read.reader], read.position)
        chain = self.chains[read]
        self._advance(chain)
        by = read.reader, read.position
        self._mark_way(by, chain)
        if not self.overlap:
            at = self.live.read_at[by]
            self.marks.mark(at, self.marks.begins.get(at, begun), len(self.drafts) - 1)

    def _copy(self, node: Node) -> None:
        """Launch the copy of a store or fetch, or wait for it."""
        copy, begun = Copy(node.name), len(self.drafts)
        is_new = copy not in self.chains
        if is_new:
            choice, (ref,) = self.plan.choices[node.name], node.operands
            read = self.chains.pop(Read(node.name, 0), None)
            ready = self.ready[ref.name] if read is None else read.ready
            steps = [_Timed(step, self._seconds(step)) for step in choice.steps]
            self.chains[copy] = _Chain(node.name, node.phase, (ref,), steps, ready, self.staged.about[node.name])
            self.marks.issued[node.name] = begun, self.kernel
        chain = self.chains[copy]
        self._advance(chain)
        self.ready[node.name] = chain.ready
        at, last = self.live.at[node.name], len(self.drafts) - 1
        if not self.overlap:
            self.marks.mark(at, self.marks.begins.get(at, begun), last)
        elif not is_new:
            self.marks.readers[Ref(node.name)].append(last)
        if self.overlap and is_new == (node.op == STORE):  # where it stands in the order of the program
            self.marks.begins[at], self.marks.closes[at] = begun, self.kernel

    def _mark_way(self, by: tuple[str, int] | int, chain: _Chain) -> None:
        if chain.ways:
            self.marks.ways[by] = chain.ways

    def _node(self, node: Node) -> None:
        choice, about, begun = self.plan.choices[node.name], self.staged.about[node.name], len(self.drafts)
        chains: dict[int, _Chain] = {}
        for position in sorted(set(self.staged.first[node.name])):
            if (chain := self.chains.pop(Read(node.name, position), None)) is not None:
                chains[position] = chain
        self._steps(node, choice, chains, about)
        has_run = self.kernel >= begun if self.overlap else len(self.drafts) > begun
        if not has_run and not node.is_source:
            self._issue(node.name, COMPUTE, 0.0, (), node.phase, about)  # takes no time, but is an instant
        last = max(self.kernel, begun) if self.overlap else len(self.drafts) - 1
        if not node.is_source:
            self.marks.mark(self.live.at[node.name], begun, min(last, len(self.drafts) - 1))
        for position, ref in enumerate(node.operands):  # it may have run behind readers that stand behind it
            takes_over = (node.name, position) in self.live.turn_of  # and holds what it reads by itself
            if self.overlap and self.node_of[ref.name].phase == node.phase and not takes_over:
                self.marks.latest[ref] = max(self.marks.latest.get(ref, 0), last)

    def _steps(self, node: Node, choice: Choice, chains: Mapping[int, _Chain], about: About) -> None:
        """The operator's own steps, one behind the other."""
        first = self.staged.first[node.name]
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
            if self.overlap and isinstance(step, Comm):
                sent = self._issue(name, stream, self._seconds(step), (*after, self.kernel), node.phase, told)
                after = (self._issue(f"wait for {node.name}", COMPUTE, 0.0, (sent,), node.phase, about),)
            else:
                after = (self._issue(name, stream, self._seconds(step), after, node.phase, told),)
        self.ready[node.name] = after

    def _update_parameters(self) -> None:
        trained = {
            result.target for result in self.plan.graph.results if result.kind == "gradient" and result.ref is not None
        }
        chains = [chain for name, chain in self.delivered.items() if self.referee.resides(name) == HOST]
        arrived = tuple(dict.fromkeys(event for chain in chains for event in chain.ready))
        streamed: tuple[int, ...] = ()
        for node in self.nodes:
            if node.op == "parameter" and node.target in trained:
                after = arrived if self.referee.tier_of(node) == HOST else self.delivered[node.target].ready
                first = len(self.drafts)
                for step in self._updates(node):
                    if isinstance(step, Move):
                        after = (*after, *streamed, self.kernel)
                    stream = stream_of(step) if isinstance(step, Compute | Move) else COMPUTE
                    name = f"update {node.target}" if isinstance(step, Compute) else f"states of {node.target}"
                    about = self.staged.about[node.name]
                    after = (self._issue(name, stream, self._seconds(step), after, OPTIMIZER, about),)
                    streamed = after if isinstance(step, Move) else streamed
                self.marks.mark(self.live.update_at[node.target], first, len(self.drafts) - 1)
        latest = {draft.stream: number for number, draft in enumerate(self.drafts)}
        ends = self._issue("step ends", COMPUTE, 0.0, tuple(latest.values()), OPTIMIZER, ())
        if not trained:
            self.marks.mark(self.live.instants - 1, ends, ends)

    def _updates(self, node: Node) -> list[Step]:
        """What updating a parameter takes once its gradient is where it is updated."""
        ref = Ref(node.name)
        resides = self.referee.resides(node.target)
        steps = self.pricer.update_steps(self._bytes(ref, self._gives(node)), self._type(ref).dtype, resides)
        return [step for step in steps if resides != HOST or not isinstance(step, Move)]

    def _leaving(self, result: Result, ref: Ref, delivery: Delivery) -> tuple[Step, float]:
        """A gradient's copy to the host."""
        step = Move(DEVICE, HOST, self._bytes(ref, delivery.layout))
        return step, self._seconds(step)

    # --- layout changes ------------------------------------------------------------------------------------------

    def _read(self, node: Node, position: int) -> _Chain:
        ref, changes = self.operands[node.name][position], self.plan.choices[node.name].reads[position]
        about = (("value", ref.name), ("reader", node.name), *self.staged.about[node.name])
        return _Chain(ref.name, node.phase, (ref,), self._in_order(changes), self.ready[ref.name], about)

    def _send(self, send: Send, phase: Phase) -> None:
        begun = len(self.drafts)
        sent: list[tuple[Result, Ref, Delivery]] = []
        for place in send.results:
            result, delivery = self.plan.graph.results[place], self.plan.deliveries[place]
            assert result.ref is not None and delivery is not None, result
            sent.append((result, result.ref, delivery))
        is_new = send not in self.chains
        if is_new:
            self.chains[send] = self._sending(sent, phase)
        chain = self.chains[send]
        self._advance(chain)
        for place, (result, ref, _) in zip(send.results, sent, strict=True):
            self._mark_way(place, chain)
            if result.kind == "gradient":
                self.delivered[result.target] = chain
            if not self.overlap and self.node_of[ref.name].phase == phase and not self.node_of[ref.name].is_source:
                at = self.live.sent_at[place]
                self.marks.mark(at, self.marks.begins.get(at, begun), len(self.drafts) - 1)
        if is_new and len(sent) > 1:
            nbytes = sum(delivery.changes[0].local.nbytes for _, _, delivery in sent)
            self.rows.append((chain, nbytes))

    def _sending(self, sent: Sequence[tuple[Result, Ref, Delivery]], phase: Phase) -> _Chain:
        """Of several gradients, the steps of each together, as one row."""
        (result, ref, _), *others = sent
        label = f"{result.kind} {result.target}"
        about = (("value", ref.name), ("result", label), *self.staged.about[ref.name])
        ready = tuple(dict.fromkeys(event for _, ref, _ in sent for event in self.ready.get(ref.name, ())))
        reads = tuple(dict.fromkeys(ref for _, ref, _ in sent))
        if others:
            label = f"gradients of {len(sent)} parameters from {result.target}"
            about = (("results", ", ".join(result.target for result, _, _ in sent)),)
        changes = [delivery.changes for _, _, delivery in sent]
        together = result.kind == "gradient" and travels_together(changes[0], self.plan.mesh, self.plan.bucket_bytes)
        if not together:
            steps = self._in_order(changes[0])
        else:  # where nothing overlaps, in the time of the plan's sum: see `Referee.unfilled`
            row = self.pricer.row(changes) if self.overlap else self.pricer.delivered(changes[0])
            steps = [_Timed(*one) for one in row if not isinstance(one[0], Comm) or one[0].ranks > 1]
        if result.kind == "gradient" and self.referee.resides(result.target) == HOST:
            copies = [self._leaving(*one) for one in sent]
            nbytes = sum(step.nbytes for step, _ in copies if isinstance(step, Move))
            last = steps[-1].part if steps else 0
            steps = [*steps, _Timed(Move(DEVICE, HOST, nbytes), sum(seconds for _, seconds in copies), last)]
        return _Chain(label, phase, reads, steps, ready, about)

    def _in_order(self, changes: Sequence[Reshard]) -> list[_Timed]:
        """The steps of all changes, copies where the emitted code makes them.

        In front of a reduce-scatter; of an all-to-all on the sides whose dim is not the leading one; else behind.
        """
        steps: list[_Timed] = []
        for part, change in enumerate(changes):
            found = change.steps(self.pricer.mesh.size(change.axis))
            comms = [(step, 1.0) for step in found if isinstance(step, Comm)]
            copies = [(step, 1.0) for step in found if not isinstance(step, Comm)]
            comms = [(step, share) for step, share in comms if step.ranks > 1]
            match change.kind, change.before, change.after:
                case "reduce_scatter", _, _:
                    ordered = [*copies, *comms]
                case "all_to_all", Shard(src), Shard(dst) if src and dst:
                    half = [(step, 0.5) for step, _ in copies]
                    ordered = [*half, *comms, *half]
                case "all_to_all", _, Shard(dst) if dst:
                    ordered = [*copies, *comms]
                case _:
                    ordered = [*comms, *copies]
            steps += [_Timed(step, share * self._seconds(step), part) for step, share in ordered]
        return steps

    def _advance(self, chain: _Chain) -> None:
        """Wait for what is in flight, then issue what follows, with overlap up to the next collective or copy."""
        if chain.in_flight:
            wait = self._issue(f"wait for {chain.label}", COMPUTE, 0.0, chain.ready, chain.phase, chain.about)
            chain.ready, chain.in_flight = (wait,), False
            part = chain.steps[chain.place - 1].part
            chain.ways[part] = replace(chain.ways[part], last=wait)
            self._let_go(chain, wait)
        while chain.place < len(chain.steps):
            step, seconds, part = chain.steps[chain.place]
            is_comm = isinstance(step, Comm | Move)
            name = f"{_told(step)} {chain.label}"
            stream = COMPUTE if isinstance(step, Loop) else stream_of(step)
            after = (*chain.ready, self.kernel) if is_comm else chain.ready
            since = self.kernel
            number = self._issue(name, stream, seconds, after, chain.phase, (*chain.about, *_payload(step)))
            if not chain.ways and not is_comm:
                self._let_go(chain, number)
            begun = chain.ways.get(part, Way(number, number, since if is_comm else None))
            chain.ways[part] = replace(begun, last=number)
            chain.ready = (number,)
            chain.place += 1
            if is_comm and self.overlap:
                chain.in_flight = True
                return

    def _let_go(self, chain: _Chain, event: int) -> None:
        """From the end of this event on, nothing of the chain needs the values that it starts from."""
        if self.overlap and not chain.has_let_go:
            chain.has_let_go = True
            for ref in chain.reads:
                for read in (ref, *self.staged.below[ref.name]):
                    self.marks.readers[read].append(event)

    # --- memory --------------------------------------------------------------------------------------------------

    def _finished(self) -> list[Event]:
        holds = {**holds_of(self.staged.holdings(self.overlap), self.live, self.marks, overlap=self.overlap)}
        for chain, nbytes in self.rows:
            if chain.ways:
                first, last = chain.ways[min(chain.ways)], chain.ways[max(chain.ways)]
                row = Hold(f"row of {chain.label}", nbytes, until=(last.last,))
                holds[first.first] = [*holds.get(first.first, ()), row]
        return [
            Event(d.name, d.stream, d.seconds, d.after, tuple(holds.get(number, ())), d.phase, d.about)
            for number, d in enumerate(self.drafts)
        ]

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


def _first_place(refs: Sequence[Ref], takes: Sequence[Layout]) -> list[int]:
    """For each place the first one at which that (value, layout) stands: it is brought there once."""
    first: dict[tuple[Ref, Layout], int] = {}
    return [first.setdefault(key, place) for place, key in enumerate(zip(refs, takes, strict=True))]


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
        case Move():
            return "store" if step.dst == HOST else "fetch"


def _payload(step: Step) -> About:
    if isinstance(step, Comm):
        return ("collective", step.collective), ("axis", step.axis), ("ranks", step.ranks), ("bytes", step.nbytes)
    if isinstance(step, Move):
        return ("copy", f"{step.src} -> {step.dst}"), ("bytes", step.nbytes)
    return ()
