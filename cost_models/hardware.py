"""What a machine can do: rates, memories and links, each figure with where it comes from.

A profile is a TOML file in which every figure is a table `{ value = ..., source = "..." }`; the ones that come with
autopar lie in `cost_models/profiles/`. Units are seconds, bytes and floating point operations, all for one rank:

    ranks_per_node                 ranks that share a node
    launch_s                       seconds that each kernel adds to its work
    dispatch_s                     seconds that the host works for each kernel that a program launches by itself, and
                                   for each parameter that it updates; left out where operators' own seconds have it,
                                   as on CPUs
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
    reserve.<what>                 of devices with an allocator of their own, bytes that no plan counts: see
                                   `cost_models.reserve`
    overlaps                       true where collectives overlap with compute, on streams of their own; false (or
                                   left out) where communication takes the processors that compute

A calibrated profile (`python -m autopar.calibrate`) also has curves, `curves.<name> = { over, base_s, points, residual,
source }`; where there is one it prices before the plain figure. `cost_models.curves` says which there are.

`device = "..."`, which is no figure, is a pattern of what the driver calls the devices that the profile is for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from importlib import resources
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from cost_models.curves import NAMES, Curve, check_name
from cost_models.steps import MATRIX_KINDS, TIERS
from cost_models.whole_file import read_whole, write_whole

# A figure outside its range is a slip of the pen (GB for bytes, us for seconds), not a machine.
PLAUSIBLE = {
    "ranks_per_node": (1, 1e6),
    "flops_per_s": (1e6, 1e19),
    "bytes_per_s": (1e5, 1e16),
    "capacity_bytes": (1e6, 1e17),
    "latency_s": (1e-10, 10.0),
    "slowdown": (0.1, 1e4),
    "reserve": (1, 1e11),
}
RESERVES = ("context_bytes", "workspace_bytes", "group_bytes", "peer_bytes")
SLOWS = ("matrix", "memory")  # what a slowdown is of
_SLOWDOWN = re.compile(rf"({'|'.join(SLOWS)})\.[1-9][0-9]{{0,8}}")
IMAGINED = " with imagined "  # in the name of a profile: behind it, what autopar.what_if has changed
TF32_KINDS = ("matmul", "conv")  # what torch has a setting for; attention of float32 keeps float32's rate
DTYPES = (
    "float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8",
)  # fmt: skip
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
    `hop` is the slowest way from a rank to the next one, where that differs: one message at a time crosses a border by
    one NIC. `curves` holds what was measured of a collective on groups of this shape; it goes before the other figures.
    """

    latency_s: float
    bytes_per_s: float
    pairwise: Link | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])  # collective -> as measured on such a group
    hop: Link | None = None


