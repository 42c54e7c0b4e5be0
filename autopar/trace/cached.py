"""Functions that keep what they have given (`functools.lru_cache`): what these are asked for the first time while a
model is traced they give for good, so it has to be real, as the model's own first call would have left it there.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from autopar._compat import outside_modes, pytree

CALL = "what is called"


@contextlib.contextmanager
def computing_for_good(cached: Iterable[Any]) -> Iterator[None]:
    """Within it these functions compute outside of any trace, where they are not given tensors of it."""
    with contextlib.ExitStack() as stack:
        for one in cached:
            if isinstance(function := getattr(one, "__wrapped__", None), types.FunctionType):
                stack.enter_context(_replaced(function, one.cache_clear))
        yield


@contextlib.contextmanager
def _replaced(function: types.FunctionType, forget: Callable[[], None]) -> Iterator[None]:
    code = function.__code__
    original = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    is_traced = False

    def computed(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_traced
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            with contextlib.suppress(Exception), outside_modes():  # what fails here fails again, where it is told
                made = original(*args, **kwargs)
                if not any(_is_traced(leaf) for leaf in pytree.tree_leaves(made)):
                    return made
        is_traced = True
        return original(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        function: Any = "what is called"
        return function(*args, **kwargs)

    # Nothing else stands between a cache and its function: the code of it is what can be another for a while.
    constants = tuple(computed if one == CALL else one for one in call.__code__.co_consts)
    function.__code__ = call.__code__.replace(co_consts=constants, co_freevars=code.co_freevars)
    try:
        yield
    finally:
        function.__code__ = code
        if is_traced:
            forget()


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) not in (Tensor, Parameter)
