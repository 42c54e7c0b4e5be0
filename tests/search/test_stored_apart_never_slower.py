"""Parameters that may be stored in more pieces than stages read them in never make a pipeline slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.mesh import Mesh
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.search import Request
from autopar.search.context import ask
from autopar.search.orders import within_stage
from autopar.search.pipelines import pipeline_of
from cost_models.hardware import Hardware
from tests.support.families import family
from tests.support.machines import machine

MESHES = (Mesh(("pipe", "data"), (2, 2)), Mesh(("pipe", "data", "tensor"), (2, 2, 2)))
MACHINES = (machine(1e10, flops=1e10), machine(1e9, flops=1e12), machine(1e11, flops=1e13))


def check(name: str, mesh: Mesh, hardware: Hardware) -> bool:
    """Whether the pipeline stores any so."""
    graph = in_rounds_of_stages(family(name).graph, 4)
    question = ask(graph, within_stage(mesh), hardware, optimizer="adamw")
    plain = {node: tuple(one for one in options if not one.stored) for node, options in question.strategies.items()}
    without = replace(question, strategies=plain, found=[], proven=[], _tables={})
    found, other = (pipeline_of(one, mesh, Request(), schedule="1f1b") for one in (question, without))
    assert not any(choice.stored for choice in other.whole.choices.values())
    assert found.step_seconds <= other.step_seconds * (1 + 1e-9)
    return any(choice.stored for choice in found.whole.choices.values())


def test_gpt2_stores_some_so_and_is_no_slower() -> None:
    assert check("gpt2", MESHES[0], MACHINES[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "block"])
def test_no_pipeline_is_slower(name: str) -> None:
    used = [check(name, mesh, hardware) for mesh in MESHES for hardware in MACHINES]
    assert len(used) == 6
