"""price: seconds of every strategy, and of every change between what a producer gives and a consumer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import ITEMSIZE, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.rounds import ONE, Rounds, wide
from autopar.price.reshard import Reshard, Resharder, travels_together
from autopar.price.stored import scatters
from autopar.propose.strategies import Strategy
from cost_models.hardware import SLOWS, Hardware
from cost_models.price import links_of, seconds
from cost_models.steps import MATRIX_KINDS, Comm, Compute, Move, Step, over

Array = NDArray[np.float64]

# Bytes of optimizer state per parameter element, and how many float32-sized passes over memory a step makes
# (read parameter, gradient and state; write parameter and state).
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "adagrad": 1, "rmsprop": 1, "none": 0}

# Those that count the updates of each parameter do so in a float32 in the host's memory.
COUNTING = ("adamw", "adam", "adagrad", "rmsprop")
COUNTER_BYTES = 4
OPTIMIZER = "optimizer"  # what an update is called among steps of work


@dataclass(frozen=True)
class Temporaries:
    """What torch.optim makes and drops while it steps, in bytes for each byte of the parameter.

    `own`: while it updates that parameter; `left`: of these, what is still there while it updates the next one.
    `together`: where it updates all parameters at once (foreach), which torch does for DTensors, but not on a CPU.
    """

    own: int = 0
    left: int = 0
    together: int = 0


# With torch's defaults: no weight decay but AdamW's, which is in place; no nesterov. See docs/design/0012.
OPTIMIZER_TEMPORARIES = {
    "adamw": Temporaries(own=2, left=1, together=1),
    "adam": Temporaries(own=2, left=1, together=1),
    "adagrad": Temporaries(own=1, left=1, together=2),
    "rmsprop": Temporaries(own=1, left=1, together=1),
    "sgd": Temporaries(),
    "sgd-momentum": Temporaries(),
    "none": Temporaries(),
}


@dataclass(frozen=True)
class Pricer:
    """Everything that turns steps and layouts into seconds and bytes, on one mesh, machine and optimizer.

    `rounds`: how often a step runs its graph, and so all but the updates, and whether gradients are summed behind them
    (`autopar.ir.rounds`): seconds are those of a whole step. `crowding`: how many times longer compute ("matrix",
    "memory") takes among the ranks of a node than the profile says of few; `hardware` has it in its figures already.
    `bucket_bytes`: the size up to which gradients that are summed whole gather, to be summed at once
    (docs/design/0006).
    """

    mesh: Mesh
    hardware: Hardware
    optimizer: str
    resharder: Resharder
    crowding: Mapping[str, float] = field(default_factory=dict[str, float])
    bucket_bytes: int = 0
    rounds: Rounds = ONE

    @staticmethod
    def on(mesh: Mesh, hardware: Hardware, optimizer: str, bucket_bytes: int = 0, rounds: Rounds = ONE) -> Pricer:
        if optimizer not in OPTIMIZER_STATES:
            raise ValueError(f"no optimizer {optimizer!r}; known: {', '.join(OPTIMIZER_STATES)}")
        links = links_of(hardware, mesh.names, mesh.sizes)
        busy = min(mesh.ranks, hardware.ranks_per_node)
        crowding = {what: hardware.slowed_by(what, busy) for what in SLOWS}
        hardware = hardware.crowded(busy)
        resharder = Resharder(mesh, hardware, links, rounds.count)
        return Pricer(mesh, hardware, optimizer, resharder, crowding, bucket_bytes, rounds)

    def seconds(self, steps: Sequence[Step]) -> float:
        """Of a step of training: of steps that are done in each round, in all rounds."""
        return sum(seconds(step, self.hardware, self.resharder.links) * self.times(step) for step in steps)

    def times(self, step: Step) -> int:
        """How often a step of training does it: once, or in each round."""
        is_once = step.op == OPTIMIZER if isinstance(step, Compute) else isinstance(step, Comm) and step.once
        return 1 if is_once else self.rounds.count

    def costs(self, strategies: tuple[Strategy, ...]) -> Array:
        return np.array([self.seconds(strategy.steps) for strategy in strategies])

    def timed(self, step: Compute, alone_s: float) -> Compute:
        """The step with its measured time, which goes before any formula: what it took a rank that was alone, among as
        many busy ranks as there will be.
        """
        slower = self.crowding.get("matrix" if step.kind in MATRIX_KINDS else "memory", 1.0)
        return replace(step, seconds=alone_s * slower)

    def reshard(self, type: TensorType, gives: Sequence[Layout], takes: Sequence[Layout]) -> Array:
        """Seconds from each layout of `gives` to each of `takes`; inf where no path leads."""
        table = self.resharder.table(type)
        rows = [table.index[layout] for layout in gives]
        columns = [table.index[layout] for layout in takes]
        return table.price[np.ix_(rows, columns)]

    def deliver(
        self, type: TensorType, gives: Sequence[Layout], takes: Sequence[Layout], stored: Sequence[Layout] = (), *,
        adds_up: bool = True,
    ) -> Array:  # fmt: skip
        """`reshard`, for gradients on their way to their parameters, which are read in `takes`; where they are stored
        otherwise, `stored` says how. `adds_up`: micro-batches add them up as they are made, which is not so of inputs.
        """
        price = self.reshard(type, gives, takes)
        for i, give in enumerate(gives):
            for j, take in enumerate(takes):
                if stored and stored[j] != take:
                    once = self.scattered_once(type, give, take, stored[j])
                    price[i, j] = sum(s for _, s in self.delivered(once, once=True)) if once else np.inf
                elif adds_up and (once := self.summed_once(type, give, take)):
                    price[i, j] = sum(s for _, s in self.delivered(once, once=True))
                elif travels_together(self._sums(type, give, take), self.mesh, self.bucket_bytes):
                    price[i, j] = sum(s for _, s in self.delivered(self.delivery(type, give, take)))
        return price

    def summed_once(self, type: TensorType, give: Layout, take: Layout) -> tuple[Reshard, ...]:
        """The layout changes behind all rounds that bring a gradient to its parameter, which it is added up for in the
        layout in which it is made: sums alone, as then nothing else lies there meanwhile. None where it is otherwise.
        """
        if not self.rounds.reduces_once:
            return ()
        added_up = added_up_type(type)
        sums = self._sums(added_up, give, take)
        if not sums or self.mesh.size(sums[0].axis) == 1:
            return ()
        usual = self.resharder.path(added_up, give, take)
        ways = [sums, *([usual] if all(change.kind == "all_reduce" for change in usual) else [])]
        return min(ways, key=lambda changes: sum(s for _, s in self.delivered(changes, once=True)))

    def scattered_once(self, type: TensorType, give: Layout, read: Layout, stored: Layout) -> tuple[Reshard, ...]:
        """`summed_once`, for a parameter that is stored otherwise than it is read."""
        return scatters(added_up_type(type), give, read, stored, self.mesh)

    def gathered_once(self, changes: Sequence[Reshard]) -> tuple[Step, ...]:
        """The steps of layout changes that a step of several micro-batches makes once."""
        steps = (step for change in changes for step in change.steps(self.mesh.size(change.axis)))
        return tuple(as_once(step) for step in steps)

    def delivery(self, type: TensorType, give: Layout, take: Layout) -> tuple[Reshard, ...]:
        """The layout changes that bring a gradient to its parameter."""
        usual, sums = self.resharder.path(type, give, take), self._sums(type, give, take)
        if not travels_together(sums, self.mesh, self.bucket_bytes):
            return usual
        if all(change.kind == "all_reduce" for change in usual):
            return sums
        return min((sums, usual), key=lambda changes: sum(s for _, s in self.delivered(changes)))

    def gathers(self, type: TensorType, give: Layout, take: Layout) -> bool:
        """Whether a gradient is put in a row with others on its way to its parameter."""
        return travels_together(self.delivery(type, give, take), self.mesh, self.bucket_bytes)

    def delivered(self, changes: Sequence[Reshard], *, once: bool = False) -> list[tuple[Step, float]]:
        """The steps of a gradient's delivery, with their seconds: in a row with others, its share of a full row. Those
        that are added up (`once`) lie in such rows from the start.
        """
        if not travels_together(changes, self.mesh, self.bucket_bytes):
            steps = [step for change in changes for step in change.steps(self.mesh.size(change.axis))]
            told = (as_once(step) if once else step for step in steps)
            return [(step, self.seconds((step,))) for step in told]
        local = changes[0].local
        found: list[tuple[Step, float]] = []
        if not once:
            row = Compute("reorder", 0.0, 2.0 * local.nbytes, local.dtype, 1, "elementwise")
            found.append((row, self.seconds((row,))))
        for change in changes:
            ranks = self.mesh.size(change.axis)
            one = Comm("all_reduce", change.axis, ranks, local.nbytes, once)
            found.append((one, self.share(one)))
        return found

    def share(self, step: Comm) -> float:
        """Seconds of gradients that are summed in a bucket: their share of a full one."""
        return self.seconds((replace(step, nbytes=self.bucket_bytes),)) * step.nbytes / self.bucket_bytes

    def _sums(self, type: TensorType, give: Layout, take: Layout) -> tuple[Reshard, ...]:
        """The all-reduce from `give` to `take`; none unless partial sums that become whole are all that differs."""
        axes = [axis for axis, (before, after) in enumerate(zip(give, take, strict=True)) if before != after]
        if not axes or not all(give[axis] == Partial("sum") and take[axis] == REPLICATE for axis in axes):
            return ()
        shape = local_shape(type.shape, give, self.mesh)
        assert shape is not None, (type, give)
        at_once = over([self.mesh.names[axis] for axis in axes])
        return (Reshard(at_once, Partial("sum"), REPLICATE, TensorType(shape, type.dtype)),)

    def reshard_bytes(self, type: TensorType, gives: Sequence[Layout], takes: Sequence[Layout]) -> Array:
        """Bytes of the new tensor that a layout change makes; 0 where the layouts are equal."""
        table = self.resharder.table(type)
        rows = np.array([table.index[layout] for layout in gives])
        columns = np.array([table.index[layout] for layout in takes])
        return np.where(rows[:, None] == columns[None, :], 0.0, table.nbytes[columns][None, :])

    def reshard_rooms(self, type: TensorType, gives: Sequence[Layout], takes: Sequence[Layout]) -> tuple[Array, Array]:
        """Bytes of what a layout change makes, at most at a time: while it holds what it starts from, and then."""
        table, rooms = self.resharder.table(type), self.resharder.rooms(type)
        places = np.ix_([table.index[layout] for layout in gives], [table.index[layout] for layout in takes])
        return rooms[0][places], rooms[1][places]

    def nbytes(self, type: TensorType, layouts: Sequence[Layout]) -> Array:
        return np.array([self.local_bytes(type, layout) for layout in layouts], dtype=np.float64)

    def local_bytes(self, type: TensorType, layout: Layout) -> int:
        shape = local_shape(type.shape, layout, self.mesh)
        assert shape is not None, (type, layout)
        return TensorType(shape, type.dtype).nbytes

    def accumulated_bytes(self, nbytes: int, dtype: str) -> int:
        """Bytes in which the gradients of a parameter of `nbytes` are added up, from round to round: in float32, where
        the parameter has less.
        """
        return added_up_bytes(nbytes, dtype) if self.rounds.count > 1 else 0

    def state_bytes(self, nbytes: int) -> int:
        """Bytes of optimizer state for `nbytes` of parameters, kept in the parameter's precision as torch.optim
        does.
        """
        return OPTIMIZER_STATES[self.optimizer] * nbytes

    @property
    def counter_bytes(self) -> int:
        """Bytes of the device that the count of a parameter's updates takes: none, unless the device is the host."""
        return 0 if self.updates_together or self.optimizer not in COUNTING else COUNTER_BYTES

    @property
    def temporaries(self) -> Temporaries:
        return OPTIMIZER_TEMPORARIES[self.optimizer]

    @property
    def updates_together(self) -> bool:
        """Whether torch.optim updates all parameters at once: on any device that is not the host itself."""
        tiers = self.hardware.tiers
        return tiers["hbm"].bytes_per_s != tiers["host"].bytes_per_s

    def update_step(self, nbytes: int, dtype: str, kind: str = "elementwise") -> Compute:
        """The optimizer's pass over a parameter of `nbytes` local bytes: reads it, its gradient and its states,
        writes all but the gradient. `kind` "host": by the host's processors, in its memory.
        """
        states = OPTIMIZER_STATES[self.optimizer]
        passes = 0 if self.optimizer == "none" else 3 + 2 * states
        return Compute(OPTIMIZER, 0.0, 1.0 * passes * nbytes, dtype, 1 if passes else 0, kind)

    def cast_step(self, stored: int, read: int, dtype: str) -> Compute:
        """Once a step, in front of its micro-batches: `stored` bytes of a parameter of `dtype` become `read` bytes."""
        return Compute(OPTIMIZER, 0.0, 1.0 * (stored + read), dtype, 1, "elementwise")

    def update_steps(self, nbytes: int, dtype: str, residence: str) -> tuple[Step, ...]:
        """All that updating a parameter takes, where it resides (`autopar.plan.RESIDENCES`): on the "device"; on the
        "host", to which its gradient goes; or with states that "stream" from the host and back.
        """
        match residence:
            case "device":
                return (self.update_step(nbytes, dtype),)
            case "host":
                return Move("hbm", "host", nbytes), self.update_step(nbytes, dtype, "host")
            case "stream":
                states = self.state_bytes(nbytes)
                update = self.update_step(nbytes, dtype)
                return Move("host", "hbm", states), update, Move("hbm", "host", states)
            case _:
                raise ValueError(f"no residence {residence!r}; known: device, host, stream")


def as_once(step: Step) -> Step:
    """The step, done once in all micro-batches: work as part of the updates, which are."""
    if isinstance(step, Comm):
        return replace(step, once=True)
    return replace(step, op=OPTIMIZER) if isinstance(step, Compute) else step


def added_up_bytes(nbytes: Any, dtype: str) -> Any:
    """Bytes of the sum over a step's micro-batches of what has `nbytes` in each."""
    return nbytes * ITEMSIZE[wide(dtype)] // ITEMSIZE[dtype]


def added_up_type(type: TensorType) -> TensorType:
    """The type of that sum, of values of this type."""
    return replace(type, dtype=wide(type.dtype))


def adding_up(nbytes: Any, dtype: str) -> Compute:
    """A gradient of `nbytes` is added to those of the micro-batches before."""
    moved = 1.0 * (nbytes + 2 * added_up_bytes(nbytes, dtype))
    return Compute("accumulate", 0.0, moved, wide(dtype), 1, "elementwise")
