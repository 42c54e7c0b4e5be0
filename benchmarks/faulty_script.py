"""One rank of a cell of `benchmarks.faults`: a training script of a user in which one rank does something wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar._compat import TorchDispatchMode
from autopar.attach import placing
from autopar.attach.run import Runner
from autopar.attach.tensors import mesh_of
from autopar.search import Request, search
from benchmarks.faults import EVERYWHERE, Cell
from cost_models.hardware import Hardware

planner: Any = sys.modules["autopar.planner"]

STEPS, AT = 6, 3  # where in the loop the fault is


class Injected(RuntimeError):
    """What a rank raises, catches and goes on behind."""


class Left(Exception):
    """Out of the loop, into something else."""


class Script:
    """`at(place)` does what goes wrong there, once."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder, self.rank = cell, folder, int(os.environ["RANK"])
        self.step, self.errors, self.is_done = -1, 0, False
        self.parallel: Any = None

    def at(self, place: str) -> bool:
        """True where it is for the caller to do."""
        is_now = self.step == AT or place in ("trace", "planning", "layout", "save")
        if self.is_done or not is_now or (place, self.rank) != (self.cell.place, self.cell.rank):
            return False
        self.is_done = True
        (self.folder / "fault").write_text(str(time.time()))
        match self.cell.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise and go on":
                raise Injected("out of luck")
            case "exit":
                sys.exit(0)
            case "leave the loop":
                raise Left
            case _:
                return True
        return False

    def run(self, patience_s: float) -> None:
        torch.manual_seed(1)
        mesh = autopar.init_mesh("cpu", data=self.cell.ranks)
        model, x = model_of(self), torch.randn(64, 512)
        told: dict[str, Any] = {"hardware": Hardware.load("cpu-gloo"), "patience_s": patience_s, "allow": "none"}
        if self.cell.fault == "another file":
            told["plan"] = self.plan_file(model, mesh, x)
        self.patch()
        self.parallel = autopar.compile(model, mesh, **told)
        optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=1e-3)
        for self.step in range(STEPS):
            try:
                self.one_step(optimizer, x)
            except RuntimeError:  # a user who goes on whatever happens
                self.errors += 1
                traceback.print_exc()
                sys.stderr.flush()
        if self.at("save"):
            self.parallel(x)
        self.parallel.full_state_dict()
        if self.errors:
            sys.exit(1)

    def one_step(self, optimizer: Any, x: Tensor) -> None:
        half = self.cell.fault == "another shape" and self.step in (0, AT) and self.at(self.cell.place)
        if self.cell.fault == "an extra call" and self.at("forward"):
            self.parallel(x)
        if self.cell.fault == "another setting" and self.at("forward"):
            self.parallel.scale = 2.0
        with Between(self):
            loss = self.parallel(x[: 32 if half else 64])
            if self.at("backward"):
                self.parallel(x)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parallel.parameters(), 1.0)
        if self.at("optimizer"):
            self.parallel(x)
        optimizer.step()
        optimizer.zero_grad()

    def plan_file(self, model: nn.Module, mesh: Any, x: Tensor) -> Path:
        """A plan on all ranks, and on one another one that fits as well."""
        graph = autopar.compile(model, mesh, example_inputs=(x,), hardware="cpu-gloo").plan.graph
        policy = "fsdp" if self.at("planning") else "data-parallel"
        file = self.folder / f"{self.rank}.json"
        search(graph, mesh_of(mesh), Hardware.load("cpu-gloo"), Request(policy=policy)).save(file)
        return file

    def patch(self) -> None:
        """Faults within autopar: while rank 0 searches and others wait, at the second parameter, in a program."""
        found, parameter_on, call = planner.found_by_rank_zero, placing.parameter_on, Runner.__call__
        laid_out: list[int] = []

        def finding(work: Callable[[], Any], device_mesh: Any) -> Any:
            def slowly() -> Any:
                self.at("planning")
                time.sleep(1.0)
                return work()

            if self.rank:
                self.at("planning")
            return found(slowly, device_mesh)

        def laying_out(*args: Any, **kwargs: Any) -> Any:
            laid_out.append(1)
            if len(laid_out) == 2:
                self.at("layout")
            return parameter_on(*args, **kwargs)

        def calling(runner: Any, *args: Any) -> Any:
            if self.cell.fault in EVERYWHERE:
                self.at("forward")
            return call(runner, *args)

        planner.found_by_rank_zero, placing.parameter_on = finding, laying_out
        Runner.__call__ = calling  # type: ignore[method-assign]


def model_of(script: Script) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = [(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)) for _ in range(2)]
            self.layers, self.scale = nn.Sequential(*(layer for pair in pairs for layer in pair)), 1.0

        def forward(self, x: Tensor) -> Tensor:  # runs while torch traces it, and then no more
            if script.cell.fault in EVERYWHERE:
                script.at("trace")
            return self.layers(self.scale * x).square().mean()

    return Net()


class Between(TorchDispatchMode):
    """Before the second collective of a step."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script, self.count = script, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.count += 1
            if self.count == 2:
                self.script.at("between collectives")
        return func(*args, **kwargs or {})


def main(cell: str, folder: str, patience_s: str) -> None:
    torch.set_num_threads(1)
    script = Script(Cell(**json.loads(cell)), Path(folder))
    log = os.open(f"{folder}/{script.rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    Path(folder, f"{script.rank}.pid").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    try:
        script.run(float(patience_s))
    except Left:
        print("has left the loop", flush=True)
        time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
