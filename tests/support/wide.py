"""Everything in float64: models from `transformers` cast to float32 inside, which would hide errors below 1e-7."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar._compat import TorchDispatchMode
from autopar.graph import Arg, Const, Graph, Node, TensorType


class Wide(TorchDispatchMode):
    """Inside, a cast to float32 casts to float64, and so does a factory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)


def widen(graph: Graph) -> Graph:
    """The same program with float64 in the place of float32."""
    return Graph(tuple(_wide_node(node) for node in graph.nodes), graph.results)


def _wide_node(node: Node) -> Node:
    outputs = tuple(None if t is None else TensorType(t.shape, _wide(t.dtype)) for t in node.outputs)
    return replace(
        node, args=_wide_arg(node.args), kwargs=tuple((k, _wide_arg(v)) for k, v in node.kwargs), outputs=outputs
    )


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float32" else dtype


def _wide_arg(arg: Arg) -> Arg:
    if isinstance(arg, Const):
        return Const(arg.kind, _wide(arg.value))
    if isinstance(arg, tuple):
        return tuple(_wide_arg(part) for part in arg)
    return arg
