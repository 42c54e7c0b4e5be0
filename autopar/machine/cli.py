"""What the command lines of autopar share: how bad arguments are told, and exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Collection, Generator
from pathlib import Path
from typing import NoReturn

from autopar.errors import BadArgument

BAD_ARGUMENTS, INTERRUPTED = 2, 130


class Parser(argparse.ArgumentParser):
    """Raises BadArgument where argparse would print its usage and exit."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog, description=description, epilog=epilog, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        raise BadArgument(f"{message}; see {self.prog} --help")


def writable(path: str, flag: str, read: Collection[str] = ()) -> Path:
    """The file to write, of which it is known before the work begins that it can be written. `read`: what the command
    reads, whether there is such a file or not; that is not overwritten.
    """
    if not path:
        raise BadArgument(f"{flag} '' names no file; write for example {flag} FILE")
    target = Path(path).absolute()
    if not target.parent.is_dir():
        raise BadArgument(f"folder {target.parent} of {flag} {path} does not exist; make it first")
    if target.is_dir():
        raise BadArgument(f"{flag} {path} is a folder; name a file in it")
    if any(same_file(path, one) for one in read if one):
        raise BadArgument(f"{flag} {path} is a file that this command reads, and would be overwritten; name another")
    if not os.access(target.parent, os.W_OK):
        raise BadArgument(f"folder {target.parent} of {flag} {path} cannot be written to; choose another")
    return target


def same_file(one: str | Path, other: str | Path) -> bool:
    """Whether both are one file, however it is written: over links, and over `..`."""
    return os.path.realpath(one) == os.path.realpath(other)


@contextlib.contextmanager
def writing(path: str | Path) -> Generator[None]:
    """What goes wrong as a file is written becomes one sentence."""
    try:
        yield
    except OSError as error:
        raise BadArgument(f"cannot write {error.filename or path}: {error.strerror}") from error
