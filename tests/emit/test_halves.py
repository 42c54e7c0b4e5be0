"""A backward in two halves: together they are the whole, and between them they hold what is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.emit.emit import Emitted, emit
from autopar.emit.groups import name_groups
from autopar.emit.halves import Halves, halved
from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.lower.halves import first_half, held_between
from autopar.lower.program import Launch, Run
from autopar.plan import Plan
from autopar.rewrite.stages import CHANNEL, Stage, cut_in_stages
from tests.rewrite.test_stages import places
from tests.support.check import mesh_of
from tests.support.families import FAMILIES, family
from tests.support.plans import PlanSampler

QUICK = ("mlp", "gpt2", "cnn")


def families() -> list[object]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]


def stages_of(name: str) -> Iterator[Stage]:
    """The model in three stages."""
    found = places(name)
    ends = [found[len(found) // 3], found[2 * len(found) // 3]]
    yield from cut_in_stages(family(name).wide_graph, ends, inputs_first=True)


def values_of(stage: Stage, name: str) -> dict[str, Tensor]:
    """Those of the family, and random ones for what comes over cuts."""
    case, drawn = family(name), torch.Generator().manual_seed(1)
    values = {**case.values(case.wide_graph)}
    for node in stage.graph.nodes:
        if node.target.startswith(CHANNEL) and node.op in ("input", "tangent"):
            (type,) = node.outputs
            assert type is not None
            dtype = getattr(torch, type.dtype)
            if dtype.is_floating_point:
                values[node.name] = torch.randn(type.shape, generator=drawn, dtype=torch.float64).to(dtype)
            else:
                values[node.name] = torch.ones(type.shape, dtype=dtype)
    return values


def as_one(program: Emitted, halves: Halves) -> Any:
    """A backward that runs one half behind the other."""
    count, tangents = len(program.gradients), len(program.tangents)

    def backward(saved: list[Tensor], *given: Any) -> tuple[Tensor | None, ...]:
        made = halves.inputs(saved, *given)
        left = [*made[len(halves.first) :]]
        rest = iter(halves.weights(left, saved, *given[tangents:]))
        assert not left and not saved, "values are left over"
        first = dict(zip(halves.first, made, strict=False))
        return tuple(first[place] if place in first else next(rest) for place in range(count))

    return backward


@pytest.mark.parametrize("name", families())
def test_both_halves_are_the_whole(name: str) -> None:
    for seed, stage in enumerate(stages_of(name)):
        plan = PlanSampler(stage.graph, mesh_of(2)).draw(seed)
        values = values_of(stage, name)
        with fake_ranks(plan.mesh) as device_mesh:
            program = emit(plan, name_groups({}, plan.groups(), device_mesh, plan.mesh))
            halves = halved(program, stage.gives_back)
            whole = run(plan, device_mesh, values, program, family(name).seed)
            apart = run(
                plan, device_mesh, values, replace(program, backward=as_one(program, halves)), family(name).seed
            )
        told = [program.gradients[place][0].target for place in halves.first]
        assert sorted(told) == sorted(stage.gives_back)
        assert whole.results.keys() == apart.results.keys()
        for key, value in whole.results.items():
            other = apart.results[key]
            assert (value is None) == (other is None)
            assert value is None or other is None or torch.equal(value.nan_to_num(), other.nan_to_num()), key


def alone(stage: Stage) -> Plan:
    return PlanSampler(stage.graph, Mesh(("data",), (1,))).draw(0)


def storages(values: Sequence[Any]) -> dict[int, int]:
    """Address -> bytes of what tensors lie in."""
    return {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in values if isinstance(one, Tensor)
    }


@pytest.mark.parametrize("name", families())
def test_what_is_held_between_is_what_the_program_says(name: str) -> None:
    """Bytes of what the first half leaves and of what is still saved, without what was there before."""
    for stage in stages_of(name):
        plan = alone(stage)
        program, lowered = emit(plan, {"data": ""}), lower(plan, None)
        values, halves = values_of(stage, name), halved(program, stage.gives_back)
        inputs = [values[node.name].detach().clone() for node in program.inputs]
        kept = [value for node, value in zip(program.inputs, inputs, strict=True) if node.target not in stage.receives]
        tangents = [values.get(node.name, torch.ones((), dtype=torch.float64)).clone() for node in program.tangents]
        own = [torch.tensor(0) for _ in plan.mesh.groups]
        with torch.no_grad():
            torch.manual_seed(0)
            outputs = program.forward(*inputs, *own)
            saved = [*outputs[len(program.results) :]]
            made = halves.inputs(saved, *tangents, *own)
        count = len(halves.first)
        held = storages([*made[count:], *saved])
        for address in storages(kept):
            held.pop(address, None)
        end = first_half(lowered, plan.graph, stage.gives_back)
        wanted = held_between(lowered, plan.graph, end, stage.gives_back, {*stage.receives})
        assert sum(held.values()) == wanted, stage.receives


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama"])
def test_gradients_of_weights_come_second(name: str) -> None:
    """Of a stage that gives gradients back, products with the gradients of weights are in the second half; the first
    stage, for whose inputs nobody waits, has all of it there.
    """
    first, *others = stages_of(name)
    plan = alone(first)
    program = lower(plan, None)
    ahead = program.instructions["backward"][: first_half(program, plan.graph, first.gives_back)]
    assert not [one for one in ahead if isinstance(one, (Run, Launch))]
    for stage in others:
        plan = alone(stage)
        program = emit(plan, {"data": ""})
        halves = halved(program, stage.gives_back)
        trained = [place for place, (one, _) in enumerate(program.gradients) if one.target not in stage.gives_back]
        assert trained and stage.gives_back
        ahead, behind = ({node.name for node in half.graph.nodes} for half in (halves.inputs, halves.weights))
        products = [node.name for node in plan.graph.nodes if node.phase == "backward" and "einsum" in node.op]
        assert products and all((one in ahead) != (one in behind) for one in products)
        assert len([one for one in products if one in behind]) >= len(products) // 2
