"""Samples to a profile, the profile against samples it has not seen, and against the one that stood there before."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from autopar.calibrate.fit import fit
from autopar.calibrate.measure import Sample
from autopar.ir.mesh import Mesh
from autopar.machine.device import processors
from autopar.price.pricer import Pricer
from cost_models.curves import INTENSITY, Curve
from cost_models.hardware import Hardware, HostLink, Link, Tier
from cost_models.steps import COLLECTIVES, MATRIX_KINDS, Comm, Compute

EXTENDED = ("ops.aten.", "ops.reorder.", "ops.slice.")  # operators that make fresh results
DTYPES = ("float32", "bfloat16")


@dataclass
class _Measured:
    """Where the plain figures that the samples tell are from. `how`: machine, date and versions."""

    how: str
    sources: dict[str, str] = field(default_factory=dict[str, str])

    def figure(self, name: str, value: float, what: str) -> float:
        """The value, once it is noted what it was read off."""
        self.sources[name] = f"measured {self.how}: {what}"
        return value


def profile_from(samples: Sequence[Sample], base: Hardware, name: str, how: str, shares_processors: bool) -> Hardware:
    """The profile that the samples make; what they do not tell (capacities, links between nodes) is `base`'s.

    `how`: machine, date and versions, for the sources. `shares_processors`: ranks beyond the processors take turns.
    """
    first = next(s.sizes for s in samples if isinstance(s.step, Compute))  # the ranks that compute was measured with
    curves, of_curves = _curves(samples, first, how)
    measured = _Measured(how)
    flops, achieved = _flops(measured, base, [s for s in samples if s.sizes == first])
    memory = curves["elementwise.float32"]
    launch = measured.figure("launch_s", min(max(memory.seconds(0.0, 48.0), 1e-9), 1.0), "adding a few numbers")
    quickest = max(rate for _, rate in memory.points)
    vector = measured.figure("vector_flops_per_s", quickest / 12, "adding numbers in cache, three of four bytes each")
    tiers = _tiers(measured, base, curves, shares_processors)
    host_link = _host_link(measured, base, curves)
    links = _links(measured, base, curves, shares_processors)
    slowdown = _slowdown(samples, first, shares_processors)
    for what, factor in slowdown.items():
        measured.figure(f"slowdown.{what}", factor, f"against {first[0]} ranks, on {processors()} processors")
    return replace(
        base, name=name, curves=curves, launch_s=launch, vector_flops_per_s=vector, flops_per_s=flops,
        achieved_flops_per_s=achieved, tiers=tiers, links=links, host_link=host_link, slowdown=slowdown,
        sources=dict(base.sources) | of_curves | measured.sources,
    )  # fmt: skip


def _curves(samples: Sequence[Sample], first: tuple[int, ...], how: str) -> tuple[dict[str, Curve], dict[str, str]]:
    """All curves by name, compute as with the ranks `first`, and where they are from."""
    curves: dict[str, Curve] = {}
    sources: dict[str, str] = {}
    of_curve: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if not sample.held and (isinstance(sample.step, Comm) or sample.sizes == first):
            of_curve[sample.curve].append(sample)
    for curve, found in of_curve.items():
        curves[curve] = fit([(*_work(s), s.seconds) for s in found], _over(found[0]))
        ranks = "x".join(map(str, found[0].sizes))
        sources[f"curves.{curve}"] = f"measured {how}, {ranks} ranks: {len(found)} points"
    for curve in [name for name in curves if name.startswith(EXTENDED)]:
        kind = curves.get(f"elementwise.{curve.rpartition('.')[2]}")
        if kind is not None and curves[curve].over == kind.over:
            curves[curve] = _extended(curves[curve], kind)
    return curves, sources


def _flops(measured: _Measured, base: Hardware, samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """Flops per second by dtype, the peak and what is achieved, from the largest product that was measured. The peak of
    a GPU stays that of its data sheet.
    """
    flops, achieved = dict(base.flops_per_s), dict(base.achieved_flops_per_s)
    for dtype in DTYPES:
        if squares := [s for s in samples if s.curve == f"matmul.{dtype}"]:
            most = max(squares, key=lambda s: _work(s)[0])
            rates, name = (achieved, "achieved_flops_per_s") if base.reserve else (flops, "flops_per_s")
            rates[dtype] = measured.figure(f"{name}.{dtype}", _work(most)[0] / most.seconds, "the largest product")
    return flops, achieved


def _tiers(
    measured: _Measured, base: Hardware, curves: Mapping[str, Curve], shares_processors: bool
) -> dict[str, Tier]:
    """Memory as fast as a stream through it; a host that computes has one memory."""
    stream = curves["stream.float32"].points[-1][1]
    told = {"hbm": "a large sum in place"} | ({"host": "the same memory as tiers.hbm"} if shares_processors else {})
    return dict(base.tiers) | {
        tier: replace(base.tiers[tier], bytes_per_s=measured.figure(f"tiers.{tier}.bytes_per_s", stream, what))
        for tier, what in told.items()
    }


def _host_link(measured: _Measured, base: Hardware, curves: Mapping[str, Curve]) -> HostLink:
    """Rates of large copies between host and device, where they were measured."""
    ways = [
        measured.figure(f"host_link.{way}_bytes_per_s", curves[f"copy.{way}"].points[-1][1], "a large copy")
        if f"copy.{way}" in curves
        else getattr(base.host_link, f"{way}_bytes_per_s")
        for way in ("h2d", "d2h")
    ]
    return HostLink(*ways)


def _links(
    measured: _Measured, base: Hardware, curves: Mapping[str, Curve], shares_processors: bool
) -> dict[str, Link]:
    """Links as all-gathers over them tell; ranks that share processors have one link, whatever it is called."""
    links = dict(base.links)
    for reach in ("intra", "inter"):
        if link := _link(curves, reach):
            links[reach] = Link(
                measured.figure(f"links.{reach}.latency_s", link.latency_s, "start-up of an all-gather, per hop"),
                measured.figure(f"links.{reach}.bytes_per_s", link.bytes_per_s, "received in an all-gather of 8 MiB"),
            )
    if shares_processors and "links.intra.latency_s" in measured.sources:
        links["inter"] = links["intra"]
        for part in ("latency_s", "bytes_per_s"):
            measured.figure(f"links.inter.{part}", getattr(links["intra"], part), "the same loopback as links.intra")
    return links


def _extended(curve: Curve, kind: Curve) -> Curve:
    """`curve`, and beyond its last point the shape of that of its kind: large results pay for fresh pages too."""
    size, rate = curve.points[-1]
    before = kind.rate(size)
    more = tuple((at, rate * min(1.0, of / before)) for at, of in kind.points if at > size * 1.01)
    return replace(curve, points=(*curve.points, *more))


def _work(sample: Sample) -> tuple[float, float]:
    step = sample.step
    return (step.flops if isinstance(step, Compute) else 0.0), float(step.nbytes)


def _over(sample: Sample) -> str:
    return INTENSITY if isinstance(sample.step, Compute) and sample.step.kind in MATRIX_KINDS else "bytes"


def _link(curves: Mapping[str, Curve], reach: str) -> Link | None:
    """Latency and rate of the ring of all ranks, from its all-gather."""
    rings = [name for name in curves if name.startswith(f"{reach}.all_gather.")]
    if not rings:
        return None
    name = min(rings, key=lambda name: int(name.rpartition("x")[2]))
    ranks, form, curve = int(name.split(".")[2].split("x")[0]), COLLECTIVES["all_gather"], curves[name]
    latency_s = max(curve.seconds(0.0, 64.0), 1e-9) / form.hops(ranks)
    return Link(latency_s, curve.rate(2**23) * form.pieces(ranks) / ranks)


def _slowdown(samples: Sequence[Sample], first: tuple[int, ...], shares_processors: bool) -> dict[str, float]:
    """How much longer compute takes with more ranks than `first`: from the steps that were timed with both."""
    if not shares_processors:
        return {}
    ranks = first[0]
    found = {f"{what}.{ranks}": 1.0 for what in ("matrix", "memory")}
    if (cores := processors()) > ranks:
        found |= {f"{what}.{cores}": 1.0 for what in ("matrix", "memory")}
    times: dict[tuple[object, object], list[float]] = defaultdict(list)
    for s in samples:
        if s.sizes == first:
            times[s.curve, s.step].append(s.seconds)
    alone = {step: median(seconds) for step, seconds in times.items()}
    for sizes in sorted({s.sizes for s in samples if isinstance(s.step, Compute)} - {first}):
        for what in ("matrix", "memory"):
            ratios = [
                s.seconds / alone[s.curve, s.step]
                for s in samples
                if s.sizes == sizes and isinstance(s.step, Compute) and (s.curve, s.step) in alone
                if (_over(s) == INTENSITY) == (what == "matrix")
            ]
            if ratios:
                found[f"{what}.{sizes[0]}"] = median(ratios)
    return found


def errors(hardware: Hardware, samples: Sequence[Sample]) -> dict[str, list[float]]:
    """curve -> relative errors of what the planner's own price says of the samples that were held out of the fit."""
    found: dict[str, list[float]] = defaultdict(list)
    pricers: dict[tuple[int, ...], Pricer] = {}
    for sample in samples:
        if sample.held:
            if sample.sizes not in pricers:
                names = tuple(f"a{i}" for i in range(len(sample.sizes)))
                pricers[sample.sizes] = Pricer.on(Mesh(names, sample.sizes), hardware, "adamw")
            found[sample.curve].append(pricers[sample.sizes].seconds([sample.step]) / sample.seconds - 1)
    return found


