"""What a call of a model depends on besides its arguments: torch's autocast and its default dtype.

A program has the casts of the autocast under which it was traced, and the dtypes that the model's factories took. It
runs without autocast, and belongs to calls under the same `ambient_state` only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autopar.errors import TraceError
from autopar.trace.lines import line_of_node

GIVE_PRECISION = 'give precision="bf16" (--precision bf16)'
AutocastState = tuple[tuple[str, bool, str], ...]


def autocast_state() -> AutocastState:
    """(device type, whether autocast is on for it, the dtype it casts to) of the CPU and of the accelerator here, or of
    a GPU for which a model is traced without having one.
    """
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu", "cuda" if accelerator is None else accelerator.type)
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
    """The autocast that is of account for a model that will run on `device`: that device's, and no other's."""
    return tuple((other, enabled and other == device, dtype) for other, enabled, dtype in autocast_state())


@contextlib.contextmanager
def autocast_as_asked(device: str) -> Iterator[None]:
    """torch.autocast of a GPU switches itself off where there is none, and plans for GPUs are searched where there is
    none. Within, it is as the model asks for it.
    """
    if device != "cuda" or torch.cuda.is_available():
        yield
        return
    original = torch.autocast.__init__

    def as_asked(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:  # fmt: skip
        original(self, device_type, dtype, enabled and device_type != "cuda", cache_enabled)
        self._enabled = enabled if device_type == "cuda" else self._enabled

    torch.autocast.__init__ = as_asked  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


def has_autocast(module: torch.fx.GraphModule, device: str) -> bool:
    """Whether an exported model has regions of autocast that are on, for a device that is not the CPU it is traced on:
    those of that device mean something else there, and those of the CPU nothing.
    """
    return device != "cpu" and any(
        str(node.target) == "wrap_with_autocast" and node.args[2]
        for part in module.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    )


def check_device(module: torch.fx.GraphModule, device: str) -> None:
    """Raises TraceError where autocast is on for a device whose casts are not known here."""
    if device in ("cpu", "cuda"):
        return
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if str(node.target) == "wrap_with_autocast" and node.args[2] and node.args[0] == device:
                region: Any = part.get_submodule(str(node.args[4].target))
                _refuse(device, next(filter(None, map(line_of_node, region.graph.nodes)), ""))
    if torch.is_autocast_enabled(device):
        _refuse(device, line="")


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
        f"{device}: call the model without it, and {GIVE_PRECISION}"
    )


def _set(state: AutocastState, *, cache: bool) -> None:
    for device, enabled, dtype in state:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, getattr(torch, dtype))
    torch.set_autocast_cache_enabled(cache)


@contextlib.contextmanager
def one_tf32_setting() -> Iterator[None]:
    """torch.export reads whether cuDNN may use TF32 in the older way, which raises where convolutions and recurrent
    layers are set apart in the newer one. A trace does not hang on it: within here they are set alike.
    """
    cudnn: Any = torch.backends.cudnn
    try:
        _ = cudnn.allow_tf32
    except RuntimeError:
        before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
        cudnn.allow_tf32 = before[0] == "tf32"
        try:
            yield
        finally:
            cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before
    else:
        yield


@contextlib.contextmanager
def distributions_as_they_come() -> Iterator[None]:
    """torch.distributions look at the values of their arguments, which a trace does not have: not within here."""
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)


@contextlib.contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Inside, code within `torch.inference_mode()` is traced as within `torch.no_grad()`: exported programs have no
    regions of inference, and gradients would go through what is in there.
    """
    kind: Any = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def begins(self: Any) -> None:
        self.without = torch.no_grad() if self.mode else contextlib.nullcontext()
        self.without.__enter__()

    def ends(self: Any, *error: Any) -> None:
        self.without.__exit__(*error)

    kind.__enter__, kind.__exit__ = begins, ends
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave
