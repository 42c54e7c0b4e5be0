"""Writes that forward makes outside of its modules, and that every call makes again (`autopar.trace.left`)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from torch import nn

from autopar.trace.lookups import Cell, Of
from autopar.trace.records import attributes, is_state, let_have
from autopar.trace.values import FEW, MISSING, held_in

ADDRESS = 100_000  # numbers as large may be what `id` gives


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
        """What it is sorted by: equal on all ranks and in all traces, whatever is there already. Keys of one table come
        in the order in which forward has put them there.
        """
        return tuple(map(as_text, self.told[:-1]))

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
                held = held[key] if isinstance(held, (list, tuple, deque)) and key < len(held) else None
        return held

    def exchange(self, made: Any, modules: Mapping[str, nn.Module]) -> Callable[[], None]:
        """Let this be the container, wherever modules hold the one that is there; gives what brings that back."""
        held = self.container(modules)
        slots: list[tuple[Any, Any]] = [
            (vars(part), name) for part in modules.values() for name, value in vars(part).items() if value is held
        ]
        if self.within:
            *within, key = self.within
            outer = replace(self, within=tuple(within))
            parts = outer.container(modules)
            if isinstance(parts, tuple):
                changed = [made if place == key else part for place, part in enumerate(parts)]
                return outer.exchange(type(parts)(*changed) if hasattr(parts, "_fields") else tuple(changed), modules)
            slots.append((parts, key))
        elif not isinstance(self.place, OfModule):
            slots.append((self.place, self.name))

        def let(value: Any) -> None:
            for holder, key in slots:
                put(holder, key, value)

        let(made)
        return lambda: let(held)

    def was(self, modules: Mapping[str, nn.Module]) -> Any:
        """What is there now, in the place of which it comes; MISSING where that is nothing."""
        holder = self.holder(modules)
        if self.way in ("end", "all"):
            return content(holder) or MISSING
        key = self.name if self.way == "value" else self.key
        if isinstance(holder, list | deque):
            return cast("Any", holder)[key]
        return holder.get(key, MISSING) if isinstance(holder, (Of, Cell)) else dict.get(holder, key, MISSING)

    def _in(self, modules: Mapping[str, nn.Module]) -> Any:
        return vars(modules[self.place.path]) if isinstance(self.place, OfModule) else self.place

    def make(self, value: Any, modules: Mapping[str, nn.Module]) -> None:
        """Write."""
        self.make_in(self.holder(modules), value)

    def make_in(self, holder: Any, value: Any) -> None:
        """Write to what was found before."""
        if self.way == "end":
            holder.append(value)
        elif self.way == "all":
            refill(holder, value)
        else:
            put(holder, self.name if self.way == "value" else self.key, value)

    def make_often(self, value: Any, modules: Mapping[str, nn.Module]) -> None:
        """As many calls do: code may look how long a list is."""
        for _ in range(FEW if self.way == "end" else 1):
            self.make(value, modules)

    def as_it_is(self, modules: Mapping[str, nn.Module]) -> Callable[[], None]:
        """What brings back what is there now."""
        holder, was = self.holder(modules), self.was(modules)
        if self.way in ("end", "all"):
            return lambda: refill(holder, () if was is MISSING else was)
        return lambda: put(holder, self.name if self.way == "value" else self.key, was)


def hidden(writes: Sequence[Write], modules: Mapping[str, nn.Module]) -> dict[int, set[Any] | None]:
    """`id` of what is written to -> keys there; None: all that it has. What has attributes goes by itself. Raises
    LookupError, TypeError or AttributeError where something else is there by now.
    """
    found: dict[int, set[Any] | None] = {}
    for write in writes:
        if (holder := write.holder(modules)) is None:
            raise LookupError(write.name)
        known = found.setdefault(number_of(holder), set())
        if write.way in ("end", "all"):
            found[number_of(holder)] = None
        elif known is not None:
            known.add(write.name if write.way == "value" else write.key)
    return found


def as_text(value: Any) -> str:
    """As it is on all ranks, where addresses are others."""
    text = repr(value)
    is_address = " at 0x" in text or (isinstance(value, int) and value > ADDRESS)
    return type(value).__name__ if is_address else text


def number_of(place: Any) -> int:
    return id(place.holder if isinstance(place, Of) else place)


def key_of(key: Any, originals: Mapping[int, Any]) -> Any:
    if isinstance(key, int) and key in originals:
        return id(originals[key])
    return originals.get(id(key), key) if isinstance(key, nn.Module) else key


def of_modules(write: Write, modules: Mapping[str, nn.Module]) -> Write:
    """With the modules themselves as keys, in the place of those that torch's tracer has stand for them."""
    if not isinstance(write.key, nn.Module):
        return write
    own = (module for module in modules.values() if vars(module) is vars(write.key))
    return replace(write, key=next(own, write.key))


def place_of(place: Any, originals: Mapping[int, Any]) -> Any:
    match place:
        case Of():
            return Of(originals[id(place.holder)]) if id(place.holder) in originals else place
        case Cell():
            return place.original(originals)
        case dict() if "__builtins__" not in place:  # of what functions are given
            given = cast("dict[str, Any]", place)
            return {name: originals.get(id(value), value) for name, value in given.items()}
        case _:
            return place


def content(held: Any) -> Any:
    """What is in a container, in one of Python's own."""
    if is_state(held):
        return attributes(held)
    ordered: Any = OrderedDict if isinstance(held, OrderedDict) else dict  # which knows another order than dict's
    return dict(ordered.items(held)) if isinstance(held, dict) else held_in(held)


def _kind(held: Any) -> Any:
    """The class of Python's whose methods say what is there: a user's may put it elsewhere."""
    return next(one for one in (OrderedDict, dict, list, deque) if isinstance(held, one))


def refill(held: Any, had: Any) -> None:
    if is_state(held):
        return let_have(held, had)
    kind = _kind(held)
    kind.clear(held)
    (kind.update if issubclass(kind, dict) else kind.extend)(held, had)


def put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, Of) and value is MISSING:
        delattr(holder.holder, key)
    elif isinstance(holder, (Of, Cell)):
        holder.put(key, value)
    elif value is MISSING:
        _kind(holder).pop(holder, key)
    else:
        _kind(holder).__setitem__(holder, key, value)
