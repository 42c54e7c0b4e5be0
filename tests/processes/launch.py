"""Runs checks on several gloo processes: one start per file of checks, as a start costs far more than a check.

A file of checks has functions `check_*(ranks: Ranks)`, which every process calls in the order of the file. A check that
fails on one rank leaves the others in a collective, so all are ended, and the checks that are left run on fresh ones.
A hang ends the same way, with the stack of every thread shown.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Ranks are forked from one process that has imported what all of them need: 5 to 9 CPU seconds less each.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["tests.processes.worker", "tests.support.families"])
# A collective that waits longer than the first has lost its partners (rank 0 may be searching); a check that takes
# longer than the second hangs.
COLLECTIVE_S, CHECK_S = 60, 110
LOST = re.compile("Connection (closed|reset) by peer")  # what is left of a collective whose partner has ended


def run_checks(
    file: str,
    ranks: int,
    folder: Path,
    names: Sequence[str] = (),
    limit_s: float = CHECK_S,
    but: Sequence[str] = (),
) -> None:
    """Run the checks of `tests/processes/<file>.py` (those of these names, or all `but` some) on `ranks` processes.

    `folder` is theirs to share. Raises AssertionError with the output of the checks that failed.
    """
    wanted, failed = list(names) or [f"-{name}" for name in but], list[str]()
    while True:
        with tempfile.TemporaryDirectory() as notes:
            done = Path(notes, "left")
            output = start([file, notes, str(folder), *wanted], ranks, limit_s, {"STORE": f"{notes}/store"}, done)
            left = done.read_text().split() if done.exists() else []
            if output is None:
                break
            failed.append(f"{file}.{left[0] if left else '(start)'} on {ranks} ranks:\n{output}")
            wanted = left[1:]
            if not wanted:
                break
    assert not failed, "\n\n".join(failed)


def start(
    arguments: Sequence[str], ranks: int, limit_s: float, environment: Mapping[str, str], progress: Path
) -> str | None:
    """None where every process ends well; else what the first that failed wrote, or after a hang all."""
    with tempfile.TemporaryDirectory() as logs:
        processes: list[ForkServerProcess] = []
        for rank in range(ranks):
            of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            its_own = dict(os.environ) | {name: str(value) for name, value in of_rank.items()} | dict(environment)
            processes.append(FORKS.Process(target=_as_rank, args=(arguments, its_own, f"{logs}/{rank}")))
            processes[-1].start()
        codes, ended = _wait(processes, limit_s, progress)
        if not any(codes):
            return None
        told = {rank: _end_of(Path(logs, str(rank)).read_text(errors="replace")) for rank in range(ranks)}
        own = [rank for rank in ended if codes[rank] < 0]  # by a signal that nobody here has sent
        own += [rank for rank in ended if codes[rank] > 0 and not LOST.search(told[rank])]
        shown = own or told  # those that failed by themselves say enough; after a hang, where is each of them?
        return "\n".join(f"--- rank {rank}, status {codes[rank]}\n{told[rank]}" for rank in shown)


def _end_of(log: str) -> str:
    """The last of what a rank wrote, and of an abort what stands in front of the stacks that faulthandler reports: why.

    Without the names of extension modules that end such a report.
    """
    log = re.sub(r"\nExtension modules: .*", "", log)
    why, fatal, stacks = log.rpartition("Fatal Python error")
    return f"{why[-1500:]}{fatal}{stacks[:500]}\n...\n{stacks[-2500:]}" if len(stacks) > 3000 and fatal else log[-3000:]


def _as_rank(arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """What a forked process does: the environment and the output of a rank of its own, then the checks."""
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from tests.processes import worker  # what is imported above is imported by the tests themselves, too

    worker.main(*arguments)


def _wait(processes: Sequence[ForkServerProcess], limit_s: float, progress: Path) -> tuple[list[int], list[int]]:
    """Exit codes, once all have ended: 2 s after the first failure, `limit_s` after the last change of `progress`.
    And which ranks ended by themselves.
    """
    until, seen = time.monotonic() + limit_s, 0
    ended = list[int]()
    try:
        while any(process.is_alive() for process in processes):
            if progress.exists() and (changed := progress.stat().st_mtime_ns) != seen:
                until, seen = time.monotonic() + limit_s, changed
            if any(process.exitcode for process in processes):
                until = min(until, time.monotonic() + 2)
            if time.monotonic() > until:
                for process in processes:
                    if process.pid and process.is_alive():
                        os.kill(process.pid, signal.SIGUSR1)  # faulthandler: where does it hang?
                time.sleep(0.5)
                break
            time.sleep(0.05)
    finally:
        ended += [rank for rank, process in enumerate(processes) if not process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode or 0 for process in processes], ended
