"""Guards: what a program was traced with, compared with what is there now, before every call.

A program holds what the model's Python code saw as constants: attributes of modules, `training` of each, what the parts
of a model are, hooks, numbers among globals and enclosing variables. Where any of it has changed, another program is
traced. Values that cannot change in place are compared by identity first, which costs some 40 ns each.
"""

from __future__ import annotations

import enum
import operator
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.trace.code import CODE
from autopar.trace.counted import called, is_number, kind_of
from autopar.trace.keys import Keys, looked_up
from autopar.trace.lookups import EVENTS, Cell, Now, Of, keeps_numbers, other_places
from autopar.trace.modules import REGISTERED
from autopar.trace.origins import tensors_in
from autopar.trace.reads import Reads
from autopar.trace.settings import is_users_class
from autopar.trace.values import (
    COLLECTIONS,
    CONTAINERS,
    IN_PLACE,
    MISSING,
    SCALARS,
    Hidden,
    few_in,
    held_in,
    in_front,
    inside,
    is_mine,
    led_to,
    operators_of,
    own_names,
    snapshot,
    told,
)
from autopar.trace.writes import Write, hidden, number_of

HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # what is put in there, into empty ones too, is called
Place = tuple[Mapping[str, Any], str]  # where a value is found


class _Own(Mapping[str, Any]):
    """The attributes of the whole module, which holds its guards: it is freed with the last who holds it from outside,
    and not when Python looks for circles next.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def get(self, key: str, default: Any = None) -> Any:
        return vars(self._module()).get(key, default)

    def __getitem__(self, key: str) -> Any:
        return vars(self._module())[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._module()))

    def __len__(self) -> int:
        return len(vars(self._module()))


@dataclass
class Guards:
    """`fixed`: places of values that only assignment changes, and those values. `changing`: likewise of values that may
    change in place, with the paths into a dict that count (None: all), and snapshots; `whole`: of objects of which all
    counts. `modules`, `classes`: of the parts of the model, which parametrizations change. `kept`, `sizes`: where each
    module holds parts, parameters and buffers, and how many. `named`: what to call each place. `left`: what forward
    writes to containers and objects, which does not count there; `owners`: the modules that these may be of.
    `outside`: as of `Reads`.
    """

    fixed: list[Place]
    values: list[Any]
    changing: list[tuple[Place, Collection[Any] | None, Any]]
    whole: list[tuple[Place, Any]]
    modules: list[nn.Module]
    classes: list[type]
    kept: list[dict[str, Any]]
    sizes: list[int]
    named: dict[tuple[int, str], str]
    left: list[Write]
    owners: WeakValueDictionary[str, nn.Module]
    hidden: Hidden
    outside: list[torch.Tensor]
    keys: Keys | None  # while they are made

    def broken(self) -> str | None:
        """What has changed, in words; None where all is as it was."""
        found = [place.get(key, MISSING) for place, key in self.fixed]
        if not all(map(operator.is_, found, self.values)):
            for number, (now, was) in enumerate(zip(found, self.values, strict=True)):
                if now is not was:
                    if type(now) is not type(was) or snapshot(now) != snapshot(was):
                        place, key = self.fixed[number]
                        return f"{self.named[id(place), key]} was {told(was)} and is {told(now)}"
                    self.values[number] = now  # equal: found by identity the next time
        if [*map(type, self.modules)] != self.classes:
            return "the class of a module has changed"
        if [*map(len, self.kept)] != self.sizes:  # each that was there is compared above
            return "a module, parameter or buffer was added or taken away"
        try:
            hides = hidden(self.left, self.owners)
        except (LookupError, TypeError, AttributeError):
            return "what tensors are written to has changed"
        for (place, key), keys, was in self.changing:
            if _looked_at(place.get(key, MISSING), keys, hides) != was:
                return f"{self.named[id(place), key]} has changed"
        for (place, key), was in self.whole:
            if inside(place.get(key, MISSING), hides) != was:
                return f"what is in {self.named[id(place), key]} has changed"
        return None


def guards_of(reads: Reads, model: nn.Module) -> Guards:
    """What is compared from now on, of a model whose copy was traced."""
    modules = dict(model.named_modules(remove_duplicate=False))
    left = reads.left.not_looked_at()
    hides = hidden(left, modules)
    owners = WeakValueDictionary(modules)
    guards = Guards(
        [], [], [], [], [*model.modules()][1:], [], [], [], {}, left, owners, hides, reads.outside, reads.keys
    )
    guards.classes = [*map(type, guards.modules)]  # (class and forward of the whole module are ours)
    own = {path: vars(module) if path else _Own(model) for path, module in modules.items()}
    written = reads.written
    for (path, name), value in reads.attributes.items():
        place = own.get(path)
        if place is None:
            continue
        if reads.counting.has((path, name)):
            continue
        called = f"{path}.{name}" if path else name
        if (path, name) in written:
            value = written[path, name][0]
        elif name != "training":  # which the trace may have set
            value = place.get(name, MISSING)
        _add(guards, place, name, value, called, (reads, reads.attributes[path, name]))
    for path, module in modules.items():
        for key, child in module._modules.items():
            _add(guards, module._modules, key, child, f"{path}.{key}" if path else key)
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is None:
                    _add(guards, getattr(module, kind), key, None, f"{path}.{key}" if path else key)
        if path:
            _add(guards, own[path], "forward", own[path].get("forward", MISSING), f"{path}.forward")
    kept = ((module, kind, getattr(module, kind)) for module in model.modules() for kind in REGISTERED)
    guards.kept = [place for module, kind, place in kept if place or _may_be_filled(module, kind)]
    guards.sizes = [*map(len, guards.kept)]
    _add_settings(guards, reads)
    guards.keys = None
    return guards


def _add_settings(guards: Guards, reads: Reads) -> None:
    for place, name, value, _ in reads.names:
        if (id(place), name) in guards.named or not reads.is_read(place, name):
            continue
        if name in (guards.hidden.get(number_of(place)) or ()):
            continue
        if isinstance(place, Now):  # from now on
            value = place.get(name)
        guards.named[id(place), name] = f"the variable {name}"
        if isinstance(value, (*IN_PLACE, tuple)) and _may_change(value):
            _watch(guards, place, name, value)
        elif isinstance(value, COLLECTIONS) and own_names(value) is not None:
            guards.whole.append(((place, name), inside(value, guards.hidden)))
        else:
            _fix(guards, place, name, value)


def _watch(guards: Guards, place: Mapping[str, Any], key: str, value: Any) -> None:
    """`value` may change in place. Of a dict those entries count that the model's code asks for, where it says so."""
    keys = guards.keys.asked(key, type(value)) if guards.keys is not None and isinstance(value, dict) else None
    guards.changing.append(((place, key), keys, _looked_at(value, keys, guards.hidden)))


