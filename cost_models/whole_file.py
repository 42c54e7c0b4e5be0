"""Files that are never half-written, and never waited for: plans, profiles, traces and pictures go through here."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

MOST = 2**30  # bytes of a file that is read: more than any plan or profile has


def read_whole(path: str | Path) -> bytes:
    """The bytes of a file. Raises OSError where there is none, where it is too large, and where it is a pipe or a
    device, which might never answer, or never end.
    """

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        if found.st_size > MOST:
            raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, at most {MOST:,} are read", str(path))
        return file.read()


def write_whole(path: str | Path, text: Iterable[str]) -> None:
    """Write a string, or pieces of one, as UTF-8. Whoever looks at `path` sees the old file or the whole new one,
    also after a crash; links are followed. Whatever goes wrong is raised, and leaves no draft behind; a device is never
    replaced by a file.
    """
    target = Path(os.path.realpath(path))
    if target.is_char_device() or target.is_block_device():
        raise OSError(errno.EINVAL, "it is a device, not a file", str(path))
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException as error:  # an interrupt too
        if isinstance(error, OSError) and error.filename == str(draft):
            error.filename, error.filename2 = str(path), None  # nobody has heard of the draft
        draft.unlink(missing_ok=True)
        raise
