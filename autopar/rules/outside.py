"""Rules that users' packages bring (`autopar.ir.outside`): may they stand beside ours and each other?"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.errors import PlanMismatch
from autopar.ir.graph import Graph
from autopar.ir.outside import Identity, Rules, told
from autopar.rules.bodies import BODIES
from autopar.rules.patterns import PATTERNS
from autopar.rules.table import RULES


def given(rules: Rules | Iterable[Rules] | None) -> tuple[Rules, ...]:
    """What stands in an argument `rules=`, in the order of packages, so that who names them in another order asks the
    same. Raises ValueError for what is no rules, for an operator or a pattern that has one already, and for a package
    that stands there twice.
    """
    listed = () if rules is None else tuple(rules) if isinstance(rules, Iterable) else (rules,)
    whose: dict[str, str] = {}
    for one in listed:
        if not isinstance(one, Rules):  # pyright: ignore[reportUnnecessaryIsInstance] users have no pyright
            raise ValueError(f"rules={one!r} are no rules; give an autopar.Rules, or several")
        if sum(one.package == other.package for other in listed) > 1:
            raise ValueError(
                f"rules of {one.package} are given twice; leave one out, or put them into one autopar.Rules"
            )
        for op in one.operators:
            if op in RULES:
                raise ValueError(
                    f"rules of {one.package}: {op} has a rule in autopar, which no other may replace; leave it out, or "
                    "offer what it lacks as a pattern"
                )
        for name in one.patterns:
            if name in PATTERNS or name in BODIES:
                raise ValueError(f"rules of {one.package}: autopar has a pattern {name!r} itself; give it another name")
        for name in (*one.operators, *one.patterns):
            if (other := whose.setdefault(name, one.package)) != one.package:
                raise ValueError(f"rules of {one.package} and of {other} both have {name}; leave one of them out")
    return tuple(sorted(listed, key=lambda one: one.package))


def check_same(needed: tuple[Identity, ...], rules: tuple[Rules, ...], graph: Graph, origin: str, again: str) -> None:
    """Raise PlanMismatch unless `rules` are those that a plan `needed`, as far as they say something of its `graph`.

    `origin`: what the plan is called; `again`: how to make a new one.
    """
    here = {one.package: one.identity for one in rules}
    for one in needed:
        found = here.get(one[0])
        if found is None:
            raise PlanMismatch(
                f"{origin} was made with the rules of {told(one)}, which are not given here; give them (rules=, or "
                f"--rules of a command), or {again}"
            )
        if found != one:
            raise PlanMismatch(f"{origin} was made with the rules of {told(one)}, here are {told(found)}; {again}")
    ops = {node.op for node in graph.nodes}
    for one in rules:
        if one.identity not in needed and (known := sorted(ops.intersection(one.operators))):
            raise PlanMismatch(
                f"{origin} was made without the rules of {told(one.identity)}, which have one for {known[0]}; leave "
                f"them out, or {again}"
            )