def _looked_at(value: Any, keys: Collection[Any] | None, hidden: Hidden) -> Any:
    """`snapshot`, of a dict of what is at those paths alone."""
    without = hidden.get(id(value), ())
    if keys is None or not isinstance(value, dict) or without is None:
        return snapshot(value, hidden)
    return snapshot({path: looked_up(value, path) for path in keys if path[0] not in without}, hidden)


def _fix(guards: Guards, place: Mapping[str, Any], key: str, value: Any) -> None:
    guards.fixed.append((place, key))
    guards.values.append(value)


def _may_be_filled(module: nn.Module, kind: str) -> bool:
    """Whether one may look for what is not there yet: torch's containers for parts, a user's forward for anything."""
    if type(module).__module__.startswith("torch.nn."):
        return kind == "_modules" and isinstance(module, HOLDERS)
    return True


def _add(
    guards: Guards,
    place: Mapping[str, Any],
    key: str,
    value: Any,
    called: str,
    traced: tuple[Reads, Any] | None = None,
) -> None:
    """`traced`: what was read, and what stood for the value in the copy that was traced."""
    if (id(place), key) in guards.named:
        return
    guards.named[id(place), key] = called
    if is_users_class(value) or (isinstance(value, (*SCALARS, enum.Enum)) and hasattr(value, "__dict__")):
        for name, part in vars(value).items():
            if not name.startswith("__") and isinstance(part, (*SCALARS, *CONTAINERS)):
                _add(guards, vars(value), name, part, f"{called}.{name}")
    if value is MISSING or isinstance(value, (*SCALARS, type, nn.Module)) or not _may_change(value):
        _fix(guards, place, key, value)
    elif traced is not None and _counts_whole(value, *traced):
        guards.whole.append(((place, key), inside(value, guards.hidden)))
    elif (own := own_names(value)) is not None:  # a configuration: what it is, and what was read of it
        _fix(guards, place, key, value)
        _add_names(guards, value, own if own is getattr(value, "__dict__", None) else Of(value), called, traced)
    else:
        _watch(guards, place, key, value)
        if isinstance(value, (list, tuple, dict, deque)) and few_in(value):
            _add_parts(guards, value, called, traced)
    for there in led_to(value):
        if not isinstance(there, (nn.Module, torch.Tensor)):  # which are looked at by themselves, and freed as ever
            within = None if traced is None else (traced[0], there)
            _add(guards, {"": there}, "", there, f"what {called} leads to", within)
    if own_names(value) is not None:
        _add_class(guards, value, called)
    if keeps_numbers(value) or isinstance(value, EVENTS):
        for there, name, held in other_places(value):
            _add(guards, there, name, held, f"what is in {called}")
    _add_parts_of_code(guards, value, called)


