"""Small helpers with which the tables write rules at concrete shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

from autopar.ir.graph import Arg, Node, Ref, TensorType

Types = tuple[TensorType, ...]
Writer = Callable[[Node, Types], str | None]
Table = dict[str, str | Writer]

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def arg(node: Node, position: int, name: str, default: Arg = None) -> Arg:
    """An argument by position, or by name where the caller passed it so."""
    return node.args[position] if position < len(node.args) else dict(node.kwargs).get(name, default)


def spell(
    shape: Sequence[int],
    names: Sequence[str] = LETTERS,
    lock: Collection[int] = (),
    body: Mapping[int, str] | None = None,
) -> str:
    """One word per dim: `1` for size one, the name (with ! for dims in `lock`, empty dims too) otherwise."""
    words: list[str] = []
    for dim, size in enumerate(shape):
        mark = "!" if dim in lock or size == 0 else f"@{body[dim]}" if body and dim in body else ""
        words.append("1" if size == 1 else names[dim] + mark)
    return " ".join(words) or "."


def foreign(shape: Sequence[int], prefix: str) -> str:
    """A tensor that shares no factor with the others: all its dims locked."""
    return spell(shape, [f"{prefix}{dim}" for dim in range(len(shape))], lock=range(len(shape)))


def operands(node: Node, words: Mapping[int | str, str]) -> str:
    """The left side: the words of those arguments (by position or keyword) that are tensors here."""
    places: list[tuple[int | str, Arg]] = [*enumerate(node.args), *node.kwargs]
    return ", ".join(words[key] for key, value in places if isinstance(value, Ref))


def results(node: Node, *words: str) -> str:
    """The right side, `-` for results that are not there. Results beyond `words` are small and the same everywhere."""
    told: list[str] = []
    for place, type in enumerate(node.outputs):
        if type is None:
            told.append("-")
        else:
            told.append(words[place] if place < len(words) else foreign(type.shape, f"z{place}_") + " ^same")
    return ", ".join(told)


def linear(*alternatives: str) -> str:
    return "".join(f" | {one}" for one in alternatives)


def as_dims(value: Arg, rank: int) -> tuple[int, ...]:
    """A dim argument as non-negative dims; None or () means all of them."""
    if value is None or value == ():
        return tuple(range(rank))
    listed = cast("tuple[int, ...]", value if isinstance(value, tuple) else (value,))
    return tuple(dim % rank if rank else 0 for dim in listed)


def shape_of(node: Node, place: int = 0) -> tuple[int, ...]:
    found = node.outputs[place]
    assert found is not None, f"%{node.name} has no result {place}"
    return found.shape


def all_locked(node: Node, types: Types) -> str:
    """Nothing may be split. (A rule, so that the plan does not warn of an unknown operator.)"""
    left = ", ".join(foreign(type.shape, f"x{place}_") for place, type in enumerate(types))
    return f"{left} -> {results(node)}"
