"""Traces of a model: with the numbers that forward counts as arguments, where that can be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.trace.capture import Captured
from autopar.trace.capture import capture as captured_with
from autopar.trace.counted import Place, counted_in, is_number, may_be_counted
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
    other programs of the model; those of this one are found) too, and where `tensors` says so of tensors. Where Python
    needs to know one of them, as for `range(self.step)`, all are constants of the trace.
    """
    trace = partial(
        captured_with, model, args, kwargs, training=training, precision=precision, every_tangent=every_tangent,
        loss_alone=loss_alone, device_type=device_type,
    )  # fmt: skip
    modules = dict(model.named_modules(remove_duplicate=False))
    may_be = may_be_counted if tensors else is_number
    there = [place for place in counted if may_be(vars(modules[place[0]]).get(place[1], MISSING))]
    captured = (_counting(trace, there) if there else None) or trace()
    known = captured.reads.counting.places
    found = counted_in(captured.reads.attributes, captured.reads.written, modules)
    more = [place for place in found if place not in known and may_be(vars(modules[place[0]])[place[1]])]
    return (_counting(trace, [*known, *more]) if more else None) or captured


def _counting(trace: partial[Captured], places: Iterable[Place]) -> Captured | None:
    try:
        captured = trace(counted=sorted(places))
    except Exception:  # of whatever kind, for want of a number: a trace without says what else there is
        return None
    reads = captured.reads
    has_numbers = any(isinstance(kind, type) for kind in reads.counting.kinds)
    return None if reads.counting.needed or (reads.asks_types and has_numbers) else captured