def _add_parts_of_code(guards: Guards, value: Any, called: str) -> None:
    """What functions are given once for all, and variables of those around them."""
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)) and not isinstance(
        value.__self__, types.ModuleType
    ):
        _add_held(guards, [value.__self__], called)
    if isinstance(value, partial):
        given = cast("partial[Any]", value)
        _add_held(guards, [given.func, *given.args, *given.keywords.values()], called)
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if not isinstance(cell.cell_contents, (types.FunctionType, nn.Module)):
                _add(guards, Cell(cell), name, cell.cell_contents, f"the variable {name} of {called}")


def _add_held(guards: Guards, parts: list[Any], called: str) -> None:
    for part in parts:
        if not isinstance(part, nn.Module):
            _add(guards, {"": part}, "", part, f"what {called} holds")


def _add_class(guards: Guards, value: Any, called: str) -> None:
    """The class of an object, and its operators, which are called past the object."""
    if not is_mine(type(value)):
        return
    kind = Now(partial(type, value)), "__class__", type(value)
    for place, name, was in (kind, *((vars(one), name, call) for one, name, call in operators_of(type(value)))):
        guards.named[id(place), name] = f"{called}.{name}"
        _fix(guards, place, name, was)


def _counts_whole(value: Any, reads: Reads, copied: Any) -> bool:
    """Whether any of an object may have been read: it could not be watched, or finds its attributes by itself."""
    finds = any("__getattr__" in vars(kind) for kind in type(value).__mro__)
    return reads.inside.is_whole(copied) or (finds and own_names(value) is not None and not reads.inside.read(copied))


def _add_names(
    guards: Guards, value: Any, own: Mapping[str, Any], called: str, traced: tuple[Reads, Any] | None
) -> None:
    """The attributes of a configuration: those that were read, or all where nobody watched."""
    read = None if traced is None else traced[0].inside.read(traced[1])
    without = guards.hidden.get(id(value)) or ()
    names = [*(own_names(value) or ()), *_plain_of_class(value)] if read is None else read
    for name in (name for name in names if name not in without):
        part = own.get(name, MISSING)
        owner = next((one for one in type(value).__mro__ if name in vars(one)), None)
        if own.get(name, MISSING) is MISSING and owner is not None:  # of its class, until it is set on the object
            found = vars(owner)[name]
            if not isinstance(found, (*SCALARS, *CONTAINERS)) and not (isinstance(found, CODE) and is_mine(owner)):
                continue
            for one in in_front(type(value).__mro__, owner):
                _add(guards, vars(one), name, MISSING, f"{called}.{name}")
            _add(guards, vars(owner), name, vars(owner)[name], f"{called}.{name}")
        if read is not None and traced is not None:
            _add(guards, own, name, part, f"{called}.{name}", (traced[0], vars(traced[1]).get(name)))
        elif isinstance(part, SCALARS) or part is MISSING:
            _add(guards, own, name, part, f"{called}.{name}")


