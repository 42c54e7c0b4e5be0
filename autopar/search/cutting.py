"""One plan of the whole model, how it may be cut into stages, and what a pipeline of each cut takes and holds.

A cut is first that of least step time under 1F1B by `solver.cut_pipeline`, among the places where little crosses, or
the even one; the schedules are played with the seconds of each stage's own timeline, and then one end after the other
is moved as long as the played step gets shorter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import NotCut
from autopar.ir.mesh import Mesh
from autopar.pipeline import Durations, make_schedule, makespans, memory, play
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.search.cuts import Cuts, Send
from autopar.search.known_stages import Cut
from autopar.search.orders import IN_HALVES, PIPE, Orders, ranks_of
from autopar.search.pipeline import Pipeline
from autopar.search.stage_prices import call_bytes, together
from cost_models.hardware import Hardware
from cost_models.steps import Comm

MOVES, WORTH = 8, 1e-3  # of ends of stages that are tried, and what part of the step one has to promise
MORE = 0.03  # what part of the step more stages have to promise
KEPT = 0.1  # of what stages save is left, at the least, where they run the rest again or offload it
NEAR = 0.1  # how near their first cut has to come for ends to be moved


@dataclass(frozen=True)
class Cutting:
    """One plan of the whole model, and how good a pipeline of it each cut is, under each of the `schedules`, which have
    `chunks` stages on each rank. `counted`: what part of what stages save counts as memory.
    """

    whole: Plan
    mesh: Mesh
    schedules: tuple[str, ...]
    chunks: int
    cuts: Cuts
    limit: float | None
    counted: float = 1.0

    @staticmethod
    def of(whole: Plan, mesh: Mesh, hardware: Hardware, orders: Orders, limit: float | None) -> Cutting:
        """Under the first of the orders."""
        pricer = Pricer.on(whole.mesh, hardware, whole.optimizer, whole.bucket_bytes, whole.graph.rounds)
        chunks, schedules = orders[0]
        cuts = Cuts.of(whole, chunks * ranks_of(mesh), pricer, _sending(mesh, hardware))
        return Cutting(whole, mesh, schedules, chunks, cuts, limit)

    def first(self) -> Pipeline:
        """Of the best cut by the program's estimate, and the even one."""
        even = self.cuts.even()
        found = self.pipeline(*self.cuts.best())
        return found if even is None else min(self.pipeline(*even), found, key=self._order)

    def moved(self, best: Pipeline) -> Pipeline:
        """The best that is found by moving one end after the other, where the played step of what that would do to the
        two stages beside it, estimated from their times now, or their bytes, promises something.
        """
        seen = {best.ends}
        for _ in range(MOVES):
            near = [(promise, ends) for promise, ends in self._promises(best) if tuple(ends) not in seen]
            if not near:
                break
            _, ends = min(near)
            seen.add(tuple(ends))
            cut = self.cuts.at(ends)
            found = None if cut is None else self.pipeline(*cut)
            if found is not None and self._order(found) < self._order(best):
                best = found
        return best

    def for_what_stays(self, best: Pipeline) -> Pipeline:
        """The same, or one whose ends are moved so that what stages hold however little they save leaves room for it:
        that is for the cut to make.
        """
        least = replace(self, counted=KEPT)
        if not least._over(best):
            return best
        found = least.moved(best)
        return found if least._over(found) < least._over(best) else best

    def best(self, orders: Orders, best: Pipeline, *, moved: bool) -> Pipeline:
        """The best under the other orders, too: of as many stages in the same cut, and where that is better, of those
        that are found by moving its ends; of one stage more on each rank where the times
        of `best` promise something for that.
        """
        last: Pipeline = best  # of the stages that were cut last
        found: Pipeline
        for chunks, schedules in orders[1:]:
            again, count = chunks == last.schedule.stages_per_rank, chunks * ranks_of(self.mesh)
            cuts = replace(self.cuts, count=count, _closed=set())
            other = replace(self, schedules=schedules, chunks=chunks, cuts=cuts)
            if not again and (chunks > best.schedule.stages_per_rank + 1 or not other._may_beat(best)):
                continue
            try:
                if again:
                    found = other.pipeline(last.ends, tuple(zip(last.stages, last.plans, strict=True)))
                else:
                    last = found = other.first()
            except NotCut:
                continue
            is_near = chunks > 1 and found.step_seconds < best.step_seconds * (1 + NEAR)
            if self._order(found) >= self._order(best) and not is_near:
                continue
            found = other.moved(found) if moved else found
            last = found if not again else last
            best = min(best, found, key=self._order)
        return best

    def _may_beat(self, best: Pipeline) -> bool:
        """Whether the cut that is wanted for so many stages would be quicker, if the work of `best` came apart as
        operators take time in the whole plan.
        """
        now, rounds = best.durations, best.schedule.micro_batches
        ends = self.cuts.wanted()
        if ends is None:
            return False
        spent = self.cuts.spent
        bounds = [0, *ends, len(spent)]
        shares = [float(spent[one:other].sum() / spent.sum()) for one, other in itertools.pairwise(bounds)]

        def parts(entries: Sequence[float]) -> tuple[float, ...]:
            return tuple(share * sum(entries) for share in shares)

        def told(name: str) -> float:
            lists = make_schedule(name, best.schedule.ranks, rounds, self.chunks)
            crossing = (self.cuts.crossing[end - 1] for end in ends)
            sends = tuple(self.cuts.send(one) if lists.crosses(at) else 0.0 for at, one in enumerate(crossing))
            inputs, weights = parts(now.backward_input), parts(now.backward_weight)
            return play(lists, Durations(parts(now.forward), inputs, weights, sends, parts(now.whole))).makespan

        return min(told(name) for name in self.schedules) < best.played.makespan * (1 - MORE)

    def _promises(self, now: Pipeline) -> Iterator[tuple[float, list[int]]]:
        """(estimated seconds, ends) of cuts beside this one; the first are those that make room where that is short."""
        durations, spent = now.durations, self.cuts.spent
        taken = [forward + backward for forward, backward in zip(durations.forward, durations.whole, strict=True)]
        rank_of, of_rank = now.schedule.rank_of, [0.0] * now.schedule.ranks
        for rank, seconds in zip(rank_of, taken, strict=True):
            of_rank[rank] += seconds
        over, peaks = self._over(now) > 0, self._peaks(now)
        fullest = peaks.index(max(peaks))
        found: list[tuple[int, list[int], float]] = []  # which end, ends, seconds that the stage before it takes over
        for which, ends in self.cuts.beside(now.ends, [of_rank[rank] for rank in rank_of]):
            old, new = now.ends[which], ends[which]
            found.append((which, ends, float(spent[old:new].sum() - spent[new:old].sum())))
        estimates = makespans(now.schedule, [_taken_over(durations, which, more) for which, _, more in found])
        for (which, ends, more), seconds in zip(found, estimates, strict=True):
            before, behind = rank_of[which], rank_of[which + 1]
            if over and fullest in (before, behind):
                if before != behind and (more < 0) == (fullest == before):
                    yield seconds - now.played.makespan, ends
            elif not over and seconds < now.played.makespan * (1 - WORTH):
                yield seconds, ends

    def _order(self, found: Pipeline) -> tuple[float, float, int]:
        return self._over(found), found.step_seconds, found.peak_bytes

    def _over(self, found: Pipeline) -> float:
        """Bytes above the limit: of all ranks, the more the farther one of them is from it."""
        return 0.0 if self.limit is None else math.hypot(*(max(0.0, peak - self.limit) for peak in self._peaks(found)))

    def _peaks(self, found: Pipeline) -> list[float]:
        ranks = found.memory
        if self.counted != 1.0:
            saved = tuple(self.counted * one for one in found.nbytes.saved)
            ranks = memory(found.schedule, replace(found.nbytes, saved=saved))
        return [rank.peak for rank in ranks]

    def pipeline(self, ends: Sequence[int], cut: Cut) -> Pipeline:
        """The better schedule of this cut."""
        found: list[Pipeline] = []
        for inputs_first in (False, True):
            names = [name for name in self.schedules if (name in IN_HALVES) == inputs_first]
            if names:
                as_run = self.cuts.known.cut(ends, inputs_first=True) if inputs_first else cut
                found += self._played(ends, as_run, names)
        fits = [one for one in found if self.limit is None or one.peak_bytes <= self.limit] or found
        return min(fits, key=lambda one: (round(one.step_seconds, 9), one.peak_bytes))

    def _played(self, ends: Sequence[int], cut: Cut, names: Sequence[str]) -> Iterator[Pipeline]:
        """Under each of the schedules."""
        stages, plans = tuple(stage for stage, _ in cut), tuple(plan for _, plan in cut)
        priced = [self.cuts.known.price(stage) for stage in stages]
        weights = tuple(one.backward - one.inputs for one in priced)
        ranks, call = ranks_of(self.mesh), call_bytes(self.whole)
        for name in names:
            lists = make_schedule(name, ranks, self.whole.graph.rounds.count, self.chunks)
            nbytes, updates = together(priced, lists.rank_of, call, not lists.splits_backward)
            sends, returns = (
                tuple(self.cuts.send(one) if lists.crosses(at) else 0.0 for at, one in enumerate(of))
                for of in (nbytes.sent, nbytes.gradients)
            )
            durations = Durations(
                tuple(one.forward for one in priced), tuple(one.inputs for one in priced), weights, sends,
                tuple(one.backward for one in priced), returns,
            )  # fmt: skip
            played = play(lists, durations)
            yield Pipeline(
                self.mesh, stages, plans, tuple(ends), lists, durations, played, memory(lists, nbytes),
                played.makespan + updates, self.whole, nbytes,
            )  # fmt: skip


