"""Everything in float64: models from `transformers` cast to float32 inside, which would hide errors below 1e-7.

Complex numbers are of two such numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar._compat import TorchDispatchMode
from autopar.ir.graph import Arg, Const, Graph, Node, TensorType

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
WIDER_NAMES = {"float32": "float64", "complex64": "complex128"}


class Wide(TorchDispatchMode):
    """Inside, a cast to float32 casts to float64, and so does a factory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **kwargs)


def _wider(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def widen(graph: Graph) -> Graph:
    """The same program with float64 in the place of float32."""
    return Graph(tuple(_wide_node(node) for node in graph.nodes), graph.results)


def _wide_node(node: Node) -> Node:
    outputs = tuple(None if t is None else TensorType(t.shape, _wide(t.dtype)) for t in node.outputs)
    return replace(
        node, args=_wide_arg(node.args), kwargs=tuple((k, _wide_arg(v)) for k, v in node.kwargs), outputs=outputs
    )


def _wide(dtype: str) -> str:
    return WIDER_NAMES.get(dtype, dtype)


def _wide_arg(arg: Arg) -> Arg:
    if isinstance(arg, Const):
        return Const(arg.kind, _wide(arg.value))
    if isinstance(arg, tuple):
        return tuple(_wide_arg(part) for part in arg)
    return arg


def in_double(value: Tensor) -> Tensor:
    """Real and complex numbers in double precision, others as they are."""
    return as_double(value) if value.is_floating_point() or value.is_complex() else value


def as_double(value: Tensor) -> Tensor:
    """Any numbers as numbers in double precision, which are complex where they were."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)
