"""Parts of a DTensor that a script writes to: `weight[0] = 0`, `weight[:4].mul_(2)`, `init.ones_(bias[4:8])`.

A part of what is split may lie on several ranks. torch (2.11 to 2.13) then makes a copy of it, and what is written
there is lost without a word. From the first compile on, what is written to `tensor[index]` reaches the pieces that
ranks hold, and writing to a copy that was made otherwise (`chunk`, `view`) is refused. And a piece that is written to
is known as changed to whoever saved it for a backward.

Beside a plain tensor torch refuses both. Here a plain whole one is cut where it changes a DTensor (`grad.mul_(mask)`),
and what a plain index reads (`weight[keep]`) is plain, of the whole, which all ranks ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._compat import pytree
from autopar.attach.foreach import terms_in
from autopar.attach.tensors import beside, is_elsewhere, piece_as, whole_within

GET_ITEM: Any = torch.Tensor.__getitem__
SET_ITEM: Any = torch.Tensor.__setitem__
NO_VALUES = ("requires_grad_", "share_memory_", "detach_", "rename_")  # change no element
# Operators on elements, which take whole tensors beside.
ELEMENTWISE = {"add_", "sub_", "mul_", "div_", "copy_", "lerp_", "masked_fill_", "addcmul_", "addcdiv_",
               "__iadd__", "__isub__", "__imul__", "__itruediv__"}  # fmt: skip
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
PART = "_autopar_part"  # of a copy: (tensor, index) that it is of


@functools.cache
def mend_edits() -> None:
    """From now on parts of DTensors of this process are written to, or that is refused."""
    DTensor.__getitem__ = _get_item  # type: ignore[method-assign]
    DTensor.__setitem__ = _set_item  # type: ignore[method-assign]
    for name in _in_place():
        setattr(DTensor, name, _writing_through(name))
    DTensor.masked_fill = _masked_fill  # type: ignore[method-assign]


def _in_place() -> Iterator[str]:
    for name in dir(torch.Tensor):
        if name.endswith("_") and not name.startswith("_") and name not in NO_VALUES:
            yield name
    yield from (f"__i{name}__" for name in OPERATORS if hasattr(torch.Tensor, f"__i{name}__"))


def _made_of(held: DTensor, name: str, args: tuple[Any, ...]) -> Any:
    """`penalty += loss`: of a number that was made of parameters and a plain one, which is their sum, and plain;
    None where it is something else.
    """
    is_number = torch.is_grad_enabled() and not held.ndim and not held.is_leaf and name.startswith("__i")
    if is_number and _is_plain(args[0]):
        return getattr(held, f"__{name[3:]}")(*args)
    return None


def _get_item(held: DTensor, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, (list, range, np.ndarray)) or (_is_plain(part) and part.ndim) for part in parts):
        return GET_ITEM(held.full_tensor(), index)
    made = GET_ITEM(held, index)
    if isinstance(made, DTensor) and made._is_view() and (hasattr(held, PART) or _lies(made) != _lies(held)):
        setattr(made, PART, (held, index))
    return made


def _set_item(held: DTensor, index: Any, value: Any) -> None:
    """All ranks that have a piece have to call it: the whole is put together, written to, and cut again."""
    follows = torch.is_grad_enabled() and (
        held.requires_grad or (isinstance(value, torch.Tensor) and value.requires_grad)
    )
    if follows or terms_in(held):
        parts = index if isinstance(index, tuple) else (index,)
        SET_ITEM(held, tuple(one for part in parts for one in _on_all_ranks(part, held)), value)
        return
    part = _copied_from(held)
    if is_elsewhere(held):
        return
    with torch.no_grad():
        whole = _whole(held).clone()
        SET_ITEM(whole, pytree.tree_map(_whole, index), _whole(value))
        torch.Tensor.copy_(held, piece_as(whole, held))
        _count_change(held)
    if part is not None:
        _set_item(*part, held)


def _on_all_ranks(part: Any, held: DTensor) -> list[Any]:
    """A part of an index as torch takes it beside a DTensor: for a mask its places, which are the same on all ranks."""
    if not _is_plain(part) or not part.ndim:
        return [part]
    places = part.nonzero(as_tuple=True) if part.dtype == torch.bool else [part]
    mesh = held.device_mesh
    return [DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim, run_check=False) for one in places]


def _whole(value: Any) -> Any:
    return whole_within(value) if isinstance(value, DTensor) else value


def _writing_through(name: str) -> Any:
    plain: Any = getattr(torch.Tensor, name)  # which calls some by other names than it has them

    @functools.wraps(plain)
    def method(held: DTensor, *args: Any, **kwargs: Any) -> Any:
        if (number := _made_of(held, name, args)) is not None:
            return number
        part = _copied_from(held) if held._is_view() else None
        if name in ELEMENTWISE:
            args = tuple(_cut(value, held) for value in args)
            kwargs = {key: _cut(value, held) for key, value in kwargs.items()}
        made = plain(held, *args, **kwargs)
        _count_change(held)
        if part is not None:
            _set_item(*part, held)
        return made

    return method


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _cut(value: Any, held: DTensor) -> Any:
    """A plain tensor as the DTensor that it is an operand of lies; a number, and what gradients go to, as it is."""
    if not _is_plain(value) or terms_in(held):
        return value
    return value if torch.is_grad_enabled() and value.requires_grad else beside(value, held)


def _masked_fill(held: DTensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.Tensor.masked_fill(held, _cut(mask, held), value)


def _count_change(held: DTensor) -> None:
    """torch counts changes of the wrapper, and not of its piece."""
    if not held._local_tensor.is_inference():
        increment_version(held._local_tensor)


def _copied_from(held: DTensor) -> tuple[DTensor, Any] | None:
    """Where what is written to it has to be written, too: nowhere, unless it is a copy."""
    base = held._base
    if not isinstance(base, DTensor) or is_elsewhere(held) or _lies(base) == _lies(held):
        return None
    if (part := getattr(held, PART, None)) is not None:
        return part
    raise RuntimeError(
        f"a part {list(held.shape)} of a tensor {list(base.shape)} that ranks hold in pieces is written to, and it is "
        "a copy, put together of theirs: nothing of that would be kept. Write to tensor[index], on all ranks, or to "
        "the whole tensor; or to a .clone() where nothing is to be kept"
    )


def _lies(value: DTensor) -> StorageWeakRef:
    return StorageWeakRef(value._local_tensor.untyped_storage())
