"""Sequences of several lengths, packed for recurrent layers (`torch.nn.utils.rnn`): how many steps there are in all
depends on values, which a program cannot.

In a trace a `PackedSequence` has the padded batch, its steps in front, as rows that a mask picks (`Picked`): of all
steps those that a sequence has. Layers run over all of them, and nothing of what lies behind a sequence reaches
anybody. Rows stay in the order of the batch, as no layer needs another: within torch's functions what is sorted by
length, and sorted back, is not. The order itself is there for who asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from autopar.errors import TraceError
from autopar.trace.lines import line_here
from autopar.trace.masked import Picked
from autopar.trace.origins import Origins
from autopar.trace.recurrent import FUNCTIONS, is_loop, layers_of
from autopar.trace.together import DRAWN

PACKS, PADS, LAYERS = (
    function.__code__ for function in (rnn.pack_padded_sequence, rnn.pad_packed_sequence, nn.RNNBase.permute_hidden)
)
NAMES = frozenset((
    "sort", "empty_like", "scatter_", "to", "cpu", "index_select", "__getitem__", "_pack_padded_sequence",
    "_pad_packed_sequence", *(function.__name__ for function in FUNCTIONS),
))  # fmt: skip
NOT_AS_MANY = "pack_padded_sequence{} was given lengths of shape {} for a batch of {}: give one for each sequence"
NO_LENGTHS = (
    "pack_padded_sequence{} was given a length that is less than 1, or more than the {} steps of its batch: leave such "
    "sequences out, or give lengths that fit"
)
NOT_SORTED = (
    "pack_padded_sequence{} was told that lengths are sorted, the longest first (enforce_sorted=True), and they are "
    "not: sort the batch, or pass enforce_sorted=False"
)
OF_ANOTHER = (
    "a PackedSequence{} is put together of rows of one and sizes or indices of another, or without the sorted_indices "
    "and unsorted_indices that it was packed with: pass on all of them (packed._replace(data=...))"
)
SHORTER = (
    "pad_packed_sequence{} gives as many steps as the longest sequence of a batch has, a program always {}, and no "
    "sequence has so many: pass total_length=, or batches that are no longer than their longest sequence"
)
GIVEN_PACKED = (
    "a recurrent layer reads a PackedSequence{} that forward has not packed, and how many rows its steps have depends "
    "on values: give the model the padded batch and its lengths, and pack them in forward"
)
NO_LOOP = (
    "packed sequences reach a recurrent layer{} with projections (proj_size), whose last states are not known then: "
    "give it the padded batch"
)


class Key(NamedTuple):
    """Whose rows they are: of lengths of that number, so many steps, and sequences, which came sorted by length."""

    lengths: int
    steps: int
    sequences: int
    is_sorted: bool


class Packing:
    """What one forward packs."""

    def __init__(self, origins: Origins) -> None:
        self.origins, self.checks = origins, origins.checks
        self.orders: dict[int, tuple[Tensor, int]] = {}  # by id; and the number of the lengths that it is by
        self.sizes: dict[int, tuple[Tensor, Any]] = {}  # by id; what `batch_sizes` is, and the key of its rows

    def answer(self, func: Any, args: Sequence[Any]) -> Callable[[], Any] | None:
        """What gives what `func` gives where that has to do with packed sequences; None: it has not."""
        if (name := getattr(func, "__name__", "")) not in NAMES:
            return None
        frame = sys._getframe(2)
        code, is_order = frame.f_code, any(id(one) in self.orders for one in args[1:] if isinstance(one, Tensor))
        is_torchs = code.co_filename in (PACKS.co_filename, LAYERS.co_filename)
        match name:
            case "sort" if code is PACKS:
                return lambda: (args[0], self._order(args[0]))
            case "to" | "cpu" | "scatter_" if id(args[0]) in self.orders and is_torchs:
                return lambda: args[0]
            case "empty_like" if id(args[0]) in self.orders and is_torchs:
                return lambda: self._is_order(args[0].argsort(), self.orders[id(args[0])][1])  # which is written next
            case "index_select" if is_order and code is PADS:
                return lambda: args[0].contiguous()
            case "index_select" | "__getitem__" if is_order and is_torchs:
                return lambda: args[0]
            case "__getitem__" if id(args[0]) in self.sizes and _is_zero(args[1]):
                return lambda: self.sizes[id(args[0])][1].sequences
            case "_pack_padded_sequence":
                is_sorted = code is not PACKS or frame.f_locals["enforce_sorted"]
                return lambda: self._packed(*args, is_sorted=is_sorted)
            case "_pad_packed_sequence" if _is_packed(args[0]):
                is_pads = code is PADS
                self._check(args[0], args[1], frame.f_locals["sequence"].unsorted_indices if is_pads else None)
                is_as_long = not is_pads or frame.f_locals["total_length"] is None
                return lambda: self._padded(*args, is_as_long=is_as_long)
            case _ if func in FUNCTIONS and _is_packed(args[0]):
                self._check(args[0], args[1], frame.f_locals.get("sorted_indices"))
                return lambda: self._layers(func, *args)
            case _ if func in FUNCTIONS and isinstance(args[3], list | tuple):
                raise TraceError(GIVEN_PACKED.format(line_here()))
            case _:
                return None

    def _order(self, lengths: Tensor) -> Tensor:
        return self._is_order(lengths.sort(descending=True)[1], self.origins.of(lengths))

    def _is_order(self, order: Tensor, number: int) -> Tensor:
        self.orders[id(order)] = order, number
        return order

    def _check(self, data: Picked, sizes: Tensor, order: Tensor | None) -> None:
        """Raises TraceError where rows, sizes and order are not of one packed batch."""
        key: Key = data.key
        _, of_sizes = self.sizes.get(id(sizes), (None, None))
        number = None if order is None else self.orders.get(id(order), (None, -1))[1]
        if of_sizes != key or number != (None if key.is_sorted else key.lengths):
            raise TraceError(OF_ANOTHER.format(line_here()))

    def _packed(self, input: Tensor, lengths: Tensor, batch_first: bool, is_sorted: bool) -> tuple[Picked, Tensor]:
        x = input.transpose(0, 1) if batch_first else input
        if lengths.shape != x.shape[1:2]:
            raise TraceError(NOT_AS_MANY.format(line_here(), list(lengths.shape), x.shape[1]))
        lengths = lengths.to(x.device)
        mask = torch.arange(len(x), device=x.device).unsqueeze(1) < lengths
        wrong = (lengths < 1) | (lengths > len(x))
        self.checks.add(NO_LENGTHS.format(line_here(), len(x)), wrong)
        if is_sorted and len(lengths) > 1:
            self.checks.add(NOT_SORTED.format(line_here()), lengths[:-1] < lengths[1:])
        sizes = mask.sum(1).cpu()
        key = Key(self.origins.of(lengths), len(x), len(lengths), is_sorted)
        self.sizes[id(sizes)] = sizes, key
        rows = Picked(x, mask, key, self.origins)
        return rows.like(rows.kept()), sizes

    def _padded(
        self, data: Picked, batch_sizes: Tensor, batch_first: bool, padding: float, steps: int, is_as_long: bool
    ) -> tuple[Tensor, Tensor]:
        lengths, here = data.mask.sum(0), len(data.mask)
        longest = self.origins.answer_of(torch.max, data.key.lengths) if is_as_long else None
        if longest is not None and longest <= here:
            data, steps = type(data)(data.dense[:longest], data.mask[:longest], data.key, self.origins), longest
        elif is_as_long:
            self.checks.add(SHORTER.format(line_here(), here), lengths.max() != here)
        made = data.kept(fill=padding)
        if steps > here:
            made = functional.pad(made, (0, 0) * (made.ndim - 1) + (0, steps - here), value=padding)
        return made.transpose(0, 1) if batch_first else made, lengths.cpu()

    def _layers(
        self, function: Any, data: Picked, batch_sizes: Tensor, hx: Any, weights: list[Tensor], *options: Any
    ) -> Any:
        """`torch.lstm` and its like, of packed sequences (their arguments)."""
        _, layers, dropout, train, bidirectional = options
        if not is_loop(len(weights) // (layers * (2 if bidirectional else 1))):
            raise TraceError(NO_LOOP.format(line_here()))
        if dropout and train and layers > 1 and DRAWN not in self.checks.notes:
            self.checks.notes.append(DRAWN)
        made, *ends = layers_of(function, data.dense, hx, weights, *options, mask=data.mask)
        return data.like(made), *ends


def _is_zero(index: Any) -> bool:
    return isinstance(index, int) and not index


def _is_packed(data: Any) -> bool:
    return isinstance(data, Picked) and isinstance(data.key, Key)
