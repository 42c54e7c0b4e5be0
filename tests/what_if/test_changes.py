"""What is changed of a machine is what was asked for, under another name and digest; what makes no sense is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.mesh import parse_mesh
from autopar.what_if.changes import changes_of, imagined
from cost_models.curves import Curve
from cost_models.hardware import Factors, Hardware
from cost_models.price import links_of, seconds
from cost_models.steps import Compute

H100, CPU = Hardware.load("h100-sxm"), Hardware.load("cpu-gloo")
MESH = parse_mesh("data=2,tensor=8,pipe=1")


def then(hardware: Hardware = H100, **asked: str) -> Hardware:
    return imagined(hardware, changes_of(hardware, MESH, **asked))


def test_a_figure_of_its_own_is_what_the_axis_has_then() -> None:
    machine = then(bandwidth="tensor=400GB/s,data=12.5 GiB/s", latency="tensor=7us")
    links = links_of(machine, MESH.names, MESH.sizes)
    assert links["tensor"].bytes_per_s == pytest.approx(400e9) and links["tensor"].latency_s == pytest.approx(7e-6)
    assert links["data"].bytes_per_s == pytest.approx(12.5 * 2**30)
    assert links["data"].latency_s == links_of(H100, MESH.names, MESH.sizes)["data"].latency_s


def test_all_stands_for_each_axis_that_sends_anything() -> None:
    both = Factors(bandwidth=2.5)
    assert then(bandwidth="all=2.5x").axes == then(bandwidth="tensor=2.5x, data=2.5x").axes
    assert then(bandwidth="all=2.5x").axes == {"data": both, "tensor": both}
    assert then(bandwidth="data=2x", latency="data=0.5x").axes == {"data": Factors(0.5, 2.0)}


@pytest.mark.parametrize("measured", [False, True])
def test_work_is_quicker_by_the_factor_of_what_bounds_it(measured: bool) -> None:
    curves = {"matmul.float32": Curve(((1.0, 1e12), (1e3, 3e13)), over="flops_per_byte")} if measured else {}
    curves |= {"elementwise.float32": Curve(((1e3, 1e10), (1e9, 1e12)))} if measured else {}
    real = replace(H100, launch_s=1e-10, curves=curves)
    product, sums = Compute("mm", 1e15, 1e6, "float32"), Compute("add", 1e6, 1e10, "float32", kind="elementwise")
    for step, asked in ((product, {"flops": "4x"}), (sums, {"hbm": "4x"})):
        assert seconds(step, real, {}) == pytest.approx(4 * seconds(step, then(real, **asked), {}), rel=1e-3)
    assert seconds(product, then(real, hbm="4x"), {}) == pytest.approx(seconds(product, real, {}), rel=1e-3)
    assert seconds(sums, then(real, flops="4x"), {}) == pytest.approx(seconds(sums, real, {}), rel=1e-3)


def test_the_memory_of_a_processor_stays_that_of_its_host() -> None:
    tiers = then(CPU, hbm="3x").tiers
    assert tiers["hbm"].bytes_per_s == tiers["host"].bytes_per_s == 3 * CPU.tiers["hbm"].bytes_per_s


def test_each_machine_has_its_own_digest_and_says_what_it_is() -> None:
    machines = [then(flops="2x"), then(hbm="2x"), then(bandwidth="all=2x"), then(latency="all=2x"), H100]
    assert len({machine.digest for machine in machines}) == len({machine.name for machine in machines}) == 5
    name = then(bandwidth="tensor=2x", flops="2x").name
    assert name == "h100-sxm with imagined bandwidth tensor=2x, flops 2x"
    with pytest.raises(ValueError, match="no machine is 'h100-sxm' with 'bandwidth tensor=2x, flops 2x'"):
        Hardware.known(name)
    assert imagined(H100, changes_of(H100, MESH)) is H100


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"bandwidth": "tensr=2x"}, "has no axis 'tensr'; choose data, tensor, pipe, or all"),
        ({"bandwidth": "pipe=2x"}, "pipe is of one rank"),
        ({"bandwidth": "tensor=0x"}, "0 is not above 0 and finite"),
        ({"latency": "data=-2x"}, "-2 is not above 0"),
        ({"flops": "nanx"}, "nan is not above 0"),
        ({"hbm": "infx"}, "inf is not above 0"),
        ({"flops": "2"}, "for a factor write 2x"),
        ({"bandwidth": "tensor=2"}, "for a factor write tensor=2x"),
        ({"bandwidth": "tensor=400Gb/s"}, "is no figure; write a factor, such as 2x, or 400GB/s; units are B/s"),
        ({"latency": "data=5GB/s"}, "is no figure; write a factor, such as 2x, or 5us"),
        ({"flops": "two"}, "'two' is no figure; write a factor, such as 2x"),
        ({"bandwidth": "tensor=1.2.3x"}, "is no figure"),
        ({"bandwidth": "2x"}, "'2x' is not AXIS=FIGURE"),
        ({"bandwidth": "all=2x,data=3x"}, "says twice what data has"),
        ({"bandwidth": "data=1e30x"}, "with bandwidth data=1e30x, links."),
        ({"flops": "1e30x"}, "with flops 1e30x, "),
    ],
)
def test_what_makes_no_sense_is_told(asked: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError) as refused:
        then(**asked)
    assert told in str(refused.value)


def test_a_measured_link_has_no_one_figure() -> None:
    real = replace(H100, curves={"intra.all_reduce.8x1": Curve(((1e3, 1e9),))})
    with pytest.raises(ValueError, match="give a factor, such as tensor=2x"):
        then(real, bandwidth="tensor=400GB/s")
    assert then(real, bandwidth="tensor=2x").axes == {"tensor": Factors(bandwidth=2.0)}
