"""Plain tensors and DTensors in one operator.

A part of a parallel module that is called by itself (`parallel.decoder(z)`), another method of it
(`agent.get_value(x)`) and whatever else a script computes with parameters and tensors of its own (`z @ weight.t()`,
`torch.cat([w, x])`) mix them, which DTensors refuse, as they do operators for which they have no rule (`w[w > 0]`).
Here the DTensors are put together first, on all ranks alike: what is made is plain and whole, and gradients go back to
the pieces. What changes a DTensor in place stays its own (`edits`).

Plain numbers beside DTensors are such, too, where they have a gradient, or are changed in place (`loss += penalty`):
autograd would send the one's gradient to the other. Where functions of torch are not asked (the step of an optimizer),
that is refused in words of ours.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter

from autopar._compat import is_in_backward, is_transforming, pytree, without_torch_function, wrap_dtensor_dispatch
from autopar.attach.tensors import over_pieces, piece_as, whole_within
from autopar.trace.origins import writes_in_place

WRITE = "write it with +, -, *, / (loss = loss + penalty), or put the other together first: penalty.full_tensor()"

# What torch says of operators that DTensors do not have (`torch.allclose`, `w[w > 0]`, `for row in w`).
NOT_IN_PIECES = re.compile(
    "does not have a sharding strategy|Sharding propagation failed|along the sharded dim|not supported with DTensor"
    "|in-place operations that require placement changes"
)
MIXED = "got mixed torch.Tensor and DTensor"
# Operators that compute with each piece by itself where the dim that is split is named from behind.
NOT_BY_PIECES = frozenset(
    [
        "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "cumulative_trapezoid", "trapezoid", "trapz",
        "argmax", "argmin", "diff",
    ]
)  # fmt: skip
# Operators that they have, and of which the backward mixes them with plain tensors.
NO_BACKWARD = frozenset(
    [
        "split",
        "split_with_sizes",
        "tensor_split",
        "chunk",
        "unbind",
        "cartesian_prod",
        "trace",
        "prod",
        "polar",
        "det",
        "slogdet",
        "logdet",
        "quantile",
        "nanquantile",
    ]
)


@functools.cache
def mend_mixed() -> None:
    """From now on in this process."""
    wrap_dtensor_dispatch(_beside, _given, _laid_out)
    DTensor.__torch_function__ = classmethod(_together)  # type: ignore[assignment, method-assign]


def _together(_: type, func: Any, __: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """A function of torch's, with the DTensors put together where it is given plain tensors, too."""
    with without_torch_function():
        try:
            return _made_of_both(func, args, kwargs or {})
        except RuntimeError as error:
            if not is_transforming():
                raise
            raise RuntimeError(
                "parameters of a parallel module are within a transform of torch.func (grad, vmap, jvp, jacrev), which "
                "DTensors do not take: transform the plain model with full_state_dict() loaded into it"
            ) from error


