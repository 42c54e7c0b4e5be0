"""What a user settles of what axes split: it is obeyed, whatever is searched; all else stays open; refusals help."""

from __future__ import annotations

import re

import pytest

from autopar.errors import Infeasible
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.plan.reading import is_weighted, split_of, weights_of
from autopar.plan.value import is_product
from autopar.search import Question, Request, answer, ask
from autopar.search.meshes import best_mesh, meshes_of
from autopar.search.pins import obeyable, pinned
from autopar.search.policies import policies_for
from autopar.search.splits import settled
from cost_models.hardware import Hardware
from tests.support.check import difference
from tests.support.families import family

H100 = Hardware.load("h100-sxm")
MESH = Mesh(("data", "tensor"), (2, 2))
TOLERANCE = 1e-9  # in float64, as in tests/plans/test_random_plans.py
PIN = {
    "transformer.h.*.mlp.c_fc": "tensor: columns",
    "transformer.h.*.mlp.c_proj": "tensor: rows; data: batch",
    "transformer.h.0.attn": "tensor: heads",
}


def gpt2(mesh: Mesh = MESH) -> Question:
    return ask(family("gpt2").graph, mesh, H100)


def in_double(mesh: Mesh) -> Question:
    return ask(family("gpt2").wide_graph, mesh, H100)


def splits(plan: Plan) -> dict[str, dict[str, str]]:
    """Product of the forward pass -> axis -> what it splits."""
    weight_of = weights_of(plan.graph)
    found: dict[str, dict[str, str]] = {}
    for node in plan.graph.nodes:
        choice = plan.choices[node.name]
        if node.phase == "forward" and is_product(choice):
            weighted = is_weighted(node, weight_of)
            told = {axis: split_of(choice, i, weighted) for i, axis in enumerate(plan.mesh.names)}
            found[f"{node.module} {node.op}"] = told
    return found


def obeyed(plan: Plan) -> bool:
    told = splits(plan)
    layers = [f"transformer.h.{n}.mlp" for n in range(2)]
    return (
        all(told[f"{layer}.c_fc autopar.einsum"]["tensor"] == "columns" for layer in layers)
        and all(told[f"{layer}.c_proj autopar.einsum"] == {"data": "batch", "tensor": "rows"} for layer in layers)
        and told["transformer.h.0.attn autopar.attention.default"]["tensor"] == "heads"
    )


@pytest.mark.parametrize("simulation", [False, True])
@pytest.mark.parametrize("tied", [True, None])
def test_a_plan_does_what_is_pinned_and_says_so(simulation: bool, tied: bool | None) -> None:
    question = gpt2()
    free = answer(question, Request(simulation=simulation, tied=tied))
    plan = answer(question, Request(pin=PIN, simulation=simulation, tied=tied))
    assert obeyed(plan) and not obeyed(free), "something has to change"
    assert plan.step_seconds >= free.bound, "what is pinned is one of the free plans"
    notes = [note for note in plan.notes if note.startswith("pinned: ")]
    assert "pinned: transformer.h.*.mlp.c_fc, tensor: columns (2 products)" in notes and len(notes) == 4
    assert not any("pinned" in note for note in free.notes)


def test_ulysses_has_a_name() -> None:
    """The sequence in linear layers, heads in attention (Jacobs et al. 2023); an all-to-all lies between."""
    question, pin = in_double(MESH), {"transformer.h.*.attn": "tensor: ulysses"}
    plan = answer(question, Request(pin=pin))
    told = splits(plan)
    for layer in (f"transformer.h.{n}.attn" for n in range(2)):
        assert told[f"{layer} autopar.attention.default"]["tensor"] == "heads"
        assert told[f"{layer}.c_attn autopar.einsum"]["tensor"] == "sequence"
    assert "tensor splits heads (ulysses)" in plan.explain()
    assert ("all_to_all", "tensor") in plan.comm_bytes
    assert difference(plan, family("gpt2"))[0] <= TOLERANCE
    heads = answer(question, Request(pin={"transformer.h.*.attn": "tensor: heads"}))
    assert "ulysses" not in heads.explain().replace("pinned", ""), "columns before heads: no all-to-all"


def test_baselines_obey_too() -> None:
    question = gpt2()
    for policy in policies_for(MESH):
        assert obeyed(answer(question, Request(pin=PIN, policy=policy))), policy


def test_what_is_pinned_computes_what_the_model_computes() -> None:
    plan = answer(in_double(MESH), Request(pin=PIN))
    assert obeyed(plan) and difference(plan, family("gpt2"))[0] < TOLERANCE


def test_a_pattern_is_pinned_by_its_name() -> None:
    pin = {"transformer.h.1.mlp": "data: ring"}
    plan = answer(in_double(Mesh(("data",), (2,))), Request(pin=pin))
    rings = {plan.graph.by_name[name].module for name, choice in plan.choices.items() if choice.body == "ring"}
    assert {"transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.c_proj"} <= rings
    told = {module: split["data"] for module, split in splits(plan).items()}
    words = [told[f"transformer.h.1.mlp.{name} autopar.einsum"] for name in ("c_fc", "c_proj")]
    assert all(word.endswith(" (ring)") for word in words), words
    again = answer(in_double(Mesh(("data",), (2,))), Request(pin={"transformer.h.1.mlp.c_fc": f"data: {words[0]}"}))
    assert splits(again)["transformer.h.1.mlp.c_fc autopar.einsum"]["data"] == words[0], "what is read can be written"
    assert difference(plan, family("gpt2"))[0] < TOLERANCE


