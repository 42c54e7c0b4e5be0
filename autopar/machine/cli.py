"""What the command lines of autopar share: how bad arguments are told, and exit statuses."""

from __future__ import annotations

import argparse
import os
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


def writable(path: str, flag: str) -> Path:
    """The file to write, of which it is known before the work begins that it can be written."""
    target = Path(path).absolute()
    if not target.parent.is_dir():
        raise BadArgument(f"folder {target.parent} of {flag} {path} does not exist; make it first")
    if target.is_dir():
        raise BadArgument(f"{flag} {path} is a folder; name a file in it")
    if not os.access(target.parent, os.W_OK):
        raise BadArgument(f"folder {target.parent} of {flag} {path} cannot be written to; choose another")
    return target
