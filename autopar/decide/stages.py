"""in_stages: a plan of the whole model, cut into the plans of pipeline stages.

Every node keeps the strategy that the whole plan has for it, so that what crosses a cut lies alike on both sides and a
parameter that two stages hold lies alike in both. What crosses lies as it is made; a partial sum, which nobody sends,
lies as its first reader takes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.assemble.problem import output_name
from autopar.decide.decide import choose
from autopar.decide.referee import refereed
from autopar.errors import NotCut
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.layout import Layout, Partial
from autopar.plan.plan import Plan
from autopar.plan.value import Choice, Delivery
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, node_strategies, operand_types
from autopar.rewrite.stages import Stage, cut_in_stages, ref_of
from autopar.rules.table import rule_of

Chosen = tuple[Mapping[str, Choice], tuple[Delivery | None, ...]]


def in_stages(
    plan: Plan, ends: Sequence[int], pricer: Pricer, *, inputs_first: bool = False
) -> tuple[tuple[Stage, Plan], ...]:
    """The stages of a plan's graph (`autopar.rewrite.stages.cut_in_stages`), each with its own plan, priced by itself.
    Raises NotCut.
    """
    stages = stages_of(plan, ends, inputs_first=inputs_first)
    return tuple((stage, plan_of_stage(stage, plan, pricer)) for stage in stages)


def stages_of(plan: Plan, ends: Sequence[int], *, inputs_first: bool = False) -> tuple[Stage, ...]:
    """The stages of a plan's graph. Raises NotCut, also where one has no parameter that trains."""
    stages = cut_in_stages(plan.graph, ends, inputs_first=inputs_first)
    for number, stage in enumerate(stages if plan.graph.trained else ()):
        if not stage.graph.trained:
            raise NotCut(
                f"stage {number} of {len(stages)} would hold no parameter that trains; cut the model elsewhere"
            )
    return stages


def _channel_layout(plan: Plan, ref: Ref) -> Layout:
    made = plan.choices[ref.name].gives[ref.index]
    if not _is_partial(made):
        return made
    for node in plan.graph.nodes:
        for place, read in enumerate(node.operands):
            if read == ref and not _is_partial(takes := plan.choices[node.name].takes[place]):
                return takes
    raise NotCut(f"%{ref.name} is a partial sum that is read as one across the cut; cut the model elsewhere")


def _is_partial(layout: Layout) -> bool:
    return any(isinstance(placement, Partial) for placement in layout)


def plan_of_stage(stage: Stage, plan: Plan, pricer: Pricer, chosen: Chosen | None = None) -> Plan:
    """The plan of one of the stages of a plan, priced by itself; it hangs on nothing but these. `chosen`: what
    `chosen_in_stage` says, where that is known. Raises NotCut.
    """
    choices, deliveries = chosen or chosen_in_stage(stage, plan, pricer)
    made = refereed(
        stage.graph, choices, deliveries, pricer, objective=None, bound=0.0, memory=None, outputs=plan.outputs,
        notes=plan.notes, residence=residence_in_stage(stage, plan),
    )  # fmt: skip
    return replace(made, prefetch=plan.prefetch)


def residence_in_stage(stage: Stage, plan: Plan) -> dict[str, str]:
    """Where its parameters live."""
    held = {node.target for node in stage.graph.nodes if node.op == "parameter"}
    return {name: where for name, where in plan.residence.items() if name in held}


def chosen_in_stage(stage: Stage, plan: Plan, pricer: Pricer) -> Chosen:
    """How its nodes run, and its results leave it: as in the plan. Raises NotCut."""
    lies = {channel: _channel_layout(plan, ref_of(channel)) for channel in (*stage.receives, *stage.sends)}
    graph, node_of = stage.graph, stage.graph.by_name
    given = {
        (result.kind, result.target): delivery.layout
        for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True)
        if delivery is not None
    }
    outputs = {
        output_name(result.target): _source(lies.get(result.target) or given["output", result.target])
        for result in graph.results
        if result.kind == "output" and result.ref is not None
    }

    for node in graph.nodes:
        if node.is_source or node.name not in plan.choices:
            continue
        for ref, takes in zip(node.operands, plan.choices[node.name].takes, strict=True):
            if node_of[ref.name].target in lies and _is_partial(takes):
                where = node.source or node.module or node.name
                raise NotCut(
                    f"{where}: {node.op} reads a partial sum across the cut, and none is sent; cut the model elsewhere"
                )

    def pick(name: str) -> Strategy:
        if name in outputs:
            return outputs[name]
        node = node_of[name]
        if node.is_source and node.target in lies:
            return _source(lies[node.target])
        if name in stage.copies:
            return _like(node, graph, plan.choices[stage.copies[name]], pricer)
        choice = plan.choices[name]
        return Strategy(
            choice.roles, choice.takes, choice.gives, choice.body, choice.body_axes, choice.body_size, choice.steps,
            stored=choice.stored,
        )  # fmt: skip

    return choose(graph, pick, pricer)


def _like(node: Node, graph: Graph, choice: Choice, pricer: Pricer) -> Strategy:
    """The strategy of the node that has these layouts."""
    types = operand_types(node, graph.by_name)
    for strategy in node_strategies(node, types, rule_of(node, types), pricer.mesh):
        if (strategy.takes, strategy.gives) == (choice.takes, choice.gives):
            return strategy
    raise AssertionError(f"%{node.name} ({node.op}) has no strategy that takes {choice.takes}")


def _source(layout: Layout) -> Strategy:
    return Strategy(("",) * len(layout), (), (layout,), "", (), 1, ())
