"""What a replay adds to a model and to its plan: recomputing, copied layers, kernels, float8, pieces of collectives."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from torch.utils.flop_counter import FlopCounterMode

from autopar.ir.attention import OPERANDS_OF_ATTENTION
from autopar.ir.graph import Graph
from autopar.ir.layout import Shard
from autopar.ir.mesh import parse_mesh
from autopar.ir.work import VIEWS, flops_of
from autopar.measure.memory import LiveBytes
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.propose.strategies import operand_types
from autopar.rules.attended import RING
from autopar.simulate.kernels import as_kernels, kernels
from autopar.simulate.timeline import events_of
from autopar.trace import capture, graph_of
from benchmarks.replay.float8 import FLOAT8, as_float8
from benchmarks.replay.llama import graph_of_model, model_of, with_batch
from benchmarks.replay.predict import predict
from benchmarks.replay.published import plan_as_published
from benchmarks.replay.recompute import AGAIN, checkpointed, kept_by_policy, layer_of
from benchmarks.replay.repeat import repeated
from benchmarks.replay.rows import machine, torchtitan
from cost_models.simulator import play
from cost_models.steps import Comm, Compute

SHAPE = {"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocabulary": 160}
BATCH, SEQUENCE = 8, 32
H100 = machine("h100-grand-teton")


@cache
def graph(layers: int = 3) -> Graph:
    return graph_of_model(SHAPE, layers, BATCH, SEQUENCE)


@cache
def plan(mesh: str, policy: str, layers: int = 3) -> Plan:
    parsed = parse_mesh(mesh)
    return plan_as_published(checkpointed(graph(layers), policy, keep_sums=len(parsed.sizes) > 1), parsed, H100)


# --- the graph -------------------------------------------------------------------------------------------------------


def test_a_graph_of_another_batch_is_what_tracing_gives() -> None:
    assert with_batch(graph_of_model(SHAPE, 3, 131, SEQUENCE), 131, BATCH, SEQUENCE).digest == graph().digest


def products(made: Graph, wanted: Callable[[str], bool] = lambda name: True) -> float:
    total = 0.0
    for node in made.nodes:
        flops, kind = flops_of(node, operand_types(node, made.by_name))
        if not node.is_source and kind == "matmul" and wanted(node.name):
            total += flops
    return total


def forward_of_layers(last: bool = True) -> float:
    """Flops of the layers' products in one forward pass; without `last`, less each layer's last one."""
    names = {
        node.name
        for node in graph().nodes
        if node.phase == "forward" and layer_of(node) is not None and (last or "down_proj" not in node.module)
    }
    return products(graph(), names.__contains__)


def test_full_checkpointing_runs_the_layers_forward_once_more() -> None:
    plain = products(checkpointed(graph(), "none"))
    assert plain == products(graph())
    assert products(checkpointed(graph(), "full")) - plain == forward_of_layers(last=False)
    assert products(checkpointed(graph(), "full", whole=True)) - plain == forward_of_layers()


def test_selective_checkpointing_runs_every_second_product_once_more() -> None:
    kept = {node.module.rsplit(".", 1)[-1] for node in graph().nodes if node.name in kept_by_policy(graph(), "op")}
    assert kept == {"q_proj", "v_proj", "self_attn", "gate_proj", "down_proj"}
    made = checkpointed(graph(), "op")
    again = Counter(
        node.module.rsplit(".", 1)[-1] for node in made.nodes if node.op == "autopar.einsum" and AGAIN in node.name
    )
    assert again == {"k_proj": 3, "o_proj": 3, "up_proj": 3}
    with_sums = checkpointed(graph(), "op", keep_sums=True)
    assert not any("o_proj" in node.module and AGAIN in node.name for node in with_sums.nodes if "einsum" in node.op)


class Checkpointed(nn.Module):
    """A layer under torch's own checkpointing; "op" keeps what torchtitan's policy keeps."""

    def __init__(self, inner: nn.Module, policy: str) -> None:
        super().__init__()
        self.inner, self.policy = inner, policy

    def forward(self, hidden: Tensor, **kwargs: object) -> Tensor:
        contexts = self.contexts if self.policy == "op" else noop_context_fn
        return checkpoint(lambda x: self.inner(x, **kwargs), hidden, use_reentrant=False, context_fn=contexts)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        count: Counter[bool] = Counter()

        def keep(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            again = context.is_recompute  # type: ignore[attr-defined]
            count[again] += op == torch.ops.aten.mm.default
            kept = "scaled_dot_product" in str(op) or (op == torch.ops.aten.mm.default and count[again] % 2 == 1)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(keep)


def test_torch_recomputes_the_same_products_and_frees_about_the_same_memory() -> None:
    """The rewritten graph beside `torch.utils.checkpoint` on a real model, on one rank in float32."""
    shape = {**SHAPE, "layers": 4}
    flops: dict[str, float] = {}
    peaks: dict[str, int] = {}
    ids = torch.randint(0, shape["vocabulary"], (BATCH, SEQUENCE))
    for policy in ("none", "full", "op"):
        model = model_of(shape, shape["layers"], SEQUENCE)
        if policy != "none":
            model.model.layers = nn.ModuleList(Checkpointed(layer, policy) for layer in model.model.layers)
        live = LiveBytes()
        live.watch((list(model.parameters()), ids))
        with live:
            model(input_ids=ids, labels=ids).loss.backward()
        peaks[policy] = live.peak
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        counts = counter.get_flop_counts()["Global"]
        flops[policy] = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.bmm", "aten.addmm"))

    with torch.device("meta"):
        model = model_of(shape, shape["layers"], SEQUENCE)
        shapes = torch.empty(BATCH, SEQUENCE, dtype=torch.long)
    traced = graph_of(capture(model, (), {"input_ids": shapes, "labels": shapes}))
    mesh = parse_mesh("data=1")
    ours: dict[str, int] = {}
    for policy in ("none", "full", "op"):
        made = checkpointed(traced, policy, hold_saved=True)
        assert products(made) == flops[policy]
        ours[policy] = plan_as_published(made, mesh, H100, optimizer="none").peak_bytes["hbm"]
        assert ours[policy] == pytest.approx(peaks[policy], rel=0.1), policy
    for policy in ("full", "op"):
        assert ours["none"] - ours[policy] == pytest.approx(peaks["none"] - peaks[policy], rel=0.15), policy


def test_a_gradient_is_cast_where_it_is_made() -> None:
    """In the traced graph all these casts stand at the very end, and every whole gradient lives until then."""
    made = checkpointed(graph(), "full")
    at = {node.name: number for number, node in enumerate(made.nodes)}
    ends = [result.ref.name for result in made.results if result.kind == "gradient" and result.ref is not None]
    assert all(at[name] - at[made.by_name[name].operands[0].name] == 1 for name in ends)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_published_tensor_parallel_is_megatrons_with_sequence_parallel() -> None:
    """Per layer and direction two gathers and two scatters of activations; recomputing adds what forward has, less the
    last scatter, whose sum backward does not need."""
    found = plan("data=2,tensor=2", "full")
    stream = BATCH * SEQUENCE * SHAPE["width"] * 2 // 2  # bytes of an activation in bfloat16, of this rank's batch
    of_layer: Counter[tuple[str, str]] = Counter()
    for node in found.graph.nodes:
        if layer_of(node) != 1:
            continue
        for read in found.choices[node.name].reads:
            for change in read:
                for step in change.steps(found.mesh.size(change.axis)):
                    if isinstance(step, Comm) and step.axis == "tensor" and step.nbytes == stream:
                        of_layer[node.phase, step.collective] += 1
    assert of_layer == {
        ("forward", "all_gather"): 2, ("forward", "reduce_scatter"): 2,
        ("backward", "all_gather"): 2 + 2, ("backward", "reduce_scatter"): 2 + 1,
    }  # fmt: skip


def test_the_published_context_parallel_splits_the_sequence_everywhere() -> None:
    """One sequence a rank of data: attention in a ring, logits in pieces of tokens, parameters over both axes."""
    mesh, length = parse_mesh("data=2,context=2"), 24
    made = checkpointed(graph_of_model(SHAPE, 3, 2, length), "full")
    found = plan_as_published(made, mesh, H100)
    attention = [node for node in found.graph.nodes if node.op in OPERANDS_OF_ATTENTION]
    assert attention and {found.choices[node.name].roles for node in attention} == {("b", RING)}
    logits = [n for n in found.graph.nodes if n.outputs[0] and n.outputs[0].numel == 2 * length * SHAPE["vocabulary"]]
    assert len(logits) > 4
    for node in logits:
        assert all(isinstance(place, Shard) for place in found.choices[node.name].gives[0]), node.name
    assert set(found.parameters.values()) == {(Shard(0), Shard(0))}


def test_asynchronous_tensor_parallel_waits_for_one_piece_of_eight() -> None:
    made = plan("data=2,tensor=2", "full")
    row = replace(torchtitan().row("8b-64-tp8"), mesh=made.mesh)
    waits, fewer = (predict(one, H100, made).parts["comm:tensor"] for one in (row, replace(row, async_tp=True)))
    assert 0 < fewer <= waits / 7


def test_in_float8_products_of_layers_take_less_and_casts_are_paid() -> None:
    made = plan("data=4", "full")
    parts = [predict(torchtitan().row("8b-8"), H100, one).parts["compute"] for one in (made, as_float8(made))]
    steps = [s for c in as_float8(made).choices.values() for s in c.steps if isinstance(s, Compute)]
    assert parts[0] != parts[1] and {s.dtype for s in steps if s.kind == "matmul"} >= {FLOAT8, "bfloat16"}
    assert any(s.op == "casts to float8" and s.nbytes > 0 for s in steps)


@pytest.mark.parametrize(("mesh", "policy"), [("data=4", "op"), ("data=2,tensor=2", "full"), ("data=4", "none")])
def test_copied_layers_are_what_a_longer_model_gives(mesh: str, policy: str) -> None:
    copied, direct = repeated(plan(mesh, policy), 5), plan(mesh, policy, 5)
    assert len(copied.graph.nodes) == len(direct.graph.nodes)
    assert set(copied.parameters) == set(direct.parameters)
    assert copied.comm_bytes == direct.comm_bytes
    for prefetch in (None, 8):
        ours, theirs = (
            play(events_of(one, Pricer.on(one.mesh, H100, one.optimizer, one.bucket_bytes), prefetch))
            for one in (copied, direct)
        )
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-9)
        assert ours.memory["hbm"].peak_bytes == theirs.memory["hbm"].peak_bytes


def test_fewer_layers_than_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="can only grow"):
        repeated(plan("data=4", "op"), 2)


def test_a_compiled_layer_moves_less_and_multiplies_as_much() -> None:
    eager = as_kernels(plan("data=4", "op"))
    fused = as_kernels(plan("data=4", "op"), layer_of)
    moved, flops, launched = (
        [sum(part(step) for choice in one.choices.values() for step in choice.steps if isinstance(step, Compute))
         for one in (eager, fused)]
        for part in (lambda s: s.nbytes, lambda s: s.flops if s.kind == "matmul" else 0.0, lambda s: s.kernels)
    )  # fmt: skip
    assert moved[1] < moved[0] and launched[1] < launched[0] and flops[0] == flops[1]


def test_a_kernel_waits_for_nothing_that_waits_for_it() -> None:
    one = plan("data=2,tensor=2", "op")
    of: dict[str, object] = {name: number for number, names in enumerate(kernels(one, layer_of)) for name in names}
    arrows: nx.DiGraph[object] = nx.DiGraph()
    for node in one.graph.nodes:
        if node.op in VIEWS:  # no work of its own: it belongs to what it looks at
            of[node.name] = of.get(node.operands[0].name, node.operands[0].name)
        for ref in node.operands:
            ends = of.get(ref.name, ref.name), of.get(node.name, node.name)
            if ends[0] != ends[1]:
                arrows.add_edge(*ends)
    assert nx.is_directed_acyclic_graph(arrows)
    layers = [{layer_of(one.graph.by_name[name]) for name in names} for names in kernels(one, layer_of)]
    assert all(len(found) == 1 for found in layers)


def test_a_causal_mask_halves_attention() -> None:
    one = plan("data=4", "full")
    priced = as_kernels(one)
    head = SHAPE["width"] // SHAPE["heads"]
    square = 2.0 * BATCH // 4 * SHAPE["heads"] * SEQUENCE * SEQUENCE * head  # one product of this rank's part
    seen = 0
    for node in one.graph.nodes:
        if node.op in OPERANDS_OF_ATTENTION:
            seen += 1
            (step,) = (step for step in priced.choices[node.name].steps if isinstance(step, Compute))
            assert step.flops == pytest.approx((5 if "backward" in node.op else 2) * square / 2)
    assert seen == 3 * 3  # forward, again, backward
