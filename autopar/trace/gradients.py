"""Gradients that forward takes itself: forces of energies, residuals of differential equations, gradient penalties.

    positions.requires_grad_()
    energy = self.net(positions).sum()
    forces = -torch.autograd.grad(energy, positions, create_graph=True)[0]

`torch.export` would see the operators of that backward, and not what they read of forward. So while a model is
exported it is one operator of ours (`autopar.trace.functions`), and in what was exported it is taken again: then
AOTAutograd traces below autograd, and sees all of it, with the gradients of these gradients.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar._compat import is_transforming
from autopar.errors import TraceError
from autopar.trace.apart import pass_outputs
from autopar.trace.functions import applied
from autopar.trace.lines import line_here

# Functions of torch that give nothing with a gradient.
WITHOUT_GRADIENT = re.compile(
    "is_.*|detach|__get__|size|stride|dim|ndimension|numel|nelement|element_size|get_device|type|data_ptr|.*storage.*|"
    "item|tolist|.*_like|new_.*|arg(max|min|sort)|isnan|isinf|isfinite|gt|lt|ge|le|eq|ne|__(gt|lt|ge|le|eq|ne|len|hash|repr|format|bool|int|float|index|contains|reduce_ex|deepcopy)__"
)


@dataclass
class Gradients:
    """Of `outputs` tensors by `inputs` tensors, the first and second of what it is called with; the rest: gradients of
    outputs, where `given` says so. `has_graph`: they have gradients of their own.
    """

    outputs: int
    inputs: int
    given: list[bool]
    has_graph: bool

    def shapes(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.empty_like(one) for one in tensors[self.outputs :][: self.inputs]]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        outputs, inputs = tensors[: self.outputs], tensors[self.outputs :][: self.inputs]
        rest = iter(tensors[self.outputs + self.inputs :])
        # torch begins at `ones_like` of the output, which would hang on all that it is made of.
        pairs = zip(self.given, outputs, strict=True)
        given = [next(rest) if is_there else torch.ones(one.shape, dtype=one.dtype) for is_there, one in pairs]
        found = torch.autograd.grad(
            outputs, inputs, given, retain_graph=True, create_graph=self.has_graph, allow_unused=True
        )
        pairs = zip(found, inputs, strict=True)
        return [torch.zeros_like(one) if gradient is None else gradient for gradient, one in pairs]


@dataclass
class _Requiring:
    """What lets a tensor be a leaf that has a gradient, or none, from there on. `made`: these, as the exported module
    runs.
    """

    gradient: bool
    made: list[Tensor] = field(default_factory=list[Tensor])
    is_in_place = True

    def shapes(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.empty_like(one) for one in tensors]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        is_so = (one.requires_grad == self.gradient for one in tensors)
        pairs = zip(tensors, is_so, strict=True)
        self.made = [one if is_so else one.detach().requires_grad_(self.gradient) for one, is_so in pairs]
        return self.made


def without_own_leaves(module: torch.fx.GraphModule, applications: Iterable[Any]) -> set[int]:
    """Let outputs of an exported module whose gradient leads to nothing but leaves that forward has made (a loss of no
    part, begun as `torch.zeros((), requires_grad=True)`) have none: a program gives gradients of parameters and inputs.
    Their places are put into what is returned, as the module runs.
    """
    leaves, found = [one for one in applications if isinstance(one, _Requiring) and one.gradient], set[int]()

    def see(values: list[Any]) -> list[Any]:
        own = {id(tensor) for one in leaves for tensor in one.made}
        trains = {place: one for place, one in enumerate(values) if isinstance(one, Tensor) and one.requires_grad}
        found.update(place for place, one in trains.items() if set(map(id, _leaves_of(one))) <= own)
        return [one.detach() if place in found else one for place, one in enumerate(values)]

    if leaves:
        pass_outputs(module, see)
    return found


def _leaves_of(tensor: Tensor) -> list[Any]:
    """The leaves that its gradient leads to; for those of the module itself (AOTAutograd's) the node where it ends."""
    if tensor.grad_fn is None:
        return [tensor]
    seen, leaves, ahead = {tensor.grad_fn}, list[Any](), [tensor.grad_fn]
    while ahead:
        one: Any = ahead.pop()
        new = {before for before, _ in one.next_functions if before is not None} - seen
        if not one.next_functions:
            leaves.append(getattr(one, "variable", one))
        seen |= new
        ahead += new
    return leaves


@contextlib.contextmanager
def traced_with(applications: Iterable[Any]) -> Iterator[bool]:
    """Inside, an exported module with these is traced; whether gradients that it takes may have gradients. Attention is
    what torch computes for any device then, as kernels have none.
    """
    have_graphs = any(isinstance(one, Gradients) and one.has_graph for one in applications)
    if not have_graphs:
        yield False
        return
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        # torch leaves out what an operator has no derivative for, and tells it.
        warnings.filterwarnings("error", ".*autograd kernel was not registered")
        yield True


@contextlib.contextmanager
def variables_seen() -> Iterator[None]:
    """Inside, `Variable(x, requires_grad=True)` of old code sets that where forward is looked at."""
    meta: Any = type(torch.autograd.Variable)

    def call(kind: type, data: Any, requires_grad: bool = False, **others: Any) -> Any:
        made: Any = type.__call__(kind, data, **others)
        return made.requires_grad_() if requires_grad else made

    meta.__call__ = call
    try:
        yield
    finally:
        del meta.__call__


class Taken:
    """What forward takes, in one trace."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Tensor, list[Tensor]]] = {}  # id of a gradient -> that, and what it is made of

    def let_require(self, tensor: Tensor, gradient: bool) -> Tensor:
        """Note that `requires_grad` of a tensor is set here."""
        _refuse_transforms()
        return applied(_Requiring(gradient), [tensor])[0]

    def made_by(self, result: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        """The same, of what a function of torch has made (`torch.zeros(3, requires_grad=True)`)."""
        is_leaf = kwargs.get("requires_grad") is True and isinstance(result, Tensor)
        return [self.let_require(result, True)] if is_leaf else []

    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Tensor | Sequence[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """As `torch.autograd.grad`."""
        _refuse_transforms()
        if is_grads_batched:
            raise TraceError(
                f"forward takes gradients of a batch{line_here()} (is_grads_batched), which is not built: take one "
                "after the other, or of the sum"
            )
        of, by = _several(outputs), _several(inputs)
        given = [None] * len(of) if grad_outputs is None else _several(grad_outputs)
        for one, gradient in zip(of, given, strict=True):
            if gradient is None and one.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
        for one in (*of, *by):
            if not one.requires_grad:
                raise RuntimeError("element of tensors does not require grad, and gradients are taken of it, or by it")
        reached = self._reached(of)
        unused = [one for one in by if not reached & {_key(one)}]
        if unused and not (allow_unused or materialize_grads):
            raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph")
        used = [one for one in by if _key(one) in reached]
        tensors = [*of, *used, *(one for one in given if one is not None)]
        found = applied(Gradients(len(of), len(used), [one is not None for one in given], create_graph), tensors)
        found = [one.requires_grad_() if create_graph else one.detach() for one in found]
        self.made |= {id(one): (one, tensors) for one in found if create_graph}
        rest = iter(found)
        there = (next(rest) if _key(one) in reached else None for one in by)
        pairs = zip(there, by, strict=True)
        return tuple(torch.zeros_like(by) if one is None and materialize_grads else one for one, by in pairs)

    def _reached(self, outputs: list[Tensor]) -> set[Any]:
        """All that gradients of these reach."""
        found, left = set[Any](), [*outputs]
        functions = list[Any]()
        while left or functions:
            if left:
                one = left.pop()
                found.add(_key(one))
                left += self.made.get(id(one), (one, []))[1]
                functions += [one.grad_fn] if one.grad_fn is not None else []
                continue
            function = functions.pop()
            for other, number in function.next_functions:
                if other is None or (other, number) in found:
                    continue
                found.add((other, number))
                functions.append(other)
                if (leaf := getattr(other, "variable", None)) is not None:
                    left.append(leaf)
        return found


def _refuse_transforms() -> None:
    if is_transforming():
        raise TraceError(
            f"forward takes gradients by torch.func{line_here()}, which is not built: take them by "
            "torch.autograd.grad, for each row of a batch that of their sum"
        )


def _key(tensor: Tensor) -> Any:
    """Of a tensor in the graph of autograd."""
    return id(tensor) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def _several(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else [*value]
