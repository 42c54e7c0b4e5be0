"""Gradients of arguments: of two modules one trains through the other, and inputs themselves are trained, whatever the
plans split.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import PlanMismatch
from autopar.attach.tensors import mesh_of
from autopar.measure.twin import measure
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Request, search
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware
from tests.processes.compare import GRADIENT, loss_of, near, same_gradients, same_state, whole
from tests.processes.errors import refused
from tests.processes.worker import Ranks
from tests.support.families import family
from tests.support.machines import FAST

MACHINE = Hardware.load("cpu-gloo")
POLICIES = ("data-parallel", "fsdp", "tensor-parallel")


class Maker(nn.Module):
    """From noise to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 24)

    def forward(self, z: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(z)))


class Judge(nn.Module):
    """A number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def planned(ranks: Ranks, model: nn.Module, policy: str, call: dict[str, Any], **options: Any) -> Any:
    mesh = ranks.mesh()
    graph = graph_of(capture(model, (), call))
    plan = search(graph, mesh_of(mesh), FAST, Request(policy=policy))
    return autopar.compile(copy.deepcopy(model), mesh, plan=plan, **options)


def check_inputs_get_the_gradients_of_one_process(ranks: Ranks) -> None:
    for name in ("through", "embeds"):
        case = family(name)
        for policy in POLICIES:
            parallel = planned(ranks, case.model, policy, case.inputs)
            wanted, whole, split = ({**case.inputs} for _ in range(3))
            for key, value in case.inputs.items():
                if value.requires_grad:
                    wanted[key], whole[key] = (value.detach().clone().requires_grad_() for _ in range(2))
                    pieces = distribute_tensor(value.detach(), ranks.mesh(), [Shard(value.ndim - 1)])
                    split[key] = pieces.requires_grad_()
            case.model.zero_grad()
            loss_of(case.model(**wanted)).backward()
            for given in (whole, split):
                parallel.zero_grad()
                (2 * loss_of(parallel(**given)) / 2).backward()
                same_gradients(case.model, parallel)
                for key, value in wanted.items():
                    if not value.requires_grad:
                        continue
                    found = given[key].grad
                    assert isinstance(found, DTensor) is (given is split), f"{name} {policy} {key}"
                    if isinstance(found, DTensor):
                        assert found.placements == given[key].placements
                        found = found.full_tensor()
                    near(found, value.grad, GRADIENT, f"{name} {policy} {key}")


def check_a_module_trains_through_another_one(ranks: Ranks) -> None:
    """As generators do: whole batches, and parts of each rank."""
    torch.manual_seed(0)
    maker, judge = Maker(), Judge()
    z, real = torch.randn(16, 8), torch.randn(16, 24)
    for policy in POLICIES[:2]:
        for inputs in ("global", "local"):
            plain, options = (copy.deepcopy(maker), copy.deepcopy(judge)), {"inputs": inputs}
            made = (
                planned(ranks, maker, policy, {"z": z}, **options),
                planned(ranks, judge, policy, {"x": real}, **options),
            )
            optimizers = [
                [torch.optim.Adam(one.parameters(), lr=0.01) for one in pair] for pair in (plain, made)
            ]  # fmt: skip
            each = len(z) // ranks.count
            rows = slice(ranks.rank * each, (ranks.rank + 1) * each) if inputs == "local" else slice(None)
            for _ in range(3):
                told = [
                    _step_of_both(*pair, *own, z[part], real[part])
                    for pair, own, part in zip((plain, made), optimizers, (slice(None), rows), strict=True)
                ]
                if inputs == "global":
                    near(told[1], told[0], 1e-5, "the losses")
            for ours, wanted in zip(made, plain, strict=True):
                same_state(wanted, ours)


def _step_of_both(
    maker: nn.Module, judge: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, z: Tensor,
    real: Tensor,
) -> Tensor:  # fmt: skip
    """Losses of the judge, which sees rows that are made without their maker's gradients, and of the maker."""
    made = maker(z)
    second.zero_grad()
    judged = functional.softplus(-judge(real)).mean() + functional.softplus(judge(made.detach())).mean()
    judged.backward()
    second.step()
    first.zero_grad()
    fooled = functional.softplus(-judge(made)).mean()
    fooled.backward()
    first.step()
    return torch.stack([judged.detach(), fooled.detach()])


