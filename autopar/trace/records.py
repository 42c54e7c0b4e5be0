"""Objects that hold values, and can be taken apart and put together again: dataclasses, what is made of a `UserDict` (a
tokenizer's `BatchEncoding`), and of what forward keeps numbers and tensors in, objects of any plain class (meters) and
dicts of one's own (`collections.Counter`).
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, UserDict
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.trace.values import COLLECTIONS, KEEPERS, MUTABLE, PLAIN, SCALARS, few_in, held_in, is_of_torch, own_names

READ_AS_DICTS = "__iter__", "items", "__getitem__", "__setitem__"
TO_ITSELF = "leads to itself (as a link to a parent does)"
OWN_WAYS = ("__getattr__", "__setattr__", "__getattribute__")
MOST_IN = 64
DISTRIBUTIONS = (torch.distributions.Distribution, torch.distributions.Transform)  # are what they were made of
BESIDE = (enum.Enum, torch.dtype, torch.device)  # parts of objects, which no program has


def make_known(value: Any, above: tuple[Any, ...] = ()) -> None:
    """Let dataclasses of the user's be taken apart and put together, as the tensors in them have to be. `above`: what
    holds it. Raises ValueError for what holds itself.
    """
    if isinstance(value, UserDict) and all(isinstance(one, SCALARS) for one in _beside(value).values()):
        _register(type(value))
    if isinstance(value, dict) and is_batch(value):
        _register(type(value))
    if has_both(value):
        _keep_both(type(value))
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            make_known(part, above)
    elif is_record(value) or (type(value) not in pytree.SUPPORTED_NODES and is_batch(value)):
        if any(one is value for one in above):
            raise ValueError(f"an argument holds a {type(value).__name__} that {TO_ITSELF}: pass it without that link")
        _register(type(value))
        for part in attributes(value).values():
            make_known(part, (*above, value))


def is_batch(value: Any) -> bool:
    """Whether it is an object of a plain class, or a dict of one's own, that holds tensors, numbers and text alone, in
    lists, dicts and objects.
    """
    return may_be_state(value) and why_no_batch(value) is None


def why_no_batch(value: Any, above: tuple[Any, ...] = ()) -> str | None:
    """Why an object is none, as far as there is something to say; None where it is one. `above`: what holds it."""
    if isinstance(value, (Tensor, *SCALARS)):
        return None
    if any(one is value for one in above):
        return f"it holds a {type(value).__name__} that {TO_ITSELF}"
    if len(above) > MOST_IN:
        return f"more than {MOST_IN} objects lie in one another in it"
    if isinstance(value, (list, tuple, dict)) and type(value) in pytree.SUPPORTED_NODES:
        parts: Iterable[Any] = held_in(value)
    elif not may_be_state(value):
        has_own_ways = any(name in vars(one) for one in type(value).__mro__ for name in OWN_WAYS if one is not object)
        told = "class has its own way to get or set attributes" if has_own_ways else ""
        return f"it holds a {type(value).__name__}{told and f', whose {told}'}" if above else told and f"its {told}"
    else:
        parts = [*(own_names(value) or {}).values(), *held_in(value)]
    reasons = (why_no_batch(part, (*above, value)) for part in parts)
    return next((reason for reason in reasons if reason is not None), None)


def make_states_known(value: Any) -> None:
    """As `make_known`, of what an attribute of a module has: also objects of plain classes, and dicts of one's own."""
    if is_record(value) or may_be_state(value):
        _register(type(value))
    for part in attributes(value).values() if is_state(value) else held_in(value):
        make_states_known(part)


def may_be_state(value: Any) -> bool:
    """Whether it is an object whose attributes are all that it has, or a dict of a class of its own."""
    kind = type(value)
    if isinstance(value, dict):
        as_dicts = all(getattr(kind, name) is getattr(dict, name) for name in READ_AS_DICTS)
        return as_dicts and not getattr(value, "__dict__", None) and kind not in pytree.SUPPORTED_NODES
    is_other = is_of_torch(kind) and not isinstance(value, DISTRIBUTIONS)
    if isinstance(value, (*PLAIN, *SCALARS, *COLLECTIONS)) or is_other or is_frozen(value):
        return False
    has_own_ways = any("__getattr__" in vars(one) for one in kind.__mro__)
    plain = kind.__setattr__ is object.__setattr__ and kind.__getattribute__ is object.__getattribute__
    plain = plain or kind is types.SimpleNamespace  # whose own are those of objects, in C
    return plain and not has_own_ways and own_names(value) is not None


