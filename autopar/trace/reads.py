"""What a model's code reads and writes besides tensors while it is traced.

A trace holds for what its Python code saw. Modules are watched on the copy that is traced: methods that
stand in their classes note which attributes of their own are read and written. What is outside of modules is found by
`autopar.trace.settings`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.asked import Asked
from autopar.trace.builtin import types_of_counted
from autopar.trace.cached import computing_for_good
from autopar.trace.code import asking_of_packages, methods_of
from autopar.trace.configurations import Configurations
from autopar.trace.counted import Counting
from autopar.trace.drawn import Draws
from autopar.trace.formulas import Place
from autopar.trace.keys import Keys
from autopar.trace.left import Left, is_made
from autopar.trace.lines import line_here, line_outside_torch
from autopar.trace.lookups import Kept, Of
from autopar.trace.modules import FORWARD_HOOKS, OF_EVERY_MODULE, REGISTERED
from autopar.trace.names import nodes_in
from autopar.trace.records import is_state, leads_to, may_be_state, tensors_within
from autopar.trace.recurrent import WEIGHTS, weights_have_changed
from autopar.trace.settings import Settings
from autopar.trace.standing_in import StandIns
from autopar.trace.values import (
    COLLECTIONS,
    CONSTANT,
    CONTAINERS,
    DRAWING,
    IN_PLACE,
    MISSING,
    SCALARS,
    Change,
    few_in,
    has_grown,
    held_in,
    in_front,
    is_alike,
    is_grown_table,
    is_mine,
    is_noted_once,
    is_others,
    own_names,
    snapshot,
)
from autopar.trace.writes import OfModule, put

MAY_BE_SET = (*SCALARS, *CONTAINERS, types.FunctionType)  # what a script may set of a class, or for an instance


@dataclass
class Reads:
    """`attributes`: (module path, name) -> its value when it was first read, MISSING where there was none. `written`:
    likewise -> (what was there before the trace, what was written last, the line that wrote it). `contents`: snapshots
    of what may change in place, as it was first read. `names`: (where, name, value, a snapshot of it) of what functions
    and classes of the user's see outside the instance: class attributes, globals, variables of enclosing functions,
    and what is in objects that are found there. `inside`: what is read of configurations and other objects that modules
    hold. `anew`: attributes that forward makes a new list, dict or set of in each call. `classes`: those of modules,
    and what each has. `left`: what forward writes to these. `counting`: numbers that are arguments of the trace.
    `with_gradient`: buffers that forward sets to a tensor with one. `unregistered`: buffers that are none any more, as
    forward sets them to tensors of other shapes, or with a gradient that goes on. `outside`: tensors that are none of
    the trace, held so that no other has their ids, by which guards know them. `keys`: by which the model's code asks
    dicts; None: by any. `asked`: what forward asks its arguments; `draws`: what it draws outside of torch.
    `modules`: which it sets, and the line. `ahead`: what it has set ahead of an error, by name.
    """

    is_open: bool = False  # while forward runs, and not what torch does around it
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    written: dict[tuple[str, str], tuple[Any, Any, str]] = field(default_factory=dict)
    contents: dict[tuple[str, str], Any] = field(default_factory=dict)
    names: list[tuple[Mapping[str, Any], str, Any, Any]] = field(default_factory=list)
    inside: Configurations = field(default_factory=Configurations)
    classes: list[tuple[type, dict[str, Any]]] = field(default_factory=list)
    left: Left = field(default_factory=Left)
    counting: Counting = field(default_factory=Counting)
    anew: set[Place] = field(default_factory=set[Place])
    with_gradient: set[str] = field(default_factory=set[str])
    unregistered: set[Place] = field(default_factory=set[Place])
    caches: list[Any] = field(default_factory=list[Any])  # functions that keep what they gave
    outside: list[Tensor] = field(default_factory=list[Tensor])
    keys: Keys | None = None
    asked: Asked = field(default_factory=Asked)
    draws: Draws = field(default_factory=Draws)
    modules: dict[str, str] = field(default_factory=dict[str, str])
    ahead: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.inside.sees = self.left.see

    def _leading_to(self, objects: Sequence[Any]) -> set[Place]:
        """The attributes that hold one of these."""
        return {place for place, held in self.attributes.items() if any(leads_to(held, one) for one in objects)}

    def sets_module(self, path: str | None, name: str, value: Any) -> None:
        """That forward sets an attribute, which may be a module."""
        if path is not None and self.is_open and isinstance(value, nn.Module):
            self.modules[f"{path}.{name}" if path else name] = line_outside_torch(2)

    def deleted(self, path: str, name: str, was: Any) -> None:
        """That forward takes an attribute away."""
        before, *_ = self.written.pop((path, name), (was,))
        if before is not MISSING:  # else forward has put it there
            self.written[path, name] = before, MISSING, line_here().removeprefix(" at ")

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, it is we who look."""
        self.is_open, was = False, self.is_open
        try:
            yield
        finally:
            self.is_open = was

    def is_read(self, place: Mapping[str, Any], name: str) -> bool:
        """Whether a setting is read, or may be: of objects that were watched, one knows."""
        names = self.inside.read(place.holder) if isinstance(place, Of) else None
        return names is None or name in names

    def count(self, counting: Counting) -> None:
        """Have these numbers be arguments: that they are read is known, and guards need not look at them."""
        self.counting = counting
        self.attributes |= dict.fromkeys((*counting.places, *counting.others))

    def see_what_is_set_otherwise(self, had: Mapping[str, Mapping[str, Any]], modules: Mapping[str, nn.Module]) -> None:
        """Attributes that forward has set past `__setattr__` (`vars(self)["n"] = 1`): numbers, text and what holds
        such alone. `had`: what was there. They are written, and may have been read.
        """
        for path, module in modules.items():
            for name, value in vars(module).items():
                was = had[path].get(name, MISSING)
                if value is was or name in OF_EVERY_MODULE or (path, name) in self.written or name == "forward":
                    continue
                if not all(isinstance(leaf, SCALARS) for leaf in pytree.tree_leaves(value)) and not is_made(value):
                    continue  # recurrent layers keep lists of their weights
                self.written[path, name] = was, value, f"a line that sets {name} in the module's __dict__"
                self.attributes.setdefault((path, name), was)

    def of(self, originals: Mapping[int, Any]) -> None:
        """Let what is written be of the model, as `originals` tells of what was copied."""
        self.left.of(originals)
        memo = dict(originals)
        for place, (was, after, line) in self.written.items():
            if id(after) in originals:
                self.written[place] = was, originals[id(after)], line
            elif _holds_modules(after):
                self.written[place] = was, copy.deepcopy(after, memo), line
                self.anew.add(place)
            elif was is not after and not self.left.knows(after):
                self.anew.add(place)

    def see(self, place: Mapping[str, Any], name: str, value: Any) -> None:
        """That this value is found outside the instances."""
        value = self.draws.in_place_of.get(id(value), value)
        self.names.append((place, name, value, snapshot(value)))
        self.left.see(place, name, value)

    def see_of_class(self, kind: type, name: str) -> None:
        """That objects of this class have that from it, or from one that it is made of, until one in front has it."""
        owner = next(one for one in kind.__mro__ if name in vars(one))
        self.names += [(vars(one), name, MISSING, snapshot(MISSING)) for one in in_front(kind.__mro__, owner)]
        self.see(vars(owner), name, vars(owner)[name])
        behind = kind.__mro__[kind.__mro__.index(owner) + 1 :]
        for one in behind if is_mine(owner) else ():  # which its own may reach by super()
            if name in vars(one) and is_mine(one):
                self.see(vars(one), name, vars(one)[name])

    def changed(self, originals: Collection[int]) -> Change | None:
        """What the trace changed that is no attribute of a module: lists that grew, counters of the user's. Tables that
        only copies have more in (`originals`: by their ids) are none of it: those of the user's stay as they are.
        """
        for (path, name), was in self.contents.items():
            held = self.attributes[path, name]
            is_table = id(held) in originals and is_grown_table(was, held)
            if is_table and snapshot(held) != was and any(map(may_be_state, held_in(held))):
                self.counting.asked_for.add((path, name))  # what it makes once may be changed in each call
            if snapshot(held) != was and not is_table:
                self.counting.found.add((path, name))
                told = f"{type(held).__name__}: draw with torch" if isinstance(held, DRAWING) else type(held).__name__
                told = f"what is in self.{f'{path}.{name}' if path else name} ({told})"
                return Change(told, is_grown_table(was, held))
        for place, name, value, was in self.names:
            if not self.is_read(place, name) or isinstance(place, Kept):
                continue
            now = place.get(name, MISSING)
            if (now is value and not isinstance(value, IN_PLACE)) or callable(value):
                continue  # (functions that are others while a model is traced are so by our hand)
            if isinstance(value, Tensor) and now is not value and "__builtins__" not in place:
                continue  # one of the model's that functions hold, for which another stands now: no global
            if snapshot(now) != was and not is_noted_once(value, now) and not is_alike(value, now):
                is_table = has_grown(value, was, now)
                if now is not value and not is_table:
                    _put_back(place, name, value)
                if is_table and id(now) in originals:
                    continue
                return Change(f"{name}{_owner(place)}, which is no attribute of a module", is_table)
        for kind, had in self.classes:
            now = {name: value for name, value in vars(kind).items() if not name.startswith("__")}
            if written := sorted(name for name, value in now.items() if had.get(name, MISSING) is not value):
                for name in written:
                    type.__setattr__(kind, name, had[name]) if name in had else type.__delattr__(kind, name)
                return Change(f"{written[0]} of the class {kind.__name__}")
        change, of = self.inside.changed(originals)
        if change is not None:
            self.counting.found |= self._leading_to([of])
        for one in self.inside.counted():  # of what many modules share, as configurations, most is none that changes
            leading = self._leading_to([one])
            self.counting.asked_for |= leading if len(leading) == 1 else set()
        return change


