"""Pipelines that are planned: played as they say, within memory, balanced, and never worse than an even cut."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import Infeasible, NotCut, PlanMismatch
from autopar.ir.graph import Graph
from autopar.ir.layout import Replicate
from autopar.ir.mesh import Mesh
from autopar.pipeline import least_seconds, memory, play, verify
from autopar.plan import Plan
from autopar.plan.utilisation import flops_by_dtype
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Request, search
from autopar.search.context import ask
from autopar.search.cutting import Cutting
from autopar.search.kept import keep_plan, kept_pipeline
from autopar.search.micro_batches import counts_in_stages
from autopar.search.orders import SCHEDULES, within_stage
from autopar.search.pipeline import Pipeline
from autopar.search.pipeline_told import document, explain, modules_of, tied_in, utilisation_of
from autopar.search.pipelines import find_pipeline, pipeline_of
from autopar.search.request import Held
from autopar.search.stage_policies import STAGED, compare_staged
from autopar.search.stage_prices import together
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware
from tests.support.families import family
from tests.support.machines import FAST

ALONE = Request(allow=())
TWO = Mesh(("pipe", "data"), (2, 2))


class Layers(nn.Module):
    """Linear layers with a kink between them, each from and to the width of the one before."""

    def __init__(self, *hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)) for width in hidden
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(x, y)


@cache
def layers(*hidden: int) -> Graph:
    return graph_of(capture(Layers(*hidden), (torch.randn(64, 64), torch.randn(64, 64)), {}))


EVEN, UNEVEN = (256,) * 8, (64, 64, 64, 64, 64, 64, 512, 1024)


@cache
def piped(hidden: tuple[int, ...], stages: int, micro_batches: int, schedule: str = "auto") -> Pipeline:
    mesh = Mesh(("pipe", "data"), (stages, 2))
    return find_pipeline(layers(*hidden), mesh, FAST, micro_batches, ALONE, schedule=schedule)


ONE_PER_RANK = ("1f1b", "gpipe", "zb-h1", "zb-h2")
SEVERAL = tuple(name for name in SCHEDULES if name not in ONE_PER_RANK)


@pytest.mark.parametrize("schedule", [*ONE_PER_RANK, "auto"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN])
def test_a_pipeline_is_what_its_schedule_plays(hidden: tuple[int, ...], stages: int, schedule: str) -> None:
    _is_what_it_plays(piped(hidden, stages, 8, schedule), stages, schedule)


@pytest.mark.parametrize("schedule", SEVERAL)
def test_several_stages_on_a_rank_are_what_their_schedule_plays(schedule: str) -> None:
    found = piped(UNEVEN, 2, 8, schedule)
    _is_what_it_plays(found, 2, schedule)
    assert found.schedule.stages_per_rank >= 2
    assert Pipeline.loads(found.dumps(), "here").dumps() == found.dumps()
    assert len(document("m", found)["stages"]) == found.schedule.stages and "on 2 ranks" in explain(found)


def test_the_ends_of_the_model_are_on_one_rank_of_a_v() -> None:
    """It holds the weight that both read once, and updates it once; a message crosses no cut within a rank."""
    graph = family("gpt2").graph
    found = find_pipeline(graph, Mesh(("pipe",), (2,)), FAST, 2, ALONE, schedule="zb-v")
    assert found.schedule.rank_of == (0, 1, 1, 0) and {0, 3} <= {at for at in tied_in(found)["transformer.wte.weight"]}
    looped = found.schedule.rank_of[:2] * 2
    known = Cutting.of(found.whole, found.mesh, FAST, ((2, ("zb-v",)),), None).cuts.known
    priced = [known.price(stage) for stage in found.stages]
    (once, spent), (twice, _) = together(priced, found.schedule.rank_of, 0.0), together(priced, looped, 0.0)
    seconds, nbytes = priced[3].tied["transformer.wte.weight"]
    (weight,) = (n for n in found.plans[0].graph.nodes if n.op == "parameter" and n.target == "transformer.wte.weight")
    assert weight.outputs[0] is not None
    assert nbytes == 3 * weight.outputs[0].nbytes  # with its two states
    assert sum(twice.fixed) - sum(once.fixed) == nbytes and seconds > 0
    assert found.step_seconds == found.played.makespan + spent
    assert spent == max(priced[0].update + priced[3].update - seconds, priced[1].update + priced[2].update)
    assert found.durations.send[1] == 0.0 < found.durations.send[0] and found.peak_bytes > 0


def test_a_schedule_that_cannot_be_had_says_what_to_give() -> None:
    with pytest.raises(ValueError, match="runs micro-batches in groups of its 4 ranks, and 2 is no multiple of 4"):
        find_pipeline(layers(*EVEN), Mesh(("pipe",), (4,)), FAST, 2, ALONE, schedule="interleaved")
    with pytest.raises(ValueError, match="1f1b has 1 stage on each rank, and 2 are asked for"):
        find_pipeline(layers(*EVEN), Mesh(("pipe",), (2,)), FAST, 2, ALONE, schedule="1f1b", stages_per_rank=2)


def _is_what_it_plays(found: Pipeline, ranks: int, schedule: str) -> None:
    verify(found.schedule)
    stages = found.schedule.stages
    assert stages == len(found.stages) == len(found.plans) == ranks * found.schedule.stages_per_rank
    assert found.schedule.ranks == ranks
    assert schedule in ("auto", found.schedule.name)
    again = play(found.schedule, found.durations)
    assert again.makespan == found.played.makespan < found.step_seconds  # updates behind it
    assert found.step_seconds < 1.5 * again.makespan
    least = least_seconds(found.schedule.rank_of, 8, found.durations)
    assert 0 < least == found.least_seconds <= again.makespan * (1 + 1e-12)
    assert found.memory == memory(found.schedule, found.nbytes)
    assert found.peak_bytes == round(max(one.peak for one in found.memory))
    assert 0 <= found.bubble < 1 and (found.bubble > 0) == (ranks > 1)
    # all of the model is in the stages, and nothing twice
    flops = sum(sum(flops_by_dtype(plan.graph).values()) for plan in found.plans)
    assert flops == pytest.approx(sum(flops_by_dtype(found.whole.graph).values()), rel=1e-12)
    held = [name for plan in found.plans for name in plan.parameters]
    assert sorted(held) == sorted(found.whole.parameters)


def test_the_quicker_schedule_is_taken() -> None:
    every = [piped(EVEN, 4, 8, name) for name in SCHEDULES]
    assert piped(EVEN, 4, 8).step_seconds == min(one.step_seconds for one in every)
    assert every[0].peak_bytes < every[1].peak_bytes  # fewer in flight


def test_backward_in_halves_fills_the_bubble() -> None:
    """Gradients of weights run where a rank would wait; what they need is held for longer."""
    whole, half, eager = (piped(EVEN, 4, 8, name) for name in ("1f1b", "zb-h1", "zb-h2"))
    assert half.bubble < 0.6 * whole.bubble and eager.bubble <= half.bubble * (1 + 1e-9)
    assert whole.peak_bytes < half.peak_bytes < eager.peak_bytes
    for one in (half, eager):
        assert one.schedule.splits_backward and one.durations.backward_input[0] == 0.0  # nobody waits for the first
        split = zip(one.durations.backward_input, one.durations.backward_weight, one.durations.whole, strict=True)
        assert all(first + second == pytest.approx(both) for first, second, both in split)
        assert all(
            0.2 < first / both < 0.8
            for first, both in zip(one.durations.backward_input[1:], one.durations.whole[1:], strict=True)
        )


def test_more_micro_batches_shrink_the_bubble() -> None:
    bubbles = [piped(EVEN, 4, count).bubble for count in (4, 8, 16, 32)]
    assert bubbles == sorted(bubbles, reverse=True) and bubbles[0] > 1.5 * bubbles[-1]


@pytest.mark.parametrize("stages", [2, 4])
def test_unequal_layers_are_balanced(stages: int) -> None:
    """The last stage has few layers, as these are large; an even cut takes far longer."""
    found = piped(UNEVEN, stages, 8)
    taken = [forward + back for forward, back in zip(found.durations.forward, found.durations.whole, strict=True)]
    counts = [sum(name.endswith("0.weight") for name in plan.parameters) for plan in found.plans]
    assert counts[-1] < sum(counts) / stages, counts
    largest = 1024 / sum(UNEVEN) * sum(taken)  # the last layer, which no narrow place divides
    assert max(taken) < 1.01 * max(sum(taken) / stages, largest), taken


@pytest.mark.parametrize("hidden", [EVEN, UNEVEN, (1024, 64, 64, 512, 64, 64, 64, 64)])
def test_no_even_cut_is_better(hidden: tuple[int, ...]) -> None:
    found = piped(hidden, 4, 8)
    cutting = Cutting.of(found.whole, found.mesh, FAST, ((1, ("1f1b", "gpipe")),), None)
    even = cutting.cuts.even()
    assert even is not None and len(even[0]) == 3
    assert found.step_seconds <= cutting.pipeline(*even).step_seconds
    assert found.step_seconds <= cutting.pipeline(*cutting.cuts.best()).step_seconds


@pytest.mark.parametrize("hidden", [EVEN, UNEVEN])
def test_no_policy_of_all_stages_is_quicker(hidden: tuple[int, ...]) -> None:
    found, mesh = piped(hidden, 4, 8), Mesh(("pipe", "data"), (4, 2))
    question = ask(in_rounds(layers(*hidden), 8), within_stage(mesh), FAST)
    rows = compare_staged(question, mesh, ALONE, [*STAGED])
    assert [row.policy for row in rows] == ["gpipe", "1f1b", "megatron-3d"]
    for row in rows:
        assert row.found is not None and row.found.schedule.name == {"gpipe": "gpipe"}.get(row.policy, "1f1b")
        assert row.found.step_seconds >= found.step_seconds * (1 - 1e-9)
    first = rows[0].found
    assert first is not None and all(layout == (Replicate(),) for layout in first.whole.parameters.values())
    (small,) = compare_staged(question, mesh, replace(ALONE, memory=first.peak_bytes - 1), ["gpipe"])
    assert small.found is None and small.why.startswith("does not fit (needs ")


def test_a_limit_of_memory_holds() -> None:
    """Activations are most of what is held: what is run again makes room for them."""
    rows, mesh = 4096, Mesh(("pipe",), (2,))
    graph = graph_of(capture(Layers(*(256,) * 4), (torch.randn(rows, 64), torch.randn(rows, 64)), {}))
    free = find_pipeline(graph, mesh, FAST, 4)
    limit = 0.8 * free.peak_bytes
    request = Request(memory=limit, allow=("recompute",))
    found = find_pipeline(graph, mesh, FAST, 4, request)
    assert found.peak_bytes <= limit < free.peak_bytes
    assert found.step_seconds >= free.step_seconds * (1 - 1e-9)
    with pytest.raises(Infeasible, match=r"no pipeline on 2 ranks over 4 micro-batches fits in .* per rank") as error:
        find_pipeline(graph, mesh, FAST, 4, replace(request, memory=0.05 * free.peak_bytes))
    assert error.value.enough is not None and 0.05 * free.peak_bytes < error.value.enough <= free.peak_bytes


def test_memory_is_what_is_missing_where_a_plan_in_less_room_cannot_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan without a limit could be; so it is not the model that has too few layers."""
    first, calls = Cutting.first, list[Cutting]()

    def cut(self: Cutting) -> Pipeline:
        if self.chunks == 1:
            calls.append(self)
        if len(calls) > 2:  # in less room than everything
            raise NotCut("the model has no 1 place where it can be cut into 2 stages")
        return first(self)

    rows, mesh = 4096, Mesh(("pipe",), (2,))
    graph = graph_of(capture(Layers(*(256,) * 4), (torch.randn(rows, 64), torch.randn(rows, 64)), {}))
    free = find_pipeline(graph, mesh, FAST, 4)
    monkeypatch.setattr(Cutting, "first", cut)
    with pytest.raises(Infeasible, match=r"no pipeline on 2 ranks over 4 micro-batches fits in .* per rank"):
        find_pipeline(graph, mesh, FAST, 4, Request(memory=0.3 * free.peak_bytes, allow=("recompute",)))
    assert len(calls) > 2


