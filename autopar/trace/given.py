"""What forward does to the containers that it is called with (`batch["logits"] = self.head(h)`, `batch.pop("mask")`,
`outs.append(h)`, `batch.h = h`): a trace has containers of its own, so a program gives what is new in them beside its
outputs, and each call lets the caller's hold it (`autopar.attach.changed`).
"""

from __future__ import annotations

import enum
from collections import UserDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.closures import with_parts
from autopar.trace.formulas import plain_key
from autopar.trace.left import is_kept, is_made, is_plain
from autopar.trace.masked import Picked
from autopar.trace.records import attributes, is_record, is_state, let_have
from autopar.trace.values import COLLECTIONS, MISSING, SCALARS

# What is the same in all calls that one program serves, and is no leaf of a trace.
FIXED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum)

At = tuple[Any, ...]  # place or name of an argument, and keys, places and names of attributes in it, one in another


@dataclass(frozen=True)
class Given:
    """A container among the arguments, and what was in it when forward began: `parts`, by key, place or name."""

    at: At
    container: Any
    parts: Mapping[Any, Any]

    @property
    def path(self) -> str:
        """In words."""
        first, *rest = self.at
        return f"[{first!r}]" + "".join(f"[{key!r}]" for key in rest)


@dataclass(frozen=True)
class Theirs:
    """In the place of what the caller has there."""

    at: At


@dataclass(frozen=True)
class Output:
    """In the place of that leaf of forward's outputs."""

    leaf: int


@dataclass(frozen=True)
class OutputPart:
    """In the place of a container that is among forward's outputs, there."""

    within: At


@dataclass(frozen=True)
class New:
    """A list or dict that forward makes; None in the further places of one that is in several."""

    number: int
    value: Any


@dataclass(frozen=True)
class Fixed:
    """In the place of one of `FIXED`."""

    value: Any


@dataclass(frozen=True)
class Rewritten:
    """What a container among the arguments holds behind forward, in order."""

    at: At
    parts: Mapping[Any, Any]


@dataclass(frozen=True)
class GivenBack:
    """Where forward's outputs are, or hold (`within`), a container that it was called with."""

    within: At
    at: At


def _as_leafless(kind: type[Any]) -> None:
    pytree.register_pytree_node(
        kind, lambda one: ([], tuple(vars(one).values())), lambda _, context: kind(*context),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
    )  # fmt: skip


for _kind in (Theirs, Output, OutputPart, Fixed, GivenBack):
    _as_leafless(_kind)
pytree.register_pytree_node(
    Rewritten,
    lambda one: ([*one.parts.values()], (one.at, tuple(one.parts))),
    lambda parts, context: Rewritten(context[0], dict(zip(context[1], parts, strict=True))),
    serialized_type_name="autopar.Rewritten",
)
pytree.register_pytree_node(
    New, lambda one: ([one.value], one.number), lambda parts, number: New(number, *parts),
    serialized_type_name="autopar.New",
)  # fmt: skip


def given_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Given]:
    """All containers among the arguments."""
    arguments = [*enumerate(args), *kwargs.items()]
    return [one for at, value in arguments for one in _within((at,), value)]


def rewritten(given: Sequence[Given], outputs: Any) -> list[Rewritten | GivenBack]:
    """The containers that hold other things behind forward, and those that it gives. Raises TraceError where it puts
    something into one that no program gives.
    """
    theirs = {id(one.container): one.at for one in given}
    refer = _Referring(given, outputs, theirs)
    found: list[Rewritten | GivenBack] = []
    for one in given:
        now = _parts_of(one.container)
        if [*now] == [*one.parts] and all(now[key] is was for key, was in one.parts.items()):
            continue
        parts = dict[Any, Any]()
        for key, value in now.items():
            if value is one.parts.get(key, MISSING):
                parts[key] = Theirs((*one.at, key))
                continue
            part = refer.to(value)
            if is_kept(part) or is_plain(part) or not pytree.tree_leaves(part):  # what is told as such has no leaves
                parts[key] = part
            elif isinstance(one.container, COLLECTIONS) or not key.startswith("_"):  # else nobody else reads it
                what = "rows that a mask picks" if isinstance(value, Picked) else f"a {type(value).__name__}"
                raise TraceError(
                    f"forward puts {what} into its argument {one.path}, at {key!r}, which a program "
                    "does not give: put tensors, numbers or text there, or have forward copy the container first"
                )
        found.append(Rewritten(one.at, parts))
    found += [
        GivenBack(within, theirs[id(part)]) for within, part in _containers((), outputs, theirs) if id(part) in theirs
    ]
    return found


