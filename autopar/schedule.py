"""The order in which a step's program does things: when nodes run, and when transfers are launched and waited for.

`emit` writes this order and `events` plays it, so that what is simulated is what runs. With `prefetch` None everything
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
what hides a transfer. Small gradients are summed together, as one row; whatever `prefetch`, the row is launched when it
is full and waited for when the next one is, or at the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from autopar.graph import Graph, Node, Phase, Ref
from autopar.layout import Layout
from autopar.plan.plan import Choice, Plan
from autopar.price import Pricer
from autopar.reshard import Reshard, travels_together
from autopar.work import FETCH, STORE, VIEWS
from cost_models.steps import MATRIX_KINDS, Comm, Compute


@dataclass(frozen=True, slots=True)
class Read:
    """What brings the operand at `position` to the node `reader`."""

    reader: str
    position: int


@dataclass(frozen=True, slots=True)
class Send:
    """What brings results of the graph, by their places among them, where they belong; several are summed as one."""

    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """What a store or a fetch, by its name, copies between device and host."""

    node: str


Transfer = Read | Send | Copy


@dataclass(frozen=True, slots=True)
class Run:
    """Run a node."""

    node: str


@dataclass(frozen=True, slots=True)
class Advance:
    """Take a transfer further: wait for what is in flight of it, a collective or a copy, if any, then go on to the next
    one's launch. A store or fetch has run when its copy has been waited for.
    """

    transfer: Transfer


Action = Run | Advance
BucketKey = tuple[tuple[str, ...], str, bool]  # the axes that sum, the dtype, and whether they leave for the host
ROWS, SMALL, LARGE = 8, 1 << 22, 1 << 24
MOVABLE = {*VIEWS, "aten._to_copy.default"}  # may run ahead of their place


def schedule(plan: Plan, phase: Phase, prefetch: int | None, *, rows: bool = True) -> list[Action]:
    """What one phase does, in order. `rows`: small gradients are summed together; False: each by itself.

    A result that is nothing, or comes without a delivery, does not occur.
    """
    return _Phase(plan, phase, prefetch, rows).actions()


class _Phase:
    def __init__(self, plan: Plan, phase: Phase, prefetch: int | None, rows: bool) -> None:
        self.plan, self.phase, self.prefetch, self.rows = plan, phase, prefetch, rows
        self.node_of = plan.graph.by_name
        self.nodes = [node for node in plan.graph.nodes if node.phase == phase]
        self.operands = {node.name: node.operands for node in self.nodes}
        self.reads = {
            node.name: _reads(self.operands[node.name], plan.choices[node.name])
            for node in self.nodes
            if any(plan.choices[node.name].reads)
        }
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
                    case Run(name):
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
        self.done.append(Run(node.name))
        if is_product(self.plan.choices[node.name]):
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
        weights = weights_in(self.plan.graph)
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
                        launches[ahead] += [*map(Run, makers), Advance(Read(node.name, position))]
                        for left in range(count - 1, 0, -1):  # over several axes, one after the other
                            if (nearer := self.prefetch * left // count) and _back(products, nearer) > ahead:
                                launches[_back(products, nearer)].append(Advance(Read(node.name, position)))
            if is_product(self.plan.choices[node.name]):
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
        key = bucket_key(self.plan, place) if is_gradient and self.rows else None
        if key is None:
            self._start(Send((place,)))
            return
        bucket = self.buckets.setdefault(key, [])
        bucket.append(place)
        if sum(_row_bytes(self.plan, place) for place in bucket) >= self.plan.bucket_bytes:
            self._flush(key)

    def _flush(self, key: BucketKey) -> None:
        row = Send(tuple(self.buckets.pop(key)))
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


def changes_of(plan: Plan, transfer: Transfer) -> tuple[Reshard, ...]:
    """The layout changes that a transfer makes, one behind the other; of a row, those of its first gradient."""
    match transfer:
        case Read(reader, position):
            return plan.choices[reader].reads[position]
        case Send((first, *_)):
            delivery = plan.deliveries[first]
            return () if delivery is None else delivery.changes
        case Copy():
            return ()
        case Send():
            raise ValueError("nothing is sent")


def copies_of(plan: Plan, transfer: Transfer) -> int:
    """How many copies between device and host a transfer makes, behind its layout changes."""
    match transfer:
        case Copy():
            return 1
        case Send((place, *_)):  # a row leaves as a whole
            return int(leaves(plan, place))
        case _:
            return 0


def leaves(plan: Plan, place: int) -> bool:
    """Whether that result of the graph is a gradient that leaves for the host."""
    result = plan.graph.results[place]
    return result.kind == "gradient" and plan.residence.get(result.target) == "host"


def _reads(operands: Sequence[Ref], choice: Choice) -> dict[int, tuple[Reshard, ...]]:
    """position -> changes, where there are any; a value that stands twice in one layout is brought there once."""
    seen: set[tuple[Ref, Layout]] = set()
    found: dict[int, tuple[Reshard, ...]] = {}
    for position, (ref, layout, changes) in enumerate(zip(operands, choice.takes, choice.reads, strict=True)):
        if changes and (ref, layout) not in seen:
            found[position] = changes
        seen.add((ref, layout))
    return found


def weights_in(graph: Graph) -> set[str]:
    """Parameters, and what is made of them alone: casts and views."""
    weights: set[str] = set()
    for node in graph.nodes:
        if node.op == "parameter" or (node.operands and all(ref.name in weights for ref in node.operands)):
            weights.add(node.name)
    return weights


def is_product(choice: Choice) -> bool:
    """Whether the operator uses the matrix units, and so hides what is under way meanwhile."""
    return any(isinstance(step, Compute) and step.kind in MATRIX_KINDS for step in choice.steps)


def _row_bytes(plan: Plan, place: int) -> int:
    delivery = plan.deliveries[place]
    assert delivery is not None
    return delivery.changes[0].local.nbytes


def bucket_key(plan: Plan, place: int) -> BucketKey | None:
    """Which gradients that one may be summed together with; None: it is summed by itself."""
    delivery = plan.deliveries[place]
    if delivery is None or not travels_together(delivery.changes, plan.mesh, plan.bucket_bytes):
        return None
    return tuple(change.axis for change in delivery.changes), delivery.changes[0].local.dtype, leaves(plan, place)


def bucket_bytes(pricer: Pricer, gradients: int, memory: float | None) -> int:
    """The size up to which gradients gather before they are summed.

    No more than all `gradients` bytes, and no more than a hundredth of the `memory`, since the row is a copy; 0 where
    that leaves next to nothing. Where nothing overlaps, up to LARGE: each row takes processors from what computes
    meanwhile. Where collectives overlap compute, several rows are better than one that is launched at the end: no more
    than the ROWS-th part, from SMALL on; and so many that waiting is a fiftieth of the time per axis, where twice the
    size sums at less than 1.02 times the rate.
    """
    size = 1 << 16
    largest = gradients if memory is None else min(gradients, int(memory / 100))
    if not pricer.hardware.overlaps:
        return min(largest, LARGE) if largest > size and pricer.mesh.ranks > 1 else 0
    largest = min(largest, max(gradients // ROWS, SMALL))
    for axis, ranks in zip(pricer.mesh.names, pricer.mesh.sizes, strict=True):

        def rate(nbytes: int, axis: str = axis, ranks: int = ranks) -> float:
            return nbytes / pricer.seconds((Comm("all_reduce", axis, ranks, nbytes),))

        while ranks > 1 and size < largest and rate(2 * size) > 1.02 * rate(size):
            size *= 2
    return min(size, largest) if largest > 1 << 16 else 0


def _back(products: Sequence[int], count: int) -> int:
    """The place of the product so many before the present one; 0 where there are not so many."""
    return products[-count] if len(products) >= count else 0
