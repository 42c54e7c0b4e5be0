"""Where another thread of this process is, line by line.

Two ways to ask do not hold. To follow its frames while it runs: on Python 3.11 a frame object may collect garbage while
it is made, so that other code runs and the thread goes on, and its frames are looked for where they no longer are (an
endless walk, or a segmentation fault). To let faulthandler write where all threads are: it reads threads without a
lock, while libraries make new ones. So frames are followed with no garbage collected meanwhile.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTS_ANYWHERE = sys.version_info < (3, 12)  # later ones collect garbage between instructions only
_one_at_a_time = threading.Lock()  # or the first that is through would let the garbage of the others' walk be collected


def lines_of(thread: int) -> tuple[tuple[str, int], ...]:
    """File and line of each of a thread's calls, innermost first. `thread`: what `threading.get_ident` says there.

    Nothing where there is no such thread (any more).
    """
    found: list[tuple[str, int]] = []
    with _one_at_a_time, _no_collection():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            found.append((frame.f_code.co_filename, frame.f_lineno or 0))
            frame = frame.f_back
    return tuple(found)


@contextmanager
def _no_collection() -> Iterator[None]:
    """For some microseconds. Who turns collection off just then finds it on, as if it had been done before."""
    if not (COLLECTS_ANYWHERE and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