class _Referring:
    """What forward puts somewhere, in which what the caller has, and what forward gives as well, is told as such."""

    def __init__(self, given: Sequence[Given], outputs: Any, theirs: Mapping[int, At]) -> None:
        def is_one(part: Any) -> bool:  # numbers and text may be the same by chance
            return not isinstance(part, SCALARS)

        self._known: dict[int, Any] = {
            id(leaf): Output(place) for place, leaf in enumerate(pytree.tree_leaves(outputs)) if is_made(leaf)
        }
        for at, part in _containers((), outputs, theirs):
            self._known.setdefault(id(part), OutputPart(at))
        self._known |= {
            id(part): Theirs((*one.at, key)) for one in given for key, part in one.parts.items() if is_one(part)
        }
        self._known |= {container: Theirs(at) for container, at in theirs.items()}
        self._new: dict[int, tuple[int, Any]] = {}  # with what has the id

    def to(self, value: Any) -> Any:
        if (known := self._known.get(id(value))) is not None:
            return known
        if isinstance(value, FIXED) and not (isinstance(value, torch.Size) and any(map(is_made, value))):
            return Fixed(value)
        if isinstance(value, tuple):
            return with_parts(value, [self.to(part) for part in value])
        if type(value) not in (list, dict):
            return value
        if id(value) in self._new:
            return New(self._new[id(value)][0], None)
        number = len(self._new)
        self._new[id(value)] = number, value
        if type(value) is list:
            return New(number, [self.to(part) for part in value])
        return New(number, {plain_key(key): self.to(part) for key, part in value.items()})


class Had:
    """What stands in the place of that, in a call. `theirs`: what the caller has somewhere; `outputs`: forward's."""

    def __init__(self, theirs: Callable[[At], Any], outputs: Any) -> None:
        self.theirs, self._outputs, self._leaves = theirs, outputs, pytree.tree_leaves(outputs)
        self._new: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        match value:
            case Theirs(at):
                return self.theirs(at)
            case Output(leaf):
                return self._leaves[leaf]
            case OutputPart(within):
                return part_at(self._outputs, within)
            case Fixed(fixed):
                return fixed
            case New(number, None):
                return self._new[number]
            case New(number, list() as parts):
                self._new[number] = made = list[Any]()
                made += map(self.of, parts)
                return made
            case New(number, parts):
                self._new[number] = table = dict[Any, Any]()
                table.update((key, self.of(part)) for key, part in parts.items())
                return table
            case tuple():
                return with_parts(value, [self.of(part) for part in value])
            case _:
                return value


def _within(at: At, value: Any) -> Iterator[Given]:
    if _is_container(value):
        parts = _parts_of(value)
        yield Given(at, value, parts)
        for key, part in parts.items():
            yield from _within((*at, key), part)


def _containers(within: At, value: Any, until: Container[int]) -> Iterator[tuple[At, Any]]:
    """All in it, but for those in one whose id is among these."""
    if _is_container(value):
        yield within, value
        for key, part in _parts_of(value).items() if id(value) not in until else ():
            yield from _containers((*within, key), part, until)


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple, deque)) or is_record(value) or is_state(value)


def _parts_of(container: Any) -> dict[Any, Any]:
    if isinstance(container, Mapping):
        return dict(container.items())
    if isinstance(container, (list, tuple, deque)):
        return dict(enumerate(container))
    return attributes(container)


def part_at(value: Any, keys: Iterable[Any]) -> Any:
    """What is in a container, one in another."""
    for key in keys:
        value = value[key] if isinstance(value, (Mapping, list, tuple, deque)) else getattr(value, key)
    return value


def let_hold(container: Any, parts: Mapping[Any, Any]) -> None:
    """Let one of the caller's hold these, in this order, and nothing else."""
    if isinstance(container, (list, deque)):
        container.clear()
        container.extend(parts.values())
    elif not isinstance(container, Mapping):
        let_have(container, parts)
    else:
        table: Any = container.data if isinstance(container, UserDict) else container
        kept = [key for key in table if key in parts]
        is_in_order = kept == [*parts][: len(kept)]
        for key in [key for key in table if key not in parts or not is_in_order]:
            table.pop(key)
        for key, part in parts.items():
            table[key] = part


def with_theirs(outputs: Any, within: At, value: Any) -> Any:
    """Outputs that have this there."""
    if not within:
        return value
    *path, last = within
    holder = part_at(outputs, path)
    if isinstance(holder, tuple):
        parts = [value if place == last else part for place, part in enumerate(holder)]
        return with_theirs(outputs, (*path,), with_parts(holder, parts))
    if isinstance(holder, (Mapping, list, deque)):
        holder[last] = value  # type: ignore[index]
    else:
        object.__setattr__(holder, last, value)
    return outputs