def test_where_micro_batches_in_flight_are_too_much_each_leaves_less_to_backward() -> None:
    """The first stage has two in flight and runs again what it would save; the cut stays where it is quick."""
    rows, mesh = 4096, Mesh(("pipe",), (2,))
    graph = graph_of(capture(Layers(*(256,) * 4), (torch.randn(rows, 64), torch.randn(rows, 64)), {}))
    free = find_pipeline(graph, mesh, FAST, 4, schedule="1f1b")
    limit = 0.9 * free.peak_bytes
    found = find_pipeline(graph, mesh, FAST, 4, Request(memory=limit, allow=("recompute",)), schedule="1f1b")
    assert found.peak_bytes <= limit and found.ends == free.ends
    assert found.nbytes.saved[0] < free.nbytes.saved[0] and found.nbytes.saved[1] <= free.nbytes.saved[1]
    assert free.step_seconds < found.step_seconds < 1.1 * free.step_seconds


def test_what_forward_leaves_has_a_limit_of_its_own() -> None:
    """Of the values of one half of the layers; those of the other stay saved."""
    graph = in_rounds(layers(*EVEN), 4)
    values = [node for node in graph.nodes if node.phase == "forward" and not node.is_source]
    first = frozenset(node.name for node in values if node.module.startswith(("layers.0", "layers.1", "layers.2")))
    mesh = Mesh(("data",), (1,))
    free = search(graph, mesh, FAST, Request(allow=("recompute",)))
    held = Held(first, frozenset(), times=1.0, most=0.0)
    less = search(graph, mesh, FAST, Request(held=(held,), allow=("recompute",)))
    assert less.step_seconds > free.step_seconds
    again = {name.removesuffix("_again") for name in less.graph.by_name if name.endswith("_again")}
    kinks = {node.name for node in values if node.op.startswith("aten.relu")}
    assert kinks & first and kinks & again == kinks & first  # those that are large


