"""What `assemble` puts together: items, edges and usages of the problem, with each array made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.assemble.facts import GraphFacts
from autopar.assemble.liveness import Read, Turn, holds_storage
from autopar.ir.graph import Graph, Node, Ref, TensorType, weights_in
from autopar.ir.layout import Layout, Partial, local_type
from autopar.ir.work import temporary_bytes
from autopar.price.overlap_discounts import GRADIENTS, WEIGHTS, Shares, cheaper
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, operand_types, signature_of
from autopar.rewrite import Again
from autopar.rules.bodies import BODIES
from autopar.rules.patterns import is_pattern
from autopar.rules.sizes import bytes_in_body
from solver import EdgeUsage, Usage

Array = NDArray[np.float64]
DEVICE, HOST = "hbm", "host"


class Sizes:
    """Bytes that the problems of one question have in common, as they hang on no price: each array is made once.

    Keys have ids of the options that they are of, which are kept, so that these stay theirs.
    """

    def __init__(self) -> None:
        self.made: dict[object, tuple[Array, Array]] = {}
        self.size_of: dict[object, Array] = {}
        self.resident: dict[object, tuple[Strategy, ...]] = {}
        self.kept: dict[int, tuple[Strategy, ...]] = {}
        self.in_bodies: dict[object, int] = {}
        self.workspaces: dict[int, tuple[Array, bool]] = {}

    def number(self, options: tuple[Strategy, ...]) -> int:
        """Of these very options, and of no others ever."""
        self.kept[id(options)] = options
        return id(options)


class Assembly:
    """The problem in the making.

    `item_of[node]`: the item whose option says in which layouts the node's results are; of a value that comes back in
    backward (`again`) that is the item of its origin. `mode_of[node]`: the item that says how it comes back.
    """

    def __init__(
        self,
        graph: Graph,
        strategies: Mapping[str, tuple[Strategy, ...]],
        pricer: Pricer,
        fixed: Mapping[str, Layout],
        again: Mapping[str, Again],
        residences: Sequence[str],
        shares: Shares,
        facts: GraphFacts,
        known: Sizes,
    ) -> None:
        self.graph, self.pricer, self.fixed, self.shares = graph, pricer, fixed, shares
        self.of_weights, self.of_gradients = cheaper(pricer, shares, WEIGHTS), cheaper(pricer, shares, GRADIENTS)
        self.weights = weights_in(graph) if shares else set[str]()
        self.again, self.residences = again, tuple(residences)
        self.strategies = strategies
        self.node_of = graph.by_name
        self.live, self.copied, self.may_copy = facts.live, facts.copied, facts.may_copy
        self.known = known
        self.filled: set[int] = set()  # ids of arrays that usages have, and not of zeros alone
        self.item_of: dict[str, int] = {}
        self.mode_of: dict[str, int] = {}
        self.options: list[tuple[Strategy, ...]] = []
        self.costs: list[Array] = []
        self.names: list[str] = []
        self.prices: dict[object, tuple[Array, Array, Array]] = {}
        self.edge_at: dict[tuple[int, int, object], int] = {}
        self.edges: list[tuple[int, int, Array, int]] = []
        self.usages: list[Usage] = []
        self.edge_usages: list[EdgeUsage] = []
        self.size_of: dict[object, Array] = {}
        self.expanded: dict[
            Read | int, tuple[int, Array]
        ] = {}  # edge, and bytes that a copy has more than the original
        self.kept: list[object] = []  # what ids in keys belong to
        self.last_read: dict[str, int] = {}  # forward node -> when the forward reads it last
        self.needed: dict[Ref, int] = {}  # what views look at when they run again -> until when somebody needs it
        self.stay: set[Ref] = set()  # what backward or a view that runs again may need behind its last reader
        self.readers: dict[str, Any] = {}  # of parameters (`autopar.assemble.parameters`)

    def add_item(self, name: str, options: tuple[Strategy, ...], cost: Array) -> int:
        self.options.append(options)
        self.costs.append(cost)
        self.names.append(name)
        return len(self.options) - 1

    def gives(self, item: int, index: int) -> list[Layout]:
        return [strategy.gives[index] for strategy in self.options[item]]

    def between(
        self, ref: Ref, takes_of: tuple[int, int], takes_in: Callable[[], list[Layout]], by: Read | int
    ) -> tuple[Array, Array, Array]:
        """Of the change from each option of the value's producer to each layout of the reader: seconds, bytes of the
        new tensor, and bytes of all that it makes, at most at a time.
        """
        type, producer = self.type(ref), self.item_of[ref.name]
        pricer = self.of_weights if ref.name in self.weights else self.pricer
        key = (
            type,
            id(self.options[producer]),
            ref.index,
            id(self.options[takes_of[0]]),
            takes_of[1],
            self.live.gone.get(by),
            pricer is self.pricer,
        )
        if key not in self.prices:
            gives, takes = self.gives(producer, ref.index), takes_in()
            made = self.made(type, (producer, ref.index), gives, takes_of, takes, by)
            self.prices[key] = pricer.reshard(type, gives, takes), *made
        return self.prices[key]

    def read(self, node: Node, position: int, item: int) -> tuple[Array, Array, Array]:
        """`between`, for an operand of a node as the options of an item take it."""
        ref = node.operands[position]

        def takes() -> list[Layout]:
            return [strategy.takes[position] for strategy in self.options[item]]

        told = self.between(ref, (item, position), takes, (node.name, position))
        if node.op == "autopar.to_reduce_dtype":
            producer = self.item_of[ref.name]
            told = self.without_reduction(told[0], producer, ref.index, (item, position), takes), *told[1:]
        if earlier := [place for place in range(position) if node.operands[place] == ref]:
            told = self.brought_once(told, item, position, earlier)
        return told

    def taken_sizes(self, node: Node, position: int, item: int) -> Array:
        """Bytes of an operand in the layout in which each option takes it."""
        type = self.type(node.operands[position])
        return self.sizes(type, item, position, lambda: [strategy.takes[position] for strategy in self.options[item]])

    def temporaries(self, node: Node, item: int) -> Array:
        """Bytes of what the operator makes and drops while it runs, in each option: its own, copies of operands among
        them, and those of a pattern.
        """
        types, mesh = operand_types(node, self.node_of), self.pricer.mesh
        copied = self.may_copy.get(node.name, ())
        found, has_bodies = self._workspaces(self.options[item])
        for place in copied:
            found = found + self.taken_sizes(node, place, item)
        if has_bodies:
            signature, last = signature_of(node, types), self._last_reads(node)
            held = [self._in_body(node, (signature, last), types, strategy, last) for strategy in self.options[item]]
            found = found + np.array(held, dtype=np.float64)
        if not temporary_bytes(node, types):
            return found
        local = (
            [local_type(t, layout, mesh) for t, layout in zip(types, strategy.takes, strict=True)]
            for strategy in self.options[item]
        )
        made = (
            0 if is_pattern(strategy.body) else temporary_bytes(node, given)  # a pattern's are in its workspace
            for strategy, given in zip(self.options[item], local, strict=True)
        )
        return found + np.array([*made], dtype=np.float64)

    def _workspaces(self, options: tuple[Strategy, ...]) -> tuple[Array, bool]:
        """Bytes of the workspace of each option, and whether any has a local body."""
        key = self.known.number(options)
        if key not in self.known.workspaces:
            beside = self.pricer.hardware.overlaps
            held = [strategy.workspace if beside else strategy.workspace_alone for strategy in options]
            has_bodies = any(strategy.body in BODIES for strategy in options)
            self.known.workspaces[key] = np.array(held, dtype=np.float64), has_bodies
        return self.known.workspaces[key]

    def _last_reads(self, node: Node) -> tuple[int, ...]:
        """The places of operands of which nothing is needed behind the node."""
        behind, made = self.live.at[node.name] + 1, self.live.made
        return tuple(
            place
            for place, ref in enumerate(node.operands)
            if ref in made and made[ref][1] == behind and ref not in self.stay and node.operands.count(ref) == 1
        )

    def _in_body(
        self, node: Node, about: object, types: Sequence[TensorType], strategy: Strategy, last: tuple[int, ...]
    ) -> int:
        """Bytes that a local body holds beside operands and results. `about`: what they hang on but the strategy."""
        if strategy.body not in BODIES:
            return 0
        key = about, strategy.body, strategy.takes, strategy.gives
        if key not in self.known.in_bodies:
            self.known.in_bodies[key] = bytes_in_body(
                strategy.body, node, types, strategy.takes, strategy.gives, self.pricer.mesh, last=last
            )
        return self.known.in_bodies[key]

    def made(
        self,
        type: TensorType,
        gives_of: tuple[int, int],
        gives: list[Layout],
        takes_of: tuple[int, int | str],
        takes: list[Layout],
        by: Read | int,
    ) -> tuple[Array, Array]:
        """Bytes of the new tensor, and of all that a change makes; `gives_of`, `takes_of`: item, and which of its
        layouts these are.
        """
        gone, number = self.live.gone.get(by), self.known.number
        ends = number(self.options[gives_of[0]]), gives_of[1], number(self.options[takes_of[0]]), takes_of[1]
        key = type, ends, gone
        if key not in self.known.made:
            beside, alone = self.pricer.reshard_rooms(type, gives, takes)
            if gone is not None:
                alone = alone - gone.of(self.pricer.nbytes(type, gives))[:, None]
            self.known.made[key] = self.pricer.reshard_bytes(type, gives, takes), np.maximum(beside, alone)
        return self.known.made[key]

    def delivered(
        self, type: TensorType, producer: int, index: int, parameter: int, stored: list[Layout], by: int, adds_up: bool
    ) -> tuple[Array, Array, Array]:
        """`between`, of a gradient and its parameter, for which micro-batches add it up, or its input."""
        key = (
            "delivered",
            type,
            id(self.options[producer]),
            index,
            id(self.options[parameter]),
            self.live.gone.get(by),
            adds_up,
        )
        if key not in self.prices:
            gives = self.gives(producer, index)
            lies = [strategy.lies for strategy in self.options[parameter]]
            nbytes, room = self.made(type, (producer, index), gives, (parameter, "stored"), stored, by)
            if adds_up and self.pricer.rounds.reduces_once:  # what is added up as it is made stays as it is
                stays = [[self._stays(type, give, *take) for take in zip(stored, lies, strict=True)] for give in gives]
                nbytes, room = np.where(stays, 0.0, nbytes), np.where(stays, 0.0, room)
            self.prices[key] = self.of_gradients.deliver(type, gives, stored, lies, adds_up=adds_up), nbytes, room
        return self.prices[key]

    def _stays(self, type: TensorType, give: Layout, read: Layout, lies: Layout) -> bool:
        """Whether a gradient is added up in the layout in which it is made."""
        return lies != read or bool(self.pricer.summed_once(type, give, read))

    def waiting(self, type: TensorType, producer: int, ref: Ref, parameter: int, stored: list[Layout]) -> Array | None:
        """Bytes that a look at something larger holds while, as a gradient, it waits for others to be summed with. What
        is no look has its room beside the problem, as that of a bucket. None: it waits for none, or is no look.
        """
        if self.pricer.rounds.reduces_once or not self.pricer.bucket_bytes or holds_storage(self.node_of[ref.name].op):
            return None
        index, below = ref.index, self.type(ref).nbytes
        while not holds_storage((node := self.node_of[ref.name]).op):
            ref = node.operands[0]
            below = max(below, self.type(ref).nbytes)
        key = "waiting", type, id(self.options[producer]), index, id(self.options[parameter]), below

        def made() -> Array:
            rows = [[self.pricer.gathers(type, give, take) for take in stored] for give in self.gives(producer, index)]
            return np.where(rows, self.pricer.nbytes(type, stored)[None, :] * (below / max(1, type.nbytes)), 0.0)

        return self.once(key, made)

    def brought_once(
        self, told: tuple[Array, Array, Array], item: int, position: int, earlier: list[int]
    ) -> tuple[Array, Array, Array]:
        """Nothing more, where an option takes the value in one layout at `position` and at an earlier one (x * x)."""
        key = ("brought once", *map(id, told), id(self.options[item]), position, tuple(earlier))
        if key not in self.prices:
            again = [any(s.takes[position] == s.takes[place] for place in earlier) for s in self.options[item]]
            cost, nbytes, room = (np.where(again, 0.0, array) for array in told)
            self.prices[key] = cost, nbytes, room
        return self.prices[key]

    def without_reduction(
        self, cost: Array, producer: int, index: int, reader: tuple[int, int], takes_in: Callable[[], list[Layout]]
    ) -> Array:
        """The same prices, but a partial sum must stay one: it is summed behind the reader, in another precision."""
        key = ("without reduction", id(cost), id(self.options[producer]), index, id(self.options[reader[0]]), reader[1])
        if key not in self.prices:
            takes = takes_in()
            lost = [
                [
                    any(isinstance(g, Partial) and not isinstance(t, Partial) for g, t in zip(give, take, strict=True))
                    for take in takes
                ]
                for give in self.gives(producer, index)
            ]
            self.prices[key] = np.where(np.array(lost), np.inf, cost), cost, cost
        return self.prices[key][0]

    def add_edge(self, src: int, dst: int, cost: Array) -> int:
        """One more use; uses of equal price between the same items are one edge, counted."""
        key = (src, dst, id(cost))
        if key not in self.edge_at:
            self.edge_at[key] = len(self.edges)
            self.edges.append((src, dst, cost, 0))
        number = self.edge_at[key]
        src, dst, cost, count = self.edges[number]
        self.edges[number] = (src, dst, cost, count + 1)
        return number

    def changed(self, edge: int, start: int, end: int, nbytes: Array, room: Array) -> None:
        """A layout change at instant `start`, whose new tensor is held until before `end`."""
        self.held_between(edge, start, start + 1, room)
        self.held_between(edge, start + 1, end, nbytes)

    def taken_over(
        self, by: Read | int, edge: int, item: int, turn: Turn, type: TensorType, sizes: Array, nbytes: Array
    ) -> None:
        """A reader's turn to hold what it reads: `sizes` in its layouts, `nbytes` of the layout change's new tensor.

        That is as large, but for a view that expands: what lies below one is smaller than what a copy of it makes.
        """
        own = turn.share.at_most(sizes, type.nbytes)
        self.held(item, turn.start, turn.end, own)
        if turn.share.below < turn.share.seen:
            key = "expanded", id(nbytes), id(sizes), turn.share
            self.expanded[by] = edge, self.once(key, lambda: np.where(nbytes > 0, np.maximum(nbytes - own, 0.0), 0.0))
            self.kept += [nbytes, sizes]
            for read in (*turn.through, by):
                if (copied := self.expanded.get(read)) is not None:
                    self.held_between(copied[0], turn.start, turn.end, copied[1])

    def held(self, item: int, start: int, end: int, nbytes: Array, tier: str = DEVICE) -> None:
        if end > start and self.is_filled(nbytes):
            self.usages.append(Usage(item, tier, start, end, nbytes))

    def held_between(self, edge: int, start: int, end: int, nbytes: Array, tier: str = DEVICE) -> None:
        """Bytes that depend on the options of both ends of an edge."""
        if end > start and self.is_filled(nbytes):
            self.edge_usages.append(EdgeUsage(edge, tier, start, end, nbytes))

    def is_filled(self, nbytes: Array) -> bool:
        """Whether any option holds something. Who asks makes a usage of such an array, so that its id stays its own."""
        if id(nbytes) in self.filled:
            return True
        if nbytes.any():
            self.filled.add(id(nbytes))
            return True
        return False

    def once(self, key: object, make: Callable[[], Array]) -> Array:
        """The array of that key: equal ones are one, which is what the solver's speed rests on."""
        if key not in self.size_of:
            self.size_of[key] = make()
        return self.size_of[key]

    def times(self, cost: Array, count: int) -> Array:
        """What so many equal uses cost together."""
        return cost if count == 1 else self.once(("times", id(cost), count), lambda: cost * count)

    def type(self, ref: Ref) -> TensorType:
        type = self.node_of[ref.name].outputs[ref.index]
        assert type is not None, ref
        return type

    def sizes(self, type: TensorType, item: int, what: object, layouts: Callable[[], list[Layout]]) -> Array:
        """Bytes of a tensor in the layout that each option has of it."""
        key = (type, self.known.number(self.options[item]), what)
        if key not in self.known.size_of:
            self.known.size_of[key] = self.pricer.nbytes(type, layouts())
        return self.known.size_of[key]
