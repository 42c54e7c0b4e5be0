"""Where another thread of this process is, line by line.

`sys._current_frames` is no way to ask: on Python 3.11 a frame object may collect garbage while it is made, so that
code runs and the thread that is looked at goes on; its frames are then followed where they no longer are (an endless
walk, or a segmentation fault). What faulthandler writes is read off in one go and makes no objects.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile

THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*$", re.MULTILINE)
LINE = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")  # what is not ASCII in a name


def lines_of(thread: int) -> tuple[tuple[str, int], ...]:
    """File and line of each of a thread's calls, innermost first: of the innermost 100, which is what there is.

    `thread`: what `threading.get_ident` says there. Nothing where there is no such thread (any more).
    """
    with _file() as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
        file.seek(0)
        written = file.read().decode("ascii", "replace")
    headers = list(THREAD.finditer(written))
    ends = [header.start() for header in headers[1:]] + [len(written)]
    for header, end in zip(headers, ends, strict=True):
        if int(header[1], 16) == thread:
            return tuple((_plain(file), int(line)) for file, line in LINE.findall(written, header.end(), end))
    return ()


def _file():
    """Memory where there are files of memory: a disk may be full."""
    return os.fdopen(os.memfd_create("stacks"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _plain(name: str) -> str:
    return ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), name)
