"""Small plans, made once."""

import json

import pytest

from autopar.ir.graph import Graph
from autopar.plan import Plan
from autopar.plan.store import dumps
from tests.plan.nets import megatron, net_graph, plan_of, sharded


@pytest.fixture(scope="session")
def graph() -> Graph:
    return net_graph()


@pytest.fixture(scope="session")
def plan(graph) -> Plan:
    """Sharded over data, so that much is sent."""
    return plan_of(graph, layout_of=sharded)


@pytest.fixture(scope="session")
def large() -> Graph:
    """Large enough that splitting the work is worth what it sends; on the meta device, so it costs nothing."""
    return net_graph(batch=64, length=512, width=1024, classes=1024)


@pytest.fixture(scope="session")
def fsdp_plan(large) -> Plan:
    return plan_of(large, layout_of=sharded)


@pytest.fixture(scope="session")
def megatron_plan() -> Plan:
    """One sequence per rank of data, so that tensor has no batch to split."""
    return plan_of(net_graph(batch=4, length=8192, width=4096, classes=2048), layout_of=megatron)


@pytest.fixture
def content(plan) -> dict:
    """The plan's JSON, to be edited."""
    return json.loads(dumps(plan))