def _owner(place: Mapping[str, Any]) -> str:
    """Of what class or module it is, in words."""
    if isinstance(place, Of):
        return f" (in an object of class {type(place.holder).__module__}.{type(place.holder).__name__})"
    return f" (in {place['__name__']})" if "__builtins__" in place and "__name__" in place else ""


def refuse(change: Change) -> NoReturn:
    raise TraceError(
        f"forward changes {change.told}, which a program does not do again at every call; return the values instead, "
        "set an attribute of the module to them (self.name = value), or make what adds up a buffer (register_buffer)"
    )


def _put_back(place: Any, name: str, value: Any) -> None:
    if isinstance(place, types.MappingProxyType):  # of a class, which is not written to by that
        return
    put(place, name, value)


@contextlib.contextmanager
def watching(model: nn.Module, reads: Reads, originals: Mapping[int, Any], given: Collection[type]) -> Iterator[None]:
    """Note in `reads` what is read of the modules of `model`, which is nobody else's, while the body runs.
    `originals`: id of what was copied for it -> that; `given`: classes of arguments.
    """
    # Of a module under several names torch's tracer gives objects that stand for it, and have its attributes.
    path_of = {id(vars(module)): path for path, module in model.named_modules()}
    modules = list(model.modules())
    kinds = dict.fromkeys(map(type, modules))
    held = dict.fromkeys([*(type(value) for module in modules for value in vars(module).values()), *given])
    settings, asking = Settings(methods_of([*kinds, *held])), asking_of_packages([*kinds, *held])
    hooks = [hook for module in modules for kind in FORWARD_HOOKS for hook in getattr(module, kind).values()]
    states = [value for value in reads.counting.values(dict(model.named_modules())) if is_state(value)]
    of_parts = [value for value in _held_by(modules) if not any(value is one for one in states)]
    settings.look([*(kind.forward for kind in kinds), *of_parts, *hooks], [*kinds, *held, *map(type, states)], hooks)
    reads.keys = settings.keys()
    for owner in settings.owners:
        if not hasattr(owner, "__dict__") or id(vars(owner)) not in path_of:
            reads.left.see_attributes(owner)
    reads.classes += [(kind, dict(vars(kind))) for kind in kinds]
    for found in settings.found:
        reads.see(*found)
    found = [value for _, _, value in settings.found]
    reads.counting.elsewhere = lambda: {
        id(originals.get(id(node), node)) for value in found for _, node in nodes_in(value)
    }
    stand_ins, seen = StandIns(("__getattribute__", "__setattr__", "__delattr__")), set[tuple[type, str]]()
    in_python = [kind for kind in kinds if not issubclass(kind, torch.jit.ScriptModule)]  # into those all is compiled
    methods = [_noting(kind, path_of, reads, seen) for kind in in_python]  # before any of them stands anywhere
    try:
        for kind, made in zip(in_python, methods, strict=True):
            stand_ins.put(kind, made)
        for value in settings.objects():
            # Of a mapping of a class of its own all counts; some of transformers' are ours while a model is traced.
            if not isinstance(value, COLLECTIONS) and not reads.inside.is_known(value):
                reads.inside.notes_reads_of(value, lambda: reads.is_open)
        reads.caches += settings.cached
        with (
            computing_for_good(reads.caches),
            types_of_counted(settings.asking + asking, reads.counting.beside.length, reads.counting.are_there),
        ):
            yield
    finally:
        reads.inside.release()
        stand_ins.restore()


