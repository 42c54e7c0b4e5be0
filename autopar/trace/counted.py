"""Numbers that forward finds as an earlier call has left them, and changes: counters, temperatures, running averages.

    self.step += 1
    beta = min(1.0, self.step / self.warmup)

A program has them as arguments: 0-dim tensors, where something is computed with tensors. What is computed of such
numbers alone is computed in Python before each call, as what is asked of them is: each answer has a program of its own.
Tensors that forward finds and replaces (`self.state = new.detach()`) are arguments, too, a program for each shape, and
so is what is in tuples, lists and dicts of such (`self.hidden = h, c`).
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.trace.beside import Beside, beside_of
from autopar.trace.checks import Checks
from autopar.trace.formulas import Asked, Computed, Counted, Formula, Place, is_large
from autopar.trace.left import is_kept
from autopar.trace.names import Within, nodes_in, other_names, part_of
from autopar.trace.numbers import Number
from autopar.trace.origins import tensors_in, writes_in_place
from autopar.trace.records import has_parts, is_frozen, is_mutable, is_state, put_together, tensors_within
from autopar.trace.sharing import has_storage, storage_of
from autopar.trace.tables import VIEWS
from autopar.trace.values import CONSTANT, MISSING, SCALARS, told
from autopar.trace.writes import content, refill

ARGUMENT = "counted_"  # of forward, in a trace: a dict by what an attribute is called


@dataclass
class Counting:
    """`places`: where numbers are, in the order in which a formula has them; `kinds`: as `kind_of` has what is there.
    `asked`: what forward asks of them. `found`: other places that may be such; `elsewhere`: ids of lists and dicts that
    variables and objects hold. `stood`: what forward was given, and what `_now` says of it; `nodes`: id of each list,
    dict and object there -> where it is found; `others`: attributes that hold some of that, too, and where it is.
    `beside`: what forward asks of places, which no program takes;
    `asked_for`: lists and dicts that it writes to, and may ask what is in them. `plain`: memory of each tensor that an
    attribute holds, and forward has read -> where that is; None: at several places, and not as the
    one object that is found `first`, by its id. `asks_what_trains`: forward does.
    """

    places: tuple[Place, ...] = ()
    kinds: tuple[Any, ...] = ()
    asked: Asked = field(default_factory=Asked)
    found: set[Place] = field(default_factory=set[Place])
    beside: Beside = field(default_factory=Beside)
    asked_for: set[Place] = field(default_factory=set[Place])
    plain: dict[int, Place | None] = field(default_factory=dict[int, Any])
    first: dict[int, int] = field(default_factory=dict[int, int])
    asks_what_trains: bool = False
    elsewhere: Callable[[], set[int]] = set[int]
    stood: list[tuple[Place, Any, Any]] = field(default_factory=list[tuple[Place, Any, Any]])
    nodes: dict[int, tuple[Place, Within]] = field(default_factory=dict[int, tuple[Place, Within]])
    others: dict[Place, tuple[Place, Within]] = field(default_factory=dict[Place, tuple[Place, Within]])

    @property
    def are_there(self) -> bool:
        """Whether anything is counted."""
        return bool(self.places or self.beside.spots)

    def reads(self, place: Place, value: Any) -> None:
        """That forward reads an attribute, in which it may write to tensors."""
        for memory in {storage_of(one) for one in tensors_within(value) if has_storage(one)}:
            known, first = self.plain.setdefault(memory, place), self.first.setdefault(memory, id(value))
            if known != place and first != id(value):  # what is written to one is read in both
                self.found -= {known}
                self.plain[memory] = None

    def sees(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """That forward calls a function of torch, which may write to them in place."""
        if self.plain and writes_in_place(getattr(func, "__name__", ""), kwargs):
            written = (one for one in tensors_in((args[:1], kwargs.get("out"))) if has_storage(one))
            self.found |= {*filter(None, (self.plain.get(storage_of(one)) for one in written))}

    def look(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """That a function of torch gave what may look at one of them (a constant to torch, which copies it then)."""
        looks = bool(self.plain) and getattr(func, "__name__", "") in VIEWS and has_storage(result)
        if looks and has_storage(args[0]) and (place := self.plain.get(storage_of(args[0]))) is not None:
            self.plain[storage_of(result)] = place

    @property
    def filled(self) -> set[Place]:
        """The places at which numbers or tensors were."""
        return {place for place, (_, leaves) in zip(self.places, self.kinds, strict=True) if leaves}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, another trace may be made with it: what it has of the last one comes back."""
        asked, stood, nodes = self.asked, [*self.stood], {**self.nodes}
        try:
            yield
        finally:
            self.asked, self.stood, self.nodes = asked, stood, nodes

    def has(self, place: Place) -> bool:
        """Whether what is there is an argument."""
        return place in self.places or place in self.others

    def by_all_names(self, attributes: Mapping[Place, Any]) -> dict[Place, Any]:
        """These, and what other attributes hold of them."""
        return {**attributes, **{one: part_of(attributes[at], within) for one, (at, within) in self.others.items()}}

    def values(self, modules: Mapping[str, nn.Module]) -> list[Any]:
        """What is at the places now."""
        return [*held_at(self.places, modules).values()]

    def numbers(self, modules: Mapping[str, nn.Module]) -> list[Any]:
        """The numbers and tensors in it, as a formula has them, and those beside."""
        return [*self._taken(modules), *self.beside.values(modules)]

    def _taken(self, modules: Mapping[str, nn.Module]) -> list[Any]:
        return [number for value in self.values(modules) for number in numbers_in(value)]

    def paths(self, modules: Mapping[str, nn.Module]) -> list[str]:
        """Which flat inputs of a trace these are."""
        there = zip(self.places, self.values(modules), strict=True)
        return [f"['{ARGUMENT}']['{name}']" for place, value in there for name in _named(place, value)]

    def refill(self, modules: Mapping[str, nn.Module]) -> dict[Place, Any]:
        """What is still at its place, and has something else in it."""
        there = held_at(self.places, modules)
        return {place: held for place, held, had in self.stood if there[place] is held and not _is_same(held, had)}

    def lists(self, modules: Mapping[str, nn.Module]) -> dict[int, Any]:
        """Id of each list and dict that forward was given -> the user's, in the place of which it stood."""
        there = held_at(self.places, modules)
        return {number: part_of(there[place], within) for number, (place, within) in self.nodes.items()}

    def broken(self, modules: Mapping[str, nn.Module]) -> str | None:
        """Why a program is none for the numbers that are there; None where it is one."""
        values = self.values(modules)
        for place, value, kind in zip(self.places, values, self.kinds, strict=True):
            if kind_of(value) != kind:
                return f"{called(place)} is {told(value)}"
        there = held_at((*self.places, *self.others), modules)
        for place, value in self.by_all_names({place: there[place] for place in self.places}).items():
            if there[place] is not value:
                return f"{called(place)} is another"
        for place, value in zip(self.beside.spots, self.beside.values(modules), strict=True):
            if value is MISSING:
                return f"{called(place)} is another"
        if not self.asked.holds(self.numbers(modules)):
            for place, line in self.asked.pinned.items():
                return f"forward needs {called(place)} as a number of Python's{line}, and it is another"
            asked = *self.places, *self.beside.spots
            return f"what forward asks of {', '.join(map(called, asked))} has another answer"
        return None

    def computed(self, modules: Mapping[str, nn.Module]) -> Computed:
        """What steps give for what is there now."""
        return Computed(self.asked.steps, self.numbers(modules))

    def tensors(self, modules: Mapping[str, nn.Module]) -> list[Tensor]:
        """What a program takes in their place."""
        return [as_tensor(number) for number in self._taken(modules)]


