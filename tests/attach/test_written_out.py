"""What losses and layers of others ask and do that a trace does not see of itself: dims of numbers, masks that are made
of numbers, `.data` of buffers, and functions of torch's that ask values or write to constants.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar.errors import CheckFailed, TraceError
from tests.processes.compare import both_backward, same_gradients, same_state

Loss = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.linear(x))


def alike(model: nn.Module, one: DeviceMesh, *rows: int) -> None:
    parallel = autopar.compile(copy.deepcopy(model), one)
    for count in rows:
        model.zero_grad(), parallel.zero_grad()
        both_backward(model, parallel, torch.randn(count, 8))
        same_gradients(model, parallel)
        same_state(model, parallel)


def of_number(does: Loss) -> Loss:
    return lambda h: does(h.square().mean())


NUMBERS: dict[str, Loss] = {
    "mean": lambda t: t.mean(-1),
    "sum": lambda t: t.sum(0, keepdim=True),
    "transpose": lambda t: t.transpose(0, -1),
    "index_select": lambda t: t.index_select(0, torch.tensor(0)),
    "index_add": lambda t: t.index_add(0, torch.tensor(0), t),
    "cosine": lambda t: functional.cosine_similarity(t, t * 2, dim=0) + t,
    "nanmean": lambda t: t.nanmean(-1),
}


@pytest.mark.parametrize("does", NUMBERS.values(), ids=NUMBERS)
def test_a_number_has_the_dims_0_and_minus_1(one: DeviceMesh, does: Loss) -> None:
    alike(Model(of_number(does)), one, 4)


def without_diagonal(h: Tensor) -> Tensor:
    """As SimCLR's loss in a popular repository has it: each row beside the others, and the pairs first."""
    half, h = len(h) // 2, functional.normalize(h, dim=1)
    labels = torch.cat([torch.arange(half) for _ in range(2)])
    labels = (labels[None] == labels[:, None]).float()
    like, diagonal = h @ h.t(), torch.eye(len(h), dtype=torch.bool)
    labels, like = labels[~diagonal].view(len(h), -1), like[~diagonal].view(len(h), -1)
    first, others = like[labels.bool()].view(len(h), -1), like[~labels.bool()].view(len(h), -1)
    return functional.cross_entropy(torch.cat([first, others], 1) / 0.07, torch.zeros(len(h), dtype=torch.long))


def above_the_diagonal(h: Tensor) -> Tensor:
    return (h @ h.t())[torch.triu(torch.ones(len(h), len(h)), 1).bool()].square().mean()


def even_columns(h: Tensor) -> Tensor:
    return h[:, torch.arange(h.shape[1]) % 2 == 0].square().mean()


def diagonal_is_set(h: Tensor) -> Tensor:
    like = (h @ h.t()).clone()
    like[torch.eye(len(h), dtype=torch.bool)] = -9.0
    return like.logsumexp(1).mean()


def many_rows(h: Tensor) -> Tensor:
    """A mask of 80 x 80 places."""
    return without_diagonal(torch.cat([h, h.roll(1, 0) * 0.5, h.flip(0), h * h, h.roll(2, 0)]))


def written_in_place(h: Tensor) -> Tensor:
    """Looks at the same memory see what is written to it, copies do not."""
    like, mask = h @ h.t(), torch.zeros(len(h), len(h), dtype=torch.bool)
    look, copied = mask.t(), mask.clone()
    mask[:, ::2] = True
    mask[0] |= True
    mask.fill_diagonal_(False)
    copied[1] = True
    return like[look].square().mean() + like[~mask].sum() + like[copied].mean()


def beside_other_indices(h: Tensor) -> Tensor:
    mask = torch.arange(len(h)) < len(h) - 1
    h = h.clone()
    h[~mask, 0] += 1
    picked = h[mask][:, None].mean() + h[mask, 1:3].sum() + h[None, mask].sum() + h[mask, torch.arange(1)].sum()
    none = torch.zeros_like(h, dtype=torch.bool)
    picked = picked + h[:, [True, False] * 4].square().sum()
    return picked + h[none].sum() + h[torch.ones_like(none)].square().mean()


