"""TF32: which float32 work takes its rate, and that a profile which allows it is another one."""

from dataclasses import replace

import pytest

from cost_models.curves import Curve
from cost_models.hardware import Hardware
from cost_models.price import seconds
from cost_models.steps import Compute

H100 = Hardware.load("h100-sxm")
BIG = 1e15  # flops, of few bytes


def time_of(hardware: Hardware, kind: str, dtype: str = "float32") -> float:
    return seconds(Compute("op", BIG, 1.0, dtype, 0, kind), hardware, {})


def test_each_kind_is_allowed_by_itself() -> None:
    plain, quick = BIG / H100.rate("float32", "matmul"), BIG / H100.rate("tf32", "matmul")
    assert plain / quick == pytest.approx(397.2 / 53.7)
    for allowed in ((), ("matmul",), ("conv",), ("matmul", "conv")):
        hardware = H100.allowing(allowed)
        for kind in ("matmul", "conv"):
            assert time_of(hardware, kind) == pytest.approx(quick if kind in allowed else plain), (allowed, kind)
        assert time_of(hardware, "attention") == time_of(H100, "attention")  # it has a curve of its own
        assert time_of(hardware, "matmul", "bfloat16") == time_of(H100, "matmul", "bfloat16")
        assert time_of(hardware, "elementwise") == time_of(H100, "elementwise")


def test_a_profile_that_allows_it_is_another_one_in_whatever_order_it_is_told() -> None:
    kinds = [(), ("matmul",), ("conv",), ("matmul", "conv")]
    assert len({H100.allowing(allowed).digest for allowed in kinds}) == len(kinds)
    assert H100.allowing(()).digest == H100.digest
    assert H100.allowing(("conv", "matmul")) == H100.allowing(("matmul", "conv"))
    assert H100.allowing(("conv",)).crowded(8).tf32 == ("conv",)


@pytest.mark.parametrize("name", ["cpu-gloo", "v100-16gb", "rtx5000"])
def test_where_there_is_no_tf32_nothing_changes(name: str) -> None:
    hardware = Hardware.load(name)
    assert hardware.allowing(("matmul", "conv")) is hardware


def test_a_kind_that_is_not_known_is_refused() -> None:
    for hardware in (H100, Hardware.load("cpu-gloo")):
        with pytest.raises(ValueError, match="tf32 of 'attention' is not known; choose some of matmul, conv, or none"):
            hardware.allowing(("attention",))


def test_a_curve_of_float32_is_not_one_of_tf32() -> None:
    slow = Curve(((1.0, 1e12), (1e3, 1e12)), over="flops_per_byte")
    quick = Curve(((1.0, 9e12), (1e3, 9e12)), over="flops_per_byte")
    both = replace(H100, curves={"matmul.float32": slow, "matmul.tf32": quick}, sources={})
    assert both.curve("op", "matmul", "float32") is slow
    assert both.allowing(("matmul",)).curve("op", "matmul", "float32") is quick
    assert both.allowing(("conv",)).curve("op", "matmul", "float32") is slow
    one = replace(H100, curves={"matmul.float32": slow}, sources={})
    assert one.allowing(("matmul",)).curve("op", "matmul", "float32") is None, "it has the plain rate"


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm", "a100-80gb", "a100-40gb"])
def test_every_dtype_is_priced_at_a_rate_that_is_reached(name: str) -> None:
    """None at the data sheet's peak while another is at what somebody measured: that would favour the former."""
    hardware = Hardware.load(name)
    share = hardware.rate("bfloat16", "matmul") / hardware.flops_per_s["bfloat16"]
    for dtype in ("float64", "float32", "tf32", "float16"):
        source = hardware.sources[f"achieved_flops_per_s.{dtype}"]
        if source.startswith("measured by autopar.calibrate"):
            peak = hardware.flops_per_s[dtype]
            assert 0.5 * peak < hardware.rate(dtype, "matmul") < 0.9 * peak
        else:
            assert hardware.rate(dtype, "matmul") == pytest.approx(share * hardware.flops_per_s[dtype], rel=5e-3), dtype
