"""What several parts of a plan's text read off it: parameters, arithmetic, what an axis splits of a product."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from autopar.ir import precision
from autopar.ir.attention import ATTENTION
from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.layout import Partial, Replicate, Shard, show
from autopar.ir.work import FETCH, VIEWS
from autopar.plan.value import Choice, PlanValue, is_product
from autopar.propose.strategies import Strategy
from autopar.rules import ring
from autopar.rules.attended import GATHERED, GROUPED, RING, ZIGZAG
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


def layouts_told(plan: PlanValue, node: Node) -> str:
    """Of a parameter, as it is read; behind it, where that is another, as it is stored."""
    (type,), choice = node.outputs, plan.choices[node.name]
    ndim = 0 if type is None else len(type.shape)
    read = show(choice.gives[0], plan.mesh, ndim)
    return f"{read}, stored {show(choice.stored, plan.mesh, ndim)}" if choice.stored else read


def parameters_of(plan: PlanValue) -> list[tuple[Node, TensorType]]:
    found: list[tuple[Node, TensorType]] = []
    for node in plan.graph.nodes:
        if node.op == "parameter":
            found.append((node, plan.graph.stored_type(node)))
    return found


PATTERNED = {  # role -> what patterns of attention are called that layouts do not tell apart
    GROUPED: "heads (grouped kv replicated)",
    GATHERED: "sequence (context parallel: gathered kv)",
    RING: "sequence (context parallel: ring)",
    ZIGZAG: "sequence (context parallel: zigzag ring)",
}


ULYSSES = "ulysses"  # heads, reached by an all-to-all from a split sequence (Jacobs et al., "DeepSpeed Ulysses", 2023)


def split_told(plan: PlanValue, node: Node, axis: int, weight_of: Mapping[str, str]) -> str:
    """`split_of` a product of a plan; of attention whose heads are split, with the name of how they come to be."""
    told = split_of(plan.choices[node.name], axis, is_weighted(node, weight_of))
    if told != "heads" or node.op != ATTENTION:
        return told
    node_of, above = plan.graph.by_name, node
    while above.operands and (above is node or not is_product(plan.choices[above.name])):
        above = node_of[above.operands[0].name]
    made = split_of(plan.choices[above.name], axis, is_weighted(above, weight_of)) if above.operands else ""
    return f"{told} ({ULYSSES})" if made == "sequence" else told


LOOPED_PRODUCTS = {  # what the axes of a looped product do, by the pattern
    "ring reduce-scatter": "sums in a ring (matmul reduce-scatter)",
    "SUMMA": "blocks ({})",  # the form, and in how many panels
}


def split_of(choice: Choice | Strategy, axis: int, weighted: bool) -> str:
    """What an axis splits of a product: batch, sequence, heads, columns, rows, nothing, or something else.

    Read off the layouts. Columns and rows are those of the second operand, in a linear layer the weight: split by
    columns, each rank makes some of the result's features; by rows, each makes a term of a sum over the ranks. Where
    one operand comes round in a ring, both are split; told is what its rank keeps of the result: "columns (ring)".
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
        case [Shard(first), Shard()], Shard(dim) if choice.body == ring.NAME:
            return f"{'columns' if dim != first else 'sequence' if dim else 'batch'} ({ring.NAME})"
        case [Shard(), Shard()], Shard(dim):
            return "groups" if weighted else "heads" if dim else "batch"
        case [Replicate(), Shard()], Shard():
            return "columns"
        case [Shard(), Shard()], Partial():
            return "rows"
        case _:
            return OTHERWISE
