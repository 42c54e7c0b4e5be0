"""Stages of one plan that are known already: most stages of a cut are those of the cut before, and in layers that
repeat many are alike but for their names.

An end of a stage that moves changes the two stages beside it. What a stage is planned, refereed and priced as hangs on
it and on the whole plan alone, so that is done once for each; and once for all that have the same operators, which run
in the same way, whatever they are called.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.decide.stages import Chosen, chosen_in_stage, plan_of_stage, residence_in_stage, stages_of
from autopar.ir.graph import Ref, map_refs
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite.stages import Stage
from autopar.search.stage_prices import StagePrice, price_of

Cut = tuple[tuple[Stage, Plan], ...]


@dataclass
class _Known:
    """A stage, its plan, and its price once somebody asked for it. `like`: one that is alike but for names."""

    stage: Stage
    plan: Plan
    like: _Known | None = None
    price: StagePrice | None = None


@dataclass(frozen=True)
class KnownStages:
    """Of the plan `whole`."""

    whole: Plan
    pricer: Pricer
    _found: dict[tuple[str, ...], list[_Known]] = field(
        default_factory=dict[tuple[str, ...], list[_Known]], compare=False, repr=False
    )
    _forms: dict[Hashable, _Known] = field(default_factory=dict[Hashable, _Known], compare=False, repr=False)

    def cut(self, ends: Sequence[int], *, inputs_first: bool = False) -> Cut:
        """`autopar.decide.stages.in_stages` of the whole plan. Raises NotCut."""
        stages = stages_of(self.whole, ends, inputs_first=inputs_first)
        known = [self._known(stage) for stage in stages]
        return tuple((one.stage, one.plan) for one in known)

    def price(self, stage: Stage) -> StagePrice:
        """Of a stage of the whole plan."""
        return self._price(self._known(stage))

    def _price(self, known: _Known) -> StagePrice:
        if known.price is None and known.like is None:
            known.price = price_of(known.stage, known.plan, self.pricer)
        elif known.price is None and known.like is not None:
            priced, called = self._price(known.like), dict(zip(known.like.stage.tied, known.stage.tied, strict=True))
            known.price = replace(priced, tied={called[name]: what for name, what in priced.tied.items()})
        assert known.price is not None
        return known.price

    def _known(self, stage: Stage) -> _Known:
        alike = self._found.setdefault(tuple(node.name for node in stage.graph.nodes), [])
        for one in alike:
            if one.stage is stage or one.stage == stage:
                return one
        chosen, residence = chosen_in_stage(stage, self.whole, self.pricer), residence_in_stage(stage, self.whole)
        form = _form(stage, chosen, residence)
        if (like := self._forms.get(form)) is None:
            known = self._forms[form] = _Known(stage, plan_of_stage(stage, self.whole, self.pricer, chosen))
        else:
            plan = replace(like.plan, graph=stage.graph, choices=chosen[0], residence=residence)
            known = _Known(stage, plan, like)
        alike.append(known)
        return known


def _form(stage: Stage, chosen: Chosen, residence: Mapping[str, str]) -> Hashable:
    """All of a stage that its price hangs on, with numbers in the place of names."""
    (choices, deliveries), graph = chosen, stage.graph
    number = {node.name: at for at, node in enumerate(graph.nodes)}
    number |= {node.target: at for at, node in enumerate(graph.nodes) if node.op == "parameter"}
    channels = dict.fromkeys((*stage.receives, *stage.sends))
    number |= {name: -1 - at for at, name in enumerate(channels)}

    def of(names: Sequence[str]) -> tuple[int, ...]:
        return tuple(number[name] for name in names)

    def numbered(ref: Ref) -> Ref:
        return Ref(str(number[ref.name]), ref.index)

    nodes = tuple(
        (
            node.op, map_refs(node.args, numbered), tuple((key, map_refs(arg, numbered)) for key, arg in node.kwargs),
            node.outputs, node.phase, number.get(node.target), node.outside, choices.get(node.name),
            residence.get(node.target) if node.op == "parameter" else None,
        )
        for node in graph.nodes
    )  # fmt: skip
    results = tuple((one.kind, number.get(one.target), one.ref and numbered(one.ref)) for one in graph.results)
    rounds = graph.rounds
    cut = tuple((number[name], dim) for name, dim in rounds.cut.items())
    stored = tuple((number[name], dtype) for name, dtype in rounds.stored.items())
    crosses = tuple(map(of, (stage.receives, stage.gives_back, stage.sends, stage.gets_back, stage.tied)))
    return nodes, results, deliveries, rounds.count, cut, stored, rounds.joined, crosses
