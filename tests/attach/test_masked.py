"""Losses over rows that a boolean mask picks: with the numbers of plain PyTorch, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import autopar
from autopar.errors import CheckFailed, TraceError

Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # scores [4, 6, 5], labels [4, 6] with -100, others [4, 6, 5]


def _keep(y: Tensor) -> Tensor:
    return y != -100


def _written(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    made = t.clone()
    made[_keep(y)] = z[_keep(y)]
    return made.square().mean()


def _narrower(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    rows, others = z[_keep(y)], t[_keep(y)]
    further = others[:, 0] > 0
    return (rows[further] - others[further]).square().mean()


def _set_to_a_number(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    made = z * 1
    made[~_keep(y)] = 0.0
    return made.square().sum()


def _gathered(z: Tensor, y: Tensor) -> Tensor:
    """As DeBERTa's heads have it."""
    at = (y >= 0).nonzero()
    rows = torch.gather(z, 0, at.expand(at.size(0), z.size(1)))
    return F.cross_entropy(rows.view(-1, 5), torch.gather(y, 0, at.view(-1)).view(-1))


def _one_for_all(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """As masked autoencoders have it: a token in the place of each that is hidden."""
    made, hidden = z * 1, ~_keep(y)
    made[hidden] = z.new_tensor([0.5, 1, -1, 2, 0])
    made[y == 1, :] = z.new_tensor([[1.0, 2, 3, 4, 5]])
    return made.square().sum()


def _unpadded(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """Rows that are there are taken out, treated and put back."""
    there, flat = _keep(y).flatten().nonzero().squeeze(1), z.reshape(-1, 5)
    made, more = torch.zeros_like(flat), torch.ones_like(flat)
    made[there] = flat[there].exp()
    more = more.index_copy(0, there, flat.index_select(0, torch.where(_keep(y).view(-1))[0]))
    more.index_add_(0, there, t.reshape(-1, 5)[there])
    return (made.square() + more).sum()


def _experts(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """As mixtures of experts have it: of each row those that its scores pick, and rows of each expert by indices."""
    flat, weights = t.reshape(-1, 5), z.reshape(-1, 5).softmax(-1)
    weight, chosen = weights.topk(2, dim=-1)
    made, added = torch.zeros_like(flat), torch.zeros_like(flat)
    for expert in range(5):
        row, nth = torch.where(chosen == expert)
        made[row] += weight[row, nth, None] * (flat[row] + expert).exp()
        nth, row = torch.where((chosen == expert).T)
        added.index_add_(0, row, weight[row, nth].unsqueeze(-1) * flat[row].sin())
        mask = (chosen == expert).any(-1).view(*y.shape)
        added.view(*y.shape, 5)[mask] += z.softmax(-1).view(-1, 5)[mask.flatten(), expert].unsqueeze(1)
    return made.square().sum() + added.square().sum()


def _by_number(rows: Tensor) -> Tensor:
    return rows.square().sum() / rows.shape[0] / rows.numel()


FORMS: dict[str, Form] = {
    "their length": lambda z, y, t: z[y > 1].sum() / max(len(z[y > 1]), 1),
    "the length of a set": lambda z, y, t: z.sum() * len(torch.unique(y)),
    "cross entropy": lambda z, y, t: F.cross_entropy(z[_keep(y)], y[_keep(y)]),
    "one mask for both": lambda z, y, t: (lambda m: F.cross_entropy(z[m], y[m]))(y != -100),
    "flat": lambda z, y, t: F.cross_entropy(
        z.reshape(-1, 5)[y.reshape(-1) != -100], y.reshape(-1)[y.reshape(-1) != -100]
    ),
    "sum of cross entropies": lambda z, y, t: F.cross_entropy(z[_keep(y)], y[_keep(y)], reduction="sum") / 7,
    "cross entropies by themselves": lambda z, y, t: F.cross_entropy(
        z[_keep(y)], y[_keep(y)], reduction="none"
    ).square().mean(),
    "smoothed": lambda z, y, t: F.cross_entropy(z[_keep(y)], y[_keep(y)], label_smoothing=0.1),
    "weighed classes": lambda z, y, t: F.cross_entropy(
        z[_keep(y)], y[_keep(y)], weight=torch.arange(1.0, 6, dtype=z.dtype)
    ),
    "some labels ignored": lambda z, y, t: F.cross_entropy(z[_keep(y)], y[_keep(y)], ignore_index=1),
    "probabilities": lambda z, y, t: F.cross_entropy(z[_keep(y)], t[_keep(y)].softmax(-1)),
    "likelihood": lambda z, y, t: F.nll_loss(z[_keep(y)].log_softmax(-1), y[_keep(y)]),
    "picked likelihood": lambda z, y, t: -z.log_softmax(-1)[_keep(y)].gather(1, y[_keep(y)].unsqueeze(1)).mean(),
    "mse": lambda z, y, t: F.mse_loss(z[_keep(y)], t[_keep(y)]),
    "mse as a module": lambda z, y, t: nn.MSELoss()(z[_keep(y)], t[_keep(y)]),
    "smooth l1, summed": lambda z, y, t: F.smooth_l1_loss(z[_keep(y)], t[_keep(y)], reduction="sum"),
    "huber": lambda z, y, t: F.huber_loss(z[_keep(y)], t[_keep(y)], delta=0.3),
    "logits": lambda z, y, t: F.binary_cross_entropy_with_logits(
        z[_keep(y)], t[_keep(y)].sigmoid(), pos_weight=torch.arange(1.0, 6, dtype=z.dtype)
    ),
    "divergence": lambda z, y, t: F.kl_div(
        z[_keep(y)].log_softmax(-1), t[_keep(y)].softmax(-1), reduction="batchmean"
    ),
    "by hand": lambda z, y, t: (z[_keep(y)] - t[_keep(y)]).abs().pow(1.5).mean(),
    "sum over count": lambda z, y, t: (z - t).square().mean(-1)[_keep(y)].sum() / _keep(y).sum(),
    "sum over its number": lambda z, y, t: _by_number(z[_keep(y)]),
    "masked_select": lambda z, y, t: z.square().masked_select(_keep(y).unsqueeze(-1)).mean(),
    "of values": lambda z, y, t: z[t > 0.3].exp().mean() + (1 - z)[t > 0.3].sum(),
    "where": lambda z, y, t: z[torch.where(_keep(y))].square().sum(),
    "nonzero": lambda z, y, t: z.reshape(-1, 5)[_keep(y).reshape(-1).nonzero(as_tuple=True)].square().mean(),
    "along a row": lambda z, y, t: F.cosine_similarity(z[_keep(y)], t[_keep(y)], dim=-1).mean(),
    "normalised": lambda z, y, t: (F.normalize(z[_keep(y)], dim=1) * t[_keep(y)]).sum(-1).square().mean(),
    "part of a row": lambda z, y, t: (z[_keep(y)][:, 1:3] - t[_keep(y)][..., 0:1]).square().sum(),
    "parts of a row": lambda z, y, t: (lambda a, b: (a * t[_keep(y)].split(3, -1)[0]).sum() + b.exp().mean())(
        *z[_keep(y)].chunk(2, dim=-1)
    )
    + (z[_keep(y)].unbind(1)[3] * z[_keep(y)].select(-1, 1) * t[_keep(y)].narrow(1, 2, 1)[:, 0]).sum(),
    "sorted rows": lambda z, y, t: F.glu(z[_keep(y)][:, :4], -1).square().sum()
    + (z[_keep(y)].topk(2, -1).values * z[_keep(y)].sort(-1, descending=True)[0][:, 3:]).mean(),
    "largest": lambda z, y, t: z[_keep(y)].max() - z[_keep(y)].amin(),
    "largest of each": lambda z, y, t: z[_keep(y)].max(-1).values.mean() + z[_keep(y)].amax(dim=1).sum(),
    "over rows": lambda z, y, t: z[_keep(y)].mean(0).square().sum() + z[_keep(y)].sum(dim=0).square().mean(),
    "spread": lambda z, y, t: z[_keep(y)].std() + z[_keep(y)].var(dim=-1).mean() + z[_keep(y)].norm(),
    "reshaped": lambda z, y, t: (z[_keep(y)].view(-1) * t[_keep(y)].flatten()).mean(),
    "logs of what is positive": lambda z, y, t: (z[z > 0].log() / z[z > 0].sqrt()).mean(),
    "its inverse": lambda z, y, t: (1 / (z[z > 0.1] - 0.05)).sum() + (2 - z[z > 0.1]).mean(),
    "layers of it": lambda z, y, t: F.layer_norm(F.linear(z[_keep(y)], t[0, :5]), (5,)).pow(3).mean(),
    "one of all rows": lambda z, y, t: (z[_keep(y)].softmax(0) * t[_keep(y)]).sum(0).square().sum()
    + (z[_keep(y)].log_softmax(dim=0) * t[0, 0]).mean() + z[_keep(y)].amax(0).sum() - z[_keep(y)].amin(0).sum()
    + z[_keep(y)].logsumexp(0).sum(),
    "behind each other": lambda z, y, t: F.cross_entropy(
        torch.cat([z[_keep(y)], t[y == 1], z[0]]), torch.cat([y[_keep(y)], y[y == 1], y[0].abs() % 5])
    ),
    "beside each other": lambda z, y, t: (
        torch.cat((z[_keep(y)], t[_keep(y)]), dim=-1) * torch.stack([z[_keep(y)]] * 2, 1).flatten(1)
    ).square().mean(),
    "padded": lambda z, y, t: F.pad(z[_keep(y)], (1, 2), value=0.5).exp().sum(),
    "zeros like it": lambda z, y, t: F.mse_loss(z[_keep(y)], torch.zeros_like(z[_keep(y)])),
    "batch norm": lambda z, y, t: F.batch_norm(z[_keep(y)], None, None, t[0, 0], t[0, 1], True).exp().mean(),
    "spread over rows": lambda z, y, t: z[_keep(y)].std(0).sum() + z[_keep(y)].var(dim=0).square().sum()
    + z[_keep(y)].var(0, unbiased=False).exp().sum() + z[_keep(y)].std(dim=0, correction=0).sum()
    + z[_keep(y)].float().softmax(0, dtype=torch.float64).square().sum(),
    "convolved": lambda z, y, t: F.conv1d(z[_keep(y)].unsqueeze(1), t[:2, :1, :3]).square().mean()
    + F.group_norm(z[_keep(y)].unsqueeze(-1), 5, t[0, 0], t[0, 1]).exp().mean(),
    "triplets": lambda z, y, t: F.triplet_margin_loss(z[_keep(y)], t[_keep(y)], t.flip(-1)[_keep(y)]),
    "at places": lambda z, y, t: z.reshape(-1, 5)[(y.reshape(-1) > 1).nonzero().squeeze(-1)].square().sum(),
    "at places of two dims": lambda z, y, t: (lambda at: z.reshape(-1, 5)[at[:, 0] * 6 + at[:, 1]].exp().mean())(
        torch.argwhere(_keep(y))
    ),
    "selected": lambda z, y, t: z.reshape(-1, 5).index_select(0, _keep(y).reshape(-1).nonzero().view(-1)).exp().mean(),
    "gathered": lambda z, y, t: _gathered(z.reshape(-1, 5), y.reshape(-1)),
    "runs": lambda z, y, t: z.square().sum() / torch.unique_consecutive(y).numel(),
    "values that differ": lambda z, y, t: z.square().mean() * torch.unique(y).float().mean() + y.unique().sum(),
    "counted": lambda z, y, t: z.square().sum() / (z[_keep(y)].argmax(-1) == y[_keep(y)]).sum().clamp(min=1)
    + (torch.bincount(y[_keep(y)], minlength=5) * z[0, 0]).sum()
    + (torch.bincount(y[_keep(y)], t[_keep(y)][:, 0], minlength=5) * z[0, 1]).sum(),
    "one number of each": lambda z, y, t: z[_keep(y), 2].exp().sum() + z[torch.where(_keep(y))][..., 1].sum(),
    "one for all": _one_for_all,
    "taken out and put back": _unpadded,
    "experts": _experts,
    "written": _written,
    "narrower": _narrower,
    "set to a number": _set_to_a_number,
}  # fmt: skip


class Masked(nn.Module):
    """`hides`: labels hang on scores, and not on the arguments alone, so that nobody can count them before."""

    def __init__(self, form: Form, hides: bool = True) -> None:
        super().__init__()
        self.inner, self.form, self.hides = nn.Linear(8, 5), form, hides

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        scores = self.inner(x)
        return self.form(scores, y + (scores[..., 0].detach() > 100).long() if self.hides else y, t)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (4, 6), generator=generator)
    y[torch.rand(4, 6, generator=generator) < 0.2 * seed] = -100
    x = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    return x, y, torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)


def losses_alike(plain: nn.Module, parallel: nn.Module, *inputs: Tensor) -> None:
    """Of one call, whose backward of both has run."""
    expected, found = plain(*inputs), parallel(*inputs)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=0)


