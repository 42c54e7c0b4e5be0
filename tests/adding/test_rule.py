"""docs/adding.md, "An operator rule": two operators of nobody's library, added where it says, and used in plans.

`toy::scaled_sum` sums over the last dim; its backward is an operator of its own, which has a size among its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Node
from autopar.rules.local import LOCAL
from autopar.rules.spelling import Types, shape_of, spell
from autopar.rules.table import RULES
from autopar.search import search
from tests.rules.harness import Call, check, make_call, ways
from tests.support.check import difference, mesh_of
from tests.support.families import Case
from tests.support.machines import FAST
from tests.support.plans import PlanSampler, roles

SUM, SPREAD = "toy.scaled_sum.default", "toy.spread.default"
TOLERANCE = 1e-9  # in float64, as in tests/plans


def rule(node: Node, types: Types) -> str:
    """`a b c -> a b` of the sum, `a b -> a b c` of its backward; both are linear."""
    return f"{spell(types[0].shape)} -> {spell(shape_of(node))} | 0"


@pytest.fixture(scope="module")
def operators() -> Iterator[None]:
    """The operators as a library would bring them: kernel, shapes without values, backward. They end with the file."""
    library = torch.library.Library("toy", "DEF")
    library.define("scaled_sum(Tensor x, float scale) -> Tensor")
    library.define("spread(Tensor grad, float scale, int width) -> Tensor")
    library.impl("scaled_sum", lambda x, scale: x.sum(-1) * scale, "CPU")
    library.impl("spread", lambda g, scale, width: (g * scale)[..., None].repeat_interleave(width, -1), "CPU")
    torch.library.register_fake("toy::scaled_sum", lambda x, scale: x.new_empty(x.shape[:-1]), lib=library)
    torch.library.register_fake("toy::spread", lambda g, scale, width: g.new_empty((*g.shape, width)), lib=library)

    def keep(ctx, inputs, output):
        ctx.scale, ctx.width = inputs[1], inputs[0].shape[-1]

    def backward(ctx, grad):
        return torch.ops.toy.spread(grad, ctx.scale, ctx.width), None

    torch.library.register_autograd("toy::scaled_sum", backward, setup_context=keep, lib=library)
    yield


@pytest.fixture
def ruled(operators: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three entries that the guide asks for: two rules, and how a size becomes local."""
    monkeypatch.setitem(RULES, SUM, rule)
    monkeypatch.setitem(RULES, SPREAD, rule)
    monkeypatch.setitem(LOCAL, SPREAD, {2: lambda local: local.shape[-1]})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(24, 48), nn.Linear(12, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        summed = torch.ops.toy.scaled_sum(torch.relu(self.up(x)), 0.3)
        return nn.functional.mse_loss(self.out(summed), y)


@pytest.fixture(scope="module")
def case(operators: None) -> Case:
    torch.manual_seed(3)
    return Case(Net(), {"x": torch.randn(4, 12, 24), "y": torch.randn(4, 6)})


def samples() -> list[Call]:
    """What the guide wants in tests/rules/samples_*.py."""
    x, grad = torch.randn(6, 12, 18, dtype=torch.float64), torch.randn(6, 12, dtype=torch.float64)
    return [make_call(SUM, (x, 0.3)), make_call(SPREAD, (grad, 0.3, 18))]


def test_split_along_each_dim_and_as_a_sum_the_operators_give_what_they_give_whole(ruled: None) -> None:
    for call in samples():
        assert call.rule is not None
        found = [(way,) for size in (2, 3) for way in ways(call, call.rule, size)]
        assert len(found) == 8  # three dims and a partial sum, on two and on three ranks
        for axes in found:
            check(call, axes)


def test_a_size_that_stays_that_of_the_whole_is_found_by_the_same_check(
    ruled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(LOCAL, SPREAD)
    call = samples()[1]
    assert call.rule is not None
    (last,) = (way for way in ways(call, call.rule, 2) if way.factor == call.rule.outputs[0][2][0])
    with pytest.raises(AssertionError, match="the rule says"):
        check(call, (last,))


@pytest.mark.parametrize("factor", ["a", "b", "c"])
def test_a_plan_that_splits_a_dim_of_the_new_operator_gives_its_outputs_and_gradients(
    ruled: None, case: Case, factor: str
) -> None:
    plan = PlanSampler(case.wide_graph, mesh_of(2)).best({"scaled_sum": roles(factor)})
    assert plan.choices["scaled_sum"].roles == (factor,)
    off, where = difference(plan, case)
    assert off <= TOLERANCE, where


def test_random_plans_on_two_axes_split_both_operators_in_all_ways_and_are_right(ruled: None, case: Case) -> None:
    sampler = PlanSampler(case.wide_graph, mesh_of(2, 2))
    seen: set[str] = set()
    for seed in range(12):
        plan = sampler.draw(seed)
        off, where = difference(plan, case)
        assert off <= TOLERANCE, f"seed {seed}: {where}"
        seen |= {*plan.choices["scaled_sum"].roles, *plan.choices["spread"].roles}
    assert seen >= {"a", "b", "c"}


def test_a_search_splits_the_operator_once_it_has_a_rule_and_says_so_where_it_has_none(
    operators: None, case: Case, request: pytest.FixtureRequest
) -> None:
    without = search(case.wide_graph, mesh_of(2), FAST)
    assert without.choices["scaled_sum"].roles == ("",)
    assert any(SUM in note and "rule" in note for note in without.notes)
    request.getfixturevalue("ruled")
    plan = search(case.wide_graph, mesh_of(2), FAST)
    assert plan.choices["scaled_sum"].roles != ("",) and not any(SUM in note for note in plan.notes)
    assert plan.predicted_seconds < without.predicted_seconds
    assert all(difference(one, case)[0] <= TOLERANCE for one in (plan, without))
