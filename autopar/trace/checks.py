"""Questions of forward to values, of which one answer ends the call: `assert mask.any()`, `if bad.any(): raise ..`.

A trace has no values. It goes on as if nothing were wrong; what was asked is computed in the program, and whoever calls
it raises where something is (`autopar.errors.CheckFailed`). So is a question whether values are finite, whatever
forward does where they are not (DETR's clamp in training): only then it would be another program.
"""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from autopar._compat import check_tensor_all_with
from autopar.errors import TraceError
from autopar.trace.asked import Arguments
from autopar.trace.bodies import NO_IF
from autopar.trace.branch import Condition
from autopar.trace.branches import Branches
from autopar.trace.joints import Part, is_needed, part_of
from autopar.trace.lines import line_here
from autopar.trace.origins import Origins, writes_in_place
from autopar.trace.values import is_installed

DECIDES, ASSERTS = ("__bool__", "is_nonzero"), ("_assert", "_assert_async")
ASKS = frozenset((*DECIDES, "item", *ASSERTS))
OTHERWISE = (
    "what forward asks{} has not the answer in this call with which the plan goes on: call the model without autopar "
    "with this batch to see what is wrong with it"
)
NO_ROWS = (
    "a mask picks no row in this call{}, and the plan goes on as where there are some, as code of a package asks for "
    "that: leave such batches out"
)
ONLY_TENSORS = (
    " A branch that only writes to tensors and assigns some (if mask.any(): loss = loss + ..) may ask that; this one "
    "may not, as {}."
)
JOINT = (
    "the condition at {}:{} asks several things, of which some depend on values and others do not, and a program goes "
    "one way: ask them in one if each, one inside of the other, or choose by torch.where"
)
# What tells that there are rows, and what that there are none: a name, and the number that theirs is compared with.
SOME, NONE = frozenset((("gt", 0), ("ge", 1), ("ne", 0))), frozenset((("eq", 0), ("lt", 1), ("le", 0)))
CHANGED = "a buffer that forward asks{} is another one than when the plan was made: compile the model again"
# What is expected of each element of what these give.
EXPECTED = {"isfinite": True, "isnan": False, "isinf": False}
ENDS = ("STORE", "RETURN", "DELETE", "YIELD", "FOR_ITER", "POP_TOP")
SAME, TURNED = frozenset(("all", "any", "logical_or", "or", "logical_and", "and")), frozenset(("logical_not", "invert"))


@dataclass(frozen=True)
class Count:
    """How many a mask, of the number `rows`, picks; `is_of_rows`: that was asked of the rows themselves."""

    number: Tensor
    rows: int
    is_of_rows: bool
    mask: Tensor


@dataclass(frozen=True)
class Check:
    """What to say where values are as they should not be, in a call in which of `Checks.truths` those at such places
    are not 0 (true), or are.
    """

    told: str
    where: tuple[tuple[int, bool], ...] = ()