def test_a_tied_embedding_is_in_both_stages_that_read_it() -> None:
    found = find_pipeline(family("gpt2").graph, TWO, FAST, 2, ALONE, schedule="1f1b")
    assert tied_in(found) == {"transformer.wte.weight": [0, 1]}
    assert all("transformer.wte.weight" in plan.parameters for plan in found.plans)
    assert "tied: transformer.wte.weight is in stages 0, 1" in explain(found)
    assert "transformer.wte" in modules_of(found)[0] and "lm_head" in modules_of(found)[1]


def test_a_parameter_of_the_model_itself_stands_by_its_own_name() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(16))
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x + self.shift).square().mean()

    graph = graph_of(capture(Shifted(), (torch.randn(8, 16),), {}))
    found = find_pipeline(graph, TWO, FAST, 2, ALONE, schedule="1f1b")
    assert modules_of(found)[0].startswith("shift, layers.0") and ", ," not in explain(found)


def test_an_encoder_and_a_decoder_are_cut() -> None:
    found = find_pipeline(family("t5").graph, Mesh(("pipe",), (3,)), FAST, 2, ALONE)
    assert len(found.plans) == 3 and found.step_seconds > found.least_seconds
    told = modules_of(found)
    assert "encoder" in told[0] and "decoder" in told[2]


