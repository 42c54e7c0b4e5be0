"""The text of a plan: one screen, figures that are the plan's, and textbook names where the layouts earn them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.layout import REPLICATE, Shard
from autopar.ir.mesh import Mesh
from autopar.plan.axes import Use, between_told
from autopar.plan.explain import HEIGHT, explain
from autopar.plan.reading import WIDTH
from autopar.plan.tell import human
from autopar.trace import capture, graph_of
from autopar.trace.precision import precision_named
from tests.plan.nets import MESH, megatron, net_graph, plan_of
from tests.support.plans import PlanSampler

DATA = Mesh(("data",), (4,))
BF16 = precision_named("bf16")
ONE = Mesh(("tensor",), (4,))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def line_of(text: str, start: str) -> str:
    """The line with this beginning, and those that continue it."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(start))
    rest = [line for line in lines[at + 1 :]]
    count = next((i for i, line in enumerate(rest) if not line.startswith("  ")), len(rest))
    return " ".join(line.strip() for line in lines[at : at + 1 + count])


@pytest.mark.parametrize("seed", range(5))
def test_it_is_one_screen(graph, seed):
    lines = explain(PlanSampler(graph, MESH).draw(seed)).splitlines()
    assert len(lines) <= HEIGHT == 40 and max(map(len, lines)) <= WIDTH == 110


def test_the_figures_are_those_of_the_plan(plan):
    text = explain(plan)
    assert text.startswith("mesh data=4,tensor=2 (8 ranks) on h100-sxm, optimizer adamw\n")
    assert f"step time {plan.step_seconds * 1e3:.3f} ms, predicted (summed)" in text
    for name, part in (("compute", "compute"), ("optimizer", "optimizer"), ("communication, data", "comm:data")):
        assert f"{plan.seconds_by[part] * 1e3:.3f} ms" in next(
            x for x in text.splitlines() if x.strip().startswith(name)
        )
    for (collective, _), nbytes in plan.comm_bytes.items():
        assert f"{collective} {human(nbytes)}" in text
    assert f"memory peak {human(plan.peak_bytes['hbm'])} of hbm per rank" in text
    assert f"gap {100 * plan.gap:.2f} %" in text


def test_memory_tells_whether_it_binds(plan):
    peak = plan.peak_bytes["hbm"]
    assert "no limit was given" in explain(plan)
    assert "it shapes the plan" in explain(replace(plan, memory_limit=peak * 1.01))
    assert "50 % of the limit" in (loose := explain(replace(plan, memory_limit=peak * 2.0)))
    assert "memory is not what limits it" in loose


def test_memory_is_what_limits_a_plan_that_saves_it(plan):
    roomy = replace(plan, memory_limit=plan.peak_bytes["hbm"] * 2.0)
    assert "memory is not what limits it" not in (told := explain(replace(roomy, residence={"up.weight": "host"})))
    assert "50 % of the limit" in told and ": with memory savings\n" in told
    short = " ".join(explain(replace(roomy, search={"fastest_bytes": int(roomy.memory_limit * 3)})).split())
    assert "it shapes the plan; the fastest takes " in short and "memory is not what limits it" not in short
    fits = explain(replace(roomy, search={"fastest_bytes": int(roomy.memory_limit)}))
    assert "memory is not what limits it" in fits


def test_the_price_of_memory_is_told_for_a_step_that_is_small_beside_the_peak(plan):
    gib = 2**30

    def told(limit, **facts):
        there = replace(plan, peak_bytes={"hbm": 6 * gib, "host": 40 * 2**20}, memory_limit=limit, step_seconds=0.1)
        text = explain(replace(there, search={key.replace("_of_", ":"): fact for key, fact in facts.items()}))
        return [line.removeprefix("price of memory: ") for line in text.splitlines() if line.startswith("price of")]

    limit = 6.0 * gib
    assert told(limit) == told(None, ms_per_gib_of_hbm=2.5) == told(limit, ms_per_gib_of_hbm=0.0) == []
    assert told(limit, ms_per_gib_of_hbm=2.5) == ["+1 GiB of hbm would save about 2.5 ms a step"]
    assert told(limit, ms_per_gib_of_host=1024.0) == ["+4 MiB of host would save about 4 ms a step"]
    # there is nothing to gain beyond the fastest plan
    near = told(limit, ms_per_gib_of_hbm=2.5, fastest_bytes=int(6.5 * gib), fastest_s=0.09)
    assert near == ["+256 MiB of hbm would save about 0.625 ms a step"]
    assert told(limit, ms_per_gib_of_hbm=2.5, fastest_bytes=9 * gib, fastest_s=0.0995) == [
        "+1 GiB of hbm would save about 0.5 ms a step"
    ]


