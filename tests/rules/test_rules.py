"""Every rule of the table: split as it says, run, put together, compare with the operator on one device."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD
from autopar.ir.work import draws, flops_of
from autopar.rules.bodies import BODIES
from autopar.rules.table import RULES
from cost_models.steps import MATRIX_KINDS
from tests.rules import samples_nn, samples_pointwise, samples_reduce, samples_shape
from tests.rules.harness import Call, check, make_call, resolve, run_split, ways
from tests.rules.samples_pointwise import f, ints

torch.manual_seed(0)
SAMPLES = {
    **samples_pointwise.samples(), **samples_shape.samples(), **samples_reduce.samples(), **samples_nn.samples(),
}  # fmt: skip
UNDEFINED = ("aten.empty_like.default", "aten.new_empty.default", "aten.empty.memory_format")  # values mean nothing
# bfloat16 only: each partial product, of size up to 2**5, is rounded to 8 bits (2**-4) before the sum; a wrong rule
# is off by 7
TOLERANCE = {"aten._grouped_mm.default": 2**-3}


def calls(op: str) -> list[Call]:
    return [make_call(op, args, kwargs) for args, kwargs in SAMPLES[op]]


def test_every_entry_of_the_table_has_a_sample_and_no_sample_is_idle():
    assert set(RULES) == set(SAMPLES)


def test_every_body_is_named_by_a_rule_of_a_sample():
    named = {body for op in SAMPLES for call in calls(op) if call.rule for body in call.rule.bodies.values()}
    assert named == set(BODIES)


@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_split_and_joined_equals_whole(op: str):
    torch.manual_seed(1)
    for call in calls(op):
        rule = call.rule
        if rule is None or draws(call.node) or op in UNDEFINED:
            continue
        assert len(set(rule.bodies.values())) <= 1, "one node, one body"
        found = {size: ways(call, rule, size) for size in (2, 3)}
        single = [(way,) for size in found for way in found[size]]
        pairs = [axes for axes in itertools.product(found[2], found[3]) if axes[0].factor != axes[1].factor]
        for axes in single + pairs:
            check(call, axes, TOLERANCE.get(op, 1e-10))


def test_arguments_that_are_left_at_their_defaults_are_understood():
    """A trace leaves arguments out that stand at their defaults: such a call means what it means with all of them."""
    tried = 0
    for op in sorted(SAMPLES):
        schema = getattr(resolve(op), "_schema", None)
        if schema is None:
            continue
        places = [argument for argument in schema.arguments if not argument.kwarg_only]
        for args, kwargs in SAMPLES[op]:
            needed = [place for place in range(len(args)) if not places[place].has_default_value()]
            for count in range(1 + max(needed, default=-1), len(args)):
                written_out = [*args[:count], *(place.default_value for place in places[count:])]
                try:
                    short, full = make_call(op, args[:count], kwargs), make_call(op, written_out, kwargs)
                    expected = full.rule, flops_of(full.node, full.types)
                except (RuntimeError, IndexError, ValueError):
                    continue  # not with these operands
                tried += 1
                assert (short.rule, flops_of(short.node, short.types)) == expected, (op, count)
    assert tried > 120


def test_reshapes_of_all_kinds():
    """All pairs of shapes made of the factors of 36, with and without dims of size one."""
    shapes = [
        (36,),
        (6, 6),
        (2, 18),
        (3, 12),
        (12, 3),
        (4, 9),
        (9, 4),
        (2, 3, 6),
        (6, 2, 3),
        (2, 18, 1),
        (1, 9, 4),
        (3, 2, 2, 3),
    ]
    for source, target in itertools.permutations(shapes, 2):
        call = make_call("aten.view.default", (torch.arange(36.0, dtype=torch.float64).reshape(source), target))
        rule = call.rule
        assert rule is not None
        for size in (2, 3):
            for way in ways(call, rule, size):
                check(call, (way,))


def test_every_product_is_priced_by_the_units_that_make_it():
    """A product: two operands share an index that no result has (or has by groups), and a result has one of each that
    the other lacks. It does at least a multiplication and an addition for each pair that meets.
    """
    found: set[str] = set()
    for op in sorted(SAMPLES):
        for call in calls(op):
            if (rule := call.rule) is None:
                continue
            real = [
                place for place, type in enumerate(call.types) if type.dtype.startswith(("float", "bfloat", "comp"))
            ]
            factors = [{name for dim in dims for name in dim if rule.sizes[name] > 1} for dims in rule.inputs]
            made = [{name for dim in dims for name in dim} for dims in rule.outputs]
            for one, other in itertools.permutations(real, 2):
                alone, shared = (
                    (factors[one] - factors[other], factors[other] - factors[one]),
                    factors[one] & factors[other],
                )
                if not all(alone) or not any(shared - out and all(side & out for side in alone) for out in made):
                    continue
                found.add(op)
                flops, kind = flops_of(call.node, call.types)
                least = 2.0 * max(call.types[one].numel, call.types[other].numel)
                assert kind in MATRIX_KINDS and flops >= least, (op, kind, flops, least)
    assert found >= {
        "autopar.einsum", "aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default",
        "aten._grouped_mm.default", "transformers.grouped_mm_fallback.default", ATTENTION, ATTENTION_BACKWARD,
        "aten.convolution.default", "aten.convolution_backward.default",
    } & set(SAMPLES)  # fmt: skip


@pytest.mark.parametrize("op", sorted(op for op in SAMPLES if any(draws(call.node) for call in calls(op))))
def test_random_numbers_have_the_promised_shape_on_every_shard(op: str):
    for call in calls(op):
        rule = call.rule
        assert rule is not None
        assert len(ways(call, rule, 2)) == len(call.node.outputs[0].shape), "any dim may be split, and no sum may pass"
        for way in ways(call, rule, 2):
            run_split(call, rule, (way,))


@pytest.mark.parametrize("op", UNDEFINED)
def test_uninitialised_tensors_have_the_promised_shape(op: str):
    for call in calls(op):
        rule = call.rule
        assert rule is not None
        for way in ways(call, rule, 2):
            run_split(call, rule, (way,))


def test_attention_with_dropout_splits_batch_and_heads_only():
    """Who draws for which query hangs on the kernel: those of one head stay together."""
    q, k = f(6, 12, 12, 8), f(6, 6, 12, 8)
    for op, more in ((ATTENTION, ()), (ATTENTION_BACKWARD, (q, f(6, 12, 12), ints(9, 6, 12, 2)))):
        grad = (q,) if more else ()
        call = make_call(op, (*grad, q, k, k, None, *more, False, 0.3, 0.1, False))
        assert call.rule is not None and call.rule.splittable == ("b", "h")
