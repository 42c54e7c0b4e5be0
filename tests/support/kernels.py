"""Which devices torch has a kernel for, by its own table of operators, which lies in the wheel."""

from __future__ import annotations

import importlib.resources
from functools import cache
from typing import Any

import torch
import yaml

from autopar._compat import TorchDispatchMode

OPERATOR = type(torch.ops.aten.mm.default)
COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


@cache
def _table() -> dict[str, dict[str, Any]]:
    """`mm` or `sum.dim_IntList` -> its entry."""
    text = importlib.resources.files("torchgen").joinpath("packaged/ATen/native/native_functions.yaml").read_text()
    entries: list[dict[str, Any]] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = {str(entry["func"]).partition("(")[0]: entry for entry in entries}
    for entry in entries:  # made by a script from another one: a functional or an out= form, which calls that
        for name in str(entry.get("autogen", "")).split(", "):
            if name:
                found.setdefault(name, entry | {"dispatch": entry.get("dispatch", {})})
    return found


def packets() -> set[str]:
    """The names of all operators of torch's own, which `dir(torch.ops.aten)` has once somebody has called them."""
    return {name.partition(".")[0] for name in _table()}


def has_kernel(op: Any, device: str) -> bool:
    """Whether `op` runs on "CPU" or "CUDA". Operators of our own are made of torch's."""
    if op.namespace != "aten":
        return True
    name = op._schema.name.removeprefix("aten::")
    entry = _table().get(f"{name}.{op._overloadname}" if op._overloadname != "default" else name)
    if entry is None:
        raise KeyError(f"torch's table of operators has no {op}")
    if "structured_delegate" in entry:
        entry = _table()[entry["structured_delegate"]]
    if "ufunc_inner_loop" in entry:  # one loop, written out for both
        return True
    dispatch: dict[str, str] = entry.get("dispatch", {})
    keys = {key.strip() for group in dispatch for key in group.split(",")}
    return not dispatch or bool(keys & {device, *COMPOSITE})


class Called(TorchDispatchMode):
    """Notes every operator that is called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))
