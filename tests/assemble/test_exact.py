"""What the problem says of any picks: their price to the last digit, and never less memory than the referee finds.

Of memory that is asked at every instant of the step, on the device and on the host.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from autopar.decide.picks import tidied
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.propose.strategies import propose
from autopar.rewrite import narrowed, plain
from autopar.search.memory_options import WAYS, MemoryOptions, checkpointed
from autopar.search.policies import restrict
from cost_models.hardware import Hardware
from tests.assemble.drawn import drawn
from tests.support.check import mesh_of
from tests.support.families import FAMILIES, family
from tests.support.machines import FAST
from tests.support.plans import random_picks

H100 = Hardware.load("h100-sxm")  # updates all parameters at once, FAST one by one
ROW = 4000  # bytes of gradients that are summed at once
CASES = [("mlp", (2,)), ("mlp", (2, 2)), ("block", (2,)), ("block", (2, 2)), ("cnn", (2,)), ("cnn", (2, 2))]
CASES += [("gpt2", (2,)), ("llama", (2, 2)), ("t5", (2,))]
SUBSETS = [ways for count in range(len(WAYS) + 1) for ways in combinations(WAYS, count)]


def settings() -> Iterator[tuple[Hardware, str, int]]:
    """Machine, optimizer and bytes of a row, in turns."""
    while True:
        yield from ((FAST, "adamw", 0), (H100, "adamw", ROW), (FAST, "rmsprop", ROW), (H100, "adagrad", 0))


def check(name: str, sizes: tuple[int, ...], seeds: range) -> None:
    graph, mesh = family(name).wide_graph, mesh_of(*sizes)
    strategies, _ = propose(graph, mesh)
    turns = settings()
    for ways in SUBSETS:
        hardware, optimizer, row = next(turns)
        pricer = Pricer.on(mesh, hardware, optimizer, row)
        found = drawn(graph, pricer, ways, strategies=strategies, tied=name == "gpt2" and "host" in ways)
        for seed in seeds:
            wrong = found.wrong(found.tidy(random.Random(seed)))
            assert not wrong, (ways, hardware.name, optimizer, row, seed, wrong[:3])


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_any_picks_cost_what_the_problem_says_and_hold_no_more(name: str, sizes: tuple[int, ...]) -> None:
    check(name, sizes, range(2) if name in ("mlp", "block", "cnn") else range(1))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_many_picks_cost_what_the_problem_says_and_hold_no_more(name: str, sizes: tuple[int, ...]) -> None:
    check(name, sizes, range(100, 102) if name in ("mlp", "block", "cnn") else range(100, 101))


@pytest.mark.parametrize("name", ["block", "cnn"])
def test_so_do_the_picks_of_a_policy(name: str) -> None:
    """With modes or residences that are settled: all that can be is run again; all parameters lie on the host."""
    graph, mesh = family(name).wide_graph, mesh_of(2)
    strategies, _ = propose(graph, mesh)
    on_host = {node.target: "host" for node in graph.nodes if node.op == "parameter"}
    for policy, options in (
        ("checkpoint-every-block", MemoryOptions(modes=checkpointed)),
        ("zero3-offload", MemoryOptions(residence=on_host)),
    ):
        kept = restrict(policy, graph, strategies, mesh)
        found = drawn(graph, Pricer.on(mesh, H100, "adamw"), options, strategies=kept)
        for seed in range(5):
            picks = found.tidy(random.Random(seed))
            assert not found.wrong(picks), (policy, seed)
            plan = found.plan(picks, found.priced(picks))
            assert plan.residence == (on_host if policy == "zero3-offload" else {})


def test_untidied_picks_never_cost_less() -> None:
    """What nobody reads may be saved, or run again: it is only more to hold and to do."""
    found = drawn(family("block").wide_graph, Pricer.on(mesh_of(2), FAST, "adamw"))
    for seed in range(20):
        picks = random_picks(found.assembled, random.Random(seed))
        before, after = found.priced(picks), found.priced(tidied(found.assembled, picks))
        assert after.cost <= before.cost * (1 + 1e-12)
        assert all(after.peak.get(tier, 0.0) <= nbytes for tier, nbytes in before.peak.items())


# --- one graph and the other -----------------------------------------------------------------------------------------


def plans(name: str, sizes: tuple[int, ...], seeds: int) -> Iterator[Plan]:
    found = drawn(family(name).wide_graph, Pricer.on(mesh_of(*sizes), FAST, "adamw"))
    for seed in range(seeds):
        picks = found.tidy(random.Random(seed))
        yield found.plan(picks, found.priced(picks))


@pytest.mark.parametrize("name", ["mlp", "block", "cnn", "gpt2"])
def test_the_traced_graph_comes_back_from_the_one_that_runs(name: str) -> None:
    graph = family(name).wide_graph
    for plan in plans(name, (2,), 5):
        assert plan.graph != graph
        assert plain(plan.graph) == graph
        assert plain(plan.graph).digest == graph.digest


@pytest.mark.parametrize("name", ["mlp", "block", "cnn", "gpt2"])
def test_saving_everything_is_the_traced_graph_but_for_views_of_what_is_there(name: str) -> None:
    graph = family(name).wide_graph
    runs = narrowed(graph, {})
    added = {node.name for node in runs.nodes} - {node.name for node in graph.nodes}
    assert all(node.target in graph.by_name for node in runs.nodes if node.name in added)
    assert plain(runs) == graph and plain(graph) is graph
