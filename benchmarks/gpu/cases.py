"""Small models trained on several ranks side by side with the plain ones: numbers, bytes, order, peak, checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import autopar
from autopar.ir.mesh import Mesh
from autopar.measure.twin import traced
from autopar.measure.watch import Traffic
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.search import Request, search
from benchmarks.gpu import staged
from benchmarks.gpu.stage import ROUNDED, Row, Wrong, gradients_off, half_gradients_off, loss_of, moved, near, same
from benchmarks.models import MODELS
from cost_models.hardware import Hardware
from tests.support.families import family
from tests.support.plans import PlanSampler
from tests.support.residence import ResidenceSampler

C10D = torch.ops._c10d_functional
STEPS = 3
LOSS, GRADIENT, STATE = 1e-5, 1e-4, 1e-4  # of float32: sums of some hundred terms in another order
EPS = 1e-3  # of AdamW: gradients that are zero but for rounding shall not be divided by their own size


@dataclass(frozen=True)
class Case:
    """`plan`: a policy, "searched", "random N": of plans with offload, residence on the host and every layout, or
    "loop PATTERN": one with that loop in it.

    `precision`: float32 or bfloat16. `checkpoint`: save, spoil and load the parameters at the end. `backend`: of
    `autopar.compile`.
    """

    model: str
    sizes: tuple[int, ...]
    plan: str
    precision: str = "float32"
    checkpoint: bool = False
    backend: str = "eager"

    def __str__(self) -> str:
        told = [self.model, "x".join(map(str, self.sizes)), self.plan]
        told += [self.precision] * (self.precision != "float32") + [self.backend] * (self.backend != "eager")
        return ", ".join(told)


def model_of(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the benchmarks, "bench-gpt2", or of the tests, with its inputs: the same on every rank."""
    if name.startswith("bench-"):
        torch.manual_seed(0)
        model, inputs, _ = MODELS[name.removeprefix("bench-")]()
        return model.train(), inputs
    case = family(name)
    return copy.deepcopy(case.model), dict(case.inputs)


def plan_of(case: Case, mesh: Mesh, model: nn.Module, inputs: dict[str, Any], hardware: Hardware) -> Plan | None:
    """None: autopar.compile searches for itself."""
    if case.plan == "searched" or case.precision != "float32":
        return None
    kind, _, which = case.plan.partition(" ")
    if kind == "loop":
        return PlanSampler(family(case.model).graph, mesh, hardware).looping(which)
    if kind != "random":
        return search(traced(model, (), inputs), mesh, hardware, Request(policy=case.plan))
    drawn = ResidenceSampler(family(case.model).graph, mesh).draw(int(which))
    return replace(drawn, prefetch=1, bucket_bytes=3000)


def trained(device: str, folder: Path, **given: Any) -> Iterator[Row]:
    """The row of a case, as fields of it; every rank calls this."""
    hardware = Hardware.load("h100-sxm" if device == "cuda" else "cpu-gloo")
    yield run(Case(**given | {"sizes": tuple(given["sizes"])}), device, hardware, folder)


