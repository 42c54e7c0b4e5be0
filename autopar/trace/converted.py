"""Tensors in branches that a program always goes into (`autopar.trace.branches`): what is written to them, and what is
computed of them, is as if it went there only where the branch is taken.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar._compat import outside_modes, pytree
from autopar.errors import TraceError
from autopar.trace.branch import Branch, Condition
from autopar.trace.lines import line_here
from autopar.trace.origins import STATISTICS, memory_of, tensors_in, writes_in_place

Picked = Any  # of `autopar.trace.masked`, which calls what is here

WRITES = (
    "forward writes to a tensor{} {}, and not by a method of it (out=, inplace=True, another shape): a program always "
    "goes in there. Do that behind the branch, or have it give a new tensor"
)
RAISES = (
    "forward calls {}{} {}, of whole tensors that hang on values: a program always goes in there, and where it would "
    "not, they need not be what that takes. Do that ahead of it, or of rows that the mask picks"
)
NOT_FINITE = (
    "what forward reads{} {} is not finite in this call, which does not take it: gradients of zero would become NaN on "
    "their way back. Compute it in the branch"
)
DRAWS = (
    "what forward draws in branches that are taken by values is drawn in every step: behind one that is not taken "
    "other numbers are drawn than by torch, on one process, too"
)
# What looks at tensors, or makes truths and whole numbers of them: good for any, and so are gradients.
_LOOKS = """
    eq ne lt le gt ge and rand or ror xor invert logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not
    bitwise_xor view reshape flatten unsqueeze squeeze transpose permute contiguous to bool float double half bfloat16
    int long type_as type detach clone expand expand_as t any all argmax argmin chunk split unbind narrow select getitem
    zeros ones full empty arange zeros_like ones_like empty_like new_zeros new_ones new_empty ravel movedim
    swapaxes isfinite isnan isinf get set size dim numel stride is_contiguous is_floating_point is_complex count_nonzero
    broadcast_to view_as unflatten nonzero masked_select setitem index_add index_copy index_fill len triu tril
    untyped_storage add sub iadd isub radd sum neg stack cat fill zero copy
"""
LOOKS = frozenset(_LOOKS.split())
READS = frozenset(("getitem", "setitem", "index_select", "gather", "index_add", "index_copy", "index_fill"))
DRAWN = re.compile("rand.*|.*dropout.*|bernoulli|normal|multinomial|uniform|exponential|poisson|rrelu|gumbel.*")
FAILS = frozenset(("cholesky", "inverse", "inv", "inv_ex", "solve", "lstsq", "cholesky_inverse", "lu_factor"))
_DIVIDES = """
    div divide truediv true_divide rtruediv floordiv floor_divide rfloordiv mod rmod remainder fmod
