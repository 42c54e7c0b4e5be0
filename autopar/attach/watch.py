"""Calls of a parallel module are made by all ranks or by none. A thread of each rank tells the others which call it is
in, and where they do not go together (another call, none at all, an error on one, a frozen process), every rank ends
with a sentence, where it would wait for the timeout of its process group.

What is told goes through the store of the process group, about once a second. A call itself writes a few attributes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing import util
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar._compat import default_store
from autopar.attach.stacks import lines_of
from autopar.attach.verdict import Judge, Report, ended, loads

PATIENCE_S = 60.0
ALONE = 9  # times the patience more, before the first step and around state dicts: one rank prepares, or writes, alone
BACKWARD = "backward"
TOLD = 8  # calls that a report has
GRACE_S = 5.0  # for a rank that ends by itself, and for rank 0, whose process may hold the store, until others know
LOST = re.compile("(?i)connection|closed by peer|reset by peer|broken pipe|nccl|remote process")
OURS = (os.path.dirname(torch.__file__), str(Path(__file__).parents[1]), os.path.dirname(os.__file__), "<")
WAITS = os.path.join("torch", "distributed", "tensor")


LIVE: weakref.WeakSet[_Calls] = weakref.WeakSet()  # of all modules of this process: one rank writes for each of them


class Watch:
    """One module's calls on this rank, for as long as a module, or a backward to come, holds it. `patience_s`: how long
    a rank waits for another one beyond its longest step; infinite: as long as the process group does. On one rank it
    does nothing.
    """

    def __init__(self, device_mesh: DeviceMesh, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
        self._is_told = alone or patience_s == float("inf")
        self._calls = _Calls(patience_s)

    def begin(self) -> None:
        """Tell the others of this rank from now on; all ranks have to."""
        if not self._is_told:
            self._is_told = True
            self._calls.teller = _Teller(self._calls, weakref.ref(self))
            self._calls.teller.start()

    def call(self, what: str, *, alone: bool = False, why: str = "") -> contextlib.AbstractContextManager[None]:
        """All ranks have to make this call. `alone`: one of them may make others wait, in any module, from here to the
        end of the next backward, as it prepares something, or writes it. `why`: is told with it, and may be another one
        on each rank.
        """
        self.begin()
        return self._calls.call(what, alone, why)

    def working(self) -> contextlib.AbstractContextManager[None]:
        """This rank traces, or rank 0 searches: for as long as it takes, and the others wait."""
        return self._calls.working()


class _Calls:
    """What there is to tell of a `Watch`. `_alone`: one rank may make others wait until the next backward has ended."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.teller: _Teller | None = None
        self._main = threading.get_ident()
        self._calls, self._sum = 0, 0
        self._told: deque[tuple[int, int, str]] = deque(maxlen=TOLD)
        self._within: tuple[str, float] | None = None  # what, since when
        self._works, self._alone = False, True
        self._longest_s, self._ended_s = 0.0, 0.0
        self._failed: tuple[int, str, float] | None = None
        self._stopped_s, self._woke_s, self._lock = 0.0, time.monotonic(), threading.Lock()
        LIVE.add(self)

    def clock(self) -> float:
        """Seconds in which this process could run."""
        return time.monotonic() - self._stopped_s

    def wake(self, every_s: float) -> None:
        """Called `every_s`; where the last time is much longer ago, the process was stopped, as all ranks may be."""
        with self._lock:
            now, last = time.monotonic(), self._woke_s
            if now - last > 2 * every_s + 1:
                self._stopped_s += now - last
            self._woke_s = now

    @contextlib.contextmanager
    def call(self, what: str, alone: bool, why: str = "") -> Iterator[None]:
        if self._within is not None:  # a part of a call
            yield
            return
        now = self.clock()
        if not self._alone and not alone:
            self._longest_s = max(self._longest_s, now - self._ended_s)
        self._calls += 1
        self._sum = zlib.crc32(what.encode(), self._sum)
        self._told.append((self._calls, self._sum, f"{what} ({why})" if why else what))
        self._within = what, now
        for calls in LIVE if alone else ():
            calls._alone = True
        try:
            if alone and self.teller is not None:
                self.teller.meet(self._calls)
            yield
        except BaseException as error:
            self._failed = self._calls, f"{type(error).__name__}: {error}"[:200], self.clock()
            if self.teller is not None and LOST.search(str(error)) and (told := self.teller.lost()):
                error.add_note(f"autopar: {told}")
            raise
        finally:
            self._ended_s = self.clock()
            if not alone and not self._alone:
                self._longest_s = max(self._longest_s, self._ended_s - self._within[1])
            self._alone = self._alone and what != BACKWARD
            self._within = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        before, self._works = self._works, True
        try:
            yield
        finally:
            self._works = before
            if self._within is not None:
                self._within = self._within[0], self.clock()

    def report(self, beat: int, waits: tuple[str, float] | None, dead: tuple[int, ...]) -> Report:
        """What this rank is doing. `waits`: in an operation of DTensors outside of calls, and since when."""
        now = self.clock()
        what, since = self._within or waits or ("", now)
        slack = self._longest_s + (ALONE * self.patience_s if self._alone else 0.0)
        failed = self._failed and (*self._failed[:2], now - self._failed[2])
        at = _where(lines_of(self._main))
        told = tuple(self._told)
        return Report(beat, self._calls, told, what, now - since, slack, self._works, at, failed, "", dead)

    def dtensor_operation(self) -> tuple[tuple[str, int], ...]:
        """Which one the calling thread is in, as the lines that it is at; none where it is in none."""
        lines = lines_of(self._main)
        return lines if any(WAITS in file for file, _ in lines) else ()


