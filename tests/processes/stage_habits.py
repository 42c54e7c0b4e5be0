"""What scripts do around the calls of a pipeline, on real processes: numbers by hand, averages, states, files."""

from __future__ import annotations

import copy
import functools
import gc
import unittest
import warnings

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autopar
from autopar.attach.tensors import is_elsewhere
from autopar.errors import PlanMismatch
from autopar.optim import Whole
from tests.processes.compare import loss_of, whole
from tests.processes.pipelines import NEAR, STEPS, Blocks, doubled, mesh_of
from tests.processes.worker import Ranks
from tests.support.machines import machine

NORMS = torch.ops.aten._foreach_norm.Scalar


class Scaled(nn.Module):
    """Batch norms in every stage, and a parameter that is one number, which the last stage has."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)]
        self.layers = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) * self.scale - y).square().mean()


def check_numbers_buffers_and_averages(ranks: Ranks) -> None:
    """Of what other stages have: buffers that forward writes, a parameter of one number, averages of all weights by
    operators on lists; numbers of parameters, which all ranks ask for.
    """
    plain = Scaled().double()
    inputs = [dict(zip("xy", torch.randn(2, 8, 8, dtype=torch.float64), strict=True)) for _ in range(STEPS)]
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=1, memory="4GiB", time_limit_s=10)
    models = (parallel, plain)
    averaged = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    averages = [torch.optim.swa_utils.AveragedModel(plain, multi_avg_fn=averaged)]
    optimizers = [torch.optim.SGD(one.parameters(), 1e-1) for one in models]
    for step, given in enumerate(inputs):
        for optimizer, model in zip(optimizers, models, strict=True):
            model(**given).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            averages = [torch.optim.swa_utils.AveragedModel(one, multi_avg_fn=averaged) for one in models]
        for average, model in zip(averages, models, strict=True):
            average.update_parameters(model)
    for ours, theirs in (models, [one.module for one in averages]):
        assert isinstance(ours, autopar.ParallelModule)
        state, right = ours.full_state_dict(rank0_only=False), theirs.state_dict()
        assert state.keys() == right.keys() and state["scale"].shape == ()
        for key, value in state.items():
            torch.testing.assert_close(
                value, right[key], rtol=1e-10, atol=1e-12, msg=lambda told, key=key: f"{key}: {told}"
            )
    assert any(map(is_elsewhere, parallel.parameters()))
    for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.norm().item(), theirs.norm().item(), rtol=1e-10, atol=1e-12)


def numbers_by_hand(model: nn.Module) -> list[float]:
    """Of gradients and parameters, in the ways that scripts have."""
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    listed = torch.stack([one.detach().norm() for one in gradients])
    told = [
        sum((one**2).sum() for one in gradients) ** 0.5,
        sum(one.norm().item() ** 2 for one in gradients) ** 0.5,
        listed.norm(),
        torch.stack([*NORMS(gradients, 2)]).norm(),
        torch.linalg.vector_norm(torch.stack([whole(one) for one in NORMS(gradients, 2)])),
        max(one.abs().max().item() for one in gradients),
        max(one.abs().max() for one in gradients),
        functools.reduce(torch.maximum, (one.abs().max() for one in gradients)),
        torch.maximum(gradients[0].abs(), gradients[0]).sum(),
        torch.nn.utils.get_total_norm(gradients, float("inf")),
        torch.nn.utils.get_total_norm(gradients[::2], 3.0),
    ]
    return [float(one) for one in told]


def check_numbers_made_by_hand(ranks: Ranks) -> None:
    """Norms, penalties beside the loss, clipping by hand, of a model whose first and last stage share a weight."""
    model, inputs = doubled("gpt2")
    plain = copy.deepcopy(model)
    parallel = autopar.compile(
        model, mesh_of(ranks), hardware=machine(1e10, flops=1e10), micro_batches=2, memory="4GiB", time_limit_s=10
    )
    models = parallel, plain
    optimizers = [torch.optim.AdamW(one.parameters(), 1e-2, eps=1e-4, fused=True) for one in models]  # losses: float32
    for _ in range(STEPS):
        for one in models:
            loss = loss_of(one(**inputs))
            (loss + 1e-2 * sum((held**2).sum() for held in one.parameters())).backward()
        torch.testing.assert_close(*map(numbers_by_hand, models), rtol=NEAR, atol=0)
        for one, optimizer in zip(models, optimizers, strict=True):
            norm = sum((held.grad**2).sum() for held in one.parameters() if held.grad is not None) ** 0.5
            for held in one.parameters():
                held.grad.mul_(0.5 / float(norm))
            optimizer.step()
            optimizer.zero_grad()
    right = plain.state_dict()
    for key, value in parallel.full_state_dict(rank0_only=False).items():
        torch.testing.assert_close(value, right[key], rtol=NEAR, atol=1e-7, msg=lambda told, key=key: f"{key}: {told}")


def check_states_of_optimizers(ranks: Ranks) -> None:
    """Whole states of a plain optimizer are taken, and given back; and an optimizer of whole copies steps alike."""
    plain = Blocks().double()
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    before = torch.optim.AdamW(plain.parameters(), 1e-2)
    plain(x, y).backward()
    before.step()
    before.zero_grad()
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    ours = torch.optim.AdamW(parallel.parameters(), 1e-2)
    ours.load_state_dict(copy.deepcopy(before.state_dict()))
    copied = copy.deepcopy(plain)
    other = autopar.compile(copied, mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    other(x, y)  # lays parameters out
    stepped = Whole(other.parameters(), torch.optim.AdamW, lr=1e-2)
    stepped.load_state_dict(copy.deepcopy(before.state_dict()))
    for _ in range(STEPS):
        for model, optimizer in ((plain, before), (parallel, ours), (other, stepped)):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one in (parallel, other):
        for key, value in one.full_state_dict(rank0_only=False).items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-9, atol=1e-11)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(parallel, ours, options=options)
    values = get_model_state_dict(parallel, options=options)
    if ranks.rank == 0:
        wanted = get_optimizer_state_dict(plain, before)
        assert state["state"].keys() == wanted["state"].keys()
        for name, kept in wanted["state"].items():
            for key, value in kept.items():
                torch.testing.assert_close(state["state"][name][key], value, rtol=1e-9, atol=1e-11, check_device=False)
        torch.testing.assert_close(values, dict(plain.state_dict()), rtol=1e-9, atol=1e-11)
    given = {key: 2 * value for key, value in plain.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    late = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    later = torch.optim.AdamW(late.parameters(), 1e-2)
    kept = copy.deepcopy(get_optimizer_state_dict(plain, before))
    set_optimizer_state_dict(late, later, kept if ranks.rank == 0 else {}, options=options)  # before it is laid out
    for model, optimizer in ((plain, before), (late, later)):
        model(x, y).backward()
        optimizer.step()
    for key, value in late.full_state_dict(rank0_only=False).items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-9, atol=1e-11)
    set_model_state_dict(parallel, dict(given) if ranks.rank == 0 else {}, options=options)  # which changes the dict
    torch.testing.assert_close(dict(parallel.full_state_dict(rank0_only=False)), given, rtol=0, atol=0)


def check_what_one_rank_saved_is_refused(ranks: Ranks) -> None:
    """It has nothing of what other stages hold."""
    x, y = torch.randn(2, 8, 8)
    parallel = autopar.compile(Blocks(), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    parallel(x, y)
    state, file = parallel.state_dict(), ranks.folder / "one.pt"
    if ranks.rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(state, file)
    torch.distributed.barrier()
    read = torch.load(file, weights_only=True)
    told = ""
    try:
        parallel.load_state_dict(read)
    except RuntimeError as error:
        told = str(error)
    assert ("saved by a rank of another pipeline stage" in told) == (parallel._autopar.pipe.place > 0), told


def check_averages_begin_before_the_first_call(ranks: Ranks) -> None:
    """Copies are laid out with what they average, though they have not been called."""
    plain = Blocks().double()
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    models = parallel, plain
    averages = [torch.optim.swa_utils.AveragedModel(one, avg_fn=lambda a, b, _: a.lerp(b, 0.1)) for one in models]
    copies = [copy.deepcopy(one) for one in models]
    optimizers = [torch.optim.SGD(one.parameters(), 1e-1) for one in models]
    for _ in range(STEPS):
        for model, average, copied, optimizer in zip(models, averages, copies, optimizers, strict=True):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            with torch.no_grad():
                for mine, new in zip(copied.parameters(), model.parameters(), strict=True):
                    mine.lerp_(new, 0.5)
    for ours, theirs in ((averages[0].module, averages[1].module), copies):
        state = ours.full_state_dict(rank0_only=False)
        torch.testing.assert_close(dict(state), dict(theirs.state_dict()), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(whole(ours(x, y)), theirs(x, y), rtol=1e-10, atol=1e-12)


def check_a_model_that_runs_whole_is_not_asked_for_more(ranks: Ranks) -> None:
    """Batch norms take one micro-batch, and nobody has asked for two."""
    plain = Scaled().double()
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), memory="4GiB", time_limit_s=10)
    torch.testing.assert_close(whole(parallel(x, y)), plain(x, y), rtol=1e-10, atol=1e-12)
    assert parallel.pipeline.schedule.micro_batches == 1


def check_ranks_with_other_constants_are_told(ranks: Ranks) -> None:
    class Weighted(Blocks):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x * weights, y)

    weights = torch.randn(8, generator=torch.Generator().manual_seed(ranks.rank))
    x, y = torch.randn(2, 8, 8)
    with unittest.TestCase().assertRaisesRegex(PlanMismatch, "all ranks must .* same values where it reads tensors"):
        autopar.compile(Weighted(), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)(x, y)


def check_what_strings_all_gradients_together_is_refused(ranks: Ranks) -> None:
    parallel = autopar.compile(Blocks(), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    x, y = torch.randn(2, 8, 8)
    optimizer = torch.optim.LBFGS(parallel.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parallel(x, y)
        loss.backward()
        return loss

    with unittest.TestCase().assertRaisesRegex(RuntimeError, "one vector, .* or a mesh without `pipe`"):
        optimizer.step(closure)


def check_what_scripts_make_of_each_gradient(ranks: Ranks) -> None:
    """Norms of rows and columns, noise, values drawn anew: of other stages' parameters, too."""
    plain = Blocks().double()
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    for model in (parallel, plain):
        model(x, y).backward()
    for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        makes = (
            lambda g: g.norm(2, dim=0, keepdim=True), lambda g: g.norm(dim=-1), lambda g: g.norm(1), lambda g: g.mean(),
            lambda g: g.abs().amax(0), lambda g: g / (g.norm(2, dim=-1, keepdim=True) + 1),
        )  # fmt: skip
        for number, make in enumerate(makes):
            told = f"number {number} of {list(theirs.shape)}"
            torch.testing.assert_close(
                whole(make(ours.grad)), make(theirs.grad), msg=lambda why, told=told: f"{told}: {why}"
            )
        with torch.no_grad():
            torch.manual_seed(theirs.numel())
            noise, before = torch.randn_like(ours.grad), whole(ours.grad).clone()
            torch.manual_seed(theirs.numel())
            torch.testing.assert_close(whole(noise), torch.randn_like(theirs.grad), rtol=0, atol=0)
            ours.grad.add_(noise)
            torch.testing.assert_close(whole(ours.grad) - before, whole(noise))
            nn.init.normal_(ours, std=3.0)
        assert noise.shape == ours.shape and 0.5 < whole(ours).abs().mean() < 6


