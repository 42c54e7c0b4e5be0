"""docs/guide/operators.md: rules and patterns of a user's package, given to one search and to no other."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import OperatorRule, Plan, PlanMismatch, Rules, TraceError, check_rule
from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.ir.graph import Graph
from autopar.plan.fit import check
from autopar.plan.store import dumps
from autopar.rules.outside import given
from autopar.search import __main__ as command
from autopar.search import ask, search
from autopar.trace import capture, graph_of
from tests.adding.test_pattern import Net as Summed
from tests.adding.test_pattern import round_sum
from tests.support.check import difference, mesh_of, worst_difference
from tests.support.families import Case
from tests.support.machines import FAST
from tests.support.plans import PlanSampler, roles
from tests.support.toy_rules import CURVED, NEWER, OPERATORS, RULES, SPREAD, SUM, Net, doubled

TOLERANCE = 1e-9  # in float64, as in tests/plans
ROUND = Rules("rounds", "0.1", patterns={"round": round_sum})


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(3)
    return Case(Net(), {"x": torch.randn(4, 12, 24), "y": torch.randn(4, 6)})


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_search_with_rules_splits_the_operator_and_one_without_does_not(case: Case) -> None:
    graph = case.wide_graph
    ruled, plain = (search(graph, mesh_of(2), FAST, rules=rules) for rules in (RULES, None))
    assert ruled.choices["scaled_sum"].roles != ("",) and plain.choices["scaled_sum"].roles == ("",)
    assert ruled.predicted_seconds < plain.predicted_seconds
    assert ruled.rules == (RULES.identity,) and plain.rules == ()
    for plan in (ruled, plain):
        off, where = difference(plan, case)
        assert off <= TOLERANCE, where
    mesh = mesh_of(2)
    with fake_ranks(mesh) as device_mesh:  # LocalTensor: torch's own collectives
        ran = run(ruled, device_mesh, case.values(ruled.graph))
    off, where = worst_difference(ran, case.wide_reference)
    assert off <= TOLERANCE, where


@pytest.mark.parametrize("factor", ["a", "b", "c"])
def test_plans_that_split_each_factor_give_the_numbers_of_one_process(case: Case, factor: str) -> None:
    graph = case.wide_graph.under(given(RULES))
    plan = PlanSampler(graph, mesh_of(2)).best({"scaled_sum": roles(factor)})
    assert plan.choices["scaled_sum"].roles == (factor,)
    off, where = difference(plan, case)
    assert off <= TOLERANCE, where


def test_a_pattern_from_outside_is_offered_where_it_is_given_and_nowhere_else() -> None:
    torch.manual_seed(3)
    case = Case(Summed(), {"x": torch.randn(12, 24)})
    mesh = mesh_of(4)

    def bodies(graph: Graph) -> set[str]:
        return {one.body for options in ask(graph, mesh, FAST).strategies.values() for one in options}

    ruled = case.wide_graph.under(given(ROUND))
    assert "round" in bodies(ruled) and "round" not in bodies(case.wide_graph)
    sampler = PlanSampler(ruled, mesh)
    name = next(n for n, options in sampler.strategies.items() if any(one.body == "round" for one in options))
    plan = sampler.best({name: lambda one: one.body == "round"})
    off, where = difference(plan, case)
    assert off <= TOLERANCE, where
    assert plan.rules == (ROUND.identity,)
    assert Plan.loads(dumps(plan), "text", ROUND) == plan
    with pytest.raises(PlanMismatch, match=r"made with the rules of rounds 0\.1 .* not given here; give them"):
        Plan.loads(dumps(plan), "text")
    notes = search(case.wide_graph.under(given([RULES, ROUND])), mesh_of(5), FAST).notes
    assert any("no operator of this model is toyrules.scaled_sum.default" in note for note in notes)
    assert any("pattern 'round' offers nothing" in note for note in notes)


def test_what_a_rule_says_of_costs_is_the_price_and_else_memory_is_and_a_note_says_so(case: Case) -> None:
    def priced(rules: Rules) -> tuple[float, Plan]:
        question = ask(case.wide_graph, mesh_of(2), FAST, rules=rules)
        whole = question.strategies["scaled_sum"][0]
        return question.pricer.seconds(whole.steps), search(case.wide_graph, mesh_of(2), FAST, rules=rules)

    def rules(**cost: Any) -> Rules:
        return Rules("toyrules", "1.0", {SUM: OperatorRule("a b c -> a b | 0", **cost), SPREAD: OPERATORS[SPREAD]})

    plain, plan = priced(rules())
    assert f"{SUM} is priced by the bytes that it moves: its rule says no flops" in " ".join(plan.notes)
    heavy, heavy_plan = priced(rules(flops=lambda node, types: 1e15, kind="matmul"))
    assert heavy > 100 * plain and not any("says no flops" in note for note in heavy_plan.notes)
    many, _ = priced(rules(nbytes=lambda node, taken, made: 1e12))
    assert many > 100 * plain
    for wrong in (-1.0, float("nan"), None, "many"):
        with pytest.raises(ValueError, match=rf"the rule of {SUM} says flops .*; give a number from 0"):
            ask(case.wide_graph, mesh_of(2), FAST, rules=rules(flops=lambda node, types, wrong=wrong: wrong))


def test_an_operator_without_a_rule_is_told_with_what_to_do(case: Case) -> None:
    told = search(case.wide_graph, mesh_of(2), FAST).explain()
    said = " ".join(told.split())
    assert f"{SUM} has no sharding rule and runs replicated (1 node), priced by the bytes that it moves" in said
    assert f'rules=autopar.Rules("toyrules", "1.0", {{"{SUM}": ...}}), or --rules' in said
    none = Rules("toyrules", "1.0", {SUM: lambda node, types: None})
    assert "its rule gives None for that use" in " ".join(search(case.wide_graph, mesh_of(2), FAST, rules=none).notes)


# --- identity --------------------------------------------------------------------------------------------------------


def test_a_plans_file_names_its_rules_and_needs_them(case: Case) -> None:
    graph = case.wide_graph
    plan = search(graph, mesh_of(2), FAST, rules=RULES)
    text = dumps(plan)
    stored = json.loads(text)["rules"]
    assert stored == [["toyrules", "1.0", RULES.digest]]
    loaded = Plan.loads(text, "plan.json", RULES)
    assert loaded == plan and loaded.rules == plan.rules and dumps(loaded) == text
    off, where = difference(loaded, case)
    assert off <= TOLERANCE, where
    with pytest.raises(PlanMismatch, match=r"^plan.json was made with the rules of toyrules 1\.0 .*which are not "):
        Plan.loads(text, "plan.json")
    with pytest.raises(PlanMismatch, match=r"made with the rules of toyrules 1\.0 .*, here are toyrules 1\.1 "):
        Plan.loads(text, "plan.json", NEWER)
    other = Rules("toyrules", "1.0", {**OPERATORS, SUM: "a b c -> a b"})
    with pytest.raises(PlanMismatch, match=r"toyrules 1\.0 \(\w{8}\), here are toyrules 1\.0 \(\w{8}\)"):
        Plan.loads(text, "plan.json", other)
    with pytest.raises(PlanMismatch, match=rf"made without the rules of toyrules 1\.0 .* one for {SUM}"):
        Plan.loads(dumps(search(graph, mesh_of(2), FAST)), "plan.json", RULES)
    check(plan, graph.under(given(RULES)), mesh_of(2))
    with pytest.raises(PlanMismatch, match=r"rules of toyrules 1\.0 .*not given here"):
        check(plan, graph, mesh_of(2))
    with pytest.raises(PlanMismatch, match="was made without the rules of toyrules"):
        check(search(graph, mesh_of(2), FAST), graph.under(given(RULES)), mesh_of(2))


def test_caches_know_rules_apart_and_do_not_ask_for_those_that_say_nothing(case: Case) -> None:
    graph = case.wide_graph
    digests = {graph.digest, *(graph.under(given(rules)).digest for rules in (RULES, NEWER, ROUND))}
    assert len(digests) == 4
    idle = Rules("idle", "1.0", {CURVED: "a b c -> a b"})
    assert graph.under(given(idle)).digest == graph.digest
    assert graph.under(given([RULES, ROUND])).digest == graph.under(given([ROUND, RULES])).digest


def test_a_digest_tells_texts_functions_and_what_they_hold_apart() -> None:
    def made(factor: str) -> Any:
        return lambda node, types: f"{factor} -> {factor}"

    def digest(rule: Any) -> str:
        return Rules("t", "1", {CURVED: rule}).digest

    told = [digest(one) for one in ("a -> a", "b -> b", made("a"), made("b"), OperatorRule("a -> a", kind="matmul"))]
    assert len(set(told)) == 5 and digest(made("a")) == told[2]
    scope: dict[str, Any] = {}
    exec("def typed_in(node, types): return None", scope)
    for nobody_reads in (scope["typed_in"], max, made(object())):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"cannot be read; define the function in a file|no digest can tell it"):
            digest(nobody_reads)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Rules("t", "1", {"toy::x": "a -> a"}), "'toy::x' is no operator with its overload.* toy.x.default"),
        (lambda: Rules("t", "1", {"toy.x": "a -> a"}), "'toy.x' is no operator with its overload.* toy.x.default"),
        (lambda: Rules("a package", "1"), "package 'a package' is no name"),
        (lambda: Rules("t", "\n"), "version .* is no name"),
        (lambda: Rules("t", "1", patterns={" ": round_sum}), "a pattern is called ' '"),
        (lambda: given(Rules("t", "1", {"aten.mm.default": "a b, b c -> a c"})), "has a rule in autopar"),
        (lambda: given(Rules("t", "1", patterns={"ring": round_sum})), "has a pattern 'ring' itself"),
        (lambda: given([RULES, RULES]), "rules of toyrules are given twice"),
        (lambda: given([RULES, Rules("t", "1", {SUM: "a b c -> a b"})]), f"of t and of toyrules both have {SUM}"),
        (lambda: given(["toyrules"]), "rules='toyrules' are no rules; give an autopar.Rules"),  # type: ignore[list-item]
    ],
)
def test_rules_that_make_no_sense_are_refused_in_a_sentence(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_a_rule_of_other_operands_is_refused_where_it_meets_the_operator(case: Case) -> None:
    for text, told in (
        ("a b -> a", "operand 0 has shape"),
        ("a b c@nobody -> a b", "names the local body 'nobody'"),
    ):
        with pytest.raises(ValueError, match=rf"%scaled_sum \({SUM}\): rule .*{told}"):
            search(case.wide_graph, mesh_of(2), FAST, rules=Rules("t", "1", {SUM: text}))


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        doubled(y)
        return self.up(y).sum()


def test_an_operator_that_writes_to_its_arguments_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match=r"^toyrules.doubled.default at .* writes to its arguments \(mutates_args\)"):
        graph_of(capture(Doubling(), (torch.randn(3, 4),), {}))


# --- check_rule ------------------------------------------------------------------------------------------------------


def test_right_rules_are_found_right_in_every_way_that_they_offer() -> None:
    ways = check_rule(RULES, SUM, random(12, 12, 24), 0.3)
    assert {"a over x=2", "c over x=3", "sum of operand 0 over x=2", "a over x=2, b over y=2"} <= {*ways}
    assert len(ways) == len(set(ways)) == 28
    assert len(check_rule(RULES, SPREAD, random(12, 12), 0.3, 12)) == 28


def test_a_pattern_is_checked_on_the_operator_that_it_stands_in_for() -> None:
    exact = torch.randint(-99, 99, (12, 6)).double()
    ways = check_rule(ROUND, "aten.sum.dim_IntList", exact, [0])
    assert {"round, round over x=2", "round, round over x=3", "round, round over y=2"} <= {*ways}
    with pytest.raises(ValueError, match=r"over x=3: .* ranks disagree on a replicated value"):
        check_rule(ROUND, "aten.sum.dim_IntList", random(12, 6), [0])  # each rank adds in an order of its own


@pytest.mark.parametrize(
    ("operators", "op", "args", "told"),
    [
        (
            {CURVED: "a b c -> a b | 0"},
            CURVED,
            (random(12, 12, 12),),
            "sum of operand 0 over x=2: result 0 is not",
        ),
        ({SPREAD: "a b -> a b c | 0"}, SPREAD, (random(12, 12), 0.3, 12), r"c over x=2: result 0 is float64.*local="),
        ({SUM: "a b c -> b a | 0"}, SUM, (random(12, 12, 12), 0.3), "a over x=2: result 0 is"),
        ({SUM: "a! b! c! -> a! b!"}, SUM, (random(12, 12, 12), 0.3), "offer no way to split it"),
        ({SUM: "a b c -> a b"}, SUM, (random(5, 12, 12), 0.3), r"a \(5\) could not be split .* multiples of 12"),
        ({SUM: "a b c -> a b"}, SUM, (torch.ones(12, 12, 12), 0.3), "all numbers of operand 0 are equal"),
        ({SUM: "a b c -> a b"}, CURVED, (random(12, 12, 12),), f"no rule for {CURVED} is given here, only for {SUM}"),
        ({"toyrules.no.default": "a -> a"}, "toyrules.no.default", (random(12),), "no operator that torch knows"),
        ({"toyrules.drawn.default": "a -> a"}, "toyrules.drawn.default", (random(12),), "other numbers each time"),
        ({"toyrules.doubled.default": "a -> "}, "toyrules.doubled.default", (random(12),), "writes to its arguments"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_wrong_rules_are_found_and_told(operators: Any, op: str, args: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        check_rule(Rules("t", "1", operators), op, *args)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_takes_rules_by_name_and_says_which_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["tests.support.toy_rules:build", "--mesh", "data=2", "--hardware", "h100-sxm", "--quiet"]
    path = tmp_path / "plan.json"
    assert command.main([*asked, "--rules", "tests.support.toy_rules:RULES", "-o", str(path)]) == 0
    assert "has no sharding rule" not in capsys.readouterr().out
    assert Plan.load(path, RULES).rules == (RULES.identity,)
    for wrong, told in (
        ("tests.support.toy_rules", "is not MODULE:NAME"),
        ("tests.support.nobody:RULES", "importing tests.support.nobody failed .*No module"),
        ("tests.support.toy_rules:SUM", "has no autopar.Rules under the name 'SUM'"),
        ("tests.support.toy_rules:RULES,tests.support.toy_rules:NEWER", "rules of toyrules are given twice"),
    ):
        assert command.main([*asked, "--rules", wrong]) == 2
        assert re.search(told, capsys.readouterr().err), wrong


def test_equal_plans_of_equal_rules_stay_equal_and_notes_do_not_hide_it(case: Case) -> None:
    again = Rules("toyrules", "1.0", OPERATORS)
    assert again is not RULES and again.identity == RULES.identity
    one, other = (search(case.wide_graph, mesh_of(2), FAST, rules=rules) for rules in (RULES, again))
    assert dumps(one) == dumps(other) and replace(one) == other
