"""Batch norms on real processes: local ones beside torch's DDP itself, global ones beside one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import PlanMismatch, TraceError
from tests.processes.compare import GRADIENT, LOSS, ZERO, near, same_steps, sgd
from tests.processes.models import BATCH, Net, batch, net
from tests.processes.worker import Ranks
from tests.support.machines import FAST
from tests.support.nets import batch_of, made

STEPS = 4


def _mean(value: Tensor) -> Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _of_rank_zero(value: Tensor) -> Tensor:
    told = value.detach().clone()
    dist.broadcast(told, 0)
    return told


def _as_ddp(ranks: Ranks, model: nn.Module, batches: list[dict[str, Tensor]], **options: object) -> None:
    """DDP gets each rank's part of the batch, autopar the whole: losses, gradients, buffers, then the loss in eval."""
    plain = copy.deepcopy(model)
    ddp = DistributedDataParallel(plain)
    parallel = autopar.compile(model, ranks.mesh(), hardware=FAST, batch_norm="local", **options)
    optimizers = sgd(plain.parameters()), sgd(parallel.parameters())
    for step, whole in enumerate(batches):
        part = {name: value.chunk(ranks.count)[ranks.rank] for name, value in whole.items()}
        wanted, loss = ddp(**part), parallel(**whole)
        near(loss, _mean(wanted), LOSS, f"loss of step {step}")
        wanted.backward(), loss.backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                near(parallel.get_parameter(name).grad, parameter.grad, GRADIENT, f"gradient of {name}", ZERO)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        for name, buffer in plain.named_buffers():
            near(parallel.get_buffer(name), _of_rank_zero(buffer), 1e-4 * buffer.is_floating_point(), name)
    assert parallel.plan.batch_norm == "local"
    for buffer in plain.buffers():
        dist.broadcast(buffer, 0)
    plain.eval(), parallel.eval()
    with torch.no_grad():
        near(parallel(**batches[0]), plain(**batches[0]), 10 * LOSS, "loss in eval mode")


def check_local_ones_are_those_of_ddp(ranks: Ranks) -> None:
    batches = [dict(batch_of("resnet", seed)) for seed in range(STEPS)]
    _as_ddp(ranks, made("resnet"), batches)


def check_local_ones_with_a_cumulative_average(ranks: Ranks) -> None:
    model = net()
    model.norm.momentum = None
    _as_ddp(ranks, model, [batch(seed) for seed in range(STEPS)])


def check_local_ones_are_not_global_ones(ranks: Ranks) -> None:
    """What the two checks above would see."""
    losses = [
        autopar.compile(made("resnet"), ranks.mesh(), hardware=FAST, batch_norm=what)(**batch_of("resnet", 0)).item()
        for what in ("global", "local")
    ]
    assert abs(losses[0] / losses[1] - 1) > 100 * LOSS


def check_a_cumulative_average(ranks: Ranks) -> None:
    plain = net()
    plain.norm.momentum = None
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
    same_steps(plain, parallel, batch())


def check_synced_norms_are_global_always(ranks: Ranks) -> None:
    """In a process group SyncBatchNorm refuses a CPU; as part of the whole batch's program it is a batch norm."""
    for what in ("global", "local"):
        plain = net()
        synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
        parallel = autopar.compile(synced, ranks.mesh(), hardware=FAST, batch_norm=what)
        same_steps(plain, parallel, batch())
        assert isinstance(parallel.norm, nn.SyncBatchNorm) and parallel.plan.batch_norm == "global"


def check_what_is_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    with pytest.raises(ValueError, match="batch_norm 'ddp' is not known; choose global, local"):
        autopar.compile(net(), mesh, hardware=FAST, batch_norm="ddp")
    odd = {name: value[: BATCH - 1] for name, value in batch().items()}
    with pytest.raises(TraceError, match=rf"a batch of {BATCH - 1} cannot be cut into {ranks.count} equal parts"):
        autopar.compile(net(), mesh, hardware=FAST, batch_norm="local")(**odd)
    one = {name: value[: ranks.count] for name, value in batch().items()}
    with pytest.raises(TraceError, match=r"batch norm norm .* would take statistics of 1 value per channel"):
        autopar.compile(net(), mesh, hardware=FAST, batch_norm="local")(**one)


def check_a_plan_is_for_one_of_them(ranks: Ranks) -> None:
    mesh, told = ranks.mesh(), {"example_kwargs": batch(), "hardware": FAST}
    plans = {what: autopar.compile(net(), mesh, batch_norm=what, **told).plan for what in ("global", "local")}
    for what, other in (("global", "local"), ("local", "global")):
        sentence = f"the plan was made for batch_norm='{what}', this call asks for batch_norm='{other}'"
        with pytest.raises(PlanMismatch, match=sentence):
            autopar.compile(net(), mesh, plan=plans[what], batch_norm=other, **told)
        autopar.compile(net(), mesh, plan=plans[what], batch_norm=what, **told)
        kept = autopar.compile(net(), mesh, batch_norm=what, cache=ranks.folder / "plans", **told).plan
        assert kept.batch_norm == what
    if ranks.rank == 0:
        assert len(list((ranks.folder / "plans").iterdir())) == 2


class Reader(Net):
    """Its loss reads what its norm has just made of the running statistics."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.norm.running_mean.square().sum()


class Turned(nn.Module):
    """Places first, then samples: the rows of the norm do not lie as the parts of the batch do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(0, 1).flatten(0, 1)).square().mul(torch.arange(1.0, 5.0)).sum()


def check_what_ranks_would_not_agree_on_is_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    with pytest.raises(TraceError, match="reads running statistics that the same step has changed"):
        autopar.compile(net(Reader), mesh, hardware=FAST, batch_norm="local")(**batch())
    with pytest.raises(TraceError, match=r"batch norm norm .* normalises 24 rows that are not the batch of 8 samples"):
        autopar.compile(Turned(), mesh, hardware=FAST, batch_norm="local")(torch.randn(8, 3, 4))
    assert autopar.compile(Turned(), mesh, hardware=FAST)(torch.randn(8, 3, 4)).isfinite()
