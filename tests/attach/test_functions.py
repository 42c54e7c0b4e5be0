"""Functions with a backward of their own: it is what runs, also where it is no derivative of their forward."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import LOSS, both_backward, near, same_gradients, same_steps
from tests.support.stepping import train_alike


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


class Rounded(torch.autograd.Function):
    """Straight through; with a second result that is no tensor, and one without a gradient."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x.round(), (x.abs() < 1).to(x.dtype), 3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, int]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
        return grad * ctx.saved_tensors[0]


class Scan(torch.autograd.Function):
    """In-place steps on its own copy, which autograd could not go back through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = x.clone()
        for i in range(1, x.shape[1]):
            made[:, i].add_(made[:, i - 1].mul(made[:, i]))
        ctx.save_for_backward(x)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Doubled(torch.autograd.Function):
    """Applies another one inside."""

    @staticmethod
    def forward(ctx: Any, parts: list[Tensor], x: Tensor) -> Tensor:
        return 2 * reverse(x, 5.0) + parts[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad * 7


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Calls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


reverse = Reverse.apply  # bound before anything is traced


class Net(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(6, 6), nn.Linear(6, 6), what

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        match self.what:
            case "reverse":
                h = reverse(h, 3.0)
            case "rounded":
                h, inside, count = Rounded.apply(2 * h)
                h = h * inside * count
            case "scan":
                h = Scan.apply(h)
            case "doubled":
                h = Doubled.apply([x], h)
            case "twice":
                h = reverse(reverse(h, 0.5).sin(), 2.0)
            case "in place":
                h = InPlace.apply(h + 1)
            case "calls":
                h = Calls.apply(h, self.b)
            case "sparse":
                h = Sparse.apply(h)
        return self.b(h).square().mean()


@pytest.mark.parametrize("what", ["reverse", "rounded", "scan", "doubled", "twice"])
def test_the_backward_that_is_written_is_the_one_that_runs(one: DeviceMesh, what: str) -> None:
    torch.manual_seed(0)
    plain = Net(what)
    parallel = autopar.compile(plain, one)
    for rows in (4, 3):
        x = torch.randn(rows, 6)
        plain.zero_grad(), parallel.zero_grad()
        wanted, ours = plain(x), parallel(x)
        near(ours, wanted, LOSS, "loss")
        wanted.backward(), ours.backward()
        same_gradients(plain, parallel)
    plain.eval(), parallel.eval()
    with torch.no_grad():
        near(parallel(x), plain(x), LOSS, "loss in eval")
    assert torch.autograd.Function.apply.__func__.__code__.co_filename.endswith("function.py")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("in place", "changes its arguments in place"),
        ("calls", "is given a module or function"),
        ("sparse", r"forward makes a sparse tensor at .*test_functions.py.*, and a program computes with dense ones"),
    ],
)
def test_what_could_not_be_trained_is_refused(one: DeviceMesh, what: str, told: str) -> None:
    parallel = autopar.compile(Net(what), one)
    with pytest.raises(TraceError, match=told):
        parallel(torch.randn(4, 6))


class Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        picked = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (4, 4), check_invariants=False)
        return torch.sparse.mm(picked, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Scaled(torch.autograd.Function):
    """Keeps a number for its backward, as reversed gradients with a schedule do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Any, bound: int) -> Tensor:  # type: ignore[override]
        ctx.scale = scale
        return x.clamp(max=bound)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return -gradient * ctx.scale, None, None


class OfNumbers(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what, self.step = nn.Linear(6, 6), what, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.step += 1
        scale: Any = {
            "drawn": random.uniform(0.5, 2.0),
            "counted": 2 / (1 + math.exp(-self.step / 10)) - 1,
            "taken out": h.detach().norm().item(),
        }[self.what]
        return Scaled.apply(h, scale, 2).square().mean()


class Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flag: bool) -> Tensor:  # type: ignore[override]
        ctx.flag = flag
        return x * 2 if flag else x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient if ctx.flag else -gradient, None


class InABranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = Chosen.apply(self.inner(x), random.random() < 0.5)
        if h.mean() > 0:
            h = Scaled.apply(h, 0.5, 2)
        h = Scaled.apply(h, 1.5, 2) if h.mean() > 0.1 else h * 2
        return h.square().mean()


class OfRows(InABranch):
    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return Scaled.apply(h[h[:, 0] > 0], 0.5, 2).sum()


class CheckpointFunction(torch.autograd.Function):
    """As diffusion models have it, in each attention."""

    @staticmethod
    def forward(ctx: Any, run_function: Any, length: int, *args: Any) -> Any:  # type: ignore[override]
        ctx.run_function, ctx.input_tensors, ctx.input_params = run_function, [*args[:length]], [*args[length:]]
        with torch.no_grad():
            return ctx.run_function(*ctx.input_tensors)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> Any:  # type: ignore[override]
        ctx.input_tensors = [x.detach().requires_grad_(True) for x in ctx.input_tensors]
        with torch.enable_grad():
            shallow_copies = [x.view_as(x) for x in ctx.input_tensors]
            output_tensors = ctx.run_function(*shallow_copies)
        input_grads = torch.autograd.grad(
            output_tensors, ctx.input_tensors + ctx.input_params, output_grads, allow_unused=True
        )
        return (None, None, *input_grads)


