"""So many devices, arranged with an axis of pipeline stages or without: how many stages, of which mesh each, and how
many micro-batches.

Every arrangement gets a first look: one search of the whole model on the mesh of a stage that ties repeated layers, cut
at the best places by estimate, in `LOOKED` times as many micro-batches as stages or as near as the batch divides. Then
the most promising are searched as if each was the only one, in every number of micro-batches. What is proven to be
slower than the best so far is skipped (`least_of_stages`). Where the time is up, the table says what was not searched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import Infeasible, NoAnswerInTime, NotCut
from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.plan import Plan
from autopar.plan.tell import human
from autopar.search.context import Progress
from autopar.search.meshes import first_look, meshes_of
from autopar.search.orders import PIPE
from autopar.search.pipeline import Pipeline
from autopar.search.problems import Stop, never
from autopar.search.request import Request
from cost_models.hardware import Hardware
from cost_models.steps import DEVICE

LOOKED = 4  # micro-batches of a first look, in stages
STAGE_AXES = 2  # most axes of the mesh of one stage

Answer = Plan | Pipeline
Find = Callable[[Mesh, int, Request, bool], Pipeline]  # mesh, micro-batches, request, whether ends of stages are moved
Floor = Callable[[Mesh, int], float]  # mesh, micro-batches -> seconds that the model computes on one stage's mesh


@dataclass(frozen=True)
class Arranged:
    """An arrangement, the best answer that is known on it, and what was done to find it.

    `counts`: the numbers of micro-batches that the batch allows, in the order of trying. `least_s`: seconds below which
    no step is. `why`: why there is no answer, or why the search went no further. `searched`: as if it was the only one.
    """

    mesh: Mesh
    counts: tuple[int, ...] = ()
    found: Answer | None = None
    least_s: float = 0.0
    why: str = ""
    searched: bool = False

    @property
    def seconds(self) -> float:
        return math.inf if self.found is None else seconds_of(self.found)


def seconds_of(found: Answer) -> float:
    """Of a step."""
    return found.step_seconds if isinstance(found, Pipeline) else found.predicted_seconds


def least_of_stages(work_s: float, stages: int, micro_batches: int, *, in_halves: bool = False) -> float:
    """Seconds below which no step is, of `work_s` seconds of computing in all micro-batches together, on whatever mesh
    each stage has, wherever the model is cut.

    `in_halves`: backward may run in two, or a rank may have several stages. Then it is only known that the busiest rank
    does its part of the work. Else:
    Stage s of t_s seconds a micro-batch begins behind the forwards of those before it, and ends before their backwards:
    a step takes m t_s + t_0 + ... + t_{s-1} or more. The cut for which the largest of these is smallest has all of them
    equal, t_s = (1 - 1/m)^s t_0; of W = work / m seconds, that is W / (1 - (1 - 1/m)^p).
    """
    if in_halves:
        return work_s / stages
    return work_s / micro_batches / (1 - (1 - 1 / micro_batches) ** stages)


def arrangements(
    devices: int, hardware: Hardware, stages: Sequence[int] | None, counts: Callable[[int], Sequence[int]]
) -> tuple[Arranged, ...]:
    """Those in two stages and more, all of whose ranks have work: few stages first. `stages`: how many there may be;
    None: any number. `counts`: stages -> numbers of micro-batches.
    """
    found: list[Arranged] = []
    for number in range(2, devices + 1):
        if devices % number or (stages is not None and number not in stages) or not counts(number):
            continue
        tried = tuple(sorted(counts(number), key=lambda one, number=number: (abs(one - LOOKED * number), one)))
        for inner in meshes_of(devices // number, hardware, STAGE_AXES):
            names, sizes = (inner.names, inner.sizes) if inner.ranks > 1 else ((), ())
            found.append(Arranged(Mesh((PIPE, *names), (number, *sizes)), tried))
    return tuple(found)


def best_arranged(
    rows: Sequence[Arranged],
    unstaged: Arranged | None,
    find: Find,
    floor: Floor,
    request: Request,
    *,
    in_halves: bool = True,
    progress: Progress = lambda text: None,
    stop: Stop = never,
) -> tuple[Arranged, ...]:
    """Rows of all arrangements, the quickest first. `unstaged`: the one without stages, where that was searched;
    `in_halves`: whether `find` may run backward in two.

    The first looks may take the request's time limit together, and so may the searches. Raises Infeasible, or
    NoAnswerInTime, where none has an answer.
    """
    contest = _Contest(find, floor, request, in_halves, progress, stop)
    contest.look(rows, [] if unstaged is None else [unstaged])
    contest.search()
    found = contest.rows
    if all(row.found is None for row in found):
        raise _nothing(found, contest.errors)
    return tuple(sorted(found, key=lambda row: float(f"{row.seconds:.9g}")))


@dataclass
class _Contest:
    """The arrangements that were looked at, with the best that is known of each."""

    find: Find
    floor: Floor
    request: Request
    in_halves: bool
    progress: Progress
    stop: Stop
    rows: list[Arranged] = field(default_factory=list[Arranged])
    errors: list[Infeasible | NoAnswerInTime] = field(default_factory=list[Infeasible | NoAnswerInTime])

    def look(self, rows: Sequence[Arranged], known: Sequence[Arranged]) -> None:
        self.rows, began = [*known], time.perf_counter()
        for row in rows:
            if any(one.found is not None for one in self.rows) and self._is_up(began):
                self.rows.append(replace(row, why="not looked at: the time was up"))
                continue
            row, worth = self._worth(row)
            if worth:
                row = self._tried(row, worth[0], first_look(self.request), moved=False)
            self.rows.append(row if worth else replace(row, why=_skipped(row)))
            told = _told(self.rows[-1]) + (", at a first look" if self.rows[-1].found else "")
            self.progress(f"{row.mesh}: {told}")

    def search(self) -> None:
        began = time.perf_counter()
        for place in sorted(range(len(self.rows)), key=lambda at: self.rows[at].seconds):
            row = self.rows[place]
            if row.searched or not row.counts:
                continue
            if any(one.searched and one.counts for one in self.rows) and self._is_up(began):
                self.rows[place] = replace(row, why=row.why or "searched no further: the time was up")
                continue
            row, worth = self._worth(row)
            if not worth:
                self.rows[place] = replace(row, why=_skipped(row))
                continue
            self.progress(f"{row.mesh}: searching")
            for count in worth:
                row = self._tried(row, count, self.request, moved=True)
                if self.stop():
                    break
            self.rows[place] = replace(row, searched=row.found is not None)
            self.progress(f"{row.mesh}: {_told(self.rows[place])}")

    def _is_up(self, since: float) -> bool:
        return self.stop() or time.perf_counter() - since >= self.request.time_limit_s

    def _worth(self, row: Arranged) -> tuple[Arranged, list[int]]:
        """The row, and its numbers of micro-batches that may be quicker than the best so far."""
        best = min((one.seconds for one in self.rows), default=math.inf)
        least = {
            count: least_of_stages(self.floor(row.mesh, count), row.mesh.sizes[0], count, in_halves=self.in_halves)
            for count in row.counts
        }
        return replace(row, least_s=min(least.values())), [count for count in row.counts if least[count] < best]

    def _tried(self, row: Arranged, count: int, asked: Request, *, moved: bool) -> Arranged:
        """The row, with what is found in so many micro-batches where that is better."""
        try:
            found = self.find(row.mesh, count, asked, moved)
        except NotCut:
            return row if row.found is not None else replace(row, why="the model cannot be cut so")
        except (Infeasible, NoAnswerInTime) as error:
            self.errors.append(error)
            return row if row.found is not None else replace(row, why=why(error))
        return replace(row, found=found, why="") if found.step_seconds < row.seconds else row


def _skipped(row: Arranged) -> str:
    return f"skipped: every step takes {row.least_s * 1e3:.3f} ms or more"


def why(error: Infeasible | NoAnswerInTime) -> str:
    """In a few words, why there is no answer."""
    if isinstance(error, NoAnswerInTime):
        return "no answer in time"
    needs = error.at_least if error.enough is None else error.enough
    return "nothing fits" + ("" if needs is None else f": needs about {human(needs)}")


def _nothing(rows: Sequence[Arranged], errors: Sequence[Infeasible | NoAnswerInTime]) -> Exception:
    devices = count_of(rows[0].mesh.ranks, "device")
    infeasible = [error for error in errors if isinstance(error, Infeasible)]
    if not infeasible or len(infeasible) < len(errors):
        return NoAnswerInTime(
            f"nothing was found on any of {len(rows)} arrangements of {devices}; give more time (--time-limit)"
        )
    best = min(infeasible, key=lambda error: (error.enough or math.inf, error.at_least or math.inf))
    return Infeasible(
        f"of {len(rows)} arrangements of {devices} in stages none fits; on the best: {best}", best.at_least, best.enough
    )


def _told(row: Arranged) -> str:
    return row.why if row.found is None else f"{row.seconds * 1e3:.3f} ms a step"


# --- for readers ----------------------------------------------------------------------------------------------------


def _cells(row: Arranged, best: float) -> tuple[str, ...]:
    done = row.why or ("" if row.searched else "first look only")
    match row.found:
        case None:
            return str(row.mesh), "-", "-", "-", "-", done
        case Pipeline():
            peak, count = row.found.peak_bytes, row.found.schedule.micro_batches
        case _:
            peak, count = row.found.peak_bytes[DEVICE], row.found.graph.rounds.count
    ratio = f"{row.seconds / best:.2f} x" if best else "1.00 x"
    return str(row.mesh), f"{count}", f"{row.seconds * 1e3:.3f}", ratio, human(peak), done


def table(rows: Sequence[Arranged]) -> str:
    """The arrangements as text, one line each, the quickest first."""
    heads = ("mesh", "micro-batches", "ms per step", "to the best", "peak per rank", "")
    lines = [heads, *(_cells(row, rows[0].seconds) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]

    def body() -> Iterator[str]:
        for name, *cells, done in lines:
            told = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            yield "  " + "  ".join((name.ljust(widths[0]), *told, done)).rstrip()

    head = f"arrangements of {count_of(rows[0].mesh.ranks, 'device')}, simulated: one training step"
    return "\n".join([head, *body()]) + "\n"


def documents(rows: Sequence[Arranged]) -> list[dict[str, object]]:
    """The same for --json."""
    return [
        {
            "mesh": dict(zip(row.mesh.names, row.mesh.sizes, strict=True)),
            "simulated_seconds": None if row.found is None else row.seconds,
            "least_seconds": row.least_s,
            "searched": row.searched,
            "why": row.why,
        }
        for row in rows
    ]
