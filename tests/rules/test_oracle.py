"""The rules against DTensor's: on one axis of two ranks, given our placements of the operands, what comes out?

DTensor may be more careful than we are (it then redistributes first); it may never contradict us, except as told here.
Flash attention on CPU is left out: DTensor takes 10 s to find that it has no rule (torch 2.13).
"""

from __future__ import annotations

import pytest
import torch

from tests.rules.harness import Axis, ways
from tests.rules.oracle import ask
from tests.rules.test_rules import calls

OPERATORS = """
    mm.default bmm.default add.Tensor sub.Tensor mul.Tensor mul.Scalar div.Tensor neg.default where.self
    gelu.default silu.default pow.Tensor_Scalar rsqrt.default sum.dim_IntList mean.dim amax.default
    argmax.default cat.default stack.default view.default transpose.int permute.default t.default
    unsqueeze.default expand.default select.int slice.Tensor split.Tensor unbind.int index.Tensor
    index_select.default embedding.default embedding_dense_backward.default native_layer_norm.default
    native_layer_norm_backward.default _softmax.default _log_softmax.default nll_loss_forward.default
    convolution.default max_pool2d_with_indices.default gelu_backward.default topk.default cumsum.default
"""
ADDS_UP = "DTensor adds a partial sum up before this operator; we let it through, as it is linear"
DIFFERS = {
    "aten.where.self": ADDS_UP,
    "aten.gelu_backward.default": ADDS_UP,
    "aten.mean.dim": ADDS_UP,
    "aten.embedding.default": ADDS_UP,
    "aten.cumsum.default": ADDS_UP,
    "aten.native_layer_norm_backward.default": ADDS_UP,
    "aten.convolution.default": ADDS_UP + "; DTensor does not split a depthwise convolution by groups",
    "aten.view.default": "DTensor splits no dim whose boundaries move (12 6 -> 6 12), we split the common factor 6",
    "aten.expand.default": "a new dim comes out whole from DTensor (nothing asks it to split)",
    "aten.sum.dim_IntList": "dim=[] sums over all dims; DTensor keeps the input's shard on a result without dims",
    "aten.cat.default": "DTensor gathers where an empty vector [0] is among the operands",
}


if torch.__version__.startswith("2.11"):
    DIFFERS |= {
        "aten.mul.Tensor": ADDS_UP,
        "aten.stack.default": "in torch 2.11 DTensor names the wrong dim for a stack in front of the split one",
    }


@pytest.mark.parametrize("op", [f"aten.{name}" for name in OPERATORS.split()])
def test_dtensor_agrees(op: str, fake_mesh):
    mesh = fake_mesh(tensor=2)
    answers: dict[Axis, set[str]] = {}
    for call in calls(op):
        rule = call.rule
        assert rule is not None
        for way in ways(call, rule, 2):
            if way.factor not in rule.bodies:
                answers.setdefault(way, set()).add(ask(call, rule, way, mesh))
    wrong = {way: told - {"agrees", "no rule"} for way, told in answers.items() if told - {"agrees", "no rule"}}
    assert answers, "nothing was asked"
    assert op in DIFFERS or not wrong
