"""Ctrl-C while a plan is searched: the best one found by then is the answer."""

from __future__ import annotations

from dataclasses import replace

from autopar.plan import Plan
from solver.pressed import until_pressed

__all__ = ["AGAIN", "NOTHING_YET", "cut_short", "told", "until_pressed"]

AGAIN = "stopping with the best plan so far; Ctrl-C again ends at once"
NOTHING_YET = "interrupted before any plan was found; nothing is written"
BEST_SO_FAR = "interrupted: this is the best plan found by then, and its gap is what was proven by then"
TABLE = "interrupted: the table has what was found by then"
ONLY_REPORTS = "interrupted: the plan is complete, what it is compared with is not"


def cut_short(plan: Plan) -> Plan:
    """The plan of a search that was interrupted, which says so."""
    return replace(plan, notes=(BEST_SO_FAR, *plan.notes))


def told(plan: Plan) -> str:
    """The sentence with which an interrupted command ends."""
    return BEST_SO_FAR if BEST_SO_FAR in plan.notes else ONLY_REPORTS
