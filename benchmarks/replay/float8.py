"""Float8 training as torchao has it, for replays: products of layers at that rate, their operands scaled and cast.

Scales are of whole tensors and dynamic: each operand of a product (activation, weight, gradient) is read for its
largest value and read again to be cast, into both orders that its products want: 2 + 2 bytes read and 2 written per
element of two bytes (torchao, torchao/testing/float8/roofline_utils.py, "tensorwise"). A tensor that several products
of one pass read is cast once. What is gathered for a product is gathered in bfloat16 all the same.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Node, Ref
from autopar.ir.layout import local_type
from autopar.plan import Plan
from benchmarks.replay.recompute import layer_of, storage_of
from cost_models.steps import Compute

FLOAT8 = "float8_e4m3fn"
CAST = 6  # bytes that are moved for an element


def as_float8(plan: Plan) -> Plan:
    """The plan with the products of its layers in float8; what is outside of layers stays as it is."""
    choices = dict(plan.choices)
    cast: set[tuple[Ref, str]] = set()
    for node in plan.graph.nodes:
        if not _is_product(node, plan):
            continue
        choice, numel = choices[node.name], 0
        for ref, layout in zip(node.operands, choice.takes, strict=True):
            key = storage_of(ref, plan.graph), node.phase
            if key not in cast:
                cast.add(key)
                numel += local_type(plan.graph.type_of(ref), layout, plan.mesh).numel
        casts = Compute("casts to float8", 0.0, float(CAST * numel), "bfloat16", 2, "elementwise")
        steps = tuple(replace(step, dtype=FLOAT8) if isinstance(step, Compute) else step for step in choice.steps)
        choices[node.name] = replace(choice, steps=(casts, *steps))
    return replace(plan, choices=choices)


def _is_product(node: Node, plan: Plan) -> bool:
    if node.is_source or layer_of(node) is None:
        return False
    return any(isinstance(step, Compute) and step.kind == "matmul" for step in plan.choices[node.name].steps)
