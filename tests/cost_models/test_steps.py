"""Steps are values that cannot be wrong, and each collective has one closed form."""

import pytest
import sympy

from cost_models import COLLECTIVES, Comm, Compute, Loop, Move, received_bytes

g, n, alpha, beta = sympy.symbols("g n alpha beta", positive=True)  # beta: bytes per second

RECEIVED = {
    "all_gather": (g - 1) / g * n,
    "reduce_scatter": (g - 1) / g * n,
    "all_reduce": 2 * (g - 1) / g * n,
    "all_to_all": (g - 1) / g * n,
    "broadcast": n,
    "shift": n,
    "mirror": n,
}
SECONDS = {
    "all_gather": (g - 1) * (alpha + n / g / beta),
    "reduce_scatter": (g - 1) * (alpha + n / g / beta),
    "all_reduce": 2 * (g - 1) * (alpha + n / g / beta),
    "all_to_all": (g - 1) * (alpha + n / g / beta),
    "broadcast": (g - 1) * alpha + n / beta,
    "shift": alpha + n / beta,
    "mirror": alpha + n / beta,
}


def test_every_collective_has_a_textbook_form():
    assert set(COLLECTIVES) == set(RECEIVED) == set(SECONDS)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_closed_forms_are_the_textbook_ones(name):
    form = COLLECTIVES[name]
    assert sympy.simplify(form.received(g, n) - RECEIVED[name]) == 0
    assert sympy.simplify(form.seconds(g, n, alpha, beta) - SECONDS[name]) == 0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    all_reduce, reduce_scatter, all_gather = (
        COLLECTIVES[name].seconds(g, n, alpha, beta) for name in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert sympy.simplify(all_reduce - reduce_scatter - all_gather) == 0
    for ranks, nbytes in ((2, 8), (3, 100), (8, 12345), (7, 1)):  # sizes that do not divide, too
        parts = sum(received_bytes(Comm(name, "x", ranks, nbytes)) for name in ("reduce_scatter", "all_gather"))
        assert received_bytes(Comm("all_reduce", "x", ranks, nbytes)) == parts


@pytest.mark.parametrize("name", COLLECTIVES)
def test_received_bytes_are_exact_integers(name):
    for ranks in (2, 3, 8, 64):
        for nbytes in (0, ranks, 12 * ranks, 2**40 * ranks, 3**30 * ranks):  # past 2**53, where floats give up
            received = received_bytes(Comm(name, "x", ranks, nbytes))
            assert type(received) is int
            assert received == RECEIVED[name].subs({g: ranks, n: nbytes})


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_receives_nothing(name):
    assert received_bytes(Comm(name, "x", 1, 1000)) == 0


def test_bytes_of_a_summa_product_are_the_published_vector():
    # M, K, N = 256, 192, 320 in fp64 on 2 x 2 ranks: 884736 bytes over all ranks, counted on real gloo processes.
    m, k, n = 256, 192, 320
    a, b = (Comm("all_gather", axis, 2, 8 * size // 2) for axis, size in (("col", m * k), ("row", k * n)))
    assert 4 * (received_bytes(a) + received_bytes(b)) == 884736


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Comm("all_sum", "x", 2, 8), ["all_sum", "all_reduce"]),
        (lambda: Comm("all_gather", "x", 0, 8), ["x", "0 ranks"]),
        (lambda: Comm("all_gather", "x", 2, -8), ["-8 bytes"]),
        (lambda: Compute("mm", -1.0, 0), ["mm", "flops", "-1"]),
        (lambda: Compute("mm", 1.0, float("nan")), ["nbytes", "nan"]),
        (lambda: Move("hbm", "hbm", 1), ["goes nowhere"]),
        (lambda: Move("hbm", "nvme", 1), ["nvme", "host"]),
        (lambda: Move("hbm", "host", -1), ["-1 bytes"]),
        (lambda: Loop(0, ()), ["0 rounds"]),
    ],
)
def test_an_impossible_step_is_refused_by_name(make, names):
    with pytest.raises(ValueError) as caught:
        make()
    for name in names:
        assert name in str(caught.value)


def test_steps_are_values():
    loop = Loop(2, (Comm("broadcast", "x", 2, 8), Compute("mm", 1.0, 2.0), Move("host", "hbm", 3)), overlap=True)
    assert loop == Loop(2, (Comm("broadcast", "x", 2, 8), Compute("mm", 1.0, 2.0), Move("host", "hbm", 3)), True)
    assert len({loop, loop}) == 1
