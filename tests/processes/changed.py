"""Parts of a model that are swapped, wrapped or added behind `compile`, on real processes, with stages and without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import NotCut, PlanMismatch
from tests.processes.compare import near, splits, whole
from tests.processes.worker import Ranks
from tests.support.machines import FAST

STEPS, WIDTH = 3, 32


class Parts(nn.Module):
    """Layers, a head, and perhaps a scale, which nobody has yet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.more = Scale()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.more(layer(x)) + x
        return (self.head(x) - y).square().mean()


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if hasattr(self, "scale") else x


def _swap_head(model: Any) -> None:
    model.head = nn.Linear(WIDTH, WIDTH)


def _swap_first(model: Any) -> None:
    model.layers[0] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _wrap(model: Any) -> None:
    model.head = nn.Sequential(model.head, nn.Linear(WIDTH, WIDTH))


def _append(model: Any) -> None:
    model.layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


def _new_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def _register(model: Any) -> None:
    model.more.register_parameter("scale", nn.Parameter(torch.randn(WIDTH)))


def _register_buffer(model: Any) -> None:
    model.more.register_buffer("scale", torch.randn(WIDTH))


def _reverse(model: Any) -> None:
    model.layers = nn.ModuleList([*model.layers][::-1])


def _take_away(model: Any) -> None:
    del model.layers[0]


def _swap_weights(model: Any) -> None:
    first, head = model.layers[0][0], model.head
    first.weight, head.weight = head.weight, first.weight


def _tie(model: Any) -> None:
    model.head.weight = model.layers[1][0].weight


def _copy_of_another(model: Any) -> None:
    model.head.weight = nn.Parameter(model.layers[1][0].weight.detach().clone())


# What is laid out changes places, and lies there as it lay.
MOVES: tuple[Callable[[Any], None], ...] = (_reverse, _take_away, _swap_weights, _tie, _copy_of_another)
CHANGES: tuple[Callable[[Any], None], ...] = (
    _swap_head, _swap_first, _wrap, _append, _new_parameter, _register, _register_buffer,
)  # fmt: skip