class Block(nn.Module):
    def __init__(self, tells: bool) -> None:
        super().__init__()
        self.inner, self.tells = nn.Linear(6, 6), tells

    def forward(self, x: Tensor) -> Tensor:
        return CheckpointFunction.apply(self._forward, 1, x, *(self.parameters() if self.tells else ()))

    def _forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class ComputedAgain(nn.Module):
    def __init__(self, tells: bool = True) -> None:
        super().__init__()
        self.block, self.last = Block(tells), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.last(x)).square().mean()


def test_what_is_computed_again_in_backward_trains(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = ComputedAgain()
    train_alike(plain, autopar.compile(copy.deepcopy(plain), one), [torch.randn(4, 6) for _ in range(3)])
    with pytest.raises(TraceError, match="is given a module or function, whose parameters a program would not train"):
        autopar.compile(ComputedAgain(tells=False), one)(torch.randn(4, 6))


def test_rows_that_values_pick_are_refused(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"Scaled at .* has a backward of its own, and is given rows that values pick"):
        autopar.compile(OfRows(), one)(torch.randn(4, 6))


def test_they_may_be_applied_in_branches_and_choose_by_draws(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = InABranch()
    train_alike(plain, autopar.compile(copy.deepcopy(plain), one), [torch.randn(4, 6) for _ in range(6)])


@pytest.mark.parametrize("what", ["drawn", "counted", "taken out"])
def test_a_backward_may_keep_a_number_of_each_call(one: DeviceMesh, what: str) -> None:
    torch.manual_seed(0)
    plain = OfNumbers(what)
    train_alike(plain, autopar.compile(copy.deepcopy(plain), one), [torch.randn(4, 6) for _ in range(4)])


def test_autocast_with_a_backward_of_its_own_is_refused(one: DeviceMesh) -> None:
    parallel = autopar.compile(Net("reverse"), one)
    with pytest.raises(TraceError, match="not traced under autocast"), torch.autocast("cpu", torch.bfloat16):
        parallel(torch.randn(4, 6))


class OneHot(nn.Module):
    """What `torch.nn.functional.one_hot` checks, plain PyTorch raises at once; a program's kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            return (self.inner(x)[mask] * nn.functional.one_hot(y[mask], num_classes=5)).sum(-1).mean()
        return (self.inner(x) - nn.functional.one_hot(y, 5)).square().mean()


class Checked(OneHot):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch.ops.aten._assert_async.msg((y < 5).all(), "there are five classes")
        return self.inner(x)[:, y].square().mean()


def test_a_check_of_values_is_named(one: DeviceMesh) -> None:
    wanted = r"there are five classes.* at .*test_functions.py.*: check them before the call"
    with pytest.raises(TraceError, match=wanted):
        autopar.compile(Checked(), one)(torch.randn(4, 8), torch.tensor([0, 3, 1, 4]))


@pytest.mark.parametrize("masked", [False, True])
def test_classes_as_rows_of_ones(one: DeviceMesh, masked: bool) -> None:
    plain, inputs = OneHot(), {"x": torch.randn(4, 8), "y": torch.tensor([0, 3, 1, 4])}
    if masked:
        inputs["mask"] = torch.tensor([True, False, True, True])
    same_steps(plain, autopar.compile(plain, one), inputs, steps=2)


@pytest.mark.parametrize("wrong", [5, -1])
def test_a_class_that_is_none_is_an_error(one: DeviceMesh, wrong: int) -> None:
    parallel = autopar.compile(OneHot(), one)
    with pytest.raises(RuntimeError, match=f"index {wrong} is out of bounds for dimension 1 with size 5"):
        parallel(torch.randn(4, 8), torch.tensor([0, 3, wrong, 4]))


class Counted(OneHot):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.inner(x)
        return (made - nn.functional.one_hot(y + (made[:, 0] > 100))).square().mean()


def test_classes_that_nobody_counted(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"one_hot at .*test_functions.py.* say how many: one_hot\(y, num_classes\)"):
        autopar.compile(Counted(), one)(torch.randn(4, 8), torch.tensor([0, 3, 1, 4]))


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(0.1 * torch.randn(5, 8))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.more


class Parametrized(nn.Module):
    """Forward puts something beside a weight, and takes it away again, as peft's LoRA of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.added = nn.Linear(8, 5), Added()
        self.inner.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        was = self.inner.weight.requires_grad
        nn.utils.parametrize.register_parametrization(self.inner, "weight", self.added)
        self.inner.parametrizations.weight.original.requires_grad_(was)
        made = self.inner(x)
        nn.utils.parametrize.remove_parametrizations(self.inner, "weight", leave_parametrized=False)
        return made.square().mean()


def test_requires_grad_may_be_set_to_what_it_is(one: DeviceMesh) -> None:
    """And what forward has set and taken away again is no change behind it."""
    plain = Parametrized()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(2):
        both_backward(plain, parallel, torch.randn(4, 8))
        same_gradients(plain, parallel)
    assert len(parallel._autopar.prepared()) == 1 and "parametrizations" not in vars(parallel.inner)