def test_a_model_of_one_layer_is_refused_in_one_sentence() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.only(x).sum()

    graph = graph_of(capture(One(), (torch.randn(8, 8),), {}))
    with pytest.raises(NotCut, match=r"^the model cannot be cut into 8 stages: .*take fewer .*$"):
        find_pipeline(graph, Mesh(("pipe",), (8,)), FAST, 2, ALONE)


def test_frozen_layers_are_named_where_no_stage_may_be_without_one_that_trains() -> None:
    model = Layers(*EVEN)
    model.layers[:-1].requires_grad_(False)
    graph = graph_of(capture(model, (torch.randn(64, 64), torch.randn(64, 64)), {}))
    told = r"^the model cannot be cut into 4 stages that each hold a parameter that trains: 28 parameters are frozen"
    with pytest.raises(NotCut, match=told):
        find_pipeline(graph, Mesh(("pipe",), (4,)), FAST, 2, ALONE)


def test_stages_lie_on_the_first_axis() -> None:
    with pytest.raises(ValueError, match="pipe has to be its first axis"):
        find_pipeline(layers(*EVEN), Mesh(("data", "pipe"), (2, 2)), FAST, 2, ALONE)
    assert within_stage(Mesh(("pipe",), (4,))) == Mesh(("data",), (1,))
    assert counts_in_stages(layers(*EVEN), 4) == [4, 8, 16, 32]
    assert counts_in_stages(layers(*EVEN), 16) == [16, 32, 64] and counts_in_stages(layers(*EVEN), 3) == []


