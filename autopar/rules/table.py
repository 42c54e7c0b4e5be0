"""The sharding rule of every operator we know, one line each: text in the notation, or a function that writes it.

To add an operator: one line in the table of its subject (`table_*.py`), one sample in `tests/rules/samples_*.py`, and
one line in `local.py` if its arguments hold sizes.
"""

from __future__ import annotations

from autopar.ir.graph import Node
from autopar.ir.outside import rule_in
from autopar.rules.bodies import BODIES
from autopar.rules.notation import Rule, parse
from autopar.rules.spelling import Table, Types
from autopar.rules.table_nn import NN
from autopar.rules.table_patches import PATCHES
from autopar.rules.table_pointwise import POINTWISE
from autopar.rules.table_reduce import REDUCE
from autopar.rules.table_shape import SHAPE

RULES: Table = {**POINTWISE, **SHAPE, **REDUCE, **NN, **PATCHES}


def text_of(node: Node, operand_types: Types) -> str | None:
    """The rule of `node` as text; None for an operator (or a use of it) that we have no rule for."""
    outside = rule_in(node.outside, node.op)
    entry = RULES.get(node.op) if outside is None else outside.rule
    return entry(node, operand_types) if callable(entry) else entry


def rule_of(node: Node, operand_types: Types) -> Rule | None:
    """The rule of `node` at its shapes. None: the caller replicates it, and the plan says so."""
    text = text_of(node, operand_types)
    if text is None:
        return None
    try:
        rule = parse(
            text, [type.shape for type in operand_types], [None if out is None else out.shape for out in node.outputs]
        )
        if unknown := sorted({*rule.bodies.values()} - {*BODIES}):
            raise ValueError(f"rule {text!r} names the local body {unknown[0]!r}; there are {', '.join(BODIES)}")
        return rule
    except ValueError as error:
        raise ValueError(f"%{node.name} ({node.op}): {error}") from error
