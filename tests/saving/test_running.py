"""Plans with values that are run again or offloaded, and parameters on the host: right, and bit by bit the same."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from torch import Tensor

from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.plan import Plan
from autopar.rewrite import widened
from tests.support.check import mesh_of
from tests.support.families import FAMILIES, Case, _gpt2, family
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler
from tests.support.residence import ResidenceSampler, random_modes, random_residence, residence_difference

TOLERANCE = 1e-9  # as in tests/plans/test_random_plans.py
SMALL = {"mlp": 20, "block": 6, "cnn": 8, "queue": 8}
LARGE = {"gpt2": 2, "llama": 2, "opt": 1, "bert": 1, "t5": 1, "vit": 1}


@cache
def sampler(name: str, sizes: tuple[int, ...]) -> ResidenceSampler:
    return ResidenceSampler(family(name).wide_graph, mesh_of(*sizes))


def check(name: str, sizes: tuple[int, ...], seeds: range) -> None:
    wrong: list[str] = []
    for seed in seeds:
        plan = sampler(name, sizes).draw(seed)
        for prefetch, bucket_bytes in ((None, 0), (seed % 3, 3000)):
            asked = replace(plan, prefetch=prefetch, bucket_bytes=bucket_bytes)
            off, where = residence_difference(asked, family(name))
            if not off <= TOLERANCE:
                wrong.append(f"seed {seed}, prefetch {prefetch}: {where} is off by {off:.3g}")
    assert not wrong, f"{name} on {sizes}: {'; '.join(wrong[:5])}"


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_any_legal_plan_of_a_small_model_is_right(name: str, sizes: tuple[int, ...]) -> None:
    check(name, sizes, range(SMALL[name]))


@pytest.mark.parametrize("name", LARGE)
def test_any_legal_plan_of_a_family_is_right(name: str) -> None:
    check(name, (2, 2), range(100, 100 + LARGE[name]))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_many_legal_plans_are_right(name: str, sizes: tuple[int, ...]) -> None:
    check(name, sizes, range(1000, 1000 + (1 if name in LARGE else 6)))


def dropping() -> Case:
    """With dropout in embeddings, attention and both branches of a layer."""
    model, inputs = _gpt2(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.1, n_layer=1)
    return Case(model.train(), inputs, seed=3)


def results_of(plan: Plan, case: Case) -> dict[tuple[str, str], Tensor | None]:
    ran, _ = run_all(plan, case.values(plan.graph), case.seed)
    return dict(ran.results)


@pytest.mark.parametrize(
    ("name", "sizes"), [("mlp", (2,)), ("block", (2, 2)), ("cnn", (2,)), ("dropout", (2,))], ids=str
)
def test_what_is_saved_and_where_things_lie_changes_no_bit(name: str, sizes: tuple[int, ...]) -> None:
    """20 random vectors of modes and residences, at the layouts of a random plan that keeps everything."""
    case = dropping() if name == "dropout" else family(name)
    mesh = mesh_of(*sizes)
    kept = PlanSampler(case.graph, mesh).draw(7)
    wanted, with_layouts_of = results_of(kept, case), ResidenceSampler(case.graph, mesh).with_layouts_of
    modes_seen: set[str] = set()
    for seed in range(20):
        rng = random.Random(seed)
        modes = random_modes(case.graph, rng)
        plan = with_layouts_of(kept, modes, random_residence(case.graph, rng))
        modes_seen.update(modes.values())
        found = results_of(replace(plan, prefetch=(None, 0, 2)[seed % 3]), case)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            ours = found[key]
            assert (value is None and ours is None) or value.equal(ours), (seed, key)  # type: ignore[union-attr]
    assert modes_seen >= {"save", "recompute", "offload"}


def test_random_operators_are_never_run_again() -> None:
    graph = dropping().graph
    drawn = [
        again for again in widened(graph, offload=True).again.values() if "dropout" in graph.by_name[again.origin].op
    ]
    assert drawn and not any("recompute" in again.modes for again in drawn)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_the_simulator_and_the_lockstep_agree_to_the_last_bit(sizes: tuple[int, ...]) -> None:
    """Stores, fetches and waits as operators of torch, on LocalTensors and on plain ones."""
    mesh, case = mesh_of(*sizes), family("mlp")
    with fake_ranks(mesh) as device_mesh:
        for seed in range(3):
            plan = replace(sampler("mlp", sizes).draw(seed), prefetch=1)
            values = case.values(plan.graph)
            one, (two, _) = run(plan, device_mesh, values), run_all(plan, values)
            for key, value in one.results.items():
                other = two.results[key]
                assert (value is None and other is None) or value.equal(other), (seed, key)  # type: ignore[union-attr]
