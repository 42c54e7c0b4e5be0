"""A profile's TOML back into `Hardware`: every figure is what it has to be, or is named with the cause."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, cast

from cost_models.curves import OVER, Curve, check_name
from cost_models.hardware import Hardware, HostLink, Link, Tier, check_figure, cut
from cost_models.steps import TIERS

DEEPEST = 8  # tables in tables: no figure has a longer name
_KEY = re.compile(r"[\w.+-]{1,100}", re.ASCII)


def _flatten(table: Mapping[str, Any], prefix: str, values: dict[str, Any], sources: dict[str, str]) -> None:
    """Collect every `{ value, source }` of a TOML document under its dotted name."""
    for key, entry in table.items():
        figure = _named(prefix, key)
        if not isinstance(entry, dict):
            raise ValueError(f'{figure} is {cut(entry)}, must be a table {{ value = ..., source = "..." }}')
        entry = cast(dict[str, Any], entry)
        if "value" not in entry and "source" not in entry:
            _flatten(entry, figure + ".", values, sources)
            continue
        if extra := sorted(set(entry) - {"value", "source"}):
            raise ValueError(f"{figure} has an unknown key {cut(extra[0])}")
        if "value" not in entry:
            raise ValueError(f"{figure} has no value")
        values[figure], sources[figure] = entry["value"], _source(figure, entry.get("source"))


def _named(prefix: str, key: str) -> str:
    """The dotted name of a figure. Raises ValueError where it cannot be one."""
    if _KEY.fullmatch(key) is None or prefix.count(".") >= DEEPEST:
        raise ValueError(f"{cut(prefix + key)} is not a figure of a hardware profile")
    return prefix + key


def _source(figure: str, source: object) -> str:
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{figure} has no source: say where the number comes from")
    return source


def _pattern(device: object) -> str:
    """A pattern of device names, or "" where a profile is found by its name alone."""
    try:
        return re.compile(device).pattern if isinstance(device, str) and len(device) <= 200 else _no_pattern(device)
    except re.error:
        return _no_pattern(device)


def _no_pattern(device: object) -> str:
    raise ValueError(f'device is {cut(device)}, must be a pattern of device names such as "H100"')


def _curve(name: str, entry: Any) -> tuple[Curve, str]:
    """One `{ over, base_s, points, residual, source }`, and the source."""
    figure = f"curves.{name}"
    if not isinstance(entry, dict):
        raise ValueError(f"{figure} is {cut(entry)}, must be a table with points and a source")
    entry = cast(dict[str, Any], entry)
    if wrong := sorted({"over", "base_s", "points", "residual", "source"} ^ set(entry)):
        told = cut(wrong[0]).strip("'")
        raise ValueError(f"{figure} has {'an unknown key' if wrong[0] in entry else 'no'} {told}")
    source, over, points = _source(figure, entry["source"]), entry["over"], entry["points"]
    if over not in OVER:
        raise ValueError(f"{figure}: it is over {cut(over)}, must be over {' or '.join(OVER)}")
    if not isinstance(points, list):
        raise ValueError(f"{figure}: points are {cut(points)}, must be a list")
    numbers: list[tuple[float, float]] = []
    for point in cast(list[object], points):
        pair = cast(list[Any], point) if isinstance(point, list) else []
        if len(pair) != 2:
            raise ValueError(f"{figure}: {cut(cast(object, point))} is not a point [size, rate]")
        numbers.append((_number(figure, pair[0]), _number(figure, pair[1])))
    try:
        base_s, residual = _number(figure, entry["base_s"]), _number(figure, entry["residual"])
        check_name(name, over)
        return Curve(tuple(numbers), base_s, residual, over), source
    except ValueError as error:
        told = str(error)
        raise ValueError(told if told.startswith("curves.") else f"{figure}: {told}") from error


def _number(figure: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{figure}: {cut(value)} must be a number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{figure}: {cut(value)} is too large")
    return float(value)


def _curve_entries(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of the table of curves, under their dotted names."""
    found: dict[str, Any] = {}
    for key, entry in table.items():
        if isinstance(entry, dict) and not {"points", "source", "base_s"} & set(inner := cast(dict[str, Any], entry)):
            found |= _curve_entries(inner, _named(prefix, key) + ".")
        else:
            found[_named(prefix, key)] = entry
    return found


