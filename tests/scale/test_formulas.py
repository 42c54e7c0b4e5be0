"""Forms: the arithmetic of sizes, on symbols."""

import math
from fractions import Fraction

import pytest

from autopar.ir.graph import TensorType
from autopar.ir.layout import Partial, Replicate, Shard, local_shape
from autopar.ir.mesh import Mesh
from autopar.price.reshard import Reshard
from cost_models.formulas import Form, at, factored, form_of, symbol, terms
from cost_models.steps import COLLECTIVES, Comm, Compute, received_bytes

BATCH, RANKS = symbol("batch"), symbol("data")


def test_a_form_passes_for_a_size():
    type = TensorType((BATCH, 12, BATCH), "float32")
    assert type.nbytes == 48 * BATCH * BATCH
    assert math.prod((2, BATCH)) == BATCH + BATCH == sum([BATCH, BATCH])
    assert at(type.nbytes, {"batch": 5}) == 1200


def test_floats_are_taken_at_their_word():
    assert 2.0 * BATCH / 4 == BATCH / 2
    assert at(0.1 * BATCH, {"batch": 1}) == Fraction(0.1)


def test_what_is_split_divides():
    mesh = Mesh(("data", "tensor"), (RANKS, 3))
    assert local_shape((BATCH, 12), (Shard(0), Shard(1)), mesh) == (BATCH / RANKS, 4)
    assert local_shape((BATCH, 12), (Shard(1), Replicate()), mesh) == (BATCH, 12 / RANKS)
    assert 7 % RANKS == BATCH % RANKS == 0


def test_a_symbol_is_more_than_one_and_has_no_order_beyond():
    assert BATCH > 1 and BATCH >= 1 and not BATCH < 1 and not BATCH <= 0 and BATCH != 1
    assert math.inf > BATCH and math.inf >= BATCH
    with pytest.raises(TypeError, match="whether batch is less than 2 depends on the sizes"):
        _ = BATCH < 2
    with pytest.raises(TypeError):
        _ = BATCH > RANKS
    assert Form(3) < 4 and Form(3) == 3 and not Form(0)


def test_steps_take_forms_and_still_refuse_what_is_no_number():
    assert Compute("mm", BATCH, BATCH).flops == BATCH
    assert Comm("all_gather", "data", RANKS, BATCH).nbytes == BATCH
    for wrong in (-1, math.inf, math.nan):
        with pytest.raises(ValueError):
            Compute("mm", wrong, 1)
        with pytest.raises(ValueError):
            Comm("all_gather", "data", 2, wrong)


def test_terms_and_back():
    form = (BATCH + 1) * (BATCH - 1) / RANKS
    assert terms(form) == {(("batch", 2), ("data", -1)): 1, (("data", -1),): -1}
    assert form_of(terms(form)) - BATCH * BATCH / RANKS == -1 / RANKS
    assert str(factored(form_of(terms(2 * (RANKS - 1) / RANKS)))) == "2*(data - 1)/data"
    with pytest.raises(ValueError, match="no sum of products"):
        terms(1 / (RANKS + 1))
    assert at(1 / (RANKS + 1), {"data": 3}) == Fraction(1, 4)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_received_bytes_in_closed_form(collective):
    form = COLLECTIVES[collective].received(RANKS, 48 * BATCH)
    for ranks in (2, 3, 4, 8):
        comm = Comm(collective, "data", ranks, 48 * 7)
        assert at(form, {"data": ranks, "batch": 7}) == received_bytes(comm)


CHANGES = [
    (Shard(0), Replicate()),
    (Shard(1), Replicate()),
    (Partial(), Replicate()),
    (Partial(), Shard(0)),
    (Partial(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(2)),
    (Replicate(), Shard(1)),
]


@pytest.mark.parametrize("before, after", CHANGES, ids=str)
def test_layout_changes_in_closed_form(before, after):
    symbolic = Reshard("data", before, after, TensorType((BATCH, 6 * BATCH, 10), "bfloat16")).steps(RANKS)
    for batch, ranks in ((4, 2), (10, 5)):
        local = TensorType((batch, 6 * batch, 10), "bfloat16")
        numbers = Reshard("data", before, after, local).steps(ranks)
        here = {"batch": batch, "data": ranks}
        assert [type(step) for step in symbolic] == [type(step) for step in numbers]
        assert [at(step.nbytes, here) for step in symbolic] == [step.nbytes for step in numbers]


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    received = {name: form.received(RANKS, BATCH) for name, form in COLLECTIVES.items()}
    assert terms(received["all_reduce"] - received["reduce_scatter"] - received["all_gather"]) == {}
