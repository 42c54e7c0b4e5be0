"""Scripts that write to parts of parameters and gradients between steps, on real processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Mesh
from autopar.search import Request, search
from autopar.trace import capture, graph_of
from tests.processes.compare import near, whole
from tests.processes.errors import refused
from tests.processes.pipelines import mesh_of
from tests.processes.worker import Ranks
from tests.support.machines import machine

BESIDE = torch.randn(8, 8, generator=torch.Generator().manual_seed(7))  # a plain tensor, whole on every rank
EDITS: dict[str, Callable[[Tensor], object]] = {
    "a row": lambda w: w.__setitem__(5, 0.0),
    "a column": lambda w: w.__setitem__((slice(None), 3), torch.arange(8.0)),
    "some rows": lambda w: w[2:6].mul_(2),
    "a row in place": lambda w: w[0].zero_(),
    "a part of a part": lambda w: w[1:7][2].add_(1),
    "columns in place": lambda w: w[:, 2:5].add_(1),
    "chosen rows": lambda w: w.__setitem__([1, 6], torch.ones(2, 8)),
    "chosen elements": lambda w: w.__setitem__(w > 0, 0.5),
    "initialised": lambda w: nn.init.constant_(w[3:5], 7.0),
    "the identity": lambda w: nn.init.eye_(w),
    "numbers in a row": lambda w: torch.arange(8, out=w[2]),
    "times a plain mask": lambda w: w.mul_(BESIDE[:, :1] > 0),
    "a plain row added": lambda w: w.add_(BESIDE[3], alpha=0.5),
    "towards a plain one": lambda w: w.lerp_(BESIDE, 0.25),
    "filled where a plain one says": lambda w: w.masked_fill_(BESIDE > 0.5, 0.125),
    "a plain one copied": lambda w: w.copy_(BESIDE),
    "divided by a plain one": lambda w: w.__itruediv__(BESIDE),
    "rows that a plain index reads": lambda w: w.__setitem__([1, 6], w.detach()[torch.tensor([2, 3])]),
    "rows that a plain mask reads": lambda w: w.__setitem__(BESIDE[0] > 0, 2 * w.detach()[BESIDE[0] > 0]),
    "rows that a list reads": lambda w: w.__setitem__(slice(0, 2), w.detach()[[4, 5]]),
}
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda w: w.chunk(3)[1],
    "view": lambda w: w.view(-1).narrow(0, 3, 9),
    "narrow": lambda w: w.narrow(0, 1, 5),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))).square().mean()


def check_parts_that_are_written_to(ranks: Ranks) -> None:
    """Of parameters in rows, in columns and whole, and of their gradients. All was lost that lies on several ranks."""
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(8, 8)
    for policy in ("fsdp", "tensor-parallel", "data-parallel"):
        graph, mesh = graph_of(capture(Net(), (), {"x": x})), Mesh(("data",), (ranks.count,))
        plan = search(graph, mesh, machine(), Request(policy=policy))
        parallel = autopar.compile(copy.deepcopy(plain), ranks.mesh(), plan=plan)
        _edit_all(plain, parallel, x)
        _write_with_gradients(parallel)
        _turn_what_is_drawn(parallel)


def _turn_what_is_drawn(parallel: Any) -> None:
    """`t_()` of fewer rows than columns, within `nn.init`."""
    made = list[Tensor]()
    for weight in (parallel.first.weight, whole(parallel.first.weight)):
        torch.manual_seed(3)
        made.append(nn.init.orthogonal_(weight.detach().new_empty(4, 8)))
    near(whole(made[0]), made[1], 1e-6, "orthogonal rows")


def _write_with_gradients(parallel: Any) -> None:
    """Rows of a zero tensor to parameters, by plain masks and places, as loralib merges."""
    for index in (BESIDE.flatten()[:12] > -0.5, torch.tensor([5, 0, 2, 9, 11, 3, 7, 1])):
        count = int(index.sum()) if index.dtype == torch.bool else len(index)
        grads: list[Tensor] = []
        for weight in (parallel.first.weight, whole(parallel.first.weight).detach().requires_grad_()):
            weight.grad = None
            made = weight.new_zeros((12, 8))
            made[index] = weight[:count]
            (whole(made) * torch.arange(96.0).view(12, 8)).sum().backward()
            grads.append(whole(weight.grad))
            weight.grad = None
        near(grads[0], grads[1], 1e-6, f"rows at {index}")


MASK = (torch.arange(8) > 4).float()[:, None]
Hooks = tuple[Callable[[Tensor], Tensor | None], ...]
HOOKS: Hooks = (
    lambda gradient: gradient * MASK,
    lambda gradient: (MASK * gradient).mul_(2) + BESIDE,
    lambda gradient: gradient.masked_fill(MASK == 0, 0.0).mul(BESIDE[0]),
    lambda gradient: (gradient.mul_(MASK), None)[1],
    lambda gradient: gradient / (1 + gradient.norm().item()),  # a number that all ranks of all stages are asked for
    lambda gradient: BESIDE * gradient.norm() + gradient * BESIDE[:, 0] / gradient.abs().sum(),
    lambda gradient: gradient.sum(0, keepdim=True).expand(gradient.shape),
)
BY_NAME: Hooks = (  # which put the whole gradient together
    lambda gradient: torch.where(MASK > 0, gradient, 0.0),
    lambda gradient: torch.mul(gradient, MASK),
    lambda gradient: torch.stack([gradient, BESIDE]).sum(0),
)


def check_hooks_that_mask_gradients(ranks: Ranks) -> None:
    """With a plain mask: optimizers could not take what that gave beside pieces."""
    for policy in ("fsdp", "tensor-parallel", "data-parallel"):
        graph, mesh = graph_of(capture(Net(), (), {"x": BESIDE})), Mesh(("data",), (ranks.count,))
        plan = search(graph, mesh, machine(), Request(policy=policy))
        _train_with_hooks(partial(autopar.compile, device_mesh=ranks.mesh(), plan=plan), policy, HOOKS + BY_NAME)


def check_hooks_of_stages_that_mask_gradients(ranks: Ranks) -> None:
    """All ranks call them in one order."""
    made = partial(autopar.compile, device_mesh=mesh_of(ranks), micro_batches=2, memory="1GiB")
    _train_with_hooks(made, "stages", HOOKS)


def _train_with_hooks(made: Callable[[nn.Module], nn.Module], what: str, hooks: Hooks) -> None:
    """Registered on the model before it is compiled, before its first call, and behind it."""
    for number, hook in enumerate(hooks):
        for when in range(3):
            ended = [_trained(parallel, hook, when) for parallel in (lambda model: model, made)]
            for name, value in ended[0].items():
                near(ended[1][name], value, 1e-5, f"{name}, {what}, hook {number}, registered at {when}")


def _hooked(model: Any, hook: Callable[[Tensor], Tensor | None]) -> list[Any]:
    return [one.register_hook(hook) for one in (model.first.weight, model.last.weight)]


def _trained(made: Callable[[nn.Module], nn.Module], hook: Callable[[Tensor], Tensor | None], when: int) -> Any:
    torch.manual_seed(0)
    model: Any = Net()
    handles = _hooked(model, hook) if when == 0 else []
    model = made(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(4):
        if when and step == when - 1:
            handles = _hooked(model, hook)
        for handle in handles if step == 3 else ():
            handle.remove()
        model(x=BESIDE + step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    state = model.full_state_dict(rank0_only=False) if hasattr(model, "full_state_dict") else model.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def check_parts_of_stages_that_are_written_to(ranks: Ranks) -> None:
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(8, 8)
    options = {"micro_batches": 1, "memory": "4GiB", "time_limit_s": 10}
    _edit_all(plain, autopar.compile(copy.deepcopy(plain), mesh_of(ranks), **options), x)


def _edit_all(plain: nn.Module, parallel: nn.Module, x: Tensor) -> None:
    theirs = copy.deepcopy(plain)
    for name, edit in EDITS.items():
        for model in (parallel, theirs):
            model.zero_grad()
            model(x=x).backward()
            with torch.no_grad():
                for parameter in (model.first.weight, model.last.weight):
                    edit(parameter)
                    edit(parameter.grad)
        for of in ("first.weight", "last.weight"):
            mine, wanted = parallel.get_parameter(of), theirs.get_parameter(of)
            torch.testing.assert_close(whole(mine), wanted, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(whole(mine.grad), wanted.grad, rtol=1e-5, atol=1e-5)
    held = parallel.last.weight
    for name, copied in COPIES.items():
        before = whole(held).detach().clone()
        try:
            with torch.no_grad():
                copied(held).zero_()
        except RuntimeError as error:
            assert "nothing of that would be kept. Write to tensor[index]" in str(error), error
        else:
            with torch.no_grad():
                copied(before).zero_()
        assert torch.equal(whole(held), before), f"{name} was lost"


class Ends(nn.Module):
    def __init__(self, end: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.wide, self.narrow, self.end = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 1), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self, torch.tanh(self.body(x)))


ENDS: dict[str, Callable[[Ends, Tensor], Tensor]] = {
    "squeezed": lambda m, h: m.narrow(h).squeeze(-1),
    "permuted": lambda m, h: m.wide(h).unflatten(1, (2, 4)).permute(0, 2, 1),
    "plain": lambda m, h: m.wide(h),
}


def check_outputs_are_changed_in_place(ranks: Ranks) -> None:
    """Each rank's own rows, DTensors, and what is put together when it is read."""
    mesh, x = ranks.mesh(), torch.randn(16, 16, dtype=torch.float64)
    for inputs, outputs in (("local", "auto"), ("global", "auto"), ("global", "sharded"), ("global", "global")):
        for name, end in ENDS.items():
            torch.manual_seed(0)
            plain = Ends(end).double()
            parallel = autopar.compile(
                copy.deepcopy(plain), mesh, inputs=inputs, outputs=outputs, hardware=machine(flops=1e6)
            )
            for model, given in ((plain, x), (parallel, x.chunk(ranks.count)[ranks.rank] if inputs == "local" else x)):
                output = model(given)
                output.mul_(2)
                output.square().mean().backward()
            for of, parameter in plain.named_parameters():
                if parameter.grad is None:  # of the other head
                    continue
                told = f"{of}, {inputs} to {outputs}, {name}"
                mine = whole(parallel.get_parameter(of).grad)
                torch.testing.assert_close(mine, parameter.grad, msg=lambda m, t=told: f"{t}: {m}")


def check_a_piece_that_backward_reads_must_not_be(ranks: Ranks) -> None:
    plain = Ends(lambda m, h: (h, m.wide(h)))
    parallel = autopar.compile(plain, ranks.mesh(), outputs="sharded", hardware=machine(flops=1e6))
    hidden, output = parallel(torch.randn(16, 16))
    hidden.mul_(2)
    refused(RuntimeError, "was changed in place between forward and backward", output.square().mean().backward)


def check_gradients_made_by_hand(ranks: Ranks) -> None:
    """Whole ones, as a script makes them of nothing: a step was refused, as if SGD could not run."""
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(8, 8)
    graph, mesh = graph_of(capture(Net(), (), {"x": x})), Mesh(("data",), (ranks.count,))
    plan = search(graph, mesh, machine(), Request(policy="fsdp"))
    parallel = autopar.compile(copy.deepcopy(plain), ranks.mesh(), plan=plan)
    for model in (plain, parallel):
        for called in (False, True):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.arange(float(parameter.numel())).view(parameter.shape) + number
            with parallel.no_sync():
                model(x=x).backward()  # adds to them
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0 + called)
            torch.optim.AdamW(model.parameters(), 0.1).step()
    for mine, wanted in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), wanted)
