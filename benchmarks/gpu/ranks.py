"""One process of several that train small models side by side with the plain ones: numbers, bytes, order, peak.

`python -m benchmarks.gpu.ranks FOLDER DEVICE BACKEND CASES`; rank 0 appends a row to FOLDER/rows for each case, a rank
that finds something wrong says it in FOLDER/wrong.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
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
from autopar.measure.twin import traced
from autopar.measure.watch import Traffic
from autopar.mesh import Mesh
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.search import search
from benchmarks.gpu import staged
from benchmarks.gpu.stage import ROUNDED, Row, Wrong, exact_products, gradients_off, half_gradients_off, loss_of, moved, near, same
from benchmarks.models import MODELS
from cost_models.hardware import Hardware
from tests.support.families import family
from tests.support.residence import ResidenceSampler

STEPS, COLLECTIVE_S = 3, 120
LOSS, GRADIENT, STATE = 1e-5, 1e-4, 1e-4  # of float32: sums of some hundred terms in another order
EPS = 1e-3  # of AdamW: gradients that are zero but for rounding shall not be divided by their own size


@dataclass(frozen=True)
class Case:
    """`plan`: a policy, "searched", or "random N": of plans with offload, residence on the host and every layout.

    `precision`: float32 or bfloat16. `checkpoint`: save, spoil and load the parameters at the end.
    """

    model: str
    sizes: tuple[int, ...]
    plan: str
    precision: str = "float32"
    checkpoint: bool = False

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.sizes))
        return f"{self.model}, {mesh}, {self.plan}" + (f", {self.precision}" if self.precision != "float32" else "")


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
    if not case.plan.startswith("random"):
        return search(traced(model, (), inputs), mesh, hardware, policy=case.plan)
    drawn = ResidenceSampler(family(case.model).graph, mesh).draw(int(case.plan.removeprefix("random ")))
    return replace(drawn, prefetch=1, bucket_bytes=3000)


def run(case: Case, device: str, hardware: Hardware, folder: Path) -> Row:
    names = ("data", "tensor")[: len(case.sizes)]
    device_mesh = autopar.init_mesh(device, **dict(zip(names, case.sizes, strict=True)))
    model, inputs = model_of(case.model)
    plan = plan_of(case, Mesh(names, case.sizes), model, inputs, hardware)
    half = case.precision == "bfloat16"
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else None
    inputs = moved(inputs, device)
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    parallel = autopar.compile(
        copy.deepcopy(model), device_mesh, plan=plan, hardware=hardware if plan is None else None,
        precision=precision, example_kwargs=inputs,
    )  # fmt: skip
    plan = parallel.plan
    axis_of = {device_mesh.get_group(axis).group_name: axis for axis in names}
    ours = Streamed(torch.optim.AdamW(parallel.parameters(), 1e-3, eps=EPS), parallel)
    reference = model.to(device)
    theirs = torch.optim.AdamW(reference.parameters(), 1e-3, eps=EPS)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    row: Row = {"program": str(case), "loss off": 0.0, "gradient off": 0.0}
    for step in range(STEPS):
        with Traffic(plan.mesh, axis_of) as traffic:
            loss = loss_of(parallel(**inputs))
            loss.backward()
        if step == 1:
            row["received"] = _same_bytes(traffic, plan, case)
        wanted = loss_of(reference(**inputs))
        wanted.backward()
        allowed = ROUNDED if half else LOSS
        row["loss off"] = max(row["loss off"], near(loss.float(), wanted, allowed, f"{case}: loss of step {step}"))
        if half:
            eager = copy.deepcopy(reference).to(torch.bfloat16)
            loss_of(eager(**inputs)).backward()
            found, _ = half_gradients_off(parallel, eager, reference, f"{case}, step {step}")
        else:
            found = gradients_off(parallel, reference, GRADIENT, f"{case}, step {step}")
        row["gradient off"] = max(row["gradient off"], found)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    row["held"] = f"{torch.cuda.max_memory_allocated() - held} B" if device == "cuda" else "-"
    row["predicted"] = f"{plan.peak_bytes['hbm']} B"
    _same_order(case, [device_mesh.get_group(axis) for axis in names])
    if not half:
        for name, value in reference.state_dict().items():
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


def main(folder: str, device: str, backend: str, cases: str) -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    exact_products()
    if device == "cuda":
        here = 0 if backend == staged.NAME else int(os.environ["LOCAL_RANK"])
        os.environ["LOCAL_RANK"] = str(here)
        torch.cuda.set_device(here)
        torch.empty(1, device="cuda")  # so that a device mesh finds the device chosen
    if backend == staged.NAME:
        staged.register()
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=count,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )  # fmt: skip
    hardware = Hardware.load("h100-sxm" if device == "cuda" else "cpu-gloo")
    try:
        for given in json.loads(cases):
            row = run(Case(**given | {"sizes": tuple(given["sizes"])}), device, hardware, Path(folder))
            if rank == 0:
                with Path(folder, "rows").open("a") as rows:
                    rows.write(json.dumps(row) + "\n")
            dist.barrier()
    except Wrong as error:
        Path(folder, "wrong").write_text(f"{error} (rank {rank})")
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others may wait for this rank in a collective; nothing here may wait for them
    os._exit(0)  # gloo's threads abort now and then when many groups are taken down at once


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    main(*arguments)
