"""Branches of forward that hang on values, and only write to rows of masks: `if mask.any(): out[mask] = f(x[mask])`, or
`if rows.numel() == 0: continue` ahead of that.

A program always goes in there (if-conversion: J. Allen et al., Conversion of control dependence to data dependence,
POPL 1983, with writes as what is guarded): what is written counts where the branch would have been taken, and so do
gradients; a parameter that is used in branches alone has none in a step that takes none of them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.bodies import Body, body_of, turn_of
from autopar.trace.lines import line_here
from autopar.trace.origins import STATISTICS, memory_of, tensors_in, writes_in_place

Picked = Any  # of `autopar.trace.masked`, which calls what is here

WRITES = (
    "forward writes to a tensor{} in a branch that it takes by values ({}:{}), and not at rows that a mask picks: a "
    "program always goes in there. Write to rows of a mask there, or choose by torch.where"
)


@dataclass
class Branch:
    """One that is taken by what was `asked`; `rows`: where a mask of that number picks any."""

    frame: FrameType
    body: Body
    asked: Tensor
    rows: int | None
    fresh: set[int | None] = field(default_factory=set[int | None])  # memory of what is made within
    of_rows: Tensor | None = None
    of_all: Tensor | None = None

    @property
    def truth(self) -> Tensor:
        """Whether it is taken."""
        return self.asked if self.body.wanted else self.asked.logical_not()

    @property
    def is_running(self) -> bool:
        """Whether the code that asked is in its lines, if it runs at all."""
        return self.body.first <= self.frame.f_lineno <= self.body.last


class Branches:
    """Those of one forward. `taken`: truths of each call, of which some are true where a branch is taken: one for each
    branch and way to write in it. They are nodes of their own, which what is written hangs on and nothing else does.
    """

    def __init__(self) -> None:
        self.taken: list[Tensor] = []
        self._begun: dict[tuple[int, int], Branch] = {}  # by frame and line

    def begin(self, asked: Tensor, frame: FrameType, rows: int | None, is_some: bool = True) -> bool | str:
        """The answer with which a program goes into the branch; else why it cannot. `rows`: the number of the mask of
        which it is asked whether it picks any; `is_some`: the answer where it does.
        """
        body = _here(body_of, frame)
        if isinstance(body, str):
            return body
        self._begin(asked, frame, body, rows if body.wanted == is_some else None)
        return body.wanted

    def turns(self, truths: Tensor, frame: FrameType) -> Iterator[int] | str:
        """Places of what is true, for a loop over these, which goes over all places, with a branch in each turn; else
        why it cannot.
        """
        body = _here(turn_of, frame)
        return body if isinstance(body, str) else self._each(truths, frame, body)

    def _each(self, truths: Tensor, frame: FrameType, body: Body) -> Iterator[int]:
        for place, truth in enumerate(truths.unbind()):
            self._begin(truth, frame, body, None)
            yield place
        self._begun.pop((id(frame), body.first), None)

    def _begin(self, asked: Tensor, frame: FrameType, body: Body, rows: int | None) -> None:
        self._begun[id(frame), body.first] = Branch(frame, body, asked.detach().reshape(()).bool(), rows)

    def leave(self, frame: FrameType) -> None:
        """The code of a frame asks again, where it may have asked before."""
        if self._begun and isinstance(body := body_of(frame.f_code, frame.f_lasti), Body):
            self._begun.pop((id(frame), body.first), None)

    def here(self) -> list[Branch]:
        """Those that run now."""
        found = [one for one in self._begun.values() if one.is_running]
        if not found:
            return found
        running = {*map(id, _frames(sys._getframe(1)))}
        return [one for one in found if id(one.frame) in running]

    def guarded(self, rows: Picked) -> Picked:
        """The same rows, as they are written to here: of no call that takes no branch."""
        for branch in self.here():
            made = rows.like(rows.dense)
            if rows.key == branch.rows:
                branch.of_rows = self._own(rows.mask) if branch.of_rows is None else branch.of_rows
                made.mask = branch.of_rows.reshape(rows.mask.shape)
            else:
                branch.of_all = self._own(branch.truth) if branch.of_all is None else branch.of_all
                made.mask = rows.mask & branch.of_all
            rows = made
        return rows

    def _own(self, truth: Tensor) -> Tensor:
        self.taken.append(truth & truth)
        return self.taken[-1]

    def look(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Call it before every function of torch. Raises TraceError where it writes to what was there before a branch
        that runs now.
        """
        if not self._begun:
            return
        name = str(getattr(func, "__name__", func))
        if func in STATISTICS:
            given = STATISTICS[func].items()
            written = tensors_in([args[place] if place < len(args) else kwargs.get(told) for place, told in given])
        elif writes_in_place(name, kwargs):
            written = tensors_in((args[:1], kwargs.get("out")))
        else:
            return
        for branch in self.here() if written else ():
            if not branch.fresh.issuperset(map(memory_of, written)):
                raise TraceError(WRITES.format(line_here(), branch.frame.f_code.co_filename, branch.body.first))

    def made(self, args: Any, kwargs: Any, result: Any) -> None:
        """A function of torch gave that, of these; call it behind every one."""
        for branch in self.here() if self._begun else ():
            given = {*map(memory_of, tensors_in((args, kwargs)))} - branch.fresh
            branch.fresh |= {*map(memory_of, tensors_in(result))} - given - {None}

    def counts(self) -> list[Tensor]:
        """`Returned.taken`."""
        return [one.sum() for one in self.taken]


def _here(found: Callable[[CodeType, int], Body | str], frame: FrameType) -> Body | str:
    """The branch that begins where a frame is; or why it is none."""
    body = found(frame.f_code, frame.f_lasti)
    for base in body.bases if isinstance(body, Body) else ():
        if not isinstance(_value(base, frame), Tensor):
            return f"it writes to {ast.unparse(base)}, which is no tensor"
    return body


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _value(base: ast.expr, frame: FrameType) -> Any:
    """What a name, or an attribute of one, is there now; None where that is not known."""
    match base:
        case ast.Name(name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value, name):
            return getattr(_value(value, frame), name, None)
        case _:
            return None