def check_table(hardware: Hardware, samples: Sequence[Sample]) -> str:
    """Per curve how far the fit lies from its points and from what it has not seen; medians over each sort of step."""
    missed = errors(hardware, samples)
    lines = [f"{'curve':<64} {'residual':>8} {'held out':>8}"]
    for name, curve in hardware.curves.items():
        unseen = f"{median(map(abs, missed[name])):8.1%}" if missed.get(name) else f"{'':>8}"
        lines.append(f"{name:<64} {curve.residual:8.1%} {unseen}")
    for what, is_comm in (("operators", False), ("collectives", True)):
        of = [abs(e) for name, es in missed.items() if name.startswith(("intra.", "inter.")) == is_comm for e in es]
        if of:
            lines.append(f"{what} not in the fit: median error {median(of):.1%} of {len(of)} (worst {max(of):.0%})")
    return "\n".join(lines)


def drift_table(old: Hardware, new: Hardware) -> str:
    """Every plain figure, and the seconds of every curve in its middle: old, new, new / old."""
    rows: list[tuple[str, float, float]] = [
        (name, old.figures[name], value) for name, value in new.figures.items() if name in old.figures
    ]
    for name, curve in new.curves.items():
        if (before := old.curves.get(name)) is not None and before.over == curve.over:
            middle = curve.points[len(curve.points) // 2][0]
            job = (middle * 1e6, 1e6) if curve.over == INTENSITY else (0.0, middle)
            rows.append((f"curves.{name} [s]", before.seconds(*job), curve.seconds(*job)))
    rows = [row for row in rows if row[1] != row[2]]
    if not rows:
        return "no figure differs"
    lines = [f"{'figure':<72} {'old':>10} {'new':>10} {'ratio':>6}"]
    lines += [f"{name:<72} {was:10.4g} {now:10.4g} {now / was:6.2f}" for name, was, now in rows]
    apart = [name for name, was, now in rows if not 1 / 1.5 < now / was < 1.5]
    lines.append(f"{len(apart)} of {len(rows)} moved by more than half" if apart else "none moved by more than half")
    return "\n".join(lines)


def save(hardware: Hardware, path: Path) -> None:
    """Write the profile; whoever looks at `path` sees the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".toml", dir=path.parent)
    os.close(handle)
    try:
        hardware.save(draft)
        Hardware.load(Path(draft))
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