def collectives(device: str, folder: Path) -> Iterator[Row]:
    """Those that programs call, on numbers that say whose they are; nothing is there before it is waited for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = autopar.init_mesh(device, data=ranks).get_group("data").group_name
    mine = torch.arange(4 * ranks, dtype=torch.float32, device=device) + 100 * rank
    every = [torch.arange(4 * ranks, dtype=torch.float32) + 100 * other for other in range(ranks)]
    splits, here = [4] * ranks, slice(4 * rank, 4 * rank + 4)
    wanted = {
        "all_reduce": sum(every),
        "all_reduce_": sum(every),
        "all_gather_into_tensor": torch.cat(every),
        "reduce_scatter_tensor": sum(every)[here],
        "all_to_all_single": torch.cat([other[here] for other in every]),
        "broadcast": every[0],
    }
    launched = {
        "all_reduce": C10D.all_reduce(mine, "sum", group),
        "all_reduce_": C10D.all_reduce_(mine.clone(), "sum", group),
        "all_gather_into_tensor": C10D.all_gather_into_tensor(mine, ranks, group),
        "reduce_scatter_tensor": C10D.reduce_scatter_tensor(mine, "sum", ranks, group),
        "all_to_all_single": C10D.all_to_all_single(mine, splits, splits, group),
        "broadcast": C10D.broadcast(mine, 0, group),
    }
    if dist.get_backend() == staged.NAME and not all(value.isnan().all() for value in launched.values()):
        raise Wrong("a result of the backend is there before it is waited for")
    for name in reversed(launched):  # in any order
        same(C10D.wait_tensor(launched[name]), wanted[name], name)
    yield {"collectives": ", ".join(launched), "ranks": ranks}


def run(case: Case, device: str, hardware: Hardware, folder: Path) -> Row:
    names = ("data", "tensor")[: len(case.sizes)]
    device_mesh = autopar.init_mesh(device, **dict(zip(names, case.sizes, strict=True)))
    model, inputs = model_of(case.model)
    plan = plan_of(case, Mesh(names, case.sizes), model, inputs, hardware)
    half = case.precision == "bfloat16"
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else None
    on_host, inputs = inputs, moved(inputs, device)
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    parallel = autopar.compile(
        copy.deepcopy(model), device_mesh, plan=plan, hardware=hardware if plan is None else None,
        precision=precision, example_kwargs=inputs, backend=case.backend,
    )  # fmt: skip
    plan = parallel.plan
    axis_of = {name: axis for axis, name in parallel._autopar.groups.items()}
    ours = Streamed(torch.optim.AdamW(parallel.parameters(), 1e-3, eps=EPS), parallel)
    theirs = torch.optim.AdamW(model.parameters(), 1e-3, eps=EPS)  # on the CPU: the device holds what is ours alone
    row: Row = {"program": str(case), "loss off": 0.0, "gradient off": 0.0, "received": ""}
    row |= {"held": "-", "predicted": f"{plan.peak_bytes['hbm']} B"}
    for step in range(STEPS):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with Traffic(plan.mesh, axis_of) as traffic:
            loss = loss_of(parallel(**inputs))
            loss.backward()
        if step == 1 and case.backend == "eager":  # compiled code has an all-to-all in the place of a shift
            row["received"] = _same_bytes(traffic, plan, case)
        if device == "cuda":
            row["held"] = f"{torch.cuda.max_memory_allocated() - held} B"
        wanted = loss_of(model(**on_host))
        wanted.backward()
        allowed = ROUNDED if half else LOSS
        row["loss off"] = max(row["loss off"], near(loss.float(), wanted, allowed, f"{case}: loss of step {step}"))
        if half:
            eager = copy.deepcopy(model).to(device, torch.bfloat16)
            loss_of(eager(**inputs)).backward()
            found, _ = half_gradients_off(parallel, eager, model, f"{case}, step {step}")
            del eager
        else:
            found = gradients_off(parallel, model, GRADIENT, f"{case}, step {step}")
        row["gradient off"] = max(row["gradient off"], found)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    _same_order(case, [device_mesh.get_group(axis) for axis in names])
    if not half:
        for name, value in model.state_dict().items():
            near(parallel.state_dict()[name], value, STATE, f"{case}: {name} after {STEPS} steps")
    row["checkpoint"] = _checkpoint(parallel, folder / f"saved-{case}".replace(" ", "_")) if case.checkpoint else "-"
    return row


def _same_bytes(traffic: Traffic, plan: Plan, case: Case) -> str:
    """What a rank received in a step is what the plan says, collective by collective, axis by axis."""
    said = {key: nbytes for key, nbytes in plan.comm_bytes.items() if nbytes}
    found = {key: nbytes for key, nbytes in traffic.nbytes.items() if nbytes}
    if found != said:
        raise Wrong(f"{case}: a rank received {found}, the plan says {said}")
    return f"{sum(said.values())} B in {sum(traffic.calls.values())} calls"


def _same_order(case: Case, groups: Sequence[Any]) -> None:
    """Every rank of a group has launched the same collectives in it, in the same order. (NCCL keeps no such log.)"""
    for group in groups:
        log = list(staged.LOG.get(group.group_name, ()))
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, log, group=group)
        other = next((place for place, one in enumerate(every) if one != every[0]), None)
        if other is not None:
            at = next(i for i, pair in enumerate(zip_longest(every[0], every[other])) if pair[0] != pair[1])
            calls = [" ".join(every[rank][at : at + 1]) or "none" for rank in (0, other)]
            raise Wrong(f"{case}: call {at} in group {group.group_name} is {calls[0]} on rank 0, {calls[1]} on {other}")


def _checkpoint(parallel: Any, where: Path) -> str:
    """Saved, spoiled and loaded: the same bits. And whole on rank 0."""
    before = {name: value.detach().clone() for name, value in get_model_state_dict(parallel).items()}
    dcp.save({"model": get_model_state_dict(parallel)}, checkpoint_id=where)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    state = {"model": get_model_state_dict(parallel)}
    dcp.load(state, checkpoint_id=where)
    set_model_state_dict(parallel, state["model"])
    for name, value in get_model_state_dict(parallel).items():
        same(value, before[name], f"{name} after loading")
    whole = parallel.full_state_dict()
    return f"{len(before)} tensors" + (f", {len(whole)} whole" if whole else "")
