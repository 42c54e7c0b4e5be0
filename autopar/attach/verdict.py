"""What ranks tell of themselves, and what follows where they do not go together: sentences, from values alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

TOGETHER = 10  # times the patience of ranks that all are in one call: it may just be a long one
SETTLED_S = 4.0  # what still is so behind this long has not only been told late


@dataclass(frozen=True)
class Report:
    """One rank at one moment. `told`: (number, checksum of all until then, what it is) of its last calls. `within`: the
    call that it is in, `""` outside; `for_s`: since when. `slack_s`: what its patience is longer by. `works`: it traces
    or searches, for as long as it takes. `at`: the user's line that its main thread is at. `failed`: (number, error,
    seconds since) of a call that has raised. `left`: why no further call will come. `dead`: ranks of its machine whose
    process is gone. `beat` grows with each report.
    """

    beat: int
    calls: int
    told: tuple[tuple[int, int, str], ...] = ()
    within: str = ""
    for_s: float = 0.0
    slack_s: float = 0.0
    works: bool = False
    at: str = ""
    failed: tuple[int, str, float] | None = None
    left: str = ""
    dead: tuple[int, ...] = ()

    def dumps(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def loads(text: bytes) -> Report:
    read = json.loads(text)
    told = tuple((number, sum_, what) for number, sum_, what in read.pop("told"))
    failed, dead = read.pop("failed"), tuple(read.pop("dead"))
    return Report(**read, told=told, failed=failed and tuple(failed), dead=dead)


@dataclass
class Judge:
    """Reads the reports of all ranks again and again. `patience_s`: how long a rank may wait for another one."""

    patience_s: float
    told: dict[int, dict[int, tuple[int, str]]] = field(default_factory=dict[int, "dict[int, tuple[int, str]]"])
    heard: dict[int, tuple[int, float]] = field(default_factory=dict[int, "tuple[int, float]"])
    dead: dict[int, float] = field(default_factory=dict[int, float])
    kept: int = 512

    def verdict(self, reports: Mapping[int, Report], now_s: float) -> str | None:
        """Why the ranks cannot go on, naming rank and call; None while they can. `now_s`: of one steady clock."""
        for rank, report in reports.items():
            if self.heard.get(rank, (-1, 0.0))[0] != report.beat:
                self.heard[rank] = report.beat, now_s
            known = self.told.setdefault(rank, {})
            known |= {number: (sum_, what) for number, sum_, what in report.told}
            while len(known) > self.kept:
                del known[next(iter(known))]
        for rank in {rank for report in reports.values() for rank in report.dead}:
            self.dead.setdefault(rank, now_s)
        dead = {rank for rank, since in self.dead.items() if now_s - since > SETTLED_S}
        return self._other_calls() or _failed(reports) or _gone(reports, dead) or self._silent(reports, now_s)

    def _other_calls(self) -> str | None:
        first = min(self.told)
        others, theirs = {**self.told}, self.told[first]
        del others[first]
        for rank, known in others.items():
            for number in sorted(known.keys() & theirs.keys()):
                (sum_, what), (wanted, wanted_what) = known.pop(number), theirs[number]
                if sum_ != wanted:
                    return (
                        f"call {number} is {what} on rank {rank} and {wanted_what} on rank {first}; every rank has to "
                        "make the same calls, of as many rows (drop_last=True), evaluation too"
                    )
        return None

    def _silent(self, reports: Mapping[int, Report], now_s: float) -> str | None:
        mute = [
            rank
            for rank, (_, since) in self.heard.items()
            if now_s - since > self.patience_s and not reports[rank].left
        ]
        for rank, report in reports.items():
            if not report.within or report.left or rank in mute:
                continue
            waited = f"rank {rank} has waited {report.for_s:.0f} s in {_call(report)}"
            if mute and report.for_s > self.patience_s:
                return f"{waited}; nothing was heard of {_named(mute)} for as long: frozen, or the machine is gone"
            works = any(other.works and other.calls == report.calls for other in reports.values())
            if works or report.for_s <= self.patience_s + report.slack_s:
                continue
            more = "; if that is meant, give autopar.compile a longer patience_s"
            behind = [
                one
                for one, other in reports.items()
                if one != rank and (other.calls < report.calls or not other.within) and not other.left
            ]
            if not behind and report.for_s > TOGETHER * self.patience_s + report.slack_s:
                return f"{waited}, and so have all others{more}"
            if not behind:
                continue
            other = reports[behind[0]]
            now = f"in {_call(other)}" if other.within else f"behind call {other.calls}{_at(other)}"
            return f"{waited} for {_named(behind)}: rank {behind[0]} is {now}{more}"
        return None


def _failed(reports: Mapping[int, Report]) -> str | None:
    """A rank goes on behind an error in a call in which another one still waits for it."""
    for rank, report in reports.items():
        if report.failed is None or report.failed[2] < SETTLED_S:
            continue
        number, error, _ = report.failed
        for other, theirs in reports.items():
            if theirs.within and theirs.calls == number and theirs.for_s > SETTLED_S and other != rank:
                return f"call {number} failed on rank {rank} ({error}), and rank {other} waits in {_call(theirs)}"
    return None


def _gone(reports: Mapping[int, Report], dead: Collection[int]) -> str | None:
    """A rank whose process has ended, or that will make no further call, while another waits for it."""
    for rank, report in reports.items():
        if not report.left and rank not in dead:
            continue
        inside = not report.left and bool(report.within)
        for other, theirs in reports.items():
            if other == rank or not (theirs.within or report.left):
                continue
            if theirs.calls > report.calls or (theirs.calls == report.calls and inside and theirs.within):
                when = f"in {_call(report)}" if inside else f"behind call {report.calls}"
                why = report.left or "its process is gone"
                now = f"waits in {_call(theirs)}" if theirs.within else f"has made {theirs.calls}"
                return f"rank {rank} has left {when} ({why}), and rank {other} {now}"
    return None


def ended(reports: Mapping[int, Report], here: int, dead: Collection[int]) -> str | None:
    """Another rank that has ended or failed, in words."""
    for rank in sorted({*dead} - {here}):
        if rank not in reports:
            return f"the process of rank {rank} is gone"
        if not reports[rank].left:
            last = reports[rank]
            return (
                f"the process of rank {rank} is gone (last heard of {'in' if last.within else 'behind'} {_call(last)})"
            )
    mine = reports[here].failed if here in reports else None
    for rank, report in reports.items():
        alike = mine is not None and report.failed is not None and mine[0] == report.failed[0]
        if rank == here or alike:
            continue
        if report.failed is not None:
            return f"call {report.failed[0]} failed on rank {rank} ({report.failed[1]})"
        if report.left:
            return f"rank {rank} has left behind call {report.calls} ({report.left})"
    return None


def _call(report: Report) -> str:
    return f"call {report.calls}{report.within and ', ' + report.within}{_at(report)}"


def _at(report: Report) -> str:
    return report.at and f", at {report.at}"


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
