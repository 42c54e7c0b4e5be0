"""What a branch that is taken by values would leave behind besides writes to rows: refused, whoever does it."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar import TraceError
from tests.processes.compare import whole
from tests.support.branching import (
    COUNT,
    FORMS,
    WIDTH,
    Experts,
    Form,
    Layer,
    any_of_mask,
    both_backward,
    quick_ones,
    tokens,
)

LOG: list[Any] = []


class Counting(nn.Linear):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


class Appending(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        LOG.append(made.square().mean())
        return made


class Helped(nn.Linear):
    """Makes a list of its own, which is nobody else's."""

    def forward(self, input: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for part in input.chunk(2, -1):
            parts.append(part)
        return super().forward(torch.cat(parts, -1))


def _with(expert: type[nn.Linear]) -> Experts:
    model = Experts(any_of_mask)
    model.layers[0].experts[0] = expert(WIDTH, WIDTH)
    return model.double()


@pytest.mark.parametrize(("expert", "told"), [(Counting, "it sets .calls"), (Appending, r"it calls .append\(\)")])
def test_what_an_expert_leaves_behind_is_refused(one: DeviceMesh, expert: type[nn.Linear], told: str) -> None:
    before = sys.gettrace()
    where = r"forward calls forward \(.*test_branch_effects.py:\d+\) in a branch that it takes by values \(.*\), and "
    with pytest.raises(TraceError, match=where + told):
        autopar.compile(_with(expert), one)(*tokens((0, 1), 0))
    assert sys.gettrace() is before


def test_a_hook_of_an_expert_that_leaves_something_is_refused(one: DeviceMesh) -> None:
    model, seen = _with(nn.Linear), list[Any]()
    model.layers[0].experts[0].register_forward_hook(lambda module, args, output: seen.append(1))
    with pytest.raises(TraceError, match=r"forward calls <lambda> .*it calls .append\(\)"):
        autopar.compile(model, one)(*tokens((0, 1), 0))


def test_an_expert_may_make_a_list(one: DeviceMesh) -> None:
    plain = _with(Helped)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    both_backward(plain, parallel, ((1, 2), (0, 1)))


def logs_in_an_expression(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask, log = torch.zeros_like(x), chosen == 0, [x]
    if mask.any():
        _ = log.pop()
        out[mask] = x[mask]
    return out + len(log)


def goes_on_with_an_iterator(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask, places = torch.zeros_like(x), chosen == 0, iter([1, 2])
    if mask.any():
        for place in places:
            out[mask] = x[mask] * place
    return out + sum(places)


def a_turn_behind(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, place = torch.zeros_like(x), 0
    for place in (torch.bincount(chosen, minlength=COUNT) > 0).nonzero().flatten().tolist():
        mask = chosen == place
        out[mask] = x[mask]
    return out * place


def else_of_a_try(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask, y = torch.zeros_like(x), chosen == 0, x
    try:
        if mask.any():
            y = x * 2
            out[mask] = y[mask]
    except IndexError:
        pass
    else:
        out = out + y
    return out


def asks_both(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if bool(mask.any() and (chosen == 1).any()):
        out[mask] = x[mask]
    return out


def asks_one_or_another(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if (mask if (chosen == 1).any() else ~mask).any():
        out[mask] = x[mask]
    return out


def turns_in_a_list(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for place in [int(one) for one in (torch.bincount(chosen, minlength=COUNT) > 0).nonzero()]:
        out[chosen == place] = x[chosen == place]
    return out


def asks_whether_it_is_true(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if mask.any().item() is True:
        out[mask] = x[mask]
    return out


def activated_in_place(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h, out, mask = x * 1, torch.zeros_like(x), chosen == 0
    if mask.any():
        y = functional.relu(h, inplace=True)
        out[mask] = y[mask]
    return out + h


def written_by_a_helper(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if mask.any():
        made = put(out, x)
        out[mask] = made[mask]
    return out


def put(out: Tensor, x: Tensor) -> Tensor:
    return torch.sum(x, 0, keepdim=True, out=out[:1])


def adds_to_another_name(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask, log, more = torch.zeros_like(x), chosen == 0, [x], [x]
    if mask.any():
        mine = log
        mine += more
        out[mask] = x[mask]
    return out + len(log)


NOT = {
    activated_in_place: r"forward writes to a tensor at .*not by a method of it \(out=, inplace=True",
    written_by_a_helper: "forward writes to a tensor",
    adds_to_another_name: r"as it changes mine in place, which may be a part of something else: write mine = mine \+",
    logs_in_an_expression: r"as it calls \.pop\(\)",
    goes_on_with_an_iterator: "as it goes on with places, which is an iterator",
    a_turn_behind: "'place', which it assigns, may be read outside of it",
    else_of_a_try: "as (it stands in a try|'y', which it assigns, may be read outside of it)",
    asks_both: "as its condition asks several things",
    asks_one_or_another: "as its condition asks several things",
    turns_in_a_list: "no for goes over them alone",
    asks_whether_it_is_true: "Ask for the truth itself",
}


@pytest.mark.parametrize("form", NOT)
def test_it_is_refused(one: DeviceMesh, form: Form) -> None:
    before = sys.gettrace()
    with pytest.raises(TraceError, match=NOT[form]):
        autopar.compile(Experts(form).double(), one)(*tokens((0, 1), 0))
    assert sys.gettrace() is before


def written_truths(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """What a mask picks that was written to by another one, in a branch or none."""
    done, mask = torch.zeros(len(x), dtype=torch.bool), chosen == 0
    done[mask] = x[mask, 0].abs() > 0.5
    out = torch.zeros_like(x)
    out[done] += layer.experts[0](x[done])
    done = done.clone()
    if mask.any():
        done[mask] = True
    return torch.where(done.unsqueeze(-1), layer.experts[1](x), out)


def the_same_mask(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """An expert outside of a branch, by what a guard may look like."""
    out, mask = torch.zeros_like(x), chosen == 0
    both = mask & mask
    out[both] = layer.experts[1](x[both])
    if mask.any():
        out[mask] += layer.experts[0](x[mask])
    return out


def gone_into_by_what_is_known(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """The second turn asks nothing, and is no branch of the first one's."""
    out = torch.zeros_like(x)
    for number in (0, 1):
        mask = chosen == number
        has = mask.any() if number == 0 else True
        if has:
            out[mask] += layer.experts[number](x[mask])
    for number in (2, 3):
        mask, number_of = chosen == number, scores.shape[1]
        idle = ~mask.any() if number == 2 else number_of > 9
        if idle:
            continue
        out[mask] += layer.experts[number](x[mask])
    return out


def of_rows_and_parameters(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """Quotients and the like, of what is good wherever it is used."""
    out, mask = torch.zeros_like(x), chosen == 0
    if mask.any():
        weights = scores[mask] / scores[mask].sum(-1, keepdim=True)
        scale = layer.experts[1].bias.exp() / layer.experts[1].weight.norm()
        with torch.no_grad():
            spread = x[mask].std(-1, keepdim=True)
        out[mask] = layer.experts[0](x[mask] / scale) * weights[:, :1] + spread
    else:
        pass
    return out + layer.experts[1](x)


@pytest.mark.parametrize("form", [written_truths, the_same_mask, gone_into_by_what_is_known, of_rows_and_parameters])
def test_masks_are_told_apart(one: DeviceMesh, form: Form) -> None:
    plain = Experts(form).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    both_backward(plain, parallel, ((0, 1), (1, 2), (0,)))


SECOND = {form.__name__: form for form in (the_same_mask, gone_into_by_what_is_known)}


@pytest.mark.parametrize("name", quick_ones([*FORMS, *SECOND], ("any_of_mask", "first_size", "the_same_mask")))
def test_gradients_that_have_gradients_are_none_too(one: DeviceMesh, name: str) -> None:
    plain = Experts({**FORMS, **SECOND}[name]).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for seed, used in enumerate(((0, 1), (2,))):
        first: list[list[Tensor | None]] = []
        for each in (plain, parallel):
            each.zero_grad()
            x, *others = tokens(used, seed)
            by = [x.requires_grad_(), *each.parameters()]
            found = torch.autograd.grad(each(x, *others), by, create_graph=True, allow_unused=True)
            torch.stack([one.square().sum() for one in found if one is not None]).sum().backward()
            first.append([*found, x.grad])
        for one_of, other in zip(first[0], first[1], strict=True):
            assert (one_of is None) == (other is None)
            if one_of is not None and other is not None:
                torch.testing.assert_close(whole(other), one_of, rtol=1e-9, atol=1e-11)
        for one_of, other in zip(plain.parameters(), parallel.parameters(), strict=True):
            assert (one_of.grad is None) == (other.grad is None)
            if one_of.grad is not None:
                torch.testing.assert_close(whole(other.grad), one_of.grad, rtol=1e-9, atol=1e-11)
