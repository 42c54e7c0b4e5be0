"""A matrix of faults: one rank does something wrong at some place of a training script, and every rank has to end.

`python -m benchmarks.faults` prints, for each fault and place, on 2 and 4 processes, as plain processes and under
torchrun, after how many seconds the last rank has ended, and why. A cell is wrong where a rank is left, where all end
as if nothing had been, and where no rank says why. Seconds count from the fault; the patience is `PATIENCE_S` beyond
the longest step. Under torchrun a frozen process ends with the 30 s that its agent gives each to end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE_S, LIMIT_S = 4.0, 90.0
PORTS = 20000, 30000
PLACES = ("trace", "planning", "layout", "forward", "between collectives", "backward", "optimizer", "save")
EVERYWHERE = ("kill", "freeze", "raise and go on", "exit", "leave the loop")
CELLS = [
    *((fault, place) for fault in EVERYWHERE for place in PLACES),
    *(("an extra call", place) for place in ("forward", "backward", "optimizer", "save")),
    *(("another shape", place) for place in ("trace", "forward")),
    ("another setting", "forward"),
    ("another file", "planning"),
]
RANKS, LAUNCHERS = (2, 4), ("plain", "torchrun")
REASON = re.compile(r"^(?:\[rank\d+\]: )?((?:autopar: |[\w.]*(?:Error|Mismatch|Injected)\b).*)", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """`rank`: whose fault it is."""

    fault: str
    place: str
    ranks: int
    launcher: str
    rank: int

    def __str__(self) -> str:
        return f"{self.fault}, {self.place}, rank {self.rank} of {self.ranks}, {self.launcher}"


@dataclass(frozen=True)
class Outcome:
    """`seconds`: from the fault to the end of the last rank. `left`: how many had to be ended from outside.
    `succeeded`: nothing has told the outside that something was wrong.
    """

    cell: Cell
    seconds: float
    left: int
    succeeded: bool
    reason: str

    @property
    def is_right(self) -> bool:
        return not self.left and not self.succeeded and bool(self.reason)

    def __str__(self) -> str:
        told = "no fault happened" if self.seconds < 0 else f"{self.seconds:4.0f} s"
        wrong = f" {self.left} LEFT" * bool(self.left) + " SUCCEEDED" * self.succeeded + " SILENT" * (not self.reason)
        return f"{self.cell!s:62} {told}{wrong}  {self.reason[:200]}"


def free_port() -> int:
    """One that nobody has, below those that the system gives to whoever connects: these are taken again at any time."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@dataclass
class Running:
    """A cell under way: its processes, or torchrun's."""

    cell: Cell
    folder: Path
    began: float = field(default_factory=time.time)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def start(self) -> None:
        mine = ["-m", "benchmarks.faulty_script", json.dumps(asdict(self.cell)), str(self.folder), str(PATIENCE_S)]
        port = str(free_port())
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        count = str(self.cell.ranks)
        if self.cell.launcher == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
            commands = [([*torchrun, *mine], environment)]
        else:
            of = [{"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": count} for r in range(self.cell.ranks)]
            commands = [(mine, environment | one) for one in of]
        for arguments, env in commands:
            with (self.folder / f"launcher{len(self.started)}.log").open("wb") as log:
                command = [sys.executable, *arguments]
                self.started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=ROOT))

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        if time.time() - self.began < LIMIT_S and None in [one.poll() for one in self.started]:
            self._wake()
            return None
        pids = [int(one.read_text()) for one in self.folder.glob("*.pid")]
        left = [pid for pid in pids if _lives(pid)]
        ended = time.time()
        for pid in (*left, *(one.pid for one in self.started if one.poll() is None)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        succeeded = not any(one.wait() for one in self.started)
        happened = self.folder / "fault"
        seconds = ended - float(happened.read_text()) if happened.exists() else -1.0
        logs = sorted(self.folder.glob("*.log"))
        told = [found for log in logs for found in REASON.findall(log.read_text(errors="replace"))]
        told.sort(key=lambda line: not line.startswith("autopar: "))
        return Outcome(self.cell, seconds, len(left), succeeded, told[0] if told else "")

    def _wake(self) -> None:
        """A frozen process that is the last one: it has to end once it is awake, too."""
        if self.cell.fault == "freeze" and self.cell.launcher == "plain":
            lasting = [one for one in self.started if one.returncode is None]
            if len(lasting) == 1:
                lasting[0].send_signal(signal.SIGCONT)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def outcomes(cells: Sequence[Cell], at_once: int) -> Iterator[Outcome]:
    """Of each cell, as they end."""
    waiting, running = [*cells], list[tuple[Running, tempfile.TemporaryDirectory[str]]]()
    while waiting or running:
        if waiting and len(running) < at_once:
            folder = tempfile.TemporaryDirectory()
            running.append((Running(waiting.pop(0), Path(folder.name)), folder))
            running[-1][0].start()
        for one, folder in [*running]:
            if (found := one.outcome()) is not None:
                running.remove((one, folder))
                folder.cleanup()
                yield found
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=sorted({fault for fault, _ in CELLS}))
    parser.add_argument("--place", choices=PLACES)
    parser.add_argument("--ranks", type=int, choices=RANKS)
    parser.add_argument("--launcher", choices=LAUNCHERS)
    parser.add_argument("--at-once", type=int, default=2, help="cells that run at the same time")
    asked = parser.parse_args()
    cells = [
        Cell(fault, place, ranks, launcher, rank)
        for ranks in RANKS
        for launcher in LAUNCHERS
        for rank, (fault, place) in enumerate(CELLS)
        for rank in [rank % ranks]  # each rank has its turn
        if asked.fault in (None, fault) and asked.place in (None, place)
        if asked.ranks in (None, ranks) and asked.launcher in (None, launcher)
    ]
    found: list[Outcome] = []
    for one in outcomes(cells, asked.at_once):
        found.append(one)
        print(one, flush=True)
    print("\n".join(table(found)))
    wrong = sum(not one.is_right or one.seconds < 0 for one in found)
    print(f"{len(found)} cells, {wrong} wrong, the slowest ended after {max(one.seconds for one in found):.0f} s")
    sys.exit(bool(wrong))


def table(found: Sequence[Outcome]) -> Iterator[str]:
    """Seconds until the last rank has ended, of the slowest cell for each fault and place; "wrong" where one is."""
    yield f"| fault | {' | '.join(PLACES)} |"
    yield f"|---{'|--:' * len(PLACES)}|"
    for fault in dict.fromkeys(fault for fault, _ in CELLS):
        cells = list[str]()
        for place in PLACES:
            here = [one for one in found if (one.cell.fault, one.cell.place) == (fault, place)]
            slowest = max((one.seconds for one in here), default=0.0)
            cells.append("" if not here else f"{slowest:.0f}" if all(one.is_right for one in here) else "wrong")
        yield f"| {fault} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
