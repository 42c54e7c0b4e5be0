"""50 steps of one plan with and without values, states and parameters on the host: the same bits, also where copies are
late.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import autopar
from autopar._compat import cuda_sleep
from autopar.emit import moves
from autopar.ir.mesh import Mesh
from autopar.optim import Streamed
from autopar.plan import Plan
from benchmarks.gpu.stage import Row, Setting, exact_products, loss_of, moved, near, same
from tests.support.families import family
from tests.support.plans import PlanSampler
from tests.support.residence import ResidenceSampler, random_modes

STEPS, DRAWS = 50, 2
CYCLES = 2_000_000  # that a copy comes late: about a millisecond, far longer than what is computed meanwhile
CLOSE = 1e-3  # after 50 steps, of parameters that another processor updated, or other kernels computed
HOMES = ("device", "stream"), ("device", "stream", "host")


def eager(setting: Setting) -> Iterator[Row]:
    yield from _copies(setting, "eager")


def inductor(setting: Setting) -> Iterator[Row]:
    yield from _copies(setting, "inductor")


def _copies(setting: Setting, backend: str) -> Iterator[Row]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products that are the same each time
    torch.use_deterministic_algorithms(True)
    exact_products()
    mesh = autopar.init_mesh(setting.device)
    steps, draws, names = (STEPS, DRAWS, ("mlp", "block", "gpt2")) if setting.is_cuda else (4, 1, ("mlp",))
    draws = draws if backend == "eager" else 1  # each of its runs is compiled
    for name in names:
        case = family(name)
        kept = PlanSampler(case.graph, Mesh(("data",), (1,))).draw(0)
        wanted = _trained(name, kept, mesh, backend, steps, setting)
        for seed in range(draws):
            for homes in HOMES:
                plan = _saving_memory(kept, homes, seed)
                row: Row = {"program": f"{name}, {', '.join(homes)}, draw {seed}", "steps": steps}
                what = row["program"]
                first = _trained(name, plan, mesh, backend, steps, setting)
                row["beside none on the host"] = _compared(
                    first, wanted, "host" not in homes and backend == "eager", what
                )
                row["copies late"] = "skipped: no streams" if not setting.is_cuda else ""
                for ways in (("h2d",), ("d2h",), ("h2d", "d2h")) if setting.is_cuda else ():
                    with late(ways):
                        again = _trained(name, plan, mesh, backend, steps, setting)
                    told = f"{what}, copies late {' and '.join(ways)}"
                    row["copies late"] = _compared(again, first, True, told)
                yield row


def _saving_memory(kept: Plan, homes: tuple[str, ...], seed: int) -> Plan:
    rng = random.Random(seed)
    names = [node.target for node in kept.graph.nodes if node.op == "parameter"]
    drawn = {name: homes[place % len(homes)] for place, name in enumerate(rng.sample(names, len(names)))}
    residence = {name: home for name, home in drawn.items() if home != "device"}
    return ResidenceSampler(kept.graph, kept.mesh).with_layouts_of(kept, random_modes(kept.graph, rng), residence)


def _trained(name: str, plan: Plan, mesh: Any, backend: str, steps: int, setting: Setting) -> dict[str, Tensor]:
    """Losses and gradients of the first step, the last loss, and the parameters, on the CPU."""
    case = family(name)
    inputs = moved(case.inputs, setting.device)
    model = copy.deepcopy(case.model)
    parallel = autopar.compile(model, mesh, plan=plan, backend=backend, example_kwargs=inputs)
    optimizer = Streamed(torch.optim.AdamW(parallel.parameters(), 1e-3, eps=1e-3), parallel)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        loss = loss_of(parallel(**inputs))
        loss.backward()
        found[f"loss of step {step}"] = loss.detach()
        if not step:
            for key, parameter in parallel.named_parameters():
                if parameter.grad is not None:
                    found[f"first gradient of {key}"] = parameter.grad.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    moves.settle()
    return {key: value.cpu() for key, value in (found | parallel.state_dict()).items()}


def _compared(ours: dict[str, Tensor], wanted: dict[str, Tensor], bitwise: bool, what: str) -> str:
    """Raises Wrong where they differ: in a bit, or, where another processor made updates, by more than `CLOSE`."""
    worst = 0.0
    for name, value in wanted.items():
        if bitwise:
            same(ours[name], value, f"{what}: {name}")
        else:
            worst = max(worst, near(ours[name], value, CLOSE, f"{what}: {name}"))
    return "the same bits" if bitwise else f"off by {worst:.2g}"


@contextmanager
def late(ways: tuple[str, ...]) -> Iterator[None]:
    """Copies of these directions begin late: their stream sleeps first."""
    launch: Callable[..., None] = moves._launch

    def later(made: Tensor, source: Tensor, device: torch.device, way: str) -> None:
        if way in ways:
            stream = moves._streams.setdefault((device, way), torch.cuda.Stream(device))
            with torch.cuda.stream(stream):
                cuda_sleep(CYCLES)
        launch(made, source, device, way)

    moves._launch = later
    try:
        yield
    finally:
        moves._launch = launch
