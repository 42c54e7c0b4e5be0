"""Models of complex numbers on real processes: gloo has no all-to-all of them, so all collectives send pairs."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.attach.tensors import mesh_of
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.search import Request, search
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware
from tests.processes.compare import LOSS, adamw, loss_of, near, same_gradients, same_state, same_steps, sgd, splits
from tests.processes.worker import Ranks
from tests.support.families import family
from tests.support.machines import FAST
from tests.support.plans import PlanSampler

COLLECTIVES = {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"}


class Layers(nn.Module):
    """Two complex layers; AdamW and clipping see plain gradients of them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, dtype=torch.cfloat) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.first(torch.complex(x, y))
        return (self.second(z * z.abs().sigmoid()) - x).abs().square().mean()


def layers(seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Layers(), {name: torch.randn(8, 6, 16) for name in ("x", "y")}


def kinds(plan: Plan) -> set[str]:
    """The collectives that the plan makes with complex numbers."""
    read = [change for choice in plan.choices.values() for changes in choice.reads for change in changes]
    sent = [change for delivery in plan.deliveries if delivery is not None for change in delivery.changes]
    return {change.kind for change in (*read, *sent) if change.is_complex and plan.mesh.size(change.axis) > 1}


def check_random_plans(ranks: Ranks) -> None:
    """Any legal plan; all collectives that there are occur with complex numbers."""
    mesh, seen = ranks.mesh(), set[str]()
    for name in ("rotary", "fno", "parts"):
        case = family(name)
        if ranks.rank == 0:
            sampler = PlanSampler(case.graph, mesh_of(mesh))
            for seed in range(2):
                sampler.draw(seed).save(ranks.folder / f"{name}{seed}.json")
        dist.barrier()
        for seed in range(2):
            plain = copy.deepcopy(case.model)
            parallel = autopar.compile(plain, mesh, plan=ranks.folder / f"{name}{seed}.json")
            ours, wanted = loss_of(parallel(**case.inputs)), loss_of(plain(**case.inputs))
            near(ours, wanted, LOSS, f"loss of {name} by random plan {seed}")
            ours.backward(), wanted.backward()
            same_gradients(plain, parallel)
            seen |= kinds(parallel.plan)
    assert seen >= COLLECTIVES, f"not tried: {COLLECTIVES - seen}"


def check_training(ranks: Ranks) -> None:
    for name in ("rotary", "fno"):
        case = family(name)
        plain = copy.deepcopy(case.model)
        parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
        same_steps(plain, parallel, case.inputs, steps=3)
        splits(parallel)


def check_every_optimizer(ranks: Ranks) -> None:
    """Complex weights in pieces; fused AdamW takes none, as in plain PyTorch."""
    for make, options in ((sgd, {}), (adamw, {"foreach": True}), (adamw, {"foreach": False}), (adamw, {})):
        for early in (True, False):
            plain, batch = layers()
            parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
            if not early:
                parallel(**batch)
                plain(**batch)
            same_steps(
                plain, parallel, batch, (make(plain.parameters(), **options), make(parallel.parameters(), **options))
            )
            splits(parallel)
            weight = parallel.first.weight
            assert isinstance(weight, DTensor) and weight.dtype == torch.cfloat


def check_gradients_in_one_row(ranks: Ranks) -> None:
    """Small gradients are summed together: complex ones in a row of their own."""
    plain, batch = layers()
    graph, mesh = graph_of(capture(plain, (), batch)), ranks.mesh()
    plan = search(graph, mesh_of(mesh), Hardware.load("cpu-gloo"), Request(policy="data-parallel"))
    parallel = autopar.compile(plain, mesh, plan=replace(plan, bucket_bytes=1 << 20))
    same_steps(plain, parallel, batch, steps=3)
    backward = parallel.program.backward
    assert backward is not None
    names = [node.name for node in backward.graph.nodes]
    assert any(name.startswith("gradients") and "as_real" in name for name in names)
    assert any(name.startswith("gradients") and "as_complex" in name for name in names)


def check_a_state_goes_on(ranks: Ranks) -> None:
    """Out of the module and its optimizer, into others."""
    plain, batch = layers()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
    same_steps(plain, parallel, batch, steps=2)
    other, _ = layers(seed=1)
    again = autopar.compile(other, ranks.mesh(), hardware=FAST, example_kwargs=batch)
    dcp.save(parallel.state_dict(), checkpoint_id=ranks.folder / "complex")
    state = again.state_dict()
    dcp.load(state, checkpoint_id=ranks.folder / "complex")
    again.load_state_dict(state)
    same_state(parallel, again, 0.0)
    again.load_state_dict(layers(seed=2)[0].state_dict())
    same_state(layers(seed=2)[0], again, 0.0)


def check_streamed_states(ranks: Ranks) -> None:
    """Parameters and states on the host, updated there, beside the next forward too."""
    for overlap in (False, True):
        plain, batch = layers()
        mesh = ranks.mesh()
        parallel = autopar.compile(
            plain,
            mesh,
            pin={"first": "offload-parameters", "second": "offload-optimizer"},
            allow="offload-parameters,offload-optimizer",
        )
        parallel(**batch)
        assert set(parallel.plan.residence.values()) == {"host", "stream"}
        optimizers = adamw(plain.parameters()), Streamed(adamw(parallel.parameters()), parallel, overlap=overlap)
        same_steps(plain, parallel, batch, optimizers, steps=3, clip=None if overlap else 1.0)
