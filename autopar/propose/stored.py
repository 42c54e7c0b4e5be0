"""In which layouts a parameter may be stored that is read in a given one (`autopar.price.stored`)."""

from __future__ import annotations

from itertools import combinations

from autopar.ir.graph import TensorType
from autopar.ir.layout import REPLICATE, Layout, Shard, local_shape
from autopar.ir.mesh import Mesh


def layouts_stored(type: TensorType, read: Layout, mesh: Mesh) -> list[Layout]:
    """Those in which a parameter may be stored that is read in `read`: whole axes more split it, each along the first
    dim that divides and can be gathered by one collective.
    """
    free = [axis for axis, place in enumerate(read) if place == REPLICATE and mesh.sizes[axis] > 1]
    found: list[Layout] = []
    for count in range(1, len(free) + 1):
        for axes in combinations(free, count):
            layout: Layout | None = read
            for axis in axes:
                layout = None if layout is None else _split(type, read, layout, axis, mesh)
            if layout is not None:
                found.append(layout)
    return found


def _split(type: TensorType, read: Layout, layout: Layout, axis: int, mesh: Mesh) -> Layout | None:
    """Pieces lie in the order of the mesh, so that an axis cannot be gathered while a later one splits the same dim."""
    for dim in range(len(type.shape)):
        made = (*layout[:axis], Shard(dim), *layout[axis + 1 :])
        if Shard(dim) not in read[axis + 1 :] and local_shape(type.shape, made, mesh) is not None:
            return made
    return None
