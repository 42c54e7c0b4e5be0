"""Replays of published tables: the data, what the replay adds to a plan, and the commands."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
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
from autopar.simulate.timeline import events_of
from autopar.trace import capture, graph_of
from benchmarks.replay import report
from benchmarks.replay.__main__ import main, outcomes_of
from benchmarks.replay.float8 import FLOAT8, as_float8
from benchmarks.replay.kernels import as_kernels, kernels
from benchmarks.replay.llama import SHAPES, graph_of_model, model_of, with_batch
from benchmarks.replay.optimus import optimus
from benchmarks.replay.pipelines import PARAMETERS
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


MISSES = {"8b-8-cp": 0.17, "8b-8-cp2": 0.25}  # row -> how far its time is off, at most


@cache
def graph(layers: int = 3) -> Graph:
    return graph_of_model(SHAPE, layers, BATCH, SEQUENCE)


@cache
def plan(mesh: str, policy: str, layers: int = 3) -> Plan:
    parsed = parse_mesh(mesh)
    return plan_as_published(checkpointed(graph(layers), policy, keep_sums=len(parsed.sizes) > 1), parsed, H100)


# --- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_row_comes_out_within_its_target() -> None:
    """15 % in time, 10 % in memory, 10 % in ratios between rows of one kind and table: no later change may lose them
    unseen. Two rows of long sequences miss theirs, and ratios between those of float8, which the page says.
    """
    outcomes, _ = outcomes_of(torchtitan())
    reported = [one for one in outcomes if one.row.use == "reported"]
    assert len(reported) == 28
    for one in reported:
        limit = 0.10 if one.row.kind == "asynchronous tensor parallel" else 0.15
        assert abs(one.time_error) <= limit or one.row.name in MISSES, (one.row.name, one.time_error)
        if one.row.name in MISSES:
            assert limit < abs(one.time_error) <= MISSES[one.row.name], (one.row.name, one.time_error)
    for one in outcomes:
        assert one.memory_error is None or abs(one.memory_error) <= 0.10, (one.row.name, one.memory_error)
    for one, other in combinations(reported, 2):
        if (one.row.source, one.row.kind) == (other.row.source, other.row.kind) and "float8" not in one.row.kind:
            ratio = (1 + one.time_error) / (1 + other.time_error)
            assert 1 / 1.1 <= ratio <= 1.1, (one.row.name, other.row.name, ratio)
    longer = [one for one in reported if "long" in one.row.kind]  # from the shortest on, and each is slower
    assert [one.tokens_per_s for one in longer] == sorted((one.tokens_per_s for one in longer), reverse=True)


# --- the data --------------------------------------------------------------------------------------------------------


def test_every_row_is_complete_and_says_where_it_stands() -> None:
    table = torchtitan()
    for row in table.rows:
        assert row.source.url.startswith("https://github.com/pytorch/") and row.source.date[:2] == "20"
        assert row.tokens_per_s > 0 and row.sequence > 0 and row.local_batch > 0 and row.mesh.ranks > 1
        assert row.use == "not modelled" or row.model in SHAPES
        if row.use != "not modelled":
            assert machine(row.source.hardware).name == row.source.hardware
    assert {row.name for row in table.rows if row.use == "fit"} == {row.name for row in table.fitted_on.values()}


def test_what_is_fitted_on_is_published_elsewhere_than_what_is_reported() -> None:
    table = torchtitan()
    fitted_on = {row.source.url for row in table.fitted_on.values()}
    assert not fitted_on & {row.source.url for row in table.rows if row.use == "reported"}
    two_d = optimus()
    assert {two_d.row(name).use for name in two_d.fitted.values()} == {"fit"}
    assert sum(row.use == "fit" for row in two_d.rows) == len(two_d.fitted)


def test_tokens_per_second_become_seconds_of_a_step() -> None:
    table = torchtitan()
    # 2 sequences of 8192 tokens on each of 8 GPUs; 5762 tokens/s on each: 16384 / 5762
    assert table.row("8b-8").seconds == pytest.approx(2.84345, abs=1e-5)
    # 16 sequences on each of 32 groups, 256 GPUs: 512 * 8192 / (597.3 * 256) = 4194304 / 152908.8
    assert table.row("70b-256-tp8").seconds == pytest.approx(27.43010, abs=1e-5)
    assert table.row("70b-256-tp8").batch == 512


def test_the_shapes_have_the_models_parameters() -> None:
    published = {"llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.55e9, "llama-2-13b": 13.02e9, "llama-2-70b": 68.98e9}
    published |= PARAMETERS
    for name, shape in SHAPES.items():
        attention = shape["width"] * shape["width"] * (2 + 2 * shape["kv_heads"] / shape["heads"])
        layer = attention + 3 * shape["width"] * shape["hidden"] + 2 * shape["width"]
        numel = shape["layers"] * layer + (2 * shape["vocabulary"] + 1) * shape["width"]
        assert numel == pytest.approx(published[name], rel=1e-3), name


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


# --- the commands ----------------------------------------------------------------------------------------------------


def test_the_command_prints_published_predicted_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["torchtitan", "--rows", "ao-8b-8", "8b-8-compile"]) == 0
    out = capsys.readouterr().out
    fit, line = (
        next(line for line in out.splitlines() if line.startswith(f"{name} ")) for name in ("ao-8b-8", "8b-8-compile")
    )
    assert "fitted on" in fit and " 6150  " in fit
    assert " 6667  " in line and line.count("%") == 3
    assert "time, h100-grand-teton: 1 rows" in out and "fitted on the time of ao-8b-8" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["torchtitan", "--rows", "405b-512-pp"], "not modelled: pipeline stages"),
        (["torchtitan", "--rows", "9b"], "no row '9b'; known rows: ao-8b-8"),
        (["torchtitan", "--rows", "8b-8", "--write"], "leave --rows away"),
    ],
)
def test_a_row_that_cannot_be_replayed_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_only_the_generated_section_of_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "replay.md"
    page.write_text("before\n<!-- optimus: generated -->\nold\n<!-- optimus: end -->\nafter\n")
    monkeypatch.setattr(report, "PAGE", page)
    report.write("optimus", "new", 1.0)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("-->\nafter\n") and "new" in text and "old" not in text
    with pytest.raises(ValueError, match="torchtitan: generated"):
        report.write("torchtitan", "new", 1.0)


@pytest.mark.slow
def test_the_targets_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """8B and 70B within 15 % in time and 10 % in memory, ratios between rows of one table within 10 %."""
    rows = [row.name for row in torchtitan().rows if row.use != "not modelled" and "float8" not in row.kind]
    assert main(["torchtitan", "--rows", *rows]) == 0
    out = capsys.readouterr().out
    worst = [float(line.split("worst ")[1].split(" %")[0]) for line in out.splitlines() if "worst " in line]
    limits = [15.0, 10.0, 15.0, 10.0]  # time: H100, with asynchronous tensor parallel, A100; memory
    assert len(worst) == 4 and all(abs(error) <= limit for error, limit in zip(worst, limits, strict=True)), out
    off = [float(line.split("at most ")[1].split(" %")[0]) for line in out.splitlines() if line.startswith("ratios")]
    assert len(off) == 4 and max(off) <= 10.0, out


@pytest.mark.slow
def test_megatron_on_frontera(capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows fit the links; the two that are left are predicted within 15 % in time."""
    assert main(["optimus", "--rows", "megatron-4", "megatron-16", "megatron-36", "megatron-64"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("megatron")]
    assert [line[6] for line in lines[:2]] == ["fitted", "fitted"]
    assert all(abs(float(line[6])) < 15 for line in lines[2:])
