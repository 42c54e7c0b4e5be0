"""The picture of a plan: Graphviz takes it, equal layers stand once, and what is sent stands at the edges."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.plan.dot import to_dot
from autopar.plan.tell import human, traffic_by_part
from cost_models.steps import received_bytes
from tests.plan.nets import MESH, net_graph, plan_of, trace
from tests.support.plans import PlanSampler


@pytest.fixture(scope="module")
def text(plan) -> str:
    return to_dot(plan)


def nodes_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^ *(n\d+|n\d+_more|legend_\w+) \[(.*)\];$", text, re.MULTILINE))


def edges_of(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r"^ *(\w+) -> (\w+)(.*);$", text, re.MULTILINE)


def check_form(text: str) -> None:
    """What can be seen without Graphviz: brackets close, tables close, and edges lead between nodes that exist."""
    plain = re.sub(r'"[^"]*"', "", re.sub(r"label=<.*?>(?=[,;\]])", "", text))
    assert plain.count("{") == plain.count("}") and plain.count("[") == plain.count("]")
    for tag in ("TABLE", "TR", "TD", "B", "FONT"):
        assert len(re.findall(rf"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag
    names = nodes_of(text)
    for source, target, _ in edges_of(text):
        assert source in names and target in names


def test_the_form_is_right(text):
    check_form(text)


@pytest.mark.parametrize("seed", range(4))
def test_the_form_of_random_plans_is_right(graph, seed):
    check_form(to_dot(PlanSampler(graph, MESH).draw(seed)))


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz (dot) is not installed")
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_graphviz_draws_it(graph, plan, seed):
    drawn = plan if seed is None else PlanSampler(graph, MESH).draw(seed)
    run = subprocess.run(["dot", "-Tsvg"], input=to_dot(drawn), capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0 and "Error" not in run.stderr and "syntax" not in run.stderr, run.stderr
    assert ("</svg>" in run.stdout and "equal layers" in run.stdout.replace("&#45;", "-")) or seed is not None


def test_the_text_is_the_same_every_time(plan, text):
    assert to_dot(replace(plan, choices=dict(reversed(plan.choices.items())))) == text


def test_equal_layers_are_drawn_once(text):
    assert "layers.0 .. layers.2 (3 equal layers)" in text
    assert "2 more layers like this" in text
    assert 'subgraph "cluster_layers.0"' in text and 'subgraph "cluster_layers.1"' not in text


def test_a_layer_that_differs_is_drawn_apart(plan):
    node = next(n for n in plan.graph.nodes if n.module == "layers.1.up" and n.op == "autopar.einsum")
    other = replace(plan.choices[node.name], roles=("", "other"))
    text = to_dot(replace(plan, choices={**plan.choices, node.name: other}))
    check_form(text)
    assert "equal layers" not in text
    for layer in range(3):
        assert f'subgraph "cluster_layers.{layer}"' in text
    assert "tensor splits other" in text


def test_twelve_layers_take_no_more_room_than_two():
    sizes = {}
    for layers in (2, 12):
        text = to_dot(plan_of(net_graph(layers=layers), Mesh(("data",), (4,))))
        check_form(text)
        sizes[layers] = len(nodes_of(text))
    assert sizes[12] == sizes[2] < 40


def test_the_same_layout_has_the_same_colour(text):
    colours: dict[str, set[str]] = {}
    for body in nodes_of(text).values():
        found = re.search(r'fillcolor="(#\w+)".*?(\[[^\]]*\](?: \+\w+)*)(?:<BR/><FONT.*)?>$', body)
        if found:
            colours.setdefault(found[2], set()).add(found[1])
    assert len(colours) > 2 and all(len(found) == 1 for found in colours.values())


def test_every_layout_stands_in_the_legend(text):
    legend = nodes_of(text)["legend_layouts"]
    for layout in set(re.findall(r'<TD BGCOLOR="[^"]*">(\[[^<]*)</TD>', text)):
        if layout.strip("[_, ]"):
            assert layout in legend


def test_the_legend_tells_the_traffic_of_each_part(plan, text):
    legend = nodes_of(text)["legend_traffic"]
    for part, found in traffic_by_part(plan).items():
        for (collective, axis), nbytes in found.items():
            assert f">{part}<" in legend and collective in legend and axis in legend and human(nbytes) in legend


def test_what_is_sent_stands_at_the_edges(fsdp_plan):
    """A sharded parameter is gathered on its way to the first layer's product."""
    nodes = (n for n in fsdp_plan.graph.nodes if n.module == "layers.0.up" and n.op == "autopar.einsum")
    choice = fsdp_plan.choices[next(nodes).name]
    (gather,) = [change for read in choice.reads for change in read if change.kind == "all_gather"]
    (comm, *_) = gather.steps(4)
    told = f"weight: all_gather {human(received_bytes(comm))} over data"
    assert any(told in label for _, _, label in edges_of(to_dot(fsdp_plan)))


def test_parameters_show_layout_and_gradient(fsdp_plan):
    (table,) = [body for body in nodes_of(to_dot(fsdp_plan)).values() if "TABLE" in body and "4096\u00d71024" in body]
    assert "[data, _]" in table and "gradient: " in table and "reduce_scatter" in table and "over data" in table


def test_trivial_operators_are_merged_into_the_edges(text):
    for name in ("view", "the same value", "masked_fill.Scalar", "arange"):
        assert f"<B>{name}</B>" not in text


def test_forward_and_backward_can_be_told_apart(text):
    assert "backward of each layer: " in text and "<B>forward</B>" in text


def test_names_are_escaped():
    class Odd(torch.nn.Module):
        def forward(self, inputs):
            return (inputs["<a&b>"] @ inputs['say "hi"'].T).sum()

    graph = trace(Odd(), {"<a&b>": torch.ones(8, 4), 'say "hi"': torch.ones(8, 4)})
    text = to_dot(plan_of(graph, Mesh(("data",), (2,))))
    assert "<a&b>" not in text and "&lt;a&amp;b&gt;" in text
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg"], input=text, capture_output=True, text=True, timeout=60, check=True)
