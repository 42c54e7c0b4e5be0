"""What several parts of a plan's text read off it: parameters, arithmetic, what an axis splits of a product."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from autopar.ir import precision
from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.layout import Partial, Replicate, Shard
from autopar.ir.work import FETCH, VIEWS
from autopar.plan.value import Choice, PlanValue
from autopar.propose.strategies import Strategy
from autopar.rules.attended import GATHERED, GROUPED, RING
from cost_models.steps import Compute, unrolled

WIDTH = 110  # columns of text
OTHERWISE = "something else"  # than `split_of` has a word for


def wrapped(line: str, indent: str = "  ") -> Iterator[str]:
    """The line, on as many as it needs: what it says at its end is often what matters."""
    yield from textwrap.wrap(line, WIDTH, subsequent_indent=indent)


def sentences(lines: Iterable[str]) -> Iterator[str]:
    """Lines that `wrapped` made, one for each that it was given."""
    told: list[str] = []
    for line in lines:
        if told and not line.startswith("  "):
            yield " ".join(told)
            told = []
        told.append(line.strip())
    if told:
        yield " ".join(told)


def ms(seconds: float) -> str:
    """`10.835 ms`."""
    return f"{seconds * 1e3:.3f} ms"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def flops_in(plan: PlanValue, node: Node) -> float:
    """Of one rank, so that work which every rank repeats weighs as much as it costs."""
    return sum(step.flops for step in unrolled(plan.choices[node.name].steps) if isinstance(step, Compute))


def weights_of(graph: Graph) -> dict[str, str]:
    """Node -> the parameter that it is another look at, or a cast of."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "parameter":
            found[node.name] = node.name
        elif node.op in (*VIEWS, FETCH, precision.CAST) and node.operands[0].name in found:
            found[node.name] = found[node.operands[0].name]
    return found


def is_weighted(node: Node, weight_of: Mapping[str, str]) -> bool:
    return any(ref.name in weight_of for ref in node.operands)


def parameters_of(plan: PlanValue) -> list[tuple[Node, TensorType]]:
    found: list[tuple[Node, TensorType]] = []
    for node in plan.graph.nodes:
        type = node.outputs[0] if node.op == "parameter" else None
        if type is not None:
            found.append((node, type))
    return found


PATTERNED = {  # role -> what patterns of attention are called that layouts do not tell apart
    GROUPED: "heads (grouped kv replicated)",
    GATHERED: "sequence (context parallel: gathered kv)",
    RING: "sequence (context parallel: ring)",
}


LOOPED_PRODUCTS = {  # what the axes of a looped product do, by the pattern
    "ring": "pieces in a ring (all-gather matmul)",
    "ring reduce-scatter": "sums in a ring (matmul reduce-scatter)",
    "SUMMA": "blocks ({})",  # the form, and in how many panels
}


def split_of(choice: Choice | Strategy, axis: int, weighted: bool) -> str:
    """What an axis splits of a product: batch, sequence, heads, columns, rows, nothing, or something else.

    Read off the layouts. Columns and rows are those of the second operand, in a linear layer the weight: split by
    columns, each rank makes some of the result's features; by rows, each makes a term of a sum over the ranks.
    `weighted`: whether an operand is a parameter.
    """
    if (told := PATTERNED.get(choice.roles[axis])) is not None:
        return told
    if choice.body in LOOPED_PRODUCTS and ":" in choice.roles[axis]:
        return LOOPED_PRODUCTS[choice.body].format(choice.roles[axis].partition(":")[0])
    given = choice.gives[0][axis]
    match [layout[axis] for layout in choice.takes[:2]], given:
        case [Replicate(), Replicate()], Replicate():
            return "nothing"
        case [Shard(), Replicate()], Shard(dim):
            return "sequence" if dim else "batch"
        case [Shard(), Shard()], Shard(dim):
            return "groups" if weighted else "heads" if dim else "batch"
        case [Replicate(), Shard()], Shard():
            return "columns"
        case [Shard(), Shard()], Partial():
            return "rows"
        case _:
            return OTHERWISE
