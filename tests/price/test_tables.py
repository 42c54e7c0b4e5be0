"""Whatever a rule lets an operator give and take can be priced, and moved on: over all entries of the tables."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.ir.graph import RANDOM_STATE
from autopar.ir.layout import REPLICATE, Layout, Partial
from autopar.ir.mesh import Mesh
from autopar.price.reshard import Resharder
from autopar.propose.strategies import node_strategies
from cost_models.hardware import Hardware
from cost_models.price import links_of
from tests.rules.test_rules import SAMPLES, calls

MESH, H100 = Mesh(("a", "b"), (2, 2)), Hardware.load("h100-sxm")


def terms(layout: Layout) -> set[str]:
    return {one.op for one in layout if isinstance(one, Partial)}


@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_what_an_operator_gives_becomes_whole_and_what_it_takes_is_made_of_whole_values(op: str) -> None:
    resharder, whole = Resharder(MESH, H100, links_of(H100, MESH.names, MESH.sizes)), (REPLICATE,) * 2
    for call in calls(op):
        for way in node_strategies(call.node, call.types, call.rule, MESH):
            for type, give in zip(call.node.outputs, way.gives, strict=True):
                if type is None or type.dtype == RANDOM_STATE:
                    continue
                path = resharder.path(type, give, whole)
                assert {op for change in path for op in terms((change.before,))} == terms(give)
                table = resharder.table(type)
                assert np.isfinite(table.price[table.index[give], table.index[whole]])
            for type, take in zip(call.types, way.takes, strict=True):
                assert take in resharder.table(type).index and terms(take) <= {"sum"}
