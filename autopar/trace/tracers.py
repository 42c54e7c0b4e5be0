"""What sees the lines of functions for us (`sys.settrace`), of which there may be several, and what it sees there."""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch.autograd.function import FunctionCtx


def context_of(frame: FrameType) -> str | None:
    """The argument of a `torch.autograd.Function` that is there to keep things in."""
    name = next(iter(frame.f_code.co_varnames), None)
    return name if isinstance(frame.f_locals.get(name or ""), FunctionCtx) else None


def is_ours(traces: Any) -> bool:
    """Whether that sees lines for us, as where forward draws; debuggers, and what measures coverage, take turns."""
    return str(getattr(traces, "__module__", "")).startswith("autopar.")


def both_of(one: Any, other: Any) -> Any:
    """What sees the lines of a function for both, of which either may not want to."""
    if one is None or other is None:
        return other if one is None else one
    wanted = [one, other]

    def both(frame: FrameType, event: str, given: Any) -> Any:
        wanted[:] = [sees and sees(frame, event, given) for sees in wanted]
        return both

    return both
