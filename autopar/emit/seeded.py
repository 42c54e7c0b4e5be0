"""Random operators with a seed of their own, so that what they draw hangs on nothing but that seed.

An operator that draws numbers takes them from the default generator of its device, which the user's script seeds as it
likes, perhaps in another way on each rank. So a program for several ranks gives each of them a seed from outside: equal
on ranks that hold the same piece of the result, another one for every other piece, operator and call. No device is
waited for: seeds lie on the host.

    autopar::seeded_native_dropout_default(seed, x, 0.1, True)

draws what `aten.native_dropout(x, 0.1, True)` draws behind `torch.manual_seed(seed)`, and leaves the state of the
default generator as it found it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar._compat import FakeTensor, pytree
from autopar.emit import ops
from autopar.ir.graph import Graph, Node
from autopar.ir.layout import Layout, Shard
from autopar.ir.mesh import Mesh
from autopar.ir.work import draws

_operators = torch.library.Library("autopar", "FRAGMENT")


@functools.cache
def seeded(op: Any) -> Any:
    """The operator that does what `op` does with the numbers that belong to a seed, which is its first operand: an
    int64 scalar on the host.
    """
    if op is ops.attention:
        return seeded_attention
    spelling = str(op._schema)
    name = f"seeded_{op.__name__.replace('.', '_')}"
    _operators.define(f"{name}(Tensor seed, {spelling.partition('(')[2]}")

    def run(seed: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _behind(seed, op, args, kwargs)

    def fake(seed: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    _operators.impl(name, run, "CompositeExplicitAutograd")
    _operators.impl(name, fake, "Meta")
    return getattr(torch.ops.autopar, name).default


def seeded_attention(seed: Tensor, *args: Any) -> Any:
    """`ops.attention` with the numbers that belong to a seed."""
    return _behind(seed, ops.attention, args, {})


def _behind(seed: Tensor, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(seed, FakeTensor):
        return call(*args, **kwargs)
    generator = _generator_of(args, kwargs)
    state = generator.get_state()
    generator.manual_seed(int(seed))
    try:
        return call(*args, **kwargs)
    finally:
        generator.set_state(state)


def _generator_of(args: Sequence[Any], kwargs: Any) -> torch.Generator:
    """The default generator of the device on which such a call draws."""
    found = next((leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    return generator_on(kwargs.get("device") or found or torch.get_default_device())


def generator_on(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def drawing(graph: Graph) -> tuple[Node, ...]:
    """The operators that draw numbers, in the order of their seeds."""
    return tuple(node for node in graph.nodes if draws(node))


def piece_number(layout: Layout, mesh: Mesh, coordinate: Sequence[int]) -> int:
    """Which of the pieces of a value a rank holds, counted in mesh order: equal on ranks that hold the same one."""
    number = 0
    for placement, size, index in zip(layout, mesh.sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            number = number * size + index
    return number


def pieces_of(drawn: Sequence[tuple[Node, Layout]], mesh: Mesh, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Of what each operator draws, the number of the piece that this rank draws."""
    return tuple(piece_number(layout, mesh, coordinate) for _, layout in drawn)


def seeds(seed: int, call: int, pieces: Sequence[int]) -> Tensor:
    """The seeds of one call, [operators] of int64 on the host: the k-th operator's is the same wherever its piece has
    the number `pieces[k]`. `seed`: agreed upon over ranks; `call`: how many calls drew numbers before this one.

    Every number goes through the finaliser of SplitMix64 (Steele, Lea and Flood 2014, figure 17), in which each bit
    of what comes in changes half of those that come out: so neighbours have nothing in common.
    """
    mixed = _mixed(np.array([seed % 2**64], dtype=np.uint64))
    for part in ([call], range(len(pieces)), pieces):
        mixed = _mixed(mixed ^ np.array(part, dtype=np.uint64))
    return torch.from_numpy((mixed >> np.uint64(1)).astype(np.int64))


def _mixed(value: Any) -> Any:
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
