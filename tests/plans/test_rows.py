"""Gradients that are summed together: a row of them is summed in place, so nobody else may look at it meanwhile."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.emit import emit, ops
from autopar.emit.writer import C10D
from autopar.ir.graph import TensorType
from autopar.ir.layout import REPLICATE, Partial
from autopar.price.reshard import Reshard, travels_together
from autopar.search import Request, search
from cost_models.hardware import Hardware
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.lockstep import Lockstep

IN_PLACE, WAIT = C10D.all_reduce_.default, C10D.wait_tensor.default


def calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("bucket_bytes", [3000, 1 << 20])
@pytest.mark.parametrize("name", ["mlp", "block", "gpt2"])
def test_only_rows_are_summed_in_place_and_nobody_else_has_them(
    name: str, bucket_bytes: int, prefetch: int | None, sizes: tuple[int, ...]
) -> None:
    plan = search(family(name).graph, mesh_of(*sizes), Hardware.load("h100-sxm"), Request(policy="data-parallel"))
    program = emit(
        replace(plan, bucket_bytes=bucket_bytes, prefetch=prefetch), {axis: axis for axis in plan.mesh.groups}
    )
    assert program.backward is not None and not calls(program.forward.graph, IN_PLACE)
    summed = calls(program.backward.graph, IN_PLACE)
    rows = {*calls(program.backward.graph, ops.flatten)}
    for one in summed:  # over several axes, one sum behind the other
        (row,) = one.all_input_nodes
        while row not in rows:
            (row,) = row.all_input_nodes
    for one in summed:
        (row,) = one.all_input_nodes
        assert row.target in (ops.flatten, WAIT) and [*row.users] == [one]
        assert [user.target for user in one.users] == [WAIT]


def test_a_row_shares_no_storage_with_its_gradients() -> None:
    one, other = torch.ones(6), torch.ones(2, 3)
    for gradients in ([one], [other.t()], [one, other]):
        row = ops.flatten(gradients)
        assert all(row.untyped_storage().data_ptr() != part.untyped_storage().data_ptr() for part in gradients)
    apart = ops.unflatten(row, [(6,), (2, 3)])
    assert all(part.untyped_storage().data_ptr() == row.untyped_storage().data_ptr() for part in apart)


def test_the_simulator_finds_who_reads_a_row_before_it_is_waited_for() -> None:
    graph = fx.Graph()
    row = graph.placeholder("row")
    look = graph.call_function(torch.ops.aten.view.default, (row, [2, 2]))
    summed = graph.call_function(IN_PLACE, (row, "sum", "a"))
    early = graph.call_function(torch.ops.aten.clone.default, (look,))
    waited = graph.call_function(WAIT, (summed,))
    graph.output((early, look, waited))
    given = [torch.full((4,), float(rank)) for rank in range(2)]
    read_early, *read_late = Lockstep(mesh_of(2), Counter()).execute(fx.GraphModule({}, graph), [given])
    assert all(value.isnan().all() for value in read_early)
    assert all(torch.equal(value.flatten(), torch.ones(4)) for late in read_late for value in late)


@pytest.mark.parametrize(
    ("elements", "ranks", "together"),
    [(8, (4,), True), (3, (4,), True), (3, (8,), False), (6, (4, 8), True), (6, (16,), False)],
)
def test_only_what_every_axis_cuts_evenly_travels_in_a_bucket(
    elements: int, ranks: tuple[int, ...], together: bool
) -> None:
    """Bytes of float32: else the bucket would not move the bytes that its gradients would."""
    mesh = mesh_of(*ranks)
    changes = [Reshard(axis, Partial("sum"), REPLICATE, TensorType((elements,), "float32")) for axis in mesh.names]
    assert travels_together(changes, mesh, 1 << 20) is together
    assert not travels_together(changes, mesh, 4 * elements)  # it fills one by itself
