"""What a model's code reads and writes besides tensors while it is traced.

A trace holds for what its Python code saw. Modules are watched on the copy that is traced: each becomes an instance of
a subclass that notes which attributes of its own are read and written. What functions of the user's see of their module
and of enclosing functions is read off their code, as far as it is plain numbers and text.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import enum
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.trace.configurations import Configurations, Unannounced
from autopar.trace.modules import REGISTERED

MISSING = object()

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, np.ndarray)
# What every module has; `training` alone says something about what forward computes.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
FUNCTIONS = 2000  # of the user's code are looked at, at most


@dataclass
class Reads:
    """`attributes`: (module path, name) -> its value when it was first read, MISSING where there was none. `written`:
    likewise -> (what was there before the trace, what was written last, the line that wrote it). `contents`: snapshots
    of what may change in place, as it was first read. `names`: (where, name, value) of what functions and classes of
    the user's see outside the instance: class attributes, globals, variables of enclosing functions. `inside`: what
    is read of configurations and other objects that modules hold.
    """

    is_open: bool = False  # while forward runs, and not what torch does around it
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    written: dict[tuple[str, str], tuple[Any, Any, str]] = field(default_factory=dict)
    contents: dict[tuple[str, str], Any] = field(default_factory=dict)
    names: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    inside: Configurations = field(default_factory=Configurations)

    def changed_inside(self) -> list[str]:
        """Attributes whose contents the trace changed: lists that grew, and the like."""
        return [
            f"{path}.{name}" if path else name
            for (path, name), was in self.contents.items()
            if snapshot(self.attributes[path, name]) != was
        ]


@contextlib.contextmanager
def watching(model: nn.Module, reads: Reads) -> Iterator[None]:
    """Note in `reads` what is read of the modules of `model`, which is nobody else's, while the body runs."""
    classes: dict[int, type] = {}
    watched: dict[type, type] = {}
    path_of = {id(module): path for path, module in model.named_modules()}
    modules = list(model.modules())
    for module in modules:
        kind = type(module)
        if kind not in watched:
            watched[kind] = _watched(kind, path_of, reads)
        classes[id(module)] = kind
        with contextlib.suppress(TypeError):  # a scripted module: its attributes are compiled in
            module.__class__ = watched[kind]
    held = dict.fromkeys(type(value) for module in modules for value in vars(module).values())
    _names_seen({kind.forward for kind in watched}, _methods_of([*watched.values(), *held]), reads)
    try:
        yield
    finally:
        for module in modules:
            if type(module) in watched.values():
                module.__class__ = classes[id(module)]


