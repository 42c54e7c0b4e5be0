"""Terms of a gradient: what is summed up, each with what is done to the sum behind that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Node, Ref, Result, TensorType
from autopar.ir.precision import CAST, TO_REDUCE_DTYPE
from autopar.ir.work import VIEWS

ADD = "aten.add.Tensor"


@dataclass(frozen=True, slots=True)
class Term:
    """A value; the casts and views that are done to a sum of which it is a term, in order; and the operators that sum
    it.
    """

    ref: Ref
    behind: tuple[str, ...]
    adds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sums:
    """Operators that sum up some of the terms: `ends`: of each gradient; None where none of its terms is among them.
    `copies`: the operator of the whole graph for which each of them stands.
    """

    nodes: tuple[Node, ...]
    ends: Mapping[str, Ref | None]
    copies: Mapping[str, str]


def terms_of(graph: Graph, result: Result) -> list[Term]:
    """In order. Casts and views of a sum become those of its terms: what is cast is summed in the wide dtype."""
    if result.ref is None:
        return []
    node_of = graph.by_name
    readers = Counter(ref for node in graph.nodes for ref in node.operands)
    left, found = [Term(result.ref, (), ())], list[Term]()
    while left:
        term = left.pop()
        node = node_of[term.ref.name]
        is_inner = node.phase == "backward" and not node.is_source and readers[term.ref] <= 1
        if is_inner and node.op == ADD and not node.kwargs and len(node.operands) == 2:
            left += [Term(ref, term.behind, (*term.adds, node.name)) for ref in reversed(node.operands)]
        elif is_inner and node.op in (*VIEWS, CAST, TO_REDUCE_DTYPE):
            left.append(Term(node.operands[0], (node.name, *term.behind), term.adds))
        else:
            found.append(term)
    return found


def sums_of(graph: Graph, terms: Mapping[str, Sequence[Term]], seen: Mapping[Ref, Ref], suffix: str) -> Sums:
    """`terms`: by the target of the gradient. `seen`: what values that are not made here are called. `suffix`: of names
    of operators.
    """
    nodes, ends, copies = list[Node](), dict[str, Ref | None](), dict[str, str]()
    whole = {result.target: result.ref for result in graph.results if result.kind == "gradient"}

    def made(of: str, args: tuple[Ref, ...], type: TensorType | None) -> Ref:
        node, name = graph.by_name[of], f"{of}_{suffix}_{len(nodes)}"
        nodes.append(replace(node, name=name, args=(*args, *node.args[len(args) :]), outputs=(type,)))
        copies[name] = of
        return Ref(name)

    for target, own in terms.items():
        total: Ref | None = None
        for term in own:
            ref, to = seen.get(term.ref, term.ref), whole[target]
            for of in term.behind:
                ref = made(of, (ref,), graph.by_name[of].outputs[0])
            assert to is not None
            total = ref if total is None else made(term.adds[-1], (total, ref), graph.type_of(to))
        ends[target] = total
    return Sums(tuple(nodes), ends, copies)
