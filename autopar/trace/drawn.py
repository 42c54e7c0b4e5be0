"""Numbers that forward takes from Python's or numpy's own random generator, drawn anew ahead of each call.

    lam = np.random.beta(self.alpha, self.alpha)
    mask = torch.from_numpy(_mask_spans((rows, length), self.mask_prob))

What is drawn, and what numpy makes of it, is noted as steps in Python, which a call runs again, in order; what forward
makes a tensor or a number of is an argument of the program. A function that computes with what it draws in ways of
Python's is a step as a whole, if it is given no tensors but masks and numbers (`autopar.trace.drawing` finds those).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar._compat import outside_modes, pytree
from autopar.errors import TraceError
from autopar.trace.ahead import INSTEAD, changing_nothing, refuse_what_is_set
from autopar.trace.asked import Ref
from autopar.trace.checks import Checks
from autopar.trace.counted import ARGUMENT
from autopar.trace.drawn_arrays import Drawn
from autopar.trace.lines import line_here
from autopar.trace.numbers import Number
from autopar.trace.outside import states_outside, undrawn
from autopar.trace.values import CONSTANT

MOST = 256  # numbers in what one step gives
GIVEN = (*CONSTANT, nn.Module, Tensor, Number, np.ndarray, np.generic, range, type, types.FunctionType)
AS_PYTHONS = (np.float64, np.int64, np.bool_)  # numbers of numpy with which it computes as Python does
ELSEWHERE = (
    "a function that draws random numbers{} gives others ahead of forward than where forward calls it, and ahead is "
    "where they are drawn: it may not hang on what forward does before, nor on what is around it; pass what it needs"
)


@dataclass(frozen=True)
class OfArguments:
    """A tensor that is made of arguments alone, by its number (`autopar.trace.asked.Asked.given`)."""

    number: int


@dataclass(frozen=True)
class At:
    """A module, by its path."""

    path: str


@dataclass(frozen=True)
class Step:
    """`function`, or that `method` of the module at the path `function`, called with these; Refs are earlier steps.
    `only`: numbers of values (`autopar.trace.asked.Asked.given`), and what they are in calls that make it.
    """

    function: Any
    args: Any
    kwargs: Any
    method: str | None = None
    only: tuple[tuple[int, bool], ...] = ()
    line: str = field(default_factory=line_here)

    def run(self, made: Sequence[Any], modules: Mapping[str, nn.Module], asked: Callable[[int], Tensor]) -> Any:
        args, kwargs = pytree.tree_map_only(Ref, lambda one: made[one.number], (self.args, self.kwargs))
        args, kwargs = pytree.tree_map_only(OfArguments, lambda one: asked(one.number), (args, kwargs))
        args, kwargs = pytree.tree_map_only(At, lambda one: modules[one.path], (args, kwargs))
        called = self.function if self.method is None else getattr(modules[self.function], self.method)
        return called(*args, **kwargs)


@dataclass(frozen=True)
class Taken:
    """What a program takes of a step, by its number: where that stands in forward, and an example."""

    number: int
    line: str
    example: Tensor


@dataclass
class Draws:
    """What forward draws. `are_there`: it does; `steps`: what a call runs ahead; `taken`: what the program takes of
    these. `start`: the states from which the call draws that is traced. `paths_of`: id of the attributes of each module
    that is traced -> its path; `in_place_of`: id of what stands in the place of a function -> that. `written`:
    attributes that forward has set by now.
    """

    start: tuple[Any, Any] = field(default_factory=lambda: states_outside())
    are_there: bool = False
    steps: list[Step] = field(default_factory=list[Step])
    taken: list[Taken] = field(default_factory=list[Taken])
    paths_of: dict[int, str] = field(default_factory=dict[int, str])
    in_place_of: dict[int, Any] = field(default_factory=dict[int, Any])
    written: Mapping[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any])
    is_drawing: bool = False
    _values: list[Any] = field(default_factory=list[Any])
    _began: list[Any] = field(default_factory=list[Any])  # states, as each step was called
    _before: Any = None  # the states, as the last one was called
    _now: Any = None  # the states by now
    _there: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _given: list[Tensor] = field(default_factory=list[Tensor])
    _had: list[Any] = field(default_factory=list[Any])
    _checks: Checks | None = None

    def among(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Named arguments of a trace, and what forward was seen to take among them."""
        drawn = dict(zip(self._names(), self.examples, strict=True))
        return {**kwargs, ARGUMENT: {**kwargs.get(ARGUMENT, {}), **drawn}} if drawn else dict(kwargs)

    def paths(self) -> list[str]:
        """Which flat inputs of a trace these are."""
        return [f"['{ARGUMENT}']['{name}']" for name in self._names()]

    @property
    def examples(self) -> list[Tensor]:
        return [one.example for one in self.taken]

    def _names(self) -> list[str]:
        return [f"drawn[{place}]" for place in range(len(self.taken))]

    def begin(self, given: Mapping[str, Tensor], checks: Checks) -> None:
        """That a trace begins, of a forward that is given these."""
        self._given, self._checks = [given[name] for name in self._names() if name in given], checks
        self._had, checks.draws = [_kind(one) for one in self._given], self
        self.steps, self.taken, self._values, self._there = [], [], [], {}
        self._began, self._now = [], self.start
        checks.arguments.has_drawn |= self.are_there

    @property
    def are_as_given(self) -> bool:
        """Whether the trace was given all that forward took: else the next one is."""
        return [_kind(one.example) for one in self.taken] == self._had

    @property
    def are_at_once(self) -> bool:
        """As `Arguments.draws_at_once`."""
        return self._checks is not None and self._checks.arguments.draws_at_once

    def end(self) -> None:
        """Let go of what was traced."""
        self._there, self._given, self._checks = {}, [], None

    def run_again(self, modules: Mapping[str, nn.Module], asked: Callable[[int], Tensor]) -> None:
        """Raise TraceError where a step gives another value now, ahead of forward, than where forward has called it:
        it hangs on what forward does before, or what is around it there.
        """
        for step, was, states in zip(self.steps, self._values, self._began, strict=True):
            try:
                with undrawn(states):
                    now = step.run(self._values, modules, asked)
            except Exception as error:
                raise TraceError(f"{ELSEWHERE.format(step.line)} ({type(error).__name__}: {error})") from error
            if not _is_same(now, was):
                raise TraceError(ELSEWHERE.format(step.line))
        self._values, self._began = [], []

    def answer(self, tensor: Tensor) -> Any:
        """What is in a tensor that is made of what the call draws that is traced; None where nobody knows. The program
        is one of calls in which it is the same.
        """
        if self._checks is None or not self.taken:
            return None
        return self._checks.origins.answer_of_draws(tensor, self._known_now(self._checks))

    def _known_now(self, checks: Checks) -> dict[str, Tensor]:
        """Arguments, and what is drawn by now, by path."""
        with outside_modes():
            drawn = [as_tensor(self._values[one.number]) for one in self.taken]
        return {**checks.arguments.values, **dict(zip(self.paths(), drawn, strict=True))}

    def tensors(self, modules: Mapping[str, nn.Module], asked: Callable[..., Tensor]) -> list[Tensor]:
        """What the program takes in a call that is made now: this draws. `asked`: what is in tensors that functions
        which draw are given, and that decide whether they are called, by number; `more`: what is drawn by then.
        """
        found = dict(self._each(modules, asked))
        for place, one in enumerate(self.taken):
            value = found[place]
            if _kind(value) != _kind(one.example):
                raise TraceError(
                    f"what forward draws{one.line} is {_told(value)} in this call, and was {_told(one.example)} when "
                    "it was traced: have it draw as much each time, and mask what is not needed"
                )
        return [found[place] for place in range(len(self.taken))]

    def are_alike(
        self, modules: Mapping[str, nn.Module], asked: Callable[..., Tensor], goes_on: Callable[[str, Tensor], bool]
    ) -> bool:
        """Whether a call that is made now draws what the program takes, of the same shapes. `goes_on`: whether it does
        by what is drawn at that path; what would be drawn behind another answer is none of this program's.
        """
        for place, value in self._each(modules, asked):
            if _kind(value) != _kind(self.taken[place].example) or not goes_on(self.paths()[place], value):
                return False
        return True

    def _each(self, modules: Mapping[str, nn.Module], asked: Callable[..., Tensor]) -> Iterator[tuple[int, Tensor]]:
        """What the program takes, by its place in `taken`, in the order in which it is drawn."""
        made, there = list[Any](), dict[str, Tensor]()
        ask, taken = partial(asked, more=there), {one.number: place for place, one in enumerate(self.taken)}
        for number, step in enumerate(self.steps):
            is_made = all(bool(ask(asks)) == answer for asks, answer in step.only)
            made.append(step.run(made, modules, ask) if is_made else None)
            if (place := taken.get(number)) is not None:
                value = as_tensor(made[-1]) if is_made else self.taken[place].example
                there[self.paths()[place]] = value
                yield place, value

    def computed(self, function: Any, args: Any, kwargs: Any, method: str | None = None) -> Any:
        """What stands for what a function, or that method of a module, gives that draws or is given what is drawn."""
        assert self._checks is not None
        only = self._only(self._checks)
        given, told = (pytree.tree_map(partial(self._given_as, told), (args, kwargs)) for told in (False, True))
        called = function if method is None else getattr(function, method)
        modules = [one for one in (function, *pytree.tree_leaves((args, kwargs))) if isinstance(one, nn.Module)]
        here = {self.paths_of.get(id(vars(one))) for one in modules}
        set_here = {name for path, name in self.written if path in here}
        refuse_what_is_set(called, modules, set_here, self.in_place_of)
        with self._drawing(only), changing_nothing(given, modules):
            value = called(*given[0], **given[1])
        if isinstance(value, list | tuple | np.ndarray):  # of which there may be as many as one of these says
            for one in pytree.tree_leaves((args, kwargs)):
                if isinstance(one, Number) and isinstance(one.like, int):
                    self.answer(one.tensor)
        where = function if method is None else self.paths_of[id(vars(function))]
        return self._noted(value, Step(where, told[0], told[1], method, only))

    def _only(self, checks: Checks) -> tuple[tuple[int, bool], ...]:
        """`Step.only`, of what is drawn now."""
        asks = checks.branches.hang()
        told = [(checks.origins.later(one, self.paths()), answer) for one, answer in asks]
        found = tuple((number, answer) for number, answer in told if number is not None)
        if len(found) < len(told):
            raise TraceError(
                f"forward draws a random number of Python's or numpy's{line_here()} where it hangs on values whether "
                "it does: draw ahead of the branch"
            )
        return found

    def called(
        self, function: Any, args: Any, kwargs: Any, module: nn.Module | None = None, method: str | None = None
    ) -> Any:
        """What stands for what a function gives that draws (that `method` of a module). Within another one, or where it
        is given what nobody has ahead of a call, it runs, and what it draws with is noted.
        """
        if self.is_drawing or self._checks is None or not self._knows((args, kwargs), self._checks):
            return function(*args, **kwargs)
        return self.computed(function if module is None else module, args, kwargs, method)

    def _knows(self, args: Any, checks: Checks) -> bool:
        """Whether a call has these ahead of forward: tensors that are made of arguments, and no objects, which may be
        others in each call.
        """
        leaves = pytree.tree_leaves(args)
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        is_known = all(isinstance(one, GIVEN) or type(one) is Drawn for one in leaves)
        return is_known and all(checks.origins.given(one) is not None for one in tensors)

    def _given_as(self, told: bool, value: Any) -> Any:
        """What a function is given for that in a trace; in words that each call understands, where `told`."""
        assert self._checks is not None
        if type(value) is Drawn:
            value.look()
            return Ref(value.number) if told else value.value
        if isinstance(value, np.ndarray):
            return value.copy() if told else value  # it may be written to later
        if isinstance(value, Number) and (step := self._step_of(value)) is not None:
            return Ref(step) if told else self._values[step]
        if isinstance(value, Tensor) and (found := self._checks.origins.given(value)) is not None:
            return OfArguments(found[0]) if told else found[1]
        if told and isinstance(value, nn.Module) and id(vars(value)) in self.paths_of:
            return At(self.paths_of[id(vars(value))])
        if isinstance(value, Number) and (known := self._checks.known(value.tensor)) is not None:
            return type(value.like)(known)
        if isinstance(value, Tensor | Number):
            raise TraceError(
                f"what Python or numpy draws{line_here()} hangs on values of tensors, or other numbers that are drawn: "
                f"{INSTEAD}"
            )
        return value

    def _step_of(self, value: Number) -> int | None:
        """The step that gave a number, if it is as that gave it."""
        return next((step for step, there in self._there.items() if value.tensor is there), None)

    def take(self, number: int) -> Tensor:
        """What stands in a trace for what that step gives."""
        if number not in self._there:
            with outside_modes():
                value = as_tensor(self._values[number])
            place = len(self.taken)
            self.taken.append(Taken(number, line_here(), value))
            fits = place < len(self._given) and self._had[place] == _kind(value)
            # Nobody knows what is in it, as in the one that the next trace is given.
            there = self._given[place] if fits else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if self._checks is not None:
                self._checks.origins.is_argument(there, self.paths()[place])
            self._there[number] = there
        return self._there[number]

    def number(self, number: int) -> Number:
        """The same, of what is a number."""
        assert self._checks is not None
        return Number(self.take(number), self._checks)

    @contextlib.contextmanager
    def _drawing(self, only: tuple[tuple[int, bool], ...]) -> Iterator[None]:
        """Inside, generators draw, as in the call that is traced, and behind it it is as if they had not. `only`: as of
        the step.
        """
        assert self._checks is not None
        asked, known = self._checks.origins.asked, self._known_now(self._checks) if only else {}
        was, self.is_drawing = self.is_drawing, True
        try:
            with undrawn(self._now), outside_modes():
                is_made = all(bool(asked.value(number, known)) == answer for number, answer in only)
                yield
                self._before, self._now = self._now, states_outside() if is_made else self._now
        finally:
            self.is_drawing = was

    def _noted(self, value: Any, step: Step) -> Any:
        self.steps.append(step)
        self._values.append(value)
        self._began.append(self._before)
        number = len(self.steps) - 1
        if value is None:
            return None
        if isinstance(value, np.generic) and value.dtype not in AS_PYTHONS:
            raise TraceError(
                f"forward takes a number of {value.dtype} out of an array that numpy draws{line_here()}, with which "
                "numpy computes otherwise than a program: draw int64 or float64, or make a tensor of the array"
            )
        if isinstance(value, bool | int | float | np.generic):
            return self.number(number)
        if isinstance(value, np.ndarray):
            return Drawn(value, number, self)
        if type(value) in (list, tuple) and len(value) <= MOST:
            parts = [
                self._noted(part, Step(_part, (Ref(number), place, len(value)), {}, only=step.only))
                for place, part in enumerate(value)
            ]
            return type(value)(parts)
        raise TraceError(
            f"Python or numpy draws{line_here()} what no program takes ({type(value).__name__}), only numbers and "
            f"arrays: {INSTEAD}"
        )


def _part(values: Sequence[Any], place: int, count: int) -> Any:
    if len(values) != count:
        raise TraceError(
            f"a function that draws gives {len(values)} numbers in this call, and gave {count} when it was traced: "
            "have it draw as much each time, and mask what is not needed"
        )
    return values[place]


def as_tensor(value: Any) -> Tensor:
    """A number or an array of Python's or numpy's, with memory of its own."""
    try:
        return torch.from_numpy(np.array(value))
    except TypeError:
        raise TraceError(f"forward draws what no tensor holds ({np.asarray(value).dtype} of numpy's)") from None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if one is None or other is None:
        return one is other
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.tobytes() == other.tobytes() and one.shape == other.shape


def _kind(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.dtype


def _told(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
