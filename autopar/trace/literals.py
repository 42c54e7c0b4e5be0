"""Tensors that forward makes of Python's numbers alone: points in time, lengths of levels. What they are is no secret.

Solvers check that their points in time rise, and step from one to the next; a trace, whose tensors have no values,
could not say. Such tensors are computed beside the trace, and a question to one is answered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar._compat import outside_modes, pytree
from autopar.trace.origins import PURE, tensors_in, writes_in_place
from autopar.trace.reads import SCALARS
from autopar.trace.rows import ELEMENTWISE

MOST = 4096  # elements
CPU, DEVICES = torch.device("cpu"), ("cpu", "cuda", "meta")
MADE = frozenset(("tensor", "arange", "linspace", "zeros", "ones", "full", "eye"))
MORE = frozenset(("unbind", "select", "diff", "flip", "cumsum", "mean", "prod", "cat", "stack"))
FOLLOWED = MADE | PURE | ELEMENTWISE | MORE
# What these make may be the very memory of what they are given.
CASTS = frozenset(
    ("to", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool", "detach", "contiguous")
)
FRESH = ELEMENTWISE - CASTS - {"pos"}
ASKS = frozenset(("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "equal", "allclose", "is_nonzero"))


class Literals:
    """What is known of one forward. What writes to such a tensor, or makes a tensor of one and is none of the functions
    that are followed (it may be a look at the same memory), makes all unknown.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # id -> the tensor of the trace, and what it is

    def answer(self, func: Any, args: Any, kwargs: Any) -> bool | float | complex | list[Any] | None:
        """What `func` asks of known tensors; None where it asks nothing, or of others."""
        if getattr(func, "__name__", "") not in ASKS or not self._are_known(args, kwargs):
            return None
        return self._run(func, args, kwargs)

    def made(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """`func` gave `result`; call it behind every function of torch."""
        name = getattr(func, "__name__", "")
        if not self._known and name not in MADE:
            return
        given = tensors_in((args, kwargs))
        if writes_in_place(name, kwargs):
            self._forget(tensors_in((args[:1], kwargs.get("out"))))
        elif name.strip("_") in FOLLOWED and self._are_known(args, kwargs) and (given or name in MADE):
            self._keep(func, args, kwargs, result)
        elif name.strip("_") not in FRESH and tensors_in(result):
            self._forget(given)

    def _forget(self, given: list[Tensor]) -> None:
        if any(id(one) in self._known for one in given):
            self._known.clear()

    def _keep(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = tensors_in(result)
        if sum(one.numel() for one in made) > MOST:
            return self._forget(tensors_in((args, kwargs)))
        for one, real in zip(made, tensors_in(self._run(func, args, kwargs)), strict=True):
            self._known[id(one)] = one, real

    def _are_known(self, args: Any, kwargs: Any) -> bool:
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda part: isinstance(part, slice))
        return all(
            id(one) in self._known if isinstance(one, Tensor) else isinstance(one, (*SCALARS, slice, type(Ellipsis)))
            for one in leaves
        )

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The function of what the tensors are, on the CPU: the device that they are for may not be there."""
        given = {name: value for name, value in kwargs.items() if name != "device"}
        args, given = pytree.tree_map_only(Tensor, lambda one: self._known[id(one)][1], (args, given))
        args = pytree.tree_map(lambda one: CPU if _is_device(one) else one, args)
        with outside_modes(), torch.no_grad():
            return func(*args, **given)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in DEVICES)
