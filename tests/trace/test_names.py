"""Names of nodes: numbered where they are taken, by the smallest number that is free."""

from autopar.ir.graph import Node, TensorType
from autopar.trace.builder import Builder

VALUE = (TensorType((2,), "float32"),)


def _source(name: str) -> Node:
    return Node(name, "input", (), (), VALUE, target=name)


def test_a_name_that_is_taken_gets_the_smallest_free_number():
    builder = Builder()
    names = [builder.keep(_source(name)) for name in ("x", "x_2", "x", "x", "x", "x_1", "y")]
    assert names == ["x", "x_2", "x_1", "x_3", "x_4", "x_1_1", "y"]


def test_many_nodes_of_one_name_are_numbered_as_fast_as_few():
    # Hundreds of layers have thousands of views each: to count from 1 every time takes a minute here.
    builder, many = Builder(), 30_000
    names = [builder.keep(_source("view")) for _ in range(many)]
    assert names == ["view", *(f"view_{number}" for number in range(1, many))]
