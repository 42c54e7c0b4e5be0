"""The notation, what it refuses, and what the tables write in it."""

from __future__ import annotations

import pytest

from autopar.ir.graph import Node, Ref, TensorType
from autopar.rules.notation import parse
from autopar.rules.table import rule_of, text_of
from autopar.rules.table_shape import regroup


def test_a_matrix_product():
    rule = parse("m k, k n -> m n | 0 | 1", [(6, 12), (12, 18)], [(6, 18)])
    assert rule.inputs == ((("m",), ("k",)), (("k",), ("n",)))
    assert rule.outputs == ((("m",), ("n",)),)
    assert rule.sizes == {"m": 6, "k": 12, "n": 18}
    assert rule.linear == (frozenset({0}), frozenset({1}))
    assert rule.reduce == ("sum",)
    assert rule.splittable == ("m", "k", "n")


def test_marks():
    text = "v@masked_lookup w!, b 1 -> b (v=4 w) ^max, -, . ^same"
    rule = parse(text, [(4, 3), (2, 1)], [(2, 12), None, ()])
    assert rule.bodies == {"v": "masked_lookup"}
    assert rule.locked == {"w"}
    assert rule.inputs[1] == (("b",), ())
    assert rule.outputs == ((("b",), ("v", "w")), (), ())
    assert rule.reduce == ("max", "sum", "same")


def test_only_the_outermost_factor_of_a_dim_splits_unless_what_is_outside_has_size_one():
    assert parse("(h d) -> h d", [(24,)], [(4, 6)]).splittable == ("h",)
    assert parse("(h d) -> h d", [(6,)], [(1, 6)]).splittable == ("d",)


def test_what_stands_behind_the_batch_in_a_dim_of_tokens_is_split_where_the_batch_is_in_pieces_of_one():
    rule = parse("b s (h d) -> (b s) h d", [(4, 6, 8)], [(24, 2, 4)])
    assert rule.splittable == ("b", "h") and rule.behind == {"s": {"b"}}
    assert parse("b s d -> (b s d)", [(4, 6, 8)], [(192,)]).behind == {"s": {"b"}, "d": {"b", "s"}}
    assert parse("(b s!) d -> b s d", [(24, 8)], [(4, 6, 8)]).behind == {}
    assert parse("(b s@masked_lookup) d -> b s d", [(24, 8)], [(4, 6, 8)]).behind == {}


def test_all_operands_may_be_partial_together():
    assert parse("a, a, a -> a | *", [(2,)] * 3, [(2,)]).linear == (frozenset({0, 1, 2}),)


def test_a_factory_has_no_operands():
    assert parse("-> n", [], [(6,)]).splittable == ("n",)


def test_rules_are_hashable():
    assert len({parse("a -> a", [(2,)], [(2,)]), parse("a -> a", [(2,)], [(2,)])}) == 1


@pytest.mark.parametrize(
    "text, shapes, results, told",
    [
        ("a b", [(2, 3)], [(2, 3)], "no '->'"),
        ("a b -> a", [(2, 3)], [(3,)], "result 0 has a dim of size 3"),
        ("a b -> a b", [(2, 3, 4)], [(2, 3)], "operand 0 has shape [2, 3, 4]"),
        ("a -> a", [(2,), (2,)], [(2,)], "describes 1 operands, the operator has 2"),
        ("a 1 -> a", [(2, 3)], [(2,)], "operand 0 has a dim of size 3"),
        ("(a b) -> (a b)", [(6,)], [(6,)], "do not follow"),
        ("a a -> a", [(2, 2)], [(2,)], "stands there twice"),
        ("a -> a ^mean", [(2,)], [(2,)], "^mean"),
        ("a -> a | 1", [(2,)], [(2,)], "linear part '1'"),
        ("A -> A", [(2,)], [(2,)], "'A' is not a factor"),
        ("(a -> a", [(2,)], [(2,)], "brackets open"),
        ("a -> -", [(2,)], [(2,)], "result 0 has shape [2]"),
    ],
)
def test_what_does_not_fit_is_named(text, shapes, results, told):
    with pytest.raises(ValueError, match="rule") as error:
        parse(text, shapes, results)
    assert told in str(error.value)


@pytest.mark.parametrize(
    "source, target, text",
    [
        ((4, 16, 64), (64, 64), "a b c -> (a=4 b=16) c"),
        ((4, 16, 64), (4, 16, 4, 16), "a b (c=4 d=16) -> a b c d"),
        ((12, 6), (6, 12), "(a=6 b=2) c -> a (b=2 c=6)"),
        ((4, 6), (6, 4), "(a=2 b!) c! -> (a=2 d!) e!"),
        ((2, 9), (9, 2), "b! c! -> d! e!"),
        ((6, 1, 12), (6, 12), "a 1 b -> a b"),
        ((1,), (), "1 -> ."),
        ((0, 4), (4, 0), "x0! x1! -> y0! y1!"),
    ],
)
def test_a_reshape_is_made_of_the_coarsest_common_factors(source, target, text):
    assert regroup(source, target) == text


def test_an_unknown_operator_has_no_rule():
    assert (
        rule_of(
            Node("n", "my.op.default", (Ref("x"),), (), (TensorType((2,), "float32"),)), (TensorType((2,), "float32"),)
        )
        is None
    )


def test_a_boolean_mask_as_index_has_no_rule():
    x, mask = TensorType((6, 12), "float32"), TensorType((6,), "bool")
    node = Node("n", "aten.index.Tensor", (Ref("x"), (Ref("m"),)), (), (TensorType((3, 12), "float32"),))
    assert text_of(node, (x, mask)) is None


def test_a_rule_that_does_not_fit_its_node_names_the_node():
    x = TensorType((6, 12), "float32")
    node = Node("product", "aten.mm.default", (Ref("x"), Ref("x")), (), (x,))
    with pytest.raises(ValueError, match=r"%product \(aten\.mm\.default\)"):
        rule_of(node, (x, x))