def cut_again(found: Pipeline, whole: Plan, hardware: Hardware) -> Pipeline | None:
    """The same stages under the same schedule, priced on this machine; `whole`: its whole plan, as it is to be there.
    None where it cannot be cut so.
    """
    orders: Orders = ((found.schedule.stages_per_rank, (found.schedule.name,)),)
    cutting = Cutting.of(whole, found.mesh, hardware, orders, None)
    cut = cutting.cuts.at([*found.ends])
    return None if cut is None else cutting.pipeline(*cut)


def _taken_over(durations: Durations, which: int, more: float) -> Durations:
    """What stages would take, if the one before end `which` took over so many seconds of the one behind it."""
    scale = [1.0] * durations.stages
    for stage, by in ((which, more), (which + 1, -more)):
        if taken := durations.forward[stage] + durations.whole[stage]:
            scale[stage] = max(0.0, taken + by) / taken

    def times(entries: Sequence[float]) -> tuple[float, ...]:
        return tuple(one * by for one, by in zip(entries, scale, strict=True))

    return Durations(
        times(durations.forward), times(durations.backward_input), times(durations.backward_weight), durations.send,
        times(durations.whole), durations.send_back,
    )  # fmt: skip


def _sending(mesh: Mesh, hardware: Hardware) -> Send:
    pricer = Pricer.on(mesh, hardware, "none")

    def send(nbytes: float) -> float:
        return pricer.seconds((Comm("shift", PIPE, mesh.sizes[0], round(nbytes)),))

    return send
