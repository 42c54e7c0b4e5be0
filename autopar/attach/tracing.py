"""Warnings that a module is traced and planned again and again: correct, and slow."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from autopar.attach.prepared import OTHER_HOOKS
from autopar.trace.asked import OTHERWISE


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
