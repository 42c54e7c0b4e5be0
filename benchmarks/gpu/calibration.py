"""The machine measured, and again: how far the second profile lies from the first; AdamW on the host by its threads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.attention import seconds
from benchmarks.gpu.stage import Row, Setting, Skipped, called
from cost_models.hardware import Hardware

SECONDS = 60
ELEMENTS = {"cuda": (2**20, 2**22, 2**24, 2**26), "cpu": (2**20,)}


def calibration(setting: Setting) -> Iterator[Row]:
    """The profile is kept for later stages."""
    yield from host_adamw(setting)
    setting.needs_cuda("what stands here of calibrating")  # on busy processors it is measured by its own tests
    setting.kept.mkdir(parents=True, exist_ok=True)
    setting.profile.unlink(missing_ok=True)
    for line in calibrated(setting.profile):
        if line.startswith("operators not in the fit") or " moved by more than half" in line:
            yield {"calibrated": "first", "says": line}
    profile = Hardware.load(setting.profile)
    for dtype, rate in profile.achieved_flops_per_s.items():
        yield {"figure": f"products, {dtype}", "is": f"{rate / 1e12:.0f} TFLOP/s"}
    yield {"figure": "memory", "is": f"{profile.tiers['hbm'].bytes_per_s / 1e12:.2f} TB/s"}
    for way in ("h2d", "d2h"):
        yield {"figure": way, "is": f"{getattr(profile.host_link, f'{way}_bytes_per_s') / 1e9:.1f} GB/s"}
    yield {"figure": "launch", "is": f"{profile.launch_s * 1e6:.2f} us"}


def again(setting: Setting) -> Iterator[Row]:
    setting.needs_cuda("what stands here of calibrating")
    if not setting.profile.exists():
        raise Skipped("the stage calibrate has left no profile to compare with")
    path = Path(setting.folder, "profile.toml")
    path.write_bytes(setting.profile.read_bytes())
    for line in calibrated(path):
        if found := re.match(r"(\S.*?)\s+(\S+)\s+(\S+)\s+(\d+\.\d+)$", line):
            name, old, new, ratio = found.groups()
            if not 1 / 1.2 < float(ratio) < 1.2 or not name.startswith("curves."):
                yield {"figure": name, "first": old, "again": new, "ratio": float(ratio)}


def calibrated(path: Path) -> list[str]:
    """What `autopar.calibrate` says; the profile is in `path`, and the drift told against what stood there."""
    asked = ("--device", "cuda", "--seconds", str(SECONDS), "-o", str(path))
    return called("autopar.calibrate", *asked).splitlines()


def host_adamw(setting: Setting) -> Iterator[Row]:
    """Fused AdamW of one float32 parameter in the host's memory, by its size and the threads that it has."""
    cores = os.cpu_count() or 1
    for count in ELEMENTS[setting.device]:
        parameter = torch.nn.Parameter(torch.randn(count))
        parameter.grad = torch.randn(count)
        optimizer = torch.optim.AdamW([parameter], 1e-4, fused=True)
        row: Row = {"AdamW on the host": f"{count:,} elements, ms"}
        for threads in sorted({1, 4, 8, cores - 4, cores - 2, cores} & {*range(1, cores + 1)}):
            torch.set_num_threads(threads)
            row[f"{threads} threads"] = 1e3 * seconds(optimizer.step, Setting("cpu", setting.folder), 5)
        yield row
