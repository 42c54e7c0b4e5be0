"""A profile with curves is written, read, priced and refused as every other one is."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.calibrate.profile import drift_table, save
from autopar.ir.mesh import Mesh
from autopar.price.pricer import Pricer
from cost_models import COLLECTIVES, Comm, Compute, Curve, Hardware, Move, links_of, seconds

ROOF = Curve(((1.0, 2e10), (8.0, 8e10), (64.0, 1e11)), 1e-5, 0.05, "flops_per_byte")
MEMORY = Curve(((1e3, 1e9), (1e6, 9e10), (1e8, 5e9)), 2e-6, 0.1)
RING = Curve(((1e3, 1e8), (1e6, 1e9), (1e8, 8e8)), 2e-4, 0.1)
CURVES = {
    "matmul.float32": ROOF,
    "elementwise.float32": MEMORY,
    "ops.aten.gelu.default.float32": MEMORY.scaled(2, 5),
    "copy.h2d": MEMORY,
    "intra.all_gather.2x1": RING,
    "intra.all_gather.2x2": RING.scaled(2, 2),
    "intra.all_reduce.4x1": RING.scaled(4, 3),
}


def measured() -> Hardware:
    base = Hardware.load("cpu-gloo")
    slow = {"matrix.2": 1.0, "memory.2": 1.0, "matrix.4": 2.0, "memory.4": 3.0}
    told = {f"curves.{name}": "a test" for name in CURVES} | {f"slowdown.{name}": "a test" for name in slow}
    return replace(base, name="mine", curves=CURVES, slowdown=slow, sources={**base.sources, **told})


def test_a_profile_with_curves_comes_back_as_it_was(tmp_path):
    save(measured(), tmp_path / "new" / "mine.toml")
    loaded = Hardware.load(tmp_path / "new" / "mine.toml")
    assert loaded == measured() and loaded.sources == measured().sources and loaded.digest == measured().digest
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.toml"]  # no drafts are left


def test_curves_count_in_the_digest():
    other = replace(measured(), curves={**CURVES, "copy.h2d": RING})
    assert len({hardware.digest for hardware in (measured(), other, Hardware.load("cpu-gloo"))}) == 3


def test_a_failed_save_leaves_the_old_profile(tmp_path):
    save(measured(), tmp_path / "mine.toml")
    before = (tmp_path / "mine.toml").read_text()
    with pytest.raises(ValueError, match="has no source"):
        save(replace(measured(), sources={}), tmp_path / "mine.toml")
    assert (tmp_path / "mine.toml").read_text() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("curve", "change", "told"),
    [
        ("matmul.float32", (r"\[1.0, 2\d+.0\]", "[1.0, -5.0]"), "the rate at 1 is -5"),
        ("matmul.float32", (r"\[1.0, 2\d+.0\]", "[1.0, nan]"), "the rate at 1 is nan"),
        ("matmul.float32", (r"\[1.0, 2\d+.0\]", "[1.0, 1e30]"), "the rate at 1 is 1e"),
        ("matmul.float32", (r"\[1.0, 2\d+.0\]", "[1.0, true]"), "must be a number"),
        ("matmul.float32", (r"\[1.0, 2\d+.0\]", "[1.0, 9e10]"), "more bytes would be quicker"),
        ("matmul.float32", (r"\[1.0, 2\d+.0\]", "[1.0, 1e9]"), "would take less time"),
        ("matmul.float32", (r"\[1.0, 2\d+.0\]", "[9.0, 8e10]"), "must rise in size"),
        ("matmul.float32", (r"\[1.0, 2\d+.0\]", "[1.0]"), "is not a point"),
        ("matmul.float32", (r"points = .*\], res", "points = [], res"), "points are missing"),
        ("matmul.float32", ("flops_per_byte", "bytes"), "cannot be over bytes"),
        ("copy.h2d", ("base_s = 2e-06", "base_s = -1.0"), "base_s is -1"),
        ("copy.h2d", ("base_s = 2e-06", "base_s = 1e6"), "base_s is 1000000"),
        ("copy.h2d", ("base_s = 2e-06, ", ""), "no base_s"),
        ("copy.h2d", ("source", "origin"), "unknown key origin"),
        ("copy.h2d", ('source = "a test"', 'source = ""'), "has no source"),
        ("copy.h2d", ("copy.h2d", "copy.sideways"), "curves.copy.sideways is not a curve"),
        ("intra.all_gather.2x1", ("2x1", "0x1"), "curves.intra.all_gather.0x1 is not a curve"),
    ],
)
def test_a_wrong_curve_is_refused_by_name(tmp_path, curve, change, told):
    save(measured(), tmp_path / "mine.toml")
    lines = (tmp_path / "mine.toml").read_text().splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith(f"curves.{curve} "))
    changed = re.sub(*change, lines[at])
    assert changed != lines[at]
    lines[at] = changed
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        Hardware.load(tmp_path / "mine.toml")
    assert "curves." in str(caught.value) and "mine.toml" in str(caught.value)


def test_the_curve_of_an_operator_goes_before_that_of_its_kind_and_both_before_plain_figures():
    hardware = measured()

    def price(op, dtype, kind):
        return seconds(Compute(op, 1e6, 1e6, dtype, 1, kind), hardware, {})

    assert price("aten.add.Tensor", "float32", "elementwise") == MEMORY.seconds(0, 1e6)
    assert price("aten.gelu.default", "float32", "elementwise") == pytest.approx(4e-6 + 5e6 / 9e10)
    assert price("aten.add.Tensor", "int64", "elementwise") == MEMORY.seconds(0, 1e6)  # memory knows no dtypes
    assert price("autopar.einsum", "float32", "matmul") == ROOF.seconds(1e6, 1e6)
    plain = Hardware.load("cpu-gloo")
    assert price("autopar.einsum", "float64", "matmul") == seconds(Compute("mm", 1e6, 1e6, "float64"), plain, {})
    assert seconds(Compute("view", 0, 0, kernels=0), hardware, {}) == 0
    assert seconds(Move("host", "hbm", 10**6), hardware, {}) == MEMORY.seconds(0, 1e6)
    assert seconds(Move("hbm", "host", 10**6), hardware, {}) == seconds(Move("hbm", "host", 10**6), plain, {})


def test_an_axis_takes_the_curve_of_its_group_shape():
    def price(collective, names, sizes, axis):
        comm = Comm(collective, axis, sizes[names.index(axis)], 10**6)
        return seconds(comm, measured(), links_of(measured(), names, sizes))

    alone = RING.seconds(0, 1e6)
    assert price("all_gather", ["x"], [2], "x") == alone
    assert price("all_gather", ["x", "y"], [2, 2], "x") == price("all_gather", ["x", "y"], [2, 2], "y")
    assert price("all_gather", ["x", "y"], [2, 2], "x") == pytest.approx(2 * alone)
    # A shape that nobody measured: by the closed form from the nearest one.
    assert alone < price("all_gather", ["x"], [8], "x")
    # Other collectives have no curve and keep the plain link.
    plain = Hardware.load("cpu-gloo")
    comm = Comm("all_to_all", "x", 2, 10**6)
    assert price("all_to_all", ["x"], [2], "x") == seconds(comm, plain, links_of(plain, ["x"], [2]))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_bytes_are_never_cheaper_with_curves(collective):
    hardware = measured()
    for sizes in ([2], [4], [2, 2], [8, 2]):
        names = ["x", "y"][: len(sizes)]
        links = links_of(hardware, names, sizes)
        prices = [
            seconds(Comm(collective, "x", sizes[0], n), hardware, links) for n in (0, 1, 999, 10**5, 10**6, 10**9)
        ]
        assert all(less <= more for less, more in pairwise(prices)) and prices[0] == 0


def test_more_ranks_than_processors_take_turns():
    mm, add = Compute("mm", 1e9, 1e6), Compute("add", 0.0, 1e6, kind="elementwise")

    def price(ranks, step):
        return Pricer.on(Mesh(("x",), (ranks,)), measured(), "adamw").seconds([step])

    assert price(4, mm) == pytest.approx(2 * price(2, mm)) and price(4, add) == pytest.approx(3 * price(2, add))
    assert price(1, mm) == price(2, mm) and price(8, mm) == pytest.approx(4 * price(2, mm))
    assert Pricer.on(Mesh(("x",), (4,)), measured(), "adamw").hardware.digest == measured().digest


def test_drift_names_what_moved():
    new = replace(measured(), launch_s=measured().launch_s * 2, curves={**CURVES, "copy.h2d": MEMORY.scaled(1, 3)})
    table = drift_table(measured(), new)
    assert re.search(r"launch_s .* 2\.00", table) and "curves.copy.h2d [s]" in table
    assert "2 of 2 moved by more than half" in table
    assert drift_table(new, new) == "no figure differs"
