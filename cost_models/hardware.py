"""What a machine can do: rates, memories and links, each figure with where it comes from.

A profile is a TOML file in which every figure is a table `{ value = ..., source = "..." }`; the ones that come with
autopar lie in `cost_models/profiles/`. Units are seconds, bytes and floating point operations, all for one rank:

    ranks_per_node                 ranks that share a node
    launch_s                       seconds that each kernel adds to its work
    vector_flops_per_s             arithmetic outside the matrix units
    flops_per_s.<dtype>            matrix products: peak of the data sheet, or measured where no sheet exists
    achieved_flops_per_s.<dtype>   matrix products as somebody measured them; where given, this one is used
    tiers.<tier>.capacity_bytes    memory of one rank; what a node shares is divided by ranks_per_node
    tiers.<tier>.bytes_per_s       read or write bandwidth of that memory
    links.intra|inter.latency_s    seconds of one message between neighbours, inside a node or between nodes
    links.intra|inter.bytes_per_s  per rank, one direction, effective for a ring; a NIC that a node shares is divided by
                                   ranks_per_node
    host_link.h2d|d2h_bytes_per_s  copies between host and device memory
    slowdown.matrix|memory.<ranks> how many times longer compute takes with so many ranks busy on a node that shares
                                   its processors (matrix: matmul, attention, conv; memory: all else)
    overlaps                       true where collectives run beside compute, on streams of their own; false (or left
                                   out) where communication takes the processors that compute

A calibrated profile (`python -m autopar.calibrate`) also has curves, `curves.<name> = { over, base_s, points, residual,
source }`; where there is one it prices before the plain figure. `cost_models.curves` says which there are.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, cast

from cost_models.curves import NAMES, Curve, check_name
from cost_models.steps import MATRIX_KINDS, TIERS
from cost_models.whole_file import write_whole

# A figure outside its range is a slip of the pen (GB for bytes, us for seconds), not a machine.
PLAUSIBLE = {
    "ranks_per_node": (1, 1e6),
    "flops_per_s": (1e6, 1e19),
    "bytes_per_s": (1e5, 1e16),
    "capacity_bytes": (1e6, 1e17),
    "latency_s": (1e-10, 10.0),
    "slowdown": (0.1, 1e4),
}
SLOWS = ("matrix", "memory")  # what a slowdown is of
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}  # what complex numbers are made of


@dataclass(frozen=True, slots=True)
class Tier:
    """One memory of one rank: its size in bytes and its bandwidth in bytes per second."""

    capacity_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """What one rank's messages travel on: seconds per message, bytes per second in one direction.

    `pairwise` holds the figures for an all-to-all where they differ: a ring crosses a node's border once and may use
    every NIC of the node, while an all-to-all sends most of its bytes through the rank's own NIC.
    `curves` holds what was measured of a collective on groups of this shape; it goes before the other figures.
    """

    latency_s: float
    bytes_per_s: float
    pairwise: Link | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])  # collective -> as measured on such a group


@dataclass(frozen=True, slots=True)
class HostLink:
    """Bytes per second of copies from host to device memory and back."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float


