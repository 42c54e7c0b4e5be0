"""Calls of the module: what a call is, as far as a program hangs on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.trace.identity import asks_which
from autopar.trace.modules import check_dense, check_tensors, noted_on
from autopar.trace.records import both_by_key, has_both, make_known, why_no_batch
from autopar.trace.values import SCALARS

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
NUMBERS = (int, float)


@dataclass(frozen=True)
class Call:
    """Arguments, named ones by name, so that both spellings of a call are one. `key`: equal for calls that one program
    serves: structure, shapes, dtypes, which tensors are one, and the values of what is no tensor. `tensors`: in the
    order of `key`. `numbers`: path -> value of numbers that are part of the key. `shape`: structure, shapes and dtypes
    alone. `derivatives`: of what forward gives, those that are asked for in its place
    (`autopar.trace.derivatives.Derivative`). `given`: the arguments in the caller's own containers.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Hashable
    tensors: tuple[Tensor, ...]
    shape: Hashable
    numbers: dict[str, int | float]
    derivatives: tuple[Any, ...] = ()
    given: tuple[tuple[Any, ...], dict[str, Any]] = field(default_factory=lambda: ((), {}))


@dataclass
class _Reading:
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    numbers: dict[str, int | float] = field(default_factory=dict[str, "int | float"])


class Caller:
    """Makes calls of one forward, whose signature is read once. `varying`: paths of numbers that differ from call to
    call, which a program takes as tensors without dims; `wide`: whether those are of float64. `kinds`: the classes of
    its modules, which may ask whether two tensors are one.
    """

    def __init__(self, forward: Callable[..., Any], kinds: Iterable[type] = ()) -> None:
        self._asks_which = asks_which(kinds)
        self._signature = _signature_of(forward)
        self._kinds = {name: parameter.kind for name, parameter in self._signature.parameters.items()}
        self._takes_rest = inspect.Parameter.VAR_POSITIONAL in self._kinds.values()
        self.varying: set[str] = set()
        self.wide = False

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Raises TypeError where forward does not take these arguments, ValueError where one cannot be compared,
        PlanMismatch where one is a tensor that no plan takes.
        """
        try:
            positional, named = self.by_name(
                tuple(map(_of_python, args)), {name: _of_python(one) for name, one in kwargs.items()}
            )
        except TypeError as error:
            raise TypeError(f"the model's forward{self._signature} was called otherwise: {error}") from None
        given = positional, named
        if self.varying:
            positional = tuple(self._as_tensors(one, f"[{place}]") for place, one in enumerate(positional))
            named = {name: self._as_tensors(one, f"['{name}']") for name, one in named.items()}
        reading = _Reading()
        shape = tuple(_key(one, f"[{place}]", reading) for place, one in enumerate(positional))
        shape += tuple((name, _key(named[name], f"['{name}']", reading)) for name in sorted(named))
        numbers = tuple((path, type(value), value) for path, value in reading.numbers.items())
        key = (shape, numbers, first_places(reading.tensors) if self._asks_which else ())
        return Call(positional, named, key, tuple(reading.tensors), shape, reading.numbers, given=given)

    def by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with every argument that has a name passed by its name."""
        bound = self._signature.bind(*args, **kwargs)
        if self._takes_rest:
            return tuple(args), dict(kwargs)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            match self._kinds[name]:
                case inspect.Parameter.POSITIONAL_ONLY:
                    positional.append(value)
                case inspect.Parameter.VAR_KEYWORD:
                    named.update(value)
                case _:
                    named[name] = value
        return tuple(positional), named

    def _as_tensors(self, value: Any, path: str) -> Any:
        """Numbers at the paths that vary become tensors, which combine with those of any dim as numbers do."""
        if path in self.varying and isinstance(value, NUMBERS) and not isinstance(value, bool):
            floating = torch.float64 if self.wide else torch.float32
            return torch.tensor(value, dtype=floating if isinstance(value, float) else torch.int64)
        if type(value) is dict:
            return {key: self._as_tensors(part, f"{path}[{key!r}]") for key, part in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._as_tensors(part, f"{path}[{place}]") for place, part in enumerate(value))
        return value


