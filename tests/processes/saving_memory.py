"""Plans that save memory train as one process does, by the tolerances of the acceptance list.

Random plans have the layouts of the fastest one, with random modes of forward values and residences of parameters.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import autopar
from autopar.attach.tensors import as_dtensor
from autopar.ir.layout import Shard
from autopar.ir.mesh import Mesh
from autopar.ir.work import STORE
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.plan.tell import modes_of
from autopar.search import search
from autopar.search.memory_options import ALLOWED, WAYS
from autopar.trace import capture, graph_of
from tests.processes.compare import whole
from tests.processes.worker import Ranks
from tests.support.machines import FAST
from tests.support.nets import NETS, Batch, batch_of, made
from tests.support.residence import ResidenceSampler, random_modes, random_residence
from tests.support.traced import traced_once

LOSS = 1e-6  # relative
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # of every entry of every gradient and parameter
EXACT = {"rtol": 1e-10, "atol": 1e-10}  # in float64
STEPS = 5
ALL = 2  # the seed of plans that do all there is
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# --- plans -----------------------------------------------------------------------------------------------------------


def net(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return made(name).to(dtype)


def batch(name: str, seed: int, rows: int = 4, dtype: torch.dtype = torch.float32) -> Batch:
    given = batch_of(name, seed, rows)
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}


@cache
def fastest(name: str, ranks: int, rows: int = 4, dtype: torch.dtype = torch.float32, precision: Any = None) -> Plan:
    """Everything is saved and on the device."""
    captured = capture(net(name, dtype), (), batch(name, 0, rows, dtype), precision=precision)
    return search(graph_of(captured, precision), Mesh(("data",), (ranks,)), FAST)


def saving_memory(kept: Plan, seed: int) -> Plan:
    """The same layouts, with other modes and residences."""
    rng = random.Random(seed)
    modes, residence = random_modes(kept.graph, rng), random_residence(kept.graph, rng)
    return ResidenceSampler(kept.graph, kept.mesh).with_layouts_of(kept, modes, residence)


def ways_of(plan: Plan) -> set[str]:
    """What the plan does, of all that may be done."""
    found = {*plan.residence.values()} | {"recompute" for mode in modes_of(plan).values() if mode == "recomputed"}
    return found | {"offload" for node in plan.graph.nodes if node.op == STORE}


# --- training --------------------------------------------------------------------------------------------------------


def adamw(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, fused=True, **options)
    return Streamed(optimizer, module) if isinstance(module, autopar.ParallelModule) else optimizer


def close(ours: Tensor | None, wanted: Tensor | None, what: str, **within: float) -> None:
    assert (ours is None) == (wanted is None), what
    if ours is not None and wanted is not None:
        ours, wanted = whole(ours.detach()), wanted.detach()
        torch.testing.assert_close(ours, wanted, **(within or CLOSE), msg=lambda told: f"{what}: {told}")


def same_gradients(plain: nn.Module, parallel: nn.Module, what: str, **within: float) -> None:
    for key, parameter in plain.named_parameters():
        close(parallel.get_parameter(key).grad, parameter.grad, f"{what}, gradient of {key}", **within)


def same_parameters(plain: nn.Module, parallel: nn.Module, what: str, **within: float) -> None:
    for key, parameter in plain.named_parameters():
        close(parallel.get_parameter(key), parameter, f"{what}, {key}", **within)


def trains(
    mesh: DeviceMesh, name: str, plan: Plan, dtype: torch.dtype = torch.float32, *, eps: float, lr: float = 1e-3,
    **within: float,
) -> None:  # fmt: skip
    """A batch of its own for each step: losses and gradients of each, parameters and buffers after the last."""
    plain = net(name, dtype)
    parallel = autopar.compile(plain, mesh, example_kwargs=batch(name, 0, dtype=dtype), plan=plan)
    modules = plain, parallel
    optimizers = [adamw(module, eps=eps) for module in modules]
    for step in range(STEPS):
        wanted, loss = (module(**batch(name, step, dtype=dtype)) for module in modules)
        close(loss, wanted, f"{name}, loss of step {step}", rtol=min(LOSS, within.get("rtol", LOSS)), atol=0.0)
        wanted.backward(), loss.backward()
        same_gradients(plain, parallel, f"{name}, step {step}", **within)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(plain, parallel, name, **within)
    for key, buffer in plain.named_buffers():
        close(parallel.get_buffer(key), buffer, f"{name}, {key}", **within)
    states(plain, parallel, optimizers[1])
    loaded = net(name, dtype)
    loaded.load_state_dict({key: whole(value) for key, value in parallel.state_dict().items()})
    losses = [module(**batch(name, STEPS, dtype=dtype)) for module in (loaded, parallel)]
    close(losses[1], losses[0], f"{name}, loss of the plain model with what was trained", rtol=LOSS, atol=0.0)


def states(plain: nn.Module, parallel: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One of every trained parameter, none of a frozen one, which stays as it was; a tied parameter is one."""
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    assert {id(parallel.get_parameter(name)) for name in trained} == {*map(id, optimizer.state)}
    names = dict(plain.named_parameters(remove_duplicate=False))
    for one, parameter in names.items():
        for other, another in names.items():
            ties = parallel.get_parameter(one) is parallel.get_parameter(other)
            assert ties == (parameter is another), (one, other)


