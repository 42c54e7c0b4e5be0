"""Replays of published pipelines: bytes of layers against closed forms, units of the data file, and the targets."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.work import flops_of
from autopar.price.pricer import Pricer
from autopar.propose.strategies import operand_types
from autopar.simulate.kernels import as_kernels
from autopar.simulate.timeline import events_of
from benchmarks.replay.__main__ import main
from benchmarks.replay.float8 import FLOAT8, as_float8
from benchmarks.replay.gpt import gpt, kernel_of
from benchmarks.replay.llama import SHAPES, half_precision_graph
from benchmarks.replay.parts import HEAD, LAYER, Part, parts_of
from benchmarks.replay.pipelines import layers_of, pipelines, predictions
from benchmarks.replay.published import SEQUENCE, plan_of_megatron
from benchmarks.replay.recompute import checkpointed, layer_of
from benchmarks.replay.repeat import TRACED
from benchmarks.replay.rows import machine, torchtitan
from cost_models.simulator import COMPUTE

WIDTH, HEADS, VOCABULARY, MICRO, TOKENS = 512, 8, 1024, 2, 256
SBH = TOKENS * MICRO * WIDTH


def parts(policy: str, ranks: int = 8, split: int | None = None) -> dict[str, Part]:
    graph = checkpointed(gpt(WIDTH, HEADS, VOCABULARY, MICRO, TOKENS), policy, whole=policy == "full")
    hardware = machine("a100-80gb")
    plan = as_kernels(plan_of_megatron(graph, Mesh(("tensor",), (ranks,)), hardware, split), kernel_of)
    return parts_of(plan, Pricer.on(plan.mesh, hardware, "none"))


@pytest.mark.parametrize(
    ("policy", "ranks", "split", "of_sbh"),
    [
        ("none", 1, None, 34 + 5 * HEADS * TOKENS / WIDTH),
        ("none", 8, None, 10 + 24 / 8 + 5 * HEADS * TOKENS / (8 * WIDTH)),
        ("none", 8, SEQUENCE, 34 / 8 + 5 * HEADS * TOKENS / (8 * WIDTH)),
        ("core", 8, SEQUENCE, 34 / 8),
        ("full", 8, None, 2),
    ],
)
def test_a_layer_leaves_to_backward_what_korthikanti_counts(
    policy: str, ranks: int, split: int | None, of_sbh: float
) -> None:
    """Korthikanti et al. 2022, equations 1 to 6; beyond it only the two figures per token that a norm keeps."""
    statistics = 2 * 2 * 4 * TOKENS * MICRO if policy != "full" else 0  # two norms, mean and deviation, float32 at most
    saved = parts(policy, ranks, split)[LAYER].saved
    assert of_sbh * SBH <= saved <= of_sbh * SBH + statistics


def test_a_fused_layer_of_llama_keeps_products_attention_and_sums() -> None:
    """Nothing of norms, rotary embeddings, repeated heads of k and v, or the gate's product."""
    graph = checkpointed(half_precision_graph("llama-3.1-8b", TRACED, 1, TOKENS), "fused", keep_sums=True)
    hardware, shape = machine("h100-sxm"), SHAPES["llama-3.1-8b"]
    plan = as_kernels(plan_of_megatron(graph, Mesh(("tensor",), (1,)), hardware), layer_of)
    width, kv = shape["width"], shape["width"] * shape["kv_heads"] // shape["heads"]
    # its input, q, k, v, what attention gives and its logarithms, the sum behind it, both products of the gate
    kept = 2 * TOKENS * (width + width + 2 * kv + width + width + 2 * shape["hidden"]) + 4 * TOKENS * shape["heads"]
    assert parts_of(plan, Pricer.on(plan.mesh, hardware, "none"))[LAYER].saved == kept


def test_gradients_of_weights_wait_for_32_sbh() -> None:
    """Qi et al. (zero bubble), table 1."""
    assert parts("none", 1)[LAYER].pending == 32 * SBH


def test_products_are_those_of_the_formula() -> None:
    """Forward of a layer: 24 b s h^2 + 4 b s^2 h; of the head 2 b s h v."""
    graph = gpt(WIDTH, HEADS, VOCABULARY, MICRO, TOKENS)
    flops = {LAYER: 0.0, HEAD: 0.0}
    for node in graph.nodes:
        found, kind = flops_of(node, operand_types(node, graph.by_name))
        if node.phase == "forward" and not node.is_source and kind == "matmul":
            flops[HEAD if layer_of(node) is None else LAYER] += found
    assert flops[LAYER] == 3 * (24 * SBH * WIDTH + 4 * SBH * TOKENS)
    assert flops[HEAD] == 2 * SBH * VOCABULARY


def test_tensor_parallel_divides_the_parameters_of_a_layer() -> None:
    whole, eighth = parts("none", 1)[LAYER].numel, parts("none", 8)[LAYER].numel
    assert whole == 12 * WIDTH**2 + 10 * WIDTH
    assert eighth == 12 * WIDTH**2 // 8 + 4 * WIDTH // 8 + 6 * WIDTH


