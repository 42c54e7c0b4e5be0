"""torch's losses of DTensors, in pieces of one size and of several, and losses as numbers, on real processes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import autopar
from tests.processes.compare import both_backward, same_gradients
from tests.processes.errors import refused
from tests.processes.worker import Ranks
from tests.support.machines import FAST
from tests.support.matching import Matched, batch

CLASSES = 6
Loss = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def labels(rows: int, ignored: int = 0) -> Tensor:
    """The first ones are ignored, so that pieces have other numbers of them."""
    found = torch.arange(rows) % CLASSES
    found[:ignored] = -100
    return found


LOSSES: dict[str, Loss] = {
    "mse": lambda x, _: functional.mse_loss(x, x.detach() * 2 + 1),
    "mse, summed": lambda x, _: functional.mse_loss(x, x.detach() * 2 + 1, reduction="sum"),
    "mse, of each": lambda x, _: functional.mse_loss(x, x.detach() * 2 + 1, reduction="none").square().sum(),
    "mse to a plain tensor": lambda x, whole: functional.mse_loss(x, whole(drawn(*x.shape))),
    "huber": lambda x, _: functional.huber_loss(x, x.detach() * 2, delta=0.3),
    "smooth l1": lambda x, _: functional.smooth_l1_loss(x, x.detach() * 2, beta=0.3),
    "l1": lambda x, _: functional.l1_loss(x, x.detach() * 2),
    "bce": lambda x, whole: functional.binary_cross_entropy(x.sigmoid(), whole(drawn(*x.shape))),
    "bce, weighed": lambda x, whole: functional.binary_cross_entropy(
        x.sigmoid(), whole(drawn(*x.shape)), weight=whole(drawn(*x.shape) + 1)
    ),
    "bce of logits": lambda x, whole: functional.binary_cross_entropy_with_logits(
        x, whole(drawn(*x.shape)), pos_weight=whole(drawn(CLASSES) + 1)
    ),
    "soft margin": lambda x, _: functional.soft_margin_loss(x, x.detach().sign()),
    "cross-entropy": lambda x, whole: functional.cross_entropy(x, whole(labels(len(x)))),
    "cross-entropy, some ignored": lambda x, whole: functional.cross_entropy(x, whole(labels(len(x), 3))),
    "cross-entropy, weighed": lambda x, whole: functional.cross_entropy(
        x, whole(labels(len(x), 3)), weight=whole(drawn(CLASSES) + 1)
    ),
    "nll, of each": lambda x, whole: (
        functional.nll_loss(x.log_softmax(1), whole(labels(len(x), 3)), reduction="none").square().sum()
    ),
}


def check_losses_of_what_is_split(ranks: Ranks) -> None:
    """Means were those of pieces: mse's gradients were as many times too large as there are ranks."""
    mesh = ranks.mesh()
    autopar.compile(nn.Linear(2, 2), mesh)

    def whole(value: Tensor) -> Tensor:
        return distribute_tensor(value, mesh, [Replicate()])

    for rows in (8, 7):
        for placement in (Shard(0), Shard(1), Replicate()):
            for name, loss in LOSSES.items():
                x = (drawn(rows, CLASSES) * 4 - 2).requires_grad_()
                split = nn.Parameter(distribute_tensor(x.detach(), mesh, [placement]))
                wanted, made = loss(x, lambda value: value), loss(split, whole)
                wanted.backward(), made.backward()
                assert isinstance(made, DTensor) and isinstance(split.grad, DTensor)
                told = f"{name} of {rows} rows in {placement}"
                torch.testing.assert_close(made.full_tensor(), wanted, msg=lambda m, t=told: f"{t}: {m}")
                torch.testing.assert_close(split.grad.full_tensor(), x.grad, msg=lambda m, t=told: f"{t}: {m}")


REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda x: x.amax(),
    "least": lambda x: x.amin(),
    "largest norm": lambda x: x.norm(float("inf")),
    "sum over no dims": lambda x: x.sum([]),
    "mean over no dims, kept": lambda x: x.square().mean([], keepdim=True).sum(),
    "largest over no dims, kept": lambda x: x.amax([], keepdim=True).sum(),
}


