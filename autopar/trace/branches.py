"""Branches of forward that hang on values, and only write to rows of masks: `if mask.any(): out[mask] = f(x[mask])`, or
`if rows.numel() == 0: continue` ahead of that.

A program always goes in there (if-conversion: J. Allen et al., Conversion of control dependence to data dependence,
POPL 1983, with writes as what is guarded): what is written counts where the branch would have been taken, and so do
gradients; a parameter that is used in branches alone has none in a step that takes none of them.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.bodies import Body, body_of, places_of, turn_of
from autopar.trace.effects import added_to, effect_of
from autopar.trace.lines import line_here
from autopar.trace.origins import STATISTICS, memory_of, tensors_in, writes_in_place
from autopar.trace.values import is_installed, is_torchs

Picked = Any  # of `autopar.trace.masked`, which calls what is here

WHERE = "in a branch that it takes by values ({}:{})"
WRITES = (
    "forward writes to a tensor{} {}, and not rows to where a mask picks them: a program always goes in there. Write "
    "to rows of a mask there, or choose by torch.where"
)
LEAVES = "forward calls {} ({}:{}) {}, and {}: a program always goes in there. Do that behind the branch"
COMPUTES = (
    "forward calls {}{} {}, of whole tensors that hang on values: a program always goes in there, and where it would "
    "not, there may be nothing to divide by, or no such place. Do that ahead of it, or of rows that the mask picks"
)
# What looks at tensors, or makes truths and whole numbers of them: the rest is computed of what parameters made alone.
_LOOKS = """
    eq ne lt le gt ge and rand or ror xor invert logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not
    bitwise_xor view reshape flatten unsqueeze squeeze transpose permute contiguous to bool float double half bfloat16
    int long type_as type detach clone expand expand_as t any all argmax argmin chunk split unbind narrow select getitem
    zeros ones full empty arange zeros_like ones_like empty_like new_zeros new_ones new_empty ravel movedim
    swapaxes isfinite isnan isinf get set size dim numel stride is_contiguous is_floating_point is_complex count_nonzero
    broadcast_to view_as unflatten nonzero masked_select setitem index_add index_copy index_fill len triu tril
    untyped_storage
