"""Starts groups of ranks that try scripts, and starts them anew after a crash or a hang."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.machine.local_ranks import environment, local_ranks

CATALOGUE = "benchmarks.outside.catalogue"
START_S = 60  # imports, and the group


def rows_of(
    names: Sequence[str], sizes: Sequence[int], *, packages: str | None, limit_s: float, dtypes: Sequence[str],
    links: str, catalogue: str = CATALOGUE,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The row of each script on a mesh of these sizes, in order; a group that breaks is replaced by a fresh one.

    `catalogue`: the module whose `scripts()` has them.
    """
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            asked = {"names": left, "sizes": list(sizes), "packages": packages, "limit_s": limit_s}
            asked |= {"dtypes": list(dtypes), "links": links, "catalogue": catalogue}
            Path(folder, "asked.json").write_text(json.dumps(asked))
            done = 0
            for row in _session(folder, sizes, limit_s, len(left)):
                yield row | {"mesh": list(sizes)}
                done += 1
            left = left[done:]


def _session(folder: str, sizes: Sequence[int], limit_s: float, count: int) -> Iterator[dict[str, Any]]:
    """Rows as they come; last, where the group broke, the row of the script that broke it."""
    total, done = 1, 0
    for size in sizes:
        total *= size
    rows, current = Path(folder, "rows.jsonl"), Path(folder, "current")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.outside.worker", folder]
    until = time.monotonic() + limit_s + START_S
    with local_ranks(command, total, environment() | {"HF_HUB_OFFLINE": "1"}) as processes:
        while done < count:
            time.sleep(0.1)
            ended = [process for process in processes if process.poll() is not None]
            lines = rows.read_text().splitlines(keepends=True) if rows.exists() else []
            for line in lines[done:]:
                if line.endswith("\n"):
                    yield json.loads(line)
                    done, until = done + 1, time.monotonic() + limit_s
            if done < count and (ended or time.monotonic() > until):
                if not current.exists():
                    raise RuntimeError("the ranks did not start")
                yield _broken(folder, current.read_text(), bool(ended), limit_s)
                return


def _broken(folder: str, name: str, ended: bool, limit_s: float) -> dict[str, Any]:
    """Of a script whose ranks did not come to an end together."""
    for path in sorted(Path(folder).glob("said.*")):
        said = json.loads(path.read_text())
        if said["name"] == name:
            told = f"only rank {path.suffix[1:]}: {said['told']}"
            return said | {"verdict": "crash", "told": told, "seconds": limit_s}
    told = "a process ended" if ended else f"no end in {limit_s:.0f} s"
    return {"name": name, "verdict": "crash", "told": told, "seconds": limit_s}
