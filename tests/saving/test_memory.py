"""Peaks of device and host, predicted and measured: whole steps with forward, backward and optimizer, on one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.ir.mesh import Mesh
from autopar.measure.twin import memory_of
from cost_models.hardware import Hardware
from tests.support.families import family
from tests.support.residence import ResidenceSampler
from tests.support.sent import skip_unless_places_arrive

MACHINE = Hardware.load("cpu-gloo")
OVER = 1.02  # never more than predicted, and not much less
CASES = [("mlp", (2,), 6), ("mlp", (2, 2), 4), ("block", (2, 2), 3), ("cnn", (2,), 3), ("gpt2", (2,), 2)]
CASES += [("rotary", (2,), 2), ("fno", (2, 2), 2), ("parts", (2,), 2)]
CASES = [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in CASES]
CASES += [
    pytest.param(name, (2, 2), 2, id=f"{name}-slow", marks=pytest.mark.slow)
    for name in ("gpt2", "llama", "opt", "bert", "vit")
]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
@pytest.mark.parametrize(("name", "sizes", "count"), CASES)
def test_both_tiers_hold_what_the_plan_says(
    fake_mesh: Callable[..., object], name: str, sizes: tuple[int, ...], count: int, optimizer: str
) -> None:
    mesh = Mesh(("data", "tensor")[: len(sizes)], sizes)
    sampler = ResidenceSampler(family(name).graph, mesh, MACHINE, optimizer)
    for seed in range(count if optimizer == "adamw" else 1):
        plan = sampler.draw(seed)
        fake_mesh(**dict(zip(mesh.names, mesh.sizes, strict=True)))
        skip_unless_places_arrive(name)
        found = memory_of(plan, family(name).model, (), family(name).inputs)
        told = {where: round((pair.predicted or 0) / pair.measured, 4) for where, pair in found.items()}
        print(f"{name:8} {mesh!s:16} {optimizer:12} {seed} {told}")
        assert found["step"].predicted == plan.peak_bytes["hbm"] and found["host"].predicted == plan.peak_bytes["host"]
        for tier in ("step", "host"):
            pair = found[tier]
            assert pair.measured <= pair.predicted <= OVER * pair.measured, (seed, told)
