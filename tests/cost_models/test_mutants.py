"""Profiles by the thousand: 2,500 damaged files. Each is refused in a sentence, or has the figures that stand in it."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from cost_models.curves import Curve
from cost_models.hardware import Hardware
from tests.support.mutants import damaged, one_sentence

EACH = 100


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A calibrated profile, as it is written."""
    known = Hardware.load("cpu-gloo")
    curves = {
        "matmul.float32": Curve(((1.0, 1e9), (9.0, 8e9)), 1e-6, 0.1, "flops_per_byte"),
        "copy.h2d": Curve(((1024.0, 1e9), (1048576.0, 2e10)), 2e-6, 0.1),
        "intra.all_gather.2x1": Curve(((65536.0, 1e9),), 1e-5, 0.1),
    }
    sources = {**known.sources, **{f"curves.{name}": "a test" for name in curves}}
    path = tmp_path_factory.mktemp("profiles") / "mine.toml"
    replace(known, curves=curves, sources=sources).save(path)
    return path.read_bytes()


def at(document: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        document = document[key]
    return document


@pytest.mark.parametrize("batch", range(25))
def test_a_damaged_profile_is_refused_or_says_what_it_says(content: bytes, tmp_path: Path, batch: int) -> None:
    path = tmp_path / "mine.toml"
    for case, mutant in damaged(content, range(batch * EACH, (batch + 1) * EACH)):
        path.write_bytes(mutant)
        try:
            hardware = Hardware.load(path)
        except ValueError as error:
            one_sentence(error, (ValueError,), case, str(path))
            continue
        document = tomllib.loads(mutant.decode())
        for figure, value in hardware.figures.items():
            told = at(document, figure)["value"]
            assert value == told and type(told) in (int, float) and isfinite(value) and value > 0, f"{case}: {figure}"
        assert {*hardware.curves} == names(document.get("curves", {})), case
        for name, curve in hardware.curves.items():
            told = at(document, f"curves.{name}")
            assert [*map(list, curve.points)] == told["points"] and curve.base_s == told["base_s"], f"{case}: {name}"
            assert isfinite(curve.seconds(1e9, 1e6)), case


def names(curves: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, entry in curves.items():
        found |= {prefix + key} if "points" in entry else names(entry, f"{prefix}{key}.")
    return found


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.toml")
    with pytest.raises(OSError, match="it is a pipe or a device, not a file"):
        Hardware.load(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('flops_per_s.flaot16 = { value = 1e12, source = "x" }', "'flaot16' is no dtype with a rate of its own"),
        ('"a\\nb" = { value = 1, source = "x" }', "'a\\\\nb' is not a figure"),
        (".".join("a" * 5000) + ' = { value = 1, source = "x" }', "is not a figure"),
        ("x = " + "[" * 100_000, "too deep"),
        ('slowdown.matrix.²  = { value = 1.0, source = "x" }', "hardware profile"),
        ('slowdown.matrix.0x10 = { value = 1.0, source = "x" }', "slowdown.matrix.0x10' is not a figure"),
    ],
)
def test_what_no_profile_has_is_told(content: bytes, tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "mine.toml").write_bytes(content + line.encode())
    with pytest.raises(ValueError, match=told) as caught:
        Hardware.load(tmp_path / "mine.toml")
    one_sentence(caught.value, (ValueError,), line[:50], "mine.toml")


def test_a_number_beyond_all_floats_is_told(content: bytes, tmp_path: Path) -> None:
    text = content.decode().replace("[1024.0, ", f"[1{'0' * 400}, ")
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match="a number of 1329 bits is too large"):
        Hardware.load(tmp_path / "mine.toml")


def test_points_that_no_float_tells_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="must rise in size"):
        Curve(((1.9999999999999998, 1e9), (2.0, 1e9)))


def test_a_profile_of_nobody_is_no_path(content: bytes, tmp_path: Path) -> None:
    """A plan names the profile that priced it; that name opens no file."""
    (tmp_path / "mine.toml").write_bytes(content)
    with pytest.raises(ValueError, match="no hardware profile"):
        Hardware.known(str(tmp_path / "mine.toml"))