@dataclass(frozen=True, slots=True)
class HostLink:
    """Bytes per second of copies from host to device memory and back."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Factors:
    """How many times the latency and the bandwidth of a link are what the profile says; finite and above 0."""

    latency: float = 1.0
    bandwidth: float = 1.0

    def __post_init__(self) -> None:
        for what, factor in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            if not 0 < factor < inf:
                raise ValueError(f"{what} times {factor} is none; a factor is finite and above 0")


@dataclass(frozen=True)
class Hardware:
    """One rank of a machine and its links; see the module for every figure's meaning and unit.

    Two profiles are equal if their figures are; `sources` (figure name -> where it comes from) does not count.
    `tf32`: which float32 work runs at the rate of tf32. It is a setting of the program, not a figure: no file has it.
    `axes`: mesh axes whose link somebody imagines otherwise (`autopar.what_if`); no machine is like that, and no file.
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
    tf32: tuple[str, ...] = ()
    axes: Mapping[str, Factors] = field(default_factory=dict[str, Factors])
    reserve: Mapping[str, float] = field(default_factory=dict[str, float])
    dispatch_s: float | None = None
    device: str = field(default="", compare=False)
    sources: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)

    def __post_init__(self) -> None:
        for part, names, known in (("tiers", self.tiers, TIERS), ("links", self.links, ("intra", "inter"))):
            if missing := [name for name in known if name not in names]:
                raise ValueError(f"{part}.{missing[0]} is missing")
        for figure, value in self.figures.items():
            check_figure(figure, value)
        for name, curve in self.curves.items():
            check_name(name, curve.over)
        for name in self.slowdown:
            if _SLOWDOWN.fullmatch(name) is None:
                raise ValueError(f"{cut(f'slowdown.{name}')} is not a figure of a hardware profile")
        if self.reserve and (wrong := sorted(set(self.reserve) ^ set(RESERVES))):
            raise ValueError(
                f"reserve.{wrong[0]} is missing"
                if wrong[0] in RESERVES
                else f"{cut(f'reserve.{wrong[0]}')} is not a figure of a hardware profile"
            )
        for dtype in (*self.flops_per_s, *self.achieved_flops_per_s):
            if dtype not in DTYPES:
                raise ValueError(f"{cut(dtype)} is no dtype with a rate of its own; known are {', '.join(DTYPES)}")
        for kind in self.tf32:
            if kind not in TF32_KINDS:
                raise ValueError(f"tf32 of {cut(kind)} is not known; choose some of {', '.join(TF32_KINDS)}, or none")

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
        if self.dispatch_s is not None:
            flat["dispatch_s"] = self.dispatch_s
        flat |= {f"flops_per_s.{dtype}": rate for dtype, rate in self.flops_per_s.items()}
        flat |= {f"achieved_flops_per_s.{dtype}": rate for dtype, rate in self.achieved_flops_per_s.items()}
        for name, tier in self.tiers.items():
            flat[f"tiers.{name}.capacity_bytes"] = tier.capacity_bytes
            flat[f"tiers.{name}.bytes_per_s"] = tier.bytes_per_s
        for name, link in self.links.items():
            flat[f"links.{name}.latency_s"] = link.latency_s
            flat[f"links.{name}.bytes_per_s"] = link.bytes_per_s
        flat |= {f"reserve.{name}": nbytes for name, nbytes in self.reserve.items()}
        return flat | {f"slowdown.{name}": factor for name, factor in self.slowdown.items()}

    @cached_property
    def digest(self) -> str:
        """Hash (hex) of name, figures, `tf32` and `axes`, the same on every machine: a key for caches. Sources do not
        enter.
        """
        content: dict[str, Any] = {"name": self.name, "figures": {name: float(v) for name, v in self.figures.items()}}
        if self.curves:
            content["curves"] = {name: (c.over, c.base_s, c.points) for name, c in self.curves.items()}
        if self.overlaps:
            content["overlaps"] = True
        if self.tf32:
            content["tf32"] = self.tf32
        if self.axes:
            content["axes"] = {axis: (of.latency, of.bandwidth) for axis, of in self.axes.items()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def _matrix_flops_per_s(self) -> dict[str, float]:
        return dict(self.flops_per_s) | dict(self.achieved_flops_per_s)

    def rate(self, dtype: str, kind: str) -> float:
        """Floating point operations per second for work of this dtype and kind (see `Compute`).

        Measured before peak, and tf32 in the place of float32 where that is set; a dtype for which the matrix units
        have no figure runs on the ordinary units. Complex numbers run where their parts do.
        """
        if kind in MATRIX_KINDS:
            rates = self._matrix_flops_per_s
            if dtype == "float32" and kind in self.tf32:
                return rates["tf32"]
            return rates.get(dtype, rates.get(PARTS.get(dtype, ""), self.vector_flops_per_s))
        return self.vector_flops_per_s

    @cached_property
    def _curve_of(self) -> dict[tuple[str, str, str], Curve | None]:
        return {}  # what `curve` found, for each question

    @property
    def is_measured(self) -> bool:
        """Whether it tells what was timed, as `calibrate` writes it, beside data sheets and what others published."""
        return any(name.startswith(("matmul.", "elementwise.", "stream.", "intra.")) for name in self.curves)

    def curve(self, op: str, kind: str, dtype: str) -> Curve | None:
        """What was measured of an operator of that kind (see `Compute`): of itself, else of its kind; None if nothing.
        What the host does has a curve of the host alone.

        Memory does not care for dtypes: without a curve of its own, one that matrix units do not run has float32's.
        Complex numbers have the curves of their parts.
        """
        if not self.curves:
            return None
        if dtype == "float32" and kind in self.tf32:
            dtype = "tf32"
        asked = (op, kind, dtype)
        if asked not in self._curve_of:
            plain = kind if kind in MATRIX_KINDS or kind == "host" else "elementwise"
            own = dict.fromkeys((op, op.removesuffix(".dropped")))  # attention, where nobody timed it with dropout
            names = [f"ops.{one}.{dtype}" for one in own if kind != "host"] + [f"{plain}.{dtype}"]
            if dtype in PARTS:
                names.append(f"{plain}.{PARTS[dtype]}")
            if plain not in MATRIX_KINDS:
                names.append(f"{plain}.float32")
            self._curve_of[asked] = next((self.curves[name] for name in names if name in self.curves), None)
        return self._curve_of[asked]

    def allowing(self, kinds: Sequence[str]) -> Hardware:
        """This profile where float32 work of these kinds may run as tf32; itself where the device has no tf32.

        Raises ValueError for a kind that is not in `TF32_KINDS`.
        """
        allowed = replace(self, tf32=(*kinds,))  # which looks at the kinds
        if "tf32" not in self._matrix_flops_per_s:
            return self
        return replace(allowed, tf32=tuple(kind for kind in TF32_KINDS if kind in kinds))

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

        Raises ValueError for an unknown name (listing the known ones) and a figure that is missing, no number, not
        positive, absurd, unknown or without a source; OSError where there is no such file, or something else.
        """
        from cost_models.hardware_file import parsed

        if isinstance(name_or_path, Path) or name_or_path.endswith(".toml"):
            return parsed(read_whole(name_or_path), str(name_or_path))
        if name_or_path not in known_hardware() and Path(name_or_path).is_file():
            raise ValueError(f"{Path(name_or_path).name!r} is a file, and the name of a profile's ends with .toml")
        return cls.known(name_or_path)

    @classmethod
    def known(cls, name: str) -> Hardware:
        """The profile of that name, and never a file's: for names that come out of files. Raises ValueError."""
        from cost_models.hardware_file import parsed

        if name not in (known := known_hardware()):
            real, imagined, changes = name.partition(IMAGINED)
            if imagined:
                raise ValueError(
                    f"no machine is {cut(real)} with {cut(changes)}, which autopar.what_if imagines; take a plan that "
                    f"was searched for {cut(real)}"
                )
            near = [*(one for one in known if one.startswith(name)), *get_close_matches(name, known, 1)]
            guess = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"no hardware profile {cut(name)}; {guess}known profiles: {', '.join(known)}")
        file = resources.files("cost_models") / "profiles" / f"{name}.toml"
        return parsed(file.read_bytes(), str(file))

    def save(self, path: str | Path) -> None:
        """Write the profile as TOML, so that `load(path)` gives it back: how a calibrated machine is kept.

        Raises ValueError for a figure without an entry in `sources`, and for imagined `axes`.
        """
        if self.axes:
            raise ValueError(f"{self.name} is imagined, for axes {', '.join(self.axes)} of one mesh; no file has that")
        told = {*self.figures, *(f"curves.{name}" for name in self.curves), *(("overlaps",) if self.overlaps else ())}
        if unsourced := sorted(told - set(self.sources)):
            raise ValueError(f"{unsourced[0]} has no source: say where the number comes from")
        lines = [f"name = {json.dumps(self.name)}", *([f"device = {json.dumps(self.device)}"] if self.device else [])]
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


def cut(value: object) -> str:
    """As it stands in a message."""
    if isinstance(value, int) and abs(value) >= 10**50:
        return f"a number of {value.bit_length()} bits"
    told = repr(value)
    return told if len(told) <= 80 else f"{told[:77]}..."


def check_figure(figure: str, value: object) -> None:
    """Raise ValueError if `value` cannot be the figure of that name."""
    kind = figure.rpartition(".")[2]
    if figure.startswith(("slowdown.", "reserve.")):
        kind = figure.partition(".")[0]
    elif figure.startswith(("flops_per_s.", "achieved_flops_per_s.")) or kind == "vector_flops_per_s":
        kind = "flops_per_s"
    elif kind in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
        kind = "bytes_per_s"
    elif kind in ("launch_s", "dispatch_s"):
        kind = "latency_s"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{figure} is {cut(value)}, must be a number")
    low, high = PLAUSIBLE[kind]
    if not low <= value <= high:  # nan does not either
        raise ValueError(f"{figure} is {cut(value)}, must lie between {low:g} and {high:g}")
    if kind in ("ranks_per_node", "capacity_bytes") and value != int(value):
        raise ValueError(f"{figure} is {value}, must be a whole number")
