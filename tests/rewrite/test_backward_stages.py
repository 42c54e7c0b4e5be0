"""Where backward operators run: the least bytes cross, compared with all ways to place them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopar.errors import NotCut
from autopar.ir.graph import Node, Ref, TensorType
from autopar.rewrite.backward_stages import least_crossing

TYPE = TensorType((4,), "float32")


@pytest.mark.parametrize("seed", range(200))
def test_no_other_way_lets_less_cross(seed: int) -> None:
    """Random graphs of up to six operators over three stages, with cuts that some values may not cross."""
    draw, count = random.Random(seed), 3
    nodes: list[Node] = []
    allowed: dict[str, set[int]] = {}
    bytes_of: dict[str, np.ndarray] = {}
    for number in range(draw.randint(1, 6)):
        reads = draw.sample([*allowed], draw.randint(0, min(2, number)))
        name = f"n{number}"
        nodes.append(Node(name, "aten.add.Tensor", tuple(map(Ref, reads)), (), (TYPE,), "backward"))
        allowed[name] = {*draw.sample(range(count), draw.choice([1, 1, 2, 3]))}
        closed = {cut for cut in range(count - 1) if draw.random() < 0.2}
        cost = np.full((count, count), np.inf)
        for made, read in itertools.product(range(count), repeat=2):
            if read <= made and not closed.intersection(range(read, made)):
                cost[made, read] = (made - read) * draw.randint(1, 9)
        bytes_of[name] = cost

    def total(stage_of: dict[str, int]) -> float:
        return sum(bytes_of[ref.name][stage_of[ref.name], stage_of[n.name]] for n in nodes for ref in n.operands)

    ways = (dict(zip(allowed, picks, strict=True)) for picks in itertools.product(*allowed.values()))
    least = min(map(total, ways))
    if np.isinf(least):
        with pytest.raises(NotCut, match="no order of stages"):
            least_crossing(nodes, allowed, count, lambda ref: bytes_of[ref.name])
        return
    found = least_crossing(nodes, allowed, count, lambda ref: bytes_of[ref.name])
    assert all(found[name] in stages for name, stages in allowed.items())
    assert total(found) == least