"""
DIVIDES = frozenset(_DIVIDES.split())


@dataclass
class Merged:
    """`made`, which is `new` where `truth`, else `old`, as one tensor under two names would be."""

    made: Tensor
    new: Tensor
    old: Tensor
    truth: Tensor
    versions: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.see()

    def see(self) -> None:
        self.versions = [one._version for one in (self.made, self.new, self.old)]

    @property
    def written(self) -> list[bool]:
        return [one._version != was for one, was in zip((self.made, self.new, self.old), self.versions, strict=True)]


class Converted:
    """Those of one forward. `taken`: truths of each call, of which some are true where a branch is taken: one for each
    branch and way to write in it. They are nodes of their own, which what is written hangs on and nothing else does.
    """

    def __init__(self, notes: list[str], mode: Any, tell: Callable[[str, Tensor, Iterable[Condition]], None]) -> None:
        self.notes, self._mode, self._tell = notes, mode, tell  # of the plan; that sees all functions of torch; checks
        self.merged: list[Merged] = []
        self._bad: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by id and version: how many are not finite
        self.taken: list[Tensor] = []
        self.free = set[int | None]()  # memory of parameters, buffers and what is made of these alone
        self.held = frozenset[int | None]()  # of parameters and buffers themselves
        self.places: dict[int, Tensor] = {}  # by id: of turns of loops, and what is computed of these alone
        self._rows: dict[int | None, tuple[Tensor, list[Branch]]] = {}  # by memory: of picked rows, and where made
        self._is_own = False  # what is computed now
        self._given: list[tuple[Tensor, int, Tensor]] = []  # to a function: its version, and what it stands for

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """These are parameters and buffers: good wherever they are used, and nothing is to be had of a guard's copy."""
        self.held = frozenset(map(memory_of, tensors))
        self.free |= self.held

    def guarded(self, rows: Picked, here: Sequence[Branch]) -> Picked:
        """The same rows, as they are written to in these branches: of no call that does not take them."""
        for branch in here:
            made = rows.like(rows.dense)
            if rows.key == branch.rows:
                branch.of_rows = self._counted(rows.mask) if branch.of_rows is None else branch.of_rows
                made.mask = branch.of_rows.reshape(rows.mask.shape)
            else:
                made.mask = rows.mask & self._of_all(branch)
            rows = made
        return rows

    def sees_rows(self, dense: Tensor, here: list[Branch]) -> None:
        """That what rows are picked from is there, in these branches."""
        self._rows.setdefault(memory_of(dense), (dense, here))

    def are_fresh(self, dense: Tensor, here: Sequence[Branch]) -> bool:
        """Whether these rows were made in all of these branches."""
        _, made_in = self._rows[memory_of(dense)]
        return all(any(one is other for other in made_in) for one in here)

    def truth(self, asked: Tensor) -> Tensor:
        """Whether that is true, as one."""
        with self.own():
            return asked.detach().reshape(()).bool()

    def _counted(self, truth: Tensor) -> Tensor:
        # A number that nobody else compares with: as a node it is like no other.
        self.taken.append(truth >= 0.5 + (len(self.taken) + 1) * 2.0**-20)
        return self.taken[-1]

    def _of_all(self, branch: Branch) -> Tensor:
        branch.of_all = self._counted(branch.truth) if branch.of_all is None else branch.of_all
        return branch.of_all

    def counts(self) -> list[Tensor]:
        """`Returned.taken`."""
        return [one.sum() for one in self.taken]

    def chosen(self, new: Tensor, old: Tensor, truth: Tensor) -> Tensor:
        """The new one where that is true, else the old one, and so with gradients, of which either has its own."""
        with self._own_with_gradients(new, old):
            if not (new.is_floating_point() or new.is_complex()):
                return torch.where(truth, new, old)
            is_new, is_old = self._counted(truth), self._counted(truth.logical_not())
            return torch.where(is_new, new, 0) + torch.where(is_old, old, 0)

    def one_of(self, new: Tensor, old: Tensor, truth: Tensor) -> Tensor:
        """`chosen`, and the same tensor: what is written to it is written to that, and the other way round."""
        made = self.chosen(new, old, truth)
        self.merged.append(Merged(made, new, old, truth))
        return made

    def where_true(self, one: Tensor, truth: Tensor) -> Tensor:
        """The same where that is true, else zeros, and so with gradients."""
        with self._own_with_gradients(one):
            return torch.where(self._counted(truth), one, 0)

    def write_through(self, mode: contextlib.AbstractContextManager[Any]) -> None:
        """What is written to what a name is behind a branch is written to what it stands for, and the other way round;
        call it before every function. `mode`: within which functions are seen.
        """
        if self._is_own or not self.merged:
            return
        with outside_modes():
            if not any(any(one.written) for one in self.merged):
                return
        written = dict[int, Tensor | None]()  # by id: where; None: in any case
        first = {id(one.made) for one in self.merged if one.written[0]}
        with self.own(), mode:
            for one in reversed(self.merged):
                if not one.written[0]:  # maybe through a view of it, a moment ago
                    continue
                within = None if id(one.made) in first else written.get(id(one.made))
                for part, truth in ((one.new, one.truth), (one.old, one.truth.logical_not())):
                    where = truth if within is None else truth & within
                    part.copy_(torch.where(where, one.made, part))
                    before = written.get(id(part), where)
                    written[id(part)] = None if before is None else where | before
                one.see()
            for one in self.merged:
                is_made, *is_other = one.written
                if any(is_other) and not is_made:
                    one.made.copy_(self.chosen(one.new, one.old, one.truth))
            for one in self.merged:
                one.see()

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """What is computed within is none of the user's."""
        before, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own = before

    @contextlib.contextmanager
    def _own_with_gradients(self, *given: Tensor) -> Iterator[None]:
        """`own`, and with gradients where one of these has one. Each change of that, also to what it is, begins another
        graph in an export.
        """
        begins = not torch.is_grad_enabled() and any(one.requires_grad for one in given)
        with self.own(), torch.enable_grad() if begins else contextlib.nullcontext():
            yield

    def called(self, func: Any, args: Sequence[Any], kwargs: Any, here: Sequence[Branch]) -> tuple[Any, ...]:
        """What a function of torch is called with in these branches; behind that what it gives, if it has been called
        here. Raises TraceError where it writes to what was there before a branch, and nobody can say what.
        """
        name = str(getattr(func, "__name__", func))
        if not here or self._is_own or name == "__get__":  # which computes nothing
            return args, kwargs
        bare = name.strip("_")
        if DRAWN.fullmatch(name.rstrip("_")) and kwargs.get("training", True) and DRAWS not in self.notes:
            self.notes.append(DRAWS)
        is_written = writes_in_place(name, kwargs)
        of_lists = args[:1] if is_written and isinstance(args[0], (list, tuple)) else ()  # torch._foreach_add_
        self._refuse(tensors_in((kwargs.get("out"), of_lists)), here)
        before, is_good = (args, kwargs), self._is_good(bare, args, kwargs)
        running = _statistics(func, args, kwargs)
        if not is_good:
            if bare.removeprefix("linalg_") in FAILS:
                raise TraceError(RAISES.format(name, line_here(), here[-1].where))
            args, kwargs = self._gated(bare, args, kwargs, here[-1])
        if running:
            return args, kwargs, self._normed(func, args, kwargs, running, here[-1])
        target = before[0][0] if before[0] else None
        if is_written and kwargs.get("out") is None and isinstance(target, Tensor):
            memory = memory_of(target)
            is_fresh = all(memory in branch.fresh for branch in here)
            if not (is_fresh and is_good):
                return args, kwargs, self._write(func, target, args, kwargs, here, is_fresh)
        for one in tensors_in(before):
            self.check(one, here)
        pairs = zip(tensors_in((args, kwargs)), tensors_in(before), strict=True)
        self._given = [(one, one._version, stands_for) for one, stands_for in pairs]
        return args, kwargs

    def _write(
        self, func: Any, target: Tensor, args: Sequence[Any], kwargs: Any, here: Sequence[Branch], is_fresh: bool
    ) -> Tensor | None:
        with self.own(), self._mode:
            new = args[0].clone()
            func(new, *args[1:], **kwargs)
            if new.shape != target.shape:
                raise TraceError(WRITES.format(line_here(), here[-1].where))
            target.copy_(new if is_fresh else self.chosen(new, target, here[-1].truth))
        return None if func is torch.Tensor.__setitem__ else target

    def _normed(self, func: Any, args: Any, kwargs: Any, running: Sequence[Tensor], branch: Branch) -> Any:
        """What a norm gives that would write to running statistics, which it does where the branch is taken."""
        with self.own(), self._mode:
            given = _statistics(func, args, kwargs)  # what stands for them here
            copies = {id(one): one.clone() for one in given}
            made = func(*(copies.get(id(one), one) for one in args), **{
                name: copies.get(id(one), one) for name, one in kwargs.items()
            })  # fmt: skip
            for one, other in zip(running, given, strict=True):
                one.copy_(torch.where(branch.truth, copies[id(other)], one))
        return made

    def check(self, one: Tensor, here: Sequence[Branch]) -> None:
        """Gradients of zero go on from a branch that is not taken to what was made ahead of it: no zeros, where that is
        not finite.
        """
        branch = here[-1]
        is_ahead = memory_of(one) not in branch.fresh and not self._is_free(one)
        key = id(one), one._version
        if not (is_ahead and one.requires_grad and one.is_floating_point()) or key in branch.checked:
            return
        branch.checked.add(key)
        with self.own():
            if key not in self._bad:
                self._bad[key] = one, one.detach().isfinite().logical_not().sum()
            assert branch.own is not None
            told = NOT_FINITE.format(line_here(), branch.where)
            self._tell(told, self._bad[key][1], (branch.own.negated(), *branch.beside))

    def _refuse(self, written: Sequence[Tensor], here: Sequence[Branch]) -> None:
        for branch in here if written else ():
            if not branch.fresh.issuperset(map(memory_of, written)):
                raise TraceError(WRITES.format(line_here(), branch.where))

    def _is_good(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a function of that name gives good numbers, and gradients, whatever these are."""
        given = tensors_in((args, kwargs))
        if all(self._is_free(one) for one in given):
            return True
        if name in READS and not all(id(one) in self.places for one in tensors_in(args[1:]) if is_whole(one)):
            return False
        floats = sum(one.is_floating_point() for one in given)  # times truths is good
        return name in LOOKS or (name in ("mul", "rmul", "imul") and floats < 2)

    def _is_free(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, a buffer, or made in a branch of such alone: it is good wherever it is used."""
        return memory_of(tensor) in self.free

    def _gated(self, name: str, args: Any, kwargs: Any, branch: Branch) -> tuple[Any, Any]:
        """Arguments of a function of that name that are good where the branch is not taken, and have no gradients."""

        def gate(one: Any) -> Any:
            if not isinstance(one, Tensor) or one.dtype == torch.bool or id(one) in self.places:
                return one
            memory = memory_of(one)  # whole numbers that were good may be moved
            if (memory in branch.gated and not is_whole(one)) or (memory in self.held and self._is_free(one)):
                return one
            return self._where_taken(one, branch, 1 if not is_whole(one) or name.removeprefix("i") in DIVIDES else 0)

        return pytree.tree_map(gate, (args, kwargs))

    def _where_taken(self, one: Tensor, branch: Branch, fill: int) -> Tensor:
        with self.own():
            made = torch.where(self._of_all(branch), one, fill)
        if not is_whole(one):  # numbers that are computed of good ones need not be good
            branch.gated |= {memory_of(made)} - {None}
        return made

    @contextlib.contextmanager
    def of_rows(
        self, func: Any, name: str, args: Any, kwargs: Any, here: Sequence[Branch]
    ) -> Iterator[tuple[Any, Any]]:
        """Around a function of rows that a mask picks, with what it is called with: what is computed of rows is good
        for any, if whole tensors that stand beside them are.
        """

        running = {*map(id, _statistics(func, args, kwargs))}  # which are written to, and not read

        def gate(one: Any) -> Any:
            is_other = isinstance(one, Tensor) and one.is_floating_point() and not self._is_free(one)
            is_other = is_other and id(one) not in running
            return self._where_taken(one, here[-1], 1) if is_other else one

        if here and name not in READS and not self._is_own:
            args, kwargs = pytree.tree_map(gate, (args, kwargs))
        with self.own():
            yield args, kwargs

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, here: Sequence[Branch], of_rows: bool) -> None:
        """A function of torch gave that, of these, in these branches; call it behind every one."""
        given, gives = tensors_in((args, kwargs)), tensors_in(args[0] if func is torch.Tensor.__setitem__ else result)
        if given and all(id(one) in self.places for one in given):
            self.places |= {id(one): one for one in gives}
        if not self._is_own and not of_rows:
            for one, version, stands_for in self._given:
                if one._version != version:
                    self._refuse([stands_for], here)
                    if stands_for is not one:
                        with self.own(), self._mode:
                            stands_for.copy_(one)
            self._given = []
        memory, of_given = {*map(memory_of, gives)} - {None}, {*map(memory_of, given)}
        self.free = self.free | memory if not of_rows and all(map(self._is_free, given)) else self.free - memory
        floats = {memory_of(one) for one in given if one.is_floating_point()}
        for branch in here:
            is_gated = bool(floats) and not of_rows and branch.gated >= floats
            if is_gated:
                branch.gated |= memory
            else:
                branch.gated -= memory
            branch.fresh |= memory - (of_given - branch.fresh)


def is_whole(one: Tensor) -> bool:
    """Whether it holds whole numbers."""
    return not (one.is_floating_point() or one.is_complex() or one.dtype == torch.bool)


def _statistics(func: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """Running ones, which a norm that trains writes to."""
    trains = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", True))
    places = STATISTICS[func].items() if func in STATISTICS and trains else ()
    return tensors_in([args[at] if at < len(args) else kwargs.get(told) for at, told in places])