def is_record(value: Any) -> bool:
    """Whether it is an object of a dataclass, which is taken apart; a module is not, whatever it is besides."""
    return is_dataclass(value) and not isinstance(value, (type, nn.Module))


def is_frozen(value: Any) -> bool:
    """Whether it is an object of a dataclass that nothing can be set in."""
    return is_record(value) and type(value).__dataclass_params__.frozen


def has_both(value: Any) -> bool:
    """Whether it is a dict that is a dataclass, as transformers' outputs are: with entries and attributes."""
    return isinstance(value, OrderedDict) and is_dataclass(value)


def is_state(value: Any) -> bool:
    """Whether it is an object (no dict) that is taken apart here."""
    known = pytree.SUPPORTED_NODES.get(type(value))
    return known is not None and known.flatten_fn is _taken_apart


def has_parts(value: Any) -> bool:
    """Whether it is a tuple, list or dict, or an object that is taken apart."""
    return isinstance(value, (tuple, *MUTABLE)) or is_state(value)


def is_mutable(value: Any) -> bool:
    """Whether it is one of these that may have other parts and stay the same object."""
    return isinstance(value, MUTABLE) or (is_state(value) and not is_frozen(value))


def leads_to(value: Any, to: Any, depth: int = 8) -> bool:
    """Whether it is that, or holds it in lists, dicts and objects."""
    if value is to:
        return True
    parts = [*(own_names(value) or {}).values()] or few_in(value)
    return depth > 0 and any(leads_to(part, to, depth - 1) for part in parts)


def tensors_within(value: Any, depth: int = 8) -> list[Tensor]:
    """The tensors in lists, dicts and objects, known ones or not."""
    if isinstance(value, Tensor):
        return [value]
    parts = [*(own_names(value) or {}).values()] or few_in(value)
    return [one for part in parts if depth for one in tensors_within(part, depth - 1)]


def classes_in(value: Any) -> set[type]:
    """Of the objects in it that are taken apart, and of dicts and tuples of classes of one's own."""
    parts = [*attributes(value).values()] if is_state(value) else held_in(value)
    is_own = is_state(value) or (isinstance(value, (dict, tuple)) and type(value) not in (dict, tuple))
    return {type(value) for _ in range(is_own)}.union(*map(classes_in, parts))


def attributes(value: Any) -> dict[str, Any]:
    """What an object holds: the fields of a dataclass, and what was set beside them."""
    there = (one.name for one in (fields(value) if is_dataclass(value) else ()) if hasattr(value, one.name))
    beside = (name for name in own_names(value) or {} if not name.startswith("__"))  # as typing.Generic does
    return {name: getattr(value, name) for name in dict.fromkeys((*there, *beside))}


def let_have(value: Any, parts: Mapping[str, Any]) -> None:
    """Let an object hold these, and nothing else."""
    for name in attributes(value).keys() - parts.keys():
        object.__delattr__(value, name)
    for name, part in parts.items():
        object.__setattr__(value, name, part)


def put_together(kind: type[Any], parts: Iterable[Any], context: tuple[Iterable[Any], Iterable[Any]]) -> Any:
    """As it was, without what its constructor does, which was done already (`__post_init__`). `context`: names of the
    parts, and further ones with theirs.
    """
    names, fixed = context
    if issubclass(kind, dict):
        table: Any = dict.__new__(kind)
        dict.update(table, zip(names, parts, strict=True))
        return table
    if issubclass(kind, UserDict):
        names, parts, fixed = (), (), (("data", dict(zip(names, parts, strict=True))), *fixed)
    made = kind.__new__(kind) if kind in KEEPERS else object.__new__(kind)
    for name, part in (*zip(names, parts, strict=True), *fixed):
        object.__setattr__(made, name, part)
    return made