def check_every_model_trains(ranks: Ranks) -> None:
    """AdamW divides by a root of squared gradients: its eps is kept above their rounding noise (1e-8)."""
    for number, name in enumerate(NETS):
        plan = replace(
            saving_memory(fastest(name, ranks.count), ALL), prefetch=(None, 1)[number % 2], bucket_bytes=3000
        )
        assert ways_of(plan) == {*WAYS} and plan.comm_bytes
        trains(ranks.mesh(), name, plan, eps=1e-5)


def check_training_in_double_precision(ranks: Ranks) -> None:
    in_double_precision(ranks, "mlp")


def in_double_precision(ranks: Ranks, name: str) -> None:
    """Where there is no noise, eps may be what it is."""
    plan = saving_memory(fastest(name, ranks.count, dtype=torch.float64), ALL)
    assert ways_of(plan) == {*WAYS} and plan.comm_bytes
    trains(ranks.mesh(), name, plan, torch.float64, eps=1e-8, **EXACT)


def check_searched_in_little_memory(ranks: Ranks) -> None:
    searched(ranks, "mlp", 0.4)


def searched(ranks: Ranks, name: str, share: float) -> None:
    kept, mesh = fastest(name, ranks.count), ranks.mesh()
    limit = share * kept.peak_bytes["hbm"]
    parallel = autopar.compile(
        net(name), mesh, example_kwargs=batch(name, 0), hardware=FAST, memory=int(limit), allow=ALLOWED
    )
    assert parallel.plan.peak_bytes["hbm"] <= limit and ways_of(parallel.plan) and parallel.plan.comm_bytes
    trains(mesh, name, parallel.plan, eps=1e-5)


# --- the same bits ---------------------------------------------------------------------------------------------------


def check_twenty_plans_give_the_same_bits(ranks: Ranks) -> None:
    same_bits(ranks, "mlp", 20)


def same_bits(ranks: Ranks, name: str, count: int, precision: Any = None) -> None:
    """At the same layouts, the same kernels do the same, whatever is recomputed or offloaded."""
    kept, seen = fastest(name, ranks.count, precision=precision), set[str]()
    with traced_once():
        wanted = list(told(ranks.mesh(), name, kept, precision))
        for seed in range(ALL, ALL + count):
            plan = saving_memory(kept, seed)
            seen |= ways_of(plan)
            found = list(told(ranks.mesh(), name, plan, precision))
            assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), (name, seed)
    assert seen == {*WAYS}