def _held_by(modules: list[nn.Module]) -> Iterator[Any]:
    """What is in attributes of modules, and in lists and dicts there: functions are among them."""
    for module in modules:
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE:
                yield value
                if isinstance(value, (list, tuple, dict)):
                    yield from few_in(value)


def _noting(
    kind: type, path_of: Mapping[int, str], reads: Reads, seen_of_class: set[tuple[type, str]]
) -> list[Callable[..., Any]]:
    getting: Any = kind.__getattribute__
    setting: Any = kind.__setattr__
    deleting: Any = kind.__delattr__

    def __getattribute__(self: Any, name: str) -> Any:
        for one in [*getting(self, name)] if name == "__dict__" and _is_asked_by_user(reads) else []:  # `vars(self)`
            __getattribute__(self, one)
        if not reads.is_open or name in OF_EVERY_MODULE or name.startswith("__"):
            return getting(self, name)
        if name == "_weights_have_changed" and isinstance(self, nn.RNNBase):
            return partial(weights_have_changed, self)
        path = path_of.get(id(own := getting(self, "__dict__")))
        if path is None:
            return getting(self, name)
        if name in own:
            if holds_references(own[name]):
                pass
            elif (path, name) not in reads.attributes and (path, name) not in reads.written:
                reads.inside.watch(own[name], lambda: reads.is_open)
                reads.attributes[path, name] = own[name]
                with reads.closed():
                    reads.counting.reads((path, name), own[name])
                is_content = isinstance(own[name], (*IN_PLACE, tuple)) and not isinstance(own[name], Tensor)
                if is_content and not reads.left.knows(own[name]):  # by another name, from before
                    reads.contents[path, name] = snapshot(own[name])
                    reads.left.see(OfModule(path), name, own[name])
        elif not any(name in own.get(kept, ()) for kept in REGISTERED):
            owner = next((one for one in type(self).__mro__ if name in vars(one)), None)
            if owner is None or (owner is not nn.Module and _may_be_set(owner, name)):
                if (path, name) not in reads.written:
                    reads.attributes.setdefault((path, name), MISSING)
                if owner is not None and (type(self), name) not in seen_of_class:
                    seen_of_class.add((type(self), name))
                    reads.see_of_class(type(self), name)
        return getting(self, name)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        path = path_of.get(id(own := getting(self, "__dict__")))
        was = own.get(name, MISSING)
        setting(self, name, value)
        reads.sets_module(path, name, value)
        if path is not None and reads.is_open and own.get(name, MISSING) is value:  # no property's
            is_tensor_slot = any(name in own.get(kept, ()) for kept in REGISTERED)
            is_new = was is not value or all(isinstance(leaf, CONSTANT) for leaf in pytree.tree_leaves(value))
            if is_new and not (name in OF_EVERY_MODULE or is_tensor_slot or _notes_weights(self, name, value)):
                before, _, _ = reads.written.get((path, name), (was, None, ""))
                reads.written[path, name] = before, value, line_outside_torch(1)

    def __delattr__(self: Any, name: str) -> None:
        was = getting(self, "__dict__").get(name, MISSING)
        deleting(self, name)
        path = path_of.get(id(getting(self, "__dict__")))
        if path is None or not reads.is_open or was is MISSING:
            return
        reads.deleted(path, name, was)

    return [__getattribute__, __setattr__, __delattr__]