def _made_of_both(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if _takes_any(func):
        return func(*args, **named)
    if _changes_first(func, args, named):
        return _changed(func, args, named)
    given = [*_tensors((*args, *named.values()))]
    name = getattr(func, "__name__", "")
    is_mixed = _are_mixed(given) or (writes_in_place(name, named) and not isinstance(given[0], DTensor))
    if not is_mixed and name not in NOT_BY_PIECES and not _has_no_backward(name, given):
        try:
            return func(*args, **named)
        except (NotImplementedError, RuntimeError) as error:  # on all ranks alike, before anything is sent
            is_within = MIXED in str(error) and all(isinstance(one, DTensor) for one in given)  # `torch.combinations`
            if not (is_within or NOT_IN_PIECES.search(str(error))):
                raise
            if name == "as_strided" and not given[0].is_contiguous():
                raise  # the whole lies otherwise
    args, named = pytree.tree_map_only(DTensor, _put_together, (args, named))
    return func(*args, **named)


def _put_together(held: DTensor) -> Tensor:
    follows = torch.is_grad_enabled() and held.requires_grad
    if not follows or DTensor.full_tensor is not whole_within:  # which has a gradient of its own
        return held.full_tensor()
    return _WholeOf.apply(held)  # type: ignore[no-any-return]


class _WholeOf(torch.autograd.Function):
    """As `full_tensor`, whose backward takes the zeros that stand where no gradient arrives for a DTensor."""

    @staticmethod
    def forward(ctx: Any, held: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.like = cast(DTensor, held.detach())
        return whole_within(ctx.like)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:  # type: ignore[override]
        return None if gradient is None else _PieceOf.apply(gradient, ctx.like)


class _PieceOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, like: DTensor) -> DTensor:
        ctx.set_materialize_grads(False)
        return piece_as(whole, like)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return None if gradient is None else _WholeOf.apply(gradient), None


def _changed(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A DTensor that is changed in place; where that does not go by pieces, as the whole is."""
    try:
        return func(*args, **named)
    except (NotImplementedError, RuntimeError) as error:  # as above
        held = args[0] if named.get("out") is None else named["out"]
        follows = torch.is_grad_enabled() and any(one.requires_grad for one in _tensors((*args, *named.values())))
        if follows or not isinstance(held, DTensor) or not (NOT_IN_PIECES.search(str(error)) or MIXED in str(error)):
            raise
        told = error
    wholes: dict[int, Tensor] = {}
    args, named = pytree.tree_map_only(
        DTensor, lambda one: wholes.setdefault(id(one), one.full_tensor().clone()), (args, named)
    )
    func(*args, **named)
    whole = wholes[id(held)]
    if whole.shape != held.shape:
        if isinstance(held, Parameter):  # which programs read as it was
            raise told
        held.data = whole  # what `nn.init.orthogonal_` draws, and turns
        return held
    held.copy_(piece_as(whole, held))
    return held


def _takes_any(func: Any) -> bool:
    """Whether it takes both side by side: `torch.autograd.grad(loss, [weight, x])`. Collectives refuse DTensors."""
    module = str(getattr(func, "__module__", ""))
    return func is Tensor.backward or module.startswith(("torch.distributed", "torch.autograd"))


def _has_no_backward(name: str, given: list[Tensor]) -> bool:
    return (
        (name in NO_BACKWARD or (name.startswith("linalg_") and not name.endswith("norm")))
        and torch.is_grad_enabled()
        and any(one.requires_grad for one in given)
    )


def _are_mixed(given: list[Tensor]) -> bool:
    """Whether there are DTensors and plain tensors, which are no numbers or have gradients."""
    return any(isinstance(one, DTensor) for one in given) and any(
        not isinstance(one, DTensor)
        and (one.ndim > 1 or one.numel() != 1 or (torch.is_grad_enabled() and one.requires_grad))
        for one in given
    )


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _changes_first(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "").partition(".")[0]  # of `torch.ops.aten.add_.Tensor` the operator's
    if named.get("out") is not None:
        return isinstance(named["out"], DTensor)
    is_own = bool(args) and (isinstance(args[0], DTensor) or not isinstance(args[0], Tensor))
    return is_own and (writes_in_place(name, named) or name in ("__set__", "__setitem__"))


def _beside(plain: Any, op: Any, number: Tensor, *rest: Any) -> Any:
    """Before a plain number counts as one that all ranks have."""
    if torch.is_grad_enabled() and number.requires_grad:
        raise RuntimeError(
            f"{op} got mixed torch.Tensor and DTensor (a number made of parameters of a parallel module), and the "
            f"gradient of the plain one would come back as a DTensor: {WRITE}"
        )
    return plain(op, number, *rest)


def _laid_out(plain: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any) -> Any:
    """How ranks make their pieces of a result. In a backward, which nobody calls by name, an operator that DTensors
    have no rule for runs on whole tensors (`hardtanh_backward`), on all ranks alike.
    """
    try:
        return plain(op, args, kwargs, *rest)
    except NotImplementedError:
        if op is torch.ops.aten.detach_.default:  # of torch 2.11; it changes no element
            return args[0]
        if not is_in_backward() or op._schema.is_mutable:
            raise
    like = next(one for one in _tensors(args) if isinstance(one, DTensor))
    args, kwargs = pytree.tree_map_only(DTensor, lambda held: held.full_tensor(), (args, kwargs))
    placements = [Replicate()] * like.device_mesh.ndim
    return pytree.tree_map_only(
        Tensor, lambda made: over_pieces(made, made.shape, placements, like.device_mesh), op(*args, **kwargs)
    )


def _given(plain: Any, op: Any, args: tuple[Any, ...], *rest: Any) -> Any:
    """Behind what ranks have made of their pieces."""
    if op._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
        raise RuntimeError(
            f"{op} changes a plain tensor in place by a DTensor (a number made of parameters of a parallel module): "
            f"{WRITE}"
        )
    return plain(op, args, *rest)
