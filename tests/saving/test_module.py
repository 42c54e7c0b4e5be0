"""Training with parameters on the host, streamed states, and values that are run again or offloaded, in one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.attach.tensors import as_dtensor, gradient_of, layout_of
from autopar.errors import PlanMismatch
from autopar.ir.layout import Shard
from autopar.ir.mesh import Mesh
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.trace import capture, graph_of
from tests.processes.compare import near
from tests.support.families import Mlp, _gpt2, family
from tests.support.residence import ResidenceSampler, hosted, random_modes, random_residence

MESH = Mesh(("data",), (1,))
Batch = Mapping[str, Any]


def sampler_of(model: nn.Module, batch: Batch) -> ResidenceSampler:
    return ResidenceSampler(graph_of(capture(model, (), batch)), MESH)


def compiled(model: nn.Module, batch: Batch, mesh: DeviceMesh, plan: Plan) -> autopar.ParallelModule:
    return autopar.compile(model, mesh, example_kwargs=batch, plan=plan)


def adamw(parallel: nn.Module, **options: Any) -> torch.optim.Optimizer:
    made = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], 1e-2, **options)
    return Streamed(made, parallel) if isinstance(parallel, autopar.ParallelModule) else made


def loss_of(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else made.loss


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def trained(parallel: nn.Module, batch: Batch, steps: int = 3, times: int = 1, **options: Any) -> list[Tensor]:
    """Losses, the last gradients, and the parameters after some steps of AdamW, all gradients of `times` backwards."""
    torch.manual_seed(5)
    optimizer, told = adamw(parallel, **options), list[Tensor]()
    for step in range(steps):
        for _ in range(times):
            loss = loss_of(parallel(**batch))
            (loss / times).backward()
            told.append(local(loss.detach()).clone())
        if step == steps - 1:
            told += [local(p.grad).clone() for p in parallel.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return told + [local(parameter.detach()).clone() for parameter in parallel.parameters()]


def model_of(name: str) -> tuple[nn.Module, Batch]:
    if name == "dropout":
        torch.manual_seed(1)
        return _gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, n_layer=1)
    return family(name).model, family(name).inputs


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["loop", "fused"])
@pytest.mark.parametrize("name", ["mlp", "block", "cnn", "dropout"])
def test_training_gives_the_same_bits_wherever_things_lie(one: DeviceMesh, name: str, options: dict[str, Any]) -> None:
    model, batch = model_of(name)
    sampler = sampler_of(model, batch)
    wanted = trained(compiled(model, batch, one, sampler.plan({}, {}, random.Random(0))), batch, **options)
    for seed in range(6 if name == "mlp" else 3):
        plan = sampler.draw(seed)
        found = trained(compiled(model, batch, one, plan), batch, **options)
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), seed


@pytest.mark.parametrize("times", [1, 4])
def test_gradients_of_several_backwards_add_up(one: DeviceMesh, times: int) -> None:
    model, batch = model_of("mlp")
    sampler = sampler_of(model, batch)
    plain = trained(copy.deepcopy(model), batch, times=times)
    kept = trained(compiled(model, batch, one, sampler.plan({}, {}, random.Random(0))), batch, times=times)
    for seed in range(3):
        found = trained(compiled(model, batch, one, sampler.draw(seed)), batch, times=times)
        assert all(map(torch.equal, found, kept))
        for ours, theirs in zip(found, plain, strict=True):
            near(ours, theirs, 1e-4, "after training", 1e-6)


def everything(plan_of: ResidenceSampler, where: str, seed: int = 0) -> Plan:
    rng = random.Random(seed)
    names = [node.target for node in plan_of.graph.nodes if node.op == "parameter"]
    return plan_of.plan(random_modes(plan_of.graph, rng), dict.fromkeys(names, where), rng)


def test_frozen_parameters_on_the_host_have_no_gradient_and_no_state(one: DeviceMesh) -> None:
    model, batch = copy.deepcopy(model_of("block")[0]), model_of("block")[1]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("head", "up")))
    sampler = sampler_of(model, batch)
    wanted = trained(compiled(model, batch, one, sampler.plan({}, {}, random.Random(0))), batch)
    parallel = compiled(model, batch, one, everything(sampler, "host"))
    assert all(map(torch.equal, trained(parallel, batch), wanted))
    optimizer = adamw(parallel)
    loss_of(parallel(**batch)).backward()
    optimizer.step()
    for name, parameter in parallel.named_parameters():
        assert (parameter.grad is None) == (parameter not in optimizer.state) == (not name.startswith(("head", "up")))


def test_a_tied_parameter_is_one_on_the_host_too(one: DeviceMesh) -> None:
    model, batch = model_of("mlp")
    sampler = sampler_of(model, batch)
    parallel = compiled(model, batch, one, everything(sampler, "host"))
    assert parallel.last.weight is parallel.first.weight
    wanted = trained(compiled(model, batch, one, sampler.plan({}, {}, random.Random(0))), batch)
    assert all(map(torch.equal, trained(parallel, batch), wanted))
    assert parallel.last.weight is parallel.first.weight


def test_a_model_on_meta_gets_values_later(one: DeviceMesh) -> None:
    _, batch = model_of("mlp")
    with torch.device("meta"):
        model = Mlp()
    sampler = sampler_of(model, {name: value.to("meta") for name, value in batch.items()})
    parallel = compiled(model, batch, one, everything(sampler, "host"))
    with pytest.raises(RuntimeError, match="is on the meta device"):
        parallel(**batch)
    parallel.to_empty(device="cpu")
    values = family("mlp").model.state_dict()
    parallel.load_state_dict(values)
    near(parallel(**batch), family("mlp").model(**batch), 1e-5, "loss")


def test_state_dicts_go_from_one_residence_to_another_and_to_the_plain_model(one: DeviceMesh) -> None:
    model, batch = model_of("mlp")
    sampler = sampler_of(model, batch)
    first = compiled(model, batch, one, sampler.draw(0))
    optimizer = adamw(first)
    loss_of(first(**batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    second = compiled(model, batch, one, sampler.draw(1))
    second.load_state_dict(first.state_dict())
    other = adamw(second)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    for parallel, its in ((first, optimizer), (second, other)):
        loss_of(parallel(**batch)).backward()
        its.step()
    for one_of_them, another in zip(first.parameters(), second.parameters(), strict=True):
        assert local(one_of_them).equal(local(another))
    plain = copy.deepcopy(model)
    plain.load_state_dict({name: local(value) for name, value in first.state_dict().items()})
    near(plain(**batch), first(**batch), 1e-5, "loss")


def test_clipping_and_plain_optimizers_take_parameters_of_both_tiers(one: DeviceMesh) -> None:
    model, batch = model_of("block")
    sampler = sampler_of(model, batch)
    plan = sampler.plan({}, {"qkv.weight": "host", "up.weight": "host"}, random.Random(0))
    plain, parallel = copy.deepcopy(model), compiled(model, batch, one, plan)
    optimizers = [torch.optim.AdamW(module.parameters(), 1e-2, eps=1e-6) for module in (plain, parallel)]
    for _ in range(3):
        for module, optimizer in zip((plain, parallel), optimizers, strict=True):
            loss_of(module(**batch)).backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            assert norm > 0
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        near(parallel.get_parameter(name), parameter, 1e-4, name, 1e-6)


def test_the_other_modes_fetch_from_the_host_too(one: DeviceMesh) -> None:
    """Evaluation, with gradients and without, where parameters stay as the training plan has them."""
    model, batch = model_of("cnn")
    parallel = compiled(model, batch, one, everything(sampler_of(model, batch), "host"))
    plain = copy.deepcopy(model)
    for module in (plain, parallel):
        module.train()(**batch)
        module.eval()
    with torch.no_grad():
        near(parallel(**batch), plain(**batch), 1e-5, "loss")
    near(parallel(**batch), plain(**batch), 1e-5, "loss")
    inference = [one for one in parallel._autopar.prepared() if one.runner.program.backward is None]
    assert inference and all("autopar.fetch" in one.runner.program.code for one in inference)
    loss_of(parallel(**batch)).backward()
    loss_of(plain(**batch)).backward()
    for name, parameter in plain.named_parameters():
        near(parallel.get_parameter(name).grad, parameter.grad, 1e-4, name, 1e-6)


def test_streamed_is_an_optimizer_to_schedulers(one: DeviceMesh) -> None:
    model, batch = model_of("mlp")
    parallel = compiled(model, batch, one, everything(sampler_of(model, batch), "stream"))
    optimizer = adamw(parallel)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for rate in (1e-2, 5e-3, 2.5e-3):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        loss_of(parallel(**batch)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(parallel(**batch))
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own, as inductor is imported
def test_compiled_code_copies_as_well(one: DeviceMesh) -> None:
    model, batch = model_of("mlp")
    sampler = sampler_of(model, batch)
    wanted = trained(compiled(model, batch, one, sampler.plan({}, {}, random.Random(0))), batch)
    plan = replace(sampler.draw(1), prefetch=1)
    parallel = autopar.compile(model, one, example_kwargs=batch, plan=plan, backend="inductor")
    for ours, theirs in zip(trained(parallel, batch), wanted, strict=True):
        near(ours, theirs, 1e-4, "after training", 1e-6)


def test_a_piece_on_the_host_of_a_mesh_of_devices_stays_there(fake_mesh: Callable[..., object]) -> None:
    """As far as a machine without a device shows it: the parameter, its gradient and its states."""
    fake_mesh(data=2)
    mesh = DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("data",), _init_backend=False)
    parameter = nn.Parameter(as_dtensor(torch.ones(3, 4), (6, 4), (Shard(0),), mesh))
    parameter.grad = gradient_of(parameter, torch.full((3, 4), 2.0))
    assert parameter.grad is not None and parameter.grad.device.type == "cpu"
    assert local(parameter.grad).equal(torch.full((3, 4), 2.0)) and layout_of(parameter.grad) == (Shard(0),)
    for options in ({}, {"foreach": True}, {"fused": True}):
        optimizer = torch.optim.AdamW([parameter], 0.1, **options)
        optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].device.type == "cpu"
    assert local(parameter.detach()).unique().numel() == 1 and local(parameter.detach())[0, 0] < 1


def test_a_plan_with_residences_is_for_its_model_alone(one: DeviceMesh) -> None:
    model, batch = model_of("mlp")
    plan = sampler_of(model, batch).draw(0)
    with pytest.raises(PlanMismatch, match="was made for"):
        compiled(Mlp(hidden=24), {**batch, "y": torch.randn(12, 6, 24)}, one, plan)
    assert hosted(plan.residence) or random_residence(plan.graph, random.Random(0))
