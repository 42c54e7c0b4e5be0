"""The choices of a plan for the same model at other sizes: what every operator split before, it splits again.

So the last batch of an epoch, or an evaluation with other lengths, costs a trace and no search. The bound that such a
plan carries is what its operators take at least, each by itself; where that does not prove it to be within `NEAR` of
the best, the new sizes are searched.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.assemble.problem import output_name
from autopar.decide.decide import choose
from autopar.decide.referee import refereed
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout, Partial, local_shape, replicated
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.propose.strategies import NOTHING, Strategy, propose
from autopar.search.memory_options import NO_OPTIONS
from autopar.search.problems import limits_of
from cost_models.hardware import Hardware

NEAR = 0.1


def same_choices(like: Plan, graph: Graph, memory: float | None, hardware: Hardware, outputs: str) -> Plan | None:
    """The plan, refereed; None where a node is new, a size does not divide, memory does not do, values are
    recomputed or offloaded, or more than `NEAR` might be gained.
    """
    if like.residence or any(node.target and not node.is_source for node in like.graph.nodes):
        return None
    pricer = Pricer.on(like.mesh, hardware, like.optimizer, like.bucket_bytes, graph.rounds)
    strategies, _ = propose(graph, like.mesh)
    picks: dict[str, Strategy] = {}
    nodes = like.graph.by_name
    least = 0.0
    known: dict[int, float] = {}
    for node in graph.nodes:
        before, options = nodes.get(node.name), strategies[node.name]
        if before is None or before.op != node.op:
            return None
        choice = like.choices[node.name]
        same = (choice.gives, choice.roles, choice.stored) if node.is_source else choice.roles
        found = next(
            (o for o in options if ((o.gives, o.roles, o.stored) if node.is_source else o.roles) == same), None
        )
        if found is None:
            return None
        picks[node.name] = found
        if id(options) not in known:
            known[id(options)] = float(pricer.costs(options).min()) if options else 0.0
        least += known[id(options)]
    delivered = {
        r.target: d.layout for r, d in zip(like.graph.results, like.deliveries, strict=True) if r.kind == "output" and d
    }
    for result in graph.results:
        if result.kind == "output" and result.ref is not None:
            layout = replicated(like.mesh) if outputs == "global" else delivered.get(result.target)
            if layout is None or local_shape(graph.type_of(result.ref).shape, layout, like.mesh) is None:
                return None
            picks[output_name(result.target)] = _arrives(layout)
    choices, deliveries = choose(graph, picks.__getitem__, pricer)
    note = "the choices of the training step, at other sizes"
    plan = refereed(
        graph, choices, deliveries, pricer, objective=None, bound=least, memory=memory, outputs=outputs, notes=(note,)
    )
    limit = limits_of(pricer, NO_OPTIONS, memory).get("hbm")
    if (limit is not None and plan.peak_bytes["hbm"] > limit) or plan.gap > NEAR:
        return None
    return replace(plan, prefetch=like.prefetch)


def _arrives(layout: Layout) -> Strategy:
    assert not any(isinstance(placement, Partial) for placement in layout)
    return Strategy((NOTHING,) * len(layout), (layout,), (layout,), "", (), 1, ())