"""
LOOKS = frozenset(_LOOKS.split())
READS = frozenset(("getitem", "setitem", "index_select", "gather", "index_add", "index_copy", "index_fill"))


@dataclass
class Branch:
    """One that is taken by what was `asked`; `rows`: where a mask of that number picks any."""

    frame: FrameType
    body: Body
    asked: Tensor
    rows: int | None
    fresh: set[int | None] = field(default_factory=set[int | None])  # memory of what is made within
    reached: int = 0  # of its code
    of_rows: Tensor | None = None
    of_all: Tensor | None = None

    @property
    def truth(self) -> Tensor:
        """Whether it is taken."""
        return self.asked if self.body.wanted else self.asked.logical_not()

    @property
    def is_running(self) -> bool:
        """Whether the code that asked is in it still, if it runs at all."""
        at = self.frame.f_lasti
        is_again = not self.body.goes_over and at < self.reached  # in another turn of a loop around it
        self.reached = max(self.reached, at)
        return self.body.first <= places_of(self.frame.f_code)[at // 2] < self.body.last and not is_again

    @property
    def where(self) -> str:
        return WHERE.format(self.frame.f_code.co_filename, self.body.first[0])


class Branches:
    """Those of one forward. `taken`: truths of each call, of which some are true where a branch is taken: one for each
    branch and way to write in it. They are nodes of their own, which what is written hangs on and nothing else does.
    """

    def __init__(self) -> None:
        self.taken: list[Tensor] = []
        self.free = set[int | None]()  # memory of parameters, buffers and what is made of these alone
        self._begun: dict[tuple[int, tuple[int, int]], Branch] = {}  # by frame and place
        self._looks_on = False
        self._traced: Any = None  # what `sys.gettrace` gave before it did
        self._clean = set[CodeType]()  # what leaves nothing behind
        self._left: TraceError | None = None  # what has been raised, if code of the user's has caught it
        self._of_rows = False
        self._versions: list[tuple[Tensor, int]] = []  # of what a function is given that is called now
        self._places: dict[int, Tensor] = {}  # by id: of turns, and what is computed of these alone

    def begin(self, asked: Tensor, frame: FrameType, rows: int | None, is_some: bool = True) -> bool | str:
        """The answer with which a program goes into the branch; else why it cannot. `rows`: the number of the mask of
        which it is asked whether it picks any; `is_some`: the answer where it does.
        """
        body = _here(body_of, frame)
        if isinstance(body, str):
            return body
        self._begin(asked, frame, body, rows if body.wanted == is_some else None)
        return body.wanted

    def turns(self, truths: Tensor, frame: FrameType, made: Callable[[int], Any]) -> Iterator[Any] | str:
        """What is made of places of what is true, for a loop over these, which goes over all places, with a branch in
        each turn; else why it cannot.
        """
        body = _here(turn_of, frame)
        return body if isinstance(body, str) else self._each(truths, frame, body, made)

    def _each(self, truths: Tensor, frame: FrameType, body: Body, made: Callable[[int], Any]) -> Iterator[Any]:
        for place, truth in enumerate(truths.unbind()):
            turn, asked = made(place), truth.detach()
            self._begin(asked, frame, body, None)
            yield turn
        self._begun.pop((id(frame), body.first), None)

    def place(self, number: Any) -> Tensor:
        """A tensor for one of these."""
        made = torch.tensor(number)
        self._places[id(made)] = made
        return made

    def _begin(self, asked: Tensor, frame: FrameType, body: Body, rows: int | None) -> None:
        if not self._looks_on:
            self._looks_on, self._traced = True, sys.gettrace()
            sys.settrace(self._called)
        self._begun[id(frame), body.first] = Branch(frame, body, asked.detach().reshape(()).bool(), rows)

    def leave(self, frame: FrameType) -> None:
        """The code of a frame asks again, where it may have asked before."""
        if self._begun and isinstance(body := body_of(frame.f_code, frame.f_lasti), Body):
            self._begun.pop((id(frame), body.first), None)

    def here(self) -> list[Branch]:
        """Those that run now."""
        if not self._begun:
            return []
        running = {*map(id, _frames(sys._getframe(1)))}
        # What is left may be gone into again, by a truth that is known.
        self._begun = {key: one for key, one in self._begun.items() if id(one.frame) in running and one.is_running}
        return [*self._begun.values()]

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
        # A number that nobody else compares with: as a node it is like no other.
        self.taken.append(truth >= 0.5 + (len(self.taken) + 1) * 2.0**-20)
        return self.taken[-1]

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        """Sees each function that is called, as long as there may be a branch. Raises TraceError where one of the
        user's leaves something behind that a branch would not.
        """
        code = frame.f_code
        if event != "call" or code in self._clean:
            return
        file, name = code.co_filename, code.co_name
        # Of packages what helps is left alone: einops notes the types of tensors.
        if is_torchs(file) or (name[0] == "<" and name != "<lambda>") or (name != "forward" and is_installed(file)):
            self._clean.add(code)
            return
        for branch in self.here():
            adds = added_to(code)
            lists = [one for one in adds if isinstance(frame.f_locals.get(one), (list, set, dict, deque, bytearray))]
            effect = f"it adds to {lists[0]}" if lists else effect_of(code)
            if effect is None:
                self._clean |= set[CodeType]() if adds else {code}
                return
            told = LEAVES.format(name, file, code.co_firstlineno, branch.where, effect)
            self._left = self._left or TraceError(told)
            raise self._left

    def end(self) -> None:
        """Forward has ended. Raises TraceError as `_called` does."""
        if self._looks_on and sys.gettrace() in (self._called, None):  # and no debugger has been called meanwhile
            sys.settrace(self._traced)
        self._looks_on = False
        self._begun.clear()
        if self._left is not None:
            raise self._left

    def look(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Call it before every function of torch. Raises TraceError where it writes to what was there before a branch
        that runs now, or what it gives hangs on numbers that need not be good where that is not taken.
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
            written = []
        self._refuse_writes(written)
        self._refuse_numbers(name.strip("_"), args, kwargs)
        self._versions = [(one, one._version) for one in tensors_in((args, kwargs))]

    def _refuse_writes(self, written: Sequence[Tensor]) -> None:
        for branch in self.here() if written else ():
            if not branch.fresh.issuperset(map(memory_of, written)):
                raise TraceError(WRITES.format(line_here(), branch.where))

    def _refuse_numbers(self, name: str, args: Any, kwargs: Any) -> None:
        """`args`, `kwargs`: of a function of torch of that name, of whole tensors."""
        given = tensors_in((args, kwargs))
        if self._of_rows or all(self._is_free(one) for one in given):
            return
        is_place = name == "getitem" and not all(id(one) in self._places for one in tensors_in(args[1:]))
        floats = sum(one.is_floating_point() for one in given)  # times truths, and sums, are good as they are
        is_counted = name == "sum" or (name in ("add", "sub", "mul") and floats == 0) or (name == "mul" and floats < 2)
        if (name not in LOOKS and not is_counted) or is_place:
            for branch in self.here():
                raise TraceError(COMPUTES.format(name, line_here(), branch.where))

    def _is_free(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, a buffer, or made in a branch of such alone: it is good wherever it is used."""
        return memory_of(tensor) in self.free

    @contextlib.contextmanager
    def of_rows(self, name: str, args: Any, kwargs: Any) -> Iterator[None]:
        """Around a function of rows that a mask picks: what is computed of these is good for any. Raises TraceError
        where whole tensors stand beside them that hang on values.
        """
        whole = [one for one in tensors_in((args, kwargs)) if one.is_floating_point() and not self._is_free(one)]
        if whole and name not in READS and not self._of_rows:
            for branch in self.here():
                raise TraceError(COMPUTES.format(name, line_here(), branch.where))
        before, self._of_rows = self._of_rows, True
        try:
            yield
        finally:
            self._of_rows = before

    def made(self, args: Any, kwargs: Any, result: Any) -> None:
        """A function of torch gave that, of these; call it behind every one."""
        if not self._begun:
            return
        given = tensors_in((args, kwargs))
        if given and all(id(one) in self._places for one in given):
            self._places |= {id(one): one for one in tensors_in(result)}
        self._refuse_writes([one for one, version in self._versions if one._version != version])
        if all(map(self._is_free, given)):
            self.free |= {*map(memory_of, tensors_in(result))} - {None}
        for branch in self.here():
            given = {*map(memory_of, tensors_in((args, kwargs)))} - branch.fresh
            branch.fresh |= {*map(memory_of, tensors_in(result))} - given - {None}

    def counts(self) -> list[Tensor]:
        """`Returned.taken`."""
        return [one.sum() for one in self.taken]


def _here(found: Callable[[CodeType, int], Body | str], frame: FrameType) -> Body | str:
    """The branch that begins where a frame is; or why it is none."""
    body = found(frame.f_code, frame.f_lasti)
    if isinstance(body, Body):
        for base in body.bases:
            if not isinstance(_value(base, frame), Tensor):
                return f"it writes to {ast.unparse(base)}, which is no tensor that is there as a whole"
        for over in body.goes_over:
            if hasattr(type(_value(over, frame)), "__next__"):
                return f"it goes on with {ast.unparse(over)}, which is an iterator"
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