def check_a_model_that_some_ranks_have_dropped(ranks: Ranks) -> None:
    """Each rank collects garbage when it gets to it; numbers go over one group of processes on all of them."""
    x, y = torch.randn(2, 8, 8)
    kept = []  # by the ranks of the first stage: so garbage is there that has not been collected yet
    for _ in range(2):
        parallel = autopar.compile(Blocks(), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
        parallel(x, y).backward()
        assert torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0).item() > 0
        if ranks.rank < ranks.count // 2:
            kept.append(parallel)
        del parallel
        gc.collect()


def check_a_rank_that_asks_alone_is_told(ranks: Ranks) -> None:
    """Not by an abort of gloo, where what the others ask for has another size."""
    parallel = autopar.compile(Blocks(), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    x, y = torch.randn(2, 8, 8)
    parallel(x, y).backward()
    first = next(parallel.parameters())
    with unittest.TestCase().assertRaisesRegex(
        RuntimeError, "this rank asks for .*, and rank . for something else: .* in"
    ):
        if parallel._autopar.pipe.place == 0:
            first.grad.norm().item()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)


class Aside(nn.Module):
    """A head of the first stage that no loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.rest = nn.Linear(8, 8), nn.Linear(8, 4), Blocks()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x)
        return {"loss": self.rest(hidden, x), "aux_loss": self.aside(hidden).square().mean()}


def check_what_the_loss_does_not_reach_has_no_gradient(ranks: Ranks) -> None:
    """On no rank: where some had one, they would clip other parameters than the others."""
    plain = Aside().double()
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    x = torch.randn(4, 8, dtype=torch.float64)
    for model in (parallel, plain):
        model(x)["loss"].backward()
        assert {name for name, one in model.named_parameters() if one.grad is None} == {"aside.weight", "aside.bias"}
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (parallel, plain)]
    torch.testing.assert_close(*map(float, norms), rtol=1e-10, atol=0)


class Twice(nn.Module):
    """Weights that both stages read: one for each half of the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, 1)
        return (self.both(one) - self.both(other.flip(1) * 0.5)).square().mean()


