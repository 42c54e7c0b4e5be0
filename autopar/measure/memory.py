"""What a program really holds: the bytes of all live tensor storages, followed operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import TorchDispatchMode, pytree
from autopar.emit import moves
from autopar.measure.watch import collective_of

assert moves  # imported for the operators that it registers
STORE, FETCH = torch.ops.autopar.store.default, torch.ops.autopar.fetch.default
ALL_REDUCE_IN_PLACE = torch.ops._c10d_functional.all_reduce_.default


class LiveBytes(TorchDispatchMode):
    """Inside the context, every storage that an operator returns is counted until it is freed.

    `current`, `peak`: bytes of the device; `peak_after`: the operator after which the peak was first reached.
    `host_current`, `host_peak`: of the host. `watch` counts tensors that existed before. Storages are counted once,
    whatever the number of views of them.

    Where the device is a CPU, what lies on the host is what `autopar.store` returns, what is watched as such, and what
    operators make of those; `autopar.fetch` brings it back.

    Functional collectives run at once, on a copy that is not counted: gloo's threads let go of what they sent and
    received a little after they have said that it is there, in one run and not in another. What is sent is counted
    until the program waits for the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.host_current = 0
        self.peak = self.host_peak = 0
        self.peak_after = ""
        self._sent: dict[int, Tensor] = {}  # storage of a result that is not waited for -> what was sent
        self._known: dict[int, tuple[weakref.ref[Any], bool]] = {}  # storage -> whether it lies on the host

    def watch(self, tree: Any, *, on_host: bool = False) -> None:
        """Count the storages of all tensors in `tree`."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._count(_local(leaf), "before", on_host)

    def _count(self, tensor: Tensor, after: str, on_host: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._known.get(key)
        if held is not None and held[0]() is storage:
            return
        nbytes = storage.nbytes()

        def gone(_: Any, key: int = key, nbytes: int = nbytes) -> None:
            self._add(-nbytes, on_host, "")
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone), on_host
        self._add(nbytes, on_host, after)

    def _add(self, nbytes: int, on_host: bool, after: str) -> None:
        if on_host:
            self.host_current += nbytes
            self.host_peak = max(self.host_peak, self.host_current)
            return
        self.current += nbytes
        if self.current > self.peak:
            self.peak, self.peak_after = self.current, after

    def _is_on_host(self, tree: Any) -> bool:
        tensors = [_local(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        return any(self._known.get(tensor.untyped_storage()._cdata, (None, False))[1] for tensor in tensors)

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_host = func is STORE or (func is not FETCH and self._is_on_host((args, kwargs)))
        match collective_of(func, args, {}):
            case None:
                result = func(*args, **(kwargs or {}))
            case "wait", _:
                result = args[0]
                self._sent.pop(args[0].untyped_storage()._cdata, None)
            case _:
                result = self._exchanged(func, args, kwargs or {})
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(_local(leaf), str(func), on_host)
        return result

    def _exchanged(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The result of a collective, which nobody else holds any more."""
        sent: Tensor = args[0]
        made = torch.ops._c10d_functional.wait_tensor(func(sent.clone(), *args[1:], **kwargs))
        if func is ALL_REDUCE_IN_PLACE:
            return sent.copy_(made)
        result = made.clone()
        self._sent[result.untyped_storage()._cdata] = sent
        return result


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def one_phase(peaks: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Peaks by phase; where forward and backward alternate, as they do in several micro-batches, both have one."""
    if rounds == 1:
        return {**peaks}
    most = max(peaks["forward"], peaks["backward"])
    return {**peaks, "forward": most, "backward": most}
