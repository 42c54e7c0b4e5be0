"""Policies that are asked for by name: Megatron's sequence parallelism, Ulysses and the ring, as baselines."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.errors import BadArgument
from autopar.ir.attention import OPERANDS_OF_ATTENTION
from autopar.ir.graph import Graph
from autopar.ir.layout import REPLICATE, Shard
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.rules.attended import GROUPED, HEADS, RING
from autopar.search import Question, Request, answer, ask
from autopar.search.baselines import compare, table
from autopar.search.command.arguments import policies_named
from autopar.search.overlap_loop import best_prefetch
from autopar.search.policies import NAMED, policies_for
from autopar.search.sequence_policies import NORMS, ROLES, DoesNotApply
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware
from tests.support.check import difference, mesh_of, worst_difference
from tests.support.families import family

H100 = Hardware.load("h100-sxm")
DOES = {"megatron-sp": {HEADS, GROUPED}, "ulysses": {HEADS, GROUPED}, "ring": {RING}}


@cache
def question(name: str, sizes: tuple[int, ...]) -> Question:
    return ask(family(name).wide_graph, mesh_of(*sizes), H100)


@cache
def plan_of(name: str, sizes: tuple[int, ...], policy: str) -> Plan:
    return answer(question(name, sizes), Request(policy=policy))


@pytest.mark.parametrize("policy", ROLES)
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_numbers_are_those_of_one_process_and_attention_does_what_the_name_says(
    name: str, sizes: tuple[int, ...], policy: str
) -> None:
    plan = plan_of(name, sizes, policy)
    off, where = difference(plan, family(name))
    assert off <= 1e-10, where
    attention = [node for node in plan.graph.nodes if node.op in OPERANDS_OF_ATTENTION]
    assert attention and {plan.choices[node.name].roles[-1] for node in attention} <= DOES[policy]
    if len(sizes) > 1:  # the other axis is fsdp
        assert {plan.choices[node.name].roles[0] for node in attention} == {"b"}


@pytest.mark.parametrize("policy", ROLES)
def test_they_run_under_local_tensors(policy: str) -> None:
    plan, case = plan_of("llama", (2, 2), policy), family("llama")
    with fake_ranks(plan.mesh) as device_mesh:
        off, where = worst_difference(run(plan, device_mesh, case.values(plan.graph)), case.wide_reference)
    assert off <= 1e-10, where


@pytest.mark.parametrize("policy", ["ulysses", "ring"])
def test_the_sequence_is_split_and_parameters_are_as_in_fsdp(policy: str) -> None:
    plan = plan_of("gpt2", (2,), policy)
    inputs = [plan.choices[node.name].gives[0] for node in plan.graph.nodes if node.op == "input"]
    assert inputs and set(inputs) == {(Shard(1),)}
    parameters = plan.parameters.values()
    assert all(isinstance(layout[0], Shard) for layout in parameters)


def test_norms_of_megatron_split_the_sequence_and_its_matrices_stay_in_pieces() -> None:
    plan = plan_of("gpt2", (2,), "megatron-sp")
    norms = [node for node in plan.graph.nodes if node.op in NORMS]
    assert len(norms) == 10  # two layers of two, and the last one, forward and backward
    assert {plan.choices[node.name].takes[0] for node in norms} == {(Shard(1),)}
    types = {node.target: node.outputs[0] for node in plan.graph.nodes if node.op == "parameter"}
    matrices = [layout for name, layout in plan.parameters.items() if len(types[name].shape) > 1]  # type: ignore[union-attr]
    assert matrices and all(layout != (REPLICATE,) for layout in matrices)


# --- bytes -----------------------------------------------------------------------------------------------------------


@cache
def llama(heads: int, kv: int, length: int, batch: int = 1, layers: int = 2) -> Graph:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=8 * heads, intermediate_size=16 * heads, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=length, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.empty(batch, length, dtype=torch.int64)
        return graph_of(capture(model, (), {"input_ids": ids, "labels": ids}))


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_attention_are_those_of_the_formulas(ranks: int) -> None:
    """One sample, so that all else is local. Ulysses: all-to-alls of q, k, v and out, in backward of their gradients,
    and of q, k, v and out again, as a plan saves them as they lie before attention: 12 where the paper, which saves
    them behind, has 8. The ring: keys and values to all others, in backward again, and their gradients.
    """
    heads, length, layers = 4, 24, 2
    piece = length * 8 * heads * 4 // ranks  # bytes of a rank's part of q
    asked = ask(llama(heads, heads, length), Mesh(("x",), (ranks,)), H100)
    moved = {name: answer(asked, Request(policy=name)).comm_bytes for name in ("ulysses", "ring")}
    assert moved["ulysses"]["all_to_all", "x"] == layers * 12 * piece * (ranks - 1) // ranks
    assert moved["ring"]["shift", "x"] == layers * 6 * piece * (ranks - 1)
    assert not {one for one, _ in moved["ring"]} & {"all_to_all"}


# --- what is refused -------------------------------------------------------------------------------------------------


def test_where_they_do_not_apply_a_sentence_says_why() -> None:
    def refused(asked: Question, policy: str, told: str) -> None:
        with pytest.raises(DoesNotApply, match=told) as caught:
            answer(asked, Request(policy=policy))
        assert "\n" not in str(caught.value)

    three = question("gpt2", (3,))
    for policy in ("ulysses", "megatron-sp"):
        refused(three, policy, rf"policy {policy} on axis a=3: the 4 heads of \S*attn do not divide over 3 ranks")
    refused(
        question("gpt2", (5,)), "ring", "a sequence of 12, cannot go round 5 ranks; it takes no mask but the causal"
    )
    refused(question("mlp", (2,)), "ring", "the model has no attention")
    refused(question("gpt2", (2, 1)), "ring", "axis b=1: one rank splits nothing")
    refused(ask(llama(4, 4, 26), mesh_of(4), H100), "ulysses", "a sequence of 26, which 4 ranks do not divide")
    with pytest.raises(BadArgument, match=r"no policy 'rings'; known policies: .*ulysses, ring, optimus-2d, 2.5d, 3d"):
        policies_named("ulysses,rings")
    with pytest.raises(BadArgument, match="--policy gpipe is one of pipeline stages; give --mesh pipe=2"):
        policies_named("ring,gpipe")
    with pytest.raises(BadArgument, match="names 'ring' twice"):
        policies_named("ring,ring")
    assert policies_named(None) == () and policies_named("ddp, data-parallel") == ("data-parallel",)


def test_they_are_rows_of_a_table_only_where_they_are_named() -> None:
    asked = question("gpt2", (3,))
    chosen = answer(asked, Request())
    rows = compare(asked, chosen, Request(), policies=("ring", "ulysses", "fsdp+tensor-parallel"))
    assert [row.policy for row in rows if row.plan is not None] == ["ring"]
    assert "4 heads" in table(chosen, rows) and "needs two mesh axes" in table(chosen, rows)
    assert not set(policies_for(asked.pricer.mesh, saving=True, once=True, dominated=True)) & {*NAMED}


# --- the promise -----------------------------------------------------------------------------------------------------


def slower_than(asked: Question) -> dict[str, float]:
    """Policy -> the searched plan's simulated time to its own."""
    best = answer(asked, Request(simulation=True))
    found: dict[str, float] = {}
    for policy in ROLES:
        plan = answer(asked, Request(policy=policy))
        found[policy] = best.predicted_seconds / best_prefetch(plan, asked.pricer, None).seconds
    return found


def test_the_searched_plan_is_at_least_as_quick_in_simulation_as_each_of_them() -> None:
    assert all(ratio <= 1 + 1e-6 for ratio in slower_than(question("gpt2", (2,))).values())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4,), (8,), (2, 4)], ids=str)
@pytest.mark.parametrize(("heads", "kv", "length", "batch"), [(8, 8, 1024, 8), (8, 8, 65536, 1), (8, 2, 65536, 2)])
def test_on_long_sequences_too(heads: int, kv: int, length: int, batch: int, sizes: tuple[int, ...]) -> None:
    """The ground of these policies: one sample, or two, and a sequence of which attention is most of the work."""
    if len(sizes) > 1 and batch % sizes[0]:
        pytest.skip("the other axis is fsdp, and there is one sample")
    found = slower_than(ask(llama(heads, kv, length, batch), mesh_of(*sizes), H100))
    assert all(ratio <= 1 + 1e-6 for ratio in found.values()), found