@pytest.mark.parametrize("word", ["context parallel: ring", "sequence (context parallel: ring)"])
def test_so_is_one_of_attention_in_the_words_of_the_plan_too(word: str) -> None:
    plan = answer(in_double(Mesh(("data",), (2,))), Request(pin={"transformer.h.*.attn": f"data: {word}"}))
    rings = [name for name, choice in plan.choices.items() if choice.body == "context parallel: ring"]
    assert len([name for name in rings if plan.graph.by_name[name].phase == "forward"]) == 2
    assert difference(plan, family("gpt2"))[0] < TOLERANCE


@pytest.mark.parametrize("word", ["sequence", "heads"])
def test_attention_that_is_pinned_to_a_dim_splits_it_in_whatever_way(word: str) -> None:
    """Of two kv heads no rank of four has one: heads are split by a pattern, as the sequence always is."""
    question = ask(family("grouped").graph, Mesh(("data",), (4,)), H100)
    plan = answer(question, Request(pin={"*": f"data: {word}"}))
    attention = [split["data"] for name, split in splits(plan).items() if "attention" in name]
    assert attention and all(told.startswith(f"{word} (") for told in attention), attention


def test_a_note_says_how_many_of_the_products_obey() -> None:
    notes = answer(gpt2(), Request(pin={"transformer.h.*": "data: heads"})).notes
    assert "pinned: transformer.h.*, data: heads (2 of 10 products)" in notes


def test_one_of_equal_layers_may_be_pinned_alone() -> None:
    plan = answer(gpt2(), Request(pin={"transformer.h.1.mlp.c_fc": "data: columns"}, tied=True))
    assert splits(plan)["transformer.h.1.mlp.c_fc autopar.einsum"]["data"] == "columns"
    assert not plan.search["tied"], "tied, the layers would have one choice"


def test_the_later_of_two_counts_axis_by_axis() -> None:
    pin = {"transformer.h.*.mlp.c_fc": "data: batch; tensor: columns", "transformer.h.1.mlp.c_fc": "tensor: rows"}
    told = splits(answer(gpt2(), Request(pin=pin)))
    assert told["transformer.h.0.mlp.c_fc autopar.einsum"] == {"data": "batch", "tensor": "columns"}
    assert told["transformer.h.1.mlp.c_fc autopar.einsum"] == {"data": "batch", "tensor": "rows"}


def test_equal_layers_still_share_their_strategies_and_the_question_is_asked_once() -> None:
    question = gpt2()
    wanted = pinned(PIN, question.graph).splits
    found = settled(question, wanted)
    assert settled(question, wanted) is found and settled(question, {}) is question
    products = [node for node in question.graph.nodes if node.op == "autopar.einsum" and node.phase == "forward"]
    of = {node.module: node.name for node in products}
    first, second = (found.strategies[of[f"transformer.h.{n}.mlp.c_fc"]] for n in range(2))
    assert first is second and 0 < len(first) < len(question.strategies[of["transformer.h.0.mlp.c_fc"]])


REFUSED = {
    "lm_head=stage: rows": "pin 'lm_head': mesh data=2,tensor=2 has no axis 'stage', it has data, tensor",
    "lm_head=tensor: colums": "pin 'lm_head': tensor cannot split colums there; choose of batch, batch (ring), ",
    "lm_head=tensor: heads": "pin 'lm_head': tensor cannot split heads there; choose of batch, batch (ring), ",
    "lm_head=tensor:": "pin 'lm_head': 'tensor:' is not AXIS: WORD; write for example 'tensor: columns', or ",
    "lm_head=data: batch; data: rows": "pin 'lm_head': data is to split batch and rows; leave one out",
    "transformer.ln_f=data: batch": "'transformer.ln_f': no product, attention or convolution is there that data could",
    "lm_heads=data: batch": "pin 'lm_heads' is no module or parameter of the model; did you mean 'lm_head'?",
    "transformer.ln_f.weight=data: batch": "is for modules, and it is a parameter; name its module",
}


@pytest.mark.parametrize("pin", REFUSED)
def test_what_cannot_be_is_refused(pin: str) -> None:
    name, _, word = pin.partition("=")
    with pytest.raises(ValueError, match=re.escape(REFUSED[pin])):
        answer(gpt2(), Request(pin={name: word}))


def test_of_the_pins_of_a_module_a_later_graph_keeps_what_it_can_obey() -> None:
    pin = {
        "transformer.h.*": "data: batch", "transformer.h.0.mlp": "recompute", "transformer.g": "save", **PIN,
        "lm_head": "tensor: columns",
    }  # fmt: skip
    left, told = obeyable(pin, gpt2(Mesh(("data", "tensor"), (3, 2))))  # of 4 rows
    kept = {"transformer.h.0.mlp": "recompute", **PIN, "lm_head": "tensor: columns"}
    del kept["transformer.h.*.mlp.c_proj"]  # "data: batch", too
    assert left == kept and [*left] == [*kept]
    assert len(told) == 3 and "pin 'transformer.h.*': data cannot split batch there" in told[-1]


def test_before_the_mesh_is_known_no_axis_can_be_named() -> None:
    request = Request(pin={"first": "data: batch"})
    with pytest.raises(ValueError, match="'data: batch' names a mesh axis, and which mesh is best is what is searched"):
        best_mesh(meshes_of(4, H100), lambda mesh: gpt2(mesh), answer, request)


def test_where_nothing_fits_the_pins_are_said() -> None:
    with pytest.raises(Infeasible):
        answer(gpt2(), Request(memory=1000.0, allow=(), pin=PIN))
