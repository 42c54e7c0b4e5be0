"""What stands in the code of functions: names, and where they are looked for."""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cached_property, partial, partialmethod, singledispatchmethod
from typing import Any

import torch

from autopar.trace.values import is_installed, is_torchs

OF_A_FUNCTION = (partial, partialmethod, cached_property, singledispatchmethod)
CODE = (types.FunctionType, types.MethodType, classmethod, staticmethod, property, *OF_A_FUNCTION)
TYPES = frozenset(("type", "int", "float"))
# Functions of Python that code asks of numbers, of what stands for tensors, and of lists that forward appends to.
ASKING = frozenset(("len", "sum", "min", "max", "isinstance"))
FUNCTIONS = 2000  # that are looked at, at most
BY_TEXT = frozenset(("getattr", "hasattr", "attrgetter", "vars", "__dict__"))
TAKES_TYPES = frozenset(("dtype", "to", "type", "astype", "view"))  # torch and numpy ask for those of Python
TYPED_IN = ("<stdin>", "<string>", "<ipython", "<console>", "<python")  # code of no file, that somebody wrote
FLAGS: dict[str, Callable[[], Any]] = {  # of torch, that forward may ask for
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "benchmark": lambda: torch.backends.cudnn.benchmark,
}


def functions_of(value: Any) -> list[types.FunctionType]:
    """The function that a method, a property or the like is of, and those that it is wrapped around
    (`functools.wraps`), from outside to inside; none where it is no code of Python's.
    """
    value = value.fget if isinstance(value, property) else value
    value = value.func if isinstance(value, OF_A_FUNCTION) else value
    value = value.__func__ if isinstance(value, (types.MethodType, classmethod, staticmethod)) else value
    found: list[types.FunctionType] = []
    while value is not None and not any(value is one for one in found):
        if isinstance(value, types.FunctionType):
            found.append(value)
        value = inspect.getattr_static(value, "__wrapped__", None)
    return found


def names_of(code: types.CodeType) -> Iterator[str]:
    """All names that stand in code."""
    for part in codes(code):
        yield from part.co_names


def asked_of(code: types.CodeType) -> set[str]:
    """The names that code may look up by text that stands there (`getattr(config, "weight", 1.0)`, or one of the names
    that a loop goes over).
    """
    parts = [*codes(code)]
    if not any(BY_TEXT & {*part.co_names} for part in parts):
        return set()
    constants = [constant for part in parts for constant in part.co_consts]
    constants += [each for one in constants if isinstance(one, (tuple, frozenset)) for each in one]
    return {one for one in constants if isinstance(one, str) and one.isidentifier()}


def variables_of(code: types.CodeType) -> set[str]:
    """The variables of the environment that code may ask for: the text in it, where it asks for any."""
    parts = [*codes(code)]
    if not any({"environ", "getenv"} & {*part.co_names} for part in parts):
        return set()
    return {one for part in parts for one in part.co_consts if isinstance(one, str) and one.isidentifier()}


def loggers_of(function: types.FunctionType) -> list[logging.Logger]:
    """Those that it may ask for by name (`logging.getLogger(__name__)`), of those that are there."""
    parts = [*codes(function.__code__)]
    if not any("getLogger" in part.co_names for part in parts):
        return []
    named = {one for part in parts for one in part.co_consts if isinstance(one, str)}
    known = logging.Logger.manager.loggerDict
    found = (known.get(name) for name in sorted({*named, str(function.__globals__.get("__name__"))}))
    return [logging.getLogger(), *(one for one in found if isinstance(one, logging.Logger))]


def globals_of(code: types.CodeType, *how: str) -> Iterator[str]:
    """Of the names in code, those of variables outside of all functions that are read and written, or used in a way."""
    for part in codes(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in (how or ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")):
                yield instruction.argval


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code, and that of functions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def needs_types(code: types.CodeType) -> bool:
    """Whether it may compare types by identity with one of `TYPES` (`type(x) is int`, `case float():`), or give one to
    torch (`x.to(float)`).
    """
    for part in codes(code):
        named = {*part.co_names, *(name for one in part.co_consts if isinstance(one, tuple) for name in one)}
        instructions = [*dis.get_instructions(part)]
        for place, one in enumerate(instructions):
            if one.opname == "LOAD_GLOBAL" and one.argval in TYPES:
                is_called = bool((one.arg or 0) & 1)
                if not is_called and named & TAKES_TYPES:
                    return True
                near = {other.opname for other in instructions[place : place + 4]}
                if near & {"IS_OP", "MATCH_CLASS"}:
                    return True
    return False


def asks_for_nothing(value: Any) -> bool:
    """Whether a function has no parameters."""
    functions = functions_of(value)
    return bool(functions) and not inspect.signature(functions[-1]).parameters


def is_torchs_code(code: types.CodeType) -> bool:
    return is_torchs(code.co_filename) and not code.co_filename.startswith(TYPED_IN)


def methods_of(kinds: Iterable[type]) -> Mapping[str, list[Any]]:
    """Name -> the methods and properties that classes of the user's have by that name: of modules, and of what these
    hold.
    """
    found: dict[str, list[Any]] = {}
    for kind in dict.fromkeys(one for made in kinds for one in made.__mro__):
        for name, value in vars(kind).items():
            calls = functions_of(value)
            if any(not (is_torchs_code(call.__code__) or is_installed(call.__code__.co_filename)) for call in calls):
                found.setdefault(name, []).append(calls[0])
    return found


def asking_of_packages(kinds: Iterable[type]) -> list[tuple[dict[str, Any], Set[str]]]:
    """Globals of the methods of installed classes, and of installed functions that these call, with what they name of
    `ASKING`.
    """
    every = dict.fromkeys(one for kind in kinds for one in kind.__mro__)
    left = [one for kind in every for value in vars(kind).values() for one in functions_of(value)]
    done, found = set[types.CodeType](), dict[int, tuple[dict[str, Any], set[str]]]()
    while left and len(done) < FUNCTIONS:
        function = left.pop()
        code = function.__code__
        if code in done or is_torchs_code(code) or not is_installed(code.co_filename):
            continue
        done.add(code)
        names, held = _all_names_of(code), function.__globals__
        if here := names & ASKING:
            found.setdefault(id(held), (held, set()))[1].update(here)
        for value in [held[name] for name in names & held.keys()]:
            of_module = vars(value) if isinstance(value, types.ModuleType) else {}
            left += (one for one in (value, *map(of_module.get, names)) if isinstance(one, types.FunctionType))
    return [*found.values()]


@functools.lru_cache(maxsize=2**14)
def _all_names_of(code: types.CodeType) -> frozenset[str]:
    return frozenset(names_of(code))
