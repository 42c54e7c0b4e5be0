"""Traces of a model: with the numbers that forward counts as arguments, where that can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.errors import TraceError
from autopar.trace.asked import Arguments
from autopar.trace.beside import may_be_asked
from autopar.trace.capture import Captured
from autopar.trace.capture import capture as captured_with
from autopar.trace.counted import Counting, counted_in, counting_of, may_be_counted
from autopar.trace.derivatives import Derivative
from autopar.trace.formulas import Place
from autopar.trace.installed import Rebound, attributes_in_place_of, may_be_attribute
from autopar.trace.lines import HeldInPlace
from autopar.trace.looks import MARK
from autopar.trace.modules import OF_EVERY_MODULE
from autopar.trace.names import ids_in, place_of_all
from autopar.trace.numbers import HangsOnValues
from autopar.trace.origins import tensors_in
from autopar.trace.records import make_states_known
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
    derivatives: Sequence[Derivative] = (),
    tensors: bool = True,
    arguments: Arguments | None = None,
) -> Captured:
    """As `autopar.trace.capture.capture`, of numbers that forward finds as an earlier call left them (`counted`, of
    other programs of the model; those of this one are found) too, and where `tensors` says so of tensors. Those that
    cannot be arguments, as of lists that a variable holds, too, are constants of the trace. What forward asks its
    arguments is left open where it can be, and asked at once where it cannot.
    """
    options: dict[str, Any] = {
        "training": training, "precision": precision, "every_tangent": every_tangent, "loss_alone": loss_alone,
        "device_type": device_type, "derivatives": derivatives,
    }  # fmt: skip
    arguments = arguments or Arguments()
    captured = partial(_with_attributes, model, counted, tensors)
    trace = partial(_traced, model, args, kwargs, **options)
    try:
        return captured(partial(trace, arguments=arguments))
    except TraceError as error:
        told = error
        for _ in arguments.otherwise():
            try:
                return captured(partial(trace, arguments=arguments))
            except TraceError as other:  # about something else, or about less
                if _hangs(error) and _hangs(other) and arguments.at_once:
                    told = other  # what arguments do not tell is what is in the way
        raise told from told.__cause__
    finally:
        arguments.values = {}  # which what is traced may hold, in circles


def _hangs(error: TraceError) -> bool:
    return isinstance(error.__cause__, HangsOnValues)


def _with_attributes(
    model: nn.Module, counted: Iterable[Place], tensors: bool, trace: Callable[..., Captured]
) -> Captured:
    """The trace, with buffers as attributes that forward sets to something else than a buffer may be."""
    modules, attributes = dict(model.named_modules(remove_duplicate=False)), set[Place]()
    while True:
        try:
            with attributes_in_place_of(attributes, modules):
                captured = _captured(trace, model, counted, tensors=tensors)
            captured.reads.unregistered |= attributes
            return captured
        except Rebound as error:
            more = {place for place in error.places - attributes if may_be_attribute(place, modules)}
            if not more:
                raise TraceError(str(error)) from error  # the kinds of it are for us alone
            attributes |= more
        except (HangsOnValues, HeldInPlace) as error:
            raise TraceError(str(error)) from error


def _traced(*args: Any, **kwargs: Any) -> Captured:
    """A trace, behind which gradients are computed as before: torch leaves that as it is where one ends in an error."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return captured_with(*args, **kwargs)


def _captured(trace: Callable[..., Captured], model: nn.Module, counted: Iterable[Place], *, tensors: bool) -> Captured:
    modules = dict(model.named_modules(remove_duplicate=False))

    def may_be(place: Place) -> bool:
        value = vars(modules[place[0]]).get(place[1], MISSING)
        make_states_known(value)
        there = tensors_in(value)
        return may_be_counted(value) and (tensors or not there) and not any(hasattr(one, MARK) for one in there)

    def taken(places: Iterable[Place]) -> set[Place]:
        """Those of the places that may be, each by the attribute that has all that it shares with others."""
        wholes = (place_of_all(place, modules) for place in places if may_be(place))
        return {place for place in wholes if place is not None and may_be(place)}

    first = Counting()
    counting = partial(_counting, trace, modules=modules, taken=taken)
    captured = counting(taken(counted))
    if captured is None:
        try:
            captured = trace(counted=first)
        except TraceError as error:  # of what earlier calls have left, as it may be
            places = {*first.found, *first.asked_for, *_leading_back(modules)}
            if isinstance(error, HeldInPlace):  # or to what is made of one, as torch makes constants of those
                places |= {*filter(None, first.plain.values())}
            spots = first.beside.found | (first.beside.written if isinstance(error, HangsOnValues) else set[Place]())
            captured = counting(taken(places), beside=spots, tells=bool(first.beside.found))
            if captured is None:
                raise
    noted = captured.reads.counting
    if more := noted.beside.found - {*noted.beside.spots}:
        captured = counting(noted.places, beside=more | {*noted.beside.spots}) or captured
    reads, noted = captured.reads, captured.reads.counting
    for path, name in reads.written:
        make_states_known(vars(modules[path]).get(name))
    found = {*counted_in(reads.attributes, reads.written, modules), *noted.asked_for}
    if (more := taken({*found, *noted.places})) != {*noted.places}:
        captured = counting(more, beside=noted.beside.spots) or captured
    captured.reads.counting.elsewhere = set[int]  # it holds what was traced
    return captured


def _leading_back(modules: Mapping[str, nn.Module]) -> Iterator[Place]:
    """Attributes with tensors that an earlier call has computed, and through which its backward may go."""
    for path, part in modules.items():
        for name, value in vars(part).items():
            if name not in OF_EVERY_MODULE and any(one.grad_fn is not None for one in tensors_in(value)):
                yield path, name


def _counting(
    trace: Callable[..., Captured],
    places: Iterable[Place],
    *,
    modules: Mapping[str, nn.Module],
    taken: Callable[[Iterable[Place]], set[Place]],
    beside: Iterable[Place] = (),
    tells: bool = False,
    never: frozenset[Place] = frozenset(),
) -> Captured | None:
    """The trace with these as arguments, and of those `beside` what it asks; None where there are none, or where it
    cannot be. `taken`: those of some places that may be, but for those that `never` may. `tells`: raises the TraceError
    of something else than these numbers.
    """
    again = partial(_counting, trace, modules=modules, taken=taken, tells=tells)
    beside = sorted((spot for spot in beside if may_be_asked(spot, modules)), key=repr)
    counting = counting_of(sorted(places), modules, beside)
    if not counting.are_there:
        return None
    try:
        captured = trace(counted=counting)
    except Exception as error:  # of whatever kind, for want of a number: a trace without says what else there is
        asked = counting.beside.found | (counting.beside.written if isinstance(error, HangsOnValues) else set[Place]())
        spots = {spot for spot in asked - {*beside} if may_be_asked(spot, modules)}
        more = taken({*counting.found, *counting.places}) - never
        if more != {*counting.places} or spots:
            return again(more, beside=spots | {*beside}, never=never)
        if tells and isinstance(error, TraceError) and not isinstance(error, HangsOnValues):
            raise
        captured = None
    places = counting.places
    lists = {place: {*ids_in(value)} for place, value in zip(places, counting.values(modules), strict=True)}
    elsewhere = counting.elsewhere() if any(lists.values()) else set[int]()
    alone = [place for place, numbers in lists.items() if not numbers & elsewhere]
    if len(alone) == len(places):
        return captured
    return again(alone, beside=beside, never=never.union(places) - {*alone})