def check_evaluation_of_weights_that_two_stages_read(ranks: Ranks) -> None:
    """Evaluation needs no stage to read all that it holds; and pins say nothing of what has no backward."""
    plain = Twice().double()
    options = {"micro_batches": 1, "memory": "4GiB", "time_limit_s": 10, "pin": {"both.2": "recompute"}}
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), **options)
    x = torch.randn(8, 16, dtype=torch.float64)
    for model in (parallel, plain):
        model(x).backward()
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), plain(x), rtol=NEAR, atol=NEAR)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole(parallel.get_parameter(name).grad), parameter.grad, rtol=NEAR, atol=NEAR)


def check_parameters_of_stages_on_the_host(ranks: Ranks) -> None:
    plain = Scaled().double()
    options = {"micro_batches": 1, "memory": "4GiB", "time_limit_s": 10, "pin": {"*": "offload-parameters"}}
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), **options)
    optimizers = [torch.optim.SGD(one.parameters(), 1e-1) for one in (parallel, plain)]
    for _ in range(STEPS):
        x, y = torch.randn(2, 8, 8, dtype=torch.float64)
        for model, optimizer in zip((parallel, plain), optimizers, strict=True):
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole(parallel.get_parameter(name)), parameter, rtol=NEAR, atol=NEAR)
