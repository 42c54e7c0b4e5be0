"""What becomes of a plan as things grow: its time and memory at other sizes, the sizes where it leaves memory, where
communication and computation change places, and the best plan there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from autopar.ir.batch_norm import LOCAL
from autopar.ir.layout import Shard
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.scale.elsewhere import DoesNotSplit, graph_at, plan_at, units
from autopar.scale.forms import Totals, totals
from autopar.scale.growth import BATCH, Growth
from autopar.scale.positions import Most, beyond, most_positions
from autopar.search.request import Request
from autopar.search.search import Infeasible, NoAnswerInTime, answer, ask
from cost_models.hardware import Hardware

Progress = Callable[[str], None]

DEVICE = "hbm"
FARTHEST = 2**40  # nobody's batch
WIDER, NARROWER = 6, 10  # powers of two of the present size, up and down, where time is looked at


@dataclass(frozen=True)
class Row:
    """One place: what is other there, the sizes and the mesh; `kept` is the plan with its choices kept, None where it
    does not split evenly, or the model ends before (`word`); `best` is what a search finds there, None where it was not
    asked or found nothing. `why` and `best_why` say what is not there.
    """

    label: str
    values: Mapping[str, int]
    mesh: Mesh
    kept: Plan | None
    why: str = ""
    best: Plan | None = None
    best_why: str = ""
    word: str = "does not divide"  # of a row without a plan


@dataclass(frozen=True)
class Turn:
    """What communication does as `name` grows: `points` are (size, its share of the step), in order; `flip` the two
    sizes, next to each other among those that divide, between which it stops, or begins, to take longer than the rest.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    flip: tuple[int, int] | None


@dataclass(frozen=True)
class Reach:
    """The largest size that fits in memory, and the next one that divides and does not; None: there is no such.

    `most`: what the model can take at most, where that is known; neither is larger.
    """

    name: str
    unit: int
    fits: int | None
    too_large: int | None
    most: Most | None = None


@dataclass(frozen=True)
class Study:
    """All of it. `limit`: bytes that a rank may use, and whose figure that is."""

    plan: Plan
    growth: Growth
    limit: float
    limit_from: str
    totals: Totals
    rows: tuple[Row, ...]
    turns: tuple[Turn, ...]
    reaches: tuple[Reach, ...]
    why_not: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Ground:
    """What a study stands on."""

    plan: Plan
    growth: Growth
    hardware: Hardware

    def pricer(self, mesh: Mesh) -> Pricer:
        return Pricer.on(mesh, self.hardware, self.plan.optimizer, self.plan.bucket_bytes, self.plan.graph.rounds)

    @property
    def limit(self) -> tuple[float, str]:
        if self.plan.memory_limit is not None:
            return self.plan.memory_limit, "the plan's limit"
        return float(self.hardware.tiers[DEVICE].capacity_bytes), f"all of a {self.hardware.name}"

    @cached_property
    def most(self) -> dict[str, Most]:
        """What the model itself can take of each size."""
        return most_positions(self.growth)


def study(
    ground: Ground,
    times: Sequence[int],
    *,
    why_not: Mapping[str, str] | None = None,
    search_s: float | None = None,
    progress: Progress = lambda text: None,
) -> Study:
    """`times`: by what each thing grows in the rows. `search_s`: seconds for each search; None: nothing is searched."""
    plan, growth = ground.plan, ground.growth
    why_not = {**(why_not or {}), **_fixed_axes(plan)}
    progress("closed forms")
    closed = totals(plan, growth, ground.pricer(plan.mesh))
    rows: list[Row] = []
    for label, values, mesh in _places(ground, times):
        row = _row(ground, label, values, mesh)
        if search_s is not None and label and not beyond(ground.most, values):
            progress(f"searching at {label}")
            row = _searched(ground, row, search_s)
        rows.append(row)
    progress("where communication and memory begin to limit")
    unit = units(plan, growth)
    turns = [_turn(ground, name, unit[name]) for name in growth.base]
    reaches = [_reach(ground, closed, name, unit[name]) for name in growth.base]
    return Study(plan, growth, *ground.limit, closed, tuple(rows), tuple(turns), tuple(reaches), why_not)


def _fixed_axes(plan: Plan) -> dict[str, str]:
    """Why the mesh cannot grow: each rank has a part in the statistics of batch norms; more ranks train otherwise."""
    if plan.batch_norm != LOCAL:
        return {}
    told = (
        f"its batch norms have the statistics of {plan.mesh.ranks} parts of the batch, one for each rank; "
        "search on the larger mesh with --batch-norm local"
    )
    return {"/".join(plan.mesh.names): told}


# --- rows ------------------------------------------------------------------------------------------------------------


