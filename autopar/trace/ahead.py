"""Functions that run ahead of each call, and not where forward calls them: what they may not hang on, nor change."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.trace.lines import line_here
from autopar.trace.modules import OF_EVERY_MODULE
from autopar.trace.values import snapshot

INSTEAD = (
    "draw it with torch (torch.rand), in a function that is given no tensors and returns numbers or arrays of one "
    "shape, or outside, and pass it as a tensor"
)
MOST = 256  # functions that one may call


def refuse_what_is_set(
    function: Any, modules: list[nn.Module], names: Set[str], in_place_of: Mapping[int, Any]
) -> None:
    """Raise TraceError where a function, which is given these modules, may read of them what forward has set: it runs
    ahead of that. `names`: of those attributes; `in_place_of`: id of what stands for a function -> that.
    """
    if names and (found := names & _names_in(function, modules, in_place_of)):
        raise TraceError(
            f"a function that draws random numbers{line_here()} reads self.{min(found)}, which forward sets ahead of "
            "it, and what is drawn is drawn before forward runs: pass what it needs as an argument"
        )


def _names_in(function: Any, modules: list[nn.Module], in_place_of: Mapping[int, Any]) -> set[str]:
    """The names in the code of a function, and of what it may call of these modules and of its file."""
    kinds = [kind for one in modules for kind in type(one).__mro__ if kind is not nn.Module]
    left, seen, names = [function], set[types.CodeType](), set[str]()
    while left and len(seen) < MOST:
        one = left.pop()
        for part in ("func", "fget", "__func__"):  # of partials, properties, methods
            one = getattr(one, part, None) or one
        one = in_place_of.get(id(one), one)
        codes, around = [getattr(one, "__code__", None)], getattr(one, "__globals__", {})
        while codes:
            if not isinstance(code := codes.pop(), types.CodeType) or code in seen:
                continue
            seen.add(code)
            names.update(code.co_names)
            codes += code.co_consts
            left += [held[name] for held in (*map(vars, kinds), around) for name in code.co_names if name in held]
    return names


@contextlib.contextmanager
def changing_nothing(given: Any, modules: list[nn.Module]) -> Iterator[None]:
    """Raise TraceError where a function that runs inside changes what it is given, or attributes of these modules, or
    draws from torch's generator, which forward draws from in its own order.
    """
    before, state = _held(given, modules), torch.default_generator.get_state()
    yield
    if not torch.equal(state, torch.default_generator.get_state()):
        torch.default_generator.set_state(state)
        raise TraceError(
            f"a function draws from Python's or numpy's generator and from torch's{line_here()}, and the one is done "
            "ahead of each call: draw from one of them there"
        )
    if _held(given, modules) != before:
        raise TraceError(
            f"a function that draws random numbers{line_here()} changes what it is given, or attributes of a module: "
            "have it return all that it makes (as random.sample(x, len(x)) and np.random.permutation do)"
        )


def _held(given: Any, modules: list[nn.Module]) -> Any:
    of_modules = [{name: value for name, value in vars(one).items() if name not in OF_EVERY_MODULE} for one in modules]
    return snapshot([given, of_modules])
