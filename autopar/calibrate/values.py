"""Values to measure with: random, and valid where they say places in another tensor.

What an operator takes depends on shapes, hardly on values; but an index out of range is an error on a CPU and the end
of the CUDA context. So integers that are known to be places are random within range, all others are zeros, which are
valid everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import RANDOM_STATE, Arg, Graph, Node, Ref, TensorType
from autopar.ir.work import VIEWS

# operator -> (position of the tensor of places among its args, position of the table, the table's dim: a number, or
# "at 1" for the dim that the argument at that position names)
PLACES: dict[str, tuple[int, int, int | str]] = {
    "aten.embedding.default": (1, 0, 0),
    "aten.index_select.default": (2, 0, "at 1"),
    "aten.gather.default": (2, 0, "at 1"),
    "aten.scatter.src": (2, 0, "at 1"),
    "aten.scatter.value": (2, 0, "at 1"),
    "aten.scatter_add.default": (2, 0, "at 1"),
    "aten.nll_loss_forward.default": (1, 0, -1),
    "aten.nll_loss_backward.default": (2, 1, -1),
    "aten.nll_loss2d_forward.default": (1, 0, 1),
    "aten.nll_loss2d_backward.default": (2, 1, 1),
}
# Operators that may stand between an input of the model and the operator that uses it as places.
PASSING = {
    *VIEWS, "aten.clone.default", "aten._to_copy.default", "aten.constant_pad_nd.default", "aten.unsqueeze.default",
    "aten.squeeze.dim", "aten.reshape.default", "aten.contiguous.default", "aten.alias.default",
}  # fmt: skip

# Sums of squares, as torch's optimizers name them.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
MET = 1e-8  # little beside a square that matters, much beside zero


def as_trained(optimizer: torch.optim.Optimizer) -> None:
    """Give its states the values of an optimizer that has met every row of every table.

    As long as it has not, most second moments of an embedding are zeros, of which MKL's square root takes five times
    as long as of other numbers; a few steps on one batch would time that.
    """
    with torch.no_grad():
        for state in optimizer.state.values():
            for name in SECOND_MOMENTS:
                if isinstance(found := state.get(name), Tensor):
                    found.add_(complex(MET, MET) if found.is_complex() else MET)


def bounds_of(op: str, args: Sequence[Arg], types: Sequence[TensorType]) -> dict[int, int]:
    """Operand -> its values are places below this. `args` hold `Ref("", i)` for operand i, of `types[i]`."""
    if op == "aten.embedding_dense_backward.default":
        return {1: int(args[2])}
    if op in ("aten.index.Tensor", "aten.index_put.default", "aten._unsafe_index.Tensor"):
        shape, places = types[args[0].index].shape, args[1]
        return {ref.index: shape[dim] for dim, ref in enumerate(places) if isinstance(ref, Ref)}
    if op == "aten.max_pool2d_with_indices_backward.default":
        height, width = types[args[1].index].shape[-2:]
        return {args[7].index: height * width}
    if op not in PLACES:
        return {}
    at, table_at, dim = PLACES[op]
    shape = types[args[table_at].index].shape
    if isinstance(dim, str):
        dim = int(args[int(dim.removeprefix("at "))])
    return {args[at].index: shape[dim] if shape else 1}


def input_bounds(graph: Graph) -> dict[str, int]:
    """Node name of a whole-number input -> its values are places below this, as far as its readers tell."""
    below: dict[str, int] = {}
    source_of: dict[Ref, str] = {}
    for node in graph.nodes:
        if node.op == "input":
            source_of[Ref(node.name)] = node.name
        refs = node.operands
        if not any(ref in source_of for ref in refs):
            continue
        if node.op in PASSING and refs[0] in source_of:
            source_of |= {Ref(node.name, index): source_of[refs[0]] for index in range(len(node.outputs))}
        for place, bound in bounds_of(node.op, _numbered(node), [graph.type_of(ref) for ref in refs]).items():
            if (name := source_of.get(refs[place])) is not None:
                below[name] = min(bound, below.get(name, bound))
    return below


def _numbered(node: Node) -> tuple[Arg, ...]:
    count = iter(range(len(node.operands)))

    def number(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref("", next(count))
        return tuple(number(part) for part in arg) if isinstance(arg, tuple) else arg

    return tuple(number(arg) for arg in node.args)


def random_tensor(
    type: TensorType, device: torch.device, below: int | None = None, order: Sequence[int] | None = None
) -> Tensor:
    """Floats between 0.1 and 1 (no denormals, no zeros to divide by), complex numbers of two such, places below
    `below`, bools of both sorts.

    `order`: its dims as they lie in memory, outermost first; dims that are missing repeat.
    """
    order = range(len(type.shape)) if order is None else order
    dtype: torch.dtype = torch.int64 if type.dtype == RANDOM_STATE else getattr(torch, type.dtype)
    sizes = [type.shape[dim] for dim in order]
    held = _filled(sizes, dtype, device, below)
    strides = [0] * len(type.shape)
    for dim, stride in zip(order, held.stride(), strict=True):
        strides[dim] = stride
    return held.as_strided(type.shape, strides)


def _filled(sizes: Sequence[int], dtype: torch.dtype, device: torch.device, below: int | None) -> Tensor:
    if dtype is torch.bool:
        return torch.rand(sizes, device=device) < 0.5
    if dtype.is_complex:
        parts = _filled((*sizes, 2), dtype.to_real(), device, below)
        return torch.view_as_complex(parts)
    if dtype.is_floating_point:
        kind: Any = dtype if dtype.itemsize >= 4 else torch.float32  # float16 and float8 have no generator everywhere
        return torch.rand(sizes, dtype=kind, device=device).mul_(0.9).add_(0.1).to(dtype)
    if below is not None and below > 1:
        return torch.randint(below, tuple(sizes), dtype=dtype, device=device)
    return torch.zeros(sizes, dtype=dtype, device=device)
