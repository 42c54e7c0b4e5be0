"""Alignment: products whose rows are of odd length, as logits of a vocabulary of 50,257 are, padded to a length that
matrix units like.

A row of 16-bit numbers that does not begin at a multiple of 16 bytes is read by other kernels of cuBLAS: on an H200 the
three products of GPT-2's head ran at 95 to 150 TFLOP/s, a third of what they do at a length of 50,304. So the odd dim
is filled with zeros where operands have it, and cut off the result, which is a view. (Megatron-LM pads vocabularies of
models by hand; torch.compile pads products, inductor's `pad_mm`.)

Odd lengths alone, which no mesh of 2, 4, .. splits: others may be worth more in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from autopar.ir.equation import EINSUM, equation_of
from autopar.ir.graph import Graph, Node, Ref, TensorType

HALVES = ("bfloat16", "float16")
LONG = 1024  # shorter rows are few flops, or attention's
MULTIPLE = 64  # elements: 128 bytes, a line of the cache
WORTH = 128  # flops for each byte that is padded, from which on the copies are the smaller part
PAD, SLICE = "aten.constant_pad_nd.default", "aten.slice.Tensor"

_Known = dict[tuple[Ref, str, int], Ref]  # (what is padded, phase, dim) -> padded


def aligned(graph: Graph) -> Graph:
    """The same numbers; the graph itself where no product wants it."""
    nodes: list[Node] = []
    known: _Known = {}
    for node in graph.nodes:
        letter = _odd(node, graph) if node.op == EINSUM else None
        nodes += [node] if letter is None else _padded(node, letter, graph, known)
    return replace(graph, nodes=tuple(nodes)) if known else graph


def _odd(node: Node, graph: Graph) -> str | None:
    """The letter of the dim to pad: an odd one along which rows lie, of a product that is long enough."""
    if graph.type_of(Ref(node.name)).dtype not in HALVES:
        return None
    terms, sizes = equation_of(node.args[0]), _sizes(node, graph)
    for letter in (terms.left[-1], terms.right[-1], terms.result[-1]):
        if letter != "1" and sizes[letter] % 2 and sizes[letter] >= LONG:
            read = ((ref, term) for ref, term in _operands(node) if letter in term)
            nbytes = sum(graph.type_of(ref).nbytes for ref, _ in read)
            return letter if 2 * prod(sizes.values()) > WORTH * nbytes else None
    return None


def _operands(node: Node) -> tuple[tuple[Ref, tuple[str, ...]], ...]:
    terms = equation_of(node.args[0])
    return (node.args[1], terms.left), (node.args[2], terms.right)


def _sizes(node: Node, graph: Graph) -> Mapping[str, int]:
    return {
        letter: size
        for ref, term in _operands(node)
        for letter, size in zip(term, graph.type_of(ref).shape, strict=True)
        if letter != "1"
    }


def _padded(node: Node, letter: str, graph: Graph, known: _Known) -> list[Node]:
    """The product with that dim padded, behind what pads operands that nothing has padded in its phase, and in front of
    what cuts it off again, which has the name of the product.
    """
    made: list[Node] = []
    size = _sizes(node, graph)[letter]
    longer = size + -size % MULTIPLE
    args = [*node.args]
    for place, (ref, term) in enumerate(_operands(node), 1):
        if letter in term:
            dim = term.index(letter)
            if (ref, node.phase, dim) not in known:
                of = f"{ref.name}_{ref.index}" if ref.index else ref.name
                name = f"{of}_padded" + "_bw" * (node.phase == "backward")
                pad = (0, 0) * (len(term) - 1 - dim) + (0, longer - size)
                type = _with(graph.type_of(ref), dim, longer)
                made.append(replace(node, name=name, op=PAD, args=(ref, pad, 0.0), kwargs=(), outputs=(type,)))
                known[ref, node.phase, dim] = Ref(name)
            args[place] = known[ref, node.phase, dim]
    result = equation_of(node.args[0]).result
    if letter not in result:
        return [*made, replace(node, args=tuple(args))]
    dim, whole = result.index(letter), graph.type_of(Ref(node.name))
    product = replace(node, name=f"{node.name}_padded", args=tuple(args), outputs=(_with(whole, dim, longer),))
    return [*made, product, replace(node, op=SLICE, args=(Ref(product.name), dim, 0, size), kwargs=())]


def _with(type: TensorType, dim: int, size: int) -> TensorType:
    return replace(type, shape=(*type.shape[:dim], size, *type.shape[dim + 1 :]))
