"""What a call of a model depends on besides its arguments: torch's autocast and its default dtype.

A program has the casts of the autocast under which it was traced, and the dtypes that the model's factories took. It
runs without autocast, and belongs to calls under the same `ambient_state` only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autopar.trace.lines import TraceError, line_of_node

AutocastState = tuple[tuple[str, bool, str], ...]


def autocast_state() -> AutocastState:
    """(device type, whether autocast is on for it, the dtype it casts to) of the CPU and of the accelerator here."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple((device, torch.is_autocast_enabled(device), _dtype_of(device)) for device in devices)


AmbientState = tuple[str, AutocastState]


def ambient_state() -> AmbientState:
    """The default dtype, and `autocast_state`: two calls under different ones are calls of different programs."""
    return str(torch.get_default_dtype()).removeprefix("torch."), autocast_state()


def _dtype_of(device: str) -> str:
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


@contextlib.contextmanager
def autocast_as(state: AutocastState) -> Iterator[None]:
    """Within it autocast is as `state` says, without its cache of casted weights: what is traced may not come from it,
    nor be found in it later.
    """
    before, cached = autocast_state(), torch.is_autocast_cache_enabled()
    _set(state, cache=False)
    try:
        yield
    finally:
        _set(before, cache=cached)


@contextlib.contextmanager
def ambient_as(state: AmbientState) -> Iterator[None]:
    """Within it the default dtype and autocast are as `state` says."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, state[0]))
    try:
        with autocast_as(state[1]):
            yield
    finally:
        torch.set_default_dtype(before)


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Within it no device has autocast: what a program computes in stands in it."""
    state = autocast_state()
    if not any(enabled for _, enabled, _ in state):
        return contextlib.nullcontext()
    return autocast_as(tuple((device, False, dtype) for device, _, dtype in state))


def autocast_for(device: str) -> AutocastState:
    """What a model that will run on `device` is traced under. It is traced on the CPU, where another device's autocast
    does nothing and the CPU's is that of the program. Raises TraceError for autocast of another device: it casts other
    operators than the CPU's does.
    """
    state = autocast_state()
    if device == "cpu":
        return state
    if torch.is_autocast_enabled(device):
        _refuse(device, line="")
    return tuple((other, False, dtype) for other, _, dtype in state)


def check_regions(module: torch.fx.GraphModule, device: str) -> None:
    """Raises TraceError where a traced model has an autocast of its own, which would not do on `device` what it does
    here.
    """
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if str(node.target) == "wrap_with_autocast" and device != "cpu" and node.args[2]:
                region: Any = part.get_submodule(str(node.args[4].target))
                _refuse(device, next(filter(None, map(line_of_node, region.graph.nodes)), ""))


def insert_autocast(module: torch.fx.GraphModule, state: AutocastState) -> None:
    """Have an exported module switch autocast on as `state` says while it runs, and off at its end: its backward, which
    is traced behind it, has none.
    """
    (output,) = module.graph.find_nodes(op="output")
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    for device, enabled, dtype in state:
        if enabled:
            with module.graph.inserting_before(first):
                module.graph.call_function(torch.set_autocast_dtype, (device, getattr(torch, dtype)))
                module.graph.call_function(torch.set_autocast_enabled, (device, True))
            with module.graph.inserting_before(output):
                module.graph.call_function(torch.set_autocast_enabled, (device, False))
    module.recompile()


def _refuse(device: str, line: str) -> None:
    raise TraceError(
        f"autocast is on{line}, and models are traced on the CPU, whose autocast casts other operators than that of "
        f"{device}: call the model without it, and give autopar.compile precision=MixedPrecisionPolicy(param_dtype=...)"
    )


def _set(state: AutocastState, *, cache: bool) -> None:
    for device, enabled, dtype in state:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, getattr(torch, dtype))
    torch.set_autocast_cache_enabled(cache)


@contextlib.contextmanager
def distributions_as_they_come() -> Iterator[None]:
    """torch.distributions look at the values of their arguments, which a trace does not have: not within here."""
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)
