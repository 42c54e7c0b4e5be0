"""Arguments that forward changes in place (`labels[labels == pad] = -100`, `x += self.position`): a program is given
their values and writes to none. So forward is traced with copies of these, gives the copies beside its outputs, and
each call writes their values to what the caller has given.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.calls import flatten_inputs

OF_LEAVES = "requires grad is being used in an in-place"  # torch, of one of which a gradient is wanted


class ArgumentsChanged(Exception):
    """Forward changes these arguments, and was traced with copies of others."""

    def __init__(self, paths: Set[str]) -> None:
        super().__init__(*sorted(paths))
        self.paths = frozenset(paths)


@dataclass(frozen=True)
class Copied:
    """The arguments of one forward, by path; those of `paths` are copies. `had`: the version, shape and stride
    of each as forward finds it.
    """

    tensors: Mapping[str, Tensor]
    had: Mapping[str, tuple[Any, ...]]
    paths: Set[str]

    def changed(self) -> dict[str, Tensor]:
        """The copies, behind forward. Raises ArgumentsChanged where it has changed other arguments."""
        for path, one in self.tensors.items():
            _, *lay = self.had[path]
            if lay != [one.shape, one.stride()]:
                raise TraceError(
                    f"forward changes in place how its argument {path} lies (unsqueeze_, t_, resize_), from "
                    f"{list(lay[0])} to {list(one.shape)}, and a program does not: have it make a view "
                    "(unsqueeze, t), or clone the argument first"
                )
        now = self.written()
        if now != self.paths:
            raise ArgumentsChanged(now)
        return {path: self.tensors[path] for path in sorted(now)}

    def written(self) -> set[str]:
        """The arguments, by path, that were written to until now."""
        return {path for path, one in self.tensors.items() if one._version != self.had[path][0]}

    def fails(self, error: Exception) -> None:
        """Forward raises this. Raises ArgumentsChanged where it would not with copies of more."""
        more = {path for path, one in self.tensors.items() if one.requires_grad} - self.paths
        if OF_LEAVES in str(error) and more:
            raise ArgumentsChanged(self.paths | more) from error


def with_copies(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], paths: Set[str]
) -> tuple[tuple[Any, ...], dict[str, Any], Copied]:
    """The same arguments, with copies of those at `paths`, in containers of their own."""
    leaves, spec = flatten_inputs(args, kwargs)
    if paths:
        leaves = [(path, leaf.clone() if path in paths else leaf) for path, leaf in leaves]
        args, kwargs = pytree.tree_unflatten([leaf for _, leaf in leaves], spec)
    tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    had = {path: (one._version, one.shape, one.stride()) for path, one in tensors.items()}
    return args, {**kwargs}, Copied(tensors, had, paths)