def test_rows_are_seconds_and_layers_go_into_stages() -> None:
    table = pipelines()
    assert {*table.fitted} <= {*table.sources}
    assert {*table.fitted.values()} <= {row.name for row in (*table.rows, *torchtitan().rows)}
    assert {*table.beside} <= {*table.sources}
    assert {*table.beside.values()} <= {row.name for row in table.rows if row.bytes is not None}
    for row in table.rows:
        assert row.micro_batches * row.micro * row.ranks["data"] == row.batch
        assert sum(layers_of(row)) == row.layers
        assert row.mesh.ranks == 8 * (row.mesh.ranks // 8)
        assert row.seconds is None or (row.fits and row.seconds > 0)
    # 175B on 64: 18.13 s; 96 x 64 x 2048 x 96 x 12288^2 x 1.0305 FLOPs there; samples: 24 x 6 / (8 x 11.8)
    assert table.row("175b-full").seconds == 18.13
    assert table.row("zb-1.5b-24-1f1b").seconds == pytest.approx(144 / 94.4)
    assert table.row("sc21-145.6b").seconds == pytest.approx(24.817, abs=1e-3)
    # 2,048 x 8,192 tokens of 6 x 405.85e9 + 6 x 126 x 16,384 x 8,192 FLOPs; 256 x 8,192 tokens
    assert table.row("llama3-405b-8192").seconds == pytest.approx(12.081, abs=1e-3)
    assert table.row("titan-405b-1f1b").seconds == pytest.approx(40.96)
    assert table.row("titan-405b-1f1b").bytes == 88.6e9
    assert table.row("bloom-176b-d8t4p12-2").bytes == 59 * 2**30  # nvidia-smi counts in MiB
    assert not table.row("bloom-206b-d8t4p12-2-h128").fits
    # Korthikanti's 18 a parameter; DeepSpeed's 20, of which 8 are whole where gradients add up in float32
    assert table.row("22b-full").state == (18, 0) and table.row("bloom-176b-d8t4p12-2").state == (8, 12)


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pipelines", "--rows", "gpt-9"])
    assert "no row 'gpt-9'; known rows: sc21-1.7b" in capsys.readouterr().err


def test_in_float8_products_of_layers_cast_each_operand_once_a_pass() -> None:
    hardware = machine("h100-grand-teton")
    graph = gpt(WIDTH, HEADS, VOCABULARY, MICRO, TOKENS)
    plan = plan_of_megatron(graph, Mesh(("tensor",), (1,)), hardware)
    eighth = as_float8(plan)
    cast = {"forward": 0.0, "backward": 0.0}
    for node in graph.nodes:
        if layer_of(node) == 1 and not node.is_source:
            steps = eighth.choices[node.name].steps
            cast[node.phase] += sum(step.nbytes for step in steps if step.op == "casts to float8")
            assert all(step.dtype == FLOAT8 for step in steps if step.kind == "matmul")
        elif layer_of(node) is None and not node.is_source:
            assert eighth.choices[node.name].steps == plan.choices[node.name].steps
    # Forward: what q, k and v read, they and probabilities themselves, what o, up and down read, and six weights.
    probabilities = MICRO * HEADS * TOKENS**2
    assert cast["forward"] == 6 * (SBH * (1 + 3 + 1 + 1 + 4) + probabilities + 12 * WIDTH**2)
    # Backward: the same, and the gradients of what each of these products gives.
    given = SBH * (3 + 1 + 1 + 4 + 1) + probabilities
    assert cast["backward"] == cast["forward"] + 6 * given


def test_of_a_collective_beside_its_product_one_piece_is_waited_for() -> None:
    graph, hardware = gpt(WIDTH, HEADS, VOCABULARY, MICRO, TOKENS), machine("a100-80gb")
    plan = plan_of_megatron(graph, Mesh(("tensor",), (8,)), hardware, SEQUENCE)
    pricer = Pricer.on(plan.mesh, hardware, "none")
    whole, eighth = (parts_of(plan, pricer, pieces)[LAYER] for pieces in (1, 8))
    sent = sum(
        event.seconds for event in events_of(plan, pricer)
        if event.stream != COMPUTE and (name := str(dict(event.about).get("node", "")))
        and layer_of(graph.by_name[name]) == 1
    )  # fmt: skip
    saved = sum(getattr(whole, what) - getattr(eighth, what) for what in ("forward", "inputs", "weights"))
    assert sent > 0 and saved == pytest.approx(7 / 8 * sent)


@pytest.mark.slow
def test_the_targets_that_hold_keep_holding() -> None:
    """SC'21 within 15 %, Korthikanti 10, its activations 1, Llama 3 and torchtitan 15 and in order. Of BLOOM's 39
    rows with a time 37 within 16 % (the page tells of the others); which runs fit, for all but one.
    """
    table = pipelines()
    found, _ = predictions(table, list(table.rows))
    limits = {"sc21": 0.15, "korthikanti": 0.10, "zero-bubble": 0.15, "llama3": 0.15, "titan-405b": 0.15}
    off = {one.row.name: one.error for one in found if one.error is not None}
    assert all(abs(off[one.row.name]) <= limits[one.row.source] for one in found if one.row.source in limits and
               one.row.name in off)  # fmt: skip
    bloom = [abs(error) for name, error in off.items() if name.startswith("bloom")]
    assert len(bloom) == 39 and sum(error <= 0.16 for error in bloom) >= 37
    seconds = {one.row.name: one.seconds for one in found}
    assert 1.18 <= seconds["titan-405b-1f1b"] / seconds["titan-405b-interleaved"] <= 1.38
    assert seconds["llama3-405b-8192"] < 2 * seconds["llama3-405b-16384"]  # of half the ranks, at a better rate
    activations = {one.row.name: one.activations / 2**30 for one in found}
    for name, published in {"22b": 9.56, "175b": 12.35, "530b": 23.08, "1t": 26.56}.items():
        assert activations[f"{name}-selective"] == pytest.approx(published, rel=0.01)
    wrong = {one.row.name for one in found if one.fits != one.row.fits}
    assert wrong == {"bloom-206b-d8t4p12-2-h128"}  # a miss that the page tells
    for one in found:
        if one.row.bytes is not None:
            assert one.bytes == pytest.approx(one.row.bytes, rel=0.1 if one.row.source == "zero-bubble" else 0.16)
