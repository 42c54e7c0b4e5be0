"""Elixir's search asked about a traced model, and its answer as a policy: priced, refereed, run."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from autopar.errors import Infeasible
from autopar.ir.graph import Graph, batch_size
from autopar.price.pricer import Pricer
from autopar.search import Request, answer, ask
from autopar.search.elixir import AUTHORS_MACHINE, Training, chunks, elixir_search
from autopar.search.elixir.placing import activation_bytes, parameters_and_steps, placed
from autopar.search.elixir.search import DRIVER_BYTES
from autopar.search.overlap_loop import best_prefetch
from autopar.search.policies import memory_options_of, policy_named
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware
from tests.search.elixir import opt as golden
from tests.search.elixir.test_opt import TABLE
from tests.support.check import difference, mesh_of
from tests.support.families import family

GIB, MIB = 2**30, 2**20
H100 = Hardware.load("h100-sxm")


def opt_graph(hidden: int, layers: int, vocabulary: int) -> Graph:
    config = transformers.OPTConfig(
        num_hidden_layers=layers, hidden_size=hidden, ffn_dim=4 * hidden, num_attention_heads=hidden // 16,
        vocab_size=vocabulary, dropout=0.0, max_position_embeddings=2048, word_embed_proj_dim=hidden, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = transformers.OPTForCausalLM(config), torch.zeros(4, 32, dtype=torch.int64)
    return graph_of(capture(model, (), {"input_ids": ids, "labels": ids}))


@cache
def gpt2() -> Graph:
    """Two layers of the shapes of GPT-2 small, with a small vocabulary."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=768, n_head=12, vocab_size=4096, n_positions=256, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = transformers.GPT2LMHeadModel(config), torch.zeros(8, 256, dtype=torch.int64)
    return graph_of(capture(model, (), {"input_ids": ids, "labels": ids}))


# --- what it is told -------------------------------------------------------------------------------------------------


def test_a_traced_opt_has_the_parameters_and_steps_of_the_golden_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(golden.HIDDEN_AND_LAYERS, "small", (64, 3))
    monkeypatch.setattr(golden, "VOCABULARY", 500)
    there, steps = golden.opt("small")
    found, ours = parameters_and_steps(opt_graph(64, 3, 500))
    assert [(one.numel, one.tied) for one in found] == [(one.numel, one.tied) for one in there]
    at, at_there = ({one.name: place for place, one in enumerate(names)} for names in (found, there))
    assert [sorted(at[name] for name in step) for step in ours] == [
        sorted(at_there[name] for name in step) for step in steps
    ]


@pytest.mark.slow
def test_a_traced_opt_is_placed_as_the_golden_table_says() -> None:
    """In full precision nothing is known of it; so the search is asked as the table asks it, with what was traced."""
    parameters, steps = parameters_and_steps(opt_graph(4096, 32, 50272))
    for capacity, activation, ranks in ((32, 6, 1), (80, 6, 1), (132, 6, 1), (40, 6, 4)):
        found = elixir_search(
            parameters, steps, capacity_bytes=capacity * GIB, activation_bytes=activation * GIB, ranks=ranks,
            hook_elements=golden.VOCABULARY * 4096, checkpoint_elements=golden.checkpoint_elements("6.7B"),
        )  # fmt: skip
        row = TABLE["6.7B", capacity, activation, ranks]
        assert (found.device_chunks, found.tied_on_device) == (row[3], row[4])


def test_activations_shrink_with_the_batch_and_are_less_than_all_that_is_made() -> None:
    graph = gpt2()
    found = activation_bytes(graph)
    logits = 8 * 256 * 4096 * 4
    border = 8 * 256 * 768 * 4
    assert 2 * logits + 2 * border <= found
    made = sum(t.nbytes for n in graph.nodes if not n.is_source and n.phase == "forward" for t in n.outputs if t)
    assert found < made


# --- as a policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mib", [300, 320, 350, 500])
def test_parameters_reside_where_the_search_says(mib: int) -> None:
    graph, pricer, memory = gpt2(), Pricer.on(mesh_of(2), H100, "adamw"), mib * MIB
    parameters, steps = parameters_and_steps(graph)
    layer = 12 * 768**2 + 13 * 768
    said = elixir_search(
        parameters, steps, capacity_bytes=memory + DRIVER_BYTES, activation_bytes=activation_bytes(graph) / 2, ranks=2,
        training=Training("fp32", "adam"), checkpoint_elements=layer, rates=AUTHORS_MACHINE,
    )  # fmt: skip
    assert placed(graph, memory, ranks=2, batch=batch_size(graph), optimizer="adamw") == said
    residence = memory_options_of("elixir", graph, pricer, memory).residence
    assert {name for name, where in residence.items() if where == "device"} == {
        name for name, here in said.is_on_device.items() if here
    }


def test_the_search_is_never_worse_than_elixir_and_both_fit() -> None:
    asked = ask(gpt2(), mesh_of(2), H100)
    hosted: set[int] = set()
    for mib in (300, 350):
        memory = float(mib * MIB)
        plan = answer(asked, Request(memory=memory, policy="elixir"))
        hosted.add(sum(where == "host" for where in plan.residence.values()))
        assert plan.peak_bytes["hbm"] <= memory
        best = answer(asked, Request(memory=memory, simulation=True))
        assert best.step_seconds <= plan.step_seconds * (1 + 1e-3)
        assert best.predicted_seconds <= best_prefetch(plan, asked.pricer, memory).seconds * (1 + 1e-3)
    assert len(hosted) == 2 and min(hosted) < max(hosted), hosted


def test_its_plan_computes_what_the_model_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = family("gpt2")
    monkeypatch.setattr(chunks, "FIRST_BASE_BYTES", 2**13)  # chunks are for large models
    asked = ask(case.wide_graph, mesh_of(2), H100)
    for memory in range(600_000, 3_000_000, 100_000):
        try:
            plan = answer(asked, Request(memory=float(memory), policy="elixir"))
        except Infeasible:
            continue
        if 0 < len(plan.residence) < len(plan.parameters):
            break
    else:
        pytest.fail("nowhere are some on the host, and some not")
    assert any(node.target and not node.is_source for node in plan.graph.nodes), "layers are checkpointed"
    off, where = difference(plan, case)
    assert off <= 1e-9, where


def test_too_little_memory_is_told_with_elixirs_numbers() -> None:
    with pytest.raises(Infeasible, match=r"no elixir plan fits in 1\.00 MiB per rank: .* too few|is room for"):
        answer(ask(gpt2(), mesh_of(2), H100), Request(memory=float(MIB), policy="elixir"))


@pytest.mark.parametrize(("name", "policy"), [("ddp", "data-parallel"), ("zero3", "fsdp"), ("elixir", "elixir")])
def test_policies_have_other_names(name: str, policy: str) -> None:
    assert policy_named(name) == policy
