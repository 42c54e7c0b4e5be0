"""Ctrl-C as a wish to stop soon, with what is known by then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def until_pressed(first: Callable[[], None] = lambda: None) -> Generator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C was pressed. `first` is called at once when it is. Pressed twice, it is
    the usual KeyboardInterrupt.

    Beside the main thread, whose signals they are, it says no.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)
        first()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
