"""`--rules` of the command lines: rules of users' packages, by the name under which Python imports them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from autopar.errors import BadArgument
from autopar.ir.outside import Rules
from autopar.rules.outside import given

FLAG = "--rules"
METAVAR = "MODULE:NAME[,MODULE:NAME...]"
HELP = "an autopar.Rules of a package that brings operators of its own, for example toy.plans:RULES"


def rules_named(text: str | None) -> tuple[Rules, ...]:
    """What stands under those names; modules are looked for here, too. Raises BadArgument."""
    found = [_rules(one.strip()) for one in text.split(",")] if text is not None else []
    try:
        return given(found)
    except ValueError as error:
        raise BadArgument(f"{FLAG}: {error}") from error


def _rules(text: str) -> Rules:
    where, _, name = text.partition(":")
    parts = where.split(".")
    if not name.isidentifier() or not all(part.isidentifier() for part in parts):
        raise BadArgument(f"{FLAG} {text!r} is not MODULE:NAME; write for example toy.plans:RULES")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(where), name, None)
    except (Exception, SystemExit) as error:
        told = " ".join(str(error).split())[:300]
        raise BadArgument(f"{FLAG} {text}: importing {where} failed ({type(error).__name__}: {told})") from error
    finally:
        sys.path.remove(here)
    if not isinstance(found, Rules):
        raise BadArgument(f"{FLAG} {text}: {where} has no autopar.Rules under the name {name!r}")
    return found