class _Figures:
    """The plain figures of a document, of which every one has to be taken."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.unread = dict(values)

    def take(self, figure: str) -> float:
        """The figure, which is then read."""
        if figure not in self.unread:
            raise ValueError(f"{figure} is missing")
        value = self.unread.pop(figure)
        check_figure(figure, value)
        return value

    def by_key(self, table: str) -> dict[str, float]:
        """All figures of a table, under their names in it."""
        prefix = table + "."
        return {figure.removeprefix(prefix): self.take(figure) for figure in self.values if figure.startswith(prefix)}


def parsed(content: bytes, origin: str) -> Hardware:
    """The profile in `content`; errors name the figure and `origin`, the file."""
    try:
        return _hardware(tomllib.loads(content.decode()))
    except RecursionError:
        raise ValueError(f"hardware profile {origin}: its lists or tables lie too deep in each other") from None
    except ValueError as error:  # includes a TOML syntax error, and bytes that are no text
        told = " ".join(str(error).split())
        raise ValueError(f"hardware profile {origin}: {told[:400]}") from error


def _hardware(document: dict[str, Any]) -> Hardware:
    """The profile that a document tells, all of which is read."""
    name = _name(document.pop("name", None))
    device = _pattern(document.pop("device", ""))
    sources: dict[str, str] = {}
    curves = _curves(document.pop("curves", {}), sources)
    values: dict[str, Any] = {}
    _flatten(document, "", values, sources)
    overlaps = values.pop("overlaps", False)
    if not isinstance(overlaps, bool):
        raise ValueError(f"overlaps is {cut(overlaps)}, must be true or false")
    figures = _Figures(values)
    take = figures.take
    hardware = Hardware(
        name=name,
        ranks_per_node=int(take("ranks_per_node")),
        launch_s=take("launch_s"),
        vector_flops_per_s=take("vector_flops_per_s"),
        flops_per_s=figures.by_key("flops_per_s"),
        achieved_flops_per_s=figures.by_key("achieved_flops_per_s"),
        tiers={
            tier: Tier(int(take(f"tiers.{tier}.capacity_bytes")), take(f"tiers.{tier}.bytes_per_s")) for tier in TIERS
        },
        links={
            reach: Link(take(f"links.{reach}.latency_s"), take(f"links.{reach}.bytes_per_s"))
            for reach in ("intra", "inter")
        },
        host_link=HostLink(take("host_link.h2d_bytes_per_s"), take("host_link.d2h_bytes_per_s")),
        curves=curves,
        slowdown=figures.by_key("slowdown"),
        overlaps=overlaps,
        reserve=figures.by_key("reserve"),
        dispatch_s=take("dispatch_s") if "dispatch_s" in values else None,
        device=device,
        sources=sources,
    )
    if "float32" not in hardware.flops_per_s:
        raise ValueError("flops_per_s.float32 is missing")
    if figures.unread:
        raise ValueError(f"{min(figures.unread)} is not a figure of a hardware profile")
    return hardware


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError("name is missing")
    if not name.isprintable():
        raise ValueError(f"name is {cut(name)}, which has characters that cannot be shown")
    return name


def _curves(table: object, sources: dict[str, str]) -> dict[str, Curve]:
    """All curves by name; where each is from goes into `sources`."""
    if not isinstance(table, dict):
        raise ValueError(f"curves is {cut(table)}, must be a table")
    curves: dict[str, Curve] = {}
    for name, entry in _curve_entries(cast(dict[str, Any], table)).items():
        curves[name], sources[f"curves.{name}"] = _curve(name, entry)
    return curves
