"""What is changed of a machine: links of mesh axes, arithmetic, memory; and the hardware that this makes.

    bandwidth, latency   NAME=FIGURE with commas between: a factor of what the axis has (2x), or what it has then
                         (400GB/s, 5us); NAME is an axis of the mesh, or "all"
    flops, hbm           a factor: of all arithmetic on the device; of its memory's bandwidth

A figure that was measured as a curve is scaled as a whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.mesh import Mesh
from cost_models.curves import NAMES, Curve
from cost_models.hardware import IMAGINED, Factors, Hardware
from cost_models.price import link_of, links_of
from cost_models.steps import MATRIX_KINDS

ALL = "all"
BANDWIDTH, LATENCY = "bandwidth", "latency"
FIGURES = {BANDWIDTH: "bytes_per_s", LATENCY: "latency_s"}  # as a profile calls them
EXAMPLES = {BANDWIDTH: "400GB/s", LATENCY: "5us"}
UNITS: Mapping[str, Mapping[str, float]] = {
    BANDWIDTH: {
        "B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
        "KiB/s": 2.0**10, "MiB/s": 2.0**20, "GiB/s": 2.0**30, "TiB/s": 2.0**40,
    },
    LATENCY: {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}  # fmt: skip
_NUMBER = re.compile(r"\s*([-+]?(?:nan|inf|[0-9.]+(?:e[-+]?[0-9]+)?))\s*([A-Za-z]*(?:/s)?)\s*", re.ASCII)


@dataclass(frozen=True)
class Changes:
    """Factors of the machine's figures. `axes`: of the links of mesh axes; `capacity_bytes`: of the device's memory,
    where somebody wants more than there is. `words`: what was asked for, as the name of the machine has it.
    """

    words: tuple[str, ...] = ()
    axes: Mapping[str, Factors] = field(default_factory=dict[str, Factors])
    flops: float = 1.0
    hbm: float = 1.0
    capacity_bytes: int | None = None


def changes_of(
    hardware: Hardware,
    mesh: Mesh,
    *,
    bandwidth: str | None = None,
    latency: str | None = None,
    flops: str | None = None,
    hbm: str | None = None,
) -> Changes:
    """What the words ask for. Raises ValueError, naming the word, for what is no axis or no figure, and for
    figures that no machine has.
    """
    wider = _of_axes(BANDWIDTH, bandwidth, hardware, mesh)
    slower = _of_axes(LATENCY, latency, hardware, mesh)
    axes = {
        axis: Factors(slower.get(axis, 1.0), wider.get(axis, 1.0))
        for axis in mesh.names
        if axis in wider or axis in slower
    }
    told = [(BANDWIDTH, bandwidth), (LATENCY, latency), ("flops", flops), ("hbm", hbm)]
    words = tuple(f"{what} {text.replace(' ', '')}" for what, text in told if text is not None)
    changes = Changes(words, axes, _factor_of("flops", flops), _factor_of("hbm", hbm))
    try:
        links_of(imagined(hardware, changes), mesh.names, mesh.sizes)
    except ValueError as error:  # a figure that no machine has
        raise ValueError(f"with {', '.join(words)}, {error}") from error
    return changes


def imagined(hardware: Hardware, changes: Changes) -> Hardware:
    """The machine with these changes, under a name that says them; itself without any.

    Raises ValueError where a figure becomes one that no machine has.
    """
    if not changes.words:
        return hardware
    flops, hbm = changes.flops, changes.hbm

    def curve(name: str, known: Curve) -> Curve:
        found = NAMES.fullmatch(name)
        kind = found["kind"] if found else None
        if found is None or found["reach"] or name.startswith("copy.") or kind == "host":
            return known
        by_flops = kind in MATRIX_KINDS or known.over != "bytes"
        return known.scaled(1.0, 1 / (flops if by_flops else hbm))

    tiers = dict(hardware.tiers)
    is_host = tiers["hbm"].bytes_per_s == tiers["host"].bytes_per_s  # the device of a CPU
    for name in ("hbm", "host") if is_host else ("hbm",):
        tiers[name] = replace(tiers[name], bytes_per_s=tiers[name].bytes_per_s * hbm)
    if changes.capacity_bytes is not None:
        tiers["hbm"] = replace(tiers["hbm"], capacity_bytes=changes.capacity_bytes)
    return replace(
        hardware,
        name=f"{hardware.name}{IMAGINED}{', '.join(changes.words)}",
        vector_flops_per_s=hardware.vector_flops_per_s * flops,
        flops_per_s={dtype: rate * flops for dtype, rate in hardware.flops_per_s.items()},
        achieved_flops_per_s={dtype: rate * flops for dtype, rate in hardware.achieved_flops_per_s.items()},
        tiers=tiers,
        curves={name: curve(name, known) for name, known in hardware.curves.items()},
        axes=changes.axes,
        device="",
    )


# --- words -----------------------------------------------------------------------------------------------------------


def _of_axes(what: str, text: str | None, hardware: Hardware, mesh: Mesh) -> dict[str, float]:
    """Axis -> the factor of its link's figure."""
    found: dict[str, float] = {}
    for part, name, figure in _parts(what, text):
        able = [axis for axis, size in zip(mesh.names, mesh.sizes, strict=True) if size > 1]
        if name != ALL and name not in mesh.names:
            raise ValueError(
                f"--{what} {part}: mesh {mesh} has no axis {name!r}; choose {', '.join(mesh.names)}, or {ALL}"
            )
        if not able or name not in (ALL, *able):
            raise ValueError(f"--{what} {part}: {name} is of one rank (mesh {mesh}), which sends nothing")
        for axis in able if name == ALL else [name]:
            if axis in found:
                raise ValueError(f"--{what} says twice what {axis} has; leave one out")
            number, unit = _figure(what, part, figure)
            found[axis] = number if unit == "x" else number * UNITS[what][unit] / _now(what, hardware, mesh, axis)
    return found


