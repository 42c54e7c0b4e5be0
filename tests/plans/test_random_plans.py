"""Every legal plan is right: any strategy for any node, outputs, gradients and buffers as on one device, in float64.

1e-9 of the largest entry: float64 sums in another order differ by 1e-15 to 1e-12 here, a term lost or counted twice by
1e-3 or more.
"""

from functools import cache

import pytest

from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.rewrite import gathered_once
from tests.support.check import difference, mesh_of
from tests.support.families import FAMILIES, FURTHER, family
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler

TOLERANCE = 1e-9
MESHES = [(2,), (3,), (4,), (2, 2)]
SMALL = {"mlp": 60, "block": 20, "grouped": 12, "cnn": 30, "queue": 12, "rotary": 8, "fno": 6, "parts": 6}
SMALL |= {"through": 12}  # gradients of arguments
LARGE = {"gpt2": 5, "llama": 3, "mixtral": 4, "opt": 4, "bert": 4, "t5": 2, "vit": 4, "embeds": 3}


@cache
def sampler(name: str, sizes: tuple[int, ...], once: bool = False) -> PlanSampler:
    graph = family(name).wide_graph
    return PlanSampler(gathered_once(graph) if once else graph, mesh_of(*sizes))


def check(name: str, sizes: tuple[int, ...], seeds: range, once: bool = False) -> None:
    wrong: list[str] = []
    for seed in seeds:
        off, where = difference(sampler(name, sizes, once).draw(seed), family(name))
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


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize(("name", "count"), [("mlp", 20), ("block", 6), ("cnn", 4), ("gpt2", 2)])
def test_any_legal_plan_is_right_where_one_gather_may_serve_all_readers(name: str, count: int, sizes) -> None:
    check(name, sizes, range(200, 200 + count), once=True)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*MESHES, (2, 2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, *FURTHER])
def test_many_legal_plans_are_right(name: str, sizes: tuple[int, ...]) -> None:
    check(name, sizes, range(1000, 1000 + (2 if name in LARGE else 8)))


@pytest.mark.parametrize(("name", "count"), [("mlp", 6), ("block", 2), ("cnn", 2)])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_the_simulator_and_the_lockstep_agree_to_the_last_bit(name: str, count: int, sizes: tuple[int, ...]) -> None:
    """torch's LocalTensor and our own collectives: two ways to run all ranks in one process."""
    mesh, values = mesh_of(*sizes), family(name).values(family(name).wide_graph)
    with fake_ranks(mesh) as device_mesh:
        for seed in range(count):
            plan = sampler(name, sizes).draw(seed)
            one, (two, _) = run(plan, device_mesh, values), run_all(plan, values)
            assert one.results.keys() == two.results.keys()
            for key, value in one.results.items():
                other = two.results[key]
                assert (value is None and other is None) or value.equal(other), f"{name} on {sizes}, seed {seed}: {key}"  # type: ignore[union-attr]
