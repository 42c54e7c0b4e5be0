"""Copies between the memory of the device and that of the host: what `autopar.store` and `autopar.fetch` run as.

A copy is launched by `store` or `fetch` and waited for by `wait_copy`; until then nobody may read what it makes, and
what it reads is kept by the wait, which has it for an operand. On CUDA copies run on a stream of their own for each
direction, between pinned memory and the device, and a wait holds up the current stream, not the host; whoever reads
on the host what was stored calls `settle` before. On a CPU, where host and device are one, a copy is made at once, in
memory of its own: so the same program does the same things in the same order.

They are operators of torch, so that a compiler sees neither through them nor past them: the name tells two fetches of
one value apart, and the wait writes to what it waits for. A compiler may make what is stored and what the wait keeps as
two tensors, and lend out the first: compiled code stores a copy, which is kept here until the wait.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

# Address of what is being made -> when it is there, and what is copied, kept until it is waited for.
_in_flight: dict[int, tuple[torch.cuda.Event, Tensor]] = {}
_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


# Defined by their schemas: what `torch.library.custom_op` puts around a function takes the host five times as long as
# these take, and the host launches one after the other.
_operators = torch.library.Library("autopar", "FRAGMENT")
_operators.define("store(Tensor x, str name) -> Tensor")
_operators.define("store_copied(Tensor x, str name) -> Tensor")
_operators.define("fetch(Tensor x, Device device, str name) -> Tensor")
_operators.define("wait_copy(Tensor(a!) made, Tensor source, str name) -> ()")


def store(x: Tensor, name: str) -> Tensor:
    """Begin to copy a value of the device to the host."""
    return _stored(x, x)


def store_copied(x: Tensor, name: str) -> Tensor:
    """As `store`, of a copy on the device."""
    return _stored(x, x.clone() if x.is_cuda else x)


def fetch(x: Tensor, device: torch.device, name: str) -> Tensor:
    """Begin to copy a value of the host to the device."""
    made = torch.empty_like(x, device=device, pin_memory=False)
    if made.is_cuda:
        _launch(made, x, made.device, "h2d")
        return made
    return made.copy_(x)


def wait_copy(made: Tensor, source: Tensor, name: str) -> None:
    """From here on, for what is launched later, `made` is there and `source` is needed no more."""
    event, _ = _in_flight.pop(made.data_ptr(), (None, None))
    if event is not None:
        device = made.device if made.is_cuda else source.device
        torch.cuda.current_stream(device).wait_event(event)


def _fake_stored(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x, device="cpu")


def _fake_fetched(x: Tensor, device: torch.device, name: str) -> Tensor:
    return torch.empty_like(x, device=device)


def _fake_wait(made: Tensor, source: Tensor, name: str) -> None:
    return None


for _of, _fake in (
    (store, _fake_stored), (store_copied, _fake_stored), (fetch, _fake_fetched), (wait_copy, _fake_wait)
):  # fmt: skip
    _operators.impl(_of.__name__, _of, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{_of.__name__}", _fake, lib=_operators)


def settle() -> None:
    """Wait on the host until all copies that have been launched are made."""
    for stream in _streams.values():
        stream.synchronize()


def host_like(x: Tensor) -> Tensor:
    """Room on the host for a copy of `x`, laid out like it: pinned if `x` lies on a device, where that is possible.

    torch keeps pinned memory that is given back, so that a step finds again what the one before it had.
    """
    if x.is_cuda and can_pin():
        try:
            return torch.empty_like(x, device="cpu", pin_memory=True)
        except RuntimeError as error:  # the machine lets us have no more
            _note(str(error))
    return torch.empty_like(x, device="cpu", pin_memory=False)


@functools.cache
def can_pin() -> bool:
    """Whether pinned memory is to be had here."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        _note(str(error))
        return False
    return True


@functools.cache
def _note(why: str) -> None:
    told = "host memory cannot be pinned (%s); copies between device and host take longer and do not overlap"
    logging.getLogger("autopar").warning(told, why.splitlines()[0] if why else "no reason given")


def _stored(x: Tensor, source: Tensor) -> Tensor:
    """Room on the host for `x`, which `source`, with the same values, is being copied to."""
    made = host_like(x)
    if not x.is_cuda:
        return made.copy_(source)
    _launch(made, source, x.device, "d2h")
    return made


def _launch(made: Tensor, source: Tensor, device: torch.device, way: str) -> None:
    """Copy on the stream of that direction, behind all that the current stream has been given so far."""
    key = device, way
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    stream = _streams[key]
    stream.wait_stream(torch.cuda.current_stream(device))
    host = source if way == "h2d" else made
    with torch.cuda.stream(stream):
        made.copy_(source, non_blocking=host.is_pinned())
    there = torch.cuda.Event()
    there.record(stream)
    _in_flight[made.data_ptr()] = there, source
