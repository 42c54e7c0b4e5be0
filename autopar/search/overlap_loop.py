"""The best plan where collectives overlap with compute: candidates are simulated, and the quickest is kept.

The solver minimises a sum, in which every collective is exposed. What a plan takes where communication is overlapped by
products only its timeline tells. So several plans are made and simulated: the optimum without overlap, the baselines,
and those that the solver finds once overlapped communication costs less (solve, simulate, re-price, re-solve).

Prices of transfers are scaled by the share of their time that is exposed in the timeline of the best plan so far:
see `autopar.price.overlap_discounts`. What is fetched ahead needs memory. Where a plan has none left for that, it is
simulated as if it had, and the next one is asked to leave as much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from autopar.ir.graph import Graph, weights_in
from autopar.lower import Lowering
from autopar.lower.program import Launch, Read, Send
from autopar.plan.plan import Plan
from autopar.plan.value import Candidate
from autopar.price.overlap_discounts import GRADIENTS, MOVES, WEIGHTS, Shares
from autopar.price.pricer import Pricer
from autopar.simulate.events import events
from cost_models.simulator import Event, Timeline, play
from cost_models.steps import DEVICE

Again = Callable[[Shares, float], Plan | None]

BESIDE = ("h2d", "d2h", "host")  # streams of moves, and of what the host does
FIRST = 2  # prefetch distance, in products, that is simulated first
OTHERS = (1, 4)  # and those of plans that are no worse than NEAR
NEAR = 1.1
LEAST = 0.02  # of its price: nothing that is sent is free
UNSEEN = 0.1  # of its price, of moves that no plan has made yet: about where they begin to beat products that run again
MOVED = 0.01  # of the step: prices that moved by less altogether are the same prices
GAIN = 1e-3  # relative: below this, pricing again is over
ROUNDS = 3
ROUNDS_SAVING_MEMORY = 2  # each is a larger problem
OPTIMUM = "optimum without overlap"
ONCE = "weights gathered once where that pays"


@dataclass(frozen=True)
class Simulated:
    """A plan with the prefetch that suits it best, and its timeline (None: nothing overlaps).

    `wished`: the timeline that it would have with `lacks` bytes more, where those are missing.
    """

    plan: Plan
    timeline: Timeline | None
    wished: Timeline | None = None
    lacks: float = 0.0

    @property
    def seconds(self) -> float:
        return self.plan.predicted_seconds if self.timeline is None else self.timeline.seconds

    @property
    def peak_bytes(self) -> int:
        return self.plan.peak_bytes[DEVICE]


def best_prefetch(plan: Plan, pricer: Pricer, memory: float | None, beat: float = 0.0) -> Simulated:
    """The plan with the prefetch that makes it quickest and fits. `beat`: seconds that a good plan would take."""
    if not pricer.hardware.overlaps:
        return Simulated(plan, None)
    pricer = replace(pricer, bucket_bytes=plan.bucket_bytes)
    lowering = Lowering(plan, pricer)
    best = Simulated(replace(plan, prefetch=None, simulated_seconds=None), None)
    wished, lacks = None, 0.0
    for prefetch in (FIRST, *OTHERS, 0):
        if prefetch == 0 and best.timeline is not None:
            break  # gathering at the use is for plans that have no memory to gather earlier
        timeline = play(events(lowering.program(prefetch), plan.graph, pricer, told=False))
        peak = max(plan.peak_bytes[DEVICE], timeline.memory[DEVICE].peak_bytes)
        if memory is not None and peak > memory:
            if prefetch == FIRST:
                wished, lacks = timeline, peak - memory
            continue
        now, quickest = timeline.seconds, best.seconds
        if now < quickest * (1 - 1e-9):
            peaks = {**plan.peak_bytes, DEVICE: peak}
            best = Simulated(replace(plan, prefetch=prefetch, peak_bytes=peaks), timeline)
        if prefetch == FIRST and now > NEAR * beat > 0:
            break
    if wished is not None and wished.seconds < best.seconds * (1 - GAIN):
        return replace(best, wished=wished, lacks=lacks)
    return best


def floor_s(plan: Plan) -> float:
    """Seconds that the busiest stream works: no simulation of the plan takes less."""
    streams = {part: seconds for part, seconds in plan.seconds_by.items() if part.startswith("comm:")}
    return max([sum(plan.seconds_by.values()) - sum(streams.values()), *streams.values()])


@dataclass(frozen=True)
class TransferPrices:
    """Of transfers: the `shares` of their price that they cost; and of memory: how many bytes of the device a plan
    leaves `free`.
    """

    shares: Shares
    free: float


class _Contest:
    """The quickest of the plans that were simulated so far, with a row for each that was looked at.

    `played`: name, plan and simulated seconds of those that were simulated.
    """

    def __init__(self, optimum: Plan, pricer: Pricer, memory: float | None, progress: Callable[[str], None]) -> None:
        self.pricer, self.memory, self.progress = pricer, memory, progress
        self.best = best_prefetch(optimum, pricer, memory)
        self.winner = OPTIMUM
        self.rows = [_row(OPTIMUM, self.best)]
        self.played = [(OPTIMUM, self.best.plan, self.best.seconds)]
        progress(f"simulated {OPTIMUM}: {_ms(self.best)}")

    def enter(self, name: str, plan: Plan) -> Simulated | None:
        """The plan as it was simulated; None where it cannot be the quickest."""
        if (floor := floor_s(plan)) >= self.best.seconds:
            self.refuse(name, f"at least {floor * 1e3:.3f} ms", plan.step_seconds)
            return None
        simulated = best_prefetch(plan, self.pricer, self.memory, self.best.seconds)
        self.rows.append(_row(name, simulated))
        self.played.append((name, simulated.plan, simulated.seconds))
        self.progress(f"simulated {name}: {_ms(simulated)}")
        if simulated.seconds < self.best.seconds * (1 - 1e-9):
            self.best, self.winner = simulated, name
        return simulated

    def enter_if_found(self, name: str, found: Plan | str) -> None:
        """`found`: a plan, or why there is none."""
        if isinstance(found, str):
            self.refuse(name, found)
        else:
            self.enter(name, found)

    def refuse(self, name: str, why: str, step_seconds: float | None = None) -> None:
        self.rows.append(Candidate(name, step_seconds, None, None, None, why))


def choose(
    optimum: Plan,
    pricer: Pricer,
    memory: float | None,
    baselines: Mapping[str, Callable[[float], Plan | str]],
    again: Again,
    once: Callable[[], Plan | str],
    saves_memory: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    as_played: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """The quickest plan that was simulated. `optimum`: the solver's plan, whose bound is that of all plans.

    `baselines`: name -> the baseline's plan, or why there is none; asked with the seconds to beat. `again`: the
    solver's plan where transfers have those shares of their price, and so many bytes of the device stay free. `once`:
    the solver's plan where one gather of a weight may serve all its readers, or why there is none.
    `saves_memory`: it decides what is recomputed and offloaded, too. `stop`: once true, the quickest of those that were
    simulated by then is taken. `as_played` is given each plan that was simulated, the quickest among them.
    """
    contest = _Contest(optimum, pricer, memory, progress)
    first = contest.best
    for name, solve in baselines.items():
        if stop():
            break
        contest.enter_if_found(name, solve(contest.best.seconds))

    seen, resolved = [optimum], False
    latest = contest.best
    prices = TransferPrices({}, 0.0 if latest is first else first.lacks)
    for number in range(1, (ROUNDS_SAVING_MEMORY if saves_memory else ROUNDS) + 1):
        following = next_prices(prices, latest, contest.best, tries_moves=number > 1 and saves_memory)
        if following is None or stop():
            break
        prices = following
        plan = again(prices.shares, prices.free)
        if plan is None or any(same_choices(plan, other) for other in seen):
            break
        seen.append(plan)
        before = contest.best.seconds
        simulated = contest.enter(f"re-solved with overlap prices, round {number}", plan)
        if simulated is None:
            break
        resolved = True
        if simulated is contest.best and before - simulated.seconds < GAIN * before and not simulated.lacks:
            break
        latest = simulated
    if not resolved and not stop() and waits_between_operators(contest.best):
        full = _completed({}, optimum.mesh.names, 1.0)  # with which loops alone are priced as overlapped
        plan = again(full, prices.free)
        if plan is not None and not any(same_choices(plan, other) for other in seen):
            contest.enter("re-solved with loops overlapped", plan)
    if waits_for_any(contest.best) and not stop():
        contest.enter_if_found(ONCE, found := once())
        if not isinstance(found, str):
            optimum = replace(optimum, bound=min(optimum.bound, found.bound))  # its bound is that of more plans
    for name, plan, seconds in contest.played:
        as_played(_as_played(name, plan, seconds, optimum, contest.rows))
    return _chosen(contest.best, contest.winner, optimum, contest.rows, is_optimum=contest.best is first)


def next_prices(
    prices: TransferPrices, latest: Simulated, best: Simulated, *, tries_moves: bool
) -> TransferPrices | None:
    """Those at which the problem is solved next, after `latest` was found at `prices`; None where they are about the
    same.

    `tries_moves`: copies to the host, which no plan has made yet, get a price, too; where memory is short they are
    tried once it is known what else overlaps.
    """
    timeline = latest.wished or latest.timeline
    if timeline is None:
        return None
    measured, busy = exposed_shares(latest.plan, timeline)
    moved = sum(abs(share - prices.shares.get(key, 1.0)) * busy[key] for key, share in measured.items())
    tries_moves = tries_moves and not latest.lacks and not any(kind == MOVES for kind, _ in measured)
    if moved < MOVED * best.seconds and not latest.lacks and not tries_moves:
        return None
    if latest is not best and not latest.lacks:  # it went too far: half way back
        measured |= {key: (share + prices.shares.get(key, 1.0)) / 2 for key, share in measured.items()}
    shares = _completed(measured, latest.plan.mesh.names, UNSEEN if tries_moves else 1.0)
    return TransferPrices(shares, prices.free + latest.lacks)


def exposed_shares(plan: Plan, timeline: Timeline) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """(kind, axis or stream) -> what share of such transfers is exposed, and how many seconds they take."""
    weights = weights_in(plan.graph)
    busy: dict[tuple[str, str], float] = defaultdict(float)
    exposed: dict[tuple[str, str], float] = defaultdict(float)
    for event, exposed_s in zip(timeline.events, timeline.exposed_of, strict=True):
        kind = MOVES if event.stream in BESIDE else _kind(event, plan.graph, weights)
        if kind:
            key = kind, event.stream.removeprefix("comm:")
            busy[key] += event.seconds
            exposed[key] += exposed_s
    shares = {key: max(LEAST, min(1.0, exposed[key] / seconds)) for key, seconds in busy.items() if seconds}
    return shares, dict(busy)


def waits_between_operators(simulated: Simulated) -> bool:
    """Whether compute waits for what is sent between two operators, which a loop might send beside its work."""
    return _waits_for(simulated, [""])


def waits_for_any(simulated: Simulated) -> bool:
    """Whether compute waits for anything that is sent. What is gathered once leaves the links to all else, too."""
    if simulated.timeline is None:
        return any(part.startswith("comm:") and seconds for part, seconds in simulated.plan.seconds_by.items())
    return _waits_for(simulated, ["", WEIGHTS, GRADIENTS])


def _waits_for(simulated: Simulated, kinds: Sequence[str]) -> bool:
    plan, timeline = simulated.plan, simulated.timeline
    if timeline is None:
        return False
    weights = weights_in(plan.graph)
    pairs = zip(timeline.events, timeline.exposed_of, strict=True)
    waits = sum(s for one, s in pairs if one.stream.startswith("comm:") and _kind(one, plan.graph, weights) in kinds)
    return waits > MOVED * simulated.seconds


def _completed(known: Shares, axes: Sequence[str], unseen: float) -> dict[tuple[str, str], float]:
    """Where nothing of a kind was sent, the share of the other kind on that axis stands in; without either, 1.

    `unseen`: the share of moves where there were none.
    """
    found = {(MOVES, stream): known.get((MOVES, stream), unseen) for stream in BESIDE}
    for axis in axes:
        of_axis = [known[kind, axis] for kind in (WEIGHTS, GRADIENTS) if (kind, axis) in known]
        for kind in (WEIGHTS, GRADIENTS):
            found[kind, axis] = known.get((kind, axis), of_axis[0] if of_axis else 1.0)
    return found


def _kind(event: Event, graph: Graph, weights: set[str]) -> str:
    match event.by:
        case Launch(of=Send(places)) if graph.results[places[0]].kind == "gradient":
            return GRADIENTS
        case Launch(of=Read(reader, position)) if graph.by_name[reader].operands[position].name in weights:
            return WEIGHTS
        case _:
            return ""


def _as_played(name: str, plan: Plan, seconds: float, optimum: Plan, rows: Sequence[Candidate]) -> Plan:
    bound = min(optimum.bound, plan.bound, plan.step_seconds)
    facts = {**optimum.search, "candidate": name}
    return replace(plan, bound=bound, search=facts, simulated_seconds=seconds, candidates=tuple(rows))


def same_choices(one: Plan, other: Plan) -> bool:
    """Whether two plans of a search do the same, at whatever prefetch."""
    return one.deliveries == other.deliveries and one.choices == other.choices


def _row(name: str, simulated: Simulated) -> Candidate:
    return Candidate(
        name, simulated.plan.step_seconds, simulated.seconds, simulated.peak_bytes, simulated.plan.prefetch
    )


def _chosen(best: Simulated, winner: str, optimum: Plan, rows: Sequence[Candidate], *, is_optimum: bool) -> Plan:
    """The plan with what was found out about it and the others."""
    plan = best.plan
    # proven of the union of the spaces that were searched: that of all plans, and the winner's, if it is another one
    bound = min(optimum.bound, plan.bound, plan.step_seconds)
    facts = {**optimum.search, "candidate": winner}
    if best.timeline is not None:
        facts |= {f"exposed:{stream.removeprefix('comm:')}": s for stream, s in best.timeline.exposed_s.items()}
    notes = [*optimum.notes]
    if not is_optimum and isfinite(bound):
        more = plan.step_seconds / bound - 1 if bound else 0.0
        notes.insert(
            0,
            f"chosen by simulated time ({winner}); without overlap it takes {plan.step_seconds * 1e3:.3f} ms, "
            f"at most {more:.1%} above the best plan by that measure, which is what the bound is of",
        )
    return replace(
        plan, bound=bound, notes=tuple(notes), search=facts, simulated_seconds=best.seconds, candidates=tuple(rows)
    )


def _ms(simulated: Simulated) -> str:
    how = "no overlap" if simulated.plan.prefetch is None else f"prefetch {simulated.plan.prefetch}"
    return f"{simulated.seconds * 1e3:.3f} ms ({how}), {simulated.plan.step_seconds * 1e3:.3f} ms without overlap"
