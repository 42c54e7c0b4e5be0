"""The benchmark that counts how often a pattern makes a search worse."""

import pytest

from autopar.rules.patterns import is_pattern
from autopar.search import ask
from autopar.search.policy_axis import everywhere
from benchmarks.patterns import compared, graph, is_slower, shapes
from cost_models.hardware import Hardware
from tests.support.check import mesh_of

H100 = Hardware.load("h100-sxm")


def test_shapes_differ_and_are_the_same_each_time() -> None:
    found = shapes(20)
    assert found == shapes(20) and len({*found}) == 20
    assert {one.family for one in found} == {"Llama", "GPT-2"} and len({one.mesh for one in found}) > 3


def test_without_patterns_there_are_none_and_equal_nodes_share_a_tuple() -> None:
    asked = ask(graph(shapes(1)[0]), mesh_of(2, 2), H100)
    bodies = {one.body for options in asked.strategies.values() for one in options if is_pattern(one.body)}
    assert len(bodies) > 2
    left = everywhere(asked.strategies, lambda one: one.body not in bodies)
    assert not any(is_pattern(one.body) for options in left.values() for one in options) and all(left.values())
    assert len({id(options) for options in left.values()}) == len({id(o) for o in asked.strategies.values()})


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 3])
def test_no_pattern_makes_a_search_worse_and_no_policy_is_better(number: int) -> None:
    seconds, others = compared(shapes(20)[number], H100)
    assert len(others) > 4 and not is_slower(seconds, others), (seconds, others)
