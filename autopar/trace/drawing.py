"""Numbers that forward takes from Python's or numpy's own random generator: a program would repeat them for ever."""

from __future__ import annotations

import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from autopar._compat import FakeTensorMode
from autopar.errors import TraceError
from autopar.trace.values import is_torchs

NUMPYS = f"{os.sep}numpy{os.sep}"  # in the names of its files


def refuse_drawing(model: nn.Module, call: Any, mode: FakeTensorMode) -> None:
    """Raise TraceError with the line that draws, if one does."""
    args, kwargs = call
    with mode:
        line = _line_that_draws(lambda: nn.Module.__call__(model, *args, **kwargs))
    if line is not None:
        raise TraceError(
            f"a random number that Python or numpy draws at {line} would be the same at every call; "
            "draw it with torch (torch.rand), or outside, and pass it as a tensor"
        )


def _line_that_draws(run: Callable[[], object]) -> str | None:
    """Run, and name the first line of the user's that takes a number from Python's or numpy's own random generator."""
    found: list[str] = []
    at: list[tuple[str, int]] = []
    states = [random_state()]

    def step(frame: types.FrameType, event: str, arg: Any) -> Any:
        if is_torchs(frame.f_code.co_filename) or NUMPYS in frame.f_code.co_filename or found:
            return None
        now = random_state()
        if now != states[-1] and at:
            file, number = at[-1]
            found.append(f"{file}:{number}")
        states[-1] = now
        if event == "line":
            at.append((frame.f_code.co_filename, frame.f_lineno))
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        run()
    finally:
        sys.settrace(before)
    return found[0] if found else None


def random_state() -> tuple[int, int]:
    """That of Python's and numpy's own generators, to compare."""
    name, keys, place, *_ = np.random.get_state()
    return hash(random.getstate()), hash((name, keys.tobytes(), place))  # type: ignore[union-attr]