def test_figures_are_of_the_whole_step() -> None:
    found = piped(EVEN, 4, 8)
    told = document("layers", found)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["simulated_seconds"] == found.step_seconds and [row["in_flight"] for row in told["stages"]][-1] == 1
    assert sum(row["parameters"] for row in told["stages"]) == told["parameters"]
    used = utilisation_of(found)
    assert used.samples == 64 and used.ranks == 8
    assert used.model_flops == pytest.approx(sum(flops_by_dtype(layers(*EVEN)).values()), rel=1e-9)


def test_a_file_reads_back_as_it_was_and_no_other_does(tmp_path: Path) -> None:
    found = piped(UNEVEN, 4, 8)
    found.save(tmp_path / "one.json")
    again = Pipeline.load(tmp_path / "one.json")
    assert again.dumps() == found.dumps()
    assert (again.ends, again.schedule, again.durations, again.memory) == (
        found.ends, found.schedule, found.durations, found.memory,
    )  # fmt: skip
    assert again.stages == found.stages and again.plans == found.plans and again.whole == found.whole
    assert again.step_seconds == found.step_seconds and again.played.times == found.played.times
    text = found.dumps()
    (tmp_path / "short.json").write_text(text[:-100])
    (tmp_path / "edited.json").write_text(text.replace('"ends": [', '"ends": [1, ', 1))
    (tmp_path / "other.json").write_text('{"autopar_pipe": 2}')
    for name, why in (("short", "not complete JSON"), ("edited", "edited or damaged"), ("other", "no pipeline")):
        with pytest.raises(PlanMismatch, match=why):
            Pipeline.load(tmp_path / f"{name}.json")
    elsewhere = replace(found, ends=(found.ends[0] + 1, *found.ends[1:]))
    elsewhere.save(tmp_path / "elsewhere.json")
    with pytest.raises(PlanMismatch, match="inconsistent"):
        Pipeline.load(tmp_path / "elsewhere.json")


def test_a_plan_is_no_pipeline_and_a_pipeline_no_plan(tmp_path: Path) -> None:
    found = piped(EVEN, 2, 4)
    found.save(tmp_path / "pipeline.json")
    found.whole.save(tmp_path / "plan.json")
    with pytest.raises(PlanMismatch, match="has a step in pipeline stages, and what is wanted is a plan without"):
        Plan.load(tmp_path / "pipeline.json")
    with pytest.raises(PlanMismatch, match="is a plan without pipeline stages; give a mesh without the axis `pipe`"):
        Pipeline.load(tmp_path / "plan.json")


def test_what_is_kept_is_found_again_or_searched_for(tmp_path: Path) -> None:
    mesh, path, graph = Mesh(("pipe", "data"), (4, 2)), tmp_path / "plans" / "one.json", layers(*UNEVEN)
    assert kept_pipeline(path, graph, mesh, FAST, "adamw") is None
    found = piped(UNEVEN, 4, 8)
    keep_plan(found, path)
    again = kept_pipeline(path, graph, mesh, FAST, "adamw")
    assert again is not None and again.dumps() == found.dumps()
    claimed = replace(found, step_seconds=found.step_seconds / 2)  # what a file says that it takes counts for nothing
    keep_plan(claimed, path)
    again = kept_pipeline(path, graph, mesh, FAST, "adamw")
    assert again is not None and again.step_seconds == found.step_seconds
    slower = Hardware.load("h100-sxm")
    assert kept_pipeline(path, graph, mesh, slower, "adamw") is None
    assert kept_pipeline(path, graph, mesh, FAST, "sgd") is None
    assert kept_pipeline(path, layers(*EVEN), mesh, FAST, "adamw") is None
    assert kept_pipeline(path, graph, Mesh(("pipe", "data"), (2, 4)), FAST, "adamw") is None
    path.write_text(path.read_text()[:-9])
    assert kept_pipeline(path, graph, mesh, FAST, "adamw") is None


def test_the_same_question_has_the_same_answer() -> None:
    question = ask(piped(EVEN, 2, 4).whole.graph, Mesh(("data",), (2,)), FAST)
    texts = {pipeline_of(question, TWO, ALONE).dumps() for _ in range(2)}
    assert len(texts) == 1
