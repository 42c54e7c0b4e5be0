"""`benchmarks.capped`, one model at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.gpu.stage import Row, Setting, called


def capped(setting: Setting, model: str) -> Iterator[Row]:
    """Each method's row as it comes: a method may not end in the time that there is."""
    file = Path(setting.folder, "capped.md")
    dry = [] if setting.is_cuda else ["--batch", "2", "--sequence", "32", "--steps", "2"]
    asked = ["--models", model if setting.is_cuda else "tiny", "--device", setting.device, "-o", str(file), *dry]
    asked += ["--hardware", str(setting.profile)] * setting.profile.exists()
    shown = 0
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(called, "benchmarks.capped", *asked)
        while True:
            ended = end.done()  # before the rows: then none is missed
            rows = _rows(file)
            yield from rows[shown:]
            shown = len(rows)
            if ended:
                break
            time.sleep(0.2)
        end.result()
    if not shown:
        raise RuntimeError("benchmarks.capped ended well and wrote nothing")


def _rows(file: Path) -> list[Row]:
    lines = [line for line in file.read_text().splitlines() if line.startswith("| ")] if file.exists() else []
    names, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] or [[]]
    return [dict(zip(names, row, strict=False)) for row in rows]


small, medium, large = (partial(capped, model=name) for name in ("gpt-125m", "gpt-350m", "gpt-1.3b"))