@dataclass(frozen=True)
class Hardware:
    """One rank of a machine and its links; see the module for every figure's meaning and unit.

    Two profiles are equal if their figures are; `sources` (figure name -> where it comes from) does not count.
    """

    name: str
    ranks_per_node: int
    launch_s: float
    vector_flops_per_s: float
    flops_per_s: Mapping[str, float]
    tiers: Mapping[str, Tier]
    links: Mapping[str, Link]
    host_link: HostLink
    achieved_flops_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    slowdown: Mapping[str, float] = field(default_factory=dict[str, float])
    overlaps: bool = False
    sources: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)

    def __post_init__(self) -> None:
        for part, names, known in (("tiers", self.tiers, TIERS), ("links", self.links, ("intra", "inter"))):
            if missing := [name for name in known if name not in names]:
                raise ValueError(f"{part}.{missing[0]} is missing")
        for figure, value in self.figures.items():
            _check(figure, value)
        for name, curve in self.curves.items():
            check_name(name, curve.over)
        for name in self.slowdown:
            what, _, ranks = name.partition(".")
            if what not in SLOWS or not ranks.isdigit() or int(ranks) < 1:
                raise ValueError(f"slowdown.{name} is not a figure of a hardware profile")

    @cached_property
    def figures(self) -> dict[str, float]:
        """Every number under its dotted name, as in the TOML file."""
        flat: dict[str, float] = {
            "ranks_per_node": self.ranks_per_node,
            "launch_s": self.launch_s,
            "vector_flops_per_s": self.vector_flops_per_s,
            "host_link.h2d_bytes_per_s": self.host_link.h2d_bytes_per_s,
            "host_link.d2h_bytes_per_s": self.host_link.d2h_bytes_per_s,
        }
        flat |= {f"flops_per_s.{dtype}": rate for dtype, rate in self.flops_per_s.items()}
        flat |= {f"achieved_flops_per_s.{dtype}": rate for dtype, rate in self.achieved_flops_per_s.items()}
        for name, tier in self.tiers.items():
            flat[f"tiers.{name}.capacity_bytes"] = tier.capacity_bytes
            flat[f"tiers.{name}.bytes_per_s"] = tier.bytes_per_s
        for name, link in self.links.items():
            flat[f"links.{name}.latency_s"] = link.latency_s
            flat[f"links.{name}.bytes_per_s"] = link.bytes_per_s
        return flat | {f"slowdown.{name}": factor for name, factor in self.slowdown.items()}

    @cached_property
    def digest(self) -> str:
        """Hash (hex) of name and figures, the same on every machine: a key for caches. Sources do not enter."""
        content: dict[str, Any] = {"name": self.name, "figures": {name: float(v) for name, v in self.figures.items()}}
        if self.curves:
            content["curves"] = {name: (c.over, c.base_s, c.points) for name, c in self.curves.items()}
        if self.overlaps:
            content["overlaps"] = True
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def _matrix_flops_per_s(self) -> dict[str, float]:
        return dict(self.flops_per_s) | dict(self.achieved_flops_per_s)

    def rate(self, dtype: str, kind: str) -> float:
        """Floating point operations per second for work of this dtype and kind (see `Compute`).

        Measured before peak; a dtype for which the matrix units have no figure runs on the ordinary units. Complex
        numbers run where their parts do.
        """
        if kind in MATRIX_KINDS:
            rates = self._matrix_flops_per_s
            return rates.get(dtype, rates.get(PARTS.get(dtype, ""), self.vector_flops_per_s))
        return self.vector_flops_per_s

    @cached_property
    def _curve_of(self) -> dict[tuple[str, str, str], Curve | None]:
        return {}  # what `curve` found, for each question

    def curve(self, op: str, kind: str, dtype: str) -> Curve | None:
        """What was measured of an operator of that kind (see `Compute`): of itself, else of its kind; None if nothing.

        Memory does not care for dtypes: without a curve of its own, one that matrix units do not run has float32's.
        Complex numbers have the curves of their parts.
        """
        if not self.curves:
            return None
        asked = (op, kind, dtype)
        if asked not in self._curve_of:
            plain = kind if kind in MATRIX_KINDS or kind == "host" else "elementwise"
            names = [f"ops.{op}.{dtype}", f"{plain}.{dtype}"]
            if dtype in PARTS:
                names.append(f"{plain}.{PARTS[dtype]}")
            if plain not in MATRIX_KINDS:
                names.append(f"{plain}.float32")
            self._curve_of[asked] = next((self.curves[name] for name in names if name in self.curves), None)
        return self._curve_of[asked]

    def slowed_by(self, what: str, ranks: int) -> float:
        """How many times longer compute ("matrix" or "memory") takes with so many busy ranks on a node; 1 if not known.

        Between the measured numbers of ranks it goes in a line, above them in proportion, below them it stays.
        """
        known = sorted((int(n.split(".")[1]), f) for n, f in self.slowdown.items() if n.startswith(what + "."))
        if not known or ranks <= known[0][0]:
            return known[0][1] if known else 1.0
        for (fewer, low), (more, high) in pairwise(known):
            if ranks <= more:
                return low + (high - low) * (ranks - fewer) / (more - fewer)
        most, factor = known[-1]
        return factor * ranks / most

    def crowded(self, ranks: int) -> Hardware:
        """This profile as a rank sees it where so many are busy on its node: compute slower by `slowdown`."""
        matrix, memory = (self.slowed_by(what, ranks) for what in SLOWS)
        if matrix == memory == 1:
            return self

        def factor(name: str, curve: Curve) -> float:
            found = NAMES.fullmatch(name)
            if found is None or found["reach"] or name.startswith("copy."):
                return 1.0
            return memory if curve.over == "bytes" else matrix

        made = replace(
            self,
            launch_s=self.launch_s * memory,
            vector_flops_per_s=self.vector_flops_per_s / memory,
            flops_per_s={dtype: rate / matrix for dtype, rate in self.flops_per_s.items()},
            achieved_flops_per_s={dtype: rate / matrix for dtype, rate in self.achieved_flops_per_s.items()},
            tiers={name: replace(tier, bytes_per_s=tier.bytes_per_s / memory) for name, tier in self.tiers.items()},
            curves={name: c.scaled(factor(name, c), factor(name, c)) for name, c in self.curves.items()},
            slowdown={},
        )
        made.__dict__["digest"] = self.digest  # it is still that profile: plans are known by it
        return made

    @classmethod
    def load(cls, name_or_path: str | Path) -> Hardware:
        """The profile of that name, or the one in that TOML file (a Path, or a string ending in ".toml").

        Raises ValueError for an unknown name, listing the known ones, and for a figure that is missing, not a number,
        not positive, absurd, unknown or without a source, naming the figure and the file; FileNotFoundError where
        there is no such file.
        """
        if isinstance(name_or_path, Path) or name_or_path.endswith(".toml"):
            path = Path(name_or_path)
            return _parsed(path.read_text(encoding="utf-8"), str(path))
        if name_or_path not in (known := known_hardware()):
            raise ValueError(f"no hardware profile {name_or_path!r}; known profiles: {', '.join(known)}")
        file = resources.files("cost_models") / "profiles" / f"{name_or_path}.toml"
        return _parsed(file.read_text(encoding="utf-8"), str(file))

    def save(self, path: str | Path) -> None:
        """Write the profile as TOML, so that `load(path)` gives it back: how a calibrated machine is kept.

        Raises ValueError for a figure without an entry in `sources`.
        """
        told = {*self.figures, *(f"curves.{name}" for name in self.curves), *(("overlaps",) if self.overlaps else ())}
        if unsourced := sorted(told - set(self.sources)):
            raise ValueError(f"{unsourced[0]} has no source: say where the number comes from")
        lines = [f"name = {json.dumps(self.name)}"]
        if "overlaps" in self.sources:
            source = json.dumps(self.sources["overlaps"])
            lines.append(f"overlaps = {{ value = {json.dumps(self.overlaps)}, source = {source} }}")
        for figure, value in self.figures.items():
            lines.append(f"{figure} = {{ value = {value!r}, source = {json.dumps(self.sources[figure])} }}")
        for name, curve in self.curves.items():
            points = ", ".join(f"[{size!r}, {rate!r}]" for size, rate in curve.points)
            lines.append(
                f'curves.{name} = {{ over = "{curve.over}", base_s = {curve.base_s!r}, points = [{points}], '
                f"residual = {curve.residual!r}, source = {json.dumps(self.sources[f'curves.{name}'])} }}"
            )
        write_whole(path, "\n".join(lines) + "\n")


