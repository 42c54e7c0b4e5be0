"""The bytes that collectives move equal the plan's bytes exactly, per collective and axis."""

import pytest

from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.lockstep import run_all
from tests.support.machines import FAST
from tests.support.plans import PlanSampler


def without_nothing(moved: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    return {key: nbytes for key, nbytes in moved.items() if nbytes}


@pytest.mark.parametrize("sizes", [(2,), (4,), (3,), (2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize(("name", "count"), [("mlp", 20), ("block", 6), ("cnn", 10)])
def test_random_plans_move_what_they_say(name: str, count: int, sizes: tuple[int, ...]) -> None:
    case, mesh = family(name), mesh_of(*sizes)
    sampler, values = PlanSampler(case.graph, mesh), case.values(case.graph)
    for seed in range(count):
        plan = sampler.draw(seed)
        assert run_all(plan, values)[1] == without_nothing(plan.comm_bytes), f"{name} on {mesh}, seed {seed}"


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "t5", "vit"])
def test_random_plans_of_families_move_what_they_say(name: str) -> None:
    case = family(name)
    for sizes, seed in (((2, 2), 0), ((4,), 1)):
        plan = PlanSampler(case.graph, mesh_of(*sizes)).draw(seed)
        assert run_all(plan, case.values(case.graph))[1] == without_nothing(plan.comm_bytes), f"{name} on {sizes}"


@pytest.mark.parametrize(("name", "sizes"), [("gpt2", (2, 2)), ("bert", (4,)), ("llama", (2,)), ("cnn", (2, 2))])
def test_the_best_plan_moves_what_it_says(name: str, sizes: tuple[int, ...]) -> None:
    case, mesh = family(name), mesh_of(*sizes)
    plan = PlanSampler(case.graph, mesh, FAST).best()
    _, traffic = run_all(plan, case.values(case.graph))
    assert traffic == without_nothing(plan.comm_bytes)
    assert traffic, "nothing was split"
