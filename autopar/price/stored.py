"""A parameter that is stored in more pieces than micro-batches read it in: ZeRO-1, the distributed optimizer.

It, its optimizer states and its updates are split over more axes (Rajbhandari et al., arXiv 1910.02054, stage 1). In
front of a step's micro-batches it is gathered, once, in the dtype in which they read it; they add its gradient up as a
partial sum over these axes, which is reduced and scattered, once, behind the last of them.
Which layouts are offered is for `autopar.propose.stored` to say.
"""

from __future__ import annotations

from autopar.ir.graph import TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, local_shape
from autopar.ir.mesh import Mesh
from autopar.price.reshard import Reshard


def gathers(type: TensorType, stored: Layout, read: Layout, mesh: Mesh) -> tuple[Reshard, ...]:
    """From the layout in which a parameter is stored to that in which it is read."""
    found: list[Reshard] = []
    at = stored
    for axis in reversed(range(len(read))):
        if at[axis] != read[axis]:
            found.append(_change(type, at, axis, read, mesh))
            at = found[-1].applied(at, mesh)
    return tuple(found)


def scatters(type: TensorType, give: Layout, read: Layout, stored: Layout, mesh: Mesh) -> tuple[Reshard, ...]:
    """What brings a gradient that was added up as it was made, in `give`, to a parameter that is stored otherwise than
    it is read; none where it is no partial sum over all axes that differ, or lies otherwise than the parameter.
    """
    axes = [axis for axis, place in enumerate(read) if stored[axis] != place]
    sums = [axis for axis, place in enumerate(give) if place != read[axis]]
    if not {*axes} <= {*sums} or any(give[axis] != Partial("sum") or read[axis] != REPLICATE for axis in sums):
        return ()
    found: list[Reshard] = []
    at = give
    for axis in (*axes, *(axis for axis in sums if axis not in axes)):
        found.append(_change(type, at, axis, stored, mesh))
        at = found[-1].applied(at, mesh)
    return tuple(found)


def _change(type: TensorType, at: Layout, axis: int, to: Layout, mesh: Mesh) -> Reshard:
    shape = local_shape(type.shape, at, mesh)
    assert shape is not None, (type, at)
    return Reshard(mesh.names[axis], at[axis], to[axis], TensorType(shape, type.dtype))
