"""The plan as a value: the decision in full. It holds the graph and, for every node, the chosen strategy with its steps
and the layout changes in front of it, so that emitting it needs neither rules nor solver nor prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from autopar.ir.batch_norm import statistics_of
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Identity
from autopar.price.reshard import Reshard
from autopar.price.stored import gathers
from autopar.propose.strategies import Strategy
from cost_models.steps import MATRIX_KINDS, Comm, Compute, Step, received_bytes, unrolled

RESIDENCES = ("device", "host", "stream")  # where a parameter, its gradient and its optimizer states live
# How outputs are delivered: in pieces, whole on every rank, or in pieces those that are left beside the loss: none but
# other scalars.
OUTPUTS = ("sharded", "global", "loss")
# What a rule or a pattern may raise where a file has other arguments than the operator: it reads them by their places.
NO_CALL = (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, StopIteration, ValueError)
AGAIN = "run `python -m autopar.search` again to make a new plan"


def shortened(told: object, most: int = 800) -> str:
    """What goes into a message: names come out of files, and may be as long as somebody likes."""
    text = str(told)
    return text if len(text) <= most else f"{text[: most - 3]}..."


@dataclass(frozen=True, slots=True)
class Choice:
    """How one node runs.

    `roles`: per axis the factor it splits ("" none, "+0" operand 0 is a partial sum). `takes`, `gives`: layouts of
    operands
    and results. `body`, `body_axes`, `body_size`: the local body that replaces the operator, the axes it works over,
    and the global size of the factors it splits; or a pattern, the axis that it sends along, and 1. `steps`: what one
    rank performs. `reads`: per operand, the layout changes that bring it from what its producer gives. `stored`: of a
    parameter that is stored in more pieces than micro-batches read it in (ZeRO-1), the layout in which it is.
    """

    roles: tuple[str, ...]
    takes: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    body: str
    body_axes: tuple[str, ...]
    body_size: int
    steps: tuple[Step, ...]
    reads: tuple[tuple[Reshard, ...], ...]
    stored: Layout = ()

    @property
    def lies(self) -> Layout:
        """Of a parameter, the layout in which it is stored, with its gradient and its optimizer states."""
        return self.stored or self.gives[0]


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one result of the graph leaves it: the layout changes, and the layout it arrives in.

    `once`: of a gradient that a step's micro-batches add up in that layout, the layout changes behind all of them.
    """

    changes: tuple[Reshard, ...]
    layout: Layout
    once: tuple[Reshard, ...] = ()

    def lies(self, mesh: Mesh) -> Layout:
        """The layout in which a step gives the result."""
        return reduce(lambda layout, change: change.applied(layout, mesh), self.once, self.layout)


