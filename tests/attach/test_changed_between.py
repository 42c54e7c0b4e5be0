"""What is changed in place between forward and backward, by a script or by forward itself (buffers)."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients
from tests.support.families import Queue

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))


class Ends(nn.Module):
    """Ends as it is told to."""

    def __init__(self, end: Callable[[nn.Module, Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.body, self.wide, self.narrow, self.end = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 1), end
        self.register_buffer("scale", torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.end(self, torch.tanh(self.body(x)))


def both(module: nn.Module, one: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    return module, autopar.compile(copy.deepcopy(module), one)


@pytest.mark.parametrize(
    "end",
    [
        lambda m, h: m.narrow(h).squeeze(-1),
        lambda m, h: m.wide(h).view(2, -1),
        lambda m, h: m.wide(h).permute(1, 0),
        lambda m, h: m.wide(h)[:, 0],
        lambda m, h: (m.wide(h).view(-1), m.narrow(h)),
        lambda m, h: {"wide": m.wide(h), "loss": m.narrow(h).mean()},
    ],
    ids=["squeezed", "view", "permuted", "one column", "two", "beside a loss"],
)
def test_outputs_may_be_changed_in_place(one: DeviceMesh, end: Callable[..., Tensor]) -> None:
    plain, parallel = both(Ends(end), one)
    for model in (plain, parallel):
        given = model(X)
        outputs = [*given.values()] if isinstance(given, dict) else [given] if isinstance(given, Tensor) else [*given]
        for output in outputs:
            output.mul_(2).sigmoid_()
        sum(output.square().sum() for output in outputs).backward()
    same_gradients(plain, parallel)


def halved(output: Tensor, _: nn.Module) -> None:
    output.mul_(0.5)


def with_no_grad(output: Tensor, _: nn.Module) -> None:
    with torch.no_grad():
        output.mul_(0.5)


def through_detach(output: Tensor, _: nn.Module) -> None:
    output.detach()[0] = 1


def buffer_of(_: Tensor, model: nn.Module) -> None:
    with torch.no_grad():
        model.scale.mul_(2)


@pytest.mark.parametrize("change", [halved, with_no_grad, through_detach, buffer_of])
def test_what_backward_reads_must_not_be(one: DeviceMesh, change: Callable[[Tensor, nn.Module], None]) -> None:
    """torch refuses it, too. It gave wrong gradients without a word."""
    plain, parallel = both(Ends(lambda m, h: (h, m.wide(h * m.scale))), one)
    for model in (plain, parallel):
        hidden, output = model(X)
        change(hidden, model)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            output.square().sum().backward()
    assert all(parameter.grad is None for parameter in parallel.parameters())


def test_a_buffer_that_is_assigned_between_leaves_the_call_alone(one: DeviceMesh) -> None:
    plain, parallel = both(Ends(lambda m, h: (h * m.scale).sum()), one)
    for model in (plain, parallel):
        loss = model(X)
        model.scale = model.scale * 2
        loss.backward()
    same_gradients(plain, parallel)


@pytest.mark.parametrize("at_once", [False, True], ids=["one call a step", "two"])
def test_backward_reads_what_a_buffer_was(one: DeviceMesh, at_once: bool) -> None:
    """A queue that is multiplied by, then written to, gave the gradients of what it is afterwards."""
    torch.manual_seed(0)
    plain, parallel = both(Queue(), one)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, parallel)]
    for _ in range(3):
        x, y = torch.randn(2, 12, 12)
        for model, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x, y) * (model(y, x) if at_once else 1)).backward()
        same_gradients(plain, parallel)
        for optimizer in optimizers:
            optimizer.step()
    for name, buffer in plain.named_buffers():
        near(dict(parallel.named_buffers())[name], buffer, 1e-5, name)


def test_data_that_forward_sets_is_there_behind_the_call(one: DeviceMesh) -> None:
    """Of a buffer; where backward would read what it was, torch takes what it is then, and it is refused."""

    def end(m: nn.Module, h: Tensor) -> Tensor:
        m.scale.data = m.scale * 0.9
        return (h * m.scale).sum()

    plain, parallel = both(Ends(end), one)
    for _ in range(3):
        for model in (plain, parallel):
            model.zero_grad()
            model(X).backward()
        same_gradients(plain, parallel)
        near(parallel.scale, plain.scale, 1e-6, "the buffer")

    def reads(m: nn.Module, h: Tensor) -> Tensor:
        made = h * m.scale
        m.scale.data = m.scale * 0.9
        return made.sum()

    _, parallel = both(Ends(reads), one)
    with pytest.raises(TraceError):
        parallel(X)


@pytest.mark.parametrize("how", ["a hook", "retain_grad"])
def test_a_gradient_between_two_outputs_is_not_to_be_seen(one: DeviceMesh, how: str) -> None:
    """The hook saw what came from outside alone, and changed nothing of what went from the loss to the weights."""
    plain, parallel = both(Ends(lambda m, h: (m.narrow(h).mean(), h)), one)
    loss, hidden = parallel(X)
    if how == "a hook":
        hidden.register_hook(lambda gradient: gradient * 3)
    else:
        hidden.retain_grad()
    with pytest.raises(RuntimeError, match="output 1 of the module has a hook, or retains its gradient, and output 0"):
        (loss + hidden.sum()).backward()
    for model in (plain, parallel):
        _, hidden = model(X)
        hidden.register_hook(lambda gradient: gradient * 3)
        hidden.square().sum().backward()  # the loss has no part in it
    same_gradients(plain, parallel)
