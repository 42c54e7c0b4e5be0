"""cut_pipeline: the cheapest way to cut a chain of layers into pipeline stages, exactly; and why there is none.

For a cap on the latency of a stage, the least sum of latencies comes by dynamic programming from the back, where n
stages follow the one that is chosen and d devices are left:

    F[n + 1, i, d] = min over j, g of  w_g[n, i, j] + F[n, j + 1, d - devices_g]          F[0, layers, 0] = 0

w_g[n, i, j] is the least latency of layers i to j on a group g whose bytes fit with n followers, inf above the cap.
The least sum falls as the cap rises, so F at the upper end of a range of caps, with B - 1 times its lower end, bounds
every plan in the range. Ranges that cannot beat the best plan are dropped, the others are halved.

With max in place of + the same recursion gives the smallest cap, or the smallest limit of bytes, that any cut meets.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from solver.pipeline import PipelineCost, PipelineProblem, Stage, pipeline_cost
from solver.problem import Array
from solver.solution import BackendError

Weigh = Callable[[int], Array]  # followers -> [first layer, last layer, group, option], inf where it may not be taken


@dataclass(frozen=True, slots=True)
class PipelineSolution:
    """The answer of `cut_pipeline`.

    cut          the stages in order, first layer first; None if no cut fits, and then `explanation` says why
    seconds      of a step by the referee; inf without a cut
    cost         the referee's whole account of the cut
    least_bytes  without a cut: the smallest limit that some cut meets; None if no limit would do
    stats        "tables": dynamic programs that were run, "caps": distinct latencies they had to choose among
    """

    cut: tuple[Stage, ...] | None
    seconds: float
    cost: PipelineCost | None = None
    explanation: str | None = None
    least_bytes: float | None = None
    stats: Mapping[str, float] = field(default_factory=dict[str, float])


def cut_pipeline(problem: PipelineProblem) -> PipelineSolution:
    """Find the cut whose step takes the fewest seconds, to the rounding of sums, or say why none fits.

    Of several such cuts it is always the same one; which one is not promised. Raises BackendError if the referee
    disagrees.
    """
    chain = _Chain(problem, lambda followers: _latencies(problem, followers))
    lowest = chain.best(combine=np.maximum)
    if lowest is None:
        return _infeasible(problem)
    caps, more = chain.distinct(), problem.micro_batches - 1
    index = {float(cap): number for number, cap in enumerate(caps)}
    best, best_s, tables = lowest, math.inf, 1
    # Ranges of caps not settled yet: (bound on the seconds, first, end, least sum below a cap at or above the range).
    ranges = [(0.0, index[lowest.largest], len(caps), 0.0)]
    while ranges:
        _, first, end, least = heapq.heappop(ranges)
        bounds = np.maximum(least, caps[first:end]) + more * caps[first:end]  # no sum is below its largest part
        end = first + int(np.searchsorted(bounds, best_s))  # the others cost best_s or more
        if first >= end:
            continue
        middle = (first + end) // 2
        plan = chain.best(float(caps[middle]))
        assert plan is not None  # the cap is not below the lowest
        tables += 1
        seconds = plan.total + more * plan.largest
        if seconds < best_s:
            best, best_s = plan, seconds
        # Caps between the plan's largest stage and the cap it was made for have the same least sum.
        for low, high, total in ((first, index[plan.largest], plan.total), (middle + 1, end, least)):
            if low < high:
                heapq.heappush(ranges, (total + more * float(caps[low]), low, high, total))
    cut = chain.cut(best)
    cost = pipeline_cost(problem, cut)
    if not (cost.fits and math.isclose(cost.seconds, best_s, rel_tol=1e-9)):
        raise BackendError(f"claimed {best_s:.9g} s, but the cut takes {cost.seconds:.9g} s and fits: {cost.fits}")
    return PipelineSolution(cut, cost.seconds, cost, stats={"tables": tables, "caps": len(caps)})


def _latencies(problem: PipelineProblem, followers: int) -> Array:
    """Latency of every option of every stage, inf where its bytes do not fit with so many stages behind it."""
    fits = _nbytes(problem, followers) <= problem.limit_bytes
    sent_s = np.append(problem.send_s, 0.0)  # nothing is sent behind the last layer
    return np.where(fits, problem.stages.seconds + sent_s[None, :, None, None], np.inf)


def _nbytes(problem: PipelineProblem, followers: int) -> Array:
    """Bytes on each device of every option of every stage, inf where it is not offered."""
    table, held = problem.stages, min(problem.micro_batches, followers + 1)
    offered = np.isfinite(table.seconds)
    fixed, saved = np.where(offered, table.fixed_bytes, np.inf), np.where(offered, table.saved_bytes, 0.0)
    return fixed + held * saved


@dataclass(frozen=True, slots=True)
class _Plan:
    """A chain of stages as (first layer, last layer, group): the total and the largest of what they weigh."""

    total: float
    largest: float
    runs: tuple[tuple[int, int, int], ...]


class _Chain:
    """The recursion at the head of this file, for one way to weigh stages.

    Weights depend on the followers only until as many micro-batches are in flight as there ever are, and not at all
    where memory is no concern. From the last count `top` at which they change on, followers need not be counted:
    F[top] is then the best over that many stages or more.
    """

    def __init__(self, problem: PipelineProblem, weigh: Weigh) -> None:
        layers, most = problem.stages.layers, problem.devices // min(problem.groups)
        self.problem, self.weigh = problem, weigh
        counts = [weigh(n).min(axis=3) for n in range(max(1, min(layers, most, problem.micro_batches)))]
        while len(counts) > 1 and np.array_equal(counts[-1], counts[-2]):
            counts.pop()
        self.top = len(counts) - 1
        weights = np.stack(counts)
        weights[:, np.tri(layers, k=-1, dtype=bool)] = np.inf  # no stage ends before it begins
        self.weights: Array = np.ascontiguousarray(weights.transpose(3, 1, 0, 2))  # group, first, followers, last

    def distinct(self) -> Array:
        """All finite weights, sorted, each once."""
        return np.unique(self.weights[np.isfinite(self.weights)])

    def best(self, cap: float = math.inf, combine: np.ufunc = np.add) -> _Plan | None:
        """The least combination of weights none of which is above `cap`; None if no chain of stages is left."""
        least = self.table(cap, combine)
        ends = least[:, 0].T  # devices, stages: the first of equals takes the fewest devices, then the fewest stages
        if self.problem.use_all:
            ends = np.where(np.arange(len(ends))[:, None] == self.problem.devices, ends, np.inf)
        devices, stages = divmod(int(np.argmin(ends)), self.top + 1)
        total = float(ends[devices, stages])
        if total == math.inf:
            return None
        runs: list[tuple[int, int, int]] = []
        largest, first = 0.0, 0
        while first < self.problem.stages.layers:
            last, group, stages, weight = self._step(least, stages, first, devices, cap, combine)
            runs.append((first, last, group))
            largest = max(largest, weight)
            first, devices = last + 1, devices - self.problem.groups[group]
        return _Plan(total, largest, tuple(runs))

    def cut(self, plan: _Plan) -> tuple[Stage, ...]:
        """The plan with the option of each stage that makes it weigh what it does."""
        behind = reversed(range(len(plan.runs)))
        return tuple(Stage(*run, int(np.argmin(self.weigh(n)[run]))) for n, run in zip(behind, plan.runs, strict=True))

    def table(self, cap: float, combine: np.ufunc) -> Array:
        """F[stages, first layer, devices], all meant exactly; only the last count of stages means that or more."""
        layers, devices, top = self.problem.stages.layers, self.problem.devices, self.top
        least = np.full((top + 2, layers + 1, devices + 1), np.inf)  # one count more, to be folded into the last
        least[0, layers, 0] = 0.0
        below = self.weights[:, :, 0, :] <= cap  # fewer followers never weigh more
        ends = np.where(below.any(axis=2), layers - np.argmax(below[:, :, ::-1], axis=2), 0)
        for first in reversed(range(layers)):
            counts = min(top + 1, layers - first)  # of followers; each has a layer
            for group, taken in enumerate(self.problem.groups):
                end = int(ends[group, first])
                if end == 0 or taken > devices:
                    continue
                weight = self.weights[group, first, :counts, first:end]
                weight = np.where(weight <= cap, weight, np.inf)[:, :, None]
                rest = least[:counts, first + 1 : end + 1, : devices - taken + 1]
                into = least[1 : counts + 1, first, taken:]
                np.minimum(into, combine(weight, rest).min(axis=1), out=into)
            np.minimum(least[top, first], least[top + 1, first], out=least[top, first])
        return least[: top + 1]

    def _step(
        self, least: Array, stages: int, first: int, devices: int, cap: float, combine: np.ufunc
    ) -> tuple[int, int, int, float]:
        """(last layer, group, stages that follow, weight) of a stage that attains least[stages, first, devices]."""
        target = least[stages, first, devices]
        for behind in range(max(stages - 1, 0), stages + 1):  # below the last count the first of the two attains it
            for group, taken in enumerate(self.problem.groups):
                if taken <= devices:
                    weight = self.weights[group, first, behind, first:]
                    found = combine(
                        np.where(weight <= cap, weight, np.inf), least[behind, first + 1 :, devices - taken]
                    )
                    attains = np.flatnonzero(found == target)  # the very operations of `table`, so equal to the bit
                    if attains.size:
                        return first + int(attains[0]), group, behind, float(weight[attains[0]])
        raise AssertionError(f"no stage from layer {first} attains {target}")


# --- why nothing fits ----------------------------------------------------------------------------------------------


def _infeasible(problem: PipelineProblem) -> PipelineSolution:
    """The reason: bytes, if another limit would do; else the stages that are offered."""
    chain = _Chain(problem, lambda followers: _nbytes(problem, followers))
    tightest = chain.best(combine=np.maximum)
    if tightest is None:
        return PipelineSolution(None, math.inf, explanation=_about_stages(problem, chain))
    text = _about_bytes(problem, chain, chain.cut(tightest))
    return PipelineSolution(None, math.inf, explanation=text, least_bytes=tightest.total)


def _about_bytes(problem: PipelineProblem, chain: _Chain, cut: tuple[Stage, ...]) -> str:
    """`cut` is one whose fullest stage holds as little as any cut's fullest stage does."""
    cost = pipeline_cost(problem, cut)
    number = max(range(len(cut)), key=lambda at: cost.nbytes[at])
    stage, held, needed = cut[number], cost.in_flight[number], cost.nbytes[number]
    at = (stage.first, stage.last, stage.group, stage.option)
    fixed, saved = (_number(float(array[at])) for array in (problem.stages.fixed_bytes, problem.stages.saved_bytes))
    first, last = problem.name(stage.first), problem.name(stage.last)
    run = first if first == last else f"{first} to {last}"
    return (
        f"no cut fits {_number(problem.limit_bytes)} bytes a device; the best needs {_number(needed)}, for a stage of "
        f"{run} on {_devices(problem.groups[stage.group])}: {fixed} fixed + {held} in flight x {saved} saved. "
        f"{_hopeless(problem, chain)}Allow {_number(needed)} bytes ({_number(needed - problem.limit_bytes)} more), or "
        "offer more devices, larger groups or options that hold less"
    )


