"""Branches that are taken by values, and only write to rows of masks: mixtures of experts as people write them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from autopar.errors import NotCut
from tests.support.branching import FORMS, STEPS, Experts, Form, Layer, alike, any_of_mask, quick_ones, tokens


def steps(plain: Experts, parallel: Any) -> None:
    """Steps of an optimizer that would decay a gradient of zero, and leaves alone what has none."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05, weight_decay=0.1) for each in (plain, parallel)]
    idle = set[str]()
    for seed, used in enumerate(STEPS):
        losses = [each(*tokens(used, seed)) for each in (plain, parallel)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-12)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        alike(plain, parallel)
        idle |= {name for name, one in plain.named_parameters() if one.grad is None and "experts" in name}
        for optimizer in optimizers:
            optimizer.step()
    alike(plain, parallel)
    assert len(idle) == sum(1 for name, _ in plain.named_parameters() if "experts" in name)
    assert len(parallel._autopar.prepared()) == 1


@pytest.mark.parametrize("name", FORMS)
def test_experts_are_trained_as_on_one_process(one: DeviceMesh, name: str) -> None:
    plain = Experts(FORMS[name]).double()
    steps(plain, autopar.compile(plain, one))


@pytest.mark.parametrize("name", ["any_of_mask", "number_of_indices"])
def test_layers_behind_one_another(one: DeviceMesh, name: str) -> None:
    plain = Experts(FORMS[name], depth=2).double()
    steps(plain, autopar.compile(plain, one))


OF_ALL_TOKENS = ("counted", "hits", "listed_hits")  # how many an expert has, compared with a number


@pytest.mark.parametrize("name", OF_ALL_TOKENS)
def test_what_is_counted_over_all_tokens_is_not_cut(one: DeviceMesh, name: str) -> None:
    parallel = autopar.compile(Experts(FORMS[name]).double(), one, micro_batches=2)
    with pytest.raises(NotCut, match=r"(index_add.default|gt.Scalar) works on the whole batch at once"):
        parallel(*tokens(STEPS[0], 0))


@pytest.mark.parametrize("name", quick_ones([one for one in FORMS if one not in OF_ALL_TOKENS], ("any_of_mask",)))
def test_in_micro_batches_an_expert_is_idle_that_no_round_has_tokens_for(one: DeviceMesh, name: str) -> None:
    plain = Experts(FORMS[name]).double()
    steps(plain, autopar.compile(plain, one, micro_batches=2))


def counter(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask, layer.used = chosen == 0, 0
    if mask.any():
        layer.used += 1
        x = x * 2
    return x * layer.used


def extended(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask, losses = chosen == 0, [x]
    if mask.any():
        losses.extend([x * 2])
    return sum(losses)


def attribute(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask = chosen == 0
    if mask.any():
        layer.seen = x.sum()
    return x


NOT = {
    counter: "'layer.used', which it assigns, is no tensor that this call has made ahead of it",
    extended: "it calls .extend()",
    attribute: "'layer.seen', which it assigns, is no tensor that this call has made ahead of it",
}


@pytest.mark.parametrize("form", NOT)
def test_a_branch_that_leaves_more_behind_is_told_why(one: DeviceMesh, form: Form) -> None:
    with pytest.raises(TraceError, match=rf"depends on values at .*this one may not, as {re.escape(NOT[form])}\.$"):
        autopar.compile(Experts(form).double(), one)(*tokens((0, 1), 0))


def on_its_own(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if scores[:, 1].sum() > 5:  # which is another thing than rows of the mask
        made = x[mask]
        made = made.mul(2)
        made = layer.experts[0](made)
        out[mask] = made
    if mask.any():
        out[mask] += layer.experts[1](x[mask])
    return out


def test_a_branch_may_ask_anything_and_write_to_rows(one: DeviceMesh) -> None:
    plain = Experts(on_its_own).double()
    parallel = autopar.compile(plain, one)
    idle = list[set[str]]()
    for seed, used in enumerate(((0, 1), (0,), (1,))):
        for each in (plain, parallel):
            each.zero_grad()
            each(*tokens(used, seed)).backward()
        alike(plain, parallel)
        idle.append({name for name, one in plain.named_parameters() if one.grad is None})
    first, second = "layers.0.experts.0.bias", "layers.0.experts.1.bias"
    assert [found & {first, second} for found in idle] == [set(), {first}, {second}]


def test_a_loss_may_leave_an_expert_out_as_it_is_given_again(one: DeviceMesh) -> None:
    """`retain_graph`, and gradients that a script adds up itself."""
    plain = Experts(any_of_mask).double()
    parallel = autopar.compile(plain, one)
    for each in (plain, parallel):
        first, second = each(*tokens((0,), 0)), each(*tokens((0, 2), 1))
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
    alike(plain, parallel)
    assert plain.layers[0].experts[1].weight.grad is None
