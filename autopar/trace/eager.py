"""What the model's code may ask of torch itself, and is told as it is told without autopar, while it is traced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autopar._compat import told_of_export
from autopar.errors import TraceError
from autopar.trace.lines import caller, line_here
from autopar.trace.values import is_torchs

# It writes for torch.export what cannot be traced otherwise (masks, caches), with the same numbers.
WRITES_FOR_EXPORT = f"{os.sep}transformers{os.sep}"
CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
SEEDS = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state", "fork_rng")


@contextlib.contextmanager
def as_it_runs(tells: Callable[[], bool]) -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling` and `is_exporting` say no, but to torch and, where `tells`, to what writes
    for it; what asks for the state of the generator, or sets it, is refused: operators of a program draw in each call.
    A module that is moved to a device stays where the plan has it, and one that is cast to what it is stays as it is.
    """
    refused: list[tuple[Any, str, Callable[..., Any]]] = [
        (where, name, vars(where)[name]) for where in (torch, torch.random) for name in SEEDS if name in vars(where)
    ]
    moves = {name: vars(nn.Module)[name] for name in ("to", "cpu", "cuda", *CASTS)}
    with told_of_export(lambda file: is_torchs(file) or (WRITES_FOR_EXPORT in file and tells())):
        for where, name, function in refused:
            setattr(where, name, _refusing(function))
        for name, move in moves.items():
            setattr(nn.Module, name, _staying(move, CASTS.get(name)))
        try:
            yield
        finally:
            for name, move in moves.items():
                setattr(nn.Module, name, move)
            for where, name, function in refused:
                setattr(where, name, function)


def _staying(moves: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *(value for name, value in kwargs.items() if name != "non_blocking")]
        given = given if dtype is None else [dtype]
        if all(isinstance(one, (str, torch.device)) or _is_cast_so(self, one) for one in given):
            return self
        return moves(self, *args, **kwargs)

    return to


def _is_cast_so(module: nn.Module, dtype: Any) -> bool:
    """Whether a cast to that would change nothing."""
    held = [one for one in (*module.parameters(), *module.buffers()) if one.is_floating_point() or one.is_complex()]
    return isinstance(dtype, torch.dtype) and all(one.dtype == dtype for one in held)


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    def seeds(*args: Any, **kwargs: Any) -> Any:
        if is_torchs(caller(1)):  # checkpoint keeps states of what it runs again
            return function(*args, **kwargs)
        raise TraceError(
            f"forward seeds the random generator, or asks for its state ({function.__name__}){line_here()}, and the "
            "operators of a program draw other numbers in each call: make what is to be the same in each call a "
            "buffer, or pass it as an argument, and seed before the call"
        )

    return seeds
