"""Laws of the memory limit: kept to the byte, more never hurts, and a refusal says truly what would do."""

import re

import pytest

from autopar.errors import Infeasible
from autopar.plan import Plan
from autopar.search import Request, search
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import SLOW

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def plan(name: str, sizes: tuple[int, ...], memory: float | None) -> Plan:
    """By layouts alone; what else may be recomputed and offloaded is for tests/assemble."""
    return search(family(name).graph, mesh_of(*sizes), SLOW, Request(memory=memory, tied=False, allow=()))


CASES = [("mlp", (2,)), ("mlp", (4,)), ("block", (2,)), ("cnn", (4,))]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_more_memory_is_never_slower_and_the_limit_holds(name: str, sizes: tuple[int, ...]) -> None:
    roomy = plan(name, sizes, None)
    slower = roomy.step_seconds
    for part in (1.0, 0.95, 0.9, 0.85, 0.8):
        try:
            found = plan(name, sizes, part * roomy.peak_bytes["hbm"])
        except Infeasible:
            break
        assert found.peak_bytes["hbm"] <= part * roomy.peak_bytes["hbm"]
        assert found.step_seconds >= slower * (1 - 1e-6)
        slower = found.step_seconds


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_a_refusal_names_the_least_memory_and_it_is_the_least(name: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(Infeasible) as refused:
        plan(name, sizes, 10_000)
    said = str(refused.value)
    told = re.search(
        r"the least that would do is ([\d.]+) (\w+) \(counted on the safe side\), at the peak while (.+) runs", said
    )
    assert told is not None, said
    tenants = said.split("largest tenants there: ")[1].split(". What would help")[0].split("; ")
    assert len(tenants) == 5 and all(re.search(r" [\d.]+ [KMG]?i?B$", tenant) for tenant in tenants), tenants
    least = float(told[1]) * UNITS[told[2]]
    found = plan(name, sizes, least * 1.0001)  # the message has two decimals
    assert found.peak_bytes["hbm"] <= least * 1.0001
    with pytest.raises(Infeasible):
        plan(name, sizes, least * 0.99)
