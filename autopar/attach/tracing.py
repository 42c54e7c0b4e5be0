"""Calls in words, and warnings that a module is traced and planned again and again: correct, and slow."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.attach.batches import is_split_by_rows
from autopar.attach.prepared import OTHER_HOOKS
from autopar.trace.asked import OTHERWISE
from autopar.trace.calls import Call


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def tell_of_traces(changed: str | None, count: int) -> None:
    """Warn that something keeps changing: correct, and slow."""
    if is_first_rank():
        advice = "what changes from step to step is better an argument of forward (a number will do) or a buffer"
        if changed is not None and changed.startswith(OTHERWISE):
            advice = "leave it a tensor (torch.where for if, masks for lengths), or pad to a few lengths"
        if changed is None:
            changed = "what forward goes on by is another number that Python or numpy draws"
            advice = "draw what sets ways, places and sizes outside of forward, and pass it, or draw it of few"
        if changed == OTHER_HOOKS:
            advice = "register a hook once, in front of the loop, and let it look whether it is wanted"
        warnings.warn(
            f"the model is traced and planned for the {count}th time for calls of one kind, as {changed}; {advice}",
            stacklevel=2,
        )


def tell_of_kinds(count: int) -> None:
    """Warn of as many ways of calling it."""
    if is_first_rank():
        warnings.warn(
            f"calls of {count} kinds (shapes, arguments, modes) were traced and planned, each by itself; pad inputs to "
            "a few lengths where every batch has another",
            stacklevel=3,
        )


def told_of(call: Call, gradients: bool) -> str:
    """A call in words, equal on ranks that run one program for it: a rank's own rows where each has some."""
    own = [one.to_local() if isinstance(one, DTensor) and is_split_by_rows(one) else one for one in call.tensors]
    given = ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in own)
    return f"forward of {given or 'nothing'} {'with' if gradients else 'without'} gradients"
