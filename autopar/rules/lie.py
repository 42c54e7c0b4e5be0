"""How the results of each operator lie in memory, given how its operands do, and which operands it copies for that.

A graph of values knows nothing of memory: emitted code finds values as those before it have left them, permuted or with
gaps. Where a view or a product wants them otherwise, torch makes a copy that stands in no graph; what is said here is
what finds those copies. It is said of plain operators as `autopar.emit` writes them. Results that are not listed are
contiguous, as those of most kernels are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD, kernel_at
from autopar.ir.equation import EINSUM, Equation, equation_of
from autopar.ir.graph import Const, Node, TensorType
from autopar.ir.strides import Placed, Shape, Strides, contiguous, elementwise, packed, viewed
from autopar.ir.work import FETCH, STORE
from autopar.rules.table_pointwise import POINTWISE

HEADS_INSIDE = (0, 2, 1, 3)  # [batch, heads, sequence, d], of which each row lies with those of the other heads


def lie(node: Node, operands: Sequence[Placed], shapes: Sequence[Shape | None]) -> tuple[Strides, ...]:
    """The strides of the results, which have these local shapes; () where there is none."""
    if node.op in VIEWED:
        shape = shapes[0]
        assert shape is not None
        found = VIEWED[node.op](node, *operands[0], shape)
        return tuple(contiguous(one or ()) if found is None else found for one in shapes)
    if node.op == EINSUM:
        return (_product(node, operands),)
    if node.op in (ATTENTION, ATTENTION_BACKWARD):
        return _attention(node, operands, shapes)
    given = dict(node.kwargs).get("memory_format") == Const("memory_format", "contiguous_format")
    if (node.op in POINTWISE or node.op in (STORE, FETCH)) and operands and not given:
        return tuple(() if one is None else elementwise(one, operands) for one in shapes)
    return tuple(() if one is None else contiguous(one) for one in shapes)


def is_copied(node: Node, operand: Placed, shape: Shape) -> bool:
    """Whether the view that the node takes of its operand is none: it becomes a copy of that shape."""
    return node.op in VIEWED and VIEWED[node.op](node, *operand, shape) is None


def copied(node: Node, operands: Sequence[Placed]) -> list[int]:
    """The places of the operands that a product copies, as rows, columns or what is summed are several dims that do not
    lie behind each other. They are copied for as long as it runs.
    """
    if node.op != EINSUM:
        return []
    terms = _terms(node)
    found: list[int] = []
    sides = zip(operands, (terms.left, terms.right), terms.parts, strict=True)
    for place, ((shape, strides), letters, wanted) in enumerate(sides):
        at = {letter: dim for dim, letter in enumerate(letters)}
        order = [at[letter] for part in wanted for letter in part]
        matrix = tuple(math.prod(shape[at[letter]] for letter in part) for part in wanted)
        if viewed(tuple(shape[d] for d in order), tuple(strides[d] for d in order), matrix) is None:
            found.append(place)
    return found


# --- products --------------------------------------------------------------------------------------------------------


def _terms(node: Node) -> Equation:
    return equation_of(str(node.args[0]))


def _product(node: Node, operands: Sequence[Placed]) -> Strides:
    terms = _terms(node)
    sides = zip((terms.left, terms.right), operands, strict=True)
    size = {n: s for letters, (shape, _) in sides for n, s in zip(letters, shape, strict=True)}
    return product(node, [size.get(n, 1) for n in terms.result])


def product(node: Node, shape: Sequence[int]) -> Strides:
    """Of a product's result of that local shape."""
    terms = _terms(node)
    size = dict(zip(terms.result, shape, strict=True))
    step = dict(zip(terms.made, contiguous([size.get(n, 1) for n in terms.made]), strict=True))
    return tuple(step.get(n, 1) for n in terms.result)


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(node: Node, operands: Sequence[Placed], shapes: Sequence[Shape | None]) -> tuple[Strides, ...]:
    """By the kernel of a CPU, as in `autopar.emit.attention`: its flash kernel gives the result the strides of the
    queries and gradients those of rows with all their heads side by side; "math" has it the other way round.
    """
    dtype = next(type.dtype for type in node.outputs if type is not None)
    by_math = kernel_at("cpu", node, [TensorType(shape, dtype) for shape, _ in operands]) == "math"
    alike = node.op == ATTENTION_BACKWARD if by_math else node.op == ATTENTION
    first, count = (0, 1) if node.op == ATTENTION else (1, 3)
    found: list[Strides] = []
    for place, shape in enumerate(shapes):
        if shape is None:
            found.append(())
        elif place < count:
            found.append(_as_kernels_take(shape, operands[first + place]) if alike else packed(shape, HEADS_INSIDE))
        elif node.op == ATTENTION and place == 1 and not by_math:
            found.append(packed(shape, HEADS_INSIDE[:3]))
        else:
            found.append(contiguous(shape))
    return tuple(found)