class Checks:
    """Those of one forward. `wrong`: check -> how many values are as they should not be, a number; `truths`: numbers by
    which some of these are looked at. All are sums over the ranks and micro-batches that the values are split over.
    """

    origins: Origins
    literals: Any  # values that a trace knows (`autopar.trace.literals.Literals`)

    def __init__(
        self,
        notes: list[str],
        arguments: Arguments,
        mode: Any,
        calls: Sequence[Callable[..., Any]],
        number: Any,
        rows: Any,
    ) -> None:
        self.notes = notes  # of the plan
        self.number: Callable[[Tensor], Any] = lambda tensor: number(tensor, self)  # `autopar.trace.numbers.Number`
        self.branches = Branches(self, mode, calls, number, rows)
        self.arguments = arguments
        self.draws: Any = None  # what it draws outside of torch (`autopar.trace.drawn.Draws`)
        self.instead = ""  # why what was asked last leads into no branch that only writes
        self.needed: Exception | None = None  # what was said where a number was needed that nobody has
        self._refused: TraceError | None = None
        self.wrong: dict[Check, Tensor] = {}
        self.truths: list[Tensor] = []
        # By frame and place of a condition: what its parts say together, as far as they were asked.
        self._joint: dict[tuple[int, tuple[int, int]], tuple[FrameType, dict[int, Tensor]]] = {}
        self._each: dict[int, tuple[Tensor, Tensor, bool]] = {}  # id -> what `all` (true) or `any` gave, and of what
        self._counts: dict[int, Count] = {}  # numbers of rows that masks pick
        self._there: dict[int, tuple[Tensor, bool, Count]] = {}  # id -> a question whether it is 0, the answer if not
        self._expected: dict[int, tuple[Tensor, bool]] = {}  # id -> a tensor of truths, and what each of them should be

    def of_arguments(self, tensor: Tensor) -> Any:
        """`Origins.answer`."""
        return self.origins.answer(tensor)

    def of_draws(self, tensor: Tensor) -> Any:
        """Likewise of what is drawn outside of torch."""
        return None if self.draws is None else self.draws.answer(tensor)

    def truth_of_draws(self, asked: Tensor) -> bool | None:
        """Likewise, whether it is true."""
        answer = None if self.draws is None else self.of_draws(self.origins.truths(asked))
        return None if answer is None else bool(answer)

    def known(self, tensor: Tensor) -> Any:
        """Of either."""
        return self.of_draws(tensor) if (found := self.of_arguments(tensor)) is None else found

    def is_known(self, truth: Tensor) -> bool:
        """Whether a trace can say whether that is true."""
        return self.known(truth) is not None or self.literals.answer(Tensor.__bool__, (truth,), {}) is not None

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, *, of_rows: bool = False) -> None:
        """`func` gave `result`; call it behind every function of torch. `of_rows`: which a mask picks."""
        self.branches.made(func, args, kwargs, result, of_rows=of_rows)
        name = _name_of(func)
        if writes_in_place(getattr(func, "__name__", ""), kwargs):
            self._expected.clear(), self._each.clear()  # of what it may be, or look at
            return
        if not isinstance(result, Tensor) or of_rows:
            return
        if name in ("all", "any", "is_all_true") and len(args) == 1 and not kwargs:
            self._each[id(result)] = result, args[0], name != "any"
        if len(args) == 2 and id(args[0]) in self._counts and (name, args[1]) in SOME | NONE:
            self._there[id(result)] = result, (name, args[1]) in SOME, self._counts[id(args[0])]
        if name in ("sum", "count_nonzero") and len(args) == 1 and not kwargs and args[0].dtype == torch.bool:
            self._counts[id(result)] = Count(result, self.origins.rows(args[0]), False, args[0])
        elif name in ("detach", "clone", "reshape", "to", "long", "int") and id(args[0]) in self._counts:
            self._counts[id(result)] = replace(self._counts[id(args[0])], number=result)
        if name in EXPECTED:
            self._expected[id(result)] = result, EXPECTED[name]
        elif name in SAME | TURNED and self._expected:
            known = {self._expected[id(one)][1] if id(one) in self._expected else None for one in args}
            known -= {None} if name in ("all", "any") else set()  # their other arguments are dims
            if len(known) == 1 and (expected := known.pop()) is not None:
                self._expected[id(result)] = result, expected != (name in TURNED)

    def answer(self, func: Any, args: Any) -> bool | None:
        """What a question to values is answered with; None where nobody can say, or none is asked."""
        name = getattr(func, "__name__", "")
        if name not in ASKS or not args or not isinstance(args[0], Tensor) or args[0].numel() != 1:
            return None
        self.instead = ""
        return self.asked(args[0], name, sys._getframe(2), is_seen=True)  # the code that asks, behind the mode

    def asked(self, asked: Tensor, name: str, frame: FrameType, *, is_seen: bool = False) -> bool | None:
        """As `answer`, where code of that frame asks by the method `name`; `is_seen`: in the mode that sees it."""
        self.branches.leave(frame)
        wanted = True if name in ASSERTS else _wanted(frame, name)
        if wanted is None and name != "item" and id(asked) in self._expected:
            wanted = self._expected[id(asked)][1]
        if wanted is None and name in DECIDES and (answer := self.of_arguments(asked)) is not None:
            return bool(answer)
        if wanted is None and self.arguments.draws_at_once and (answer := self.truth_of_draws(asked)) is not None:
            return bool(answer)
        if wanted is None and name in DECIDES and (wanted := self._of_branch(asked, frame, is_seen)) is not None:
            return wanted
        _, is_some, count = self._there.get(id(asked), (asked, None, None))
        if wanted is None and count is not None and count.is_of_rows and is_installed(frame.f_code.co_filename):
            self.add(NO_ROWS.format(line_here()), count.number == 0)
            return is_some
        if wanted is None:
            return self.truth_of_draws(asked) if name in DECIDES else None
        _, each, is_all = self._each.get(id(asked), (asked, asked, wanted))
        each = each if is_all == wanted else asked  # that all are true, or that none is, is asked of each by itself
        self.add(OTHERWISE.format(line_here()), each.bool().logical_not() if wanted else each.bool())
        return wanted

    def answered(self, func: Any, args: Any, kwargs: Any, answer: Any) -> None:
        """`func` asked buffers, or what is made of them, and got that answer."""
        asked: Tensor = args[0].detach()
        match getattr(func, "__name__", ""):
            case "equal" if asked.shape != args[1].shape:
                return
            case "equal":
                asked = asked.eq(args[1]).all()
            case "allclose":
                asked = torch.isclose(*args, **kwargs).all()
            case "__bool__" | "is_nonzero":
                asked = asked.bool()
            case _:
                pass
        self.add(CHANGED.format(line_here()), asked.ne(torch.tensor(answer, device=asked.device)))

    def _of_branch(self, asked: Tensor, frame: FrameType, is_seen: bool) -> bool | None:
        """The answer that leads into a branch of which nothing stays but tensors; None where there is none."""
        if (part := self._part_at(frame)) is not None:
            return self._of_part(asked, frame, part, is_seen)
        _, each, is_all = self._each.get(id(asked), (asked, asked, True))
        if not is_all and each.dtype == torch.bool:
            made = self.branches.begin(asked, frame, self.origins.rows(each), is_seen=is_seen)
        elif id(asked) in self._there:
            _, is_some, count = self._there[id(asked)]
            made = self.branches.begin(asked, frame, count.rows, is_some, is_seen=is_seen)
        else:
            made = self.branches.begin(asked, frame, None, is_seen=is_seen)
        return self._or_why(made)

    def _or_why(self, made: bool | str) -> bool | None:
        if isinstance(made, bool):
            return made
        self.instead = ONLY_TENSORS.format(made) if made != NO_IF else ""
        return None

    def _part_at(self, frame: FrameType) -> Part | None:
        """The part of a condition that code of that frame asks, where its parts decide together."""
        part = part_of(frame.f_code, frame.f_lasti)
        if part is None or (id(frame), part.place) in self._joint:
            return part
        return part if not part.is_last and is_needed(frame.f_code, frame.f_lasti) else None

    def _of_part(self, asked: Tensor, frame: FrameType, part: Part, is_seen: bool) -> bool | None:
        """Likewise where that is a part of a condition."""
        _, before = self._joint.pop((id(frame), part.place), (frame, {}))
        if any(number >= part.number for number in before):
            raise _joint_alone(frame, part.place)
        truth = self.branches.tensors.truth(asked)
        with self.branches.tensors.own():
            truths = {**before, part.number: truth if part.truth else truth.logical_not()}
            later = [*part.asked(truths)]
            whole = part.together(truths) if part.is_last else truth
            whole = whole if part.settles else whole.logical_not()
        self.branches.asks(frame, later)
        if not part.is_last:
            self._joint[id(frame), part.place] = frame, truths
            return part.goes_on
        return self._or_why(self.branches.begin(whole, frame, None, is_seen=is_seen))

    def sees_all(self) -> None:
        """Forward has run: what it has left open is closed. Raises TraceError."""
        self.branches.sees()
        for (_, place), (frame, _) in self._joint.items():
            raise _joint_alone(frame, place)

    def ask_for_rows(self, some: Tensor, rows: int | None, frame: FrameType) -> bool:
        """Whether code of that frame that asks how many rows there are goes into such a branch where there are `some`;
        `rows`: the number of their mask.
        """
        self.branches.leave(frame)
        return self._part_at(frame) is None and self.branches.begin(some, frame, rows) is True

    def length(self, count: Tensor, rows: int | None, frame: FrameType) -> Any:
        """`len` of what has so many, where code of that frame asks: some, in a branch that is taken by that."""
        return 1 if self.ask_for_rows(count > 0, rows, frame) else self.number(count)

    def is_count(self, number: Tensor, rows: int, mask: Tensor) -> None:
        """That this is how many rows a mask, of that number, picks. Where code of a package asks whether there are any,
        which nobody can write otherwise, there are.
        """
        self._counts[id(number)] = Count(number, rows, True, mask)

    def counted(self, number: Tensor) -> tuple[Tensor, int] | None:
        """The mask, and its number, that picks so many rows; None: it is another number, or the mask has changed."""
        count = self._counts.get(id(number))
        return None if count is None or self.origins.rows(count.mask) != count.rows else (count.mask, count.rows)

    def are_of_same_rows(self, one: Tensor, other: Tensor) -> bool:
        """Whether both say how many rows the same mask picks."""
        first, second = self._counts.get(id(one)), self._counts.get(id(other))
        if first is None or second is None or not (first.is_of_rows and second.is_of_rows):
            return False
        return first.rows == second.rows

    def condition(self, asked: Tensor, wanted: bool) -> Condition:
        """That this has the answer that is wanted: of a mask's `any`, `all` or number of rows, by that number."""
        _, each, is_all = self._each.get(id(asked), (asked, asked, False))
        _, is_some, number = self._there.get(id(asked), (asked, not is_all, None))
        each = each.detach().bool()
        count = number.number.detach() if number is not None else (each.logical_not() if is_all else each).sum()
        return Condition(count, is_some == wanted)

    def add(self, told: str, wrong: Tensor) -> None:
        """Say `told` in a call where some of these are true, and what runs now is not in a branch that is not taken."""
        here = self.branches.here()
        self.count(told, wrong.detach().sum(), [condition for one in here for condition in one.conditions])

    def count(self, told: str, count: Tensor, where: Iterable[Condition] = ()) -> None:
        """Likewise where there are some, and all of these hold."""
        places = {(self._place_of(one.count), one.is_some) for one in where}
        check = Check(told, tuple(sorted(places)))
        self.wrong[check] = self.wrong[check] + count if check in self.wrong else count

    def _place_of(self, count: Tensor) -> int:
        place = next((place for place, one in enumerate(self.truths) if one is count), len(self.truths))
        self.truths += [count] if place == len(self.truths) else []
        return place

    def __enter__(self) -> None:
        """Around what may raise a TraceError, which code of the user's may catch: that is no exception of theirs."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._refused is None and isinstance(error, TraceError):
            self._refused = error

    def end(self) -> None:
        """Forward has ended. Raises what was refused first, which code of the user's may have caught."""
        self.branches.end()
        if self._refused is not None:
            raise self._refused


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return name.strip("_").removeprefix("r") if name in ("__ror__", "__rand__") else name.strip("_")


