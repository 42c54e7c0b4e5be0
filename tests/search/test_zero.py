"""Baseline zero1: every weight whole from the start of the step, every gradient whole, to the end of backward."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.emit import emit
from autopar.ir.graph import Graph, Ref
from autopar.lower import lower
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite import gathered_once, is_gathered_once, kept_whole, plain
from autopar.search import Request, answer, ask, search
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.programs import held_before, of_a_gradient

H100 = Hardware.load("h100-sxm")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
some_models = pytest.mark.parametrize("name", ["mlp", "gpt2"])  # all of whose parameters can be split


@cache
def plan_of(name: str, policy: str) -> Plan:
    return search(family(name).graph, mesh_of(2), H100, Request(policy=policy))


def sizes(graph: Graph) -> list[int]:
    """Bytes of the whole parameters."""
    return sorted(type.nbytes for node in graph.nodes if node.op == "parameter" for type in node.outputs if type)


def moved(plan: Plan, collective: str) -> list[int]:
    return sorted(comm.nbytes for comm in plan.comms() if comm.collective == collective)


@some_models
def test_each_weight_is_gathered_once_and_each_gradient_reduced_once(name: str) -> None:
    plan, fsdp = plan_of(name, "zero1"), plan_of(name, "fsdp")
    assert plan.parameters == fsdp.parameters
    assert moved(plan, "all_gather") == moved(plan, "reduce_scatter") == sizes(plan.graph)
    assert all(nbytes <= 64 for nbytes in moved(plan, "all_reduce")), "losses and counts"


@some_models
def test_gathers_come_before_what_is_computed_and_reductions_behind_it(name: str) -> None:
    plan = plan_of(name, "zero1")
    program = emit(plan, {axis: axis for axis in plan.mesh.names})
    assert program.backward is not None
    calls = [[str(node.target) for node in part.graph.nodes] for part in (program.forward, program.backward)]

    def places(part: int, *words: str) -> list[int]:
        return [place for place, call in enumerate(calls[part]) if any(word in call for word in words)]

    assert max(places(0, "all_gather")) < min(places(0, "einsum"))
    assert min(places(1, "reduce_scatter")) > max(places(1, "einsum")) and not places(1, "all_gather")


@some_models
def test_weights_and_gradients_are_whole_when_backward_ends(name: str) -> None:
    """The first reduction finds all of both; the peak is above that of zero2, which is above that of fsdp."""
    plan, zero2 = plan_of(name, "zero1"), plan_of(name, "zero2")
    held = held_before(lower(plan, None, Pricer.on(plan.mesh, H100, "adamw")), of_a_gradient(plan.graph))
    gathered = [one.nbytes for one in held if " resharded for " in one.owner and "_once" in one.owner]
    assert sorted(gathered) == sizes(plan.graph)
    whole = sum(sizes(plan.graph))  # of weights and of gradients; half of it for each of pieces, and two states
    assert sum(buffer.nbytes for buffer in held) >= whole * (1 + 1 + 3 / 2)
    assert plan.peak_bytes["hbm"] > zero2.peak_bytes["hbm"] > plan_of(name, "fsdp").peak_bytes["hbm"]


def test_the_graph_is_the_traced_one_but_for_what_keeps_weights(tmp_path: Path) -> None:
    plan, traced = plan_of("gpt2", "zero1"), family("gpt2").graph
    assert plan.graph != traced == plain(plan.graph)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").graph == plan.graph


@pytest.mark.parametrize("rewrite", [gathered_once, kept_whole])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "cnn", "block"])
def test_what_is_put_into_a_graph_can_be_taken_out(name: str, rewrite) -> None:
    graph = family(name).graph
    names = [node.target for node in graph.nodes if node.op == "parameter"]
    for but in ([], names[:2], names):
        assert plain(rewrite(graph, but)) == graph
    assert rewrite(graph, names) == graph


def test_weights_that_are_cast_are_gathered_as_they_are_used() -> None:
    case = family("mlp")
    graph = graph_of(capture(case.model, (), case.inputs, precision=BF16), BF16)
    assert plain(kept_whole(graph)) == graph
    plan = search(graph, mesh_of(2), H100, Request(policy="zero1"))
    gathered = moved(plan, "all_gather")
    assert sum(gathered) == sum(sizes(graph)) // 2 and len(gathered) == len(sizes(graph))
    assert len(moved(plan, "reduce_scatter")) == len(sizes(graph))


def test_weights_are_kept_where_values_are_run_again_but_not_those_on_the_host() -> None:
    pin = {"transformer.h.*": "recompute", "transformer.wte.weight": "offload-parameters"}
    plan = answer(ask(family("gpt2").graph, mesh_of(2), H100), Request(policy="zero1", pin=pin))
    repeated = [node for node in plan.graph.nodes if node.target and not node.is_source]
    assert any(node.op == "autopar.einsum" for node in repeated) and not any(map(is_gathered_once, repeated))
    kept = {node.operands[0].name for node in plan.graph.nodes if is_gathered_once(node)}
    assert plan.residence == {"transformer.wte.weight": "host"} and "transformer_wte_weight" not in kept
    gradients = {result.target: result.ref for result in plan.graph.results if result.kind == "gradient"}
    is_late = {name: is_gathered_once(plan.graph.by_name[ref.name]) for name, ref in gradients.items() if ref}
    assert [name for name, late in is_late.items() if not late] == ["transformer.wte.weight"]
    assert all(Ref(name) in {ref for node in plan.graph.nodes for ref in node.operands} for name in kept)


@some_models
def test_the_text_calls_each_by_its_name(name: str) -> None:
    called = {"zero1": "(ZeRO-1)", "zero2": "(SHARD_GRAD_OP / ZeRO-2)", "fsdp": "(FSDP / ZeRO-3)"}
    for policy, told in called.items():
        text = plan_of(name, policy).explain()
        assert [other for other in called.values() if other in text] == [told]
