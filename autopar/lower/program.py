"""The program of a step: everything that one rank does, in the order in which it is issued.

An instruction runs something, launches a transfer or waits for one, allocates memory or frees it. All that comes behind
the decision reads this list and nothing else of how a plan works: code is printed from it, its seconds are a fold over
it, its memory a scan, and the simulator plays it. Every rank has the same program.

What is computed are values, called by numbers. A value lies in buffers: a result in one of its own, a view in that of
what it looks at. A buffer is freed behind the last instruction that needs one of its values. What a transfer reads or
makes is needed until the transfer has been waited for.

Memory is counted in this order, too: as CUDA's allocator has it, whose blocks are taken and given back as the host
issues work, and not as the device does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from autopar.price.reshard import Reshard, Work
from autopar.rules.looped import Do
from cost_models.steps import DEVICE, Comm, Compute, Move, Step


class Kind(Enum):
    """What a buffer is for."""

    PARAMETER = "parameter"
    CAST = "parameter as it is read"  # in micro-batches, where it is stored in another dtype
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    TANGENT = "tangent"
    VALUE = "value"  # what an operator makes
    RESHARDED = "resharded"  # another layout of a value
    WORKSPACE = "workspace"  # what an operator takes while it runs
    OUTPUT = "output"
    BEFORE = "output of the step before"  # which a training loop holds until it has the next one
    GRADIENT = "gradient"
    NEW_BUFFER = "new buffer"
    BUCKET = "bucket"  # gradients that are summed together
    STATES = "optimizer states"
    COUNT = "count of updates"
    ADDED_UP = "gradients so far"  # of the micro-batches before
    STREAMED = "streamed states"  # optimizer states of the host, on the device for an update
    TEMPORARY = "optimizer's temporaries"
    COORDINATES = "coordinates"


GIVEN = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT, Kind.INPUT})  # sources that their owners keep
MADE_BY_FIRST_UPDATE = frozenset({Kind.STATES, Kind.COUNT})


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """`nbytes` bytes of a memory tier. `owner`: whose they are, as a reader is told. Two buffers are never equal."""

    nbytes: Any  # a number, or a form of the sizes
    kind: Kind
    owner: str
    tier: str = DEVICE


# --- who asks for a transfer -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """What brings the operand at `position` to the node `reader`."""

    reader: str
    position: int


@dataclass(frozen=True, slots=True)
class Send:
    """What brings results of the graph, by their places among them, where they belong; several as one bucket."""

    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """What a store or a fetch, by its name, copies between device and host."""

    node: str


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's update of a parameter."""

    parameter: str


@dataclass(frozen=True, slots=True)
class Within:
    """The loop that stands in for a node, by the node's name: what it sends goes from rank to rank."""

    node: str


Transfer = Read | Send | Copy


# --- what is run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of the graph, by its name."""

    node: str


@dataclass(frozen=True, slots=True)
class Local:
    """Work of the transfer `of`; where it is part of a layout change, of that one."""

    work: Work
    of: Transfer
    dim: int = 0
    change: Reshard | None = None


@dataclass(frozen=True, slots=True)
class Inner:
    """Local work of the loop that stands in for a node. `turn`: as in `autopar.rules.looped.Do`, or None within the
    rounds, where it is counted. `results`: which of the node's results each value is that it makes, or writes to; None:
    none.
    """

    node: str
    do: Do
    turn: int | None
    results: tuple[int | None, ...]


# --- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alloc:
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Free:
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Run:
    """Compute. It takes `share` of what its `steps` take together; the collectives among them it waits for itself.

    `makes`: None for a result that nobody gets. `takes`: buffers that it has while it runs.
    """

    what: Operator | Local | Update | Inner
    steps: tuple[Step, ...]
    reads: tuple[int, ...]
    makes: tuple[int | None, ...]
    share: float = 1.0
    takes: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """Begin a transfer, or what the host does by itself. It is called by `number`.

    It starts no earlier than the compute that was issued before it ends; nor than the waits. `in_place`: what it makes
    lies where what it reads lies. `in_bucket`: gradients travel in it that are priced by their share of a full bucket.
    """

    number: int
    step: Comm | Move | Compute
    of: Transfer | Update | Within
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    change: Reshard | None = None
    in_place: bool = False
    in_bucket: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute goes on when that launch is done."""

    launch: int
    of: Transfer | Update | Within


@dataclass(frozen=True, slots=True)
class Peer:
    """The rank that is `offset` further along a mesh axis."""

    axis: str
    offset: int


@dataclass(frozen=True, slots=True)
class SendTo:
    """Begin to send a value to a peer, who receives it under the same tag. Waited for as a launch is."""

    number: int
    peer: Peer
    tag: str
    nbytes: int
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Begin to receive a value that a peer sends under the same tag. Waited for as a launch is."""

    number: int
    peer: Peer
    tag: str
    nbytes: int
    makes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """The body, `rounds` times. `carried`: (value before the loop and at the head of a round, value at its foot)."""

    rounds: int
    body: tuple[Instruction, ...]
    carried: tuple[tuple[int, int], ...] = ()


Instruction = Alloc | Free | Run | Launch | Wait | SendTo | Receive | Loop

OPTIMIZER = "optimizer"  # the phase behind those of the graph
PHASES = ("forward", "backward", OPTIMIZER)


@dataclass(frozen=True)
class Program:
    """One rank's step.

    `instructions`: of each phase. `resident`: buffers that are there before the step, throughout it, and after it; all
    others are allocated and freed in it. `values[number]`: the buffers in which a value lies, outermost view first.
    `sources`: source node -> its value. `results`: place among the graph's results -> the value that is delivered.
    """

    instructions: Mapping[str, tuple[Instruction, ...]]
    resident: tuple[Buffer, ...]
    values: tuple[tuple[Buffer, ...], ...]
    sources: Mapping[str, int] = field(default_factory=dict[str, int])
    results: Mapping[int, int] = field(default_factory=dict[int, int])

    def __iter__(self) -> Iterator[tuple[str, Instruction]]:
        """(phase, instruction), in order."""
        for phase in PHASES:
            for instruction in self.instructions.get(phase, ()):
                yield phase, instruction
