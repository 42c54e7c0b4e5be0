"""What picture and text share: sizes, traffic, and which layers count as equal."""

from collections import Counter
from dataclasses import replace

import pytest

from autopar.plan.tell import backward_homes, human, runs_of, shown_nodes, traffic_by_part
from tests.plan.nets import MESH
from tests.support.plans import PlanSampler


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (36_864, "36.0 KiB"),
        (7 * 2**30, "7.00 GiB"),
        (5e12, "4657 GiB"),
    ],
)
def test_sizes_in_words(nbytes, told):
    assert human(nbytes) == told


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_of_the_traffic_add_up_to_the_plan(graph, seed):
    drawn = PlanSampler(graph, MESH).draw(seed)
    total: Counter = Counter()
    for part in traffic_by_part(drawn).values():
        total.update(part)
    assert dict(total) == drawn.comm_bytes


def test_equal_layers_are_one_run(plan):
    (run,) = runs_of(plan, shown_nodes(plan))
    assert run.label == "layers.0 .. layers.2 (3 equal layers)"


def changed(plan, name: str):
    """The plan with another role at one node, which is all that a reader could see."""
    choice = plan.choices[name]
    return replace(plan, choices={**plan.choices, name: replace(choice, roles=("other", "roles"))})


def test_a_layer_with_another_choice_stays_apart(plan):
    node = next(n for n in plan.graph.nodes if n.module == "layers.1.up" and n.op == "autopar.einsum")
    other = changed(plan, node.name)
    assert [run.label for run in runs_of(other, shown_nodes(other))] == ["layers.0", "layers.1", "layers.2"]


def test_a_layer_with_another_choice_in_backward_stays_apart(plan):
    node = next(
        n for n in plan.graph.nodes if n.module == "layers.2.up" and n.op == "autopar.einsum" and n.phase == "backward"
    )
    other = changed(plan, node.name)
    assert [len(run.layers) for run in runs_of(other, shown_nodes(other))] == [2, 1]


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_is_sent_in_forward_is_left_out(graph, seed):
    drawn = PlanSampler(graph, MESH).draw(seed)
    hidden = {n.name for n in graph.nodes if n.phase == "forward"} - {n.name for n in shown_nodes(drawn)}
    only = replace(
        drawn,
        choices={
            n: c if n in hidden else replace(c, steps=(), reads=((),) * len(c.reads)) for n, c in drawn.choices.items()
        },
    )
    assert not traffic_by_part(only)["forward"]


def test_what_backward_sends_is_counted_to_its_layer(fsdp_plan):
    """Also where autograd adds gradients up, which no module does: the sum goes to what was made last."""
    homes = backward_homes(fsdp_plan)
    added = [n for n in fsdp_plan.graph.nodes if n.phase == "backward" and n.op == "aten.add.Tensor"]
    assert added and all(homes[node.name].startswith("layers.") for node in added)