def test_without_a_bound_none_is_claimed(plan):
    assert "no lower bound is known" in explain(replace(plan, bound=0.0))


def test_notes_are_told(plan):
    note = "aten.foo.default has no sharding rule and runs replicated (3 nodes)"
    assert f"note: {note}" in explain(replace(plan, notes=(note,)))
    many = explain(replace(plan, notes=(note,) * 30))
    assert "more notes" in many and len(many.splitlines()) <= HEIGHT
    long = "a figure stands at the end of what is told, where nothing may be cut off: " * 3 + "12.345 ms"
    told = explain(replace(plan, notes=(long,)))
    assert " ".join(told.split("note: ")[1].split()) == long and max(map(len, told.splitlines())) <= 110


def test_equal_layers_are_told_once(plan):
    text = explain(plan)
    (line,) = [line for line in text.splitlines() if "layers.*.up.weight" in line]
    assert line.split() == ["layers.*.up.weight", "[data,", "_]", "3x", "float32[256,", "64]"]
    assert "layers.0" not in text


# --- names -----------------------------------------------------------------------------------------------------------


def test_data_parallel_by_name(large):
    plan = plan_of(large, DATA, lambda name, ndim: (REPLICATE,))
    told = line_of(explain(plan), "data: ")
    assert (
        told.startswith("data: data parallel: each rank computes a part of the batch")
        and "gradients are summed" in told
    )
    assert "FSDP" not in told and "Megatron" not in told


def test_gradients_that_nobody_sums_are_not_said_to_be():
    """Few rows and large weights that seven ranks cannot split: to gather the rows is cheaper than to sum gradients."""
    with torch.device("meta"):
        captured = capture(Wide(), (torch.empty(1680, 4096),), {}, precision=BF16)
    plan = plan_of(graph_of(captured, BF16), Mesh(("data",), (7,)))
    assert {what for what, _ in plan.comm_bytes} == {"all_gather", "all_reduce"}
    assert plan.comm_bytes["all_reduce", "data"] < 16, "the loss"
    told = line_of(explain(plan), "data: ")
    assert "activations are gathered for gradients, which are whole" in told and "are summed" not in told


def test_fully_sharded_by_name(large):
    plan = plan_of(large, DATA, lambda name, ndim: (Shard(0),))
    text = explain(plan)
    assert line_of(text, "data: ").startswith("data: fully sharded data parallel (FSDP / ZeRO-3): each rank")
    assert "of which a rank stores" in text and "(25 %)" in text


def test_tensor_parallel_by_name():
    graph = net_graph(batch=1, length=8, width=2048, classes=97)
    plan = plan_of(graph, ONE, lambda name, ndim: megatron(name, ndim)[1:])
    text = explain(plan)
    assert "column/row tensor parallel (Megatron)" in line_of(text, "tensor: ")
    assert "FSDP" not in text and "data parallel" not in text
    assert "tensor splits columns" in line_of(text, "products").split("layers.*.up")[1].split("layers.*.down")[0]
    assert "tensor splits rows" in line_of(text, "products").split("layers.*.down")[1]


def test_two_axes_have_each_their_own_name(megatron_plan):
    text = explain(megatron_plan)
    assert line_of(text, "data: ").startswith("data: data parallel")
    assert "column/row tensor parallel (Megatron)" in line_of(text, "tensor: ")
    assert "(Megatron)" not in line_of(text, "data: ")


