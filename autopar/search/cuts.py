"""Where a model is cut into pipeline stages: the places where little crosses, the best of them by
`solver.cut_pipeline`, and those beside a cut that is known.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.decide.stages import in_stages, plan_of_stage
from autopar.errors import NotCut
from autopar.ir.graph import Ref
from autopar.ir.layout import local_type
from autopar.ir.work import STORE
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite.stages import cut_in_stages, forward_order, parameters_read
from autopar.search.known_stages import Cut, KnownStages
from solver import PipelineProblem, Value, additive_stages, chain_cuts, cut_pipeline

Array = NDArray[np.float64]
Send = Callable[[float], float]  # bytes -> seconds from one stage to the next
NARROW = 1.5  # a cut may let so many times the bytes cross that the median narrow place does


@dataclass(frozen=True)
class Cuts:
    """Cuts of a plan of the whole model into `count` stages. An end is a number of operators of `forward_order`.

    spent      seconds of one micro-batch at each of these operators, with the backward that belongs to it
    crossing   bytes of a device that cross behind each of them but the last
    """

    whole: Plan
    count: int
    known: KnownStages
    send: Send
    spent: Array
    crossing: tuple[float, ...]
    _trained: tuple[int, ...]  # in front of each operator, and behind the last: how often trained parameters were read
    _kinds: tuple[str, ...]  # of each end: places of one kind, in layers that repeat, are legal together
    _legal: dict[str, bool] = field(default_factory=dict[str, bool], compare=False)
    _closed: set[int] = field(default_factory=set[int], compare=False)  # ends that were not legal beside others

    @staticmethod
    def of(whole: Plan, count: int, pricer: Pricer, send: Send) -> Cuts:
        order = forward_order(whole.graph)
        if not order:
            raise NotCut(
                f"the model cannot be cut into {count} stages: it has no parameter, and what is made of inputs alone "
                "each stage makes for itself; take a mesh without `pipe`"
            )
        crossing = _crossing(whole)
        named = [f"{node.op} {re.sub(r'[0-9]+', '#', node.module)}" for node in order]
        pairs = zip(named, named[1:], crossing, strict=False)
        kinds = tuple(f"{one}; {other}; {nbytes:.0f}" for one, other, nbytes in pairs)
        return Cuts(
            whole, count, KnownStages(whole, pricer), send, _seconds(whole, pricer), tuple(crossing),
            _trained_before(whole), kinds,
        )  # fmt: skip

    def best(self) -> tuple[list[int], Cut]:
        """(ends, stages) of the best cut by `solver.cut_pipeline` that is legal. Raises NotCut where there is none."""
        return self._legal_one(self._quickest)

    def even(self) -> tuple[list[int], Cut] | None:
        """The cut into as many operators each as legal places allow; None where they coincide."""
        length = len(self.spent)

        def evenly(places: Sequence[int]) -> list[int]:
            wanted = [length * at / self.count for at in range(1, self.count)]
            return sorted({min(places, key=lambda end, one=one: abs(end - one)) for one in wanted})

        try:
            return self._legal_one(evenly)
        except NotCut:
            return None

    def _legal_one(self, choose: Callable[[Sequence[int]], list[int]]) -> tuple[list[int], Cut]:
        if self.count == 1:
            return [], self.known.cut([])
        why: NotCut | None = None
        for narrowest, wide in ((False, False), (True, False), (False, True)):
            if narrowest or wide:
                self._closed.clear()
            for _ in range(len(self.spent)):
                places = self.places(narrowest, wide)
                ends = choose(places) if len(places) >= self.count - 1 else []
                if len(ends) < self.count - 1:
                    break
                try:
                    return ends, self.known.cut(ends)
                except NotCut as error:
                    why = error
                if all([self._is_legal(end) for end in ends]):
                    self._closed.add(ends[0])
        raise NotCut(self._none(why))

    def _none(self, why: NotCut | None) -> str:
        """In a sentence, why there is no cut."""
        wanted = f"the model cannot be cut into {self.count} stages"
        if why is not None:
            return f"{wanted}: take fewer of them, on each rank or along pipe; the last cut tried: {why}"
        if self._trained[-1] and len(self._open()) >= self.count - 1:
            frozen = sum(node.op == "parameter" for node in self.whole.graph.nodes) - len(self.whole.graph.trained)
            what = (
                f"{frozen} parameters are frozen (requires_grad is False) or no part of the loss, and what"
                if frozen
                else "what"
            )
            return (
                f"{wanted} that each hold a parameter that trains: {what} trains lies too close together; take fewer "
                "stages, or a mesh without `pipe`"
            )
        return f"{wanted}: it has too few layers one behind the other; take fewer stages"

    def wanted(self) -> list[int] | None:
        """Ends of the best cut by `solver.cut_pipeline`, whether legal together or not; None: too few places."""
        places = self.places()
        ends = self._quickest(places) if len(places) >= self.count - 1 else []
        return ends if len(ends) == self.count - 1 else None

    def at(self, ends: list[int]) -> tuple[list[int], Cut] | None:
        """The cut with these ends; None where it is not legal."""
        try:
            return ends, self.known.cut(ends)
        except NotCut:
            return None

    def places(self, narrowest: bool = False, wide: bool = False) -> list[int]:
        """Ends that are narrow (or `wide`) and not known to be illegal; between any two of them a parameter that
        trains is read: of those between the same two reads the first one, or that where least crosses.
        """
        read, found = self._trained, list[int]()
        for end in self._open(wide):
            if (read[found[-1]] if found else 0) < read[end] < read[-1] or not read[-1]:
                found.append(end)
            elif narrowest and found and read[found[-1]] == read[end]:
                found[-1] = min(found[-1], end, key=lambda one: self.crossing[one - 1])
        return found

    def _open(self, wide: bool = False) -> list[int]:
        """Ends that are narrow, or any between two modules, and not known to be illegal."""
        order = forward_order(self.whole.graph) if wide else ()
        between = [at for at in range(1, len(order)) if order[at - 1].module != order[at].module]
        ends = between if wide else _narrow(self.crossing, self.count)
        return [end for end in ends if end not in self._closed and self._legal.get(self._kinds[end - 1], True)]

    def beside(self, ends: Sequence[int], seconds: Sequence[float]) -> Iterator[tuple[int, list[int]]]:
        """(which end, ends) with one end elsewhere: at the next place, or where the two stages beside it take the
        same time. `seconds`: of each stage as it is cut now.
        """
        places, total = self.places(), np.concatenate([[0.0], np.cumsum(self.spent)])
        bounds = [0, *ends, len(self.spent)]
        for which, end in enumerate(ends):
            open_ = [one for one in places if bounds[which] < one < bounds[which + 2] and total[one] != total[end]]
            if not open_:
                continue
            want = total[end] + (seconds[which + 1] - seconds[which]) / 2
            before, behind = [one for one in open_ if one < end], [one for one in open_ if one > end]
            near = [*before[-1:], *behind[:1], min(open_, key=lambda one: abs(total[one] - want))]
            for one in dict.fromkeys(near):
                yield which, [*ends[:which], one, *ends[which + 1 :]]

    def _quickest(self, places: Sequence[int]) -> list[int]:
        bounds = [0, *places, len(self.spent)]
        layers = np.array([self.spent[first:last].sum() for first, last in itertools.pairwise(bounds)])
        nothing = np.zeros((len(layers), 1, 1))
        table = additive_stages(layers[:, None, None], nothing, nothing)
        sent = np.array([2 * self.send(self.crossing[end - 1]) for end in places])
        rounds = self.whole.graph.rounds.count
        solution = cut_pipeline(PipelineProblem(table, (1,), self.count, rounds, sent, use_all=True))
        assert solution.cut is not None, solution.explanation
        return [bounds[stage.last + 1] for stage in solution.cut[:-1]]

    def _is_legal(self, end: int) -> bool:
        """Whether the model can be cut there in two; then it is known of all places like it."""
        kind = self._kinds[end - 1]
        if kind not in self._legal:
            self._legal[kind] = self.at([end]) is not None
        return self._legal[kind]


def _trained_before(whole: Plan) -> tuple[int, ...]:
    """In front of each forward operator, and behind the last: how often parameters that train were read."""
    trained, held = {node.target for node in whole.graph.trained}, parameters_read(whole.graph)
    reads = (len(trained.intersection(held.get(node.name, ()))) for node in forward_order(whole.graph))
    return (0, *itertools.accumulate(reads))


def _crossing(whole: Plan) -> list[float]:
    """Bytes of a device that cross behind each forward operator but the last."""
    graph = whole.graph
    order = forward_order(graph)
    names = {node.name for node in order}
    readers = defaultdict[Ref, list[str]](list)
    for node in order:
        for ref in dict.fromkeys(node.operands):
            if ref.name in names:
                readers[ref].append(node.name)

    def nbytes(ref: Ref) -> int:
        return local_type(graph.type_of(ref), whole.choices[ref.name].gives[ref.index], whole.mesh).nbytes

    values = [Value(ref.name, tuple(who), nbytes(ref)) for ref, who in readers.items()]
    return chain_cuts([node.name for node in order], values).tolist()


def _narrow(crossing: Sequence[float], count: int) -> list[int]:
    """Ends of stages behind which little crosses, at least `count` of them where there are so many."""
    local = [
        at + 1
        for at, nbytes in enumerate(crossing)
        if nbytes
        and (at == 0 or nbytes <= crossing[at - 1])
        and (at + 1 == len(crossing) or nbytes <= crossing[at + 1])
    ]
    if not local:
        return []
    middle = sorted(crossing[end - 1] for end in local)[len(local) // 2]
    most = NARROW * middle
    found = [end for end in local if crossing[end - 1] <= most]
    return found if len(found) >= count else local


def _seconds(whole: Plan, pricer: Pricer) -> Array:
    """Of each forward operator for one micro-batch, with its backward. A backward operator belongs to the first one
    that any of what it reads belongs to: a value of forward to its last reader there, a gradient to that whose
    backward made it.
    """
    graph = whole.graph
    order = forward_order(graph)
    place = {node.name: at for at, node in enumerate(order)}
    read: dict[str, int] = {}  # forward value -> the last operator that reads it
    for node in reversed(graph.nodes):
        if node.phase == "forward":
            at = place.get(node.name, read.get(node.name, 0))
            for ref in node.operands:
                read[ref.name] = max(read.get(ref.name, 0), at)
    found, last = np.zeros(len(order)), len(order) - 1
    back: dict[str, int] = {}  # backward operator -> the operator whose backward it is part of
    for node in graph.nodes:
        if node.op == STORE:
            at = place[node.operands[0].name]
        elif node.phase == "forward":
            at = place.get(node.name, read.get(node.name, last))
        else:
            at = min((back.get(ref.name, read.get(ref.name, last)) for ref in node.operands), default=last)
            back[node.name] = at
        choice = whole.choices[node.name]
        changes = [change for reads in choice.reads for change in reads]
        steps = [*choice.steps, *(step for one in changes for step in one.steps(whole.mesh.size(one.axis)))]
        found[at] += pricer.seconds(steps) / graph.rounds.count
    return found


def _why_not_at(whole: Plan, end: int, pricer: Pricer) -> str:
    """Empty where the model can be cut there, into two stages that may well hold nothing that trains: one of two has
    all that is behind the cut, a tied weight of the first stage among it.
    """
    try:
        for stage in cut_in_stages(whole.graph, [end]):
            plan_of_stage(stage, whole, pricer)
    except NotCut as error:
        return str(error)
    return ""


def cut_by_owner(whole: Plan, owners: Mapping[str, Sequence[int]], count: int, pricer: Pricer) -> tuple[list[int], Cut]:
    """As `best_cut`, so that each stage reads the parameters that it holds already (`owners`: parameter -> stages) and
    as little crosses as can; for others the cut says who is to have them. Raises NotCut where the order of the model
    lets no cut do so.
    """
    order, crossing = forward_order(whole.graph), _crossing(whole)
    held = parameters_read(whole.graph)
    trained = {node.target for node in whole.graph.trained}
    for stage in range(count if trained else 0):
        if not any(stage in owners.get(name, ()) for name in trained):
            raise NotCut(
                f"stage {stage} of {count} holds no parameter that this call trains: they are frozen now "
                "(requires_grad is False), or the call does not use them, and each stage has to hold one; freeze "
                "fewer, or compile the model anew for such calls"
            )
    at, first, last = 0, [len(order)] * count, [-1] * count
    for place, node in enumerate(order):
        for name in held.get(node.name, ()):
            if name not in owners:  # nobody has it yet
                continue
            at = next((stage for stage in owners[name] if stage >= at), -1)
            if at < 0:
                raise NotCut(
                    f"{node.source or node.name}: {name} is read here, and an earlier stage holds it, as the call that "
                    "stages were cut for did not read it, or not here; compile the model with a call that does "
                    "(example_inputs=, example_kwargs=); where forward draws which ones it reads, or in what order "
                    "(random, numpy), have it read all in one order, and weigh what they give"
                )
            first[at], last[at] = min(first[at], place), place
    ends: list[int] = []
    for cut in range(count - 1):
        low = max([*(last[: cut + 1]), *(end - 1 for end in ends)]) + 1
        high = min([*first[cut + 1 :], len(order) - (count - 1 - cut)])
        legal = sorted(range(max(low, 1), high + 1), key=lambda end: crossing[end - 1])
        reasons = list[str]()
        for end in (one for one in legal if one not in ends):
            if not (why := _why_not_at(whole, end, pricer)):
                ends.append(end)
                break
            reasons.append(why)
        else:
            why = reasons[0] if reasons else "what reads those of the one does not end before what reads the other's"
            raise NotCut(
                f"the model has no place for the cut between stages {cut} and {cut + 1}, which hold its weights: {why}"
            )
    return ends, in_stages(whole, ends, pricer)