def known_hardware() -> list[str]:
    """Names of the profiles that come with autopar, sorted."""
    folder = resources.files("cost_models") / "profiles"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def _check(figure: str, value: object) -> None:
    """Raise ValueError if `value` cannot be the figure of that name."""
    kind = figure.rpartition(".")[2]
    if figure.startswith("slowdown."):
        kind = "slowdown"
    elif figure.startswith(("flops_per_s.", "achieved_flops_per_s.")) or kind == "vector_flops_per_s":
        kind = "flops_per_s"
    elif kind in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
        kind = "bytes_per_s"
    elif kind == "launch_s":
        kind = "latency_s"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{figure} is {value!r}, must be a number")
    low, high = PLAUSIBLE[kind]
    if not (isfinite(value) and low <= value <= high):
        raise ValueError(f"{figure} is {value}, must lie between {low:g} and {high:g}")
    if kind in ("ranks_per_node", "capacity_bytes") and value != int(value):
        raise ValueError(f"{figure} is {value}, must be a whole number")


def _flatten(table: Mapping[str, Any], prefix: str, values: dict[str, Any], sources: dict[str, str]) -> None:
    """Collect every `{ value, source }` of a TOML document under its dotted name."""
    for key, entry in table.items():
        figure = prefix + key
        if not isinstance(entry, dict):
            raise ValueError(f'{figure} is {entry!r}, must be a table {{ value = ..., source = "..." }}')
        entry = cast(dict[str, Any], entry)
        if "value" not in entry and "source" not in entry:
            _flatten(entry, figure + ".", values, sources)
            continue
        if extra := sorted(set(entry) - {"value", "source"}):
            raise ValueError(f"{figure} has an unknown key {extra[0]!r}")
        if "value" not in entry:
            raise ValueError(f"{figure} has no value")
        source = entry.get("source")
        if not isinstance(source, str) or not source.strip():
            raise ValueError(f"{figure} has no source: say where the number comes from")
        values[figure], sources[figure] = entry["value"], source