def _as_kernels_take(shape: Shape, operand: Placed) -> Strides:
    """Like an operand, which kernels get contiguous where its last dim is not (`autopar.emit.attention`)."""
    of, strides = operand
    return elementwise(shape, [(of, strides if strides[-1] == 1 else contiguous(of))])


# --- views -----------------------------------------------------------------------------------------------------------


def _view(node: Node, shape: Shape, strides: Strides, wanted: Shape) -> Strides | None:
    return viewed(shape, strides, wanted)


def _as_it_lies(node: Node, shape: Shape, strides: Strides, wanted: Shape) -> Strides:
    return strides


def _permute(node: Node, shape: Shape, strides: Strides, wanted: Shape) -> Strides:
    dims: tuple[int, ...] = node.args[1]
    return tuple(strides[dim] for dim in dims)


def _expand(node: Node, shape: Shape, strides: Strides, wanted: Shape) -> Strides:
    more = len(wanted) - len(shape)
    kept = (step if size == full else 0 for size, step, full in zip(shape, strides, wanted[more:], strict=True))
    return (*[0] * more, *kept)


def _slice(node: Node, shape: Shape, strides: Strides, wanted: Shape) -> Strides:
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape)
    step = node.args[4] if len(node.args) > 4 else 1
    return tuple(stride * step if at == dim else stride for at, stride in enumerate(strides))


def _without(node: Node, shape: Shape, strides: Strides, wanted: Shape) -> Strides:
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape)
    return (*strides[:dim], *strides[dim + 1 :])


def _diagonal(node: Node, shape: Shape, strides: Strides, wanted: Shape) -> Strides:
    one, other = (given % len(shape) for given in (*node.args[2:4], *(0, 1)[len(node.args[2:4]) :]))
    kept = (stride for at, stride in enumerate(strides) if at not in (one, other))
    return (*kept, strides[one] + strides[other])


def _as_real(node: Node, shape: Shape, strides: Strides, wanted: Shape) -> Strides:
    return (*(2 * stride for stride in strides), 1)


def _as_complex(node: Node, shape: Shape, strides: Strides, wanted: Shape) -> Strides | None:
    """As `autopar.emit.ops.view_as_complex` finds it."""
    beside = strides[-1] == 1 and not any(stride % 2 for stride in strides[:-1])
    return tuple(stride // 2 for stride in strides[:-1]) if beside else None


VIEWED: dict[str, Callable[[Node, Shape, Strides, Shape], Strides | None]] = {
    "aten.view.default": _view,
    "aten.permute.default": _permute,
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _without,
    "aten.unbind.int": _without,
    "aten.split.Tensor": _as_it_lies,
    "aten.split_with_sizes.default": _as_it_lies,
    "aten.chunk.default": _as_it_lies,
    "aten.diagonal.default": _diagonal,
    "aten.view_as_real.default": _as_real,
    "aten.view_as_complex.default": _as_complex,
    "autopar.share": _as_it_lies,
}