def beside_what_is_written_with_values(h: Tensor) -> Tensor:
    """What is known of numbers stays known where tensors of zeros are filled with what is not."""
    times, made, large = torch.linspace(0, 1, 4), torch.zeros_like(h), torch.zeros_like(h.repeat(64, 800))
    for place, time in enumerate(times):
        made[:, place] = h[:, place] * time
        if time > 0.5:
            made = made + h
    return made[:, torch.arange(8) > 3].square().mean() + (large + 1).mean()


MASKED = [
    without_diagonal,
    above_the_diagonal,
    even_columns,
    diagonal_is_set,
    many_rows,
    written_in_place,
    beside_other_indices,
    beside_what_is_written_with_values,
]


@pytest.mark.parametrize("loss", MASKED)
def test_masks_that_are_made_of_numbers_pick_places_that_are_known(one: DeviceMesh, loss: Loss) -> None:
    alike(Model(loss), one, 16, 16, 12)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(8, 8), torch.arange(8) % 3 == 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, self.keep].square().mean()


def test_a_mask_that_a_module_holds_may_change(one: DeviceMesh) -> None:
    plain = Masked()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for place in (1, 3):
        both_backward(plain, parallel, torch.randn(4, 8))
        for keep in (plain.keep, parallel.keep):
            keep[place] = ~keep[place]
    both_backward(plain, parallel, torch.randn(4, 8))
    same_gradients(plain, parallel)


def test_a_mask_of_values_still_picks_rows_of_which_none_knows_how_many(one: DeviceMesh) -> None:
    alike(Model(lambda h: h[h > 0].mean()), one, 16)
    with pytest.raises(TraceError, match=r"how many rows a boolean mask picks depends on values, and view"):
        autopar.compile(Model(lambda h: h[h > 0].view(2, -1).mean()), one)(torch.randn(4, 8))


LIMIT = torch.tensor([0.5])  # as those capacities are that annealed autoencoders have
CLAMPS: dict[str, Loss] = {
    "a number and a tensor": lambda h: (torch.clamp(h, -0.1, LIMIT.data[0]) * h).square().mean(),
    "a tensor and a number": lambda h: h.clip(min=-LIMIT[0], max=0.3).square().mean(),
    "its own largest": lambda h: torch.clamp(h, 0, h.detach().max() / 2).square().mean(),
}


@pytest.mark.parametrize("told", CLAMPS)
def test_limits_of_which_one_is_a_tensor(one: DeviceMesh, told: str) -> None:
    """torch takes the number out of it: no gradient goes there."""
    alike(Model(CLAMPS[told]), one, 6)


VARIANCES: list[Loss] = [Tensor.exp, lambda h: h.square().mean(1), lambda h: h.square().mean(1, keepdim=True)]


@pytest.mark.parametrize("variance", VARIANCES, ids=["of each", "of rows", "of columns of one"])
@pytest.mark.parametrize("keywords", [{}, {"full": True, "reduction": "sum"}, {"eps": 0.5}])
def test_negative_log_likelihoods_of_normal_distributions(
    one: DeviceMesh, variance: Loss, keywords: dict[str, Any]
) -> None:
    """Also where a variance is less than `eps`, and one for each row."""
    target = torch.randn(6, 8)
    alike(Model(lambda h: functional.gaussian_nll_loss(h, target, variance(h), **keywords)), one, 6)


