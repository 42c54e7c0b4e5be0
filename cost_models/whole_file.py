"""Files that are never half-written: plans, profiles, traces and pictures all go through here."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: str | Path, text: Iterable[str]) -> None:
    """Write a string, or pieces of one, as UTF-8. Whoever looks at `path` sees the old file or the whole new one,
    also after a crash; links are followed. Whatever goes wrong is raised, and leaves no draft behind.
    """
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:  # an interrupt too
        draft.unlink(missing_ok=True)
        raise
