"""`benchmarks.capped`, one model at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu.stage import Row, Setting, called


def capped(setting: Setting, model: str) -> Iterator[Row]:
    file = Path(setting.folder, "capped.md")
    dry = [] if setting.is_cuda else ["--batch", "2", "--sequence", "32", "--steps", "2"]
    asked = ["--models", model if setting.is_cuda else "tiny", "--device", setting.device, "-o", str(file), *dry]
    called("benchmarks.capped", *asked)
    if not file.exists():
        raise RuntimeError("benchmarks.capped ended well and wrote nothing")
    lines = [line for line in file.read_text().splitlines() if line.startswith("| ")]
    names = [name.strip() for name in lines[0].strip("|").split("|")]
    for line in lines[1:]:
        yield dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=False))


small, medium, large = (partial(capped, model=name) for name in ("gpt-125m", "gpt-350m", "gpt-1.3b"))