def test_a_negative_variance_is_seen_in_each_call(one: DeviceMesh) -> None:
    parallel = autopar.compile(Model(lambda h: functional.gaussian_nll_loss(h, h.detach() + 1, h.detach())), one)
    with torch.no_grad():
        parallel.linear.weight.zero_()
        parallel.linear.bias.fill_(0.7)
    parallel(torch.randn(4, 8)).backward()
    with torch.no_grad():
        parallel.linear.bias[3] = -0.1
    with pytest.raises(CheckFailed, match=r"gaussian_nll_loss"):
        parallel(torch.randn(4, 8))


class Anchored(nn.Module):
    """A tensor of its own that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.anchors = nn.Linear(8, 8), (torch.randn(8), torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.stack([functional.cosine_similarity(h, one).mean() for one in self.anchors]).sum()


def test_similarities_to_constants(one: DeviceMesh) -> None:
    alike(Anchored(), one, 5)


class Codebook(nn.Module):
    """Averages of what falls to each code, through `.data`, and losses that a buffer begins, as in quantizers; and a
    spectral norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("u", torch.randn(8))
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        codes: Tensor = self.codes
        near = (h.square().sum(1, keepdim=True) - 2 * h @ codes.t() + codes.square().sum(1)).argmin(1)
        picked = functional.embedding(near, codes)
        if self.training:
            rows = functional.one_hot(near, 6).type(h.dtype)
            self.counts.data.mul_(0.9).add_(rows.sum(0), alpha=0.1)
            self.counts.data += 0.01 * rows.mean(0)
            self.codes.data.mul_(0.9).add_(rows.t() @ h.detach() / (1 + self.counts[:, None]), alpha=0.1)
        weight = self.out.weight.data
        v = functional.normalize(weight.t() @ self.u, dim=0)
        self.u.data.copy_(functional.normalize(weight @ v, dim=0))
        norm = self.u.clone() @ self.out.weight @ v
        given = h + (picked - h).detach()
        loss: Tensor = self.zero
        if self.training:
            loss.requires_grad_()  # so that there is a gradient, whatever is added
        loss = loss + (h - picked).square().mean()
        return functional.mse_loss(functional.linear(given, self.out.weight / norm), x) + loss


def test_buffers_are_written_through_data(one: DeviceMesh) -> None:
    alike(Codebook(), one, 12, 12, 6)


class WritesWhatIsRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8) + 1)

    def forward(self, x: Tensor) -> Tensor:
        loss = (self.linear(x) * self.scale).square().mean()
        self.scale.data.mul_(0.5)
        return loss


class Moves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.to(x.device).to(torch.float64)(x.double()).square().mean()


def branches(h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (h,)).sum()


def sparse(h: Tensor) -> Tensor:
    return torch.sparse.mm(torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 4)), h).sum()


def eigenvalues(h: Tensor) -> Tensor:
    return torch.linalg.eigvals(h @ h.t()).abs().sum()


REFUSED: list[tuple[nn.Module, str]] = [
    (WritesWhatIsRead(), r"changes in place, maybe through \.data, what backward reads\. .*clone"),
    (Moves(), r"linear\.to\(x\.device\)\.to\(.* moves or casts a module .*: leave that out of forward"),
    (Model(branches), r"torch's own way.*torch\.cond.*: compute both and choose by torch\.where"),
    (Model(sparse), r"makes a sparse tensor at .* as a dense matrix"),
    (Model(eigenvalues), r"gradient of .* checks the values that it is given \(linalg\.solve\)"),
]
if torch.__version__.startswith("2.11"):
    REFUSED.pop()  # whose gradient checks nothing there


@pytest.mark.parametrize(("model", "told"), REFUSED, ids=[told[:24] for _, told in REFUSED])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:Sparse invariant checks")
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # torch's, of torch.cond
def test_what_a_program_has_not_is_refused_with_what_to_write(one: DeviceMesh, model: nn.Module, told: str) -> None:
    with pytest.raises(TraceError, match=told) as caught:
        autopar.compile(model, one)(torch.randn(4, 8))
    assert "INTERNAL ASSERT" not in str(caught.value) and "please report" not in str(caught.value)