def check_rows_of_each_rank_get_the_gradients_of_their_loss(ranks: Ranks) -> None:
    """Under `inputs="local"` those of the mean over the rank's own rows, as under DDP; `from_local` beside it gives
    those of the whole batch's loss.
    """
    torch.manual_seed(0)
    judge, x = Judge(), torch.randn(8, 24)
    mine = slice(ranks.rank * 8 // ranks.count, (ranks.rank + 1) * 8 // ranks.count)
    wanted = x.clone().requires_grad_()
    judge(wanted).square().mean().backward()
    assert wanted.grad is not None
    for policy in POLICIES:
        local = planned(ranks, judge, policy, {"x": wanted}, inputs="local")
        own = x[mine].clone().requires_grad_()
        local(own).square().mean().backward()
        near(own.grad, wanted.grad[mine] * ranks.count, GRADIENT, f"{policy}, of own rows")
        whole = planned(ranks, judge, policy, {"x": wanted})
        part = x[mine].clone().requires_grad_()
        whole(whole.from_local(part)).square().mean().backward()
        near(part.grad, wanted.grad[mine], GRADIENT, f"{policy}, of the whole batch")


class WithFeatures(nn.Module):
    """A loss, and beside it what another loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.beside = (nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        made = functional.gelu(self.body(x))
        return self.head(made).square().mean(), self.beside(made) * t


def check_gradients_beside_the_loss_reach_arguments_that_lie_otherwise_then(ranks: Ranks) -> None:
    """The step that is planned again in backward cuts arguments in its own way."""
    torch.manual_seed(0)
    model, x, t = WithFeatures(), torch.randn(48, 48), torch.randn(48, 48)
    for policy in POLICIES:
        for split in (False, True):
            parallel = planned(ranks, model, policy, {"x": x.clone().requires_grad_(), "t": t.clone().requires_grad_()})
            for _ in range(2):
                wanted, given = ([one.clone().requires_grad_() for one in (x, t)] for _ in range(2))
                if split:
                    given = [distribute_tensor(one.detach(), ranks.mesh(), [Shard(1)]) for one in given]
                    given = [one.requires_grad_() for one in given]
                model.zero_grad(), parallel.zero_grad()
                for one, args in ((model, wanted), (parallel, given)):
                    loss, made = one(*args)
                    (loss + made.square().mean()).backward()
                same_gradients(model, parallel)
                for ours, theirs in zip(given, wanted, strict=True):
                    near(ours.grad, theirs.grad, GRADIENT, f"{policy} {split}")


def check_what_ranks_pass_otherwise_is_refused(ranks: Ranks) -> None:
    judge = Judge()
    parallel = autopar.compile(judge, ranks.mesh(), hardware=FAST)
    x = torch.randn(8, 24)
    with_it = x.clone().requires_grad_(ranks.rank == 0)
    refused(PlanMismatch, "of which others require grad", lambda: parallel(with_it))
    local = autopar.compile(Scaled(), ranks.mesh(), hardware=FAST, inputs="local")
    number = torch.tensor(1.0 + ranks.rank, requires_grad=True)
    refused(PlanMismatch, "has no dims and differs .* average it first", lambda: local(x, number))


class Scaled(Judge):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


def check_micro_batches(ranks: Ranks) -> None:
    """Rows are put together, what all rounds read whole is summed."""
    case = family("through")
    for count in (1, 2, 3):
        parallel = autopar.compile(copy.deepcopy(case.model), ranks.mesh(), hardware=FAST, micro_batches=count)
        wanted, given = (
            {key: value.detach().clone().requires_grad_() for key, value in case.inputs.items()} for _ in range(2)
        )
        case.model.zero_grad()
        for model, inputs in ((case.model, wanted), (parallel, given)):
            (3 * model(**inputs)).backward()
        assert parallel.plan.graph.rounds.count == count
        same_gradients(case.model, parallel)
        for key in wanted:
            near(given[key].grad, wanted[key].grad, GRADIENT, f"{count} micro-batches, {key}")


def check_memory_and_bytes(ranks: Ranks) -> None:
    """As predicted, gradients of arguments counted: also what micro-batches put together."""
    for name in ("through", "embeds"):
        case, mesh = family(name), mesh_of(ranks.mesh())
        graphs = [case.graph, in_rounds(case.graph, 2)]
        for graph, policy in [*((graphs[0], one) for one in POLICIES), (graphs[1], "fsdp"), (graphs[1], None)]:
            plan = search(graph, mesh, MACHINE, Request(policy=policy))
            found = measure(plan, case.model, (), case.inputs, steps=1)
            peak = found.peak_bytes["step"]
            told = f"{name} {policy} in {graph.rounds.count}: {peak}"
            assert found.is_equal, told
            assert peak.predicted is not None and abs(peak.measured / peak.predicted - 1) <= 0.001, told


class Dropping(Judge):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.5)


def check_checkpoints_around_a_module_that_draws(ranks: Ranks) -> None:
    """What is dropped in forward is dropped in backward, or the call is refused."""
    torch.manual_seed(0)
    judge, x = Dropping(), torch.randn(8, 24)
    parallel = planned(ranks, judge, "data-parallel", {"x": x.clone().requires_grad_()})

    def grown(value: Tensor) -> Tensor:
        return parallel(torch.tanh(value))

    for call, inner in ((parallel, lambda v: v), (grown, torch.tanh)):
        given, wanted = (x.clone().requires_grad_() for _ in range(2))
        made = checkpoint(call, given, use_reentrant=False)
        made.square().sum().backward()
        kept = (whole(made.detach()) != 0).float()
        (2 * kept * Judge.forward(judge, inner(wanted))).square().sum().backward()
        near(given.grad, wanted.grad, GRADIENT, "the input")
        again = checkpoint(call, given, use_reentrant=True).sum()
        refused(RuntimeError, "use_reentrant=True.*would draw other numbers.*use_reentrant=False", again.backward)
