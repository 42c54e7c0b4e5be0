"""Layouts: what each mesh axis does to a tensor, and the local shape that follows.

Where several axes split one dim, they do so in mesh order, the first axis outermost. Only even splits exist: the size
of a dim must be a multiple of the product of the axes that split it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from autopar.ir.graph import TensorType
from autopar.ir.mesh import Mesh


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    dim: int


@dataclass(frozen=True, slots=True, order=True)
class Replicate:
    pass


@dataclass(frozen=True, slots=True, order=True)
class Partial:
    """Every rank holds a term; `op` (one of TERMS) over the ranks of the axis gives the value."""

    op: str = "sum"


Placement = Shard | Replicate | Partial
Layout = tuple[Placement, ...]  # one entry per mesh axis, in mesh order

REPLICATE = Replicate()
TERMS = ("sum", "max", "min")  # what puts terms together; the first one goes without saying


def replicated(mesh: Mesh) -> Layout:
    return (REPLICATE,) * len(mesh.sizes)


@cache
def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...] | None:
    """The shape one rank holds; None where an axis splits a missing dim, or does not divide evenly."""
    local = list(shape)
    for placement, size in zip(layout, mesh.sizes, strict=True):
        if isinstance(placement, Shard):
            if placement.dim >= len(local) or local[placement.dim] % size or local[placement.dim] == 0:
                return None
            local[placement.dim] //= size
    return tuple(local)


def local_type(type: TensorType, layout: Layout, mesh: Mesh) -> TensorType:
    shape = local_shape(type.shape, layout, mesh)
    if shape is None:
        raise ValueError(
            f"{type} cannot be laid out as {show(layout, mesh, len(type.shape))} on mesh {mesh}: a size does not divide"
        )
    return TensorType(shape, type.dtype)


def show(layout: Layout, mesh: Mesh, ndim: int) -> str:
    """`[_, tensor] +data`: dim 1 is split over tensor, and the value is still to be summed over data."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    tail = ""
    for placement, name in zip(layout, mesh.names, strict=True):
        if isinstance(placement, Shard):
            dims[placement.dim].append(name)
        elif isinstance(placement, Partial):
            tail += f" +{name}" if placement.op == "sum" else f" {placement.op}:{name}"
    return "[" + ", ".join("*".join(names) or "_" for names in dims) + "]" + tail


def encode(layout: Layout) -> str:
    """One letter or two per axis for files: R, S0, P (sum), Pmax, Pmin."""
    parts: list[str] = []
    for placement in layout:
        match placement:
            case Replicate():
                parts.append("R")
            case Shard(dim):
                parts.append(f"S{dim}")
            case Partial(op):
                parts.append("P" if op == "sum" else f"P{op}")
    return " ".join(parts)


def decode(text: str) -> Layout:
    """Inverse of `encode`. Raises ValueError on anything else."""
    parts: list[Placement] = []
    for word in text.split():
        if word == "R":
            parts.append(REPLICATE)
        elif word.startswith("S") and word[1:].isdigit():
            parts.append(Shard(int(word[1:])))
        elif word.startswith("P"):
            parts.append(Partial(word[1:] or "sum"))
        else:
            raise ValueError(f"layout {text!r} has the unknown part {word!r}; parts are R, S<dim>, P, P<op>")
    return tuple(parts)