def told(mesh: DeviceMesh, name: str, plan: Plan, precision: Any = None) -> Iterator[Tensor]:
    """This rank's pieces: losses and gradients of every step, then the parameters and states of the optimizer."""
    parallel = autopar.compile(net(name), mesh, example_kwargs=batch(name, 0), plan=plan, precision=precision)
    optimizer = adamw(parallel)
    for step in range(3):
        loss = parallel(**batch(name, step))
        loss.backward()
        yield loss.detach()
        yield from (local(p.grad).clone() for p in parallel.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    for parameter in parallel.parameters():
        yield local(parameter.detach())
        yield from (local(value) for _, value in sorted(optimizer.state.get(parameter, {}).items()))


def local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def check_the_step_of_the_host(ranks: Ranks) -> None:
    """From the same gradients, wherever parameters and states lie, the step of torch's fused AdamW on whole tensors."""
    for name in ("mlp", "resnet"):
        plan = saving_memory(fastest(name, ranks.count), ALL)
        parallel = autopar.compile(net(name), ranks.mesh(), example_kwargs=batch(name, 0), plan=plan)
        plain = net(name)
        optimizers = adamw(plain), adamw(parallel)
        for step in range(STEPS):
            parallel(**batch(name, step)).backward()
            for key, parameter in plain.named_parameters():
                given = parallel.get_parameter(key).grad
                parameter.grad = None if given is None else whole(given).clone()
            for optimizer in optimizers:
                optimizer.step()
            parallel.zero_grad()
        same_parameters(plain, parallel, name, rtol=1e-6, atol=1e-8)


# --- loops -----------------------------------------------------------------------------------------------------------


def check_micro_batches(ranks: Ranks) -> None:
    in_micro_batches(ranks, "mlp")


def in_micro_batches(ranks: Ranks, name: str) -> None:
    """Four backwards of a quarter of the batch are one of the whole, and so are their steps."""
    many, few = 4, 2
    whole_plan = saving_memory(fastest(name, ranks.count, many * few), ALL)
    part_plan = saving_memory(fastest(name, ranks.count, few), ALL)
    plain = net(name)
    at_once = autopar.compile(plain, ranks.mesh(), example_kwargs=batch(name, 0, many * few), plan=whole_plan)
    in_parts = autopar.compile(plain, ranks.mesh(), example_kwargs=batch(name, 0, few), plan=part_plan)
    modules = plain, at_once, in_parts
    optimizers = [adamw(module, eps=1e-5) for module in modules]
    for step in range(2):
        given = batch(name, step, many * few)
        losses = [module(**given) for module in (plain, at_once)]
        for loss in losses:
            loss.backward()
        total = 0.0
        for part in range(many):
            loss = in_parts(**{key: value[part * few : (part + 1) * few] for key, value in given.items()})
            (loss / many).backward()
            total = total + loss.detach() / many
        for parallel, loss in ((at_once, losses[1]), (in_parts, total)):
            close(loss, losses[0], f"{name}, loss", rtol=LOSS, atol=0.0)
            same_gradients(plain, parallel, f"{name}, step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parallel in (at_once, in_parts):
        same_parameters(plain, parallel, name)


def check_clipping(ranks: Ranks) -> None:
    clipped(ranks, "resnet", 2.0)
    clipped(ranks, "mlp", float("inf"))


def clipped(ranks: Ranks, name: str, norm_type: float) -> None:
    """Of parameters on both tiers, split and whole: the same norm, the same gradients, the same steps."""
    plan = saving_memory(fastest(name, ranks.count), ALL)
    assert "host" in ways_of(plan) and any("Shard" in str(layout) for layout in plan.parameters.values())
    plain = net(name)
    parallel = autopar.compile(plain, ranks.mesh(), example_kwargs=batch(name, 0), plan=plan)
    modules = plain, parallel
    optimizers = [adamw(module, eps=1e-5) for module in modules]
    for step in range(3):
        for module in modules:
            module(**batch(name, step)).backward()
        free = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
        wanted, ours = (torch.nn.utils.clip_grad_norm_(m.parameters(), free / 2, norm_type) for m in modules)
        assert wanted > free / 2, "nothing is clipped"
        close(ours, wanted, f"{name}, norm", rtol=LOSS, atol=0.0)
        same_gradients(plain, parallel, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(plain, parallel, name)


def check_a_mesh_of_devices(ranks: Ranks) -> None:
    """As far as a machine without a device shows it: what lies on the host is clipped and put together over gloo."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh=torch.arange(ranks.count), mesh_dim_names=("data",))
    whole_weight = torch.randn(4 * ranks.count, 3)
    weight, gradient = (
        as_dtensor(value.chunk(ranks.count)[ranks.rank].clone(), value.shape, (Shard(0),), mesh)
        for value in (whole_weight, whole_weight.square())
    )
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_([parameter], 0.1)
    close(norm, whole_weight.square().norm(), "norm", rtol=LOSS, atol=0.0)
    close(parameter.grad, whole_weight.square() * (0.1 / norm.full_tensor()), "clipped")
    close(parameter, whole_weight, "put together", rtol=0.0, atol=0.0)


# --- mixed precision -------------------------------------------------------------------------------------------------


def check_bfloat16_over_float32(ranks: Ranks) -> None:
    in_bfloat16(ranks, "mlp")


def in_bfloat16(ranks: Ranks, name: str) -> None:
    """Computes in bfloat16; parameters, gradients and states stay in float32, the same bits wherever they lie."""
    same_bits(ranks, name, 2, BF16)
    plan, plain = saving_memory(fastest(name, ranks.count, precision=BF16), ALL), net(name)
    parallel = autopar.compile(plain, ranks.mesh(), example_kwargs=batch(name, 0), plan=plan, precision=BF16)
    assert "bfloat16" in {type.dtype for node in plan.graph.nodes for type in node.outputs if type is not None}
    optimizer = adamw(parallel)
    for module in (plain, parallel):
        module(**batch(name, 0)).backward()
    optimizer.step()
    for key, parameter in plain.named_parameters():
        ours = parallel.get_parameter(key)
        assert (ours.grad is None) == (parameter.grad is None)
        held = (ours, *([] if ours.grad is None else [ours.grad, optimizer.state[ours]["exp_avg_sq"]]))
        assert {value.dtype for value in held} == {torch.float32}
        if ours.grad is not None and parameter.grad is not None:
            off = (whole(ours.grad) - parameter.grad).norm() / parameter.grad.norm()
            assert 1e-6 < off < 0.05, f"{name}, gradient of {key} is off by {off:.3g}"  # bfloat16 rounds by 2**-9


# --- what takes longer -----------------------------------------------------------------------------------------------


def check_more_are_searched_in_little_memory(ranks: Ranks) -> None:
    """At 0.4 of what the fastest plan takes, or where nothing fits there, closer to it."""
    for name in ("half-frozen", "experts", "resnet"):
        searched(ranks, name, 0.6 if name == "experts" else 0.4)


def check_more_loops(ranks: Ranks) -> None:
    for name in ("gpt", "experts"):
        in_micro_batches(ranks, name)
    for name in ("gpt", "half-frozen"):
        clipped(ranks, name, 2.0)


def check_more_bits(ranks: Ranks) -> None:
    in_bfloat16(ranks, "half-frozen")
    for name in ("gpt", "experts"):
        same_bits(ranks, name, 2)
    for name in ("half-frozen", "resnet"):
        in_double_precision(ranks, name)
