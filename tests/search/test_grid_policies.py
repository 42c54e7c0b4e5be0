"""Policies that lay activations out in two dims and three: Optimus, 2.5D, 3D, as baselines that are named."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.layout import Layout, Partial, Shard
from autopar.plan import Plan
from autopar.search import Question, Request, answer, ask
from autopar.search.baselines import compare, table
from autopar.search.grid_policies import AXES
from autopar.search.overlap_loop import best_prefetch
from autopar.search.policies import policies_for
from autopar.search.sequence_policies import DoesNotApply
from autopar.trace import capture, graph_of
from autopar.trace.precision import precision_named
from cost_models.hardware import Hardware
from tests.support.check import difference, mesh_of, worst_difference
from tests.support.families import family

H100 = Hardware.load("h100-sxm")
BF16 = precision_named("bf16")
GRIDS = [
    ("optimus-2d", (2, 2)), ("optimus-2d", (2, 4)), ("optimus-2d", (4, 2)), ("optimus-2d", (2, 2, 2)),
    ("2.5d", (2, 2, 2)), ("3d", (2, 2, 2)),
]  # fmt: skip


@cache
def question(name: str, sizes: tuple[int, ...]) -> Question:
    return ask(family(name).wide_graph, mesh_of(*sizes), H100)


@cache
def plan_of(name: str, sizes: tuple[int, ...], policy: str) -> Plan:
    return answer(question(name, sizes), Request(policy=policy))


def is_product(node: Node) -> bool:
    """Of a linear layer, forward or backward; those of torch's attention have an operator of their own here."""
    return node.op == "autopar.einsum"


def split(layout: Layout) -> int:
    return sum(isinstance(place, Shard) for place in layout)


@pytest.mark.parametrize(("policy", "sizes"), GRIDS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit", "mlp"])
def test_numbers_are_those_of_one_process_and_every_product_is_what_the_name_says(
    name: str, policy: str, sizes: tuple[int, ...]
) -> None:
    plan = plan_of(name, sizes, policy)
    off, where = difference(plan, family(name))
    assert off <= 1e-10, where
    products = [plan.choices[node.name] for node in plan.graph.nodes if is_product(node)]
    assert len(products) >= 8
    if policy == "3d":  # one axis of the three sums, in backward of weights that of the batch
        sums = [[isinstance(place, Partial) for place in choice.gives[0]] for choice in products]
        assert {choice.body for choice in products} == {""} and {sum(one) for one in sums} == {1}
        assert {one.index(True) for one in sums} == {0, 1, 2}
    else:
        loops = [choice for choice in products if choice.body == "SUMMA"]
        assert all(role.startswith("SUMMA") for choice in loops for role in choice.roles[-2:])
        # two heads of keys, and of values, are no pieces for four ranks where a gradient has heads as a dim
        assert len(products) - len(loops) == (4 if (name, sizes) == ("llama", (2, 4)) else 0)
    for node in plan.graph.nodes:
        if node.op == "parameter" and len(plan.graph.type_of(Ref(node.name)).shape) == 2:
            layout, copies = plan.choices[node.name].gives[0], 1 if policy == "2.5d" else 0
            assert split(layout) >= len(sizes) - copies, node.name


@pytest.mark.parametrize(("policy", "sizes"), GRIDS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_no_activation_is_whole_along_any_axis(name: str, policy: str, sizes: tuple[int, ...]) -> None:
    """Of those as large as the residual stream. A sum that is not there yet is split where it is read."""
    plan, batch, residual = plan_of(name, sizes, policy), 4, 4 * 12 * 48
    found, of_inputs = 0, {node.name for node in plan.graph.nodes if node.op in ("input", "tangent")}
    for node in plan.graph.nodes:
        if not of_inputs.isdisjoint(ref.name for ref in node.operands):
            of_inputs.add(node.name)
        if node.is_source or is_product(node) or node.name not in of_inputs:
            continue
        for type, layout in zip(node.outputs, plan.choices[node.name].gives, strict=True):
            if type is not None and type.shape[:1] == (batch,) and type.numel >= residual:
                assert split(layout) == len(sizes), (node.name, node.op, layout)
                found += 1
    assert found > 40


@pytest.mark.parametrize(("policy", "sizes"), [("optimus-2d", (2, 2)), ("2.5d", (2, 2, 2)), ("3d", (2, 2, 2))], ids=str)
def test_with_low_precision_there_is_a_plan_too(policy: str, sizes: tuple[int, ...]) -> None:
    """Gradients of weights are summed behind their cast, so terms of a sum stay so until then."""
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.LayerNorm(16), torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)
        )
        captured = capture(model, (torch.empty(8, 4, 16),), {}, precision=BF16)
    plan = answer(ask(graph_of(captured, BF16), mesh_of(*sizes), H100), Request(policy=policy))
    products = [plan.choices[node.name] for node in plan.graph.nodes if is_product(node)]
    assert len(products) >= 5 and {choice.body for choice in products} == {"" if policy == "3d" else "SUMMA"}


@pytest.mark.parametrize(("policy", "sizes"), [("optimus-2d", (2, 2)), ("3d", (2, 2, 2))], ids=str)
def test_they_run_under_local_tensors(policy: str, sizes: tuple[int, ...]) -> None:
    plan, case = plan_of("llama", sizes, policy), family("llama")
    with fake_ranks(plan.mesh) as device_mesh:
        off, where = worst_difference(run(plan, device_mesh, case.values(plan.graph)), case.wide_reference)
    assert off <= 1e-10, where


