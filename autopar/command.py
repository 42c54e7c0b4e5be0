"""What the command lines of autopar share: how bad arguments are told, and exit statuses."""

from __future__ import annotations

import argparse
from typing import NoReturn

BAD_ARGUMENTS, INTERRUPTED = 2, 130


class BadArgument(ValueError):
    """The command line cannot be followed; the message is one sentence for the user."""


class Parser(argparse.ArgumentParser):
    """Raises BadArgument where argparse would print its usage and exit."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog, description=description, epilog=epilog, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        raise BadArgument(f"{message}; see {self.prog} --help")