def _parts(what: str, text: str | None) -> Iterator[tuple[str, str, str]]:
    for part in text.split(",") if text is not None else []:
        name, equals, figure = part.strip().partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--{what} {part.strip()!r} is not AXIS=FIGURE; write for example {ALL}=2x")
        yield part.strip(), name.strip(), figure


def _now(what: str, hardware: Hardware, mesh: Mesh, axis: str) -> float:
    """What the axis has in the profile."""
    link = link_of(hardware, mesh.names, mesh.sizes, axis)
    if link.curves:
        raise ValueError(
            f"--{what}: {hardware.name} has measured curves of collectives over {axis}, and no one figure in the place "
            f"of which another could stand; give a factor, such as {axis}=2x"
        )
    return link.bytes_per_s if what == BANDWIDTH else link.latency_s


def _figure(what: str, part: str, figure: str) -> tuple[float, str]:
    """(number, unit): the unit is "x", or one of UNITS."""
    read = _NUMBER.fullmatch(figure)
    number = _float(read[1]) if read is not None else None
    units, example = UNITS.get(what, {}), EXAMPLES.get(what)
    if read is None or number is None or read[2] not in ("", "x", *units):
        more = f", or {example}; units are {', '.join(units)}" if units else ""
        raise ValueError(f"--{what} {part!r} is no figure; write a factor, such as 2x{more}")
    if not 0 < number < math.inf:
        raise ValueError(f"--{what} {part}: {read[1]} is not above 0 and finite; 2x is twice as much, 0.5x half")
    if not read[2]:
        raise ValueError(f"--{what} {part} has no unit; for a factor write {part}x")
    return number, read[2]


def _factor_of(what: str, text: str | None) -> float:
    """Of an option that has one factor."""
    return 1.0 if text is None else _figure(what, text.strip(), text)[0]


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
