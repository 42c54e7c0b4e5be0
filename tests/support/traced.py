"""Many plans of one model and one batch: its trace takes longer than all else, and is the same for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from autopar.attach import programs
from autopar.trace.capture import Captured


@contextmanager
def traced_once() -> Iterator[None]:
    """Within, every compile gets the first one's trace; only for copies of one model, all called in the same way."""
    real, made = programs.capture, list[Captured]()

    def first(*args: Any, **kwargs: Any) -> Captured:
        if not made:
            made.append(real(*args, **kwargs))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "capture", first)
        yield
