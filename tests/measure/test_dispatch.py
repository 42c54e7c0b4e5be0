"""What the host takes for each kernel that it launches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.calibrate.host import with_dispatch
from cost_models.hardware import Hardware


def test_it_is_measured_and_kept(tmp_path: Path) -> None:
    base = Hardware.load("cpu-gloo")
    made = with_dispatch(base, "cpu", "here, today")
    assert made.dispatch_s is not None and 1e-6 < made.dispatch_s < 1e-2
    assert made.sources["dispatch_s"].startswith("measured here, today: a step of ")
    made.save(tmp_path / "own.toml")
    assert Hardware.load(tmp_path / "own.toml") == made != base
    assert made.digest != base.digest


def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(RuntimeError, match=re.escape("-m autopar.measure.dispatch sofa failed: ")):
        with_dispatch(Hardware.load("cpu-gloo"), "sofa", "here")
