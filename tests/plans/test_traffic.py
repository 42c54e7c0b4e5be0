"""The bytes that collectives move equal the plan's bytes exactly, per collective and axis."""

import pytest

from autopar.emit.simulate import fake_ranks
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import FAST, SLOW
from tests.support.plans import PlanSampler
from tests.support.traffic import counted


@pytest.mark.parametrize("sizes", [(2,), (4,), (3,), (2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize(("name", "count"), [("mlp", 12), ("block", 4), ("cnn", 6)])
def test_random_plans_move_what_they_say(name: str, count: int, sizes: tuple[int, ...]) -> None:
    case, mesh = family(name), mesh_of(*sizes)
    sampler, values = PlanSampler(case.graph, mesh), case.values(case.graph)
    with fake_ranks(mesh) as device_mesh:
        for seed in range(count):
            plan = sampler.draw(seed)
            _, traffic = counted(plan, device_mesh, values)
            assert traffic == {key: n for key, n in plan.comm_bytes.items() if n}, f"{name} on {mesh}, seed {seed}"


@pytest.mark.parametrize("hardware", [FAST, SLOW], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize(("name", "sizes"), [("gpt2", (2, 2)), ("bert", (4,)), ("llama", (2,)), ("cnn", (2, 2))])
def test_the_best_plan_moves_what_it_says(name: str, sizes: tuple[int, ...], hardware: object) -> None:
    case, mesh = family(name), mesh_of(*sizes)
    plan = PlanSampler(case.graph, mesh, hardware).best()  # type: ignore[arg-type]
    with fake_ranks(mesh) as device_mesh:
        _, traffic = counted(plan, device_mesh, case.values(case.graph))
    assert traffic == {key: n for key, n in plan.comm_bytes.items() if n}
    assert traffic, "nothing was split"