class _Teller:
    """Two threads that tell the others of a `Watch`, and end this process where the ranks do not go together: one that
    talks through the store, and one that sees whether that still answers.
    """

    def __init__(self, calls: _Calls, watch: weakref.ref[Watch]) -> None:
        self._calls, self._watch, self._patience_s = calls, watch, calls.patience_s
        self._every_s = min(1.0, calls.patience_s / 5)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._store = default_store().clone()
        self._meeting = default_store().clone()  # of the main thread
        self._name = f"autopar/watch/{self._store.add(f'autopar/watches/{self._rank}', 1)}"
        self._judge = Judge(calls.patience_s)
        self._neighbours: dict[int, tuple[int, str]] = {}
        self._dead: tuple[int, ...] = ()
        self._waits: tuple[tuple[tuple[str, int], ...], float] | None = None
        self._beat, self._has_store, self._verdict = 0, True, ""
        self._answered_s = self._hub_s = calls.clock()
        self._hub_beat = -1
        self._process, self._ends = os.getpid(), threading.Event()
        self._leaves, self._woken, self._said = "", threading.Event(), threading.Event()
        self._others: str | None = None
        self._store.set(self._key("process", self._rank), json.dumps([_machine(), *_process(os.getpid())]))
        self._store.set(self._key("report", self._rank), calls.report(0, None, ()).dumps())
        self._at_exit = util.Finalize(None, self._leave, exitpriority=100)

    def start(self) -> None:
        for loop in (self._talk, self._guard):
            threading.Thread(target=loop, name=f"autopar-watch{loop.__name__}", daemon=True).start()

    def meet(self, call: int) -> None:
        """Wait until all ranks are in this call. Its first collectives are other ones than those of a call that any
        rank makes in its place: backends may pair these up, and end the process where sizes differ. Meanwhile the other
        thread sees that the ranks do not go together.
        """
        key, pause_s = self._key("met", call), 1e-3
        self._meeting.add(key, 1)
        while self._meeting.add(key, 0) < self._ranks:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def _key(self, what: str, rank: int | str = "") -> str:
        return f"{self._name}/{what}/{rank}"

    def _talk(self) -> None:
        left = ""
        while not left and not self._ends.is_set():
            self._woken.wait(self._every_s)
            self._calls.wake(self._every_s)
            if self._leaves:
                left = self._leaves
            elif not dist.is_initialized():
                left = "its process group is destroyed"
            elif self._watch() is None:
                left = "its parallel module is gone"
            try:
                self._exchange(left)
                self._others = self._told_of_others() if self._leaves else None
            except RuntimeError:  # the store is gone, as rank 0 has ended; torch writes a page for each further try
                self._has_store = False
                self._said.set()
                return
        self._said.set()
        self._ends.set()
        self._at_exit.cancel()

    def _guard(self) -> None:
        while not self._ends.wait(self._every_s):
            self._calls.wake(self._every_s)
            now = self._calls.clock()
            self._find_dead()
            within = self._calls.report(0, self._waiting(), ())
            silent_s = now - self._answered_s
            patience_s = 5.0 if 0 in self._dead else self._patience_s
            if within.within and within.for_s > patience_s and silent_s > patience_s:
                self._end(
                    f"rank {self._rank} has waited {within.for_s:.0f} s in {within.within}, and the store of the "
                    f"process group, which rank 0 or torchrun holds, has not answered for {silent_s:.0f} s",
                    is_known=False,
                )

    def _find_dead(self) -> None:
        self._dead = tuple(rank for rank, process in self._neighbours.items() if not _runs(*process))

    def lost(self) -> str | None:
        """Whose process is gone, where an operation has lost its partner; it may not quite be yet."""
        try:
            self._neighbours = self._neighbours or self._on_this_machine()
        except RuntimeError:
            return "the store of the process group is gone, which rank 0 or torchrun holds"
        for _ in range(10):
            self._find_dead()
            if told := ended({}, self._rank, self._dead):
                return told
            time.sleep(0.05)
        return None

    def _waiting(self) -> tuple[str, float] | None:
        """In which operation of DTensors the rank has been for how long."""
        operation, now = self._calls.dtensor_operation(), self._calls.clock()
        if not operation:
            self._waits = None
        elif self._waits is None or self._waits[0] != operation:
            self._waits = operation, now
        return self._waits and ("an operation of a DTensor", self._waits[1])

    def _exchange(self, left: str = "") -> None:
        """Tell, look for a verdict, and on one rank find it."""
        self._beat += 1
        waits = self._waits and ("an operation of a DTensor", self._waits[1])
        mine = replace(self._calls.report(self._beat, waits, self._dead), left=left)
        self._store.set(self._key("report", self._rank), mine.dumps())
        reports = self._read()
        if self._store.check([self._key("verdict")]):
            self._end(self._store.get(self._key("verdict")).decode())
        now = self._answered_s = self._calls.clock()
        told = self._judge.verdict(reports, now) if len(reports) > 1 else None
        if told is not None:
            self._end(self._store.compare_set(self._key("verdict"), "", told).decode())

    def _read(self) -> dict[int, Report]:
        """The reports that this rank judges: on rank 0 all; on another one its own, and where rank 0 is silent, all."""
        now = self._calls.clock()
        self._neighbours = self._neighbours or self._on_this_machine()
        if not self._neighbours:
            return {}
        if self._rank != 0:
            hub = loads(self._store.get(self._key("report", 0)))
            if hub.beat != self._hub_beat:
                self._hub_beat, self._hub_s = hub.beat, now
            if now - self._hub_s < self._patience_s + 2 * self._every_s and 0 not in self._dead and not hub.left:
                return {}
        return self._reports()

    def _reports(self) -> dict[int, Report]:
        told = self._store.multi_get([self._key("report", rank) for rank in range(self._ranks)])
        return {rank: loads(one) for rank, one in enumerate(told)}

    def _on_this_machine(self) -> dict[int, tuple[int, str]]:
        """Rank -> its process, of those that run where this one does; empty until all ranks have begun."""
        keys = [self._key("process", rank) for rank in range(self._ranks)]
        machine, found = _machine(), dict[int, tuple[int, str]]()
        if not self._store.check(keys):
            return found
        for rank, told in enumerate(self._store.multi_get(keys)):
            where, pid, began = json.loads(told)
            if where == machine:
                found[rank] = pid, began
        return found

    def _leave(self) -> None:
        """At exit: tell the others that no call will come."""
        if os.getpid() != self._process:
            return
        if self._verdict:  # another thread is about to end this process, and not with success
            time.sleep(2 * GRACE_S)
        if self._ends.is_set():
            return
        error = getattr(sys, "last_value", None)
        why = "" if error is None else f" with {type(error).__name__}: {error}"[:200]
        self._leaves = f"its script has ended{why}"
        self._woken.set()
        has_answered = self._said.wait(GRACE_S)  # a store in a frozen process never does
        if error is not None:
            self._find_dead()
            lost = None if has_answered and self._has_store else "the store of its process group does not answer"
            if told := self._others or ended({}, self._rank, self._dead) or lost:
                os.write(2, f"autopar: rank {self._rank} ends, and {told}\n".encode())
        self._ends.set()

    def _told_of_others(self) -> str | None:
        """Why an error may have come here: what is known of the rank that ended, or failed, first."""
        self._find_dead()
        return ended(self._reports(), self._rank, self._dead)

    def _end(self, told: str, *, is_known: bool = True) -> None:
        """Say why, and end the process, whatever its other threads wait for. Rank 0 waits until the others know, whose
        store may be in its process.
        """
        self._verdict = told
        self._ends.set()
        try:
            os.write(2, f"autopar: rank {self._rank} ends: {told}\n".encode())
            flushed = threading.Thread(target=_flush, daemon=True)
            flushed.start()
            if is_known:
                self._store.set(self._key("ended", self._rank), "")
                self._wait_for_others()
            flushed.join(1.0)
        finally:  # whatever the store says, and where the script has closed its files
            os._exit(1)

    def _wait_for_others(self) -> None:
        until, others = time.monotonic() + GRACE_S, [self._key("ended", rank) for rank in range(self._ranks)]
        while self._rank == 0 and time.monotonic() < until and not self._store.check(others):
            time.sleep(0.05)


def _flush() -> None:
    if sys.stdout is not None:  # as in a service
        sys.stdout.flush()


def _where(lines: Iterable[tuple[str, int]]) -> str:
    """The innermost line of a stack that is the user's."""
    return next((f"{file}:{line}" for file, line in lines if not file.startswith(OURS)), "")


def _machine() -> str:
    """Equal for processes that see each other's numbers."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {os.readlink(space)}" if boot.exists() and space.exists() else str(os.getpid())


def _process(pid: int) -> tuple[int, str]:
    """A process: its number, and when it began, as numbers are given again."""
    return pid, _stat(pid)[19] if _stat(pid) else ""


def _runs(pid: int, began: str) -> bool:
    found = _stat(pid)
    return bool(found) and found[19] == began and found[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """What Linux tells of a process, from its state on; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
