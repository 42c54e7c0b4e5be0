"""Ctrl-C while torch traces."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt if Ctrl-C was pressed before.

    Python drops the exception where it arises in a weak reference's callback, of which tracing runs many.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None  # signals are the main thread's, and a handler of the user's stays
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