def _sized(sizes: Iterable[Any], _: Any) -> Any:
    """Sizes stay `torch.Size`, of which torch makes tuples; one with tensors in it is none."""
    made = tuple(sizes)
    return torch.Size(made) if all(isinstance(size, (int, torch.SymInt)) for size in made) else made


pytree.SUPPORTED_NODES[torch.Size] = pytree.SUPPORTED_NODES[torch.Size]._replace(unflatten_fn=_sized)


def _register(kind: type[Any]) -> None:
    if kind in pytree.SUPPORTED_NODES:
        return
    of_dict = issubclass(kind, (dict, UserDict))
    pytree.register_pytree_node(
        kind, _entries if of_dict else _taken_apart, partial(put_together, kind),
        flatten_with_keys_fn=_by_key if of_dict else _by_attribute,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
    )  # fmt: skip


def _keep_both(kind: type[Any]) -> None:
    """Let transformers' outputs (dataclasses that are dicts) be taken apart by entries and attributes, and have them
    again as they were: put together by the class itself, entries have the order of its fields, and an attribute that
    was set to None, or beside the entries, is what the entry is.
    """
    known = pytree.SUPPORTED_NODES.get(kind)
    if known is not None and known.flatten_fn is not _both:
        put = partial(_with_both, kind)
        pytree.SUPPORTED_NODES[kind] = known._replace(
            flatten_fn=_both, unflatten_fn=put, flatten_with_keys_fn=both_by_key
        )


def _both(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    entries, held = dict(OrderedDict.items(value)), vars(value)
    twice = tuple(name for name in held if name in entries and entries[name] is held[name])
    beside = {name: part for name, part in held.items() if name not in twice}
    fixed = tuple((name, part) for name, part in beside.items() if isinstance(part, SCALARS))
    own = {name: part for name, part in beside.items() if not isinstance(part, SCALARS)}
    return [*entries.values(), *own.values()], (tuple(entries), twice, tuple(own), fixed)


def both_by_key(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    """Its entries, and what its attributes have beside them, each with its key; and what is the same of alike ones."""
    parts, context = _both(value)
    keys = [*map(pytree.MappingKey, context[0]), *map(pytree.GetAttrKey, context[2])]
    return [*zip(keys, parts, strict=True)], context


def _with_both(kind: type[Any], parts: Iterable[Any], context: tuple[Any, ...]) -> Any:
    keys, twice, own, fixed = context
    values: list[Any] = [*parts]
    made: Any = OrderedDict.__new__(kind)
    entries = dict(zip(keys, values[: len(keys)], strict=True))
    for key, part in entries.items():
        OrderedDict.__setitem__(made, key, part)
    at_entries = ((name, entries[name]) for name in twice)
    vars(made).update((*at_entries, *zip(own, values[len(keys) :], strict=True), *fixed))
    return made


def _taken_apart(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    held = attributes(value)
    parts = {name: part for name, part in held.items() if not isinstance(part, BESIDE)}
    return [*parts.values()], (tuple(parts), tuple((name, part) for name, part in held.items() if name not in parts))


def _by_attribute(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    parts, context = _taken_apart(value)
    return [(pytree.GetAttrKey(name), part) for name, part in zip(context[0], parts, strict=True)], context


def _entries(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    table: dict[Any, Any] = value.data if isinstance(value, UserDict) else value
    beside = _beside(value).items() if isinstance(value, UserDict) else ()
    return [*dict.values(table)], (tuple(dict.keys(table)), tuple(beside))


def _beside(value: UserDict[Any, Any]) -> dict[str, Any]:
    """What it has besides its entries; not what a tokenizer has made of the text, which forward has no use for."""
    return {name: None if name == "_encodings" else one for name, one in vars(value).items() if name != "data"}


def _by_key(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    parts, context = _entries(value)
    return [(pytree.MappingKey(key), part) for key, part in zip(context[0], parts, strict=True)], context
