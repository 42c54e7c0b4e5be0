"""Distributions that forward gives, is given, or keeps: actors and autoencoders have them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as dists
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import near, same_gradients
from tests.support.branching import quick_ones

Made = Callable[[Tensor, Tensor], Any]


class Actor(nn.Module):
    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made, self.inner = made, nn.Linear(6, 4).double()
        self.log_scale = nn.Parameter(torch.zeros(4).double())

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.inner(x)
        return {"policy": self.made(h, self.log_scale.exp()), "value": h.square().sum(-1)}


MADE: dict[str, Made] = {
    "normal": dists.Normal,
    "categorical": lambda h, _: dists.Categorical(logits=h),
    "of probabilities": lambda h, _: dists.Categorical(probs=h.softmax(-1)),
    "independent": lambda h, scale: dists.Independent(dists.Normal(h, scale), 1),
    "of many": lambda h, scale: dists.MultivariateNormal(h, torch.diag_embed(scale.expand_as(h))),
    "bernoulli": lambda h, _: dists.Bernoulli(logits=h),
    "squashed": lambda h, scale: dists.TransformedDistribution(dists.Normal(h, scale), [dists.TanhTransform()]),
    "mixed": lambda h, s: dists.MixtureSameFamily(dists.Categorical(logits=h), dists.Normal(h, s.expand_as(h))),
}


@pytest.mark.parametrize("name", quick_ones(MADE, ("normal", "categorical", "squashed")))
def test_what_is_computed_of_them_outside_is_as_on_one_process(name: str, one: DeviceMesh) -> None:
    plain = Actor(MADE[name])
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(2):
        torch.manual_seed(step)
        x, found = torch.randn(5, 6).double(), list[Any]()
        for model in (parallel, plain):
            model.zero_grad()
            torch.manual_seed(step)
            given = model(x)
            policy = given["policy"]
            actions = policy.sample()
            loss = given["value"].mean() - policy.log_prob(actions).mean()
            loss.backward()
            found.append((loss, actions, type(policy), policy.batch_shape, policy.event_shape))
        (ours, our_actions, *our_kind), (wanted, actions, *kind) = found
        near(ours, wanted, 1e-12, "loss")
        near(our_actions, actions, 1e-12, "actions")
        assert our_kind == kind
        same_gradients(plain, parallel)


class Keeping(nn.Module):
    """Draws, is given a prior, and keeps what it had for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6).double(), None

    def forward(self, x: Tensor, prior: dists.Normal) -> tuple[Tensor, dists.Normal]:
        now = dists.Normal(self.inner(x), torch.ones_like(x))
        loss = now.rsample().square().mean() + dists.kl_divergence(now, prior).mean()
        if self.last is not None:
            loss = loss + dists.kl_divergence(now, dists.Normal(self.last.mean.detach(), self.last.stddev)).mean()
        self.last = now
        return loss, now


def test_they_are_drawn_from_given_and_kept(one: DeviceMesh) -> None:
    plain = Keeping()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(3):
        torch.manual_seed(step)
        x, losses = torch.randn(5, 6).double(), list[Tensor]()
        for model in (parallel, plain):
            model.zero_grad()
            torch.manual_seed(step)
            loss, now = model(x, dists.Normal(x, x.exp()))
            (loss + now.entropy().mean() + now.mean.mean()).backward()
            losses.append(loss)
        near(losses[0], losses[1], 1e-12, "loss")
        near(parallel.last.mean, plain.last.mean, 1e-12, "what is kept")
        same_gradients(plain, parallel)
