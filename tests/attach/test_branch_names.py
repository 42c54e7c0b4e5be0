"""What names and tensors are behind branches that are taken by values."""

from __future__ import annotations

import copy
import gc
import sys

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from autopar.errors import CheckFailed
from tests.support.assigning import FORMS, STEPS
from tests.support.branching import Experts, Form, Layer, both_backward, quick_ones, tokens

# The others are of what these have already.
FIRST = (
    "adds_a_loss", "adds_in_place", "has_an_elif", "within_one_another", "asks_several", "under_two_names",
    "of_another_turn", "loops_over_hits", "at_a_place", "inverse_ahead", "returns_another", "returns_two", "chooses",
    "states_in_tuples",
)  # fmt: skip


@pytest.mark.parametrize("name", quick_ones(FORMS, FIRST))
def test_they_are_as_on_one_process(one: DeviceMesh, name: str) -> None:
    plain = Experts(FORMS[name]).double()
    both_backward(plain, autopar.compile(copy.deepcopy(plain), one), STEPS)


def of_two_types(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    number = 1
    if (chosen == 0).any():
        number = 0.5
    return x * number


def of_another_shape(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h = x
    if (chosen == 0).any():
        h = x.sum(0)
    return x + h


def not_there_ahead(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask = chosen == 0
    if mask.any():
        h = x * 2
    if mask.any():
        x = x + h
    return x


def list_of_an_else(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    if (chosen == 0).any():  # noqa: SIM108
        parts = [x]
    else:
        parts = [x, x]
    return sum(parts)


def else_that_returns(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h = x
    if (chosen == 0).any():
        h = x * 2
    else:
        return x
    return h + 1


def inverse_of_nothing(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    if (chosen == 0).any():
        x = x @ torch.linalg.inv(x.T @ x)
    return x


def given_as_out(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    if (chosen == 0).any():
        _ = torch.add(x, 1, out=out)
    return out


def asks_which(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    y = x
    if (chosen == 0).any():
        y = x * 2
    return x if y is x else y


def what_fails_is_caught(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    try:
        if (chosen == 0).any():
            x = layer.experts[0](x)
    except Exception:
        x = x * 0
    return x


def asks_by_text(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    count = (chosen == 0).sum().item()
    return x if f"{count}" == "0" else x * 2


def _twice(x: Tensor) -> Tensor:
    made = x * 2
    return made


def chooses_names(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    y = x * 2
    return x if (chosen == 0).any() else y


def returns_what_another_makes(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    if (chosen == 0).any():
        return x
    return _twice(x)


def goes_on_with_what_another_makes(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    return x + (_twice(x) if (chosen == 0).any() else x + 1) * layer.experts[0](x)


def assigned_by_what_is_known(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    if (chosen == 0).any():
        h = x * 2
    else:
        if not layer.training:
            h = x
    return h


def returns_by_what_is_known(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    if (chosen == 0).any():
        return x
    if layer.training:
        return x * 3
    return x * 2


def one_of_them_nothing(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    made = x * 2 if (chosen == 0).any() else None
    return x if made is None else made


def asks_which_was_chosen(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    made = x * 2
    y = made if (chosen == 0).any() else x * 3
    return y * 2 if y is made else y


def assigns_in_a_side(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    z = x
    y = torch.tanh(z := x * 2) if (chosen == 0).any() else x
    return y + z


def returns_what_it_names(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    return x * 2 if (chosen == 0).any() else (y := x * 3) + y


OUTSIDE = "which it assigns, may be read outside of it, and is no tensor ahead of it"


def returns_a_sum(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    if (chosen == 0).any():
        return x
    return sum([x, layer.experts[0](x), x.sin()])  # type: ignore[return-value]


NOT = {
    returns_a_sum: "the function returns neither names nor what a function of torch gives at its end",
    of_two_types: "forward assigns 'number' in a branch .*, where it is 0.5, and else 1: ",
    of_another_shape: r"assigns 'h' .* it is a tensor of shape \[6\] and float64, and else a tensor of shape \[12, 6\]",
    not_there_ahead: f"'h', {OUTSIDE}",
    list_of_an_else: "forward assigns 'parts' in .* where it is a list, and else another one",
    asks_which: "the function asks which object 'y' is, which it assigns",
    what_fails_is_caught: "it stands in a try, and what fails there may be caught",
    asks_by_text: "which way forward goes depends on values at .*count",
    chooses_names: "neither side is what one function gives",
    returns_what_another_makes: "what forward goes on with in a branch .* is chosen behind it, and nobody can see",
    goes_on_with_what_another_makes: "what forward goes on with in a branch .* is chosen behind it, and nobody can see",
    assigned_by_what_is_known: "forward assigns 'h' in .* a tensor of shape .*, and else not assigned",
    returns_by_what_is_known: "what forward goes on with in a branch .* is chosen behind it, and nobody can see",
    one_of_them_nothing: "forward assigns 'made' in .* a tensor of shape .*, and else a NoneType",
    asks_which_was_chosen: "the function asks which object 'y' is, which it assigns",
    returns_what_it_names: "as it assigns a name there",
    assigns_in_a_side: "as it assigns a name there",
    else_that_returns: "it has an else that ends something",
    inverse_of_nothing: "forward calls linalg_inv_ex at .*need not be what that takes",
    given_as_out: r"forward writes to a tensor at .*not by a method of it \(out=",
}


@pytest.mark.parametrize("form", NOT)
def test_what_they_cannot_be_is_told(one: DeviceMesh, form: Form) -> None:
    before = sys.gettrace()
    with pytest.raises(TraceError, match=NOT[form]):
        autopar.compile(Experts(form).double(), one)(*tokens((0, 1), 0))
    assert sys.gettrace() is before and gc.isenabled()


def drops(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h = torch.nn.functional.normalize(layer.experts[0](x))
    if (chosen == 0).any():
        h = torch.nn.functional.dropout(h, 0.5)
    return h


def test_a_note_says_that_draws_are_drawn_in_every_step(one: DeviceMesh) -> None:
    for form, notes in ((drops, 1), (FORMS["adds_a_loss"], 0)):
        parallel = autopar.compile(Experts(form).double(), one)
        parallel(*tokens((0, 1), 0))
        (prepared,) = parallel._autopar.prepared()
        assert sum("is drawn in every step" in note for note in prepared.plan.notes) == notes


def divided_ahead(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask, loss = chosen == 0, x.square().mean()
    mean = (layer.experts[0](x).mean(-1) * mask).sum() / mask.sum()
    if mask.any():
        loss = loss + mean
    return loss


def test_what_is_made_ahead_of_a_branch_has_to_be_finite(one: DeviceMesh) -> None:
    """Where that is not taken torch has no gradient there, and zeros would become NaN on their way."""
    plain = Experts(divided_ahead).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    both_backward(plain, parallel, ((0, 1), (0,)))
    with pytest.raises(CheckFailed, match="is not finite in this call, which does not take it"):
        parallel(*tokens((1,), 0))
