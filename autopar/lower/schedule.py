"""The order in which a step's program does things: when nodes run, and when transfers are launched and waited for.

`lower` makes instructions of this order. With `prefetch` None everything
is launched and waited for where it stands. Else

    weights (parameters, their casts and views) are fetched `prefetch` operators ahead of their use, over several axes
    in equal parts of that, and what is cheap and makes them (a cast, a view) runs just before;
    the other operands of a node are all launched, then waited for one by one, just before it runs;
    gradients and outputs are launched when they are made and waited for `prefetch` operators later (1 for 0), at the
    end of their phase at the latest; so are casts and views that lead to gradients alone, where a collective stands in
    front of them. What a collective reads is held until it is waited for, so this is what bounds the gradients in
    flight.

Copies between device and host are transfers, too. A store is launched when its value is there and waited for `prefetch`
operators later, at the end of its phase at the latest: until then it holds the value. A fetch is launched `prefetch`
operators ahead of where it is first needed, and waited for there; a gradient that leaves for the host is one step more
of its way.

Ahead and later are counted in operators that use the matrix units (products, attention, convolutions), as those are
what a transfer is overlapped with. Small gradients are summed together, in a bucket; whatever number `prefetch` is, the
bucket is launched when it is full and waited for when the next one is, or at the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from autopar.ir.graph import Node, Phase, weights_in
from autopar.ir.work import FETCH, STORE, VIEWS
from autopar.lower.buckets import BucketKey, bucket_key, row_bytes
from autopar.lower.program import Copy, Read, Send, Transfer
from autopar.lower.transfers import changes_of, copies_of
from autopar.plan.plan import Plan
from autopar.plan.value import Decision, is_product, read_once
from autopar.price.reshard import Reshard


@dataclass(frozen=True, slots=True)
class Turn:
    """A node's turn to run."""

    node: str


@dataclass(frozen=True, slots=True)
class Advance:
    """Take a transfer further: wait for what is in flight of it, a collective or a copy, if any, then go on to the next
    one's launch. A store or fetch has run when its copy has been waited for.
    """

    transfer: Transfer


Action = Turn | Advance
MOVABLE = {*VIEWS, "aten._to_copy.default"}  # may run ahead of their place


class Facts:
    """What is the same of a plan however far ahead transfers are launched.

    `reads[node]`: its layout changes, as in `read_once`. `products`: the nodes that use the matrix units. `weights`:
    see `weights_in`.
    """

    def __init__(self, plan: Decision | Plan) -> None:
        self.plan, self.node_of = plan, plan.graph.by_name
        changed = [node for node in plan.graph.nodes if any(plan.choices[node.name].reads)]
        self.reads = {node.name: read_once(node, plan.choices[node.name]) for node in changed}
        self.products = {name for name, choice in plan.choices.items() if is_product(choice)}
        self.weights = weights_in(plan.graph)


def schedule(facts: Facts, phase: Phase, prefetch: int | None) -> list[Action]:
    """What one phase does, in order.

    A result that is nothing, or comes without a delivery, does not occur.
    """
    return _Phase(facts, phase, prefetch).actions()


