"""When each storage lives, for a search: instants of the graph, storages and aliases.

A node takes one instant. In it the layouts of what it reads may be changed, it runs, and results of the graph that it
makes are brought where they belong. Behind the last node gradients gather that still wait for others; then the
optimizer takes one instant for each parameter that is trained.

A storage is held from the instant at which it is made until nobody needs it. Where its last reader changes its layout,
what that one holds from then on is the new tensor, and the old one is gone; where not, it holds the old one. Either is
as large as the layout that the reader takes. So the last reader *takes over*: from the instant at which nobody else
needs the storage, its bytes count as the reader's, whatever is done to them.

That is what a search can say before it is known which layouts are changed, and it is never too little. It is too much
where a node holds what it starts from and what it makes at one time, and where several views look at one storage and
the last one is not the only one to look at a copy instead. What a plan holds, `autopar.lower` says, which shares
nothing with this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.graph import Graph, Node, Ref, Result, TensorType
from autopar.ir.work import VIEWS
from autopar.rewrite.expose_choices import LOOK

Read = tuple[str, int]  # a node and the place of an operand
Span = tuple[int, int]  # from this instant until before that one

GIVEN = ("parameter", "buffer", "constant", "input")  # there before the step and after it: their owners keep them


@dataclass(frozen=True)
class Share:
    """`below` bytes of storage for each `seen` that a reader sees of it."""

    below: int = 1
    seen: int = 1

    def of(self, nbytes: Any) -> Any:
        """Bytes of the storage below `nbytes` that are seen; of what has no elements none."""
        return nbytes if self.below == self.seen or not self.seen else nbytes * self.below // self.seen

    def at_most(self, nbytes: Any, whole: int) -> Any:
        """The same, where the layout may split what was expanded, which leaves what lies below as it is. `whole`: bytes
        that are seen of the whole tensor.
        """
        return self.of(nbytes) if self.below >= self.seen else np.minimum(nbytes, self.of(whole))


@dataclass(frozen=True)
class Turn:
    """A reader's turn to hold what it reads, which is a `share` of `storage`. `through`: the reads of views on the
    way to this one: where one expands what is held, a layout change there makes it as large as it looks.
    """

    start: int
    end: int
    share: Share
    storage: Ref
    through: tuple[Read, ...] = ()


@dataclass(frozen=True)
class Liveness:
    """`at[node]`: when it runs; `forward_ends`: when backward begins; `gathered_at`, `update_at[parameter]`: when the
    last gradients are summed, and when the optimizer updates the parameter. `instants`: how many there are.

    `made[ref]`: while that storage counts as its maker's. `new_until[read]`, `sent_until[place]`: until when the new
    tensor of a layout change there counts as the change's. `turn_of[read]`, `sent_turn[place]`: the reader's turn.
    `gone`: the reads and results whose layout change is the last to need what it starts from, with the share of that.
    """

    at: Mapping[str, int]
    forward_ends: int
    gathered_at: int
    update_at: Mapping[str, int]
    instants: int
    made: Mapping[Ref, Span]
    new_until: Mapping[Read, int]
    sent_until: Mapping[int, int]
    turn_of: Mapping[Read, Turn]
    sent_turn: Mapping[int, Turn]
    gone: Mapping[Read | int, Share]
    node_at: tuple[str, ...]  # instant -> its node; "" behind the last one


def holds_storage(op: str) -> bool:
    """Whether a node's results are storage of their own, and not another look at an operand's."""
    return op not in VIEWS


@dataclass(frozen=True)
class _Use:
    """A reader of a value: it needs the storage until before `end`, or until before `least` where it reads a copy."""

    least: int
    end: int
    by: Read | int  # a result of the graph
    ref: Ref


def copied_gradients(graph: Graph) -> set[int]:
    """Results that are gradients and look at what somebody else has: an input, a value of the forward, or what another
    gradient looks at. They may be given as copies, made where backward ends; whether they are hangs on layouts. What
    micro-batches add up is not given as it is.
    """
    node_of, taken, found = graph.by_name, set[Ref](), set[int]()
    for place, result in enumerate(graph.results):
        if result.kind != "gradient" or result.ref is None or graph.adds_up(result):
            continue
        below = [result.ref]
        while (node := node_of[below[-1].name]).op in (*VIEWS, LOOK):
            below.append(node.operands[0])
        if node.is_source or node.phase == "forward" or not taken.isdisjoint(below):
            found.add(place)
        taken.update(below)
    return found


def liveness(graph: Graph) -> Liveness:
    return _Liveness(graph).found()


class _Liveness:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.node_of = graph, graph.by_name
        self.at = {node.name: instant for instant, node in enumerate(graph.nodes)}
        self.uses: dict[Ref, list[_Use]] = defaultdict(list)

    def found(self) -> Liveness:
        parameters = [node.target for node in self.graph.trained]
        gathered_at = len(self.graph.nodes)
        update_at = {name: gathered_at + 1 + place for place, name in enumerate(parameters)}
        self.last = gathered_at + 1 + max(1, len(parameters))
        self.backward_ends = gathered_at + 1
        work = ((at, node) for at, node in enumerate(self.graph.nodes) if not node.is_source)
        self.forward_ends = next((at for at, node in work if node.phase == "backward"), self.backward_ends)
        self._find_uses()
        self.turns: dict[Read | int, Turn] = {}
        self.gone: dict[Read | int, Share] = {}
        made = {
            Ref(node.name, index): self._hand_over(node, index, type)
            for node in self.graph.nodes
            if holds_storage(node.op)
            for index, type in enumerate(node.outputs)
            if type is not None
        }
        return Liveness(
            self.at, self.forward_ends, gathered_at, update_at, self.last, made,
            {by: end for by, end in self.until.items() if not isinstance(by, int)},
            {by: end for by, end in self.until.items() if isinstance(by, int)},
            {by: turn for by, turn in self.turns.items() if not isinstance(by, int)},
            {by: turn for by, turn in self.turns.items() if isinstance(by, int)},
            self.gone,
            (*self.at, *[""] * (self.last - gathered_at)),
        )  # fmt: skip

    def _find_uses(self) -> None:
        self.until: dict[Read | int, int] = {}

        def use(ref: Ref, at: int, end: int, by: Read | int) -> None:
            self.until[by] = end
            self.uses[self._value(ref)].append(_Use(at + 1, end, by, ref))

        for place, result in enumerate(self.graph.results):
            if result.ref is not None:
                use(result.ref, self.at[result.ref.name], self._until(place, result), place)
        for node in reversed(self.graph.nodes):
            at = self.at[node.name]
            end = at + 1
            if not holds_storage(node.op):
                end = max([end, *(found.end for found in self.uses[Ref(node.name)])])
            for position, ref in enumerate(node.operands):
                use(ref, at, end, (node.name, position))

    def _until(self, place: int, result: Result) -> int:
        """Until when a result is held: to the end, but in micro-batches, where it goes to those of rounds before."""
        if self.graph.adds_up(result):
            assert result.ref is not None
            return self.at[result.ref.name] + 1
        if result.kind == "gradient" and self.graph.rounds.count > 1:
            return self.backward_ends
        if self.graph.rounds.times(place):
            return self.forward_ends
        return self.last

    def _value(self, ref: Ref) -> Ref:
        """All results of a view are one value: looks at the same storage."""
        return ref if holds_storage(self.node_of[ref.name].op) else Ref(ref.name)

    def _hand_over(self, node: Node, index: int, type: TensorType) -> Span:
        """While the storage counts as its maker's; it then goes through the hands of its last reader, and where that is
        a view, of the view's last reader, and so on.
        """
        start = 0 if node.op in GIVEN else self.at[node.name]
        keeps = self.last if node.op in GIVEN else self.backward_ends if node.op == "tangent" else start + 1
        value = Ref(node.name, index)
        first, heir = self._shared(value, keeps)
        begin = first
        through: tuple[Read, ...] = ()
        while heir is not None:
            share = Share(type.nbytes, self.graph.type_of(heir.ref).nbytes)
            end, next_heir = heir.end, None
            if not isinstance(heir.by, int) and not holds_storage(self.node_of[heir.by[0]].op):
                view = heir.by[0]
                end, next_heir = self._shared(Ref(view), max(begin, self.at[view] + 1))
            self.turns[heir.by] = Turn(begin, end, share, value, through)
            if not isinstance(heir.by, int):
                through = (*through, heir.by)
            if heir.least == begin:
                self.gone[heir.by] = share
            begin, heir = end, next_heir
        return start, first

    def _shared(self, value: Ref, end: int) -> tuple[int, _Use | None]:
        """(until when the value is held for all but its last reader, that reader if it holds it for longer)."""
        uses = sorted(self.uses[value], key=lambda use: (use.end, use.least))
        if not uses:
            return end, None
        *others, final = uses
        end = max([end, *(use.least for use in uses), *(use.end for use in others)])
        if final.end <= end:
            return end, None
        self.until[final.by] = end
        return end, final
