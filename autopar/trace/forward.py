"""What happens around the model's own forward while torch traces it.

torch puts the values that it traces in the place of parameters and buffers. Lists and dictionaries in which a model
holds them a second time get those values too. A trained tensor from elsewhere would become a constant: refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autopar._compat import FakeTensor, outside_modes, pytree
from autopar.errors import TraceError
from autopar.trace.ambient import inference_without_gradients
from autopar.trace.assignments import assigning
from autopar.trace.calls import flatten_inputs, with_argument
from autopar.trace.checked import checked
from autopar.trace.checks import Checks
from autopar.trace.counted import ARGUMENT, counted_from, standing
from autopar.trace.counted_index import with_counted_places
from autopar.trace.covariance import corrcoef, cov
from autopar.trace.ctc import kept_as_one
from autopar.trace.drawn_arrays import Drawn, of_drawn
from autopar.trace.eager import as_it_runs
from autopar.trace.encoders import as_torchs_encoders
from autopar.trace.flat_inputs import as_given
from autopar.trace.gradients import WITHOUT_GRADIENT, Taken
from autopar.trace.independent import refuse_modules
from autopar.trace.indices import inside
from autopar.trace.lines import caller, line_here
from autopar.trace.literals import Literals
from autopar.trace.looks import as_looks, looks_in
from autopar.trace.masked import Picked, apply, rows_of
from autopar.trace.modules import noted_on, registered, replace_tensors
from autopar.trace.numbers import HangsOnValues, Number, with_numbers
from autopar.trace.numpys import Arrays
from autopar.trace.origins import Origins, tensors_in, writes_in_place
from autopar.trace.packed import GIVEN_PACKED, LAYERS, Packing
from autopar.trace.reads import Reads
from autopar.trace.recurrent import kept_as_loops, with_states_as_given
from autopar.trace.refused import refuse, refuse_sparse
from autopar.trace.sharing import seen
from autopar.trace.sized import counted_now, of_values, takes_sizes, with_sizes
from autopar.trace.sized_by_rows import taking_numbers
from autopar.trace.standing import Standing
from autopar.trace.tables import ReadsAt, at_values, dense_lookup, one_hot, read_or_write
from autopar.trace.taken import taken_out, takes_out
from autopar.trace.tensor_notes import as_noted
from autopar.trace.values import is_torchs
from autopar.trace.windows import Windows
from autopar.trace.written_out import copied, with_condition, with_limits, written_out

REPLACED: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__deepcopy__: copied,
    nn.functional.one_hot: one_hot,
    **dict.fromkeys((torch.cov, torch.Tensor.cov), cov),
    **dict.fromkeys((torch.corrcoef, torch.Tensor.corrcoef), corrcoef),
}
ROWS = "forward returns rows that a boolean mask picks, and how many depends on values; return all rows and the mask"
TRUTHS = ("equal", "allclose", "__contains__")
LESS = (torch.lt, torch.Tensor.lt, torch.Tensor.__lt__)
REQUIRES_GRAD: Any = torch.Tensor.requires_grad
DATA: Any = torch.Tensor.data


def watch_forward(
    model: nn.Module,
    values: Mapping[str, torch.Tensor],
    sparse: Mapping[str, torch.layout],
    same: Mapping[str, str],
    notes: list[str],
    reads: Reads,
) -> None:
    """Have `model`, a copy that is only traced and gives a `Returned`, run its forward in here. `values`: what is in
    small buffers. `sparse`: buffers that forward may not read, as they are dense in the copy. `same`: as of
    `flat_inputs.as_given`. `notes`: what is to be told beside the plan comes behind them.
    """
    counting = reads.counting
    original = model.forward
    stand_for, modules = registered(model), dict(model.named_modules())
    reads.see_of_class(type(model), "forward")
    noted = {name: noted_on(value) for name, value in stand_for.items()}
    for part in model.modules():
        as_torchs_encoders(part)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = as_given(args, kwargs, same)
        now = registered(model)
        replace_tensors(model, {id(stand_for[name]): value for name, value in now.items()}, registered=False)
        replace_tensors(model, looks := as_looks(looks_in(model), now), registered=False)
        watch = _Watch({id(value) for value in now.values()}, frozenset(map(id, model.buffers())), notes, reads)
        try:
            watch.known |= set(map(id, (*tensors_in((args, kwargs)), *looks.values())))
            watch.has_buffers(now, values, sparse)
            numbers = counted_from(further := kwargs.pop(ARGUMENT, {}), counting, modules, watch.checks)
            reads.draws.begin(further, watch.checks)
            watch.registered |= set(map(id, tensors_in([*numbers.values()])))  # whose memory may be written to, too
            watch.origins.are_arguments(arguments := flatten_inputs(args, kwargs)[0], reads.asked.arguments.values)
            with (
                watch, standing(numbers, modules), taking_numbers(), assigning(),
                inference_without_gradients(), as_it_runs(reads.asked.arguments.tells),
                as_noted(now, noted, arguments, reads.asked),
            ):  # fmt: skip
                returned = original(*args, **kwargs)
                refuse_modules(modules, dict(model.named_modules()), reads.modules)
                watch.checks.sees_all()
                watch.reads_at.check(vars(returned)), watch.arrays.check()
                now_there = registered(model)
                watch.literals.may_be_written([now[name] for name in values if now_there.get(name) is not now[name]])
            if any(isinstance(value, (Picked, Standing)) for value in pytree.tree_leaves(returned)):
                raise TraceError(ROWS)
            given = {**dict(arguments), **returned.changed}
            memory = seen(returned, returned.outputs, given.items(), now, now_there)
            checks, taken = watch.checks, watch.checks.branches.tensors.counts()
            return replace(returned, checks=checks.wrong, truths=checks.truths, taken=taken, memory=memory)
        except TypeError as error:
            raise watch.checks.needed or error from None
        finally:
            replace_tensors(model, {id(value): stand_for[name] for name, value in now.items()}, registered=False)
            watch.checks.end()
            reads.draws.end()

    if counting.places or reads.draws.taken:
        forward.__signature__ = with_argument(original, ARGUMENT)  # type: ignore[attr-defined]
    model.forward = forward


class _Watch(TorchFunctionMode):
    """Sees every function of torch that forward calls. `known`: ids of parameters, buffers and arguments, and of what
    the functions gave; another tensor that requires grad is none that would be trained.
    """

    def __init__(self, known: set[int], buffers: frozenset[int], notes: list[str], reads: Reads) -> None:
        super().__init__()
        self.counting, self.beside, self.outside = reads.counting, reads.counting.beside, reads.outside
        self.known, self.registered, self.buffers = known, frozenset(known), buffers
        self.sparse: dict[int, tuple[str, torch.layout]] = {}  # by id
        self.checks = Checks(notes, reads.asked.arguments, self, (_Watch.__torch_function__, apply), Number, Picked)
        self.literals = self.checks.literals = Literals(self.beside)
        self.origins = self.checks.origins = Origins(self.checks, reads.asked)
        self.packing, self.reads_at, self.arrays = Packing(self.origins), ReadsAt(), Arrays()
        self.windows = Windows(self.checks, self.reads_at)
        self.results: list[Any] = []  # held, so that their ids stay theirs
        self.taken, self.uniform = Taken(), set[int]()  # ids of what torch.rand drew
        self.detached: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id; first itself
        self.data: dict[int, int] = {}  # id of what is detached -> id of what it is of

    def has_buffers(
        self, now: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], sparse: Mapping[str, torch.layout]
    ) -> None:
        """As of `watch_forward`. `now`: parameters and buffers, by name."""
        self.checks.branches.tensors.hold(now.values())
        self.sparse = {id(now[name]): (name, layout) for name, layout in sparse.items()}
        for name, value in values.items():
            self.literals.know(name, now[name], value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.checks:
            leaves = pytree.tree_leaves((args, kwargs))
            refuse_sparse(func, [self.sparse[id(value)] for value in leaves if id(value) in self.sparse])
            if any(isinstance(value, torch.Tensor) and self._is_from_outside(value) for value in leaves):
                args, kwargs = self._without_gradient(func, args, kwargs or {})
            args, kwargs = self.arrays.taken(func, args, kwargs, leaves)
            if any(type(value) is Drawn for value in leaves):
                return self._called(of_drawn, (func, args, kwargs or {}), {})
            if func in (torch.autograd.backward, torch.Tensor.backward):
                raise TraceError(
                    f"forward calls backward{line_here()}, and a planned step adds up gradients once, behind forward: "
                    "take them by torch.autograd.grad there"
                )
            if func is torch.autograd.grad:
                return self._gradients(args, kwargs or {})
            self.counting.sees(func, args, kwargs := kwargs or {})
            if func is torch.Tensor.requires_grad_ and id(args[0]) in self.buffers and not args[0].ndim:
                return args[0]  # a zero that losses are added to (quantizers have one): nobody reads its gradient
            if func == DATA.__set__ and self.data.get(id(args[1])) == id(args[0]):
                return None  # behind `x.data += y`
            if func == DATA.__set__ and self._may_be_set(*args):
                self.reads_at.set_anew({made for made, of in self.data.items() if of == id(args[0])})
                func, kwargs = torch.Tensor.copy_, {}
            refuse(func, args, kwargs, bool(args) and id(args[0]) in self.registered - self.buffers)
            self._let_require(func, args, kwargs)
            args, kwargs = self._as_taken(func, args, kwargs)
            func = REPLACED.get(func, func)
            if is_data := func == DATA.__get__:
                func = torch.Tensor.detach  # the same, but that autograd sees what is written to it
            made = self.packing.answer(func, args) or kept_as_one(func, args, kwargs, self.checks)
            made = made or self.windows.taken(func, args, kwargs)
            if (made := made or checked(func, args, kwargs, self.checks)) is not None:
                with self:
                    found = made()
                return self.checks.branches.given(found)
            are_rows = any(isinstance(leaf, Picked) for leaf in leaves)
            written = None if are_rows else written_out(func, args, self.checks.branches)
            if (written := kept_as_loops(func, args) or written) is not None:
                with self:
                    found = written(*args, **kwargs)
                return self.checks.branches.given(found)
            args, kwargs = self._with_places(func, args, kwargs)
            if (answer := self.beside.answer(func, args)) is not None:
                return answer
            if (known := self._of_known(func, args, kwargs)) is not None:
                return known
            if (expected := self.checks.answer(func, args)) is not None:
                return expected
            if (number := self._taken_out(func, args)) is not None:
                return number
            if any(isinstance(leaf, Number) for leaf in pytree.tree_leaves((args, kwargs))):
                return self.checks.branches.given(self._with_numbers(func, args, kwargs))
            result = self._result(func, args, kwargs)
            self._see(func, args, kwargs, result, is_data)
            self.windows.look(getattr(func, "__name__", ""), () if kwargs else args, result)
            self.results += self.taken.made_by(result, kwargs)
            return self.checks.branches.given(result)

    def _of_known(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` gives that asks tensors whose values are known; None where it asks others, or nothing. The values
        of buffers are checked in each call.
        """
        if (answer := self.literals.answer(func, args, kwargs)) is not None:
            if self.literals.asks_buffers((args, kwargs)):
                self.checks.answered(func, args, kwargs, self.literals.number(func, args, answer))
            return answer
        places = self.literals.nonzero(func, args, kwargs)
        if places is not None and self.literals.asks_buffers(args):
            self.checks.answered(None, args, {}, self.literals.known(args[0]))
        if (
            getattr(func, "__name__", "") in TRUTHS
            and (truth := self.origins.answer_by(func, args, kwargs)) is not None
        ):
            return truth
        if places is not None or not self.checks.arguments.at_once:
            return places
        counted = counted_now(func, args, kwargs)
        with self:
            return None if counted is None else counted(self.checks.known)

    def _as_taken(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of `func` as a program has them."""
        if takes_sizes(func):
            with self:  # what sizes are made of is seen
                args, kwargs = with_sizes(func, args, kwargs, self.checks.known)
        return with_limits(func, *dense_lookup(func, with_condition(func, args), kwargs))

    def _taken_out(self, func: Any, args: Any) -> Any:
        """The numbers that `func` takes out of a tensor; None where it takes none."""
        if not takes_out(func, args):
            return None
        with self:  # what they are made of is seen
            return taken_out(func, args, self.checks)

    def _gradients(self, args: Any, kwargs: Any) -> Any:
        found = self.taken.grad(*args, **kwargs)
        self.results.append(found)
        self.known |= set(map(id, tensors_in(found)))
        return found

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any, is_data: bool) -> None:
        """`is_data`: it stands for `.data`."""
        if func is torch.Tensor.detach:
            self.data[id(result)] = id(args[0])
        if is_data and id(args[0]) in self.known - self.registered:
            self.reads_at.read_data(result, args[0])
        self.counting.look(func, args, result)
        self.arrays.made(func, args, result)
        self.reads_at.look(func, args, kwargs, result)
        self.results.append(result)
        self.known |= set(map(id, tensors_in(result)))

    def _let_require(self, func: Any, args: Any, kwargs: Any) -> None:
        """Parameters train or do not train as they did before the call."""
        if func == REQUIRES_GRAD.__get__ and id(args[0]) in self.registered and not is_torchs(caller(2)):
            self.counting.asks_what_trains = True
        sets = func in (REQUIRES_GRAD.__set__, torch.Tensor.requires_grad_)
        if not sets or args[0].requires_grad == (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
            return
        if id(args[0]) not in self.registered:
            self.results.append(self.taken.let_require(args[0], not args[0].requires_grad))
        else:
            what = "buffer" if id(args[0]) in self.buffers else "parameter"
            raise TraceError(
                f"forward sets requires_grad of a {what}{line_here()}, which a program does not do; set it before "
                "the call, or detach what is computed of it"
            )

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            rows = rows_of(func, args, kwargs, self.origins)
        except TraceError:
            self.checks.arguments.is_lazy = True
            raise
        if rows is not None:
            self.checks.arguments.is_lazy = True
            if writes_in_place(getattr(func, "__name__", ""), kwargs):
                self.literals.set_by_number(tensors_in(args[:1]))
            self.checks.made(func, args, kwargs, rows, of_rows=True)
            return rows
        if func in LESS and id(args[0]) in self.uniform and isinstance(args[1], int | float) and args[1] <= 0:
            return torch.tensor(False)  # of what is drawn from [0, 1): a layer that is skipped with chance 0
        args, kwargs, *given = self.checks.branches.called(func, args, kwargs)
        if given:
            return given[0]
        name = getattr(func, "__name__", "")
        if (there := self.reads_at.by_data(name, args, kwargs)) is not None:
            with torch.no_grad():
                self._result(func, (there(), *args[1:]), kwargs)
            return args[0]
        self.reads_at.see(name, args, kwargs)
        if func is torch.Tensor.__getitem__ and self.checks.branches.here():
            args = inside(args[0], args[1], self.checks)
        if (found := at_values(func, args)) is not None:
            result = read_or_write(func, args, found)
            if len(args) == 2:
                self.reads_at.read(result, args[0])
            return result
        written = self.origins.written(func, args, kwargs)
        result = with_states_as_given(func, args, func(*args, **kwargs))
        self.origins.made(func, args, kwargs, result, written)
        self.literals.made(func, args, kwargs, result)
        self.beside.made(func, args, kwargs, result)
        self.checks.made(func, args, kwargs, result)
        if func is torch.rand and not result.ndim:
            self.uniform.add(id(result))
        self._refuse_sizes(func, result)
        return result

    def _refuse_sizes(self, func: Any, result: Any) -> None:
        """Raises HangsOnValues where the shape of what `func` gave does."""
        if any(isinstance(size, torch.SymInt) for value in tensors_in(result) for size in value.shape):
            self.checks.arguments.is_lazy = True
            raise HangsOnValues(
                (GIVEN_PACKED if caller(2) == LAYERS.co_filename else of_values(func)).format(line_here())
            )

    def _with_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        in_branch = bool(self.checks.branches.here())  # where writes are seen as such of tensors
        result = with_numbers(func, args, kwargs, self._called, *([self._called] if in_branch else []))
        if writes_in_place(getattr(func, "__name__", ""), kwargs):
            self.literals.set_by_number(tensors_in(args[:1]))
        self.beside.made(func, args, kwargs, result)
        return result

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return func(*args, **kwargs)

    def _with_places(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of `func` with what is known of an index, and of sizes, in them."""
        given = self.literals.places(func, with_counted_places(func, args))
        args, kwargs, sizes = self.literals.sizes(func, given, kwargs, self.checks.known)
        for size, number in sizes:
            if self.literals.asks_buffers(size):
                self.checks.answered(None, (size,), {}, number)
        return args, kwargs

    def _may_be_set(self, held: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether that is a buffer, or a parameter that does not train, and `value` may be what it holds."""
        is_held = id(held) in self.registered and not held.requires_grad
        return is_held and value.shape == held.shape and value.dtype == held.dtype and not value.requires_grad

    def _is_from_outside(self, value: torch.Tensor) -> bool:
        """Whether a trace cannot take it as it is."""
        return isinstance(value, DTensor) or self._is_strange(value)

    def _is_strange(self, value: torch.Tensor) -> bool:
        """Whether gradients would have to go to it, or through it, and it is none of this trace."""
        is_unknown = id(value) not in self.known and value.requires_grad
        return is_unknown and (value.is_leaf or not isinstance(value, FakeTensor))

    def _without_gradient(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Arguments of a function, of which some have a gradient that this trace does not know. Raises TraceError where
        it would go through them.
        """
        strange = [value for value in tensors_in((args, kwargs)) if self._is_strange(value)]
        name = getattr(func, "__name__", "")
        if strange and torch.is_grad_enabled() and not WITHOUT_GRADIENT.fullmatch(name):
            raise TraceError(
                f"the model reads a tensor {list(strange[0].shape)}{line_here()} that requires grad and is none of its "
                "parameters, so it would not be trained; register it (nn.Parameter, nn.ModuleList, nn.ParameterList), "
                "make it an argument of forward, or detach it"
            )
        if name == "__get__":
            return args, kwargs
        for value in tensors_in((args, kwargs)):  # torch's trace would warn of the ones, and cannot follow the others
            if id(value) not in self.detached and self._is_from_outside(value):
                with outside_modes(), torch.no_grad():
                    whole = value.full_tensor() if isinstance(value, DTensor) else value
                    self.detached[id(value)] = value, whole.detach()
                self.outside.append(value)
        return pytree.tree_map_only(torch.Tensor, lambda one: self.detached.get(id(one), (one, one))[1], (args, kwargs))
