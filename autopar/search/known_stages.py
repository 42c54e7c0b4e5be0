"""Stages of one plan that are known already: most stages of a cut are those of the cut before.

An end of a stage that moves changes the two stages beside it. What a stage is planned, refereed and priced as hangs on
it and on the whole plan alone, so that is done once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.decide.stages import plan_of_stage, stages_of
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite.stages import Stage
from autopar.search.stage_prices import StagePrice, price_of

Cut = tuple[tuple[Stage, Plan], ...]


@dataclass
class _Known:
    """A stage, its plan, and its price once somebody asked for it."""

    stage: Stage
    plan: Plan
    price: StagePrice | None = None


@dataclass(frozen=True)
class KnownStages:
    """Of the plan `whole`."""

    whole: Plan
    pricer: Pricer
    _found: dict[tuple[str, ...], list[_Known]] = field(
        default_factory=dict[tuple[str, ...], list[_Known]], compare=False, repr=False
    )

    def cut(self, ends: Sequence[int], *, inputs_first: bool = False) -> Cut:
        """`autopar.decide.stages.in_stages` of the whole plan. Raises NotCut."""
        stages = stages_of(self.whole, ends, inputs_first=inputs_first)
        known = [self._known(stage) for stage in stages]
        return tuple((one.stage, one.plan) for one in known)

    def price(self, stage: Stage) -> StagePrice:
        """Of a stage of the whole plan."""
        known = self._known(stage)
        if known.price is None:
            known.price = price_of(known.stage, known.plan, self.pricer)
        return known.price

    def _known(self, stage: Stage) -> _Known:
        alike = self._found.setdefault(tuple(node.name for node in stage.graph.nodes), [])
        for one in alike:
            if one.stage is stage or one.stage == stage:
                return one
        alike.append(_Known(stage, plan_of_stage(stage, self.whole, self.pricer)))
        return alike[-1]