def _wanted(frame: FrameType, name: str) -> bool | None:
    """The answer with which the code that asks goes on; None where it goes on with either."""
    if frame.f_code is check_tensor_all_with.__code__:  # which asks with item()
        return True
    return None if name == "item" else _goes_on(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=1024)
def _goes_on(code: CodeType, at: int) -> bool | None:
    """The truth with which the branch at this place of the code does not end in an exception."""
    instructions = [*dis.get_instructions(code)]
    place = next((place for place, one in enumerate(instructions) if one.offset == at), None)
    if place is not None and _calls_bool(code, instructions[place]):
        place += 1
    if place is None or "JUMP" not in (asks := instructions[place]).opname:
        return None
    jumps = "IF_TRUE" in asks.opname
    if not jumps and "IF_FALSE" not in asks.opname:
        return None
    place_of = {one.offset: place for place, one in enumerate(instructions)}
    target = place_of.get(asks.argval)
    ends = _raises(instructions, place + 1), target is not None and _raises(instructions, target)
    match ends:
        case True, False:
            return jumps
        case False, True:
            return not jumps
        case _:
            return None


def _calls_bool(code: CodeType, one: dis.Instruction) -> bool:
    """Whether that is the call of `bool(...)`, as it is written."""
    at = one.positions
    if not one.opname.startswith("CALL") or at is None or at.lineno is None or at.col_offset is None:
        return False
    return linecache.getline(code.co_filename, at.lineno).encode()[at.col_offset :].startswith(b"bool(")


def _raises(instructions: list[dis.Instruction], place: int) -> bool:
    """Whether what stands there raises before it does or decides anything else."""
    if instructions[place].opname == "POP_TOP":  # the value in the middle of `0 <= x < n`
        place += 1
    while place < len(instructions):
        one = instructions[place]
        place += 1
        if one.opname in ("RAISE_VARARGS", "LOAD_ASSERTION_ERROR"):
            return True
        if one.opname == "JUMP_FORWARD":
            place = next(number for number, other in enumerate(instructions) if other.offset == one.argval)
        elif "JUMP" in one.opname or one.opname.startswith(ENDS):
            return False
    return False


def _joint_alone(frame: FrameType, place: tuple[int, int]) -> TraceError:
    return TraceError(JOINT.format(frame.f_code.co_filename, place[0]))
