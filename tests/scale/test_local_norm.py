"""A plan with local batch norms grows with the batch; on more ranks it would train otherwise, so there it does not."""

from autopar.ir.graph import Graph, Ref
from autopar.ir.mesh import Mesh
from autopar.scale import growth_of, usual_sources
from autopar.scale.report import report
from autopar.scale.study import Ground, study
from autopar.search import search
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware
from tests.support.nets import batch_of, made

PARTS = 4


def graph(batch: int) -> Graph:
    return graph_of(capture(made("resnet"), (), batch_of("resnet", 0, batch)), parts=PARTS)


def test_shapes_are_those_of_a_trace_of_a_larger_batch() -> None:
    found, there = growth_of(graph(3), usual_sources(graph(3))), graph(9)
    assert found.base == {"batch": 12} and len(there.nodes) == len(found.graph.nodes)
    for ours, theirs in zip(found.graph.nodes, there.nodes, strict=True):
        for index, type in enumerate(theirs.outputs):
            if type is not None:
                assert found.type_at(Ref(ours.name, index), {"batch": 36}) == type, f"%{ours.name}"


def test_the_mesh_does_not_grow_and_the_report_says_why() -> None:
    hardware = Hardware.load("h100-sxm")
    plan = search(graph(3), Mesh(("data",), (PARTS,)), hardware)
    found = study(Ground(plan, growth_of(plan.graph, usual_sources(plan.graph)), hardware), (2,))
    assert [row.label for row in found.rows] == ["", "batch 24"]
    assert "the statistics of 4 parts of the batch, one for each rank; search on the larger mesh" in report(found)