def test_weights_of_25d_are_whole_along_the_first_axis_and_those_of_3d_along_none() -> None:
    for policy, whole in (("2.5d", True), ("3d", False)):
        plan = plan_of("llama", (2, 2, 2), policy)
        matrices = [
            n for n in plan.graph.nodes if n.op == "parameter" and len(plan.graph.type_of(Ref(n.name)).shape) == 2
        ]
        assert {isinstance(plan.choices[node.name].gives[0][0], Shard) for node in matrices} == {not whole}


# --- bytes -----------------------------------------------------------------------------------------------------------


@cache
def layers(batch: int, length: int, width: int, hidden: int) -> Graph:
    """Two linear layers, up and down."""
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Linear(width, hidden, bias=False), torch.nn.GELU(), torch.nn.Linear(hidden, width, bias=False)
        )
        return graph_of(capture(model, (torch.empty(batch, length, width),), {}))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2), (4, 4)], ids=str)
def test_optimus_moves_what_the_paper_says(sizes: tuple[int, int]) -> None:
    """van de Geijn and Watts: of a product two tensors move, each (p - 1) / pq of it along the axis of p. So forward of
    y = x w moves w along the first axis, and x or y along the second; its gradients do so, too.
    """
    tokens, width, hidden = 32 * 16, 64, 128
    asked = ask(layers(32, 16, width, hidden), mesh_of(*sizes), H100)
    plan = answer(asked, Request(policy="optimus-2d"))
    (p, q), ranks = sizes, sizes[0] * sizes[1]
    weights, narrow, wide = width * hidden * 4, tokens * width * 4, tokens * hidden * 4
    moved = {"a": 0, "b": 0}
    for (_, axis), nbytes in plan.comm_bytes.items():
        moved[axis] += nbytes
    assert moved["a"] == 5 * (p - 1) * weights // ranks, (
        "two products forward, three backward: the input has no gradient"
    )
    assert moved["b"] in {(q - 1) * (n * narrow + (5 - n) * wide) // ranks for n in range(6)}


def test_a_product_of_3d_gathers_two_tensors_and_scatters_one() -> None:
    """Where rows of weights lie in mesh order, gathering them over the first axis moves more than (q - 1) / q^3."""
    q, tokens, width, hidden = 2, 32 * 16, 64, 128
    asked = ask(layers(32, 16, width, hidden), mesh_of(q, q, q), H100)
    plan = answer(asked, Request(policy="3d"))
    share = (q - 1) / q**3 * 4
    # of each layer forward: tokens are gathered, and terms of a sum scattered; of the second one's input backward, too
    least = share * 2 * (tokens * width + tokens * hidden)
    found = sum(nbytes for (kind, axis), nbytes in plan.comm_bytes.items() if axis != "a" and kind != "all_reduce")
    assert found >= least


# --- what is refused -------------------------------------------------------------------------------------------------


def test_where_they_do_not_apply_a_sentence_says_why() -> None:
    def refused(asked: Question, policy: str, told: str) -> None:
        with pytest.raises(DoesNotApply, match=told) as caught:
            answer(asked, Request(policy=policy))
        assert "\n" not in str(caught.value)

    refused(question("gpt2", (4,)), "optimus-2d", r"needs 2 mesh axes or more, mesh a=4 has 1; give --mesh i=2,j=2")
    refused(question("gpt2", (2, 2)), "2.5d", r"needs 3 mesh axes or more, mesh a=2,b=2 has 2; give --mesh i=2,j=2,l=2")
    refused(question("gpt2", (2, 2, 4)), "3d", r"needs three axes of one size, mesh a=2,b=2,c=4 has not")
    refused(question("gpt2", (2, 1)), "optimus-2d", r"splits over the last two axes, one of mesh a=2,b=1 has one rank")
    refused(question("gpt2", (3, 2)), "optimus-2d", r"on a=3,b=2: no product of the model runs so, as batch, features")


def test_they_are_rows_of_a_table_only_where_they_are_named() -> None:
    asked = question("mlp", (2, 2))
    chosen = answer(asked, Request())
    rows = compare(asked, chosen, Request(), policies=("optimus-2d", "2.5d"))
    assert [row.policy for row in rows if row.plan is not None] == ["optimus-2d"]
    assert "needs 3 mesh axes" in table(chosen, rows)
    assert not set(policies_for(asked.pricer.mesh, saving=True, once=True, dominated=True)) & {*AXES}


# --- the promise -----------------------------------------------------------------------------------------------------


def slower_than(asked: Question, policies: tuple[str, ...]) -> dict[str, float]:
    """Policy -> the searched plan's simulated time to its own."""
    best = answer(asked, Request(simulation=True)).predicted_seconds
    plans = {policy: answer(asked, Request(policy=policy)) for policy in policies}
    return {policy: best / best_prefetch(plan, asked.pricer, None).seconds for policy, plan in plans.items()}


def test_the_searched_plan_is_at_least_as_quick_in_simulation() -> None:
    assert slower_than(question("mlp", (2, 2)), ("optimus-2d",))["optimus-2d"] <= 1 + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("width", "batch"), [(512, 8), (4096, 8), (1024, 64)])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 4), (2, 4), (2, 2, 2)], ids=str)
def test_on_their_own_ground_too(width: int, batch: int, sizes: tuple[int, ...]) -> None:
    """Wide layers and few tokens, whose weights are most of what moves, and the other way round."""
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.empty(batch, 128, dtype=torch.int64)
        graph = graph_of(capture(transformers.LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids}))
    policies = ("optimus-2d",) if len(sizes) == 2 else ("optimus-2d", "2.5d", "3d")
    found = slower_than(ask(graph, mesh_of(*sizes), H100), policies)
    assert all(ratio <= 1 + 1e-6 for ratio in found.values()), found
