"""Several ranks on one GPU: a backend of torch.distributed, "staged", whose collectives go through the host.

    staged.register()
    dist.init_process_group("staged", ...)      # every rank has set the same device

NCCL refuses two ranks on one device. Here a collective copies what it is given to the host, gloo does it there, and
`wait` copies the result back. Until then floating-point results are NaN: whoever reads one before it is waited for
shows it in his numbers. The host waits where it launches, so one collective is under way at a time, in the order of the
program; what is shown is that order and those numbers, and nothing about speed.

A group is of Python from end to end, as torch has it for a backend that is a ProcessGroup (its trampolines take the
names of torch 2.11 in later versions, too; what torch calls from Python has a new name since 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"
LOG: dict[str, list[str]] = {}  # group -> what this rank has launched in it: collective, types of the tensors
ONE_SIDED = ("gather", "scatter", "send", "recv")  # what they write differs between ranks


def register() -> None:
    """Make the backend known to torch, once."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Staged:
    return Staged(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


class Late(dist.Work):
    """A collective whose results arrive when it is waited for."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        super().__init__()
        self._deliver: Callable[[], None] | None = deliver

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._deliver is not None:
            self._deliver()
            self._deliver = None
        return True

    def is_completed(self) -> bool:
        return self._deliver is None

    def get_future(self) -> Any:
        self.wait()
        future = torch.futures.Future()
        future.set_result(None)
        return future


class Staged(dist.ProcessGroup):
    """`inner`: gloo's group of the same ranks."""

    def __init__(self, rank: int, size: int, inner: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._inner = rank, size, inner
        self._name = self._about = ""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # torch asks in C++ for what it has told in C++; a group of Python keeps it itself
    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._about = text

    def getGroupDesc(self) -> str:
        return self._about

    @property
    def group_name(self) -> Any:
        return self._name

    def _launch(self, call: Callable[..., Any], written: Sequence[Tensor], *arguments: Any) -> Late:
        """Call gloo with copies of the tensors among the arguments; `written`: those that it writes to."""
        copies: dict[int, Tensor] = {}
        told = () if call.__name__ in ONE_SIDED else written
        LOG.setdefault(self._name, []).append(" ".join([call.__name__, *(f"{list(t.shape)} {t.dtype}" for t in told)]))

        def on_host(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in copies:
                    copies[id(value)] = value.detach().to("cpu", copy=True)
                return copies[id(value)]
            return [on_host(one) for one in value] if isinstance(value, list) else value

        work = call(*(on_host(value) for value in arguments))
        if work is not None:
            work.wait()
        with torch.no_grad():
            for tensor in written:
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(torch.nan)

        def deliver() -> None:
            with torch.no_grad():
                for tensor in written:
                    tensor.copy_(copies[id(tensor)])

        return Late(deliver)

    def _each(self, call: Callable[..., Any], outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Late:
        works = [self._launch(call, [out], out, given, *options) for out, given in zip(outputs, inputs, strict=True)]

        def deliver() -> None:
            for work in works:
                work.wait()

        return Late(deliver)

    # --- sums and copies to all -----------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], *options: Any) -> Late:
        return self._launch(self._inner.allreduce, tensors, tensors, *options)

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> Late:
        return self._launch(self._inner.allreduce_coalesced, tensors, tensors, *options)

    def reduce(self, tensors: list[Tensor], *options: Any) -> Late:
        return self._launch(self._inner.reduce, tensors, tensors, *options)

    def broadcast(self, tensors: list[Tensor], *options: Any) -> Late:
        return self._launch(self._inner.broadcast, tensors, tensors, *options)

    def barrier(self, opts: Any = None) -> Late:
        return self._launch(self._inner.barrier, [])

    # --- gathered, scattered, exchanged ---------------------------------------------------------------------------

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any) -> Late:
        return self._launch(self._inner.allgather, [*chain(*outputs)], outputs, inputs, *options)

    def _allgather_base(self, output: Tensor, given: Tensor, *options: Any) -> Late:
        return self._launch(_either(self._inner, "_allgather_base", "all_gather_single"), [output], output, given)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Late:
        return self._each(_either(self._inner, "_allgather_base", "all_gather_single"), outputs, inputs)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, *options: Any) -> Late:
        call = _either(self._inner, "_reduce_scatter_base", "reduce_scatter_single")
        return self._launch(call, [output], output, given, *options)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Late:
        return self._each(
            _either(self._inner, "_reduce_scatter_base", "reduce_scatter_single"), outputs, inputs, *options
        )

    def alltoall_base(self, output: Tensor, given: Tensor, received: list[int], sent: list[int], *options: Any) -> Late:
        call = _either(self._inner, "alltoall_base", "all_to_all_single")
        return self._launch(call, [output], output, given, list(received), list(sent))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any) -> Late:
        return self._launch(self._inner.gather, [*chain(*outputs)], outputs, inputs, *options)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], *options: Any) -> Late:
        return self._launch(self._inner.scatter, outputs, outputs, inputs, *options)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Late:
        return self._launch(self._inner.send, [], tensors, to, tag)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> Late:
        return self._launch(self._inner.recv, tensors, tensors, of, tag)

    # as torch calls them from Python since 2.13
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


def _either(inner: Any, *names: str) -> Callable[..., Any]:
    """The method under the first of its names that this torch has."""
    return next(getattr(inner, name) for name in names if hasattr(inner, name))
