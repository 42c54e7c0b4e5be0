"""Lists, dicts and objects that several attributes of modules hold: one state of several blocks.

    self.state = State()
    self.blocks = nn.ModuleList(Block(self.state) for _ in range(4))

One of the attributes is where a trace has what is in it as arguments; the others are names of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from torch import Tensor, nn

from autopar.trace.formulas import Place
from autopar.trace.modules import OF_EVERY_MODULE
from autopar.trace.records import has_parts, is_mutable, make_states_known
from autopar.trace.values import MISSING, SCALARS, few_in, own_names
from autopar.trace.writes import content

Within = tuple[Any, ...]


def place_of_all(place: Place, modules: Mapping[str, nn.Module]) -> Place | None:
    """The attribute that holds all of what those have that share lists, dicts and objects with this one; itself, where
    none does. None where each of several has something that the others have not, one has something twice, or holds it
    in what is not taken apart.
    """
    values = dict(_attributes(modules))
    held = {place: ids_in(values.get(place))}
    if not held[place]:
        return place
    leading, shared = {other: _led_to(value) for other, value in values.items()}, {*held[place]}
    while more := [other for other in leading if other not in held and leading[other] & shared]:
        for other in more:
            make_states_known(values[other])
            held[other] = ids_in(values[other])
            if not shared & {*held[other]}:
                return None
        shared.update(*held.values())
    whole = next((other for other in values if other in held and sorted(held[other]) == sorted(shared)), None)
    if whole is None or {whole, *other_names([whole], modules)} != {*held}:
        return None
    return whole


def _led_to(value: Any) -> set[int]:
    """Ids of all that a value leads to, whether or not it is taken apart."""
    found, left = dict[int, Any](), [value]
    while left:
        one = left.pop()
        if id(one) not in found and not isinstance(one, (*SCALARS, Tensor, nn.Module)):
            found[id(one)] = one
            left += [*(own_names(one) or {}).values(), *few_in(one)]
    return {*found}


def other_names(places: Sequence[Place], modules: Mapping[str, nn.Module]) -> dict[Place, tuple[Place, Within]]:
    """Other attributes that hold what is at these places, or a part of it -> which, and the keys that lead there.
    Tensors are parts, too: forward may write to them in place.
    """
    found: dict[int, tuple[Place, Within]] = {}
    for place in places:
        value = vars(modules[place[0]]).get(place[1], MISSING)
        found |= {id(part): (place, within) for within, part in _parts_in(value) if _may_be_written_to(part)}
        if has_parts(value):
            found[id(value)] = place, ()
    if not found:
        return {}
    there = ((place, value) for place, value in _attributes(modules) if place not in places)
    return {place: found[id(value)] for place, value in there if id(value) in found}


def nodes_in(value: Any) -> Iterator[tuple[Within, Any]]:
    """The lists, dicts and objects that a value is, or has in it, each with the keys that lead there."""
    return ((within, part) for within, part in _parts_in(value) if is_mutable(part))


def ids_in(value: Any) -> list[int]:
    """Of its lists, dicts and objects."""
    return [id(node) for _, node in nodes_in(value)]


def part_of(held: Any, within: Within) -> Any:
    """What these keys lead to."""
    return reduce(lambda one, key: content(one)[key], within, held)


def _may_be_written_to(part: Any) -> bool:
    return is_mutable(part) or (isinstance(part, Tensor) and not isinstance(part, nn.Parameter))


def _parts_in(value: Any, within: Within = (), above: tuple[Any, ...] = ()) -> Iterator[tuple[Within, Any]]:
    """`above`: what it is in."""
    if any(value is one for one in above):
        return
    yield within, value
    if has_parts(value):
        parts = content(value)
        for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
            yield from _parts_in(part, (*within, key), (*above, value))


def _attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Place, Any]]:
    paths = {id(module): path for path, module in reversed([*modules.items()])}  # the first of several names
    for path, module in modules.items():
        if paths[id(module)] == path:
            yield from (((path, name), value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE)
