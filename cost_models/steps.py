"""What one rank does, as plain values: compute, communicate, move between memory tiers, repeat.

A step is about one rank and, unless it was measured, says nothing about time. `cost_models.price` gives its seconds on
a machine, `received_bytes` the bytes that it takes from other ranks; generated code and explanations read the same
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

DEVICE, HOST = "hbm", "host"
TIERS = (DEVICE, HOST)
MATRIX_KINDS = frozenset({"matmul", "attention", "conv"})  # run on matrix units, where a device has them


def _less_one(ranks: float) -> float:
    return ranks - 1


def _itself(ranks: float) -> float:
    return ranks


def _one(ranks: float) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Collective:
    """The closed form of one collective over `ranks` ranks, of which every reader takes what it needs.

    In each of `phases` phases a rank waits for `hops(ranks)` messages, one after the other, and receives
    `pieces(ranks)` pieces of nbytes / ranks bytes:

        bytes   = phases * pieces(ranks) * nbytes / ranks
        seconds = phases * (hops(ranks) * latency_s + pieces(ranks) * nbytes / ranks / bytes_per_s)

    This is the ring of Patarasuk and Yuan (2009), which is also NCCL's ring; the broadcast is a pipelined ring.
    `pairwise` marks the collective in which every rank talks to every other rank instead of its neighbour, `gathers`
    the one whose payload is what a rank has afterwards: `ranks` times what it gives, `shifts` those in which each
    rank passes something on to one other, all at once, and waits for the slowest: to its neighbour, or to the rank
    that lies as far from the other end ("mirror").
    All of it is arithmetic only, so sympy symbols pass through as well as numbers (the tests do this).
    """

    name: str
    phases: int
    hops: Callable[[float], float]
    pieces: Callable[[float], float]
    pairwise: bool = False
    gathers: bool = False
    shifts: bool = False

    def received(self, ranks: float, nbytes: float) -> float:
        """Bytes that one rank receives; `nbytes` is the payload of `Comm`."""
        return self.phases * self.pieces(ranks) * nbytes / ranks

    def seconds(self, ranks: float, nbytes: float, latency_s: float, bytes_per_s: float) -> float:
        """Seconds on a link of `latency_s` per message and `bytes_per_s` per rank in one direction."""
        return self.phases * (self.hops(ranks) * latency_s + self.pieces(ranks) * nbytes / ranks / bytes_per_s)


COLLECTIVES = {
    form.name: form
    for form in (
        Collective("all_gather", phases=1, hops=_less_one, pieces=_less_one, gathers=True),
        Collective("reduce_scatter", phases=1, hops=_less_one, pieces=_less_one),
        Collective("all_reduce", phases=2, hops=_less_one, pieces=_less_one),  # a reduce-scatter, then an all-gather
        Collective("all_to_all", phases=1, hops=_less_one, pieces=_less_one, pairwise=True),
        Collective("broadcast", phases=1, hops=_less_one, pieces=_itself),
        Collective("shift", phases=1, hops=_one, pieces=_itself, shifts=True),
        Collective("mirror", phases=1, hops=_one, pieces=_itself, shifts=True),
    )
}


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operator on local data.

    `flops` counts a multiply-add as two; `nbytes` are the bytes read and written in device memory; `dtype` is torch's
    name without the prefix ("bfloat16"); `kernels` is how many kernels are launched (0 for a view). `kind` says which
    unit works: "matmul", "attention" and "conv" use matrix units, "host" the host's processor and memory (an
    offloaded optimizer step), anything else ("elementwise", "reduction", ...) the device's ordinary units. `seconds` is
    what the step was measured to take where it is to run (`cost_models.measured`); None where it was not.
    """

    op: str
    flops: float
    nbytes: float
    dtype: str = "float32"
    kernels: int = 1
    kind: str = "matmul"
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds < inf:
            raise ValueError(f"Compute {self.op!r}: seconds is {self.seconds}, must be finite and positive")
        for name, figure in (("flops", self.flops), ("nbytes", self.nbytes), ("kernels", self.kernels)):
            if not 0 <= figure < inf:
                raise ValueError(f"Compute {self.op!r}: {name} is {figure}, must be finite and not negative")


def over(axes: Sequence[str]) -> str:
    """What several mesh axes are called that a collective goes over at once, as one group of ranks: "data+tensor"."""
    return "+".join(axes)


def axes_of(axis: str) -> tuple[str, ...]:
    """The mesh axes that an axis, or what `over` calls several, stands for; the outermost first."""
    return tuple(axis.split("+"))


def joined(axes: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """Two axes and more that a collective may go over at once: any of those that have more than one rank."""
    able = [axis for axis, size in zip(axes, sizes, strict=True) if size > 1]
    return tuple(over(some) for count in range(2, len(able) + 1) for some in combinations(able, count))


@dataclass(frozen=True, slots=True)
class Comm:
    """Run a collective over the `ranks` ranks of one mesh axis, or of several at once (`over`).

    `nbytes` is the payload on one rank: all_gather: the gathered output; reduce_scatter: the full input;
    all_reduce: the tensor; all_to_all: the local tensor; broadcast: the tensor; shift, mirror: what a rank passes
    on. `once`: in a step of several micro-batches, it runs behind them, and not in each.
    """

    collective: str
    axis: str
    ranks: int
    nbytes: int
    once: bool = False

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(f"no collective {self.collective!r}; known collectives: {', '.join(COLLECTIVES)}")
        if self.ranks < 1:
            raise ValueError(f"{self.collective} over axis {self.axis!r} has {self.ranks} ranks, needs at least 1")
        if not 0 <= self.nbytes < inf:
            raise ValueError(f"{self.collective} over axis {self.axis!r} has {self.nbytes} bytes")


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `nbytes` bytes from one memory tier of this rank to another, by a way of `cost_models.price.WAYS`."""

    src: str
    dst: str
    nbytes: int

    def __post_init__(self) -> None:
        for tier in (self.src, self.dst):
            if tier not in TIERS:
                raise ValueError(f"no memory tier {tier!r}; known tiers: {', '.join(TIERS)}")
        if self.src == self.dst:
            raise ValueError(f"a move from {self.src} to {self.dst} goes nowhere")
        if not 0 <= self.nbytes < inf:
            raise ValueError(f"the move from {self.src} to {self.dst} has {self.nbytes} bytes")


@dataclass(frozen=True, slots=True)
class Loop:
    """Run `body` in order, `rounds` times; with `overlap` transfers run during the compute of the round before."""

    rounds: int
    body: tuple[Step, ...]
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"a loop of {self.rounds} rounds; needs at least 1")


Step = Compute | Comm | Move | Loop


def unrolled(steps: Iterable[Step]) -> Iterator[Compute | Comm | Move]:
    """The steps, those of loops as often as they run."""
    for step in steps:
        if isinstance(step, Loop):
            for _ in range(step.rounds):
                yield from unrolled(step.body)
        else:
            yield step


def received_bytes(comm: Comm) -> int:
    """Bytes that one rank receives from other ranks: algorithmic bytes, not what a transport puts on the wire.

    With g ranks and n = comm.nbytes: all_gather, reduce_scatter and all_to_all (g-1)/g n, all_reduce 2(g-1)/g n,
    broadcast n (a rank that is not the root), shift and mirror n. Exact where g divides n; otherwise each phase is
    rounded down, so that an all_reduce is a reduce_scatter and an all_gather to the byte. One rank receives nothing.
    """
    if comm.ranks == 1:
        return 0
    form = COLLECTIVES[comm.collective]
    return form.phases * (int(form.pieces(comm.ranks)) * comm.nbytes // comm.ranks)
