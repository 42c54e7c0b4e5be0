"""What a refusal says would do: it does, and is not much more than the plan takes that is found with it."""

from __future__ import annotations

import math

import pytest

from autopar.errors import Infeasible
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.search import Request, answer, ask
from autopar.search.limits import nothing_fits
from autopar.search.memory_options import ALLOWED
from benchmarks.limits import question_of
from cost_models.hardware import Hardware
from solver import Shortage
from tests.support.families import family

CPU = Hardware.load("cpu-gloo")
KIB = 2**10


def graph() -> Graph:
    return family("mlp").graph


@pytest.mark.parametrize("name", ["mlp", "cnn", "embeddings"])
def test_with_what_would_do_there_is_a_plan_that_takes_hardly_less_and_below_it_none(name: str) -> None:
    """With everything allowed. Of embeddings it was 15 % more than the plan took while the weight of a layer counted as
    fetched from where that layer might be run again, be it run again or not.
    """
    asked = question_of(name) if name == "embeddings" else ask(family(name).graph, Mesh(("data",), (2,)), CPU)
    with pytest.raises(Infeasible) as refused:
        answer(asked, Request(memory=1.0, allow=ALLOWED))
    least = refused.value.enough
    assert least is not None and least == refused.value.at_least, "small enough to be found out"
    assert "the least that would do is " in str(refused.value) and "counted on the safe side" in str(refused.value)
    taken = answer(asked, Request(memory=least, allow=ALLOWED)).peak_bytes["hbm"]
    assert 0.95 * least <= taken <= least
    with pytest.raises(Infeasible):
        answer(asked, Request(memory=math.floor(least * 0.999), allow=ALLOWED))


def told(at_least: float, enough: float | None, resource: str = "hbm") -> str:
    tenants = () if enough is None else (("x", 2.0 * KIB),)
    return nothing_fits(Shortage(resource, 1.0, at_least, enough, 0, tenants, False), graph(), KIB, (), None)


def test_what_was_proven_and_what_was_found_are_told_apart() -> None:
    assert "the least that would do is 3.00 KiB (counted on the safe side), at the peak while" in told(3 * KIB, 3 * KIB)
    between = "the least that would do lies between 2.00 KiB (counted on the safe side) and 3.00 KiB, for which a plan"
    assert f"{between} was found, at the peak while" in told(2 * KIB, 3 * KIB)
    assert "lies between 2.00 KiB (counted on the safe side) and 3.00 KiB of the host, for" in told(
        2 * KIB, 3 * KIB, "host"
    )


def test_without_a_plan_no_peak_is_told() -> None:
    text = told(2 * KIB, None)
    assert "at least 2.00 KiB is needed (counted on the safe side). Give more memory" in text
    assert "peak" not in text and "tenants" not in text