def _places(ground: Ground, times: Sequence[int]) -> Iterator[tuple[str, dict[str, int], Mesh]]:
    """Here; each size larger; each axis larger, alone and with the batch that it splits."""
    base, mesh = dict(ground.growth.base), ground.plan.mesh
    yield "", base, mesh
    for name, size in base.items():
        for factor in times:
            yield f"{name} {size * factor}", {**base, name: size * factor}, mesh
    if _fixed_axes(ground.plan):
        return
    for axis, ranks in zip(mesh.names, mesh.sizes, strict=True):
        if ranks > 1:
            for factor in times:
                yield f"{axis} {ranks * factor}", base, _larger(mesh, axis, factor)
    for axis, ranks in zip(mesh.names, mesh.sizes, strict=True):
        if ranks > 1 and _splits_batch(ground, axis):
            for factor in times:
                batch = base[BATCH] * factor
                label = f"{axis} {ranks * factor}, {BATCH} {batch}"
                yield label, {**base, BATCH: batch}, _larger(mesh, axis, factor)


def _larger(mesh: Mesh, axis: str, times: int) -> Mesh:
    sizes = tuple(size * times if name == axis else size for name, size in zip(mesh.names, mesh.sizes, strict=True))
    return Mesh(mesh.names, sizes)


def _splits_batch(ground: Ground, axis: str) -> bool:
    """Whether inputs come in pieces of the batch over this axis."""
    place = ground.plan.mesh.names.index(axis)
    layouts = {
        node.target: ground.plan.choices[node.name].gives[0] for node in ground.plan.graph.nodes if node.op == "input"
    }
    return any(layouts[target][place] == Shard(dim) for target, dim in ground.growth.sources.get(BATCH, ()))


def _row(ground: Ground, label: str, values: Mapping[str, int], mesh: Mesh) -> Row:
    if why := beyond(ground.most, values):
        return Row(label, values, mesh, None, why, word="too long")
    try:
        return Row(label, values, mesh, plan_at(ground.plan, ground.growth, values, ground.pricer(mesh)))
    except DoesNotSplit as error:
        return Row(label, values, mesh, None, str(error))


def _searched(ground: Ground, row: Row, seconds: float) -> Row:
    plan = ground.plan
    graph = graph_at(ground.growth, row.values)
    limit, _ = ground.limit
    try:
        question = ask(graph, row.mesh, ground.hardware, optimizer=plan.optimizer)
        best = answer(question, Request(memory=limit, outputs=plan.outputs, time_limit_s=seconds))
    except Infeasible:
        return Row(row.label, row.values, row.mesh, row.kept, row.why, None, "no plan fits")
    except NoAnswerInTime:
        return Row(row.label, row.values, row.mesh, row.kept, row.why, None, f"no answer in {seconds:g} s")
    return Row(row.label, row.values, row.mesh, row.kept, row.why, best)


# --- limits ----------------------------------------------------------------------------------------------------------


def communication(plan: Plan) -> float:
    """Seconds of a step."""
    return sum(seconds for part, seconds in plan.seconds_by.items() if part.startswith("comm:"))


def _turn(ground: Ground, name: str, unit: int) -> Turn:
    """Time at powers of two of the present size; a flip is then looked for between two of them."""
    base = ground.growth.base[name]
    pricer = ground.pricer(ground.plan.mesh)

    def share(size: int) -> float | None:
        try:
            plan = plan_at(ground.plan, ground.growth, {**ground.growth.base, name: size}, pricer)
        except DoesNotSplit:
            return None
        return communication(plan) / plan.step_seconds if plan.step_seconds else 0.0

    sizes = [base >> less for less in range(NARROWER, 0, -1) if base % (unit << less) == 0]
    sizes += [base << more for more in range(WIDER + 1) if not beyond(ground.most, {name: base << more})]
    points = [(size, found) for size in sizes if (found := share(size)) is not None]
    for (low, before), (high, after) in pairwise(points):
        if (before > 0.5) != (after > 0.5):
            first, last = low // unit, high // unit
            while last - first > 1:
                middle = (first + last) // 2
                found = share(middle * unit)
                if found is None:
                    break
                if (found > 0.5) == (before > 0.5):
                    first = middle
                else:
                    last = middle
            return Turn(name, tuple(points), (first * unit, last * unit))
    return Turn(name, tuple(points), None)


def _reach(ground: Ground, closed: Totals, name: str, unit: int) -> Reach:
    """Memory grows with every size, so the last one that fits is found by halving."""
    limit, _ = ground.limit
    most = ground.most.get(name)

    def fits(count: int) -> bool:
        return closed.peak({**closed.here, name: count * unit}) <= limit

    if not fits(1):
        return Reach(name, unit, None, unit, most)
    if most is not None and fits(most.value // unit):
        return Reach(name, unit, most.value // unit * unit, None, most)
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high * unit > FARTHEST:
            return Reach(name, unit, None, None, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Reach(name, unit, low * unit, high * unit, most)
