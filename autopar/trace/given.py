"""What forward does to the containers that it is called with (`batch["logits"] = self.head(h)`, `batch.pop("mask")`,
`outs.append(h)`, `batch.h = h`): a trace has containers of its own, so a program gives what is new in them beside its
outputs, and each call lets the caller's hold it (`autopar.attach.changed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.closures import with_parts
from autopar.trace.formulas import with_plain_keys
from autopar.trace.left import is_kept, is_made, is_plain
from autopar.trace.records import attributes, is_record, let_have
from autopar.trace.values import MISSING, SCALARS, copied

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


for _kind in (Theirs, Output, GivenBack):
    _as_leafless(_kind)
pytree.register_pytree_node(
    Rewritten,
    lambda one: ([*one.parts.values()], (one.at, tuple(one.parts))),
    lambda parts, context: Rewritten(context[0], dict(zip(context[1], parts, strict=True))),
    serialized_type_name="autopar.Rewritten",
)


def given_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Given]:
    """All containers among the arguments."""
    arguments = [*enumerate(args), *kwargs.items()]
    return [one for at, value in arguments for one in _within((at,), value)]


def rewritten(given: Sequence[Given], outputs: Any) -> list[Rewritten | GivenBack]:
    """The containers that hold other things behind forward, and those that it gives. Raises TraceError where it puts
    something into one that no program gives.
    """
    leaves = {id(leaf): place for place, leaf in enumerate(pytree.tree_leaves(outputs)) if is_made(leaf)}
    theirs = {id(part): (*one.at, key) for one in given for key, part in one.parts.items() if _is_told_apart(part)}
    theirs |= {id(one.container): one.at for one in given}
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
            part = with_plain_keys(copied(_referring(value, theirs, leaves)))
            if isinstance(part, (Theirs, Output)) or is_kept(part) or is_plain(part) or not pytree.tree_leaves(part):
                parts[key] = part
            elif not (is_record(one.container) and key.startswith("_")):  # which nobody else reads
                raise TraceError(
                    f"forward puts a {type(value).__name__} into its argument {one.path}, at {key!r}, which a program "
                    "does not give: put tensors, numbers or text there, or have forward copy the container first"
                )
        found.append(Rewritten(one.at, parts))
    returned = {id(one.container): one.at for one in given}
    return found + [GivenBack(within, returned[id(value)]) for within, value in _containers((), outputs, returned)]


def _is_told_apart(part: Any) -> bool:
    """Whether it is the same thing wherever it is found: numbers and text may be one by chance."""
    return not isinstance(part, SCALARS) and part is not None


def _referring(value: Any, theirs: Mapping[int, At], leaves: Mapping[int, int]) -> Any:
    """The same, where what the caller has, and what forward gives as well, is told as such."""
    if id(value) in theirs:
        return Theirs(theirs[id(value)])
    if id(value) in leaves:
        return Output(leaves[id(value)])
    if type(value) is dict:
        return {key: _referring(part, theirs, leaves) for key, part in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Tensor):
        return with_parts(value, [_referring(part, theirs, leaves) for part in value])
    return value


def _within(at: At, value: Any) -> Iterator[Given]:
    if _is_container(value):
        parts = _parts_of(value)
        yield Given(at, value, parts)
        for key, part in parts.items():
            yield from _within((*at, key), part)


def _containers(within: At, value: Any, known: Mapping[int, Any]) -> Iterator[tuple[At, Any]]:
    if id(value) in known:
        yield within, value
    elif _is_container(value):
        for key, part in _parts_of(value).items():
            yield from _containers((*within, key), part, known)


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) or is_record(value)


def _parts_of(container: Any) -> dict[Any, Any]:
    if isinstance(container, Mapping):
        return dict(container.items())
    if isinstance(container, (list, tuple)):
        return dict(enumerate(container))
    return attributes(container)


def part_at(value: Any, keys: Iterable[Any]) -> Any:
    """What is in a container, one in another."""
    for key in keys:
        value = getattr(value, key) if is_record(value) and not isinstance(value, Mapping) else value[key]
    return value


def let_hold(container: Any, parts: Mapping[Any, Any]) -> None:
    """Let one of the caller's hold these, in this order, and nothing else."""
    if isinstance(container, list):
        container[:] = parts.values()
    elif not isinstance(container, Mapping):
        let_have(container, parts)
    else:
        table: Any = container
        kept = [key for key in table if key in parts]
        is_in_order = kept == [*parts][: len(kept)]
        for key in [key for key in table if key not in parts or not is_in_order]:
            del table[key]
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
    if isinstance(holder, (Mapping, list)):
        holder[last] = value  # type: ignore[index]
    else:
        object.__setattr__(holder, last, value)
    return outputs


resolve = partial(pytree.tree_map, is_leaf=lambda one: isinstance(one, (Theirs, Output)))
