"""Looking on while a program runs: how long each of its operators takes, and what its collectives move."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar._compat import TorchDispatchMode, cuda_sleep
from autopar.emit import Emitted
from autopar.ir.mesh import Mesh
from autopar.measure.report import Moved
from cost_models.steps import COLLECTIVES, Comm, received_bytes

NAMESPACE = "_c10d_functional"
SENDS = {torch.ops.autopar.shift.default: "shift", torch.ops.autopar.mirror.default: "mirror"}  # call one of those
KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
HEAD_START = 100_000_000  # cycles, about 50 ms, in which the host launches the next
AT_ONCE = 200  # operators: a device queues about 1,024 kernels and events, and then the host waits for it
WAITING = ("waiting", "")  # for other ranks, before a collective


def now(device: torch.device) -> float:
    """The wall clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def collective_of(target: Any, args: tuple[Any, ...], axis_of: Mapping[str, str]) -> Moved | None:
    """(kind, axis) of a functional collective or a send, ("wait", "") of the wait for one, None of all else."""
    if target in SENDS:
        return SENDS[target], axis_of.get(str(args[-1]), "an unknown group")
    if getattr(target, "namespace", "") != NAMESPACE:
        return None
    name = str(target.name()).removeprefix(f"{NAMESPACE}::").partition(".")[0]
    if name == "wait_tensor":
        return "wait", ""
    return KINDS.get(name) or name, axis_of.get(str(args[-1]), "an unknown group")


def emitted_calls(program: Emitted, axis_of: Mapping[str, str], rounds: int = 1) -> Counter[Moved]:
    """How often the program calls each collective in a step of so many rounds."""
    found: Counter[Moved] = Counter()
    for module in (program.forward, program.backward):
        for node in module.graph.nodes if module is not None else ():
            kind = collective_of(node.target, node.args, axis_of) if node.op == "call_function" else None
            if kind is not None and kind[0] != "wait":
                found[kind] += rounds
    return found


class Stopwatch(fx.Interpreter):
    """One part of a program, run node by node. Adds to `spent`, under `phase` or the collective, what each node takes.

    Ranks meet before each collective, so that waiting for a slow one does not count as communication. A CUDA device
    sleeps before every so many: looked on at, the host is slow to launch, and no kernel shall be waited for.
    """

    def __init__(
        self, module: fx.GraphModule, phase: str, axis_of: Mapping[str, str], device: torch.device,
        spent: dict[str | Moved, float],
    ) -> None:  # fmt: skip
        super().__init__(module)
        self.phase, self.axis_of, self.device, self.spent = phase, axis_of, device, spent
        self.launched: dict[int, Moved] = {}  # id of a result that is under way -> its collective
        self.events: list[tuple[str | Moved, torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, *args: Any) -> Any:
        made = self.run(*args)
        self.env.clear()  # or what the program gave stays for as long as its watch
        if self.events:  # the device is waited for once, not behind each node
            self.events[-1][2].synchronize()
        for key, begin, end in self.events:
            self.spent[key] = self.spent.get(key, 0.0) + begin.elapsed_time(end) / 1e3
        self.events.clear()
        return made

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = collective_of(target, args, self.axis_of)
        if kind is not None and kind[0] != "wait":
            self._spent(WAITING, dist.barrier)
        key: str | Moved = self.phase
        if kind is not None:
            key = self.launched.pop(id(args[0])) if kind[0] == "wait" else kind
        made = self._spent(key, lambda: super(Stopwatch, self).call_function(target, args, kwargs))
        if kind is not None and kind[0] != "wait":
            self.launched[id(made)] = kind
        return made

    def _spent(self, key: str | Moved, work: Callable[[], Any]) -> Any:
        if self.device.type == "cuda":
            if len(self.events) % AT_ONCE == 0:
                torch.cuda.synchronize(self.device)
                cuda_sleep(HEAD_START)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            made = work()
            end.record()
            self.events.append((key, begin, end))
            return made
        began = time.perf_counter()
        made = work()
        self.spent[key] = self.spent.get(key, 0.0) + time.perf_counter() - began
        return made


class Traffic(TorchDispatchMode):
    """Counts the functional collectives inside the context, whoever calls them, and the bytes this rank receives."""

    def __init__(self, mesh: Mesh, axis_of: Mapping[str, str]) -> None:
        super().__init__()
        self.mesh, self.axis_of = mesh, axis_of
        self.calls: Counter[Moved] = Counter()
        self.nbytes: Counter[Moved] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = collective_of(func, args, self.axis_of)
        if kind is not None and kind[0] != "wait":
            self.calls[kind] += 1
            self.nbytes[kind] += self._received(kind, args[0])
        return func(*args, **(kwargs or {}))

    def _received(self, kind: Moved, given: Tensor) -> int:
        collective, axis = kind
        form = COLLECTIVES.get(collective)
        if form is None or axis not in self.mesh.groups:
            return 0  # nothing that a plan has: the count alone shows it
        ranks = self.mesh.size(axis)
        nbytes = given.numel() * given.element_size()
        payload = ranks * nbytes if form.gathers else nbytes
        return received_bytes(Comm(collective, axis, ranks, payload))
