"""The best mesh of so many devices: every way to arrange them in up to three axes is searched, and the quickest kept.

Meshes of up to two axes get a first look: the best plan that ties repeated layers, without overlap prices, simulated.
Then all are searched as if each was the only one: the best of the first looks, those of more axes, the others. A mesh
is skipped, of looks and searches, only where that is proven to change nothing: no plan on it computes for less time
than the best plan so far takes. Where the time is up before all were searched, the table says which were not.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.assemble.problem import DEVICE
from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.mesh import Mesh, check_ranks
from autopar.ir.words import count_of
from autopar.page import Beside
from autopar.plan import Plan
from autopar.plan.tell import human
from autopar.search.context import Progress, Question
from autopar.search.overlap_loop import best_prefetch
from autopar.search.problems import Stop, never
from autopar.search.request import Request
from autopar.search.solve import floor_s
from autopar.search.splits import needs_no_axis
from cost_models.hardware import Hardware

MOST_AXES = 3
# Up to so many axes a mesh gets a first look, whatever the time, as long as there are so many at most: 64 devices have
# 6, 1,024 have 10, and 720 have 29. With more axes a look takes half as long as the search, whose beginning it is, and
# says little: of the ten such meshes of Llama-8B on 64 devices the best was eighth by first looks.
QUICK_AXES, QUICK = 2, 16
NO_LOOK = "not looked at: the time was up"
NAMES = {1: ("data",), 2: ("data", "tensor"), 3: ("data", "data2", "tensor")}  # until it is known what an axis does
LOOK_S = 10.0  # for the solver, in a first look
SAME = 1e-9  # relative: plans that take as long

Held = Callable[[Question, Request], Plan]


@dataclass(frozen=True)
class Row:
    """A mesh, the best plan that is known on it, and what was done to find it.

    `floor_s`: seconds that every plan on it computes. `why`: why there is no plan, or why the search went no further.
    `searched`: it was searched as if it was the only one.
    """

    mesh: Mesh
    plan: Plan | None = None
    floor_s: float = 0.0
    why: str = ""
    searched: bool = False

    @property
    def seconds(self) -> float:
        return math.inf if self.plan is None else self.plan.predicted_seconds


def meshes_of(devices: int, hardware: Hardware, most_axes: int = MOST_AXES) -> tuple[Mesh, ...]:
    """The devices as a grid of up to `most_axes` axes, in every way and order. First come two axes, then one, then
    more; among equals those of which each axis lies within a node or goes over whole ones. Raises ValueError for less
    than one, and for more than any cluster has.
    """
    if devices < 1:
        raise ValueError(f"{devices} devices are none; give a number from 1, for example 8")
    check_ranks(devices)
    per_node = hardware.ranks_per_node
    found = [
        sizes for axes in range(1, most_axes + 1) for sizes in _factors(devices, axes) if axes == 1 or min(sizes) > 1
    ]
    by_axes = (QUICK_AXES, *range(1, QUICK_AXES), *range(QUICK_AXES + 1, most_axes + 1))
    found.sort(key=lambda sizes: (by_axes.index(len(sizes)), _straddles(sizes, per_node), sizes))
    return tuple(Mesh(NAMES.get(len(sizes), tuple(f"axis{n}" for n in range(len(sizes)))), sizes) for sizes in found)


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of so many whole numbers whose product it is, in order."""
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for others in _factors(number // first, parts - 1):
            yield first, *others


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _straddles(sizes: Sequence[int], per_node: int) -> bool:
    """Whether some axis lies neither within a node nor over whole ones; an axis alone has to."""
    strides = itertools.accumulate(reversed(sizes), operator.mul)
    return len(sizes) > 1 and math.prod(sizes) > per_node and per_node not in strides


# --- the contest -----------------------------------------------------------------------------------------------------


def best_mesh(
    meshes: Sequence[Mesh],
    asked: Callable[[Mesh], Question],
    held: Held,
    request: Request,
    *,
    progress: Progress = lambda text: None,
    stop: Stop = never,
) -> tuple[Row, ...]:
    """Rows of all meshes, the quickest first: its plan is the best of all.

    `asked`: the question on a mesh. `held`: the best plan for a request, in the memory that there is on its mesh.
    The searches may take the request's time limit together: but for the first none begins after that. Raises
    Infeasible, NoAnswerInTime where no mesh has a plan, ValueError for a pin that names an axis.
    """
    if len(meshes) == 1:
        (mesh,) = meshes
        question = asked(mesh)
        return (Row(mesh, held(question, request), floor_s(question, None), searched=True),)
    needs_no_axis(request.pin)
    errors = list[Infeasible | NoAnswerInTime]()
    rows = _looks(meshes, asked, held, first_look(request), errors, progress, stop)
    began = time.perf_counter()
    done: list[Row] = []
    for row in _in_turn(rows):
        best = min(one.seconds for one in [*done, *rows])
        is_up = stop() or time.perf_counter() - began >= request.time_limit_s
        if row.floor_s < best and is_up and any(one.searched for one in done):
            done.append(replace(row, why=row.why or "searched no further: the time was up"))
            continue
        question = asked(row.mesh) if row.floor_s < best else None
        floor = row.floor_s if question is None else floor_s(question, None)
        if question is None or floor >= best:
            told = f"skipped: every plan computes for {floor * 1e3:.3f} ms or more"
            done.append(replace(row, floor_s=floor, why=told))
            continue
        progress(f"{row.mesh}: searching")
        found = _tried(row.mesh, question, held, request, errors)
        better = found if found.seconds <= row.seconds * (1 + SAME) else replace(row, searched=found.searched)
        done.append(better)
        progress(f"{row.mesh}: {_told(done[-1])}")
    if all(row.plan is None for row in done):
        raise _nothing(meshes, errors)
    return tuple(sorted(done, key=quickest_first))


def _looks(
    meshes: Sequence[Mesh],
    asked: Callable[[Mesh], Question],
    held: Held,
    request: Request,
    errors: list[Infeasible | NoAnswerInTime],
    progress: Progress,
    stop: Stop,
) -> list[Row]:
    """A row for each mesh, after its first look if it gets one."""
    rows: list[Row] = []
    for mesh in meshes:
        is_quick = len(mesh.sizes) <= QUICK_AXES and (len(rows) < QUICK or len(mesh.sizes) == 1)
        if rows and (stop() or not is_quick):
            rows.append(Row(mesh, why=NO_LOOK))
            continue
        question, best = asked(mesh), min((row.seconds for row in rows), default=math.inf)
        if (floor := floor_s(question, None)) >= best:
            rows.append(Row(mesh, None, floor))
            progress(f"{mesh}: computes for {floor * 1e3:.3f} ms or more")
            continue
        rows.append(_tried(mesh, question, held, request, errors, look=True))
        progress(f"{mesh}: {_told(rows[-1])}, at a first look")
    return rows


def _in_turn(rows: Sequence[Row]) -> list[Row]:
    """The order of the searches. What the first looks say of a mesh says nothing of those that got none."""
    looked = sorted((row for row in rows if row.why != NO_LOOK), key=quickest_first)
    return [*looked[:1], *(row for row in rows if row.why == NO_LOOK), *looked[1:]]


def first_look(request: Request) -> Request:
    """What is asked of a mesh before it is known whether it is worth a search."""
    return replace(request, tied=True, simulation=False, time_limit_s=min(LOOK_S, request.time_limit_s))


def _tried(
    mesh: Mesh,
    question: Question,
    held: Held,
    request: Request,
    errors: list[Infeasible | NoAnswerInTime],
    *,
    look: bool = False,
) -> Row:
    """The row of a mesh, after a search or a first look; why there is no plan goes to `errors`, too. What was found
    out on the way is dropped: on three axes it takes hundreds of megabytes.
    """
    floor = floor_s(question, None)
    try:
        plan = held(question, request)
    except Infeasible as error:
        errors.append(error)
        needs = error.at_least if error.enough is None else error.enough
        return Row(mesh, None, floor, "nothing fits" + ("" if needs is None else f": needs about {human(needs)}"))
    except NoAnswerInTime as error:
        errors.append(error)
        return Row(mesh, None, 0.0 if look else floor, "no answer in time")
    finally:
        question.forget()
    if plan.simulated_seconds is None and question.pricer.hardware.overlaps:
        simulated = best_prefetch(plan, question.pricer, plan.memory_limit)
        plan = replace(simulated.plan, simulated_seconds=simulated.seconds)
    return Row(mesh, plan, floor, searched=not look)


def quickest_first(row: Row) -> tuple[float, int, tuple[int, ...]]:
    """What comes first: the quickest; of equal ones, to nine digits, the one with fewer axes."""
    return float(f"{row.seconds:.9g}"), len(row.mesh.sizes), row.mesh.sizes


def _nothing(meshes: Sequence[Mesh], errors: Sequence[Infeasible | NoAnswerInTime]) -> Exception:
    """Why no mesh has a plan: what would do on the one that needs least."""
    devices = count_of(meshes[0].ranks, "device")
    infeasible = [error for error in errors if isinstance(error, Infeasible)]
    if len(infeasible) < len(errors) or not infeasible:
        return NoAnswerInTime(
            f"no plan was found on any of {len(meshes)} meshes of {devices}; give more time (--time-limit)"
        )
    best = min(infeasible, key=lambda error: (error.enough or math.inf, error.at_least or math.inf))
    told = f"of {len(meshes)} meshes of {devices} none has a plan that fits; on the best: {best}"
    return Infeasible(told, best.at_least, best.enough)


def _done(row: Row) -> str:
    return row.why or ("" if row.searched else "first look only")


def _told(row: Row) -> str:
    return row.why if row.plan is None else f"{row.seconds * 1e3:.3f} ms a step"


# --- for readers ----------------------------------------------------------------------------------------------------


def besides(rows: Sequence[Row]) -> list[Beside]:
    """The meshes for a page (`autopar.page`), the quickest first."""
    found: list[Beside] = []
    for row in rows:
        peak = None if row.plan is None else row.plan.peak_bytes[DEVICE]
        seconds = None if row.plan is None else row.seconds
        found.append(Beside(str(row.mesh), seconds, peak, _done(row), row is rows[0]))
    return found


def table(rows: Sequence[Row], called: Callable[[Row], str] = lambda row: str(row.mesh)) -> str:
    """The meshes as text, one line each, the quickest first. `called`: what a row is called."""
    best = rows[0].plan
    assert best is not None
    lines = [("mesh", "ms per step", "to the best", "peak per rank", "")]
    for row in rows:
        done = _done(row)
        if row.plan is None:
            lines.append((called(row), "-", "-", "-", done))
            continue
        peak = "; ".join(human(nbytes) for _, nbytes in sorted(row.plan.peak_bytes.items()))
        ratio = row.seconds / best.predicted_seconds if best.predicted_seconds else 1.0
        lines.append((called(row), f"{row.seconds * 1e3:.3f}", f"{ratio:.2f} x", peak, done))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    body = [
        "  " + "  ".join((name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)), done))
        for name, *cells, done in lines
    ]
    head = f"meshes of {count_of(best.mesh.ranks, 'device')}, {best.measure}: one training step on {best.hardware}"
    return "\n".join([head, *(line.rstrip() for line in body)]) + "\n"