def _batch(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {name: torch.randn(16, WIDTH, generator=drawn) for name in "xy"}


def _changed(change: Callable[[Any], None], model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    change(model)


def _same(ranks: Ranks, change: Callable[[Any], None], made: Callable[[nn.Module], Any], *, first: bool) -> None:
    """Training with a change behind the first step, or before it (`first`), is that of the plain model. Every rank
    draws other values for what is new; those of rank 0 count.
    """
    torch.manual_seed(0)
    plain = Parts()
    parallel = made(copy.deepcopy(plain))
    if not first:
        for model in (plain, parallel):
            model(**_batch(0)).backward()
            model.zero_grad()
    _changed(change, plain, 1)
    _changed(change, parallel, 1 + ranks.rank)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (plain, parallel)]
    for step in range(STEPS):
        losses = [model(**_batch(step)) for model in (plain, parallel)]
        near(losses[1], losses[0], 1e-5, f"{change.__name__}: loss")
        for loss in losses:
            loss.backward()
        if step == 0:
            _gradients(plain, parallel, change)
        norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in (plain, parallel)]
        near(whole(norms[1]), norms[0], 1e-5, f"{change.__name__}: norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state, wanted = parallel.full_state_dict(rank0_only=False), plain.state_dict()
    assert state.keys() == wanted.keys(), change.__name__
    for name, value in wanted.items():
        near(state[name], value, 1e-5, f"{change.__name__}: {name}")
    parallel.load_state_dict(wanted)
    near(parallel(**_batch(9)).detach(), plain(**_batch(9)).detach(), 1e-5, f"{change.__name__}: loaded")


def _gradients(plain: nn.Module, parallel: nn.Module, change: Callable[[Any], None]) -> None:
    for name, parameter in plain.named_parameters():
        ours = parallel.get_parameter(name).grad
        assert ours is not None and parameter.grad is not None, (change.__name__, name)
        near(whole(ours), parameter.grad, 1e-5, f"{change.__name__}: gradient of {name}")


def check_parts_change_where_weights_are_split(ranks: Ranks) -> None:
    def made(model: nn.Module) -> Any:
        return autopar.compile(model, ranks.mesh(), hardware=FAST)

    for change in CHANGES:
        for first in (False, True):
            _same(ranks, change, made, first=first)
    for change in MOVES:
        _same(ranks, change, made, first=False)
    parallel = made(Parts())
    parallel(**_batch(0)).backward()
    splits(parallel)


def check_parts_change_where_parameters_are_plain(ranks: Ranks) -> None:
    """As they are where a plan leaves all of them whole, and nobody held them before."""

    def made(model: nn.Module) -> Any:
        return autopar.compile(model, ranks.mesh(), hardware="cpu-gloo", example_kwargs=_batch(0))

    for change in CHANGES:
        _same(ranks, change, made, first=True)
    for change in MOVES:
        _same(ranks, change, made, first=False)


def check_parts_change_in_stages(ranks: Ranks) -> None:
    mesh = autopar.init_mesh("cpu", **({"pipe": 2, "data": 2} if ranks.count == 4 else {"pipe": 2}))

    def made(model: nn.Module) -> Any:
        return autopar.compile(model, mesh, micro_batches=4, memory="4GiB", time_limit_s=10)

    for change in CHANGES:
        for first in (False, True):
            _same(ranks, change, made, first=first)


def check_weights_that_change_stages_are_refused(ranks: Ranks) -> None:
    """On all ranks, whichever of the stages they have."""
    mesh = autopar.init_mesh("cpu", **({"pipe": 2, "data": 2} if ranks.count == 4 else {"pipe": 2}))
    for change, words in (
        (_swap_weights, "read in another pipeline stage now"),
        (_tie_ends, "an earlier stage holds it"),
    ):
        parallel = autopar.compile(Parts(), mesh, micro_batches=4, memory="4GiB", time_limit_s=10)
        parallel(**_batch(0)).backward()
        change(parallel)
        try:
            parallel(**_batch(1))
        except (PlanMismatch, NotCut) as error:
            assert words in str(error), error
        else:
            raise AssertionError(change.__name__)


def _tie_ends(model: Any) -> None:
    model.head.weight = model.layers[0][0].weight


def check_averages_that_begin_behind_a_change(ranks: Ranks) -> None:
    """A copy of a module whose new part no call has laid out yet is laid out with it."""
    mesh = autopar.init_mesh("cpu", **({"pipe": 2, "data": 2} if ranks.count == 4 else {"pipe": 2}))
    torch.manual_seed(0)
    plain = Parts()
    models = [autopar.compile(copy.deepcopy(plain), mesh, micro_batches=4, memory="4GiB", time_limit_s=10), plain]
    averages: list[Any] = []
    for model in models:
        model(**_batch(0)).backward()
        model.zero_grad()
        _changed(_swap_head, model, 1 + ranks.rank * (model is not plain))
        averages.append(torch.optim.swa_utils.AveragedModel(model))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(STEPS):
            model(**_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            averages[-1].update_parameters(model)
    state = averages[0].module.full_state_dict(rank0_only=False)
    for name, value in averages[1].module.state_dict().items():
        near(state[name], value, 1e-5, f"average of {name}")


def check_an_optimizer_of_what_was_replaced_is_refused(ranks: Ranks) -> None:
    parallel = autopar.compile(Parts(), ranks.mesh(), hardware=FAST)
    parallel(**_batch(0)).backward()
    head = nn.Linear(WIDTH, WIDTH)
    early = torch.optim.SGD(head.parameters(), 0.1)
    parallel.head = head
    late = torch.optim.SGD(parallel.head.parameters(), 0.1)
    parallel(**_batch(0)).backward()
    before = whole(parallel.head.weight).clone()
    late.step()
    assert not torch.equal(whole(parallel.head.weight), before)
    try:
        early.step()
    except RuntimeError as error:
        assert "holds head.weight as it was before the parallel module laid it out" in str(error), error
    else:
        raise AssertionError("an optimizer that trains nothing made a step")
