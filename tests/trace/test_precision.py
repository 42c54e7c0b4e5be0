"""Mixed precision: where casts stand in the graph, and what that does to a step."""

from functools import cache

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.price.pricer import Pricer
from autopar.search import Request, search
from autopar.simulate.timeline import events_of
from autopar.trace import capture, graph_of, lower, normalise
from autopar.trace.precision import CAST, TO_REDUCE_DTYPE, reduce_after_cast
from cost_models.hardware import Hardware
from cost_models.simulator import play
from tests.support.families import family

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SUMMED_IN_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FAMILIES = ("gpt2", "llama", "t5", "vit", "cnn", "mlp")


@cache
def graph(name: str, precision: MixedPrecisionPolicy) -> Graph:
    return graph_of(capture(family(name).model, (), family(name).inputs, precision=precision), precision)


@cache
def as_traced(name: str, precision: MixedPrecisionPolicy) -> Graph:
    """Casts of parameters first, casts of gradients last."""
    traced = normalise(lower(capture(family(name).model, (), family(name).inputs, precision=precision)))
    return reduce_after_cast(traced) if precision.reduce_dtype is not None else traced


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("precision", [BF16, SUMMED_IN_FP32], ids=["summed in bf16", "summed in fp32"])
def test_casts_stand_at_their_first_reader_or_behind_what_they_cast(name: str, precision: MixedPrecisionPolicy) -> None:
    found = graph(name, precision)
    place = {node.name: index for index, node in enumerate(found.nodes)}
    gradients = [r.ref.name for r in found.results if r.kind == "gradient" and r.ref is not None]
    casts = [node for node in found.nodes if node.op in (CAST, TO_REDUCE_DTYPE)]
    of_parameters = [node for node in casts if found.by_name[node.operands[0].name].op == "parameter"]
    of_gradients = [node for node in casts if node.name in gradients]
    parameters = [node.target for node in found.nodes if node.op == "parameter"]
    cast = [name for name in parameters if "batch_" not in name]  # those of batch norms stay as they are
    assert len(of_parameters) == len(of_gradients) == len(cast) > 0
    assert len(parameters) - len(cast) == 4 * (name == "cnn")
    for node in found.nodes:
        assert all(place[ref.name] < place[node.name] for ref in node.operands), f"{node.name} before what it reads"
    for node in of_parameters:
        first = min(place[one.name] for one in found.nodes if node.name in {ref.name for ref in one.operands})
        between = found.nodes[place[node.name] + 1 : first]
        assert all(one in of_parameters for one in between), "only casts for the same reader lie between"
    for node in of_gradients:
        between = found.nodes[place[node.operands[0].name] + 1 : place[node.name]]
        assert all(one in of_gradients for one in between)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_order_changes(name: str) -> None:
    before, after = as_traced(name, SUMMED_IN_FP32), graph(name, SUMMED_IN_FP32)
    assert [node.name for node in before.nodes] != [node.name for node in after.nodes]
    assert before.by_name == after.by_name and before.results == after.results
    others = [[node.name for node in one.nodes if node.op not in (CAST, TO_REDUCE_DTYPE)] for one in (before, after)]
    assert others[0] == others[1]


@pytest.mark.parametrize("precision", [BF16, SUMMED_IN_FP32], ids=["summed in bf16", "summed in fp32"])
def test_gradients_are_summed_while_backward_goes_on(precision: MixedPrecisionPolicy) -> None:
    """As long as casts stood at the end, so did all reduce-scatters of FSDP."""
    mesh, hardware = Mesh(("data",), (4,)), Hardware.load("h100-sxm")

    def seconds_and_last_products_behind_the_first_sum(one: Graph) -> tuple[float, int]:
        plan = search(one, mesh, hardware, Request(policy="fsdp"))
        events = events_of(plan, Pricer.on(mesh, hardware, plan.optimizer, plan.bucket_bytes), prefetch=2)
        first = next(i for i, event in enumerate(events) if event.name.startswith("reduce_scatter"))
        products = [e for e in events[first:] if dict(e.about).get("op") in ("aten.mm.default", "autopar.einsum")]
        return play(events).seconds, len(products)

    seconds, behind = seconds_and_last_products_behind_the_first_sum(graph("llama", precision))
    before, none = seconds_and_last_products_behind_the_first_sum(as_traced("llama", precision))
    assert none == 0 and behind > 10
    assert seconds < before