def test_sequence_parallel_by_name(megatron_plan):
    told = line_of(explain(megatron_plan), "tensor: ")
    assert "elsewhere activations are 50% kept whole, 50% split along the sequence (sequence parallel)" in told or (
        "elsewhere activations are 50% split along the sequence (sequence parallel), 50% kept whole" in told
    )


def test_activations_between_products_are_told_by_their_bytes():
    def told(**between: float) -> list[str]:
        return between_told(Use(between={name.replace("_", " "): nbytes for name, nbytes in between.items()}))

    sequence = "split along the sequence (sequence parallel)"
    assert told(along_the_sequence=99.0, whole=1.0, by_features=50.0) == [f"elsewhere activations are {sequence}"]
    assert told(along_the_sequence=1.0, whole=3.0) == [f"elsewhere activations are 75% kept whole, 25% {sequence}"]
    assert told(along_the_sequence=1.0, whole=99.0) == ["elsewhere activations are kept whole"]
    assert told(by_features=1.0) == []


def test_repeated_work_is_told():
    plan = plan_of(net_graph(batch=3, length=5, width=6, classes=7), DATA)
    assert "the same work repeated on every rank in 100% of the layers' arithmetic" in line_of(explain(plan), "data: ")
    assert "a rank receives nothing" in explain(plan)


def test_why_nothing_is_split_is_told_with_the_size_that_would_be(graph):
    text = explain(plan_of(net_graph(batch=3, length=5, width=6, classes=7), Mesh(("data",), (4,))))
    told = line_of(text, "data: nothing is split over its 4 ranks")
    assert "It would help to pad the 3 of dim 0 of ids to 4." in told
    assert (
        "of the inputs 3 (dim 0 of ids, dim 0 of labels; 4 would), 5 (dim 1 of ids, dim 1 of labels; 8 would)" in told
    )
    assert "of the parameters 7 (" in told and "; 8 would)" in told
    assert "nothing is split over" not in explain(plan_of(graph, MESH)), "here much is"


def test_a_gap_is_told_with_the_measure_that_it_is_of(plan):
    simulated = replace(plan, prefetch=2, simulated_seconds=0.9 * plan.step_seconds, bound=0.8 * plan.step_seconds)
    took = f"{plan.step_seconds * 1e3:.3f} ms"
    told = line_of(explain(simulated), "proven, without overlap: ")
    assert told.endswith(f"this one takes {took}: gap 20.00 %")
    assert "proven, simulated: no lower bound is known" in explain(simulated)
    least = {**plan.search, "simulated_bound_s": 0.45 * plan.step_seconds}
    told = line_of(explain(replace(simulated, search=least)), "proven, simulated: ")
    assert f"none takes less than {0.45e3 * plan.step_seconds:.3f} ms" in told and told.endswith("gap 50.00 %")
    assert "simulated: " not in explain(replace(plan, simulated_seconds=plan.step_seconds)), "played, and all the same"


def test_an_axis_of_one_rank_splits_nothing(graph):
    plan = plan_of(graph, Mesh(("data", "tensor"), (2, 1)))
    assert "tensor: one rank, nothing to split" in explain(plan)


def test_overlap_is_told_where_there_is_some(plan):
    assert "the sum of its parts, nothing overlaps" in explain(plan)
    one_by_one = replace(plan, prefetch=None, simulated_seconds=plan.step_seconds)
    assert "the sum of its parts, nothing overlaps" in explain(one_by_one)
    told = explain(replace(one_by_one, simulated_seconds=1.25 * plan.step_seconds))
    parts = f"{plan.step_seconds * 1e3:.3f} ms"
    said = line_of(told, "step time ")
    assert f"nothing overlaps; the parts are {parts}, the buckets of gradients take 0.14" in said, said
    assert "the sum of its parts" not in told
    faster = replace(plan, step_seconds=plan.step_seconds - 1e-5)
    assert "0.010 ms of the parts overlap" in explain(faster)
