"""What forward asks its arguments, and goes on by the answer: `x[:, : int(lengths.max())]`, `if (labels >= 0).any():`.

A trace has no values, but who calls has. What is asked is computed of the arguments of the call that is traced, and of
those of each later call before its program is chosen: one that was traced with other answers is not the program of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import outside_modes
from autopar.trace.lines import line_here

CPU, DEVICES = torch.device("cpu"), ("cpu", "cuda", "meta")
MOST = 2**16  # elements
# How a text begins that says what else is asked.
OTHERWISE = "what forward asks its arguments"
NOTE = (
    "forward asks what is in its arguments{}: the plan is for this answer, and each other one has a program of its own"
)
DRAWN = (
    "forward goes on by what it draws outside of torch{}: the plan is for what it drew in this call, and each other "
    "one has a program of its own"
)


@dataclass(frozen=True)
class Ref:
    """A value, by its number (`autopar.trace.origins.Origins`), among what a function is given."""

    number: int


@dataclass(frozen=True)
class Many:
    """A list or tuple of such."""

    is_list: bool
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Slice:
    start: Any
    stop: Any
    step: Any


Making = tuple[Any, Many, Many, int | None]  # a function, what it is given, and which of what it gives


@dataclass
class Arguments:
    """`values`: path -> what an argument holds in the call that is traced. `at_once`: its numbers are taken out, and
    its masks counted, as they come; else where nothing else will do, and `is_lazy` says that something was left open.
    `as_exported`: a library that writes for torch.export is told of one; `has_told`: it was. `draws_at_once`: questions
    to what is drawn outside of torch are answered as they come; `has_drawn`: it is.
    """

    values: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    at_once: bool = False
    is_lazy: bool = False
    as_exported: bool = True
    has_told: bool = False
    draws_at_once: bool = False
    has_drawn: bool = False

    def otherwise(self) -> Iterator[None]:
        """Ways to trace a forward that cannot be traced like this."""
        if self.is_lazy and not self.at_once:
            self.at_once = True
            yield
        if self.has_told and self.as_exported:
            self.as_exported = False
            yield
        if self.has_drawn and not self.draws_at_once:
            self.draws_at_once = True
            yield

    def tells(self) -> bool:
        """Whether to tell a library that writes for torch.export of one."""
        self.has_told |= self.as_exported
        return self.as_exported


@dataclass
class Asked:
    """The questions of one forward. Values have numbers, and are made of such with smaller ones. `roots`: number of a
    value -> path of the argument that it is; `constants`: -> what it always is; `makings`: -> the function that gives
    it, what that is given, and which of what it gives. `answers`: number -> what it is, the line that asks, and the
    numbers of all that it is made of, in order; `of_draws`: likewise of what is made of arguments and of what is drawn
    outside of torch; `given`: likewise of what functions there are given, which is another one in each call
    (`autopar.trace.drawn`). `lacking`: parameters and buffers by name, and attributes that they are asked for and do
    not have.
    """

    arguments: Arguments = field(default_factory=Arguments)
    roots: dict[int, str] = field(default_factory=dict[int, str])
    constants: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    makings: dict[int, Making] = field(default_factory=dict)
    answers: dict[int, tuple[Any, str, list[int]]] = field(default_factory=dict)
    given: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    of_draws: dict[int, tuple[Any, str, list[int]]] = field(default_factory=dict[int, tuple[Any, str, list[int]]])
    notes: list[str] = field(default_factory=list[str])
    lacking: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def answer(self, number: int) -> Any:
        """What is in that value, as Python has it; None where it is not made of arguments alone."""
        if number in self.answers:
            return self.answers[number][0]
        steps = self._made_of(number)
        if steps is None:
            return None
        with outside_modes(), torch.no_grad():
            found = self._value(steps, self.arguments.values, {}).tolist()
        self.answers[number] = found, (line := line_here()), steps
        if (note := NOTE.format(line)) not in self.notes:
            self.notes.append(note)
        return found

    def give(self, number: int) -> Tensor | None:
        """That value in the call that is traced, and from now on in each; None where it is not made of arguments."""
        if (steps := self._made_of(number)) is None:
            return None
        self.given[number] = steps
        with outside_modes(), torch.no_grad():
            return self.value(number, self.arguments.values)

    def give_later(self, number: int, paths: Collection[str]) -> bool:
        """Whether that value is made of arguments, and of others that a call has by the time that it asks for it."""
        if (steps := self._made_of(number, paths)) is None:
            return False
        self.given[number] = steps
        return True

    def answer_of_draws(self, number: int, values: Mapping[str, Tensor]) -> Any:
        """As `answer`, of what is made of these, which are arguments and what is drawn; None where it is not."""
        if (steps := self._made_of(number, values)) is None:
            return None
        with outside_modes(), torch.no_grad():
            found = self._value(steps, values, {}).tolist()
        self.of_draws[number] = found, (line := line_here()), steps
        if (note := DRAWN.format(line)) not in self.notes:
            self.notes.append(note)
        return found

    def is_as_drawn(self, values: Mapping[str, Tensor], last: str) -> bool:
        """Whether the answers are the same with these, which are arguments and what is drawn by now; of those that can
        be asked since the `last` of them is there.
        """
        known = dict[int, Any]()
        for was, _, steps in self.of_draws.values():
            needed = {self.roots[one] for one in steps if one in self.roots}
            if last in needed and needed <= values.keys():
                with torch.no_grad():
                    if self._value(steps, values, known).tolist() != was:
                        return False
        return True

    def value(self, number: int, values: Mapping[str, Tensor]) -> Tensor:
        """One of `given`, in a call with these arguments."""
        return self._value(self.given[number], values, {})

    def changed(self, values: Mapping[str, Tensor], known: dict[int, Any]) -> str | None:
        """What is another answer in a call with these arguments, in words. `known`: gets what was computed of them."""
        with torch.no_grad():
            for was, line, steps in self.answers.values():
                if (now := self._value(steps, values, known).tolist()) != was:
                    return f"{OTHERWISE}{line} is {_short(now)}, and was {_short(was)}"
        return None

    @property
    def paths(self) -> frozenset[str]:
        """Those of the arguments that are asked."""
        return frozenset(self.roots[one] for one in self._needed() if one in self.roots)

    def settled(self, numbers: dict[Any, int]) -> Asked:
        """What is needed to ask again, by numbers which values that are made alike have in all programs of a module, so
        that a call computes each once. `numbers`: those that there are.
        """
        made = Asked(Arguments(at_once=self.arguments.at_once), lacking=self.lacking)
        known = dict[int, int]()
        for number in sorted(self._needed()):
            if number in self.makings:
                func, args, kwargs, place = self.makings[number]
                making = func, _renumbered(args, known), _renumbered(kwargs, known), place
                known[number] = numbers.setdefault(_told(making), len(numbers))
                made.makings[known[number]] = making
            elif number in self.roots:
                known[number] = numbers.setdefault(self.roots[number], len(numbers))
                made.roots[known[number]] = self.roots[number]
            else:
                held = self.constants[number]
                known[number] = numbers.setdefault((id(held), held._version), len(numbers))
                made.constants[known[number]] = held
        for number, (answer, line, steps) in self.answers.items():
            made.answers[known[number]] = answer, line, [known[step] for step in steps]
        for number, (answer, line, steps) in self.of_draws.items():
            made.of_draws[known[number]] = answer, line, [known[step] for step in steps]
        made.given = {number: [known[step] for step in steps] for number, steps in self.given.items()}
        return made

    def _needed(self) -> set[int]:
        answers = [steps for *_, steps in (*self.answers.values(), *self.of_draws.values())]
        return {one for steps in (*answers, *self.given.values()) for one in steps}

    def _made_of(self, number: int, paths: Collection[str] = ()) -> list[int] | None:
        """The numbers of all that a value is made of, itself the last; None where that is not arguments alone, or what
        lies at these paths.
        """
        found, left, there = set[int](), [number], {*self.arguments.values, *paths}
        while left:
            one = left.pop()
            if one in found:
                continue
            found.add(one)
            if one in self.makings:
                _, args, kwargs, _ = self.makings[one]
                left += [*numbers_in(args), *numbers_in(kwargs)]
            elif one not in self.constants and self.roots.get(one) not in there:
                return None
        return sorted(found)

    def _value(self, steps: list[int], values: Mapping[str, Tensor], known: dict[int, Any]) -> Any:
        """The last of them. `known`: gets all of them, of these arguments."""
        for number in steps:
            if number in known:
                continue
            if number in self.makings:
                func, args, kwargs, place = self.makings[number]
                found = on_cpu(func, again(args, known), dict(again(kwargs, known)))
                found = found if place is None else found[place]
                known[number] = found if isinstance(found, Tensor) else torch.tensor(found)  # `torch.equal`
            else:
                held = values[self.roots[number]] if number in self.roots else self.constants[number]
                known[number] = put_together(held).detach().cpu()
        return known[steps[-1]]


def again(told: Any, known: Mapping[int, Any]) -> Any:
    """What a function was given, of these values by number."""
    match told:
        case Ref(number):
            return known[number]
        case Many(is_list, parts):
            made = (again(one, known) for one in parts)
            return list(made) if is_list else tuple(made)
        case Slice(start, stop, step):
            return slice(*(again(one, known) for one in (start, stop, step)))
        case _:
            return told[1]


def _renumbered(told: Any, numbers: Mapping[int, int]) -> Any:
    match told:
        case Ref(number):
            return Ref(numbers[number])
        case Many(is_list, parts):
            return Many(is_list, tuple(_renumbered(one, numbers) for one in parts))
        case Slice(start, stop, step):
            return Slice(*(_renumbered(one, numbers) for one in (start, stop, step)))
        case _:
            return told


def _told(making: Making) -> Any:
    """What is equal where the same is made: a partial of one function is another object each time."""
    func, *rest = making
    return ((func.func, *func.args) if isinstance(func, partial) else func, *rest)


def on_cpu(func: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function gives of tensors that are there, on the CPU: the device that they are for may not be there."""
    given = [CPU if is_device(one) else one for one in args]
    return func(*given, **{name: value for name, value in kwargs.items() if name != "device"})


def is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in DEVICES)


def values_of(leaves: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    """The arguments by path whose values are there. Of what the ranks have parts of, all of them put together numbers
    and truths, and floating-point numbers up to `MOST`: nobody can while forward is traced.
    """
    there = [(path, one) for path, one in leaves if type(one) in (Tensor, DTensor) and one.device.type != "meta"]
    is_wide = {path: one.is_floating_point() and one.numel() > MOST for path, one in there if isinstance(one, DTensor)}
    return {path: put_together(one) for path, one in there if not is_wide.get(path)}


def put_together(tensor: Tensor) -> Tensor:
    """The whole of an argument; all ranks have to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def numbers_in(told: Any) -> Iterable[int]:
    if isinstance(told, Ref):
        yield told.number
    elif isinstance(told, Many | Slice):
        parts = told.parts if isinstance(told, Many) else (told.start, told.stop, told.step)
        for part in parts:
            yield from numbers_in(part)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}.."