def held_at(places: Iterable[Place], modules: Mapping[str, nn.Module]) -> dict[Place, Any]:
    """What is there now; MISSING where there is nothing."""
    return {(path, name): vars(modules[path]).get(name, MISSING) for path, name in places}


@contextlib.contextmanager
def standing(attributes: Mapping[Place, Any], modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, these are there."""
    before = held_at(attributes, modules)
    _put(attributes, modules)
    try:
        yield
    finally:
        _put(before, modules)


def _put(attributes: Mapping[Place, Any], modules: Mapping[str, nn.Module]) -> None:
    for (path, name), value in attributes.items():
        if value is MISSING:
            vars(modules[path]).pop(name, None)
        else:
            vars(modules[path])[name] = value


def _is_same(held: Any, had: Any) -> bool:
    (now, spec, writes), (was, before, written) = _now(held), had
    return spec == before and all(map(operator.is_, now, was)) and writes == written


def _now(held: Any) -> tuple[list[Any], Any, list[int]]:
    """What is in it, of what structure, and how often each tensor has been written to."""
    leaves, spec = pytree.tree_flatten(held)
    return leaves, spec, [one._version for one in tensors_in(leaves)]


def put_back(after: Any, value: Any, lists: Mapping[int, Any]) -> Any:
    """`value`, of the structure of `after`, with the user's lists and dicts (by ids of those in `after`) in their
    places, refilled.
    """
    if not has_parts(after) or not any(id(node) in lists for _, node in nodes_in(after)):
        return value
    parts, given = content(after), content(value)
    if isinstance(parts, dict):
        made: Any = {key: put_back(part, given[key], lists) for key, part in parts.items()}
    else:
        made = [put_back(part, one, lists) for part, one in zip(parts, given, strict=True)]
    if is_frozen(value):
        return put_together(type(value), made.values(), (made, ()))
    if isinstance(value, tuple):
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    refill(held := lists.get(id(after), value), made)
    return held


def counting_of(places: Sequence[Place], modules: Mapping[str, nn.Module], beside: Sequence[Place] = ()) -> Counting:
    """Of what is there."""
    counting = Counting(tuple(places), beside=beside_of(beside, modules), others=other_names(places, modules))
    counting.kinds = tuple(map(kind_of, counting.values(modules)))
    return counting


def kind_of(value: Any) -> Any:
    """What is equal for all values that a program takes."""
    leaves, spec = pytree.tree_flatten(value)
    return spec, [_kind(leaf) for leaf in leaves]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    if isinstance(leaf, Number):
        return type(leaf.now if type(leaf) is Counted else leaf.like)
    return type(leaf) if is_number(leaf) or not isinstance(leaf, CONSTANT) else (type(leaf), leaf)


def as_tensor(value: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if is_large(value):
        return torch.tensor(0)  # which no program reads that takes it
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def called(place: Place) -> str:
    """In words."""
    path, name, *within = place
    return ".".join(("self", *filter(None, (path, name)))) + "".join(f"[{key!r}]" for key in within)


def is_counted(path: str) -> bool:
    """Whether a flat input of a trace is such a number."""
    return path.startswith(f"['{ARGUMENT}']")


def _named(place: Place, value: Any) -> dict[str, Any]:
    """What to call each number and tensor of what is there."""
    if may_vary(value):
        return {called(place): value}
    return {f"{called(place)}[{number}]": part for number, part in enumerate(numbers_in(value))}


def with_counted(kwargs: Mapping[str, Any], model: nn.Module, places: Sequence[Place]) -> dict[str, Any]:
    """Named arguments, and these numbers of the model among them."""
    if not places:
        return dict(kwargs)
    modules = dict(model.named_modules(remove_duplicate=False))
    named = [_named(place, vars(modules[place[0]])[place[1]]) for place in places]
    return {**kwargs, ARGUMENT: {name: as_tensor(value) for one in named for name, value in one.items()}}


def may_vary(value: Any) -> bool:
    """Whether it is a number or a tensor that is another one in each call."""
    return is_number(value) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))


def numbers_in(value: Any) -> list[Any]:
    """The numbers and tensors that a value is, or has in it."""
    return [leaf for leaf in pytree.tree_leaves(value) if may_vary(leaf)]


def may_be_counted(value: Any) -> bool:
    """Whether a program may take it as an argument, or what is in it."""
    leaves = pytree.tree_leaves(value)
    may_change = is_mutable(value) and (not leaves or is_state(value))  # what fills, and what has flags alone
    if not may_change and not any(map(may_vary, leaves)):
        return False
    return all(may_vary(leaf) or isinstance(leaf, CONSTANT) for leaf in leaves)


def counted_in(
    attributes: Mapping[Place, Any], written: Mapping[Place, tuple[Any, Any, str]], there: Mapping[str, nn.Module]
) -> list[Place]:
    """Numbers, and tensors that are no buffers, among the attributes that forward reads, and makes anew; tuples, lists
    and dicts of some that are made anew with as many in them.
    """
    return sorted(
        place
        for place, (was, after, _) in written.items()
        if place in attributes and may_be_counted(vars(there[place[0]]).get(place[1], MISSING))
        if _is_carried(was, after)
    )


def is_number(value: Any) -> bool:
    """Whether something of Python's may count with it: a truth is a flag."""
    return isinstance(value, (int, float)) and not isinstance(value, (bool, Number, enum.Enum))


def _is_carried(was: Any, after: Any) -> bool:
    (had, of_had), (has, of_has) = map(pytree.tree_flatten, (was, after))
    if of_had != of_has:  # a window that fills: a program for each length
        return type(was) is type(after) and has_parts(was) and any(map(may_vary, had)) and is_kept(after)
    pairs = [*zip(had, has, strict=True)]
    return any(itertools.starmap(_is_another, pairs)) and all(
        _is_another(one, other) or one is other or (isinstance(one, SCALARS) and one == other) for one, other in pairs
    )


def _is_another(was: Any, after: Any) -> bool:
    if is_number(was):
        return isinstance(after, Number) or (is_number(after) and was != after)
    return may_vary(was) and may_vary(after) and isinstance(after, Tensor) and was is not after


def counted_from(
    given: Mapping[str, Tensor], counting: Counting, modules: Mapping[str, nn.Module], checks: Checks
) -> dict[Place, Any]:
    """What is at the places, with numbers of each call in the place of those that are there, and with `given` in the
    place of tensors. What is asked is noted anew.
    """
    counting.asked = Asked()
    counting.stood.clear()
    counting.nodes.clear()
    at = itertools.count()

    def counted(part: Any, tensor: Tensor, place: Place) -> Counted | Tensor:
        number = next(at)
        if isinstance(part, Tensor):
            return tensor.clone()  # it may be written to
        formula = Formula(counting.asked.step(None, (number,)), frozenset((place,)))
        return Counted(part, formula, lambda: Number(tensor, checks), counting.asked)

    made: dict[Place, Any] = {}
    for place, value in zip(counting.places, counting.values(modules), strict=True):
        tensors = iter([given[name] for name in _named(place, value)])
        leaves, spec = pytree.tree_flatten(value)
        parts = [counted(leaf, next(tensors), place) if may_vary(leaf) else leaf for leaf in leaves]
        made[place] = held = pytree.tree_unflatten(parts, spec)
        counting.stood.append((place, held, _now(held)))
        if has_parts(held):
            counting.nodes |= {id(node): (place, within) for within, node in nodes_in(held)}
    counting.beside.begin(counting.asked, next(at), modules, checks)
    return counting.by_all_names(made)
