"""What the machine is, and that a small program of every family runs on it: each operator has a kernel there."""

from __future__ import annotations

import contextlib
import copy
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator

import torch

import autopar
from autopar.emit import moves
from autopar.ir.mesh import Mesh
from autopar.optim import Streamed
from benchmarks.gpu.stage import Row, Setting, Wrong, exact_products, loss_of, moved, near
from tests.support.families import FAMILIES, family
from tests.support.residence import ResidenceSampler

LOSS, GRADIENT = 1e-5, 2e-4  # of float32 against float64
COPIED = 2**28  # bytes


def versions(setting: Setting) -> Row:
    found: Row = {
        "Python": platform.python_version(), "torch": torch.__version__, "processors": os.cpu_count(),
        "device": platform.machine(),
    }  # fmt: skip
    if setting.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": f"{torch.cuda.device_count()} x {properties.name}", "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count, "capability": f"{properties.major}.{properties.minor}",
            "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version(), "driver": driver(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }  # fmt: skip
    return found


def driver() -> str:
    """The driver's version, as nvidia-smi says it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[0]
    return "not told"


def device(setting: Setting) -> Iterator[Row]:
    for name, value in versions(setting).items():
        yield {"what": name, "is": str(value)}
    mesh = autopar.init_mesh(setting.device)
    if setting.is_cuda:
        chosen, wanted = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", "0"))
        if chosen != wanted:
            raise Wrong(f"init_mesh chose device {chosen}, LOCAL_RANK says {wanted}")
        yield from _copies()
    exact_products()
    for name in FAMILIES:
        yield _trained(name, setting, mesh)


def _copies() -> Iterator[Row]:
    """Memory that is pinned where the machine lets us, and how fast copies are from both kinds."""
    x = torch.randn(COPIED // 4, device="cuda")
    made = moves.host_like(x)
    if moves.can_pin() and not made.is_pinned():
        raise Wrong("memory can be pinned, but what a value is stored to is not")
    for kind, host in (("pinned" if made.is_pinned() else "not pinned", made), ("pageable", torch.empty(COPIED // 4))):
        for way, call in (("to the host", lambda h=host: h.copy_(x)), ("to the device", lambda h=host: x.copy_(h))):
            yield {"copy": f"{kind}, {way}", "GB/s": round(COPIED / _seconds(call) / 1e9, 1)}


def _seconds(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 3


def _trained(name: str, setting: Setting, mesh: object) -> Row:
    """One step of a plan with values run again, offloaded and streamed, against float64 on the CPU."""
    case = family(name)
    plan = ResidenceSampler(case.graph, Mesh(("data",), (1,))).draw(5)
    inputs = moved(case.inputs, setting.device)
    parallel = autopar.compile(copy.deepcopy(case.model), mesh, plan=plan, example_kwargs=inputs)  # type: ignore[arg-type]
    loss = loss_of(parallel(**inputs))
    loss.backward()
    wide = case.wide_reference
    wanted = next(value for value in wide.outputs.values() if value.ndim == 0)
    row: Row = {"family": name, "operators": len(plan.graph.nodes)}
    row["loss off"] = near(loss.double(), wanted, LOSS, f"{name}: loss")
    sizes = [g.abs().max().item() for g in wide.gradients.values() if g is not None and g.numel()]
    row["gradient off"] = 0.0
    for parameter, gradient in wide.gradients.items():
        ours = parallel.get_parameter(parameter).grad
        if (ours is None) != (gradient is None):
            raise Wrong(f"{name}: the gradient of {parameter} is there in one of the two alone")
        if ours is not None and gradient is not None:
            scale = max(1.0, 0.01 * max(sizes) / (gradient.abs().max().item() or 1e-300))
            what = f"{name}: gradient of {parameter}"
            found = near(ours.to(gradient.dtype), gradient, GRADIENT * scale, what)
            row["gradient off"] = max(row["gradient off"], found / scale)
    Streamed(torch.optim.AdamW(parallel.parameters()), parallel).step()
    moves.settle()
    return row