def first_places(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Of each tensor the place of the first that is the same one."""
    first = dict[int, int]()
    return tuple(first.setdefault(id(one), place) for place, one in enumerate(tensors))


def _signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """As it may be called: a wrapper that says to be what it is wrapped around may take no arguments by name."""
    told, own = inspect.signature(forward), inspect.signature(forward, follow_wrapped=False)
    takes_names = inspect.Parameter.VAR_KEYWORD in {parameter.kind for parameter in own.parameters.values()}
    return told if takes_names else own


def _of_python(value: Any) -> Any:
    """A number of numpy's as one of Python's; anything else is itself."""
    return value.item() if isinstance(value, np.generic) else value


def with_argument(forward: Callable[..., Any], name: str) -> inspect.Signature:
    """The signature of a forward that takes one more named argument, for a trace."""
    signature = inspect.signature(forward)
    added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    return signature.replace(parameters=sorted([*signature.parameters.values(), added], key=lambda one: one.kind))


def by_name(forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `Caller.by_name`, of a forward that is called once."""
    return Caller(forward).by_name(args, kwargs)


def _key(value: Any, path: str, reading: _Reading) -> Hashable:
    if isinstance(value, Tensor):
        check_dense(value, f"argument {path}")
        reading.tensors.append(value)
        trains = ("trains",) if value.requires_grad else ()
        notes = noted_on(value).items()  # forward may ask for them (`autopar.trace.tensor_notes`)
        told = ((name, repr(note) if isinstance(note, SCALARS) else type(note)) for name, note in notes)
        return value.shape, value.dtype, *trains, *told
    if isinstance(value, NUMBERS) and not isinstance(value, bool):
        reading.numbers[path] = value
        return type(value)
    if isinstance(value, PLAIN):
        return type(value), value
    if has_both(value):
        pairs, context = both_by_key(value)
        return type(value), context, tuple(_key(part, path + pytree.keystr((key,)), reading) for key, part in pairs)
    if isinstance(value, Mapping):
        return type(value), tuple((key, _key(value[key], f"{path}[{key!r}]", reading)) for key in value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_key(part, f"{path}[{place}]", reading) for place, part in enumerate(value))
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype.str, value.shape, value.tobytes()
    make_known(value)
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:  # a registered container
        parts = tuple(_key(part, f"{path}[{place}]", reading) for place, part in enumerate(leaves))
        return type(value), str(spec), parts
    by_identity = type(value).__hash__ in (None, object.__hash__)
    if by_identity and not isinstance(value, (nn.Module, type, torch.ScriptObject)):
        why = why_no_batch(value)
        raise ValueError(
            f"argument {path} is a {type(value).__name__}, which cannot be compared between calls"
            f"{f' ({why})' if why else ''}; pass tensors, numbers, text, and lists, "
            "tuples or dicts of these (or make it a dataclass)"
        )
    return type(value), value


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """(path, leaf) of every argument, in a fixed order: positional first, keywords by name. Paths read `[0]`,
    `['x']`.
    """
    make_known((args, kwargs))
    paths, spec = pytree.tree_flatten_with_path((tuple(args), dict(sorted(kwargs.items()))))
    return [(pytree.keystr(path[1:]), leaf) for path, leaf in paths], spec


def dense_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """The same, of arguments and a model that can be planned. Raises PlanMismatch."""
    check_tensors(model)
    leaves, spec = flatten_inputs(args, kwargs)
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            check_dense(leaf, f"argument {path}")
    return leaves, spec


def shown(leaves: list[tuple[str, Any]]) -> str:
    """The inputs in words: `x float32[8, 31], y float32[8, 30]`; numbers, texts and nothing are left out."""
    told: list[str] = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            name = path[2:-2] if path.startswith("['") and path.endswith("']") and path.count("[") == 1 else path
            told.append(f"{name} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
    return ", ".join(told) or "none of which is a tensor"