def _plain_of_class(value: Any) -> list[str]:
    """The names of numbers, text and the like that it may have from classes of a script's."""
    kinds = [kind for kind in type(value).__mro__ if is_mine(kind)]
    own = [(name, part) for kind in kinds for name, part in vars(kind).items() if not name.startswith("__")]
    return [name for name, part in own if isinstance(part, SCALARS)]


def _add_parts(
    guards: Guards,
    value: Sequence[Any] | Mapping[Any, Any],
    called: str,
    traced: tuple[Reads, Any] | None,
    depth: int = 8,
) -> None:
    """The configurations in a list, tuple or dict, and in those that it holds."""
    copied: Any = traced[1] if traced is not None and type(traced[1]) is type(value) else {}
    keys = [*dict.keys(value)] if isinstance(value, dict) else range(len(held_in(value)))
    there = held_in(copied)
    for place, (key, part) in enumerate(zip(keys, held_in(value), strict=True)):
        stands = there[place] if len(there) == len(keys) else None
        within = None if traced is None or stands is None else (traced[0], stands)
        if own_names(part) is not None:
            _add(guards, {"": part}, "", part, f"{called}[{key!r}]", within)
        elif isinstance(part, (list, tuple, dict, deque)) and depth and few_in(part):
            _add_parts(guards, cast("Any", part), f"{called}[{key!r}]", within, depth - 1)


def _may_change(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return not all(isinstance(part, SCALARS) for part in value)
    return not isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type(np.sin)))


def refuse_carried(
    reads: Reads, before: Sequence[Mapping[tuple[str, str], tuple[Any, Any, str]]], in_a_row: bool
) -> None:
    """Raise TraceError where forward builds on what an earlier call left: every call would need a program of its own.
    What it makes once and finds again, as a mask of a length, is no such thing. `before`: what programs of such calls
    set. `in_a_row`: the last of them were all for one call.
    """
    if in_a_row and not reads.left.is_independent:
        names = ", ".join(dict.fromkeys(write.called for write in reads.left.writes))
        raise TraceError(
            f"forward asks for {names}, as the last calls have left it, or how much that is, and writes there in each "
            "call: each would need a program of its own; keep what it asks for in an attribute (self.count += 1, "
            "self.total = self.total + loss.item()), or look at it outside of forward"
        )
    for place, (was, after, line) in reads.written.items():
        if place not in reads.attributes:
            continue
        if place in reads.counting.places:
            if in_a_row:
                had = reads.counting.kinds[reads.counting.places.index(place)]
                _refuse_each(place, line, reads.counting.asked.pinned, is_other_kind=had != kind_of(after))
            continue
        carried = has_tensors(was) and has_tensors(after)
        for writes in before:
            earlier = writes.get(place)
            if earlier is not None and is_number(was) and is_number(after):
                carried = carried or (was != earlier[0] and after != earlier[1])
        if carried:
            raise TraceError(
                f"forward changes {called(place)} from call to call at {line}, and each "
                "value would need a program of its own; make it a buffer (register_buffer) that forward writes with "
                "copy_, change it outside forward, or pass it as an argument"
            )


def _refuse_each(place: tuple[str, str], line: str, pinned: Mapping[tuple[str, str], str], is_other_kind: bool) -> None:
    """Raise TraceError where a number that each call changes is asked for itself, or a list grows in each."""
    if place in pinned:
        raise TraceError(
            f"forward changes {called(place)} from call to call, and needs it as a number of Python's{pinned[place]}, "
            "as sizes, range, int, float, text and some arguments of torch do: each value would need a program of its "
            "own. Compute with it as it is (self.step / 10, math.exp), or as a tensor (torch.tensor(self.step))"
        )
    if is_other_kind:
        where = f"{called(place)} at {line}" if line else called(place)
        raise TraceError(
            f"what forward keeps in {where} grows, or changes its shape, from call to call: each "
            "would need a program of its own; let it have as many tensors, of as many rows, as before"
        )


def has_tensors(value: Any) -> bool:
    return bool(tensors_in(value))