def _curve(name: str, entry: Any) -> tuple[Curve, str]:
    """One `{ over, base_s, points, residual, source }`, and the source."""
    figure = f"curves.{name}"
    if not isinstance(entry, dict):
        raise ValueError(f"{figure} is {entry!r}, must be a table with points and a source")
    entry = cast(dict[str, Any], entry)
    if wrong := sorted({"over", "base_s", "points", "residual", "source"} ^ set(entry)):
        raise ValueError(f"{figure} has {'an unknown key' if wrong[0] in entry else 'no'} {wrong[0]}")
    source, over, points = entry["source"], entry["over"], entry["points"]
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{figure} has no source: say where the number comes from")
    if not isinstance(points, list):
        raise ValueError(f"{figure}: points are {points!r}, must be a list")
    numbers: list[tuple[float, float]] = []
    for point in cast(list[Any], points):
        if not isinstance(point, list) or len(pair := cast(list[Any], point)) != 2:
            raise ValueError(f"{figure}: {point!r} is not a point [size, rate]")
        numbers.append((_number(figure, pair[0]), _number(figure, pair[1])))
    try:
        base_s, residual = _number(figure, entry["base_s"]), _number(figure, entry["residual"])
        check_name(name, str(over))
        return Curve(tuple(numbers), base_s, residual, str(over)), source
    except ValueError as error:
        told = str(error)
        raise ValueError(told if told.startswith("curves.") else f"{figure}: {told}") from error


def _number(figure: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{figure}: {value!r} must be a number")
    return float(value)


def _curve_entries(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of the table of curves, under their dotted names."""
    found: dict[str, Any] = {}
    for key, entry in table.items():
        if isinstance(entry, dict) and not {"points", "source", "base_s"} & set(inner := cast(dict[str, Any], entry)):
            found |= _curve_entries(inner, f"{prefix}{key}.")
        else:
            found[prefix + key] = entry
    return found


def _parsed(text: str, origin: str) -> Hardware:
    """The profile in `text`; errors name the figure and `origin`, the file."""
    try:
        document = tomllib.loads(text)
        name = document.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ValueError("name is missing")
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        table = document.pop("curves", {})
        if not isinstance(table, dict):
            raise ValueError(f"curves is {table!r}, must be a table")
        curves: dict[str, Curve] = {}
        for curve_name, entry in _curve_entries(cast(dict[str, Any], table)).items():
            curves[curve_name], sources[f"curves.{curve_name}"] = _curve(curve_name, entry)
        _flatten(document, "", values, sources)
        overlaps = values.pop("overlaps", False)
        if not isinstance(overlaps, bool):
            raise ValueError(f"overlaps is {overlaps!r}, must be true or false")
        unread = dict(values)

        def take(figure: str) -> float:
            if figure not in unread:
                raise ValueError(f"{figure} is missing")
            value = unread.pop(figure)
            _check(figure, value)
            return value

        def by_key(table: str) -> dict[str, float]:
            prefix = table + "."
            return {figure.removeprefix(prefix): take(figure) for figure in values if figure.startswith(prefix)}

        hardware = Hardware(
            name=name,
            ranks_per_node=int(take("ranks_per_node")),
            launch_s=take("launch_s"),
            vector_flops_per_s=take("vector_flops_per_s"),
            flops_per_s=by_key("flops_per_s"),
            achieved_flops_per_s=by_key("achieved_flops_per_s"),
            tiers={
                tier: Tier(int(take(f"tiers.{tier}.capacity_bytes")), take(f"tiers.{tier}.bytes_per_s"))
                for tier in TIERS
            },
            links={
                reach: Link(take(f"links.{reach}.latency_s"), take(f"links.{reach}.bytes_per_s"))
                for reach in ("intra", "inter")
            },
            host_link=HostLink(take("host_link.h2d_bytes_per_s"), take("host_link.d2h_bytes_per_s")),
            curves=curves,
            slowdown=by_key("slowdown"),
            overlaps=overlaps,
            sources=sources,
        )
        if "float32" not in hardware.flops_per_s:
            raise ValueError("flops_per_s.float32 is missing")
        if unread:
            raise ValueError(f"{min(unread)} is not a figure of a hardware profile")
    except ValueError as error:  # includes a TOML syntax error
        raise ValueError(f"hardware profile {origin}: {error}") from error
    return hardware