class _Phase:
    def __init__(self, facts: Facts, phase: Phase, prefetch: int | None) -> None:
        self.facts, self.plan, self.phase, self.prefetch = facts, facts.plan, phase, prefetch
        self.node_of = facts.node_of
        self.nodes = [node for node in self.plan.graph.nodes if node.phase == phase]
        self.operands = {node.name: node.operands for node in self.nodes}
        self.reads = facts.reads
        self.done: list[Action] = []
        self.has_run: set[str] = set()
        self.left: dict[Transfer, int] = {}  # transfer -> how often it is still to be advanced
        # (due after so many products, results or a copy under way, or a node that waits), oldest first
        self.pending: deque[tuple[int, Send | Copy | str]] = deque()
        self.under_way: list[Send] = []  # rows
        self.products = 0
        self.buckets: dict[BucketKey, list[int]] = {}
        self.results = self._results()
        self.may_wait = self._tails() if prefetch is not None else set[str]()
        self.waiting: set[str] = set()

    def actions(self) -> list[Action]:
        for place in self.results.get(None, ()):
            self._send(place)
        launches = self._launches()
        for index, node in enumerate(self.nodes):
            for action in launches.get(index, ()):
                match action:
                    case Turn(name):
                        self._run(self.node_of[name])
                    case Advance(transfer):
                        self._advance(transfer)
            self._turn(node)
        while self.waiting:
            self._take_further(len(self.pending))
        for key in list(self.buckets):
            self._flush(key)
        while self.pending or self.under_way:
            self._take_further(len(self.pending))
            self._take_rows_further()
        return self.done

    def _results(self) -> dict[str | None, list[int]]:
        """Results of this phase by the node behind which they leave; None: at its head.

        A gradient may be a value of the forward, and an output an input.
        """
        found: dict[str | None, list[int]] = defaultdict(list)
        for place, (result, delivery) in enumerate(zip(self.plan.graph.results, self.plan.deliveries, strict=True)):
            if (result.kind == "gradient") != (self.phase == "backward") or result.ref is None or delivery is None:
                continue
            node = self.node_of[result.ref.name]
            here = node.phase == self.phase and not (node.is_source and self.phase == "forward")
            found[node.name if here else None].append(place)
        return found

    def _tails(self) -> set[str]:
        """Casts and views that lead to gradients alone."""
        readers: dict[str, list[str]] = defaultdict(list)
        for node in self.nodes:
            for ref in self.operands[node.name]:
                readers[ref.name].append(node.name)
        kept = {result.ref.name for result in self.plan.graph.results if result.ref and result.kind != "gradient"}
        tails: set[str] = set()
        for node in reversed(self.nodes):
            leads = node.name in self.results or readers[node.name]
            if node.op in MOVABLE and node.name not in kept and leads and tails.issuperset(readers[node.name]):
                tails.add(node.name)
        return tails

    # --- nodes and what they read --------------------------------------------------------------------------------

    def _turn(self, node: Node) -> None:
        """Run the node, or begin to wait for what it reads."""
        blocked = {ref.name for ref in self.operands[node.name]} & self.waiting
        reads = self.reads.get(node.name, {})
        if node.op == STORE:
            self._start(Copy(node.name))
            return
        if node.name not in self.may_wait or not (blocked or any(map(self._collectives, reads.values()))):
            self._run(node)
            self._send_results(node)
            return
        for position in reads:
            if self.operands[node.name][position].name not in blocked:
                self._advance(Read(node.name, position))
        self.waiting.add(node.name)
        self._wait(node.name)

    def _wait(self, item: Send | Copy | str) -> None:
        self.pending.append((self.products + max(1, self.prefetch or 0), item))

    def _take_node_further(self, name: str) -> None:
        blocked = {ref.name for ref in self.operands[name]} & self.waiting
        transfers = [Read(name, position) for position in self.reads.get(name, ())]
        for transfer in transfers:
            if self.operands[name][transfer.position].name not in blocked and self.left.get(transfer, 1):
                self._advance(transfer)
        if blocked or any(self.left[transfer] for transfer in transfers):
            self._wait(name)
            return
        self.waiting.remove(name)
        self._run(self.node_of[name])
        self._send_results(self.node_of[name])

    def _send_results(self, node: Node) -> None:
        for place in self.results.get(node.name, ()):
            self._send(place)

    def _run(self, node: Node) -> None:
        if node.name in self.has_run:
            return
        self.has_run.add(node.name)
        if node.op in (STORE, FETCH):
            self._finish(Copy(node.name))
            return
        self._bring(node)
        self.done.append(Turn(node.name))
        if node.name in self.facts.products:
            self.products += 1
            self._take_further(sum(1 for _ in takewhile(lambda item: item[0] <= self.products, self.pending)))

    def _bring(self, node: Node) -> None:
        """All that the node reads, in the layouts in which it takes it."""
        transfers = [Read(node.name, position) for position in self.reads.get(node.name, ())]
        if self.prefetch is not None:
            for transfer in transfers:
                if transfer not in self.left:
                    self._advance(transfer)
        for transfer in transfers:
            self._finish(transfer)

    def _launches(self) -> dict[int, list[Action]]:
        """place -> what comes ahead, just before the node there: fetching weights, and running what makes them."""
        if not self.prefetch:
            return {}
        weights = self.facts.weights
        place_of = {node.name: place for place, node in enumerate(self.nodes)}
        moved: dict[str, int] = {}  # node -> the place before which it runs already
        products: list[int] = []
        launches: dict[int, list[Action]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            for position, changes in self.reads.get(node.name, {}).items():
                ref = self.operands[node.name][position]
                if ref.name in weights and (count := self._collectives(changes)):
                    ahead = _back(products, self.prefetch)
                    makers = self._makers(ref.name, ahead, place_of, moved)
                    if makers is None:  # not before the value is there
                        ahead, makers = max(ahead, place_of[ref.name] + 1), []
                    if ahead < index:
                        moved |= dict.fromkeys(makers, ahead)
                        launches[ahead] += [*map(Turn, makers), Advance(Read(node.name, position))]
                        for left in range(count - 1, 0, -1):  # over several axes, one after the other
                            if (nearer := self.prefetch * left // count) and _back(products, nearer) > ahead:
                                launches[_back(products, nearer)].append(Advance(Read(node.name, position)))
            if node.name in self.facts.products:
                products.append(index)
        fetches: dict[int, list[Action]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            if node.op == FETCH:
                place = bisect_left(products, moved.get(node.name, index))
                fetches[_back(products[:place], self.prefetch)].append(Advance(Copy(node.name)))
        return {place: [*fetches.get(place, ()), *launches.get(place, ())] for place in {*fetches, *launches}}

    def _makers(self, name: str, ahead: int, place_of: Mapping[str, int], moved: Mapping[str, int]) -> list[str] | None:
        """What must run early for the value `name` to be there before place `ahead`; None where it cannot."""
        node = self.node_of[name]
        if place_of.get(name, -1) < ahead or moved.get(name, ahead + 1) <= ahead:
            return []
        if node.is_source or node.op == FETCH:
            return [name]
        if node.op not in MOVABLE or any(map(self._collectives, self.reads.get(name, {}).values())):
            return None
        makers: list[str] = []
        for ref in self.operands[name]:
            below = self._makers(ref.name, ahead, place_of, moved)
            if below is None:
                return None
            makers += [maker for maker in below if maker not in makers]
        return [*makers, name]

    # --- results -------------------------------------------------------------------------------------------------

    def _send(self, place: int) -> None:
        delivery = self.plan.deliveries[place]
        assert delivery is not None
        is_gradient = self.plan.graph.results[place].kind == "gradient"
        key = bucket_key(self.plan, place) if is_gradient else None
        if key is None:
            self._start(Send((place,)))
            return
        bucket = self.buckets.setdefault(key, [])
        bucket.append(place)
        if sum(row_bytes(self.plan, place) for place in bucket) >= self.plan.bucket_bytes:
            self._flush(key)

    def _flush(self, key: BucketKey) -> None:
        row = Send(tuple(self.buckets.pop(key)))
        if self.prefetch is None:
            self._finish(row)
            return
        self._advance(row)
        self._take_rows_further()
        if self.left[row]:
            self.under_way.append(row)

    def _take_rows_further(self) -> None:
        for row in self.under_way:
            self._advance(row)
        self.under_way = [row for row in self.under_way if self.left[row]]

    def _start(self, transfer: Send | Copy) -> None:
        self._advance(transfer)
        if self.prefetch is None:
            self._finish(transfer)
        elif self.left[transfer]:
            self._wait(transfer)

    def _take_further(self, count: int) -> None:
        """The first of what is pending, each by one step."""
        for _, item in [self.pending.popleft() for _ in range(count)]:
            if isinstance(item, str):
                self._take_node_further(item)
            else:
                self._start(item)

    # --- transfers -----------------------------------------------------------------------------------------------

    def _advance(self, transfer: Transfer) -> None:
        if transfer not in self.left:
            if isinstance(transfer, Copy):
                node = self.node_of[transfer.node]
                for maker in (self.node_of[ref.name] for ref in node.operands):
                    if maker.is_source and maker.phase == self.phase:
                        self._run(maker)
                self._bring(node)
            waits = self._collectives(changes_of(self.plan, transfer)) + copies_of(self.plan, transfer)
            self.left[transfer] = waits + 1
        self.left[transfer] -= 1
        self.done.append(Advance(transfer))

    def _finish(self, transfer: Transfer) -> None:
        while self.left.get(transfer, 1):
            self._advance(transfer)

    def _collectives(self, changes: Sequence[Reshard]) -> int:
        return sum(change.kind != "slice" and self.plan.mesh.size(change.axis) > 1 for change in changes)


def _back(products: Sequence[int], count: int) -> int:
    """The place of the product so many before the present one; 0 where there are not so many."""
    return products[-count] if len(products) >= count else 0
