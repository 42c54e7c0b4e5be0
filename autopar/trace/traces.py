"""Traces of a model: with the numbers that forward counts as arguments, where that can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.errors import TraceError
from autopar.trace.capture import Captured
from autopar.trace.capture import capture as captured_with
from autopar.trace.counted import Counting, counted_in, counting_of, may_be_counted, nodes_in
from autopar.trace.formulas import Place
from autopar.trace.origins import tensors_in
from autopar.trace.reads import OF_EVERY_MODULE
from autopar.trace.values import MISSING


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    precision: MixedPrecisionPolicy | None = None,
    every_tangent: bool = False,
    loss_alone: bool = False,
    device_type: str = "cpu",
    counted: Iterable[Place] = (),
    tensors: bool = True,
) -> Captured:
    """As `autopar.trace.capture.capture`, of numbers that forward finds as an earlier call left them (`counted`, of
    other programs of the model; those of this one are found) too, and where `tensors` says so of tensors. Those that
    Python needs to know, as for `range(self.step)`, are constants of the trace.
    """
    trace = partial(
        captured_with, model, args, kwargs, training=training, precision=precision, every_tangent=every_tangent,
        loss_alone=loss_alone, device_type=device_type,
    )  # fmt: skip
    modules = dict(model.named_modules(remove_duplicate=False))
    values = (value for part in model.modules() for value in vars(part).values())
    held = Counter(id(node) for value in values for _, node in nodes_in(value))

    def may_be(place: Place) -> bool:
        value = vars(modules[place[0]]).get(place[1], MISSING)
        is_one = all(held[id(node)] == 1 for _, node in nodes_in(value))  # and nothing else is the same list
        return is_one and may_be_counted(value) and (tensors or not tensors_in(value))

    first = Counting()
    captured = _counting(trace, filter(may_be, counted), modules)
    if captured is None:
        try:
            captured = trace(counted=first)
        except TraceError:  # of what earlier calls have left, as it may be
            captured = _counting(trace, filter(may_be, {*first.found, *_leading_back(modules)}), modules)
            if captured is None:
                raise
    reads = captured.reads
    found = {*counted_in(reads.attributes, reads.written, modules)} - {*reads.counting.places}
    if more := {*filter(may_be, found)}:
        return _counting(trace, more | {*reads.counting.places}, modules) or captured
    return captured


def _leading_back(modules: Mapping[str, nn.Module]) -> Iterator[Place]:
    """Attributes with tensors that an earlier call has computed, and through which its backward may go."""
    for path, part in modules.items():
        for name, value in vars(part).items():
            if name not in OF_EVERY_MODULE and any(one.grad_fn is not None for one in tensors_in(value)):
                yield path, name


def _counting(trace: partial[Captured], places: Iterable[Place], modules: Mapping[str, nn.Module]) -> Captured | None:
    """The trace with these as arguments; None where there are none, or where it cannot be."""
    if not (counting := counting_of(sorted(places), modules)).places:
        return None
    try:
        captured = trace(counted=counting)
    except Exception:  # of whatever kind, for want of a number: a trace without says what else there is
        captured = None
    there = zip(counting.places, counting.values(modules), strict=True)
    alone = {place for place, value in there if not {id(node) for _, node in nodes_in(value)} & counting.elsewhere}
    return captured if len(alone) == len(counting.places) else _counting(trace, alone, modules)
