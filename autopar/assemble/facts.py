"""What hangs on a graph alone: the problems of a question, and those of the same model on other meshes, share it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from autopar.assemble.liveness import Liveness, copied_gradients, liveness
from autopar.assemble.may_copy import may_copy
from autopar.ir.graph import Graph
from autopar.propose.repeated_blocks import classes_of
from autopar.rewrite import Again


class GraphFacts:
    """Each is found out once, when it is first asked for. `again`: as in `autopar.assemble.problem.assemble`."""

    def __init__(self, graph: Graph, again: Mapping[str, Again] | None = None) -> None:
        self.graph, self.again = graph, again or {}

    @cached_property
    def live(self) -> Liveness:
        """When its values are there."""
        return liveness(self.graph)

    @cached_property
    def classes(self) -> dict[str, str]:
        """Node -> the first of those that repeat it."""
        return classes_of(self.graph, tied=True, without=self.again)

    @cached_property
    def copied(self) -> set[int]:
        """Results that may be given as copies (`liveness.copied_gradients`)."""
        return copied_gradients(self.graph)

    @cached_property
    def may_copy(self) -> dict[str, tuple[int, ...]]:
        """Product -> the places of the operands that it may copy (`may_copy.may_copy`)."""
        return may_copy(self.graph, self.again)