def _hopeless(problem: PipelineProblem, chain: _Chain) -> str:
    """Names the layer that breaks the limit by most in whatever stage, if there is one."""
    usable = chain.weights[np.array(problem.groups) <= problem.devices]
    least = usable[:, :, min(1, chain.top)].min(axis=0)
    least[:, -1] = usable[:, :, 0, -1].min(axis=0)  # only a stage that ends with the last layer has none behind it
    needs = [float(least[: layer + 1, layer:].min()) for layer in range(len(least))]
    worst = int(np.argmax(needs))
    if needs[worst] <= problem.limit_bytes:
        return ""
    return f"No stage at all with {problem.name(worst)} holds less than {_number(needs[worst])}. "


def _about_stages(problem: PipelineProblem, chain: _Chain) -> str:
    """No limit would do: the layers that no stage runs, or the devices that it takes."""
    layers, devices = problem.stages.layers, problem.devices
    offered = np.isfinite(chain.weights[:, :, 0])  # group, first, last
    usable = offered[np.array(problem.groups) <= devices]
    for layer in range(layers):
        if not usable[:, : layer + 1, layer:].any():
            return (
                f"{problem.name(layer)} is in no stage offered on {_devices(devices)} or fewer; "
                "give a stage with it finite seconds there, or give more devices"
            )
    counts = np.flatnonzero(np.isfinite(chain.table(math.inf, np.maximum)[:, 0].min(axis=0)))
    if counts.size:  # only use_all stands in the way
        known = ", ".join(str(count) for count in counts)
        return f"no cut takes exactly {_devices(devices)}, but {known} would do; give so many, or set use_all=False"
    fewest = [0.0]  # devices for the layers before each cut
    for end in range(1, layers + 1):
        ways = [
            fewest[first] + taken
            for group, taken in enumerate(problem.groups)
            for first in np.flatnonzero(offered[group, :end, end - 1])
        ]
        fewest.append(min(ways, default=math.inf))
    if fewest[-1] < math.inf:
        return (
            f"{layers} layers take at least {_devices(int(fewest[-1]))} in the stages that are offered, but there are "
            f"{devices}; give more devices, or offer longer stages or smaller groups"
        )
    reached = max(end for end, taken in enumerate(fewest) if taken < math.inf)
    past = f"past {problem.name(reached - 1)}" if reached else "anywhere"
    return (
        f"the stages that are offered do not join up: none that follow one another from {problem.name(0)} get {past}; "
        f"offer a stage that begins with {problem.name(reached)}"
    )


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def _number(nbytes: float) -> str:
    """All digits: the smallest limit that works must still work when it is copied from a message."""
    return f"{nbytes:.0f}" if nbytes.is_integer() else repr(nbytes)
