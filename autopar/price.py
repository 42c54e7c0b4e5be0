"""price: seconds of every strategy, and of every change between what a producer gives and a consumer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.graph import TensorType
from autopar.layout import Layout, local_shape
from autopar.mesh import Mesh
from autopar.reshard import Resharder
from autopar.strategy import Strategy
from cost_models.hardware import Hardware
from cost_models.price import links_of, seconds
from cost_models.steps import Compute, Step

Array = NDArray[np.float64]

# Bytes of optimizer state per parameter element, and how many float32-sized passes over memory a step makes
# (read parameter, gradient and state; write parameter and state).
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "adagrad": 1, "rmsprop": 1, "none": 0}


@dataclass(frozen=True)
class Pricer:
    """Everything that turns steps and layouts into seconds and bytes, on one mesh, machine and optimizer."""

    mesh: Mesh
    hardware: Hardware
    optimizer: str
    resharder: Resharder

    @staticmethod
    def on(mesh: Mesh, hardware: Hardware, optimizer: str) -> Pricer:
        if optimizer not in OPTIMIZER_STATES:
            raise ValueError(f"no optimizer {optimizer!r}; known: {', '.join(OPTIMIZER_STATES)}")
        links = links_of(hardware, mesh.names, mesh.sizes)
        hardware = hardware.crowded(min(mesh.ranks, hardware.ranks_per_node))
        return Pricer(mesh, hardware, optimizer, Resharder(mesh, hardware, links))

    def seconds(self, steps: Sequence[Step]) -> float:
        return sum(seconds(step, self.hardware, self.resharder.links) for step in steps)

    def costs(self, strategies: tuple[Strategy, ...]) -> Array:
        return np.array([self.seconds(strategy.steps) for strategy in strategies])

    def reshard(self, type: TensorType, gives: Sequence[Layout], takes: Sequence[Layout]) -> Array:
        """Seconds from each layout of `gives` to each of `takes`; inf where no path leads."""
        table = self.resharder.table(type)
        rows = [table.index[layout] for layout in gives]
        columns = [table.index[layout] for layout in takes]
        return table.price[np.ix_(rows, columns)]

    def reshard_bytes(self, type: TensorType, gives: Sequence[Layout], takes: Sequence[Layout]) -> Array:
        """Bytes of the new tensor that a layout change makes; 0 where the layouts are equal."""
        table = self.resharder.table(type)
        rows = np.array([table.index[layout] for layout in gives])
        columns = np.array([table.index[layout] for layout in takes])
        return np.where(rows[:, None] == columns[None, :], 0.0, table.nbytes[columns][None, :])

    def nbytes(self, type: TensorType, layouts: Sequence[Layout]) -> Array:
        return np.array([self.local_bytes(type, layout) for layout in layouts], dtype=np.float64)

    def local_bytes(self, type: TensorType, layout: Layout) -> int:
        shape = local_shape(type.shape, layout, self.mesh)
        assert shape is not None, (type, layout)
        return TensorType(shape, type.dtype).nbytes

    def state_bytes(self, nbytes: int) -> int:
        """Bytes of optimizer state for `nbytes` of parameters, kept in the parameter's precision as torch.optim
        does.
        """
        return OPTIMIZER_STATES[self.optimizer] * nbytes

    def update_step(self, nbytes: int, dtype: str) -> Compute:
        """The optimizer's pass over a parameter of `nbytes` local bytes: reads it, its gradient and its states,
        writes all but the gradient.
        """
        states = OPTIMIZER_STATES[self.optimizer]
        passes = 0 if self.optimizer == "none" else 3 + 2 * states
        return Compute("optimizer", 0.0, float(passes * nbytes), dtype, 1 if passes else 0, "elementwise")
