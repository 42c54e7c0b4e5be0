"""What forward leaves outside of the modules it belongs to: tensors in lists, dictionaries and objects.

    features = {}
    model.layer.register_forward_hook(lambda module, given, made: features.update(layer=made))

A program computes such tensors as it computes outputs, and each call writes them where forward has. The trace itself
leaves nothing behind. What is written must not hang on what earlier calls have left (`capture` traces once more to see
that), so that guards need not look at it.
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.formulas import plain_key, with_plain_keys
from autopar.trace.lookups import Of
from autopar.trace.numbers import Number
from autopar.trace.origins import tensors_in
from autopar.trace.values import FEW, MISSING, SCALARS, copied, held_in
from autopar.trace.writes import OfModule, Write, content, key_of, number_of, of_modules, place_of, put, refill

DEEPEST = 4  # containers in containers
MOST = 100_000  # of what has more, nothing is seen


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
        number = self._known(place)
        if not (isinstance(place, Of) and inspect.isdatadescriptor(inspect.getattr_static(place.holder, name, None))):
            self._values.setdefault((number, name), (place, value))  # (of a property what it sets is seen itself)
        self._look(Write(place, name, (), "key"), value, DEEPEST)

    def knows(self, container: Any) -> bool:
        """Whether it was seen."""
        return id(container) in self._containers

    def _known(self, place: Any) -> int:
        number = number_of(place)
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
        if not isinstance(value, (list, tuple, dict, deque)) or id(value) in self._containers or not depth:
            return
        held = cast("list[Any] | tuple[Any, ...] | dict[Any, Any] | deque[Any]", value)
        had = content(held)
        if len(had) > MOST:
            return
        if not isinstance(held, tuple):
            self._containers[id(held)] = _Seen(write, held, had)
        if len(had) > FEW:
            return
        for key, part in had.items() if isinstance(had, dict) else enumerate(had):
            self._look(replace(write, within=(*write.within, key)), part, depth - 1)

    def take(self, modules: Mapping[str, nn.Module]) -> list[Any]:
        """The values that forward has left, in the order of `writes`; all is as it was."""
        found, undo = list[tuple[Write, Any]](), list[Callable[[], None]]()
        tensors = nn.Module.parameters, nn.Module.buffers  # some classes have others of their own
        registered = {id(one) for part in modules.values() for of in tensors for one in of(part, recurse=False)}
        for owner, names in self._owners:
            for name in (name for name in getattr(owner, "__dict__", {}) if name not in names):
                self._values.setdefault((id(owner), name), (Of(owner), MISSING))
        for seen in self._containers.values():
            is_there = seen.write.container(modules) is seen.container  # and not another one by now
            of = _of_dict if isinstance(seen.container, dict) else _of_list
            written = of(seen, undo, registered)
            found += written if is_there else []
        for (_, name), (place, was) in self._values.items():
            if isinstance(place, (OfModule, types.MappingProxyType)):  # attributes of modules are another matter
                continue
            now = place.get(name, MISSING)
            if not _is_same(now, was, registered) and is_kept(now):
                found.append((Write(place, name, (), "value"), now))
                undo.append(lambda place=place, name=name, was=was: put(place, name, was))
        found = [(write, copied(value)) for write, value in found]  # which may be what is undone now
        for take_back in undo:
            take_back()
        for write, value in found:
            if registered & set(map(id, tensors_in(value))):
                raise TraceError(
                    f"forward, or a hook, keeps a parameter or a buffer in {write.name}, where it would be a copy: "
                    "take it from its module"
                )
        found = [(of_modules(write, modules), with_plain_keys(value)) for write, value in found]
        found = [(replace(write, key=plain_key(write.key)), value) for write, value in found]
        found.sort(key=lambda one: (one[0].comes, self._order.get(number_of(one[0].place), 0)))
        self.writes, self.like = [write for write, _ in found], [value for _, value in found]
        return self.like

    def of(self, originals: Mapping[int, Any]) -> None:
        """Let writes be to what was copied for the trace, as `originals` tells of each copy; modules as keys, and what
        `id` says of them, too.
        """
        for at, write in enumerate(self.writes):
            key, within = key_of(write.key, originals), tuple(key_of(one, originals) for one in write.within)
            self.writes[at] = replace(write, place=place_of(write.place, originals), key=key, within=within)

    def not_looked_at(self) -> list[Write]:
        """Writes to what guards need not look at."""
        return self.writes if self.is_independent else []

    @property
    def attributes(self) -> set[tuple[str, str]]:
        """The attributes of modules that are written to: the path of each, and the name."""
        return {(write.place.path, write.name) for write in self.writes if isinstance(write.place, OfModule)}

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
        """Whether nothing is there where it writes, or 0: no call has left anything, or the script took it away."""
        found = [write.was(modules) for write in self.writes]
        return all(was is MISSING or (is_plain(was) and not was) for was in found)

    def has_constants_alone(self) -> bool:
        """Whether no tensor is written, nor a number out of one."""
        return not any(map(is_kept, self.like))

    def refused(self) -> TraceError:
        """What to say where forward reads what an earlier call has left."""
        names = ", ".join(dict.fromkeys(write.name for write in self.writes))
        return TraceError(
            f"forward, or a hook, computes with what is in {names} as the last call has left it, or moves it "
            "there, and each value would need a program of its own; make it a buffer (register_buffer), pass it as an "
            "argument, or take it out before each call"
        )


def _of_dict(seen: _Seen, undo: list[Callable[[], None]], registered: Set[int]) -> list[tuple[Write, Any]]:
    held: dict[Any, Any] = seen.container
    if seen.had.keys() - dict.keys(held):
        return _anew(seen, content(held), undo)
    pairs = [(key, value, seen.had.get(key, MISSING)) for key, value in dict.items(held)]
    changed = [(key, value, was) for key, value, was in pairs if not _is_same(value, was, registered)]
    if not all(_is_written(value) for _, value, _ in changed):
        return []
    for key, _, was in changed:
        undo.append(lambda key=key, was=was: put(held, key, was))
    return [(replace(seen.write, key=key), value) for key, value, _ in changed]


def _of_list(seen: _Seen, undo: list[Callable[[], None]], registered: Set[int]) -> list[tuple[Write, Any]]:
    held, had = seen.container, seen.had
    now = content(held)
    if len(now) == len(had) and not (isinstance(held, deque) and held.maxlen == len(now)):
        changed = [
            place
            for place, (value, was) in enumerate(zip(now, had, strict=True))
            if not _is_same(value, was, registered)
        ]
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
        undo.append(lambda: refill(held, had))
    return found


def _anew(seen: _Seen, now: Any, undo: list[Callable[[], None]]) -> list[tuple[Write, Any]]:
    """A container that was emptied, and filled again."""
    if not all(map(_is_written, held_in(now))):
        return []
    undo.append(lambda: refill(seen.container, seen.had))
    return [(replace(seen.write, way="all"), now)]


def _is_same(value: Any, was: Any, registered: Set[int]) -> bool:
    """`registered`: ids of parameters and buffers, for which torch has had others stand before forward ran."""
    if id(value) in registered and isinstance(was, Tensor):
        return True
    return value is was or (is_plain(value) and is_plain(was) and value == was)


def _is_written(value: Any) -> bool:
    return is_kept(value) or is_plain(value)


def _ends_with(had: list[Any], tail: list[Any]) -> bool:
    return len(tail) <= len(had) and all(a is b for a, b in zip(had[len(had) - len(tail) :], tail, strict=True))


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
    return all(isinstance(leaf, SCALARS) and not isinstance(leaf, Number) for leaf in pytree.tree_leaves(value))


def _constants(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, SCALARS) and not isinstance(leaf, Number)]
