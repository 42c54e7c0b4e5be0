"""Copies of a parallel module, what is refused of them, and what is done to a module and a model around it."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import autopar
from autopar import PlanMismatch
from autopar.optim import Streamed
from tests.processes.compare import LOSS, adamw, near, same_state, same_steps
from tests.processes.errors import refused
from tests.processes.models import Net, batch, net
from tests.processes.saving_memory import fastest, local, saving_memory
from tests.processes.state import Kept, laid_out, not_called, whole_values
from tests.processes.worker import Ranks
from tests.support.machines import FAST
from tests.support.nets import batch_of, made
from tests.support.residence import hosted

# --- copies ----------------------------------------------------------------------------------------------------------


def check_a_copy_trains_by_itself(ranks: Ranks) -> None:
    """Before the first call and after it, where weights are split and where they are whole."""
    for policy in ("fsdp", "tensor-parallel", "data-parallel", None):
        plain = net(Kept, seed=1)
        parallel = laid_out(ranks, plain, policy) if policy else not_called(ranks, plain)
        if policy:
            parallel(**batch(3)).backward(), plain(**batch(3)).backward()
        made, twin = copy.deepcopy(parallel), copy.deepcopy(plain)
        assert type(made) is type(parallel) and (not policy or made.plan is parallel.plan)
        assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.grad is None for p in made.parameters())
        assert made.third.weight is made.first.weight and made.again is made.second and not made.scale.requires_grad
        ours, theirs = ([*m.parameters(), *m.buffers()] for m in (made, parallel))
        assert not {local(value).data_ptr() for value in ours} & {local(value).data_ptr() for value in theirs}
        before = whole_values(parallel)
        parallel.zero_grad(), plain.zero_grad()
        same_steps(twin, made, batch(2), steps=3)
        assert all(torch.equal(value, before[name]) for name, value in whole_values(parallel).items())
        assert all(parameter.grad is None for parameter in parallel.parameters())
        before = whole_values(made)
        same_steps(plain, parallel, batch(), steps=3)
        assert all(torch.equal(value, before[name]) for name, value in whole_values(made).items())
        for module in (made, twin, parallel, plain):
            module.eval()
        with torch.no_grad():
            near(made(**batch(4)), twin(**batch(4)), LOSS, "loss of the copy in eval mode")
            near(parallel(**batch(4)), plain(**batch(4)), LOSS, "loss in eval mode")
        near(copy.deepcopy(made)(**batch(4)), twin(**batch(4)), LOSS, "loss of a copy of the copy in eval mode")


def check_a_copy_of_what_lies_on_the_host_trains_by_itself(ranks: Ranks) -> None:
    plan = next(
        plan
        for plan in (saving_memory(fastest("mlp", ranks.count), seed) for seed in range(50))
        if any("Shard" in str(plan.parameters[key]) for key in hosted(plan.residence))
    )
    parallel = autopar.compile(made("mlp"), ranks.mesh(), example_kwargs=batch_of("mlp", 0), plan=plan)
    optimizer = Streamed(adamw(parallel.parameters()), parallel, overlap=True)
    parallel(**batch_of("mlp", 0)).backward()
    optimizer.step()
    twin = copy.deepcopy(parallel)  # right behind the step, which still goes on
    wanted, plain = whole_values(parallel), made("mlp")
    assert all(torch.equal(value, wanted[name]) for name, value in whole_values(twin).items())
    plain.load_state_dict(wanted)
    same_steps(
        plain,
        twin,
        batch_of("mlp", 1),
        (adamw(plain.parameters()), Streamed(adamw(twin.parameters()), twin, overlap=True)),
    )
    assert all(torch.equal(value, wanted[name]) for name, value in whole_values(parallel).items())


def averaged(model: nn.Module, kind: str) -> tuple[nn.Module, Any]:
    """The copy that follows, and what brings it up to date: as people write it."""
    swa = torch.optim.swa_utils
    match kind:
        case "AveragedModel":
            mean = swa.AveragedModel(model)
            return mean.module, lambda: mean.update_parameters(model)
        case "AveragedModel with one function for all":
            mean = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.7))
            return mean.module, lambda: mean.update_parameters(model)
        case "AveragedModel of buffers":
            mean = swa.AveragedModel(model, avg_fn=swa.get_ema_avg_fn(0.7), use_buffers=True)
            return mean.module, lambda: mean.update_parameters(model)
    follower = copy.deepcopy(model)

    @torch.no_grad()
    def over_state_dicts() -> None:
        for ours, theirs in zip(follower.state_dict().values(), model.state_dict().values(), strict=True):
            ours.copy_(0.7 * ours + 0.3 * theirs)

    @torch.no_grad()
    def over_parameters() -> None:
        for ours, theirs in zip(follower.parameters(), model.parameters(), strict=True):
            ours.mul_(0.7).add_(theirs.data, alpha=0.3)
        for ours, theirs in zip(follower.buffers(), model.buffers(), strict=True):
            ours.copy_(theirs)

    return follower, {"over state dicts": over_state_dicts, "over parameters": over_parameters}[kind]


AVERAGES = (
    "AveragedModel",
    "AveragedModel with one function for all",
    "AveragedModel of buffers",
    "over state dicts",
    "over parameters",
)


def check_averages_are_those_of_the_plain_model(ranks: Ranks) -> None:
    for kind in AVERAGES:
        for policy in ("tensor-parallel", "data-parallel", None):
            plain = net(seed=1)
            parallel = laid_out(ranks, plain, policy) if policy else not_called(ranks, plain)
            (wanted, theirs), (found, ours) = averaged(plain, kind), averaged(parallel, kind)
            optimizers = adamw(plain.parameters()), adamw(parallel.parameters())
            for step in range(3):
                same_steps(plain, parallel, batch(step), optimizers, steps=1)
                theirs(), ours()
            same_state(wanted, found)
            wanted.eval(), found.eval()
            with torch.no_grad():
                near(found(**batch(5)), wanted(**batch(5)), LOSS, f"loss of the average, {kind}, {policy}")
            assert torch.equal(whole_values(found)["first.weight"], whole_values(found)["third.weight"])


# --- what is refused -------------------------------------------------------------------------------------------------


def check_a_parallel_module_is_not_pickled(ranks: Ranks) -> None:
    told = (
        r"a parallel module \(ParallelKept\) belongs to the processes that run it and cannot be pickled: save "
        r"parallel.full_state_dict\(\), or .* torch.distributed.checkpoint"
    )
    for parallel in (not_called(ranks, net(Kept)), laid_out(ranks, net(Kept))):
        refused(TypeError, told, lambda p=parallel: torch.save(p, io.BytesIO()))
        refused(TypeError, told, lambda p=parallel: torch.save({"model": p, "step": 3}, io.BytesIO()))
        refused(TypeError, told, lambda p=parallel: torch.multiprocessing.spawn(print, args=(p,)))
        loader = torch.utils.data.DataLoader(Held(parallel), num_workers=1, multiprocessing_context="spawn")
        refused(TypeError, told, lambda it=loader: next(iter(it)))
        refused(TypeError, r"share_memory: .* load parallel.full_state_dict\(\) into the plain", parallel.share_memory)
        again = copy.copy(parallel)
        assert type(again) is type(parallel) and again.first.weight is parallel.first.weight
        near(again(**batch()), net(Kept)(**batch()), LOSS, "loss of a shallow copy")


class Held(torch.utils.data.Dataset):
    """A dataset with a model of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


