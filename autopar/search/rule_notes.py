"""What a plan says of rules: operators that have none, what a user's rule says too little of, and rules for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.ir.graph import Graph
from autopar.ir.outside import Rules, rule_in, told
from autopar.search.context import Question

OURS = ("aten", "autopar", "prims", "transformers")  # whose operators have their rules in autopar


def rule_notes(question: Question) -> list[str]:
    """One sentence each."""
    graph = question.graph
    counts = Counter(graph.by_name[name].op for name in question.without_rule)
    notes = [_without(graph, op, count) for op, count in sorted(counts.items())]
    costless: set[str] = set()
    for node in graph.nodes:
        rule = rule_in(node.outside, node.op)
        if rule is not None and rule.flops is None:
            costless.add(node.op)
    notes += [
        f"{op} is priced by the bytes that it moves: its rule says no flops (autopar.OperatorRule(rule, flops=...))"
        for op in sorted(costless)
    ]
    given = dict.fromkeys(rules for node in graph.nodes for rules in node.outside)
    return [*notes, *(note for rules in given for note in _idle(rules, question))]


def _without(graph: Graph, op: str, count: int) -> str:
    note = f"{op} has no sharding rule and runs replicated ({count} {'node' if count == 1 else 'nodes'})"
    namespace = op.partition(".")[0]
    if namespace in OURS:
        return note
    if any(rule_in(node.outside, op) for node in graph.nodes):
        return f"{note}: its rule gives None for that use of it"
    return (
        f"{note}, priced by the bytes that it moves; a rule says how it may be split: "
        f'rules=autopar.Rules("{namespace}", "1.0", {{"{op}": ...}}), or --rules'
    )


def _idle(rules: Rules, question: Question) -> Iterator[str]:
    """What of the rules nothing in this model has a use for."""
    ops = {node.op for node in question.graph.nodes}
    if rules.operators and ops.isdisjoint(rules.operators):
        known = sorted(rules.operators)
        bases = {op.rpartition(".")[0] for op in known}
        near = sorted(op for op in ops if op.rpartition(".")[0] in bases)
        instead = f"; it has {', '.join(near)}" if near else ""
        more = f" and {len(known) - 3} more" if len(known) > 3 else ""
        yield f"rules of {told(rules.identity)}: no operator of this model is {', '.join(known[:3])}{more}{instead}"
    offered = {option.body for options in question.strategies.values() for option in options}
    for name in sorted({*rules.patterns} - offered):
        yield f"rules of {told(rules.identity)}: pattern {name!r} offers nothing for this model on this mesh"
