"""Arguments that require grad get their gradients: inputs that are trained themselves, and modules that train through
another one.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from tests.processes.compare import GRADIENT, near, same_gradients, same_state


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None, **others: Any) -> Tensor:
        made = self.down(functional.gelu(self.up(x if scale is None else x * scale)))
        return made * others["weight"] if "weight" in others else made


class WithAux(Judge):
    """A loss and, beside it, what it was made of."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = super().forward(x)
        return made.square().mean(), made


def both(one: DeviceMesh, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = model or Judge()
    return plain, autopar.compile(copy.deepcopy(plain), one, **options)


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_()


def gradients(model: nn.Module, call: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    again = [one.detach().clone().requires_grad_(one.requires_grad) for one in given]
    model.zero_grad()
    call(model, *again).backward()
    return [one.grad for one in again if one.grad is not None]


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "positional": (lambda model, x: model(x).square().mean(), (leaf(4, 8),)),
    "two": (lambda model, x, y: model(x, y).square().mean(), (leaf(4, 8), leaf(8))),
    "one of two": (lambda model, x, y: model(x, y).square().mean(), (leaf(4, 8).detach(), leaf(4, 8))),
    "the same twice": (lambda model, x: model(x, x).square().mean(), (leaf(4, 8),)),
    "a view": (lambda model, x: model(x.T[1:]).square().mean(), (leaf(8, 5),)),
    "made by others": (lambda model, x: model(torch.tanh(x) + 1).square().mean(), (leaf(4, 8),)),
    "by name": (lambda model, x, w: model(x=x, weight=w).square().mean(), (leaf(4, 8), leaf(3))),
    "of two calls": (lambda model, x: (model(x) * model(2 * x)).mean(), (leaf(4, 8),)),
    "through itself": (lambda model, x: model(functional.pad(model(x), (0, 5))).square().mean(), (leaf(4, 8),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_get_the_gradients_of_the_plain_model(one: DeviceMesh, name: str) -> None:
    plain, parallel = both(one, outputs="global")
    call, given = CALLS[name]
    ours, wanted = gradients(parallel, call, *given), gradients(plain, call, *given)
    assert len(ours) == len(wanted) > 0
    for own, other in zip(ours, wanted, strict=True):
        near(own, other, GRADIENT, name)
    same_gradients(plain, parallel)


def test_a_module_that_nobody_trains_hands_gradients_on(one: DeviceMesh) -> None:
    """As losses of features do, and attacks."""
    plain, parallel = both(one)
    for model in (plain, parallel):
        model.requires_grad_(False).eval()
    x = leaf(4, 8)
    (wanted,), (ours,) = (torch.autograd.grad(model(x).square().sum(), x) for model in (plain, parallel))
    near(ours, wanted, GRADIENT, "of the input")
    assert x.grad is None and all(parameter.grad is None for parameter in parallel.parameters())


def test_optimizers_train_inputs_beside_the_model(one: DeviceMesh) -> None:
    plain, parallel = both(one)
    ends: list[Tensor] = []
    for model in (plain, parallel):
        x = leaf(4, 8)
        optimizer = torch.optim.Adam([x, *model.parameters()], lr=0.05)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        ends.append(x)
    near(ends[1], ends[0], 1e-4, "the input")
    same_state(plain, parallel)


def test_hooks_see_gradients_of_arguments(one: DeviceMesh) -> None:
    plain, parallel = both(one)
    found: list[list[Tensor]] = []
    for model in (plain, parallel):
        x, seen = leaf(4, 8), list[Tensor]()
        made = x * 3
        made.retain_grad()
        made.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()) or gradient * 2)
        model(made).square().mean().backward()
        assert made.grad is not None and x.grad is not None
        found.append([*seen, made.grad, x.grad])
    for ours, wanted in zip(found[1], found[0], strict=True):
        near(ours, wanted, GRADIENT, "seen by a hook")


def test_calls_with_and_without_gradients_of_arguments_have_programs_of_their_own(one: DeviceMesh) -> None:
    plain, parallel = both(one)
    x = leaf(4, 8)
    for given in (x.detach(), x, x.detach(), x):
        for model in (plain, parallel):
            model.zero_grad()
            x.grad = None
            model(given).square().mean().backward()
            assert (x.grad is None) is not given.requires_grad
        same_gradients(plain, parallel)
    with torch.no_grad():
        near(parallel(x), plain(x), 1e-5, "without gradients")
    with torch.inference_mode():
        near(parallel(x), plain(x), 1e-5, "in inference mode")


def test_gradients_that_arrive_beside_the_loss_reach_arguments(one: DeviceMesh) -> None:
    plain, parallel = both(one, WithAux())

    def call(model: nn.Module, x: Tensor) -> Tensor:
        loss, made = model(x)
        return loss + made.tanh().mean()

    x = leaf(4, 8)
    (ours,), (wanted,) = gradients(parallel, call, x), gradients(plain, call, x)
    near(ours, wanted, GRADIENT, "of both outputs")
    same_gradients(plain, parallel)


class Apart(Judge):
    """A second argument that only the output beside the loss is made of."""

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        made = super().forward(x)
        return made.square().mean(), made * t


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_an_argument_that_the_loss_is_not_made_of_gets_its_gradient(one: DeviceMesh, frozen: bool) -> None:
    plain, parallel = both(one, Apart().requires_grad_(not frozen))

    def call(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        loss, made = model(x, t)
        return made.tanh().sum() if frozen else loss + made.tanh().sum()

    for _ in range(2):
        given = leaf(4, 8), leaf(4, 3)
        for ours, wanted in zip(gradients(parallel, call, *given), gradients(plain, call, *given), strict=True):
            near(ours, wanted, GRADIENT, "of both arguments")
    t = leaf(4, 3)
    (ours,), (wanted,) = (torch.autograd.grad(model(leaf(4, 8), t)[1].sum(), t) for model in (parallel, plain))
    near(ours, wanted, GRADIENT, "asked for alone")
    x, t = leaf(4, 8), leaf(4, 3)
    if not frozen:
        parallel(x, t)[0].backward()
        assert x.grad is not None and t.grad is None


def test_parameters_on_the_host_hand_gradients_on(one: DeviceMesh) -> None:
    plain, parallel = both(one, pin={"up": "offload-parameters"})

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    (ours,), (wanted,) = gradients(parallel, call, leaf(4, 8)), gradients(plain, call, leaf(4, 8))
    near(ours, wanted, GRADIENT, "of the input")
    same_gradients(plain, parallel)
    assert "host" in parallel.plan.residence.values()


def test_a_call_without_backward_is_freed_at_once(one: DeviceMesh) -> None:
    """What a program saves may be an output, which leads to what holds it."""
    _, parallel = both(one, WithAux())
    held: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            x = leaf(4, 8)
            held.append(weakref.ref(x))
            parallel(x)
            del x
        assert all(one() is None for one in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("first", [nn.LeakyReLU(0.2, inplace=True), nn.Hardtanh(inplace=True)], ids=repr)
def test_an_argument_that_forward_changes_has_its_gradient(one: DeviceMesh, first: nn.Module) -> None:
    plain, parallel = both(one, nn.Sequential(first, nn.Linear(8, 3)))
    found, base = [], leaf(4, 8)
    for model in (plain, parallel):
        x = base * 2
        found.append((x, *torch.autograd.grad(model(x).square().sum() + x.sum(), base)))
    for wanted, ours in zip(*found, strict=True):
        near(ours, wanted, GRADIENT, "of what is changed")


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_put_gradients_of_rows_together(one: DeviceMesh, count: int) -> None:
    plain, parallel = both(one, WithAux(), micro_batches=count)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return 0.5 * model(x)[0]

    x = leaf(8, 8)
    (ours,), (wanted,) = gradients(parallel, call, x), gradients(plain, call, x)
    near(ours, wanted, GRADIENT, f"in {count}")
    same_gradients(plain, parallel)


def test_micro_batches_share_a_gradient_that_is_alike_in_all(one: DeviceMesh) -> None:
    class Penalised(Judge):
        def forward(self, x: Tensor, prompt: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + prompt).square().mean() + bias.sum() + prompt.square().sum()

    plain, parallel = both(one, Penalised(), micro_batches=2)
    given = leaf(8, 8), leaf(8), leaf(5)

    def call(model: nn.Module, *args: Tensor) -> Tensor:
        return model(*args)

    for ours, wanted in zip(gradients(parallel, call, *given), gradients(plain, call, *given), strict=True):
        near(ours, wanted, GRADIENT, "of rows, of a prompt, and of a penalty alone")


def test_an_argument_that_is_changed_before_backward_is_refused(one: DeviceMesh) -> None:
    _, parallel = both(one)
    x = leaf(4, 8)
    loss = parallel(x).square().mean()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="an input was changed in place between forward and backward"):
        loss.backward()


def test_forward_sees_that_an_argument_requires_grad(one: DeviceMesh) -> None:
    class Asks(Judge):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * 3 if x.requires_grad else x)

    plain, parallel = both(one, Asks())
    for x in (leaf(4, 8), leaf(4, 8).detach()):
        near(parallel(x), copy.deepcopy(plain)(x), 1e-5, "what it gives")
