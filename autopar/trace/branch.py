"""A branch that a program always goes into, while the code that has asked for it runs (`autopar.trace.branches`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from autopar.trace.bodies import Body, places_of
from autopar.trace.entries import Entry

LEAVES = "forward calls {} ({}:{}) {}, and {}: a program always goes in there. Do that behind the branch"
WHERE = "in a branch that it takes by values ({}:{})"


@dataclass
class Appended:
    """A list that a branch appends to, and how many it has ahead of that; what is appended where it is not taken."""

    there: Any
    count: int
    otherwise: list[tuple[Any, Tensor | None]] = field(default_factory=list[tuple[Any, Tensor | None]])


@dataclass(frozen=True)
class Condition:
    """That a number, which is none below 0, is not 0; or, not `is_some`, that it is."""

    count: Tensor
    is_some: bool

    def negated(self) -> Condition:
        return Condition(self.count, not self.is_some)


@dataclass
class Branch:
    """One that is taken where `truth`; `rows`: where a mask of that number picks any. `frame`: None while statements of
    an else run. `before`: what names that it assigns are where it is not taken.
    """

    frame: FrameType | None
    body: Body
    file: str
    truth: Tensor
    rows: int | None
    before: dict[str, Any] = field(default_factory=dict[str, Any])
    asked_at: int = 0  # of the code of its frame
    lists: dict[str, Appended] = field(default_factory=dict[str, "Appended"])
    entries: list[Entry] = field(default_factory=list[Entry])
    fresh: set[int | None] = field(default_factory=set[int | None])  # memory of what is made within
    gated: set[int | None] = field(default_factory=set[int | None])  # and of what gives nobody gradients who is outside
    checked: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])  # of `Converted.check`
    reached: int = 0  # of the code of its frame
    of_rows: Tensor | None = None
    of_all: Tensor | None = None
    asks: tuple[tuple[Tensor, bool], ...] = ()  # what it has asked, and the answers with which it is taken
    own: Condition | None = None  # which is `truth`, together with those `beside` it, of what it stands in
    beside: tuple[Condition, ...] = ()

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """All of which hold where it is taken."""
        return self.beside if self.own is None else (self.own, *self.beside)

    @property
    def is_running(self) -> bool:
        """Whether the code that asked is in it still, if it runs at all."""
        if self.frame is None:
            return True
        at = self.frame.f_lasti
        goes_over = self.body.goes_over or self.body.breaks
        is_again = not goes_over and at < self.reached  # in another turn of a loop around it
        self.reached = max(self.reached, at)
        return self.body.first <= places_of(self.frame.f_code)[at // 2] < self.body.last and not is_again

    @property
    def is_asking(self) -> bool:
        """Whether the rest of its condition is asked now."""
        if self.frame is None or not self.body.is_joint or self.frame.f_lasti <= self.asked_at:
            return False
        return (self.body.line, 0) <= places_of(self.frame.f_code)[self.frame.f_lasti // 2] < self.body.first

    @property
    def where(self) -> str:
        return WHERE.format(self.file, self.body.first[0])

    def told(self, code: CodeType, effect: str) -> str:
        """That the code of a function that it calls leaves something behind."""
        return LEAVES.format(code.co_name, code.co_filename, code.co_firstlineno, self.where, effect)