@dataclass(frozen=True)
class Decision:
    """What of a plan says how it runs; see `PlanValue` for each part."""

    graph: Graph
    mesh: Mesh
    choices: Mapping[str, Choice]
    deliveries: tuple[Delivery | None, ...]
    residence: Mapping[str, str] = field(default_factory=dict[str, str])
    bucket_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that the search looked at, with the prefetch that suits it best.

    None stands where there is no such plan, or it was not simulated; `why` says why.
    """

    name: str
    step_seconds: float | None
    simulated_seconds: float | None
    peak_bytes: int | None
    prefetch: int | None
    why: str = ""


SIMULATED_BOUND = "simulated_bound_s"  # among the facts of a search


@dataclass(frozen=True)
class PlanValue:
    """Every decision, with what was predicted of it.

    Seconds and bytes are those of one rank and one training step, predicted on `hardware`. `bound` is a proven lower
    bound on the sum of times of any plan of the searched space; `gap` = (step_seconds - bound) / step_seconds.
    `peak_bytes` per memory tier. `notes`: what a user should know, such as operators without a rule, which run
    replicated. `prefetch`: how many matrix operators ahead of their use weights are gathered, and behind them
    gradients are waited for (`autopar.lower.schedule`); None: every transfer is waited for where it stands.
    `bucket_bytes`: gradients that are summed whole are put together up to this size and summed at once; 0: each by
    itself.
    `simulated_seconds`: what the step takes as its timeline has it: with collectives overlapped, or, on hardware
    where nothing overlaps, one behind the other, but with whole buckets of gradients; None: nothing was simulated.
    `candidates`: the plans among which this one was the quickest by that measure.
    `residence`: parameter -> "host" (it, its gradient and its optimizer states lie on the host and are updated there)
    or "stream" (its states lie on the host, and stream through the device in the update); left out: on the device. The
    graph is the one that runs, with a node for each fetch, each store and each value that is run again
    (`autopar.rewrite.narrowed`). `tf32`: which float32 work was priced as tf32, some of
    `cost_models.hardware.TF32_KINDS`. Where `graph` is one of several micro-batches, its choices are those of each, and
    seconds are those of all.
    """

    graph: Graph
    mesh: Mesh
    hardware: str
    hardware_digest: str
    optimizer: str
    memory_limit: float | None
    outputs: str
    choices: Mapping[str, Choice]
    deliveries: tuple[Delivery | None, ...]
    step_seconds: float
    bound: float
    peak_bytes: Mapping[str, int]
    seconds_by: Mapping[str, float]
    notes: tuple[str, ...] = ()
    prefetch: int | None = None
    bucket_bytes: int = 0
    search: Mapping[str, float | int | str] = field(default_factory=dict[str, "float | int | str"])
    simulated_seconds: float | None = None
    candidates: tuple[Candidate, ...] = ()
    residence: Mapping[str, str] = field(default_factory=dict[str, str])
    tf32: tuple[str, ...] = ()

    @property
    def predicted_seconds(self) -> float:
        """What a step is predicted to take: as it was simulated, else the sum of its parts."""
        return self.step_seconds if self.simulated_seconds is None else self.simulated_seconds

    @property
    def measure(self) -> str:
        """How `predicted_seconds` was predicted, in words."""
        return "predicted (simulated)" if self.simulated_seconds is not None else "predicted (summed)"

    @property
    def simulated_bound(self) -> float:
        """A proven lower bound on the simulated time of any plan of the searched space: of the stream that computes,
        without what it waits for. 0: none is known.
        """
        found = self.search.get(SIMULATED_BOUND, 0.0)
        return found if isinstance(found, float) else 0.0

    @property
    def gap(self) -> float:
        return max(0.0, (self.step_seconds - self.bound) / self.step_seconds) if self.step_seconds else 0.0

    @property
    def batch_norm(self) -> str:
        """What batch norms take their statistics of, as in `autopar.compile`: "global" or "local"; "" where none does.

        It is in the graph, and so part of what the plan is made for.
        """
        return (*statistics_of(self.graph), "")[0]

    @property
    def rules(self) -> tuple[Identity, ...]:
        """The rules of users' packages that the plan rests on: of its operators, and of patterns that it runs."""
        used = {choice.body for choice in self.choices.values()} | {node.op for node in self.graph.nodes}
        return tuple(
            one.identity for one in self.graph.outside if not used.isdisjoint({**one.operators, **one.patterns})
        )

    @property
    def parameters(self) -> dict[str, Layout]:
        """Layout of every parameter, as it is stored, under the name that the graph uses."""
        return {n.target: self.choices[n.name].lies for n in self.graph.nodes if n.op == "parameter"}

    def gathers(self, node: Node) -> tuple[Reshard, ...]:
        """What brings a parameter, once a step, from the layout in which it is stored to that in which it is read."""
        return gathers_of(node, self.choices[node.name], self.mesh)

    def groups(self) -> tuple[str, ...]:
        """The axes of the mesh, and those several at once over which something is sent."""
        sent = {comm.axis for comm in self.comms()}
        return tuple(axis for axis in self.mesh.groups if axis in self.mesh.names or axis in sent)

    def comms(self) -> list[Comm]:
        """Every collective of one step, in the order of the graph; of several micro-batches, of each."""
        found: list[Comm] = []
        for node in self.graph.nodes:
            choice = self.choices[node.name]
            for read in read_once(node, choice).values():
                found += self._comms(read)
            found += [step for step in unrolled(choice.steps) if isinstance(step, Comm)]
            found += [replace(comm, once=True) for comm in self._comms(self.gathers(node))]
        for delivery in self.deliveries:
            if delivery is not None:
                found += self._comms(delivery.changes)
                found += [replace(comm, once=True) for comm in self._comms(delivery.once)]
        return [comm for comm in found if comm.ranks > 1]

    def _comms(self, changes: tuple[Reshard, ...]) -> list[Comm]:
        return [s for change in changes for s in change.steps(self.mesh.size(change.axis)) if isinstance(s, Comm)]

    @property
    def comm_bytes(self) -> dict[tuple[str, str], int]:
        """(collective, axis) -> bytes that one rank receives in a step."""
        total: dict[tuple[str, str], int] = defaultdict(int)
        for comm in self.comms():
            times = 1 if comm.once else self.graph.rounds.count
            total[comm.collective, comm.axis] += received_bytes(comm) * times
        return dict(sorted(total.items()))


def read_once(node: Node, choice: Choice) -> dict[int, tuple[Reshard, ...]]:
    """Position of an operand -> the layout changes in front of the node, where there are any; an operand that stands
    twice in its arguments, in one layout, comes once.
    """
    seen: set[tuple[Ref, Layout]] = set()
    found: dict[int, tuple[Reshard, ...]] = {}
    for position, (ref, layout, changes) in enumerate(zip(node.operands, choice.takes, choice.reads, strict=True)):
        if changes and (ref, layout) not in seen:
            found[position] = changes
        seen.add((ref, layout))
    return found


def gathers_of(node: Node, choice: Choice, mesh: Mesh) -> tuple[Reshard, ...]:
    """`PlanValue.gathers`, of any decision: of what micro-batches read, so in their dtype."""
    (type,) = node.outputs if choice.stored else (None,)
    return () if type is None else gathers(type, choice.stored, choice.gives[0], mesh)


def is_product(choice: Choice | Strategy) -> bool:
    """Whether the operator uses the matrix units: where the arithmetic is, and what transfers are overlapped with."""
    return any(isinstance(step, Compute) and step.kind in MATRIX_KINDS for step in unrolled(choice.steps))
