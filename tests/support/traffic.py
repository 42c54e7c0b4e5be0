"""What a plan's program really sends: every collective is counted as it runs, from the tensors it is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from autopar.emit import emit
from autopar.emit.simulate import Ran, run
from autopar.plan import Plan, read_once
from cost_models.steps import Comm, received_bytes

Traffic = dict[tuple[str, str], int]
NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}


class _Counting(fx.Interpreter):
    """Runs an fx module and adds up the bytes that one rank receives, written out apart from `cost_models`."""

    def __init__(self, module: fx.GraphModule, sizes: Mapping[str, tuple[str, int]], traffic: Counter[tuple[str, str]]):
        super().__init__(module)
        self.sizes, self.traffic = sizes, traffic

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet = getattr(target, "overloadpacket", None)
        if packet is not None and str(packet).startswith("_c10d_functional.") and "wait" not in str(packet):
            name = str(packet).removeprefix("_c10d_functional.")
            axis, ranks = self.sizes[next(arg for arg in reversed(args) if isinstance(arg, str))]
            sent: Tensor = args[0]
            nbytes = sent.numel() * sent.element_size()
            match name:
                case "all_gather_into_tensor":
                    received = (ranks - 1) * nbytes
                case "reduce_scatter_tensor" | "all_to_all_single":
                    assert nbytes % ranks == 0, "pieces of unequal size"
                    received = (ranks - 1) * (nbytes // ranks)
                case "all_reduce":
                    received = 2 * ((ranks - 1) * nbytes // ranks)
                case _:
                    raise AssertionError(f"a program has no {name}")
            self.traffic[NAMES[name], axis] += received
        return super().call_function(target, args, kwargs)


def counted(plan: Plan, device_mesh: DeviceMesh, values: Mapping[str, Tensor]) -> tuple[Ran, Traffic]:
    """Run a plan and report (collective, axis) -> bytes received by one rank."""
    groups = {axis: device_mesh.get_group(axis).group_name for axis in plan.mesh.names}
    sizes = {group: (axis, plan.mesh.size(axis)) for axis, group in groups.items()}
    program, traffic = emit(plan, groups), Counter[tuple[str, str]]()
    forward: Any = _Counting(program.forward, sizes, traffic)
    backward: Any = program.backward and _Counting(program.backward, sizes, traffic)
    torch.manual_seed(0)
    ran = run(plan, device_mesh, values, replace(program, forward=forward, backward=backward))
    return ran, {key: nbytes for key, nbytes in sorted(traffic.items()) if nbytes}


def comms(plan: Plan, phase: str) -> list[Comm]:
    """The plan's collectives in the nodes of one phase and the results that leave it."""
    found: list[Any] = []
    for node in plan.graph.nodes:
        if node.phase == phase:
            choice = plan.choices[node.name]
            changes = [change for read in read_once(node, choice) for change in read]
            found += [step for change in changes for step in change.steps(plan.mesh.size(change.axis))]
            found += choice.steps
    for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
        if delivery is not None and (result.kind == "gradient") == (phase == "backward"):
            found += [s for change in delivery.changes for s in change.steps(plan.mesh.size(change.axis))]
    return [step for step in found if isinstance(step, Comm) and step.ranks > 1]


def received(found: list[Comm]) -> int:
    return sum(received_bytes(comm) for comm in found)
