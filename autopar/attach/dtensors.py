"""What DTensors do otherwise than tensors, without a word (torch 2.11 to 2.13), and from the first compile on do not.

A sum, norm or maximum over a DTensor that is split is a DTensor whose ranks each hold a term. Its `item()` gives each
rank its own term: optimizers that adapt their step by one number over all parameters (D-Adaptation, Prodigy, LARS,
L-BFGS) then step otherwise on each rank. Here the terms are put together first.

`parameter.data = value` changes the wrapper and not the piece that it holds: the parameter keeps its old values. So
do averages of weights that are swapped in, clamped weights, and SGD by hand. Here the piece is changed; and a gradient
that is set to a plain tensor is cut, as what a hook of a gradient makes of it is.

A number of DTensors beside a plain tensor (a penalty on the parameters, added to a loss) makes a DTensor, whose
gradient the plain tensor's backward cannot take; a larger one (a bias, a scale) cannot stand beside a plain tensor at
all. Here it becomes whole first.

A reduction over an empty list of dims is one over all of them to torch, and DTensors take it for one over none:
gradients of `amax()` and of the largest element's norm divide by a count of a piece. Here it is over all.

`torch.eye(n, out=weight)`, which `nn.init.eye_` calls, writes the whole's size into a piece. Here ranks take their
pieces of the whole.

What asks a DTensor whether any of it is true (`torch.autograd.detect_anomaly()` does, of gradients) is an operator that
DTensors do not have. Here every rank asks its piece, and all of them the others. `any` adds up the ranks that have one.

Norms over what is split are held in parts, which sums and further sums over them take for terms. Here a norm is put
together where it is made. Numbers print as numbers do. Of a pipeline, numbers are those of all stages.

`numpy()` and `tolist()` are not there. Here they are those of the whole tensor, for which every rank must ask.

`torch.save` writes the piece that a rank holds, and nothing of the others': a checkpoint that rank 0 alone writes lacks
the rest of the model. Here it says so; one rank alone saves what the plain model does.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from autopar._compat import dtensor_handlers, named_dims, replace_named_dims, without_torch_function
from autopar.attach.over_stages import pipe_among
from autopar.attach.parameters import giving_pieces
from autopar.attach.tensors import beside, by_piece, is_elsewhere, over_pieces, piece_as

ITEM = torch.ops.aten._local_scalar_dense.default
NORM = torch.ops.aten.linalg_vector_norm.default
TRUE = {torch.ops.aten._is_any_true.default: "max", torch.ops.aten._is_all_true.default: "min"}
ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow")
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")  # as `max` of Python does
CREATORS = ("eye", "ones", "zeros", "full", "arange", "linspace", "logspace")  # of what each rank can make
DATA: Any = torch.Tensor.data
GRAD: Any = torch.Tensor.grad


def mend_dtensors() -> None:
    """From now on DTensors of this process give the whole tensor's number, which every rank must ask for, and take
    what their `data` is set to.
    """
    dtensor_handlers[ITEM] = _item
    dtensor_handlers[NORM] = _norm
    for op in TRUE:
        dtensor_handlers.setdefault(op, _is_true)
    for op in _creators():
        dtensor_handlers.setdefault(op, _created)
    _mend_dims()
    DTensor.data = property(DATA.__get__, _set_data)  # type: ignore[assignment, method-assign]
    DTensor.grad = property(_get_grad, _set_grad, GRAD.__delete__)  # type: ignore[assignment, method-assign]
    DTensor.register_hook = _register_hook  # type: ignore[method-assign]
    DTensor.__format__ = _format  # type: ignore[method-assign]
    DTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    DTensor.__reduce_ex__ = _reduce  # type: ignore[method-assign]
    DTensor.numpy = _numpy  # type: ignore[assignment, method-assign]
    DTensor.tolist = _tolist  # type: ignore[method-assign]
    for name in (*ARITHMETIC, *COMPARED):
        setattr(DTensor, f"__{name}__", _arithmetic(getattr(torch.Tensor, f"__{name}__")))
    for name in ("add", "sub", "mul", "div"):
        setattr(DTensor, name, _arithmetic(getattr(torch.Tensor, name)))


def _item(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> int | float | complex | bool:
    (number,) = args
    return op(number.full_tensor())


def _is_true(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> torch.Tensor:
    (held,) = args
    mine = op(held.to_local())
    if is_elsewhere(held):
        return mine
    terms = [Replicate() if type(one) is Replicate else Partial(TRUE[op]) for one in held.placements]
    return DTensor.from_local(mine.int(), held.device_mesh, terms, run_check=False).full_tensor().bool()


def _creators() -> Iterator[Any]:
    """`torch.eye(..., out=value)` and the like."""
    for name in CREATORS:
        packet = getattr(torch.ops.aten, name)
        yield from (getattr(packet, overload) for overload in packet.overloads() if overload.endswith("out"))


def _created(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """What every rank can make whole, cut as `out` is."""
    held: DTensor = kwargs["out"]
    made = op(*args, out=held.to_local().new_empty(0))
    if made.shape != held.shape:
        raise RuntimeError(
            f"{op} would give a DTensor {[*held.shape]} the shape {[*made.shape]}, and the plan is for the one that it "
            "has; make a new tensor"
        )
    with torch.no_grad():
        held.copy_(piece_as(made, held))
    return held


@functools.cache
def _mend_dims() -> None:
    """An empty list of dims is all of them, but for `any`, where it is none."""
    named = named_dims()
    replace_named_dims(lambda dims, ndim: None if dims in ([], ()) else named(dims, ndim))
    for name in ("default", "dim", "dims"):
        dtensor_handlers.setdefault(getattr(torch.ops.aten.any, name), _any)


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Whether there are any; torch adds up the ranks that have one, and who sums that counts ranks."""
    given = dict(zip(("self", "dim", "keepdim"), args, strict=False)) | kwargs
    held, dims = given["self"], given.get("dim")
    wanted = range(held.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    is_one = held if held.dtype == torch.bool else held != 0
    return is_one.sum([*wanted], keepdim=given.get("keepdim", False)) != 0 if wanted else is_one


def _set_data(held: DTensor, value: torch.Tensor) -> None:
    """A value of the same shape in the layout of what held it; any other as it is."""
    with torch.no_grad():
        mesh, placements = held.device_mesh, held.placements
        if not isinstance(value, DTensor):
            value = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
        elif value.shape == held.shape and value.device_mesh == mesh and value.placements != placements:
            value = value.redistribute(placements=placements)
    DATA.__set__(held, value)
    held._local_tensor, held._spec = value._local_tensor.detach(), value._spec


def _get_grad(held: DTensor) -> torch.Tensor | None:
    with without_torch_function():  # asked of each parameter in each step
        return GRAD.__get__(held)


def _set_grad(held: DTensor, value: torch.Tensor | None) -> None:
    """A whole one that a script has made is laid out as what it is of."""
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == held.shape:
        value = piece_as(value, held)
    with without_torch_function():
        GRAD.__set__(held, value)


def _register_hook(held: DTensor, hook: Any) -> Any:
    """Of a gradient; what it gives whole is laid out as the gradient is."""
    return torch.Tensor.register_hook(held, giving_pieces(hook))


def _format(held: DTensor, spec: str) -> str:
    return format(held.item(), spec) if held.ndim == 0 else object.__format__(held, spec)


def _numpy(held: DTensor, *, force: bool = False) -> Any:
    return _there(held).numpy(force=force)


def _tolist(held: DTensor) -> Any:
    return _there(held).tolist()


def _there(held: DTensor) -> torch.Tensor:
    """The whole tensor, where the piece is: it may have been copied to the host, which sends nothing to other ranks."""
    piece, kind = held._local_tensor, held.device_mesh.device_type
    if piece.device.type == kind or piece.is_meta:
        return held.full_tensor()
    return over_pieces(piece.to(kind), held.shape, held.placements, held.device_mesh).full_tensor().to(piece.device)


def _deepcopy(held: DTensor, memo: dict[int, Any]) -> torch.Tensor:
    made = torch.Tensor.__deepcopy__(held, memo)
    if isinstance(held, torch.nn.Parameter):
        made.grad = None  # as copies of parameters have none
    return made


def _reduce(held: DTensor, protocol: Any) -> Any:
    if held.device_mesh.size() == 1 and not is_elsewhere(held) and pipe_among((held,)) is None:
        return held.full_tensor().__reduce_ex__(protocol)  # what the plain model saves
    warnings.warn(
        f"a tensor {list(held.shape)} is saved as the piece {list(held._local_tensor.shape)} that this rank holds; the "
        "file has nothing of the other ranks' pieces, and the plain model does not load it. Save "
        "parallel.full_state_dict(), called on all ranks, or use torch.distributed.checkpoint",
        stacklevel=2,
    )
    return torch.Tensor.__reduce_ex__(held, protocol)


def _arithmetic(operator: Any) -> Any:
    """An operator of a DTensor with something else."""

    @functools.wraps(operator)
    def method(held: DTensor, other: Any, **kwargs: Any) -> Any:
        plain = functools.partial(operator, **kwargs) if kwargs else operator
        if not isinstance(other, torch.Tensor):
            return plain(held, other)
        if not isinstance(other, DTensor):
            if by_piece.get() and held.ndim and torch.broadcast_shapes(held.shape, other.shape) == held.shape:
                return plain(held, beside(other, held))
            # a plain number may be another one on each rank, where each has rows of its own
            follows = torch.is_grad_enabled() and (held.requires_grad or other.requires_grad)
            is_whole = follows or not held.ndim or other.numel() > 1 or (held.numel() == 1 and other.ndim > 0)
            return plain(held.full_tensor() if is_whole else held, other)
        if held.ndim or other.ndim or pipe_among((held, other)) is None:
            return plain(held, other)
        return plain(held.full_tensor(), other.full_tensor())  # of any stages: on all ranks alike

    return method


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Of each rank's piece, then of those: |x|_p = (sum of |x_r|_p ** p) ** (1 / p), or the largest, or the least."""
    given = dict(zip(("x", "ord", "dim", "keepdim"), args, strict=False))
    x, p, dim, keepdim = given["x"], given.get("ord", 2), given.get("dim"), given.get("keepdim", False)
    if any(type(one) not in (Shard, Replicate) for one in x.placements):  # terms, and pieces in turns
        x = x.redistribute(placements=[one if type(one) is Shard else Replicate() for one in x.placements])
    dims = {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim or range(x.ndim))} if x.ndim else set[int]()
    together = {float("inf"): "max", float("-inf"): "min"}.get(p, "sum")
    placements, ends = list[Any](), list[Any]()
    for one in x.placements:
        if isinstance(one, Shard) and one.dim in dims:
            placements.append(Partial(together)), ends.append(Replicate())
        else:
            gone = 0 if keepdim or not isinstance(one, Shard) else sum(d < one.dim for d in dims)
            placements.append(Shard(one.dim - gone) if isinstance(one, Shard) else one), ends.append(placements[-1])
    local, rest = x.to_local(), (p, dim, keepdim)
    if is_elsewhere(x):
        return _as(local.new_zeros(0 if keepdim or len(dims) < x.ndim else ()), x, ends, keepdim, dims)
    if local.numel() == 0 and x.numel():
        empty = {"max": 0.0, "min": float("inf"), "sum": 0.0}[together]
        made = op(
            torch.zeros([max(size, 1) for size in local.shape], dtype=x.dtype, device=local.device), *rest, **kwargs
        )
        made = torch.full_like(made, empty)
    else:
        made = op(local, *rest, **kwargs)
    if placements == ends:
        return _as(made, x, placements, keepdim, dims)
    has_root = together == "sum" and p != 0
    found = _as(made.abs().pow(p) if has_root else made, x, placements, keepdim, dims).redistribute(placements=ends)
    return found.pow(1 / p) if has_root else found


def _as(local: torch.Tensor, x: DTensor, placements: list[Any], keepdim: bool, dims: set[int]) -> DTensor:
    """`local` as a piece of what is left of `x` without `dims`."""
    shape = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]
    return over_pieces(local, shape, placements, x.device_mesh)