def _watched(kind: type, path_of: Mapping[int, str], reads: Reads) -> type:
    seen_of_class: set[str] = set()

    def __getattribute__(self: Any, name: str) -> Any:
        if not reads.is_open or name in OF_EVERY_MODULE or name.startswith("__"):
            return super(made, self).__getattribute__(name)
        own = super(made, self).__getattribute__("__dict__")
        path = path_of.get(id(self))
        if path is not None and name in own:
            if holds_references(own[name]):
                pass
            elif (path, name) not in reads.attributes and (path, name) not in reads.written:
                reads.inside.watch(own[name], lambda: reads.is_open)
                reads.attributes[path, name] = own[name]
                if isinstance(own[name], (list, dict, set)):
                    reads.contents[path, name] = snapshot(own[name])
        elif path is not None and not any(name in own.get(kept, ()) for kept in REGISTERED):
            owner = next((one for one in kind.__mro__ if name in vars(one)), None)
            if owner is None or isinstance(vars(owner)[name], (*SCALARS, *CONTAINERS)):
                if (path, name) not in reads.written:
                    reads.attributes.setdefault((path, name), MISSING)
                if owner is not None and name not in seen_of_class:
                    seen_of_class.add(name)
                    reads.names.append((vars(owner), name, vars(owner)[name]))
        return super(made, self).__getattribute__(name)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        path = path_of.get(id(self))
        own = super(made, self).__getattribute__("__dict__")
        is_tensor_slot = any(name in own.get(kept, ()) for kept in REGISTERED)
        is_new = own.get(name, MISSING) is not value
        is_ours = name in OF_EVERY_MODULE or is_tensor_slot or _looks_at_parameters(value)
        if reads.is_open and path is not None and is_new and not is_ours:
            before, _, _ = reads.written.get((path, name), (own.get(name, MISSING), None, ""))
            reads.written[path, name] = before, value, _line_outside_torch()
        super(made, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        super(made, self).__delattr__(name)
        key = path_of.get(id(self), ""), name
        if reads.is_open and key in reads.written and reads.written[key][0] is MISSING:
            del reads.written[key]  # forward has put it there, and has taken it away

    body = {"__getattribute__": __getattribute__, "__setattr__": __setattr__, "__delattr__": __delattr__}
    made: Any = type(kind.__name__, (Unannounced, kind), body)
    made.__qualname__, made.__module__ = kind.__qualname__, kind.__module__
    return made


def holds_references(value: Any) -> bool:
    """Whether it is a list of weak references: torch's recurrent layers note so which parameters they have flattened,
    and note it anew where they find others, as any trace does.
    """
    return isinstance(value, list) and any(isinstance(part, weakref.ref) for part in value)


def _looks_at_parameters(value: Any) -> bool:
    return isinstance(value, list) and (
        holds_references(value) or (bool(value) and all(isinstance(part, nn.Parameter) for part in value))
    )


def _line_outside_torch() -> str:
    frame = sys._getframe(2)
    while frame is not None and is_torchs(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


_TORCH = str(Path(torch.__file__).parent)
_STANDARD = str(Path(random.__file__).parent)


def is_torchs(file: str) -> bool:
    """Whether a source file is torch's, Python's own or ours, as far as its names are not the user's to change."""
    return file.startswith((_TORCH, "<")) or (file.startswith(_STANDARD) and "site-packages" not in file)


class Cell(dict[str, Any]):
    """A variable of an enclosing function, found by its name as a global is."""

    def __init__(self, cell: types.CellType) -> None:
        super().__init__()
        self._cell = cell

    def get(self, key: str, default: Any = None) -> Any:
        return self._cell.cell_contents


def _methods_of(kinds: Iterable[type]) -> Mapping[str, list[Any]]:
    """Name -> the methods and properties that classes of the user's have by that name: of modules, and of what these
    hold.
    """
    found: dict[str, list[Any]] = {}
    for kind in dict.fromkeys(one for made in kinds for one in made.__mro__):
        for name, value in vars(kind).items():
            call = _plain(value.fget if isinstance(value, property) else value)
            if call is not None and not is_torchs(call.__code__.co_filename) and not _is_installed(call):
                found.setdefault(name, []).append(call)
    return found


def _is_installed(function: types.FunctionType) -> bool:
    return "site-packages" in function.__code__.co_filename


def _names_seen(functions: set[Any], methods: Mapping[str, list[Any]], reads: Reads) -> None:
    """What may change of the globals and enclosing variables that functions name, and those functions that they name,
    `methods` among them: numbers, text, tensors, arrays, lists and the like.
    """
    left, done = [*functions], set[types.CodeType]()
    known: set[tuple[int, str]] = set()

    def see(place: Mapping[str, Any], name: str, value: Any) -> None:
        if isinstance(value, (*SCALARS, Tensor, np.ndarray, list, dict, set)):
            if (id(place), name) not in known:
                known.add((id(place), name))
                reads.names.append((place, name, value))
        else:
            left.append(value)

    while left and len(done) < FUNCTIONS:
        function = _plain(left.pop())
        if function is None or function.__code__ in done or is_torchs(function.__code__.co_filename):
            continue
        done.add(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not filled yet
                see(Cell(cell), name, cell.cell_contents)
        is_installed = _is_installed(function)  # whose tables nobody changes
        names = set(_names_of(function.__code__))
        left += (call for name in names & methods.keys() for call in methods[name])
        read: set[str] | None = None
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if is_installed and isinstance(value, (list, dict, set, np.ndarray)):
                continue
            if not isinstance(value, (types.ModuleType, types.FunctionType, type)):
                read = set(_globals_of(function.__code__)) if read is None else read
                if name not in read:  # but of an attribute: `self.loss`, in a script that calls its loss so
                    continue
            if (inside := _inside(value)) is None:
                see(function.__globals__, name, value)
            else:
                for part in names & inside.keys():
                    see(inside, part, inside[part])


def is_users_class(value: Any) -> bool:
    """Whether it is a class of the user's that settings may be kept in."""
    if not isinstance(value, type) or issubclass(value, (nn.Module, Tensor, torch.autograd.Function, enum.Enum)):
        return False
    file = getattr(sys.modules.get(value.__module__), "__file__", None) or "<"
    return value.__module__ == "__main__" or not (is_torchs(file) or "site-packages" in file)


def _inside(value: Any) -> Mapping[str, Any] | None:
    """The names of a module or class of the user's, or of a plain object such as an argparse.Namespace."""
    if isinstance(value, types.ModuleType):
        return None if is_torchs(getattr(value, "__file__", None) or "<") else vars(value)
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    if is_users_class(value):
        return vars(value)
    if isinstance(value, (type, types.FunctionType, nn.Module, Tensor)) or not hasattr(value, "__dict__"):
        return None
    return None if is_torchs(getattr(sys.modules.get(type(value).__module__), "__file__", None) or "") else vars(value)


def _names_of(code: types.CodeType) -> Iterator[str]:
    for part in _codes(code):
        yield from part.co_names


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Of the names in code, those of variables that are read from outside of all functions."""
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield instruction.argval


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code, and that of functions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _plain(value: Any) -> types.FunctionType | None:
    value = getattr(value, "__wrapped__", value)
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def snapshot(value: Any, depth: int = 3) -> Any:
    """Something that equals another snapshot where two values mean the same to a program."""
    match value:
        case nn.Parameter():  # its values are no constants of a program
            return id(value)
        case Tensor():
            return id(value), 0 if value.is_inference() else value._version
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case list() | tuple() if depth:
            return type(value), [snapshot(part, depth - 1) for part in value]
        case dict() if depth:
            return [(key, snapshot(part, depth - 1)) for key, part in value.items()]
        case set() | frozenset():
            return type(value), frozenset(map(_hashed, value))
        case _ if isinstance(value, SCALARS):
            return type(value), repr(value) if isinstance(value, float) else value
        case _:
            return id(value)


def _hashed(value: Any) -> Any:
    return (type(value), value) if isinstance(value, SCALARS) else id(value)


def line_that_draws(run: Callable[[], object]) -> str | None:
    """Run, and name the first line of the user's that takes a number from Python's or numpy's own random generator."""
    found: list[str] = []
    at: list[tuple[str, int]] = []
    states = [_state()]

    def step(frame: types.FrameType, event: str, arg: Any) -> Any:
        if is_torchs(frame.f_code.co_filename) or found:
            return None
        now = _state()
        if now != states[-1] and at:
            file, number = at[-1]
            found.append(f"{file}:{number}")
        states[-1] = now
        if event == "line":
            at.append((frame.f_code.co_filename, frame.f_lineno))
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        run()
    finally:
        sys.settrace(before)
    return found[0] if found else None


def _state() -> tuple[int, int]:
    name, keys, place, *_ = np.random.get_state()
    return hash(random.getstate()), hash((name, keys.tobytes(), place))  # type: ignore[union-attr]


def random_state() -> tuple[int, int]:
    """That of Python's and numpy's own generators, to compare."""
    return _state()
