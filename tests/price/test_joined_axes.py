"""Collectives over several axes at once: what they make, what they cost, and that a finer mesh is never worse."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from autopar.emit.run_all_ranks import shard
from autopar.emit.writer import Writer
from autopar.ir.graph import TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, Shard
from autopar.ir.mesh import Mesh
from autopar.price.pricer import Pricer
from autopar.price.reshard import Reshard, Resharder, all_layouts, neighbours
from autopar.search import Request, search
from autopar.search.reserved import reserved_bytes
from cost_models.hardware import Hardware
from cost_models.price import groups_over, link_of, links_of
from cost_models.steps import axes_of, received_bytes
from tests.support.families import family
from tests.support.lockstep import Lockstep

SUM, MAX = Partial("sum"), Partial("max")
H100, CPU = Hardware.load("h100-sxm"), Hardware.load("cpu-gloo")
NAMES = ("a", "b", "c")


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(NAMES[: len(sizes)], sizes)


def resharder(mesh: Mesh, hardware: Hardware = H100) -> Resharder:
    return Resharder(mesh, hardware, links_of(hardware, mesh.names, mesh.sizes))


def split(whole: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """What each rank has; of a partial value, terms that make the whole."""
    axes = [axis for axis, placement in enumerate(layout) if isinstance(placement, Partial)]
    if not axes:
        return [shard(whole, layout, mesh, rank) for rank in range(mesh.ranks)]
    inner = tuple(REPLICATE if isinstance(placement, Partial) else placement for placement in layout)
    found: list[Tensor] = [torch.empty(0)] * mesh.ranks
    makes = torch.amax if layout[axes[0]] == MAX else torch.sum
    members = [where for where in itertools.product(*(range(mesh.sizes[axis]) for axis in axes))]
    terms = torch.randn(len(members), *whole.shape, dtype=whole.dtype)
    terms[-1] = whole - terms[:-1].sum(0) if makes is torch.sum else whole
    if makes is torch.amax:
        terms = torch.minimum(terms, whole)
    for rank in range(mesh.ranks):
        where = mesh.coordinate(rank)
        found[rank] = shard(terms[members.index(tuple(where[axis] for axis in axes))], inner, mesh, rank)
    return found


def executed(change: Reshard, pieces: list[Tensor], mesh: Mesh) -> tuple[list[Tensor], int]:
    """What each rank has after the change, as code that is emitted makes it; and the bytes that one received."""
    graph = fx.Graph()
    writer = Writer(graph, mesh, {axis: axis for axis in mesh.groups}, "cpu", one_at_a_time=True)
    value = graph.placeholder("value")
    writer.coordinates = {axis: graph.placeholder(f"coordinate_{place}") for place, axis in enumerate(mesh.groups)}
    for part in change.parts(mesh.size(change.axis)):
        if part.what is None:
            value = writer.launch(value, change, in_place=False)
        else:
            value = writer.local(part.what, value, part.dim, change.axis)
    graph.output((value,))
    indices = [mesh.indices(mesh.coordinate(rank)) for rank in range(mesh.ranks)]
    coordinates = [[*map(torch.tensor, one)] for one in zip(*indices, strict=True)]
    ranks = Lockstep(mesh, Counter())
    (made,) = ranks.execute(fx.GraphModule({}, graph), [pieces, *coordinates])
    return made, sum(ranks.traffic.values())


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_each_change_over_several_axes_gives_every_rank_its_piece(sizes: tuple[int, ...]) -> None:
    mesh, whole = mesh_of(*sizes), torch.randn(12, 24, dtype=torch.float64)
    type, kinds = TensorType((12, 24), "float64"), Counter[tuple[str, str]]()
    tables = resharder(mesh)
    known = set(all_layouts(type, mesh))
    for before in known:
        for after in neighbours(before, 2, mesh):
            if after not in known or sum(one != other for one, other in zip(before, after, strict=True)) < 2:
                continue
            change = tables._step(type, before, after)
            assert change.applied(before, mesh) == after
            made, received = executed(change, split(whole, before, mesh), mesh)
            if not any(isinstance(placement, Partial) for placement in after):
                for rank, piece in enumerate(made):
                    torch.testing.assert_close(piece, shard(whole, after, mesh, rank), rtol=0, atol=1e-12)
            comms = [step for step in change.steps(mesh.size(change.axis)) if hasattr(step, "collective")]
            assert received == sum(map(received_bytes, comms)), "bytes are what the plan says"
            kinds[change.kind, change.axis] += 1
    told = {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice"}
    assert {axis for _, axis in kinds} == {*mesh.groups} - {*mesh.names} and {kind for kind, _ in kinds} == told


def test_its_links_are_those_of_the_mesh_whose_axis_they_are() -> None:
    for sizes in ((2, 4), (4, 2), (16, 4), (2, 8)):
        one, mesh = Mesh(("x",), (sizes[0] * sizes[1],)), mesh_of(*sizes)
        assert link_of(H100, mesh.names, mesh.sizes, "a+b") == link_of(H100, one.names, one.sizes, "x")
    three, two = mesh_of(2, 4, 2), Mesh(("x", "c"), (8, 2))
    assert links_of(H100, three.names, three.sizes)["a+b"] == links_of(H100, two.names, two.sizes)["x"]
    with pytest.raises(ValueError, match="no mesh axis 'd'"):
        link_of(H100, three.names, three.sizes, "a+d")
    assert groups_over((0, 2), (2, 2, 2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_what_several_axes_split_alike_comes_together_in_one_collective() -> None:
    """Two nodes of eight: a ring through all sixteen uses every NIC, where the outer axis by itself has one a group."""
    mesh, type = mesh_of(2, 8), TensorType((4096, 4096), "bfloat16")
    (gather,) = resharder(mesh).path(type, (Shard(0), Shard(0)), (REPLICATE, REPLICATE))
    assert (gather.kind, gather.axis, axes_of(gather.axis)) == ("all_gather", "a+b", ("a", "b"))
    (total,) = resharder(mesh).path(type, (SUM, SUM), (REPLICATE, REPLICATE))
    assert (total.kind, total.axis) == ("all_reduce", "a+b")


@pytest.mark.parametrize("hardware", [H100, CPU], ids=lambda one: one.name)
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2, 2), (2, 8)], ids=str)
def test_no_change_of_layouts_costs_more_on_a_finer_mesh(hardware: Hardware, sizes: tuple[int, ...]) -> None:
    mesh, type = mesh_of(*sizes), TensorType((64, 96, 128), "float32")
    one = Mesh(("x",), (mesh.ranks,))
    fine, coarse = resharder(mesh, hardware).table(type), resharder(one, hardware).table(type)
    for layout, other in itertools.product(coarse.layouts, repeat=2):
        at, end = fine.index[layout * len(sizes)], fine.index[other * len(sizes)]
        assert fine.price[at, end] <= coarse.price[coarse.index[layout], coarse.index[other]] * (1 + 1e-12)


@pytest.mark.parametrize("name", ["mlp", "block", "gpt2", "llama"])
def test_no_plan_of_a_finer_mesh_is_worse(name: str) -> None:
    """Neither what is proven nor what is chosen, where parameters are split as far as they divide."""
    graph = family(name).graph

    def split_over(mesh: Mesh) -> Request:
        types = {node.target: node.outputs[0] for node in graph.nodes if node.op == "parameter"}
        able = [target for target, type in types.items() if type is not None and not type.shape[0] % mesh.ranks]
        return Request(tied=False, fixed=dict.fromkeys(able, (Shard(0),) * len(mesh.sizes)), simulation=True)

    quick = {name: replace(link, latency_s=1e-10) for name, link in H100.links.items()}
    few = replace(H100, ranks_per_node=2, links=quick)
    one, two = Mesh(("x",), (4,)), mesh_of(2, 2)
    coarse, fine = (search(graph, mesh, few, split_over(mesh)) for mesh in (one, two))
    assert coarse.comm_bytes and any("+" in axis for _, axis in fine.comm_bytes), "something goes over both at once"
    assert fine.bound <= coarse.bound * (1 + 1e-6) and fine.step_seconds <= coarse.step_seconds * (1 + 1e-6)
    pricer = Pricer.on(two, few, "adamw")
    reserved, joined = reserved_bytes(fine, pricer), len(fine.groups()) - 2
    assert joined == 1 and reserved >= (3 + joined) * few.reserve["group_bytes"] + fine.peak_bytes["hbm"]
    assert fine.predicted_seconds <= coarse.predicted_seconds * (1 + 1e-6)


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (2, 1, 2)], ids=str)
def test_an_index_over_several_axes_tells_each_rank_of_a_group_by_its_place(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(("a", "b", "c")[: len(sizes)], sizes)
    found = [dict(zip(mesh.groups, mesh.indices(mesh.coordinate(rank)), strict=True)) for rank in range(mesh.ranks)]
    for axis in mesh.groups:
        for group in groups_over(mesh.places(axis), mesh.sizes):
            assert [found[rank][axis] for rank in group] == list(range(mesh.size(axis)))
