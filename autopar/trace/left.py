"""What forward leaves outside of the modules it belongs to: tensors in lists, dictionaries and objects.

    features = {}
    model.layer.register_forward_hook(lambda module, given, made: features.update(layer=made))

A program computes such tensors as it computes outputs, and each call writes them where forward has. The trace itself
leaves nothing behind. What is written must not hang on what earlier calls have left (`capture` traces once more to see
that), so that guards need not look at it.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.numbers import Number
from autopar.trace.settings import Of
from autopar.trace.values import FEW, MISSING, SCALARS, held_in

DEEPEST = 4  # containers in containers
MOST = 100_000  # of what has more, nothing is seen


class OfModule(NamedTuple):
    """Stands for the attributes of a module, of whichever copy of the model."""

    path: str


@dataclass(frozen=True)
class Write:
    """One that every call makes. `place`, `name`: where a value is found, as settings are, or an attribute of a module;
    `within`: keys that lead from there to a container; `way`: "value" (in the place of that value), "key" (of that
    container, which is `key`), "end" (behind what a list has) or "all" (in the place of all that a container has).
    """

    place: Any
    name: str
    within: tuple[Any, ...]
    way: str
    key: Any = None

    @property
    def told(self) -> tuple[Any, ...]:
        """It, but for which object has the place: equal in two traces."""
        place = self.place.path if isinstance(self.place, OfModule) else ""
        return type(self.place).__name__, place, self.name, self.within, self.way, self.key

    @property
    def comes(self) -> tuple[str, ...]:
        """What it is sorted by: equal on all ranks and in all traces, whatever is there already."""
        return tuple(map(_as_text, self.told))

    @property
    def called(self) -> str:
        """In words."""
        if isinstance(self.place, OfModule):
            return f"what is in {'.'.join(('self', *filter(None, (self.place.path, self.name))))}"
        return f"{self.name}, which is no attribute of a module"

    def holder(self, modules: Mapping[str, nn.Module]) -> Any:
        """What is written to, as it is found now: a place, or a container."""
        return self._in(modules) if self.way == "value" else self.container(modules)

    def container(self, modules: Mapping[str, nn.Module]) -> Any:
        """The container that it leads to; None where there is none."""
        held = self._in(modules).get(self.name)
        for key in self.within:
            if isinstance(held, dict):
                held = dict.get(cast("dict[Any, Any]", held), key)
            else:
                held = held[key] if isinstance(held, (list, deque)) and key < len(held) else None
        return held

    def was(self, modules: Mapping[str, nn.Module]) -> Any:
        """What is there now, in the place of which it comes; MISSING where that is nothing."""
        holder = self.holder(modules)
        if self.way in ("end", "all"):
            return _content(holder) or MISSING
        key = self.name if self.way == "value" else self.key
        return holder.get(key, MISSING) if hasattr(holder, "get") else holder[key]

    def _in(self, modules: Mapping[str, nn.Module]) -> Any:
        return vars(modules[self.place.path]) if isinstance(self.place, OfModule) else self.place

    def make(self, value: Any, modules: Mapping[str, nn.Module]) -> None:
        """Write."""
        holder = self.holder(modules)
        if self.way == "end":
            holder.append(value)
        elif self.way == "all":
            _refill(holder, value)
        else:
            _put(holder, self.name if self.way == "value" else self.key, value)

    def make_often(self, value: Any, modules: Mapping[str, nn.Module]) -> None:
        """As many calls do: code may look how long a list is."""
        for _ in range(FEW if self.way == "end" else 1):
            self.make(value, modules)

    def as_it_is(self, modules: Mapping[str, nn.Module]) -> Callable[[], None]:
        """What brings back what is there now."""
        holder, was = self.holder(modules), self.was(modules)
        if self.way in ("end", "all"):
            return lambda: _refill(holder, () if was is MISSING else was)
        return lambda: _put(holder, self.name if self.way == "value" else self.key, was)


def hidden(writes: Sequence[Write], modules: Mapping[str, nn.Module]) -> dict[int, set[Any] | None]:
    """`id` of what is written to -> keys there; None: all that it has. What has attributes goes by itself. Raises
    LookupError, TypeError or AttributeError where something else is there by now.
    """
    found: dict[int, set[Any] | None] = {}
    for write in writes:
        if (holder := write.holder(modules)) is None:
            raise LookupError(write.name)
        known = found.setdefault(id(getattr(holder, "holder", holder)), set())
        if write.way in ("end", "all"):
            found[id(holder)] = None
        elif known is not None:
            known.add(write.name if write.way == "value" else write.key)
    return found


@dataclass(frozen=True)
class _Seen:
    """A container as it was: where it is found, and what was in it."""

    write: Write
    container: Any
    had: Any


class Left:
    """Watches what may be written to. `writes`: what the last forward wrote, sorted."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.like: list[Any] = []  # what it wrote
        self.is_independent = True  # of what earlier calls have left
        self._containers: dict[int, _Seen] = {}
        # (id of the holder, name) -> (place, what was there)
        self._values: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._order: dict[int, int] = {}  # by id of the holder
        self._owners: list[tuple[Any, frozenset[str]]] = []  # objects, and what attributes they had

    def see(self, place: Any, name: str, value: Any) -> None:
        """That this is there before forward runs, or has got to it."""
        self._values.setdefault((self._known(place), name), (place, value))
        self._look(Write(place, name, (), "key"), value, DEEPEST)

    def knows(self, container: Any) -> bool:
        """Whether it was seen."""
        return id(container) in self._containers

    def _known(self, place: Any) -> int:
        number = id(getattr(place, "holder", place))
        self._order.setdefault(number, len(self._order))
        return number

    def see_attributes(self, owner: Any) -> None:
        """All that an object has before forward runs."""
        own = dict(vars(owner)) if hasattr(owner, "__dict__") else {}
        self._known(Of(owner))
        self._owners.append((owner, frozenset(own)))
        for name, value in own.items():
            self.see(Of(owner), name, value)

    def _look(self, write: Write, value: Any, depth: int) -> None:
        if not isinstance(value, (list, dict, deque)) or id(value) in self._containers or not depth:
            return
        held = cast("list[Any] | dict[Any, Any] | deque[Any]", value)
        had = _content(held)
        if len(had) > MOST:
            return
        self._containers[id(held)] = _Seen(write, held, had)
        if len(had) > FEW:
            return
        for key, part in had.items() if isinstance(had, dict) else enumerate(had):
            self._look(replace(write, within=(*write.within, key)), part, depth - 1)

    def take(self, modules: Mapping[str, nn.Module]) -> list[Any]:
        """The values that forward has left, in the order of `writes`; all is as it was."""
        found, undo = list[tuple[Write, Any]](), list[Callable[[], None]]()
        for owner, names in self._owners:
            for name in (name for name in getattr(owner, "__dict__", {}) if name not in names):
                self._values.setdefault((id(owner), name), (Of(owner), MISSING))
        for seen in self._containers.values():
            is_there = seen.write.container(modules) is seen.container  # and not another one by now
            of = _of_dict if isinstance(seen.container, dict) else _of_list
            written = of(seen, undo)
            found += written if is_there else []
        for (_, name), (place, was) in self._values.items():
            if isinstance(place, (OfModule, types.MappingProxyType)):  # attributes of modules are another matter
                continue
            now = place.get(name, MISSING)
            if now is not was and is_kept(now):
                found.append((Write(place, name, (), "value"), now))
                undo.append(lambda place=place, name=name, was=was: _put(place, name, was))
        for take_back in undo:
            take_back()
        found.sort(
            key=lambda one: (one[0].comes, self._order.get(id(getattr(one[0].place, "holder", one[0].place)), 0))
        )
        self.writes, self.like = [write for write, _ in found], [value for _, value in found]
        return self.like

    def of(self, originals: Mapping[int, Any]) -> None:
        """Let writes be to what was copied for the trace, as `originals` tells of each copy."""
        for at, write in enumerate(self.writes):
            if isinstance(write.place, Of) and id(write.place.holder) in originals:
                self.writes[at] = replace(write, place=Of(originals[id(write.place.holder)]))

    def not_looked_at(self) -> list[Write]:
        """Writes to what guards need not look at."""
        return self.writes if self.is_independent else []

    def told(self) -> list[tuple[Any, ...]]:
        """The writes, equal in two traces."""
        return [write.told for write in self.writes]

    def counted(self, other: Left) -> Write | None:
        """The first of equal writes in another trace that writes another constant there."""
        pairs = zip(self.like, other.like, strict=True)
        differ = (_constants(one) != _constants(another) for one, another in pairs)
        return next((write for write, is_other in zip(self.writes, differ, strict=True) if is_other), None)

    def as_before(self) -> list[Any]:
        """Values as an earlier call may have left them, constants other ones; tensors have shapes alone, under a fake
        mode.
        """

        def like(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return torch.empty(leaf.shape, dtype=leaf.dtype)
            if isinstance(leaf, Number):
                return leaf.like
            return leaf + 1 if isinstance(leaf, int | float) else leaf + "_" if isinstance(leaf, str) else leaf

        return [pytree.tree_map(like, value) for value in self.like]

    def is_first(self, modules: Mapping[str, nn.Module]) -> bool:
        """Whether nothing is there where it writes: no call has left anything, or the script has taken it away."""
        return all(write.was(modules) in (MISSING, None) for write in self.writes)

    def has_constants_alone(self) -> bool:
        """Whether no tensor is written, nor a number out of one."""
        return not any(map(is_kept, self.like))

    def refused(self) -> TraceError:
        """What to say where forward reads what an earlier call has left."""
        names = ", ".join(dict.fromkeys(write.name for write in self.writes))
        return TraceError(
            f"forward, or a hook, computes with what it has left in {names} at the last call, and each value would "
            "need a program of its own; make it a buffer (register_buffer), or pass it as an argument"
        )


def _as_text(value: Any) -> str:
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text  # addresses are others on each rank


def _of_dict(seen: _Seen, undo: list[Callable[[], None]]) -> list[tuple[Write, Any]]:
    held: dict[Any, Any] = seen.container
    if seen.had.keys() - dict.keys(held):
        return _anew(seen, _content(held), undo)
    pairs = [(key, value, seen.had.get(key, MISSING)) for key, value in dict.items(held)]
    changed = [(key, value, was) for key, value, was in pairs if not _is_same(value, was)]
    if not all(_is_written(value) for _, value, _ in changed):
        return []
    for key, _, was in changed:
        undo.append(lambda key=key, was=was: _put(held, key, was))
    return [(replace(seen.write, key=key), value) for key, value, _ in changed]


def _of_list(seen: _Seen, undo: list[Callable[[], None]]) -> list[tuple[Write, Any]]:
    held, had = seen.container, seen.had
    now = _content(held)
    if len(now) == len(had) and not (isinstance(held, deque) and held.maxlen == len(now)):
        changed = [place for place, (value, was) in enumerate(zip(now, had, strict=True)) if value is not was]
        found = [(replace(seen.write, key=place), now[place]) for place in changed]
    else:
        new = next(count for count in range(len(now) + 1) if _ends_with(had, now[: len(now) - count]))
        is_longer = len(had) + new == len(now) or (isinstance(held, deque) and len(now) == held.maxlen)
        if not is_longer:
            return _anew(seen, now, undo)
        found = [(replace(seen.write, way="end"), value) for value in now[len(now) - new :]]
    if not all(_is_written(value) for _, value in found):
        return []
    if found:
        undo.append(lambda: _refill(held, had))
    return found


def _anew(seen: _Seen, now: Any, undo: list[Callable[[], None]]) -> list[tuple[Write, Any]]:
    """A container that was emptied, and filled again."""
    if not all(map(_is_written, held_in(now))):
        return []
    undo.append(lambda: _refill(seen.container, seen.had))
    return [(replace(seen.write, way="all"), now)]


def _is_same(value: Any, was: Any) -> bool:
    return value is was or (is_plain(value) and is_plain(was) and value == was)


def _content(held: Any) -> Any:
    """What is in a container, in one of Python's own."""
    return dict(dict.items(held)) if isinstance(held, dict) else held_in(held)


def _is_written(value: Any) -> bool:
    return is_kept(value) or is_plain(value)


def _ends_with(had: list[Any], tail: list[Any]) -> bool:
    return len(tail) <= len(had) and all(a is b for a, b in zip(had[len(had) - len(tail) :], tail, strict=True))


def _refill(held: Any, had: Any) -> None:
    kind: Any = next(one for one in (dict, list, deque) if isinstance(held, one))
    kind.clear(held)
    if kind is dict:
        kind.update(cast("Any", held), had)
    else:
        kind.extend(held, had)


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, Of) and value is MISSING:
        delattr(holder.holder, key)
    elif (put := getattr(holder, "put", None)) is not None:
        put(key, value)
    elif value is MISSING:
        holder.pop(key)
    else:
        holder[key] = value


def is_made(value: Any) -> bool:
    """Whether it may be of forward's making, and is no parameter."""
    return isinstance(value, (Tensor, Number)) and not isinstance(value, nn.Parameter)


def is_kept(value: Any) -> bool:
    """Whether it is a tensor or a number out of one, or a list, tuple, dict or whatever torch takes apart likewise
    (named tuples, outputs of transformers) with some in it and nothing else that has parts.
    """
    if isinstance(value, (Tensor, Number)):
        return True
    leaves = pytree.tree_leaves(value)
    plain = (Tensor, Number, bool, int, float, str, type(None))
    return any(map(is_made, leaves)) and all(isinstance(part, plain) for part in leaves)


def is_plain(value: Any) -> bool:
    """Whether it is a number or text, or a list, tuple or dict of such."""
    return all(isinstance(leaf, SCALARS) for leaf in pytree.tree_leaves(value))


def _constants(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, SCALARS)]
