"""Every module stands in the table once, and what the table sends is what the plan sends."""

from collections import Counter, defaultdict

import pytest

from autopar.page.modules import modules_of
from autopar.plan.reading import parameters_of
from autopar.plan.tell import home, traffic_by_part
from tests.plan.nets import net_graph, plan_of, sharded
from tests.simulate.plans import drawn

CASES = [("gpt2", (2, 2), 1), ("cnn", (2, 2), 3), ("mlp", (2,), 2)]


@pytest.mark.parametrize(("name", "sizes", "seed"), CASES)
def test_every_module_appears_once(name, sizes, seed):
    plan, _ = drawn(name, sizes, seed)
    names = Counter(name for module in modules_of(plan) for name in module.names)
    assert {*names.values()} == {1}
    owners = {home(node) for node, _ in parameters_of(plan)}
    assert owners <= {*names}
    weights = Counter(f"{name}.{w[0]}".lstrip(".") for m in modules_of(plan) for name in m.names for w in m.weights)
    assert weights == Counter(node.target for node, _ in parameters_of(plan))


@pytest.mark.parametrize(("name", "sizes", "seed"), CASES)
def test_the_traffic_of_all_modules_is_that_of_the_plan(name, sizes, seed):
    plan, _ = drawn(name, sizes, seed)
    total: dict[str, Counter] = defaultdict(Counter)
    part_of = {"weights": "forward", "activations": "forward", "own": "forward"}
    for module in modules_of(plan):
        for part, sent in module.sends.items():
            for key, nbytes in sent.items():
                total[part_of.get(part, part)][key] += nbytes * len(module.names)
    told = traffic_by_part(plan)
    told["forward"] = dict(Counter(told["forward"]) + Counter(told.pop("outputs")))
    for part, sent in told.items():
        assert +total[part] == +Counter(sent), part


def test_repeated_blocks_are_one_entry():
    plan = plan_of(net_graph(), layout_of=sharded)
    patterns = [module.pattern for module in modules_of(plan)]
    assert len(patterns) == len({*patterns})
    (up,) = [module for module in modules_of(plan) if "layers.1.up" in module.names]
    assert up.pattern == "layers.*.up" and len(up.names) == 3
    assert up.does == ("product", "add") and up.weights[0][:3] == ("weight", "float32[256, 64]", "[data, _]")
    (down,) = [module for module in modules_of(plan) if "layers.1.down" in module.names]
    assert ("all_gather", "data") in down.sends["weights"], "its weight is gathered for use"
