"""Branches of forward that hang on values, and leave nothing behind but tensors: `if mask.any(): out[mask] =
f(x[mask])`, or `if rows.numel() == 0: continue` ahead of that, or `if hard.any(): loss = loss + f(x[hard])`.

A program always goes in there (if-conversion: J. Allen et al., Conversion of control dependence to data dependence,
POPL 1983): what is written, and what a name is behind it, is what it would be where the branch is taken, and else what
it was, and so are gradients; a parameter that is used in branches alone has none in a step that takes none of them. Of
an else the statements run ahead, on their own.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.bodies import ASKS_MORE, VALUE, Body, body_of, turn_of
from autopar.trace.branch import Appended, Branch
from autopar.trace.choices import Choices
from autopar.trace.converted import Converted
from autopar.trace.effects import added_to, effects_of
from autopar.trace.entries import NO_BASE, NOT_AHEAD, Entry, entry_of, value_of
from autopar.trace.gathered import Gathered, cut, items_of
from autopar.trace.passed_on import frames, given_to, of_modules
from autopar.trace.places import refused
from autopar.trace.tracers import both_of, context_of, is_ours
from autopar.trace.values import MISSING, SCALARS, is_installed, is_torchs

Picked = Any  # of `autopar.trace.masked`, which calls what is here

GIVES = (
    "what forward goes on with {} is chosen behind it, and nobody can see where that is computed: have it be what a "
    "function of torch gives, give it a name (y = a if .. else b) and go on with that, or choose by torch.where"
)
LOOP = "a loop over them (of which nothing may stay but writes to rows: {})"
MOST_TURNS = 128
MANY = 100
SLOW = (
    "forward takes its {}th branch by values or draws at {}:{}, and each is traced on its own: a loop over tokens or "
    "samples takes minutes to trace, once. torch.where, or masks of whole tensors, do the same at once"
)
NO_TENSOR = "{!r}, which it assigns, may be read outside of it, and is no tensor ahead of it"


class Branches:
    """Those of one forward. `mode`: what sees all functions of torch that it calls; `calls`: what in our code calls
    others for one of these; `number`, `rows`: as of `Choices`.
    """

    def __init__(self, checks: Any, mode: Any, calls: Sequence[Callable[..., Any]], number: Any, rows: Any) -> None:
        self.tensors = Converted(checks.notes, mode, checks.count)
        self._checks, self.choices = checks, Choices(self.tensors, checks, number, rows)
        self._mode, self._calls = mode, frozenset(one.__code__ for one in calls)  # type: ignore[attr-defined]
        self._begun: dict[tuple[int, tuple[int, ...]], Branch] = {}  # by frame and place
        self._watched: dict[int, tuple[FrameType, Any]] = {}  # by id, and what traced their lines before
        self._looks_on = self._collects = False
        self._traced: Any = None  # what `sys.gettrace` gave before it did
        self._failing: FrameType | None = None  # whose code has raised what it may catch
        self._clean = set[CodeType]()  # what leaves nothing behind
        self._modules: Any = None  # sees what modules give
        self._chose: tuple[Branch, int] | None = None  # what it ended with, and where its code was
        self._count = 0

    def begin(
        self, asked: Tensor, frame: FrameType, rows: int | None, is_some: bool = True, *, is_seen: bool = False
    ) -> bool | str:
        """The answer with which a program goes into the branch; else why it cannot. `rows`: the number of the mask of
        which it is asked whether it picks any; `is_some`: the answer where it does; `is_seen`: asked by a function of
        torch, in its mode.
        """
        body = _here(body_of, frame)
        if isinstance(body, str):
            return body
        told = self._begin(asked, frame, body, rows if body.wanted == is_some else None, is_seen=is_seen)
        return body.wanted if told is None else told

    def asks(self, frame: FrameType, later: Sequence[tuple[Body, Tensor]]) -> None:
        """The code of a frame goes on with these parts of its condition, each of which it asks where that is true."""
        self._begun = {at: one for at, one in self._begun.items() if one.frame is not frame or not one.body.is_part}
        for body, truth in later:
            self._begin(truth, frame, body, None)

    def turns(self, truths: Tensor, frame: FrameType, made: Callable[[int], Any]) -> Iterator[Any]:
        """What is made of places of what is true, for a loop over these, which goes over all places, with a branch in
        each turn. Raises TraceError where it cannot.
        """
        body = _here(turn_of, frame)
        if isinstance(body, str):
            raise refused(LOOP.format(body))
        return self._each(truths, frame, body, made)

    def _each(self, truths: Tensor, frame: FrameType, body: Body, made: Callable[[int], Any]) -> Iterator[Any]:
        for place, truth in enumerate(truths.unbind()):
            turn, asked = made(place), truth.detach()
            if (told := self._begin(asked, frame, body, None)) is not None:
                raise refused(LOOP.format(told))
            yield turn
        self._begun.pop((id(frame), body.place), None)

    def place(self, number: Any) -> Tensor:
        """A tensor for one of these."""
        made = torch.tensor(number)
        self.tensors.places[id(made)] = made
        return made

    def _begin(
        self, asked: Tensor, frame: FrameType, body: Body, rows: int | None, *, is_seen: bool = False
    ) -> str | None:
        of_loop = (at for at, (line, column, *_) in self._begun if line == body.line and column < 0)
        turns = sum(at == id(frame) for at in of_loop) if body.breaks else 0
        if turns > MOST_TURNS:
            return f"the loop that it ends has more than {MOST_TURNS} turns"
        key = id(frame), (body.line, -1 - turns) if body.breaks else body.place  # of a loop one for each turn
        earlier = self._begun.pop(key, None)  # of the same condition
        if body.other and (earlier is not None or not body.is_last):
            return ASKS_MORE
        held = frame.f_locals
        before = {name: held.get(name, MISSING) for name in body.assigned}
        for name, value in before.items():
            if not self.choices.may_be_ahead(value) and name not in body.of_other:
                return NO_TENSOR.format(name)
        lists: dict[str, Any] = {name: held.get(name) for name in body.appended}
        if name := next((name for name, one in lists.items() if type(one) not in (list, Gathered)), None):
            return f"it appends to {name!r}, which is no list"
        appended = {name: Appended(one, list.__len__(one)) for name, one in lists.items()}
        if isinstance(entries := self._entries(body, frame), str):
            return entries
        self._look()
        self._chose, self._count = None, self._count + 1
        if self._count == MANY:
            warnings.warn(SLOW.format(MANY, frame.f_code.co_filename, body.line), stacklevel=2)
        outside = [one for one in (*self.here()[-1:], earlier) if one is not None]
        around = [one.truth for one in outside]
        beside = tuple(condition for one in outside for condition in one.conditions)
        truth = self.tensors.truth(asked)
        with self.tensors.own():
            own = self._checks.condition(asked, body.wanted)
        is_taken, is_not = (truth, truth.logical_not())[:: 1 if body.wanted else -1]
        outer = around[0] if len(around) == 1 else None if not around else around[0] & around[1]
        if outer is not None:
            is_taken, is_not = is_taken & outer, is_not & outer
        file = frame.f_code.co_filename
        if body.other:
            self._begun[key] = Branch(
                None, body, file, is_not, None, asks=((asked, not body.wanted),), own=own.negated(), beside=beside
            )
            before |= self._run(body, frame, appended, entries, is_not, is_seen=is_seen)
        alone = None if earlier is not None else rows
        asks = ((asked, body.wanted), *(earlier.asks if earlier is not None else ()))
        branch = Branch(
            frame, body, file, is_taken, alone, before, frame.f_lasti, appended, entries, asks=asks, own=own,
            beside=beside,
        )  # fmt: skip
        self._begun[key] = branch
        if body.gives and self._modules is None:
            self._modules = of_modules(self._chosen)
        if body.is_watched:
            self._watched.setdefault(id(frame), (frame, frame.f_trace))
            frame.f_trace = self._goes_on
        return None

    def _look(self) -> None:
        """See each function that is called. Nothing is collected meanwhile: that calls functions at any place."""
        if not self._looks_on:
            self._looks_on, self._traced, self._collects = True, sys.gettrace(), gc.isenabled()
            gc.disable()
            sys.settrace(self._called)

    def _entries(self, body: Body, frame: FrameType) -> list[Entry] | str:
        """Those that a branch assigns; why it may not."""
        found, ahead = dict[Any, Entry](), set[Any]()
        for target in body.entries:
            entry = entry_of(target, frame, body.of_other)
            if isinstance(entry, str):
                return entry
            if entry is not None:
                found.setdefault(entry.same, entry)
                if entry.is_either_way or self._is_of_call(entry.old, target, body):
                    ahead.add(entry.same)
        for same, entry in found.items():
            if same not in ahead:
                return NOT_AHEAD.format(repr(entry.told))
        return [*found.values()]

    def _is_of_call(self, value: Any, target: ast.expr, body: Body) -> bool:
        """Whether an entry is what this call has made, or a number of an object that the function makes itself."""
        base = target.value if isinstance(target, ast.Subscript) else None
        is_local = isinstance(base, ast.Name) and base.id in body.local
        return id(value) in self._mode.known if isinstance(value, Tensor) else is_local and self.choices.may_be(value)

    def _run(
        self,
        body: Body,
        frame: FrameType,
        lists: Mapping[str, Appended],
        entries: Sequence[Entry],
        truth: Tensor,
        *,
        is_seen: bool,
    ) -> dict[str, Any]:
        """Runs the statements of an else, which is taken where that is true: what names are behind them."""
        held = {**frame.f_globals, **frame.f_locals}
        code = compile(ast.Module([*body.other], []), frame.f_code.co_filename, "exec", dont_inherit=True)
        with self._mode if is_seen else contextlib.nullcontext():
            exec(code, held)
        for name, one in lists.items():
            found = items_of(held[name])[one.count :]
            one.otherwise = [(item, truth if there is None else there) for item, there in found]
            cut(one.there, one.count)
        for one in entries:
            one.otherwise, one.lies = one.now(), one.place
        for one in entries:
            one.put(one.old)
        return {name: held.get(name, MISSING) for name in body.of_other}

    def _goes_on(self, frame: FrameType, event: str, given: Any) -> Any:
        """Sees each line of the code that has asked, and lets names be what they are behind branches that it leaves."""
        if is_ours(before := self._watched[id(frame)][1]):
            before(frame, event, given)
        self.tensors.write_through(contextlib.nullcontext())
        if self._chose is not None and self._chose[0].frame is frame:
            self._chose = None
        held, now = frame.f_locals, dict[str, Any]()
        is_end, is_failing = event == "return", event == "exception" or (event == "return" and given is None)
        self._failing = frame if event == "exception" else self._failing if is_end else None
        for key, one in [*reversed(self._begun.items())]:
            if one.frame is frame and (is_end or not one.body.line <= frame.f_lineno <= one.body.until):
                del self._begun[key]
                if (one.body.gives or (one.body.is_rest and is_end)) and not is_failing:  # which returns something
                    self._raise(TraceError(GIVES.format(one.where)))
                # Of a function that has ended nobody reads the names; of an else that ran ahead we do.
                is_read = not is_end or frame.f_code.co_name == "<module>"
                if is_read or self._failing is not frame:
                    now |= self._behind(one, {**held, **now} if is_read else None)
        held |= now  # at once: looking at them anew would undo it
        return self._goes_on

    def _behind(self, branch: Branch, held: Mapping[str, Any] | None) -> dict[str, Any]:
        """`Choices.behind`."""
        try:
            return self.choices.behind(branch, held)
        except TraceError as error:
            self._raise(error)

    def given(self, result: Any) -> Any:
        """What a function of torch gives to the code that has called it: what a branch ends with is chosen there."""
        return self._chosen(sys._getframe(2), result) if self._modules is not None else result  # behind the mode

    def _chosen(self, frame: FrameType | None, result: Any) -> Any:
        """Likewise what is given to the code of a frame, by a function or a module that this has called."""
        waits = [(key, one) for key, one in reversed(self._begun.items()) if one.body.gives]
        if not waits and self._chose is None:
            return result
        given: dict[Any, int] = {one: one.f_lasti for one in given_to(frame, self._calls)}
        chose, at = self._chose or (None, 0)
        if chose is not None and given.get(chose.frame) == at:  # one call calls several: functools.reduce
            self._raise(TraceError(GIVES.format(chose.where)))
        for key, one in waits:
            if one.frame in given and given[one.frame] in one.body.gives:
                del self._begun[key]
                self._chose, old = (one, given[one.frame]), one.before[VALUE]
                is_listed = isinstance(old, Tensor) and type(result) is list and len(result) == 1  # `functions.applied`
                with self._mode:
                    made = self.choices.of_two(VALUE, one, result[0] if is_listed else result, old)
                    result = [made] if is_listed else made
                    self._behind(one, None)
        return result

    def _raise(self, error: TraceError) -> NoReturn:
        with self._checks:
            raise error

    def leave(self, frame: FrameType) -> None:
        """The code of a frame asks again, where it may have asked before."""
        if not self._begun or not isinstance(body := body_of(frame.f_code, frame.f_lasti), Body) or body.breaks:
            return
        one = self._begun.get((id(frame), body.place))
        if one is not None and not (body.is_joint and one.asked_at < frame.f_lasti):
            del self._begun[id(frame), body.place]
            if body.leaves or body.gives:  # in a loop that stands on one line with it
                self._raise(TraceError(GIVES.format(one.where)))

    def here(self) -> list[Branch]:
        """Those that run now, or ask the rest of their condition, the innermost one last."""
        if not self._begun:
            return []
        running = {*map(id, frames(sys._getframe(1)))}
        kept = dict[tuple[int, tuple[int, ...]], Branch]()
        here = list[Branch]()
        for key, one in self._begun.items():
            is_there = one.frame is None or id(one.frame) in running
            if is_there and (one.is_running or one.is_asking):
                here.append(one)
            # What is left may be gone into again, by a truth that is known; what is watched ends when its code goes on.
            if is_there and (here[-1:] == [one] or one.body.is_watched):
                kept[key] = one
        self._begun = kept
        return here

    def hang(self) -> list[tuple[Tensor, bool]]:
        """The values that it hangs on whether the code runs that does now, and which they are where it does."""
        return [ask for one in self.here() for ask in one.asks]

    def sees(self) -> None:
        """That a function of torch is called: which branches are left, what the last one has written to."""
        self.here()
        self.tensors.write_through(self._mode)

    def called(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """`Converted.called`, here."""
        return self.tensors.called(func, args, kwargs, self.here())

    def of_rows(self, func: Any, name: str, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[Any]:
        """`Converted.of_rows`, here."""
        return self.tensors.of_rows(func, name, args, kwargs, self.here())

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, *, of_rows: bool) -> None:
        """`Converted.made`, here."""
        if here := self.here():
            self.tensors.made(func, args, kwargs, result, here, of_rows)

    def guarded(self, rows: Picked) -> Picked:
        """`Converted.guarded`, here."""
        return self.tensors.guarded(rows, self.here())

    def _called(self, frame: FrameType, event: str, given: Any) -> Any:
        """Sees each function that is called, as long as there may be a branch, and what is to see its lines. Raises
        TraceError where one of the user's leaves something behind that a branch would not.
        """
        own = self._sees_lines(frame, event)
        return both_of(own, self._traced(frame, event, given)) if is_ours(self._traced) else own

    def _sees_lines(self, frame: FrameType, event: str) -> Any:
        code = frame.f_code
        if event != "call" or code in self._clean:
            return None
        file, name = code.co_filename, code.co_name
        # Of packages what helps is left alone: einops notes the types of tensors.
        if is_torchs(file) or (name[0] == "<" and name != "<lambda>") or (name != "forward" and is_installed(file)):
            self._clean.add(code)
            return None
        for branch in self.here():
            adds, effects = added_to(code), effects_of(code, context_of(frame))
            lists = [one for one in adds if isinstance(frame.f_locals.get(one), (list, set, dict, deque, bytearray))]
            if lists:
                self._raise(TraceError(branch.told(frame.f_code, f"it adds to {lists[0]}")))
            if not effects:
                self._clean |= set[CodeType]() if adds else {code}
            return self._runs if effects else None
        return None

    def _runs(self, frame: FrameType, event: str, _: Any) -> Any:
        """Sees each line of code that may leave something behind. Raises TraceError where it does, in a branch."""
        told = [
            one.told for one in effects_of(frame.f_code, context_of(frame)) if one.first <= frame.f_lineno <= one.last
        ]
        if told and event == "line" and (here := self.here()):
            self._raise(TraceError(here[0].told(frame.f_code, told[0])))
        return self._runs

    def end(self) -> None:
        """Forward has ended."""
        if self._looks_on and sys.gettrace() in (self._called, None):  # and no debugger has been called meanwhile
            sys.settrace(self._traced)
        if self._looks_on and self._collects:
            gc.enable()
        if self._modules is not None:
            self._modules.remove()
        for frame, before in self._watched.values():
            frame.f_trace = before
        self._looks_on, self._modules, self._chose = False, None, None
        self._begun.clear(), self._watched.clear()


def _here(found: Callable[[CodeType, int], Body | str], frame: FrameType) -> Body | str:
    """The branch that begins where a frame is; or why it is none."""
    body = found(frame.f_code, frame.f_lasti)
    if isinstance(body, Body):
        for base in body.bases:
            if not isinstance(value_of(base, frame), Tensor):
                return NO_BASE.format(ast.unparse(base))
        for one, truth in body.rest:
            value = one.value if isinstance(one, ast.Constant) else value_of(one, frame)
            if not isinstance(value, SCALARS) or bool(value) != truth:
                return ASKS_MORE
        for over in body.goes_over:
            if hasattr(type(value_of(over, frame)), "__next__"):
                return f"it goes on with {ast.unparse(over)}, which is an iterator"
    return body
