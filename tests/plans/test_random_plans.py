"""Every legal plan is right: any strategy for any node, outputs, gradients and buffers as on one device, in float64.

1e-9 of the largest entry: float64 sums in another order differ by 1e-15 to 1e-12 here, a term lost or counted twice by 1e-3
or more.
"""

from functools import cache

import pytest

from tests.support.check import mesh_of, ranks_of, worst_difference
from tests.support.families import FAMILIES, family
from tests.support.plans import PlanSampler

TOLERANCE = 1e-9
MESHES = [(2,), (3,), (4,), (2, 2)]
SMALL = {"mlp": 60, "block": 15, "cnn": 25}
LARGE = {"gpt2": 3, "llama": 2, "opt": 3, "bert": 3, "t5": 1, "vit": 3}


@cache
def sampler(name: str, sizes: tuple[int, ...]) -> PlanSampler:
    return PlanSampler(family(name).wide_graph, mesh_of(*sizes))


def check(name: str, sizes: tuple[int, ...], seeds: range) -> None:
    case = family(name)
    values = case.values(case.wide_graph)
    wrong: list[str] = []
    with ranks_of(mesh_of(*sizes)) as judge:
        for seed in seeds:
            off, where = worst_difference(judge(sampler(name, sizes).draw(seed), values), case.wide_reference)
            if not off <= TOLERANCE:
                wrong.append(f"seed {seed}: {where} is off by {off:.3g}")
    assert not wrong, f"{name} on {sizes}, {len(wrong)} of {len(seeds)} plans: {'; '.join(wrong[:5])}"


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_any_legal_plan_of_a_small_model_is_right(name: str, sizes: tuple[int, ...]) -> None:
    check(name, sizes, range(SMALL[name]))


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_any_legal_plan_of_a_family_is_right(name: str, sizes: tuple[int, ...]) -> None:
    check(name, sizes, range(100, 100 + LARGE[name]))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*MESHES, (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_many_legal_plans_are_right(name: str, sizes: tuple[int, ...]) -> None:
    check(name, sizes, range(1000, 1000 + (20 if name in LARGE else 300)))
