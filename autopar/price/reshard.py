"""Layout changes: the cheapest sequence of collectives from one layout of a tensor to another.

On one axis, or on several at once, a step is an all-gather (split -> whole), reduce-scatter (partial -> split),
all-reduce (partial -> whole), all-to-all (split -> split elsewhere) or a slice (whole -> split, nothing is sent). A
step may only touch the innermost axes that split a dim, so that every rank's piece stays contiguous. Prices of all
pairs come from one Floyd-Warshall per tensor type (Floyd 1962); the path itself is walked only for the pairs that a
plan uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import RANDOM_STATE, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, Placement, Replicate, Shard, local_shape
from autopar.ir.mesh import Mesh
from cost_models.hardware import Hardware
from cost_models.price import Link, seconds
from cost_models.steps import Comm, Compute, Step, over


class Work(Enum):
    """Local work around a collective. All but the last four are about one dim, cut into as many pieces as ranks."""

    PIECE = "slice"  # this rank's piece
    TO_FRONT = "to front"  # the pieces one behind the other
    FROM_FRONT = "from front"  # the pieces side by side again
    NOTHING = "nothing"  # a layout change among one rank
    FLATTEN = "flatten"  # several tensors in one row
    UNFLATTEN = "unflatten"  # and apart again
    CLONE = "copy"  # of what somebody else has, too
    ADD_UP = "add up"  # a gradient, with those of the micro-batches before


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a transfer: local work, on a dim, or with None the collective or copy that its steps are.

    `made`: bytes of what it makes; None: another look at what it is given. It takes `share` of what its steps take.
    """

    what: Work | None
    steps: tuple[Step, ...] = ()
    dim: int = 0
    made: int | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Reshard:
    """One layout step on one axis, or on several at once, as one group of ranks (`cost_models.steps.over`): `before`
    and `after` are the placements on each of them; `local` is the local type it starts from.
    """

    axis: str
    before: Placement
    after: Placement
    local: TensorType

    @property
    def kind(self) -> str:
        match self.before, self.after:
            case Shard(), Replicate():
                return "all_gather"
            case Partial(), Replicate():
                return "all_reduce"
            case Partial(), Shard():
                return "reduce_scatter"
            case Shard(), Shard():
                return "all_to_all"
            case Replicate(), Shard():
                return "slice"
            case _:
                raise ValueError(f"no step leads from {self.before} to {self.after}")

    def applied(self, layout: Layout, mesh: Mesh) -> Layout:
        """What it makes of a layout."""
        places = mesh.places(self.axis)
        return tuple(self.after if place in places else placement for place, placement in enumerate(layout))

    @property
    def is_complex(self) -> bool:
        return self.local.dtype.startswith("complex")

    def steps(self, ranks: int) -> tuple[Step, ...]:
        """What one rank does: the collective, and a copy where the pieces are not contiguous in memory."""
        nbytes = self.local.nbytes
        match self.before, self.after:
            case Shard(dim), Replicate():
                whole = nbytes * ranks
                return (Comm("all_gather", self.axis, ranks, whole), *_copies(self.local, dim, whole))
            case Partial(), Replicate():
                return (Comm("all_reduce", self.axis, ranks, nbytes),)
            case Partial(), Shard(dim):
                return (Comm("reduce_scatter", self.axis, ranks, nbytes), *_copies(self.local, dim, nbytes))
            case Shard(src), Shard(dst):
                lead = min(src, dst)
                return (Comm("all_to_all", self.axis, ranks, nbytes), *_copies(self.local, max(lead, 1), 2 * nbytes))
            case _:
                return (Compute("slice", 0.0, 2.0 * nbytes / ranks, self.local.dtype, 1, "elementwise"),)

    def rooms(self, ranks: int) -> tuple[int, int]:
        """Bytes of what the change makes, copies in front of the collective and behind it among them: at most at a time
        while it holds the tensor that it starts from, and after it has let go of that.
        """
        local = self.local.nbytes
        match self.before, self.after:
            case Shard(dim), Replicate():
                return local * ranks, 2 * local * ranks if self._is_scattered(dim) else 0
            case Partial(), Replicate():
                return local, 0
            case Partial(), Shard(dim):
                made = local // ranks
                return (local, local + made) if self._is_scattered(dim) else (made, 0)
            case Shard(src), Shard(dst):
                return local, 2 * local if self._is_scattered(dst) or self._is_scattered(src) else 0
            case _:
                return local // ranks, 0

    def parts(self, ranks: int) -> tuple[Part, ...]:
        """The same, piece by piece in order; what is cut along another dim than the leading one is copied in front of
        the collective, or behind it.
        """
        steps = self.steps(ranks)
        copies = tuple(step for step in steps if isinstance(step, Compute))
        if ranks == 1:
            return (Part(Work.NOTHING, copies),) if copies else ()
        comm, local = tuple(step for step in steps if isinstance(step, Comm)), self.local.nbytes
        match self.before, self.after:
            case Shard(dim), Replicate():
                return (Part(None, comm, made=local * ranks), *self._copy(Work.FROM_FRONT, dim, local * ranks, copies))
            case Partial(), Replicate():
                return (Part(None, comm, made=local),)
            case Partial(), Shard(dim):
                return (*self._copy(Work.TO_FRONT, dim, local, copies), Part(None, comm, made=local // ranks))
            case Shard(src), Shard(dst):
                share = 0.5 if src and dst else 1.0
                before = self._copy(Work.TO_FRONT, dst, local, copies, share)
                behind = self._copy(Work.FROM_FRONT, src, local, copies, share)
                return (*before, Part(None, comm, made=local), *behind)
            case _, Shard(dim):
                return (Part(Work.PIECE, steps, dim=dim, made=local // ranks),)
            case _:
                raise ValueError(f"no step leads from {self.before} to {self.after}")

    def _copy(
        self, what: Work, dim: int, nbytes: int, steps: tuple[Step, ...], share: float = 1.0
    ) -> tuple[Part, ...]:  # fmt: skip
        if not dim:
            return ()
        return (Part(what, steps, dim=dim, made=nbytes if self._is_scattered(dim) else None, share=share),)

    def _is_scattered(self, dim: int) -> bool:
        """Whether pieces along `dim` are not contiguous in memory, so that they are copied."""
        return any(size != 1 for size in self.local.shape[:dim])


def travels_together(changes: Sequence[Reshard], mesh: Mesh, bucket_bytes: int) -> bool:
    """Whether a gradient that arrives by these changes is put in one row with others, which is summed at once.

    Only sums that end whole can be, where every axis cuts the bytes evenly, so that the row moves exactly the bytes
    that its gradients would, and where the gradient does not fill a row by itself.
    """
    return bool(changes) and all(
        change.kind == "all_reduce"
        and change.local.nbytes < bucket_bytes
        and not change.local.nbytes % mesh.size(change.axis)
        for change in changes
    )


def _copies(local: TensorType, dim: int, nbytes: int) -> tuple[Step, ...]:
    """Collectives work on the leading dim; another dim costs one pass through memory, unless all before it have size
    1.
    """
    if all(size == 1 for size in local.shape[:dim]):
        return ()
    return (Compute("reorder", 0.0, 2.0 * nbytes, local.dtype, 1, "elementwise"),)


class Resharder:
    """Prices and paths of layout changes on one mesh and hardware. Tables are made per tensor type when first asked
    for. `rounds`: how often a step makes each change.
    """

    def __init__(
        self, mesh: Mesh, hardware: Hardware, links: Mapping[str, Link], rounds: int = 1,
        ways: dict[TensorType, _Ways] | None = None,
    ) -> None:  # fmt: skip
        self.mesh, self.hardware, self.links, self.rounds = mesh, hardware, links, rounds
        self._ways: dict[TensorType, _Ways] = {} if ways is None else ways
        self._tables: dict[TensorType, _Table] = {}
        self._rooms: dict[TensorType, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def at(self, links: Mapping[str, Link]) -> Resharder:
        """The same mesh with other links: which changes there are, it has in common with this one."""
        return Resharder(self.mesh, self.hardware, links, self.rounds, self._ways)

    def table(self, type: TensorType) -> _Table:
        if type not in self._tables:
            self._tables[type] = self._make(type)
        return self._tables[type]

    def path(self, type: TensorType, src: Layout, dst: Layout) -> tuple[Reshard, ...]:
        """The steps from src to dst; empty if they are equal. Raises ValueError where no path exists."""
        table = self.table(type)
        at, end = table.index[src], table.index[dst]
        if not np.isfinite(table.price[at, end]):
            raise ValueError(f"{type}: no layout change leads from {src} to {dst}")
        op = next((p.op for p in src if isinstance(p, Partial) and p.op != "sum"), "max")
        steps: list[Reshard] = []
        while at != end:
            towards = {step: cost + table.price[step, end] for step, cost in table.steps[at].items()}
            best = min(towards, key=lambda step: (towards[step], step))
            steps.append(self._step(type, _with(op, table.layouts[at]), _with(op, table.layouts[best])))
            at = best
        return tuple(steps)

    def rooms(self, type: TensorType) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For every pair of layouts, bytes of what is made on the way from one to the other: at most at a time while
        it holds what it starts from, and after that.
        """
        if type not in self._rooms:
            self._rooms[type] = self._way_rooms(type, self.table(type))
        return self._rooms[type]

    def _way_rooms(self, type: TensorType, table: _Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        size = len(table.layouts)
        ends = np.arange(size)
        step_to = np.tile(ends, (size, 1)).T  # [at, end] -> the next layout on the path
        beside, alone = np.zeros((size, size)), np.zeros((size, size))
        for at, steps in enumerate(table.steps):
            if not steps:
                continue
            near = np.array(sorted(steps))
            towards = np.array([steps[j] for j in near])[:, None] + table.price[near]
            step_to[at] = np.where(ends == at, at, near[np.argmin(towards, axis=0)])
            made = self._ways[type].changes[at]
            rooms = {j: change.rooms(self.mesh.size(change.axis)) for j, change in made.items()} | {at: (0, 0)}
            beside[at], alone[at] = np.array([rooms[j] for j in step_to[at]], dtype=np.float64).T
        while True:
            further = np.maximum(table.nbytes[step_to] + beside[step_to, ends], alone[step_to, ends])
            longer = np.where(step_to == ends, alone, np.maximum(alone, further))
            if np.array_equal(longer, alone):
                return beside, alone
            alone = longer

    def _step(self, type: TensorType, src: Layout, dst: Layout) -> Reshard:
        places = [i for i, (before, after) in enumerate(zip(src, dst, strict=True)) if before != after]
        local = local_shape(type.shape, src, self.mesh)
        assert local is not None
        axis, at = over([self.mesh.names[place] for place in places]), places[0]
        return Reshard(axis, src[at], dst[at], TensorType(local, type.dtype))

    def _ways_of(self, type: TensorType) -> _Ways:
        if type not in self._ways:
            layouts = all_layouts(type, self.mesh)
            index = {_with(op, layout): i for i, layout in enumerate(layouts) for op in ("min", "max")}
            changes: list[dict[int, Reshard]] = []
            for layout in layouts:
                near = neighbours(layout, len(type.shape), self.mesh) if type.dtype != RANDOM_STATE else ()
                found = ((index.get(nearby), nearby) for nearby in near)
                changes.append({j: self._step(type, layout, nearby) for j, nearby in found if j is not None})
            nbytes = np.array([_local_bytes(type, layout, self.mesh) for layout in layouts], dtype=np.float64)
            self._ways[type] = _Ways(layouts, index, changes, nbytes)
        return self._ways[type]

    def _make(self, type: TensorType) -> _Table:
        ways = self._ways_of(type)
        price = np.full((len(ways.layouts), len(ways.layouts)), np.inf)
        np.fill_diagonal(price, 0.0)
        steps: list[dict[int, float]] = []
        ranks = {axis: self.mesh.size(axis) for axis in self.mesh.groups}
        for i, changes in enumerate(ways.changes):
            reached: dict[int, float] = {}
            for j, change in changes.items():
                found = change.steps(ranks[change.axis])
                once = sum(seconds(step, self.hardware, self.links) for step in found)
                reached[j] = price[i, j] = once * self.rounds
            steps.append(reached)
        for k in range(len(ways.layouts)):
            np.minimum(price, price[:, k, None] + price[None, k, :], out=price)
        return _Table(ways.layouts, ways.index, price, steps, ways.nbytes)


@dataclass(frozen=True, slots=True)
class _Ways:
    """Layouts of a tensor, from each those one step away with the change that leads there, and bytes of each. A value
    that is a least term yet is found where one that is a largest is: they move alike, and no operator takes either.
    """

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    changes: list[dict[int, Reshard]]
    nbytes: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Table:
    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    price: NDArray[np.float64]
    steps: list[dict[int, float]]
    nbytes: NDArray[np.float64]


def all_layouts(type: TensorType, mesh: Mesh) -> tuple[Layout, ...]:
    """Every layout with even shards: per axis whole, split along a dim, or partial (sum or max; min is as max is)."""
    choices: list[Placement] = [
        REPLICATE,
        *(Shard(dim) for dim in range(len(type.shape))),
        Partial("sum"),
        Partial("max"),
    ]
    found: list[Layout] = []
    for layout in itertools.product(choices, repeat=len(mesh.sizes)):
        if (
            len({p.op for p in layout if isinstance(p, Partial)}) <= 1
            and local_shape(type.shape, layout, mesh) is not None
        ):
            found.append(layout)
    return tuple(found)


def neighbours(layout: Layout, ndim: int, mesh: Mesh) -> list[Layout]:
    """Layouts one step away: what a single collective, or a slice, makes of a value in `layout`.

    It goes over one axis, or over several that have the same placement, and get the same: so a mesh contains what a
    coarser one does, whose axis these are.
    """
    found: list[Layout] = []
    for axis in mesh.groups:
        places = mesh.places(axis)
        before = layout[places[0]]
        if any(layout[place] != before for place in places):
            continue
        inner = {p.dim for at, p in enumerate(layout) if isinstance(p, Shard) and at > places[0] and at not in places}
        if isinstance(before, Shard) and before.dim in inner:
            continue  # only the innermost axes of a dim may move
        reachable: list[Placement] = [Shard(dim) for dim in range(ndim) if dim not in inner]
        if isinstance(before, Partial) and before.op != "sum":
            reachable = []
        for after in (REPLICATE, *reachable):
            if after != before:
                found.append(tuple(after if at in places else p for at, p in enumerate(layout)))
    return found


def _with(op: str, layout: Layout) -> Layout:
    """The same, of terms of which not the sum is the value, but what `op` says."""
    return tuple(Partial(op) if isinstance(p, Partial) and p.op != "sum" else p for p in layout)


def _local_bytes(type: TensorType, layout: Layout, mesh: Mesh) -> int:
    shape = local_shape(type.shape, layout, mesh)
    assert shape is not None
    return TensorType(shape, type.dtype).nbytes