def _is_asked_by_user(reads: Reads) -> bool:
    return reads.is_open and not is_others(sys._getframe(2).f_code.co_filename)


def _may_be_set(owner: type, name: str) -> bool:
    """Whether a script may set what a class has, or give an object another one."""
    found = vars(owner)[name]
    return isinstance(found, MAY_BE_SET) or (is_mine(owner) and not inspect.isdatadescriptor(found))


def holds_references(value: Any) -> bool:
    """Whether it is a list of weak references: torch's recurrent layers note so which parameters they have flattened,
    and note it anew where they find others, as any trace does.
    """
    return isinstance(value, list) and any(isinstance(part, weakref.ref) for part in value)


def _notes_weights(module: nn.Module, name: str, value: Any) -> bool:
    """Whether parameters are noted, or what a recurrent layer makes of them; also what looks at modules (torch's
    transforms note so what they have made), which are those of the trace.
    """
    if isinstance(value, weakref.ref) or (name == WEIGHTS and isinstance(module, nn.RNNBase)):
        return True
    return isinstance(value, list) and (
        holds_references(value) or (bool(value) and all(isinstance(part, nn.Parameter) for part in value))
    )


def _holds_modules(value: Any) -> bool:
    """Whether it is an object that forward has made with modules in it, which are those of the trace."""
    held = (own_names(value) or {}).values() if not isinstance(value, (Tensor, nn.Module, types.FunctionType)) else ()
    return any(isinstance(part, nn.Module) for part in held) and not tensors_within(value)
