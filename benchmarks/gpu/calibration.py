"""The machine measured twice: how far the second profile lies from the first; and AdamW on the host by its threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.attention import seconds
from benchmarks.gpu.stage import Row, Setting

SECONDS = 90
ELEMENTS = {"cuda": 2**26, "cpu": 2**20}


def calibration(setting: Setting) -> Iterator[Row]:
    yield from host_adamw(setting)
    setting.needs_cuda("what stands here of calibrating")  # on busy processors it is measured by its own tests
    path = Path(setting.folder, "profile.toml")
    for turn in ("first", "again"):
        command = [sys.executable, "-m", "autopar.calibrate", "--device", "cuda", "--seconds", str(SECONDS)]
        done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, env=_environment())
        if done.returncode:
            raise RuntimeError(f"autopar.calibrate ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        for line in done.stdout.splitlines():
            if line.startswith("operators not in the fit") or " moved by more than half" in line:
                yield {"calibrated": turn, "says": line}
            elif (found := re.match(r"(\S.*?)\s+(\S+)\s+(\S+)\s+(\d+\.\d+)$", line)) and turn == "again":
                name, old, new, ratio = found.groups()
                if not 1 / 1.2 < float(ratio) < 1.2 or not name.startswith("curves."):
                    yield {"figure": name, "first": old, "again": new, "ratio": float(ratio)}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def host_adamw(setting: Setting) -> Iterator[Row]:
    """Fused AdamW of one large float32 parameter in the host's memory."""
    count = ELEMENTS[setting.device]
    parameter = torch.nn.Parameter(torch.randn(count))
    parameter.grad = torch.randn(count)
    optimizer = torch.optim.AdamW([parameter], 1e-4, fused=True)
    for threads in sorted({1, 4, os.cpu_count() or 1}):
        if threads <= (os.cpu_count() or 1):
            torch.set_num_threads(threads)
            took = seconds(optimizer.step, Setting("cpu", setting.folder), 5)
            yield {"AdamW on the host, threads": threads, "ms": 1e3 * took, "GB/s": 7 * 4 * count / took / 1e9}
