"""Ctrl-C while torch traces."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn


@contextlib.contextmanager
def interruptible(*, always: bool = False) -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt if Ctrl-C was pressed before. A handler that somebody has set, or
    a signal that is ignored, stays as it is, unless `always`.

    Python drops the exception where it arises in a weak reference's callback, of which tracing runs many.
    """
    is_ours = always or signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not is_ours:
        yield lambda: None  # signals are the main thread's
        return
    pressed: list[int] = []

    def press(number: int, frame: object) -> NoReturn:
        pressed.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
