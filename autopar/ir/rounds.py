"""Micro-batches: a graph that is one of several equal rounds of a step, each over its part of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SUM, LAST = "sum", "last"


@dataclass(frozen=True)
class Rounds:
    """A step runs the graph `count` times.

    `cut`: name of an input node -> the dim along which each round takes its part, in order; an input that is left out
    is whole in every round. `joined`: per result of the graph what the step gives: `SUM` of the rounds, what the `LAST`
    one gives (all give the same), or the dim along which they are put together. `stored`: name of a parameter node ->
    the dtype in which it is stored, where all rounds read one cast of it, which is made in front of them.
    `reduces_once`: gradients of parameters that are partial sums are added up as they are made, and summed over ranks
    behind the last round.
    """

    count: int = 1
    cut: Mapping[str, int] = field(default_factory=dict[str, int])
    joined: tuple[str | int, ...] = ()
    stored: Mapping[str, str] = field(default_factory=dict[str, str])
    reduces_once: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a step of {self.count} micro-batches does nothing; give 1 or more")

    def held(self, name: str) -> int:
        """How many times what a round reads of a source is there throughout the step: a batch is cut, not copied."""
        return self.count if name in self.cut else 1

    def times(self, place: int) -> int:
        """How many times what a round gives the step gives of a result; 0 where they are not put together."""
        return self.count if self.joined and isinstance(self.joined[place], int) else 0

    def whole_shape(self, shape: tuple[int, ...], join: str | int) -> tuple[int, ...]:
        """Of what a step gives, where each round gives `shape`."""
        if not isinstance(join, int):
            return shape
        return (*shape[:join], shape[join] * self.count, *shape[join + 1 :])


ONE = Rounds()


def wide(dtype: str) -> str:
    """In what values of a dtype are added up over rounds."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype
