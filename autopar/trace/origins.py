"""Which tensors of a forward are one value computed twice: the masks of `x[y != -100]` and `y[y != -100]`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Protocol
from weakref import ref

import torch
from torch.nn import functional

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.asked import Asked, Making, Many, Ref, Slice, again, numbers_in
from autopar.trace.lines import line_here
from autopar.trace.sharing import has_storage, storage_of

_PURE = """
    eq ne lt le gt ge and or xor invert logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not
    getitem view reshape flatten unsqueeze squeeze transpose permute contiguous to bool float double long int detach
    any all sum isnan isinf isfinite expand expand_as abs add sub mul div truediv argmax max min
    radd rsub rmul rtruediv rfloordiv rmod rpow floordiv mod pow neg round floor ceil trunc sqrt int short
    floor_divide true_divide remainder fmod clamp clamp_min clamp_max maximum minimum where masked_fill argmin sort
    argsort cumsum cumprod diff flip roll isin bucketize searchsorted gather index_select select narrow take amax amin
    aminmax mean prod count_nonzero cat concat stack unbind split chunk tensor arange full zeros ones eye zeros_like
    ones_like full_like new_zeros new_ones new_full tril triu repeat tile repeat_interleave diag diagonal bincount t
    scatter scatter_add index_add index_fill topk outer type_as movedim swapaxes cpu
    clone pad half bfloat16 byte clip hstack vstack ravel unflatten view_as broadcast_to exp log log2 log10 sigmoid
    softmax log_softmax sin cos tan tanh relu norm std var median quantile logsumexp matmul mm bmm einsum dot
    logical_xor lshift rshift sign square isclose nan_to_num nansum nanmean cummax cummin kthvalue new_tensor meshgrid
    one_hot scatter_reduce interpolate contains equal allclose type swapdims index_put erf reciprocal rsqrt
"""
PURE = frozenset(_PURE.split())  # they give the same again from the same
_PARTS = "getitem select narrow view squeeze unsqueeze unbind chunk split t transpose permute detach diagonal"
PARTS = frozenset(_PARTS.split())  # they lie in the memory of what they are made of
EMPTY = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, torch.Tensor.new_empty: torch.Tensor.new_zeros}
WRITES = frozenset(("setitem", "fill", "fill_diagonal", "zero", "copy", "index_copy", "masked_scatter"))
SHAPES = frozenset(("view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "detach"))
# Functions that write to some of their arguments, and do not say so: where those stand, and their names.
FIRST, SECOND = {1: "running_mean", 2: "running_var"}, {3: "running_mean", 4: "running_var"}
STATISTICS = {
    functional.batch_norm: FIRST, functional.instance_norm: FIRST,
    torch.batch_norm: SECOND, torch.instance_norm: SECOND, torch.native_batch_norm: SECOND,
}  # fmt: skip


def writes_in_place(name: str, kwargs: Any) -> bool:
    """Whether a function of torch of that name writes to its first argument, or to what it is given as `out`."""
    if name.startswith("__"):  # `__iadd__` is `__add__` in place; `__invert__` and `__index__` are nothing's
        return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))
    return name.endswith("_") or kwargs.get("out") is not None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, in whatever containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Looks(Protocol):
    """What is looked at in each call (`autopar.trace.checks.Checks`)."""

    notes: list[str]
    branches: Any
    number: Any  # of a tensor

    def add(self, told: str, wrong: torch.Tensor) -> None: ...

    def length(self, count: torch.Tensor, rows: int | None, frame: Any) -> Any: ...

    def is_count(self, number: torch.Tensor, rows: int, mask: torch.Tensor) -> None: ...

    def ask_for_rows(self, some: torch.Tensor, rows: int, frame: FrameType) -> bool: ...

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None: ...


def memory_of(tensor: torch.Tensor) -> int | None:
    """Which memory a tensor lies in. None: that is not known, as inside `torch.vmap`."""
    try:
        return storage_of(tensor) if has_storage(tensor) else None
    except NotImplementedError:
        return None


def _behind(write: Any, part: Sequence[Making], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What a tensor is behind a write to that part of it."""
    made = here = tensor.clone()
    for func, given, named, place in part:
        here = func(here, *again(given, {}), **dict(again(named, {})))
        here = here if place is None else here[place]
    write(here, *args, **kwargs)
    return made


class Origins:
    """Numbers of values: equal ones are the same function of the same. What is written to in place forgets them all.
    `checks`: what is looked at in each call, and the notes of the plan. `asked`: gets to know of what each is made.
    """

    def __init__(self, checks: Looks, asked: Asked) -> None:
        self.checks, self.asked = checks, asked
        self._by_id: dict[int, int] = {}
        self._versions: dict[int, int] = {}  # as they were then: some functions write where their name does not say so
        self._in_memory: dict[int | None, dict[int, torch.Tensor]] = {}  # which of them lie in a memory
        self._by_making: dict[Any, int] = {}
        self._next = 0
        self._with_array = list[tuple[int | None, ref[Any]]]()  # memories, and arrays of what is in them
        self._held: list[Any] = []  # so that their ids stay theirs

    def of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor, a new one where nothing is known of it."""
        if not self._is_known(tensor):
            number = self._new()
            self._is_number(tensor, number)
            if type(tensor) is torch.Tensor:  # of the user's, and none of the trace: a program is of what is in it
                self.asked.constants[number] = tensor
        return self._by_id[id(tensor)]

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._by_id and self._versions[id(tensor)] == tensor._version

    def rows(self, mask: torch.Tensor) -> int:
        """The number of a mask, which is that of the one that it is another shape of: they pick the same rows."""
        number = self.of(mask)
        while number in self.asked.makings:
            func, args, _, _ = self.asked.makings[number]
            if getattr(func, "__name__", "") not in SHAPES or not isinstance(args.parts[0], Ref):
                break
            number = args.parts[0].number
        return number

    def truths(self, values: torch.Tensor) -> torch.Tensor:
        """Which of them are not zero."""
        if values.dtype in (torch.bool, torch.uint8):
            return values
        made = values != 0
        self.made(torch.ne, (values, 0), {}, made)
        return made

    def is_argument(self, tensor: torch.Tensor, path: str) -> None:
        self.asked.roots[self.of(tensor)] = path

    def are_arguments(self, leaves: Iterable[tuple[str, Any]], values: Mapping[str, torch.Tensor]) -> None:
        """`leaves`: those of a call, by path. `values`: what is in those that forward may ask."""
        for path, leaf in leaves:
            if path in values and leaf.dtype == values[path].dtype:
                self.is_argument(leaf, path)

    def answer(self, tensor: torch.Tensor) -> Any:
        """What is in a tensor of whole numbers or truths that is made of arguments alone, in the call that is traced;
        None where nobody knows. The program is one of calls in which it is the same.
        """
        if tensor.is_floating_point() or tensor.is_complex() or not self._is_known(tensor):
            return None
        return self.asked.answer(self._by_id[id(tensor)])

    def given(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """The number of a tensor that is made of arguments alone, and what is in it; None where nobody knows."""
        number = self._by_id[id(tensor)] if self._is_known(tensor) else None
        value = None if number is None else self.asked.give(number)
        return None if number is None or value is None else (number, value)

    def answer_of_draws(self, tensor: torch.Tensor, values: Mapping[str, torch.Tensor]) -> Any:
        """As `answer`, of what is made of these, by path: of arguments, and of what is drawn outside of torch."""
        if tensor.is_floating_point() or tensor.is_complex() or not self._is_known(tensor):
            return None
        return self.asked.answer_of_draws(self._by_id[id(tensor)], values)

    def later(self, tensor: torch.Tensor, paths: Collection[str]) -> int | None:
        """The number of a tensor that is made of arguments, and of what lies at these paths, if it is."""
        number = self._by_id[id(tensor)] if self._is_known(tensor) else None
        return number if number is not None and self.asked.give_later(number, paths) else None

    def answer_by(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Likewise, what a function gives that gives a truth: `torch.equal`, `in`."""
        told = self._told_all(func.__name__.strip("_"), args, kwargs)
        return None if told is None else self.asked.answer(self._made_by(func, told, None))

    def answer_of(self, func: Any, number: int) -> Any:
        """Likewise, what a function gives of such a tensor, by its number."""
        told = func.__name__, Many(False, (Ref(number),)), Many(False, ())
        return self.asked.answer(self._made_by(func, told, None))

    def _is_number(self, tensor: torch.Tensor, number: int) -> None:
        self._by_id[id(tensor)], self._versions[id(tensor)] = number, tensor._version
        self._in_memory.setdefault(memory_of(tensor), {})[id(tensor)] = tensor

    def hold(self, value: Any) -> None:
        self._held.append(value)

    def written(self, func: Any, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, int]]:
        """The numbers of what the first argument will be behind a write of `func` to it, and of all that it is a part
        of, or that are parts of that; call it before. Of others nobody knows.
        """
        name = str(getattr(func, "__name__", func))
        known = name.strip("_").removeprefix("i" * name.startswith("__i"))
        if kwargs.get("out") is not None or not writes_in_place(name, kwargs) or known not in PURE | WRITES:
            return []
        there = self._in_memory.get(memory_of(args[0]), {}).values()
        numbers = {self._by_id[id(one)]: one for one in there if self._is_known(one)}
        number, whole, part = self.of(args[0]), args[0], list[Making]()
        for inside, steps in self._inside(number):
            if inside in numbers:
                number, whole, part = inside, numbers[inside], steps
        told = self._told_all(f"behind {name}", (whole, *args[1:]), kwargs)
        if told is None:
            return []
        behind = self._made_by(partial(_behind, func, tuple(part)), (tuple(part), *told), None)
        found = [(whole, behind)]
        for one, own in [(one, self._by_id[id(one)]) for one in there if self._is_known(one)]:
            for inside, steps in self._inside(own):
                if inside == number:
                    found.append((one, self._again_of(behind, steps)))
        return found

    def _inside(self, number: int) -> Iterator[tuple[int, list[Making]]]:
        """All values that this is a part of, the nearest first, and how it is made of each."""
        steps = list[Making]()
        while number in self.asked.makings:
            func, args, kwargs, place = self.asked.makings[number]
            whole, *given = args.parts or (None,)
            if not isinstance(whole, Ref) or getattr(func, "__name__", "").strip("_") not in PARTS:
                return
            if [*numbers_in(Many(True, (*given, kwargs)))]:  # places that are values themselves
                return
            number, steps = whole.number, [(func, Many(False, tuple(given)), kwargs, place), *steps]
            yield number, steps

    def _again_of(self, number: int, steps: list[Making]) -> int:
        """The number of what is made so of that value."""
        for func, given, kwargs, place in steps:
            told = func.__name__.strip("_"), Many(False, (Ref(number), *given.parts)), kwargs
            number = self._made_by(func, told, place)
        return number

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, written: Any = ()) -> None:
        """`func` gave `result`; call it behind every function of torch. `written`: as that says of it."""
        name = str(getattr(func, "__name__", func))
        if writes_in_place(name, kwargs):
            self.forget(tensors_in((args[:1], kwargs.get("out"))))
            for one, number in written:
                self._is_number(one, number)
        elif func in STATISTICS:
            places = STATISTICS[func].items()
            self.forget(tensors_in([args[place] if place < len(args) else kwargs.get(told) for place, told in places]))
        elif name.strip("_") in PURE or func in EMPTY:
            made = list(result) if isinstance(result, tuple | list) else [result]
            if not all(isinstance(one, torch.Tensor) for one in made) or any(
                one is other for one in made for other in args
            ):
                return
            told = self._told_all(name.strip("_"), args, kwargs)
            for place, one in enumerate(made if told is not None else ()):
                number = self._made_by(EMPTY.get(func, func), told, None if one is result else place)
                self._is_number(one, number)

    def _told_all(self, name: str, args: Any, kwargs: Any) -> tuple[str, Many, Many] | None:
        """What a function is given, by its name; None where that cannot be compared."""
        told = name, self._told(args), self._told(tuple(sorted(kwargs.items())))
        try:
            hash(told)
        except TypeError:
            return None
        return told

    def _made_by(self, func: Any, told: Any, place: int | None) -> int:
        """The number of what `func` gives, at that place where it gives several."""
        if (told, place) not in self._by_making:
            self._by_making[told, place] = self._new()
            self.asked.makings[self._next] = func, *told[-2:], place
        return self._by_making[told, place]

    def has_array(self, tensor: torch.Tensor, array: Any) -> None:
        """What is in a tensor is in that one of numpy's, too, which does not see what is written to the tensor."""
        self._with_array.append((memory_of(tensor), ref(array)))

    def forget(self, written: Sequence[torch.Tensor]) -> None:
        """These were written to in place: what lies in their memory has other values now. Raises TraceError where an
        array of numpy's lies there.
        """
        memories = {*map(memory_of, written)}
        if any(memory in memories and array() is not None for memory, array in self._with_array):
            raise TraceError(
                f"forward writes to a tensor{line_here()} whose array (.numpy()) it has taken, and the array would not "
                "see it: take a copy (.numpy().copy()), or ask behind the write"
            )
        for memory in self._in_memory if None in memories else {None, *memories}:
            for one in self._in_memory.get(memory, ()):
                self.asked.constants.pop(self._by_id.pop(one, 0), None)

    def _told(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self.of(value))
        if isinstance(value, list | tuple):
            return Many(isinstance(value, list), tuple(map(self._told, value)))
        if isinstance(value, slice):
            return Slice(self._told(value.start), self._told(value.stop), self._told(value.step))
        return type(value), value

    def _new(self) -> int:
        self._next += 1
        return self._next
