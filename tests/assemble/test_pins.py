"""What a user settles by name: which values and parameters a name means, that problem and plan obey, and refusals."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from autopar.ir.work import VIEWS
from autopar.plan import Plan
from autopar.plan.tell import OFFLOADED, RECOMPUTED, modes_of
from autopar.price.pricer import Pricer
from autopar.rewrite import OFFLOAD, RECOMPUTE, SAVE, widened
from autopar.search import Request, answer, ask
from autopar.search.memory_options import WAYS, MemoryOptions
from autopar.search.pins import pinned
from autopar.search.policies import policies_for
from cost_models.hardware import Hardware
from tests.assemble.drawn import drawn
from tests.rewrite.test_expose_choices import dropping
from tests.support.check import difference, mesh_of
from tests.support.families import family

H100 = Hardware.load("h100-sxm")
PINS = (
    {
        "transformer.h.0": "recompute",
        "transformer.h.1.mlp": "offload-activations",
        "transformer.wte.weight": "offload-parameters",
    },
    {"transformer.h.*": "save", "transformer.h.1": "recompute", "transformer.h.*.mlp.*.weight": "offload-parameters"},
    {"transformer": "offload-activations", "transformer.h.0": "offload-parameters", "transformer.h.0.ln_1": "device"},
)


def asked(pin: dict[str, str], ways: tuple[str, ...] = ()) -> MemoryOptions:
    settled = pinned(pin, family("gpt2").graph)
    return MemoryOptions(ways).pinning(settled.modes, settled.residence)


def values_of(prefix: str) -> dict[str, tuple[str, ...]]:
    """Forward values (no views) of a module that backward itself reads -> the modes that they could have."""
    graph = family("gpt2").graph
    found: dict[str, tuple[str, ...]] = {}
    for one in widened(graph).again.values():
        node = graph.by_name[one.origin]
        if one.wanted and node.op not in VIEWS and f"{node.module}.".startswith(f"{prefix}."):
            found[one.origin] = one.modes
    return found


def obeys(plan: Plan, prefix: str, word: str) -> bool:
    told = modes_of(plan)
    wanted = {RECOMPUTE: RECOMPUTED, OFFLOAD: OFFLOADED}.get(word)
    values = values_of(prefix)
    assert word == SAVE or any(word in modes for modes in values.values())
    return all(told.get(name) == (wanted if word in modes else None) for name, modes in values.items())


# --- it is obeyed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [None, 1e9])
def test_the_plan_does_what_was_settled_and_offloads_nothing_else(memory: float | None) -> None:
    plan = answer(ask(family("gpt2").graph, mesh_of(2), H100), Request(memory=memory, pin=PINS[0]))
    assert obeys(plan, "transformer.h.0", RECOMPUTE)
    assert obeys(plan, "transformer.h.1.mlp", OFFLOAD)
    assert obeys(plan, "transformer.h.1.attn", SAVE) and obeys(plan, "transformer.ln_f", SAVE)
    assert plan.residence == {"transformer.wte.weight": "host"}


def test_of_two_names_the_later_one_counts() -> None:
    plan = answer(ask(family("gpt2").graph, mesh_of(2), H100), Request(pin=PINS[1]))
    assert obeys(plan, "transformer.h.0", SAVE) and obeys(plan, "transformer.h.1", RECOMPUTE)
    assert set(plan.residence) == {
        f"transformer.h.{i}.mlp.{name}.weight" for i in (0, 1) for name in ("c_fc", "c_proj")
    }
    settled = pinned(PINS[2], family("gpt2").graph).residence
    assert settled["transformer.h.0.ln_1.weight"] == "device" and settled["transformer.h.0.ln_2.weight"] == "host"


@pytest.mark.parametrize("pin", PINS, ids=["one", "two", "three"])
def test_what_is_settled_computes_what_the_model_computes(pin: dict[str, str]) -> None:
    case = family("gpt2")
    plan = answer(ask(case.wide_graph, mesh_of(2), H100), Request(pin=pin))
    assert plan.residence and modes_of(plan)
    off, where = difference(plan, case)
    assert off <= 1e-9, where


def test_policies_keep_it_too_and_so_does_a_plan_that_was_chosen_by_simulation() -> None:
    question = ask(family("gpt2").graph, mesh_of(2), H100)
    for policy in policies_for(mesh_of(2), saving=True):
        plan = answer(question, Request(policy=policy, memory=1e9, pin=PINS[0]))
        assert obeys(plan, "transformer.h.1.mlp", OFFLOAD), policy
        assert plan.residence["transformer.wte.weight"] == "host", policy
    plan = answer(question, Request(memory=1e9, pin=PINS[0], simulation=True))
    assert obeys(plan, "transformer.h.0", RECOMPUTE) and plan.residence == {"transformer.wte.weight": "host"}


def test_where_memory_is_short_the_rest_is_still_open() -> None:
    question = ask(family("gpt2").graph, mesh_of(2), H100)
    pin = {"transformer.h.0": "save", "transformer.h.0.mlp": "device"}
    roomy = answer(question)
    plan = answer(question, Request(memory=0.6 * roomy.peak_bytes["hbm"], pin=pin, time_limit_s=5))
    assert modes_of(plan) or plan.residence
    assert obeys(plan, "transformer.h.0", SAVE)
    assert not any(name.startswith("transformer.h.0.mlp") for name in plan.residence)


@pytest.mark.parametrize("ways", [(), WAYS, ("recompute",), ("offload", "host")], ids=str)
@pytest.mark.parametrize("pin", PINS, ids=["one", "two", "three"])
def test_any_picks_cost_what_the_problem_says(pin: dict[str, str], ways: tuple[str, ...]) -> None:
    options = asked(pin, ways)
    found = drawn(family("gpt2").wide_graph, Pricer.on(mesh_of(2), H100, "adamw", 4000), options)
    for seed in range(2):
        picks = found.tidy(random.Random(seed))
        assert not found.wrong(picks)
        plan = found.plan(picks, found.priced(picks))
        assert (
            options.residence.items() <= {name: plan.residence.get(name, "device") for name in plan.parameters}.items()
        )


def test_layers_that_reside_in_different_places_are_not_tied() -> None:
    question = ask(family("gpt2").graph, mesh_of(2), H100)
    plan = answer(question, Request(tied=True, pin={"transformer.h.0": "offload-parameters"}))
    assert plan.search["tied"] == 0 and all(name.startswith("transformer.h.0.") for name in plan.residence)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["recompute", "offload-parameters", "tensor: rows"])
def test_a_name_that_later_ones_leave_nothing_of_is_told(word: str) -> None:
    other = {"recompute": "save", "offload-parameters": "device"}.get(word, "tensor: columns")
    graph = family("gpt2").graph
    with pytest.raises(ValueError, match=re.escape("pin 'transformer.h.0.mlp' does nothing: 'transformer.h.*' stands")):
        pinned({"transformer.h.0.mlp": word, "transformer.h.*": other}, graph)
    pinned({"transformer.h.*": other, "transformer.h.0.mlp": word}, graph)
    pinned({"transformer.h.0.mlp": word, "transformer.h.*": word}, graph)
    assert pinned({"transformer.h.0.mlp": "data: rows", "transformer.h.*": "tensor: columns"}, graph).splits


WORDS = "save, recompute, offload-activations, device, offload-parameters or offload-optimizer"


@pytest.mark.parametrize(
    ("name", "word", "told"),
    [
        ("transformer.g.0", "save", "is no module or parameter of the model; did you mean 'transformer.h.0'?"),
        ("transformer.h.0", "forget", f"'forget' is not known; choose {WORDS}"),
        (
            "transformer.wte.weight",
            "save",
            "'save' is for modules, and it is a parameter; choose device, offload-parameters",
        ),
        (
            "transformer.h.0.mlp.act",
            "offload-parameters",
            "'offload-parameters' is for parameters, and it has none of its own; choose save, recompute or",
        ),
        (
            "transformer.wpe",
            "offload-activations",
            "'offload-activations' is not to be had, backward reads nothing of it; choose save",
        ),
    ],
)
def test_a_name_or_a_word_that_makes_no_sense_is_told(name: str, word: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"pin {name!r}") + ".*" + re.escape(told)):
        pinned({name: word}, family("gpt2").graph)


def test_what_draws_random_numbers_is_not_run_again() -> None:
    graph = dropping()
    pinned({"transformer.h.0": "recompute"}, graph)
    with pytest.raises(ValueError, match=r"h\.0\.mlp\.dropout': 'recompute' is not to be had, .* draws random numbers"):
        pinned({"transformer.h.0.mlp.dropout": "recompute"}, graph)


def test_a_frozen_parameter_has_no_states_to_offload() -> None:
    graph = family("gpt2").graph
    results = tuple(replace(r, ref=None) if r.kind == "gradient" else r for r in graph.results)
    with pytest.raises(
        ValueError, match=r"'offload-optimizer' is for optimizer states, and lm_head|wte.weight has none"
    ):
        pinned({"transformer.wte.weight": "offload-optimizer"}, replace(graph, results=results))