# --- torch.compile ---------------------------------------------------------------------------------------------------


def check_torch_compile_leaves_the_program_as_it_is(ranks: Ranks) -> None:
    """Before the first call and after it, of the module and of a whole step."""
    for policy in ("fsdp", None):
        plain = net()
        parallel = laid_out(ranks, plain, policy) if policy else not_called(ranks, plain)
        compiled = torch.compile(parallel, backend="eager")
        optimizers = adamw(plain.parameters()), adamw(parallel.parameters())
        for step in range(3):
            loss, wanted = compiled(**batch(step)), plain(**batch(step))
            near(loss, wanted, LOSS, f"loss of step {step}")
            loss.backward(), wanted.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        same_state(plain, parallel)

        @torch.compile(backend="eager")
        def scaled(x: Tensor, y: Tensor, parallel: nn.Module = parallel) -> Tensor:
            return 2 * parallel(x * 1.0, y)

        near(scaled(**batch()), 2 * plain(**batch()), LOSS, "loss of a compiled function")


# --- what is done to a module behind its first call, and to a model before it ----------------------------------------


def check_what_is_done_to_a_compiled_module_is_right_or_refused(ranks: Ranks) -> None:
    for policy in ("tensor-parallel", "data-parallel"):
        for change in (nn.Module.half, nn.Module.double, nn.Module.bfloat16, lambda m: m.to(torch.float64)):
            parallel = laid_out(ranks, net(), policy)
            change(parallel)
            told = r"parameter \S+ is (plain )?b?float(16|64).*, the plan has it as float32.* compile again for another"
            refused(PlanMismatch, told, lambda p=parallel: p(**batch()))
            plain = net()
            change(plain), plain.float(), parallel.float()
            same_steps(plain, parallel, batch(), steps=1)
        plain, parallel = net(), laid_out(ranks, net(), policy)
        same_steps(plain, parallel.cpu().to("cpu").to(torch.float32).float(), batch(), steps=1)
        parallel.to("meta")
        refused(RuntimeError, r"on the meta device .* call to_empty\(device=...\)", lambda p=parallel: p(**batch()))
        plain, parallel = net(), laid_out(ranks, net(), policy)
        for module in (plain, parallel):
            module.second.requires_grad_(False)
        same_steps(plain, parallel, batch(), steps=2)
        for module in (plain, parallel):
            module.second.requires_grad_(True)
        same_steps(plain, parallel, batch(), steps=2)
        parallel.requires_grad_(False)
        assert not parallel(**batch()).requires_grad
        plain(**batch())  # batch norm counts the call
        for module in (plain, parallel):
            module.requires_grad_(True)  # also what was frozen when it was planned
        same_steps(plain, parallel, batch(), steps=2)