def check_reductions_over_an_empty_list_of_dims(ranks: Ranks) -> None:
    """DTensors took them for reductions over none: gradients of `amax()` were nan."""
    mesh = ranks.mesh()
    autopar.compile(nn.Linear(2, 2), mesh)
    for placement in (Shard(0), Shard(1), Replicate()):
        for name, reduce in REDUCED.items():
            x = (drawn(8, CLASSES) * 4 - 2).requires_grad_()
            split = nn.Parameter(distribute_tensor(x.detach(), mesh, [placement]))
            wanted, made = reduce(x), reduce(split)
            wanted.backward(), made.backward()
            assert isinstance(made, DTensor) and isinstance(split.grad, DTensor)
            told = f"{name} in {placement}"
            torch.testing.assert_close(made.full_tensor(), wanted, msg=lambda m, t=told: f"{t}: {m}")
            torch.testing.assert_close(split.grad.full_tensor(), x.grad, msg=lambda m, t=told: f"{t}: {m}")
        positive = distribute_tensor(drawn(8, CLASSES) > 0.5, mesh, [placement])
        for dims in ([], [0], [0, 1], [-1]):
            found, whole = torch.any(positive, dims), torch.any(positive.full_tensor(), dims)
            assert isinstance(found, DTensor) and torch.equal(found.full_tensor(), whole), (dims, placement)
            assert found.sum().item() == whole.sum().item(), "one that several ranks have counts once"
        number = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
        assert number.any().item() is True and number.any(0).item() is True
        assert positive.any().double().item() == 1.0 and (split > 9).any().item() is False


def check_a_penalty_that_is_added_in_place(ranks: Ranks) -> None:
    """It ended in an assertion without a word, or in backward, in an operator that nobody wrote."""
    mesh = ranks.mesh()
    plain = nn.Linear(4, 4)
    parallel = autopar.compile(copy.deepcopy(plain), mesh)
    whole = nn.Parameter(drawn(4, 4))
    split = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    for written in (
        lambda loss, penalty: loss.add_(penalty),
        lambda loss, penalty: torch.zeros(()).add_(penalty) * loss,
        lambda loss, penalty: torch.add(loss, penalty),
        lambda loss, penalty: torch.stack([loss, penalty]).square().sum(),
    ):
        made = [
            written(model(drawn(2, 4).float()).sum().double(), one.norm())
            for model, one in ((plain, whole), (parallel, split))
        ]
        assert type(made[1]) is Tensor
        torch.testing.assert_close(made[1], made[0])
        for one in made:
            one.backward()
        assert isinstance(split.grad, DTensor)
        torch.testing.assert_close(split.grad.full_tensor(), whole.grad)
        same_gradients(plain, parallel)
        whole.grad = split.grad = None
        plain.zero_grad(), parallel.zero_grad()
    penalty = split.norm()
    both = 0.5 * penalty
    both += parallel(torch.ones(2, 4)).sum()
    assert type(both) is Tensor and both.requires_grad
    both.backward()


class Told(nn.Module):
    """Says in numbers what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, float]]:
        counted = (x > 0.5).sum().item()
        hidden = self.first(x).relu()
        self.mean = hidden.mean().item()
        loss = self.second(hidden).square().sum() / counted
        assert (x < 9).all().item(), "too large"
        return loss, {"counted": counted, "half": loss.item() / 2}


def check_numbers_that_forward_takes_out(ranks: Ranks) -> None:
    for axis, count in (("data", 1), ("data", 2), ("pipe", 2)):
        plain = Told()
        mesh = autopar.init_mesh("cpu", **{axis: ranks.count})
        parallel = autopar.compile(copy.deepcopy(plain), mesh, hardware=FAST, micro_batches=count)
        for step in range(2):
            x = drawn(8, 8) + 0.1 * step
            (wanted, numbers), (loss, found) = plain(x), parallel(x)
            assert found["counted"] == numbers["counted"] and type(found["counted"]) is int, (found, numbers)
            for name, one, other in (
                ("loss", loss.item(), wanted.item()), ("half", found["half"], numbers["half"]),
                ("mean", parallel.mean, plain.mean),
            ):  # fmt: skip
                assert type(one) is float and math.isclose(one, other, rel_tol=1e-12), (axis, count, name, one, other)
        x[5, 2] = 10.0
        refused(autopar.CheckFailed, "assert .x < 9", lambda x=x, p=parallel: p(x))


def check_matchings_of_predictions_with_targets(ranks: Ranks) -> None:
    torch.manual_seed(0)
    plain = Matched("tensors").double()
    parallel = autopar.compile(copy.deepcopy(plain), autopar.init_mesh("cpu", data=ranks.count), hardware=FAST)
    for sizes in ((2, 3, 1, 4), (7, 1, 2, 2)):
        given = batch(sizes)
        plain.zero_grad(), parallel.zero_grad()
        both_backward(plain, parallel, *given, within=1e-12)
        same_gradients(plain, parallel)
