"""Links that somebody imagines otherwise: an axis alone has its factor, several at once what they share."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cost_models.curves import Curve
from cost_models.hardware import Factors, Hardware, Link
from cost_models.price import links_of, seconds
from cost_models.steps import COLLECTIVES, Comm, axes_of

H100 = Hardware.load("h100-sxm")
MESHES = [
    (("data", "tensor"), (2, 4)), (("data", "tensor"), (2, 8)), (("data", "tensor"), (4, 4)),
    (("pod", "data", "tensor"), (2, 2, 4)), (("pod", "data", "tensor"), (3, 2, 4)),
]  # fmt: skip
meshes = pytest.mark.parametrize(("names", "sizes"), MESHES, ids=str)


def figures(link: Link) -> list[float]:
    """The larger the slower."""
    pair = link.pairwise or link
    return [link.latency_s, 1 / link.bytes_per_s, pair.latency_s, 1 / pair.bytes_per_s]


@meshes
def test_an_axis_alone_has_just_its_factors_and_the_others_nothing(names: tuple[str, ...], sizes: tuple[int, ...]):
    real = links_of(H100, names, sizes)
    for axis in names:
        then = links_of(replace(H100, axes={axis: Factors(3.0, 0.7)}), names, sizes)
        late, narrow, pair_late, pair_narrow = figures(real[axis])
        told = [late * 3, narrow / 0.7, pair_late * 3, pair_narrow / 0.7]
        assert figures(then[axis]) == pytest.approx(told, rel=1e-12)
        assert all(then[other] == real[other] for other in real if axis not in axes_of(other))


@meshes
def test_a_factor_of_all_axes_is_a_factor_of_the_links(names: tuple[str, ...], sizes: tuple[int, ...]):
    links = {
        reach: replace(link, latency_s=link.latency_s * 0.4, bytes_per_s=link.bytes_per_s * 2.5)
        for reach, link in H100.links.items()
    }
    profile = links_of(replace(H100, links=links), names, sizes)
    then = links_of(replace(H100, axes=dict.fromkeys(names, Factors(0.4, 2.5))), names, sizes)
    for group in then:
        assert figures(then[group]) == pytest.approx(figures(profile[group]), rel=1e-12), group


@meshes
def test_several_at_once_lie_between_their_axes_and_never_gain_by_a_worse_one(
    names: tuple[str, ...], sizes: tuple[int, ...]
):
    real = links_of(H100, names, sizes)
    for factors in product((0.5, 1.0, 4.0), repeat=len(names)):
        axes = {axis: Factors(1 / factor, factor) for axis, factor in zip(names, factors, strict=True)}
        then = links_of(replace(H100, axes=axes), names, sizes)
        worse = links_of(replace(H100, axes={**axes, names[0]: Factors(3.0, 0.25)}), names, sizes)
        for group, link in then.items():
            of = [factors[names.index(axis)] for axis in axes_of(group)]
            for now, was, bad in zip(figures(link), figures(real[group]), figures(worse[group]), strict=True):
                assert was / max(of) * (1 - 1e-12) <= now <= was / min(of) * (1 + 1e-12), (group, factors)
                assert bad >= now * (1 - 1e-12)


def test_a_wide_outer_axis_leaves_the_links_inside_of_a_node_as_they_are():
    names, sizes = ("data", "tensor"), (2, 8)
    for factor in (1e2, 1e3):
        then = links_of(replace(H100, axes={"data": Factors(bandwidth=factor)}), names, sizes)
        assert then["data+tensor"].bytes_per_s == H100.links["intra"].bytes_per_s
    narrow = links_of(replace(H100, axes={"tensor": Factors(bandwidth=0.01)}), names, sizes)
    assert narrow["data+tensor"].bytes_per_s == pytest.approx(0.01 * H100.links["intra"].bytes_per_s)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_was_measured_is_scaled_like_the_link(collective: str):
    curve = Curve(((1e3, 2e8), (1e6, 3e9)), base_s=4e-5)
    measured = replace(H100, curves={**H100.curves, f"intra.{collective}.2x4": curve})
    names, sizes = ("data", "tensor"), (2, 4)
    step = Comm(collective, "tensor", 4, 3_000_000)
    before, after = (
        seconds(step, machine, links_of(machine, names, sizes))
        for machine in (measured, replace(measured, axes={"tensor": Factors(2.0, 0.5)}))
    )
    assert after == pytest.approx(2 * before, rel=1e-12)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_is_finite_and_above_0(factor: float):
    with pytest.raises(ValueError, match="finite and above 0"):
        Factors(bandwidth=factor)


def test_imagined_figures_have_another_digest_and_no_file(tmp_path):
    then = replace(H100, axes={"tensor": Factors(bandwidth=2.0)})
    assert len({H100.digest, then.digest, replace(H100, axes={"data": Factors(bandwidth=2.0)}).digest}) == 3
    assert then != H100
    with pytest.raises(ValueError, match="no file has that"):
        then.save(tmp_path / "then.toml")
