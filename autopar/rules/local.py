"""What changes in the arguments of an operator when one rank runs it on shards: size arguments become local sizes.

A table again: operator -> {argument position: how to compute it}. Operators that are not here take their arguments as
they are. Bodies (`bodies.py`) get arguments that went through here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.ir.batch_norm import IN_PARTS, IN_PARTS_BACKWARD
from autopar.ir.graph import Arg, Node, TensorType
from autopar.ir.outside import rule_in


@dataclass(frozen=True, slots=True)
class Local:
    """What is known when one argument is rewritten: local types of operands and results (None where there is none)."""

    value: Arg
    operands: Sequence[TensorType]
    results: Sequence[TensorType | None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.result(0)

    def result(self, place: int) -> tuple[int, ...]:
        found = self.results[place]
        assert found is not None
        return found.shape


How = Callable[[Local], Arg]


def shape(local: Local) -> Arg:
    return local.shape


def rows(local: Local) -> Arg:
    return local.shape[0]


def repeats(local: Local) -> Arg:
    source = local.operands[0].shape
    padded = (1,) * (len(local.shape) - len(source)) + source
    return tuple(new // old if old else 1 for new, old in zip(local.shape, padded, strict=True))


def normalized(operand: int) -> How:
    """The trailing dims of the tensor that is normalised."""
    return lambda local: local.operands[operand].shape[-len(local.value) :]


def groups(x: int, weight: int, inputs_at: int) -> How:
    """Groups of a convolution: channels of the tensor over channels that a filter sees. (One group stays one.)"""
    return lambda local: (
        1 if local.value == 1 else local.operands[x].shape[1] // local.operands[weight].shape[inputs_at]
    )


SHAPE_AT = {
    "aten.view.default": 1,
    "aten._unsafe_view.default": 1,
    "aten.reshape.default": 1,
    "aten._reshape_copy.default": 1,
    "aten.view_copy.default": 1,
    "aten.expand.default": 1,
    "aten.new_zeros.default": 1,
    "aten.new_ones.default": 1,
    "aten.new_full.default": 1,
    "aten.new_empty.default": 1,
    "aten.full.default": 0,
    "aten.zeros.default": 0,
    "aten.ones.default": 0,
    "aten.empty.memory_format": 0,
    "aten.rand.default": 0,
    "aten.randn.default": 0,
    "aten.randint.default": 1,
    "aten.randint.low": 2,
    "aten.normal.float_float": 2,
    "aten.slice_backward.default": 1,
    "aten.select_backward.default": 1,
    "aten.unfold_backward.default": 1,
    "aten.upsample_nearest1d_backward.default": 2,
    "aten.upsample_nearest2d_backward.default": 2,
    "aten.upsample_linear1d_backward.default": 2,
    "aten.upsample_bilinear2d_backward.default": 2,
    "aten.upsample_bicubic2d_backward.default": 2,
}

LOCAL: dict[str, dict[int, How]] = {
    **{op: {position: shape} for op, position in SHAPE_AT.items()},
    "aten.repeat.default": {1: repeats},
    "aten.embedding_dense_backward.default": {2: rows},
    "aten.native_layer_norm.default": {1: normalized(0)},
    "aten.native_layer_norm_backward.default": {2: normalized(1)},
    "aten._fused_rms_norm.default": {1: normalized(0)},
    "aten._fused_rms_norm_backward.default": {2: normalized(1)},
    IN_PARTS: {7: lambda local: local.result(1)[0]},
    IN_PARTS_BACKWARD: {6: lambda local: next(type.shape[0] for type in local.operands[2:] if len(type.shape) == 2)},
    "aten.native_group_norm.default": {
        3: rows,
        4: lambda local: local.shape[1],
        5: lambda local: math.prod(local.shape[2:]),
        6: lambda local: local.result(1)[1],
    },
    "aten.native_group_norm_backward.default": {
        5: lambda local: local.operands[1].shape[0],
        6: lambda local: local.operands[1].shape[1],
        7: lambda local: math.prod(local.operands[1].shape[2:]),
        8: lambda local: local.operands[2].shape[1],
    },
}


def localise(
    node: Node,
    args: tuple[Arg, ...],
    local_output_types: Sequence[TensorType | None],
    local_operand_types: Sequence[TensorType],
) -> tuple[Arg, ...]:
    """`args` (Refs, or what stands for them) with the sizes that hold on one rank. Keyword arguments hold no sizes."""
    outside = rule_in(node.outside, node.op)
    table = LOCAL.get(node.op, {}) if outside is None else outside.local
    if node.op == "aten.convolution.default":
        transposed = node.args[6]
        table = {8: groups(0, 1, 1) if not transposed else _result_groups}
    elif node.op == "aten.convolution_backward.default":
        transposed = node.args[7]
        table = {3: _bias_sizes, 9: groups(0 if transposed else 1, 2, 1)}
    return tuple(
        table[position](Local(value, local_operand_types, local_output_types)) if position in table else value
        for position, value in enumerate(args)
    )


def _result_groups(local: Local) -> Arg:
    """A transposed convolution has its filters' other end at dim 1 of the weight."""
    return 1 if local.value == 1 else local.shape[1] // local.operands[1].shape[1]


def _bias_sizes(local: Local) -> Arg:
    return None if local.value is None else (local.operands[0].shape[1],)
