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
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any, cast

from cost_models.steps import MATRIX_KINDS, TIERS

# A figure outside its range is a slip of the pen (GB for bytes, us for seconds), not a machine.
PLAUSIBLE = {
    "ranks_per_node": (1, 1e6),
    "flops_per_s": (1e6, 1e19),
    "bytes_per_s": (1e5, 1e16),
    "capacity_bytes": (1e6, 1e17),
    "latency_s": (1e-10, 10.0),
}


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
    """

    latency_s: float
    bytes_per_s: float
    pairwise: Link | None = None


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
    sources: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)

    def __post_init__(self) -> None:
        for part, names, known in (("tiers", self.tiers, TIERS), ("links", self.links, ("intra", "inter"))):
            if missing := [name for name in known if name not in names]:
                raise ValueError(f"{part}.{missing[0]} is missing")
        for figure, value in self.figures.items():
            _check(figure, value)

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
        return flat

    @cached_property
    def digest(self) -> str:
        """Hash (hex) of name and figures, the same on every machine: a key for caches. Sources do not enter."""
        content = {"name": self.name, "figures": {name: float(value) for name, value in self.figures.items()}}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def _matrix_flops_per_s(self) -> dict[str, float]:
        return dict(self.flops_per_s) | dict(self.achieved_flops_per_s)

    def rate(self, dtype: str, kind: str) -> float:
        """Floating point operations per second for work of this dtype and kind (see `Compute`).

        Measured before peak; a dtype for which the matrix units have no figure runs on the ordinary units.
        """
        if kind in MATRIX_KINDS:
            return self._matrix_flops_per_s.get(dtype, self.vector_flops_per_s)
        return self.vector_flops_per_s

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
        if unsourced := sorted(set(self.figures) - set(self.sources)):
            raise ValueError(f"{unsourced[0]} has no source: say where the number comes from")
        lines = [f"name = {json.dumps(self.name)}"]
        for figure, value in self.figures.items():
            lines.append(f"{figure} = {{ value = {value!r}, source = {json.dumps(self.sources[figure])} }}")
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def known_hardware() -> list[str]:
    """Names of the profiles that come with autopar, sorted."""
    folder = resources.files("cost_models") / "profiles"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def _check(figure: str, value: object) -> None:
    """Raise ValueError if `value` cannot be the figure of that name."""
    kind = figure.rpartition(".")[2]
    if figure.startswith(("flops_per_s.", "achieved_flops_per_s.")) or kind == "vector_flops_per_s":
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


def _parsed(text: str, origin: str) -> Hardware:
    """The profile in `text`; errors name the figure and `origin`, the file."""
    try:
        document = tomllib.loads(text)
        name = document.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ValueError("name is missing")
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        _flatten(document, "", values, sources)
        unread = dict(values)

        def take(figure: str) -> float:
            if figure not in unread:
                raise ValueError(f"{figure} is missing")
            value = unread.pop(figure)
            _check(figure, value)
            return value

        def by_dtype(table: str) -> dict[str, float]:
            prefix = table + "."
            return {figure.removeprefix(prefix): take(figure) for figure in values if figure.startswith(prefix)}

        hardware = Hardware(
            name=name,
            ranks_per_node=int(take("ranks_per_node")),
            launch_s=take("launch_s"),
            vector_flops_per_s=take("vector_flops_per_s"),
            flops_per_s=by_dtype("flops_per_s"),
            achieved_flops_per_s=by_dtype("achieved_flops_per_s"),
            tiers={
                tier: Tier(int(take(f"tiers.{tier}.capacity_bytes")), take(f"tiers.{tier}.bytes_per_s"))
                for tier in TIERS
            },
            links={
                reach: Link(take(f"links.{reach}.latency_s"), take(f"links.{reach}.bytes_per_s"))
                for reach in ("intra", "inter")
            },
            host_link=HostLink(take("host_link.h2d_bytes_per_s"), take("host_link.d2h_bytes_per_s")),
            sources=sources,
        )
        if "float32" not in hardware.flops_per_s:
            raise ValueError("flops_per_s.float32 is missing")
        if unread:
            raise ValueError(f"{min(unread)} is not a figure of a hardware profile")
    except ValueError as error:  # includes a TOML syntax error
        raise ValueError(f"hardware profile {origin}: {error}") from error
    return hardware
