"""Plans with residences and modes as files, as text and as pictures; and what is wrong with one that was edited."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache

import pytest

from autopar.errors import PlanMismatch
from autopar.ir.graph import Node
from autopar.ir.words import count_of
from autopar.ir.work import FETCH, STORE, VIEWS
from autopar.plan import Plan
from autopar.plan.fit import check
from autopar.plan.parts import flaw_of
from autopar.plan.store import dumps
from autopar.plan.tell import modes_of
from autopar.price.reshard import Reshard
from autopar.rewrite import plain
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.residence import ResidenceSampler, hosted

NAMES = ("mlp", "block", "cnn", "gpt2")


@cache
def drawn(name: str, seed: int) -> Plan:
    return ResidenceSampler(family(name).graph, mesh_of(2)).draw(seed)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_survives_its_file(name: str) -> None:
    for seed in range(3):
        plan = drawn(name, seed)
        text = dumps(plan)
        again = Plan.loads(text, "a file")
        assert again == plan and dumps(again) == text
        assert json.loads(text)["residence"] == plan.residence


def test_a_file_from_before_there_were_residences_is_read() -> None:
    plan = replace(drawn("mlp", 0), residence={})
    sampler = ResidenceSampler(family("mlp").graph, mesh_of(2))
    kept = sampler.plan({}, {}, random.Random(0))
    assert "residence" not in json.loads(dumps(kept)) and Plan.loads(dumps(kept), "a file") == kept
    assert flaw_of(plan) is not None  # the fetches of parameters are left


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_is_compared_with_what_was_traced(name: str) -> None:
    for seed in range(3):
        plan = drawn(name, seed)
        assert plain(plan.graph) == family(name).graph
        check(plan, family(name).graph, plan.mesh)
        other = family("block" if name != "block" else "mlp").graph
        with pytest.raises(PlanMismatch, match="was made for"):
            check(plan, other, plan.mesh)


def test_contradictions_are_found() -> None:
    plan = next(p for p in (drawn("mlp", seed) for seed in range(9)) if hosted(p.residence) and stores(p))
    assert flaw_of(plan) is None
    name = hosted(plan.residence)[0]
    others = {parameter: where for parameter, where in plan.residence.items() if parameter != name}
    assert "fetches what does not lie on the host" in str(flaw_of(replace(plan, residence=others)))
    assert "does not have" in str(flaw_of(replace(plan, residence={**plan.residence, "nothing": "host"})))
    assert "is 'disk', not host or stream" in str(flaw_of(replace(plan, residence={**plan.residence, name: "disk"})))
    kept = next(n.target for n in plan.graph.nodes if n.op == "parameter" and n.target not in hosted(plan.residence))
    assert "without a fetch" in str(flaw_of(replace(plan, residence={**plan.residence, kept: "host"})))
    fetch = next(node for node in plan.graph.nodes if node.op == FETCH)
    change = Reshard("a", *plan.choices[fetch.name].takes[0], *plan.choices[fetch.name].takes[0], fetch.outputs[0])  # type: ignore[arg-type]
    moved = replace(plan.choices[fetch.name], reads=((change,),))
    edited = replace(plan, choices={**plan.choices, fetch.name: moved})
    assert "changes the layout of what lies on the host" in str(flaw_of(edited))


def stores(plan: Plan) -> list[str]:
    return [node.operands[0].name for node in plan.graph.nodes if node.op == STORE]


@pytest.mark.parametrize("name", NAMES)
def test_text_and_picture_tell_what_is_not_kept_on_the_device(name: str) -> None:
    for seed in range(3):
        plan = drawn(name, seed)
        text, picture = " ".join(plan.explain().split()), plan.to_dot()
        again = [node for node in plan.graph.nodes if is_again(plan, node)]
        assert ("recomputed in backward: " in text) == bool(again)
        assert (f"offloaded to the host: {count_of(len(stores(plan)), 'value')}" in text) == bool(stores(plan))
        assert (f"on the host: {len(hosted(plan.residence))} parameters" in text) == bool(hosted(plan.residence))
        assert "memory peak" in text and "of host per rank" in text
        modes = modes_of(plan)
        assert {name for name, mode in modes.items() if mode == "offloaded"} == set(stores(plan))
        assert picture.count("rounded,dashed") <= sum(mode == "recomputed" for mode in modes.values())
        assert "fetched from the host" in picture and ("on the host</FONT>" in picture) == bool(plan.residence)
        assert not re.search(r"<B>[^<]*\bfetch\b", picture)


def is_again(plan: Plan, node: Node) -> bool:
    return node.phase == "backward" and node.target in plan.graph.by_name and node.op not in VIEWS