def check_models_with_weights_that_are_computed_train(ranks: Ranks) -> None:
    """Parametrizations, and hooks that make a weight of others before each call."""
    utils = nn.utils
    changes: tuple[Callable[[Net], Any], ...] = (
        lambda m: utils.parametrizations.weight_norm(m.second),
        lambda m: utils.parametrizations.spectral_norm(m.second),
        lambda m: utils.parametrizations.orthogonal(m.second),
        lambda m: utils.spectral_norm(m.second),
        lambda m: old_weight_norm(m.second),
        lambda m: prune.l1_unstructured(m.second, "weight", 0.4),
        lambda m: prune.remove(utils.prune.ln_structured(m.head, "weight", 0.5, n=2, dim=0), "weight"),
    )
    for number, change in enumerate(changes):
        for called in (False, True) if number % 2 else (True,):
            models: list[Net] = []
            for _ in range(2):
                models.append(net(seed=1))
                torch.manual_seed(3)
                change(models[-1])
                if called:
                    models[-1](**batch(3)).backward()
                    models[-1].zero_grad()
            plain = models[0]
            parallel = autopar.compile(models[1], ranks.mesh(), hardware=FAST)
            same_steps(plain, parallel, batch(), steps=2)
            plain.eval(), parallel.eval()
            with torch.no_grad():
                near(parallel(**batch(3)), plain(**batch(3)), LOSS, f"loss of change {number} in eval mode")
            wanted = {name: value.clone() for name, value in plain.state_dict().items()}
            assert list(parallel.full_state_dict(rank0_only=False)) == list(wanted)


def old_weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and much used
        nn.utils.weight_norm(module)