def gradients_alike(plain: nn.Module, parallel: nn.Module) -> None:
    for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_a_loss_over_picked_rows_is_that_of_plain_pytorch(one: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    plain = Masked(FORMS[name]).double()
    parallel = autopar.compile(plain, one)
    for seed in (1, 2, 3):
        losses_alike(plain, parallel, *batch(seed))
        assert all(one.grad is not None and one.grad.isfinite().all() for one in plain.parameters())
        gradients_alike(plain, parallel)
        for model in (plain, parallel):
            model.zero_grad()


class Normed(nn.Module):
    """Points of several clouds, of which some are there, with the statistics of those."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        return (self.norm(self.inner(x)[y > 0]) - t[y > 0]).square().mean()


def test_statistics_of_picked_rows_are_kept(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Normed().double()
    parallel = autopar.compile(plain, one)
    for seed in (1, 2):
        losses_alike(plain, parallel, *batch(seed))
    for name, theirs in plain.state_dict().items():
        torch.testing.assert_close(parallel.full_state_dict()[name], theirs, rtol=1e-9, atol=1e-12)
    gradients_alike(plain, parallel)
    x, y, t = batch(1)
    y[:] = -100
    torch.testing.assert_close(parallel(x, y, t), plain(x, y, t), equal_nan=True)  # of no rows, too
    y[0, 0] = 3
    with pytest.raises(CheckFailed, match="is given one row"):
        parallel(x, y, t)
    plain.eval()
    parallel.eval()
    torch.testing.assert_close(parallel(*batch(4)), plain(*batch(4)), rtol=1e-9, atol=0)


def _ends(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """As the heads of BART and its like have it: what stands at the last end of each sequence."""
    rows = z[y == 9, :]
    return (rows.view(z.size(0), -1, z.size(-1))[:, -1, :] * rows.view(len(z), -1, 5)[:, 0]).square().sum()


def test_one_of_as_many_rows_for_each_of_a_batch(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Masked(_ends).double()
    parallel = autopar.compile(plain, one)
    for seed in (1, 2):
        x, y, t = batch(seed)
        for row in y:
            row[torch.randperm(6)[: seed + 1]] = 9
        losses_alike(plain, parallel, x, y, t)
    gradients_alike(plain, parallel)
    y[0] = 9
    with pytest.raises(CheckFailed, match="the mask picks more for one than for another"):
        parallel(x, y, t)


@pytest.mark.filterwarnings("ignore:.*indexing with dtype torch.uint8")
def test_bytes_are_a_mask_too(one: DeviceMesh) -> None:
    def form(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        made, mask = t.clone(), (y > 0).byte()
        made[mask] = z[mask]
        return made.exp().sum() + F.cross_entropy(z[mask], y[mask])

    torch.manual_seed(0)
    plain = Masked(form).double()
    parallel = autopar.compile(plain, one)
    for seed in (1, 2):
        losses_alike(plain, parallel, *batch(seed))
    gradients_alike(plain, parallel)


REFUSED: dict[str, tuple[Form, str]] = {
    "two masks": (lambda z, y, t: (z[y > 1] * t[y > 2]).sum(), "rows of two masks"),
    "a mask that is written to": (
        lambda z, y, t: _changed_behind(z, y, t),
        "writes to a mask that it has picked rows by",
    ),
    "a mask that changes": (lambda z, y, t: _changed(z, y, t), "rows of two masks"),
    "a length as a size": (lambda z, y, t: z[y > 1].sum() + z.new_zeros(len(z[y > 1])).sum(), "given to new_zeros"),
    "sorted": (lambda z, y, t: z[y > 1].sort(0).values.sum(), "sort"),
    "the first rows": (lambda z, y, t: z[y > 1][:3].sum(), "an index of their number"),
    "rows that meet": (lambda z, y, t: (z[y > 1] @ z[y > 1].T).sum(), r"\.T "),
    "products over rows": (lambda z, y, t: z[y > 1].prod(0).square().sum(), "prod over rows"),
    "stacked in front": (lambda z, y, t: torch.stack([z[y > 1]] * 2).sum(), "stacking them in front"),
    "cat beside others": (lambda z, y, t: torch.cat([z[y > 1], t[y > 2]], 1).sum(), "other rows beside"),
    "other rows beside": (lambda z, y, t: (z[y > 1] + torch.ones(3, 5)).sum(), "other rows"),
    "in place": (lambda z, y, t: z[y > 1].uniform_().sum(), "uniform_ in place"),
    "places of others": (lambda z, y, t: z[(y > 1).nonzero()[:, 0].sort()[0]].sum(), "sort of such rows"),
    "whether there are": (lambda z, y, t: z[y > 1].sum() if z[y > 1].size(0) > 0 else z.sum(), "depends on values"),
    "packed": (
        lambda z, y, t: nn.utils.rnn.pack_padded_sequence(z, (y > 1).sum(1).cpu() + 1, True, False).data[:3].sum(),
        "an index of their number",
    ),
    "returned": (lambda z, y, t: z[y > 1], "returns rows that a boolean mask picks"),
}


def _changed_behind(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    mask = y > 1
    rows = torch.where(mask)
    mask[:2] = False
    return z[rows].square().sum()


def _changed(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    before, y = z[y > 1], y.clone()
    y[:, 0] = 0
    return (before * t[y > 1]).sum()


@pytest.mark.parametrize("name", REFUSED)
def test_what_rows_cannot_be_treated_so_is_refused_with_its_line(one: DeviceMesh, name: str) -> None:
    form, told = REFUSED[name]
    with pytest.raises(TraceError, match=told) as caught:
        autopar.compile(Masked(form).double(), one)(*batch(1))
    assert "test_masked.py" in str(caught.value) or name == "returned"
