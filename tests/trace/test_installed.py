"""What forward hangs on the model at its first call is installed by every trace, and the numbers are plain torch's."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import TraceError


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


class Hooked(Layers):
    """Sums what a hook sees, which it registers at its first call."""

    ready: bool = False
    seen: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.first.register_forward_hook(lambda module, given, made: self.see(made))
            self.ready = True
        self.seen = seen = list[Tensor]()
        y = self.second(self.first(x))
        self.seen = None
        return y.sum() + sum(one.square().sum() for one in seen)

    def see(self, made: Tensor) -> None:
        if self.seen is not None:
            self.seen.append(made)


class Handled(Layers):
    """Keeps the handle of its hook, which triples what a layer gives."""

    handle: object = None

    def forward(self, x: Tensor) -> Tensor:
        if self.handle is None:
            self.handle = self.first.register_forward_hook(lambda module, given, made: 3 * made)
        return self.second(self.first(x)).square().sum()


class Patched(Layers):
    """Replaces the forward of a layer at its first call."""

    ready: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            inner = self.first.forward
            self.first.forward = lambda x: inner(x) * 3  # type: ignore[method-assign]
            self.ready = True
        return self.second(self.first(x)).square().sum()


class HiddenStates(nn.Module):
    """Reads all hidden states of a transformers model inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        config = BertConfig(vocab_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
        self.bert, self.out = BertModel(config, add_pooling_layer=False), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.bert(input_ids=x, output_hidden_states=True)
        return self.out(sum(one.mean(1) for one in found.hidden_states)).square().sum()


def same_training(plain: nn.Module, mesh: DeviceMesh, batches: list[Tensor]) -> None:
    """Loss and gradients of every call, shapes that are new among them, are those of the plain model."""
    parallel = autopar.compile(copy.deepcopy(plain), mesh)
    for x in batches:
        losses = [model(x) for model in (plain, parallel)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for one, two in zip(plain.parameters(), parallel.parameters(), strict=True):
            if one.grad is not None:
                given = two.grad.full_tensor() if hasattr(two.grad, "full_tensor") else two.grad
                torch.testing.assert_close(given, one.grad, rtol=1e-4, atol=1e-5)
        plain.zero_grad()
        parallel.zero_grad()


@pytest.fixture
def one() -> Iterator[DeviceMesh]:
    yield autopar.init_mesh("cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [Hooked, Handled, Patched])
def test_what_is_installed_once_works_at_every_call(one: DeviceMesh, kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    same_training(kind(), one, [torch.randn(rows, 8) for rows in (4, 4, 4, 2, 6)])


def test_hidden_states_are_there_at_every_call(one: DeviceMesh) -> None:
    torch.manual_seed(1)
    same_training(HiddenStates(), one, [torch.randint(0, 32, (4, length)) for length in (6, 6, 6, 5)])


def test_attentions_and_hidden_states_come_out_at_every_call(one: DeviceMesh) -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=32, attn_implementation="eager", **sizes))
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(3):
        ids = torch.randint(0, 32, (2, 5))
        asked = {"input_ids": ids, "labels": ids, "output_hidden_states": True, "output_attentions": True}
        wanted, found = plain(**asked), parallel(**asked)
        for name in ("hidden_states", "attentions"):
            assert len(found[name]) == len(wanted[name]) > 1
            for given, right in zip(found[name], wanted[name], strict=True):
                torch.testing.assert_close(given, right, rtol=1e-4, atol=1e-5)
        (found.loss + found.hidden_states[1].square().mean()).backward()


def test_hooks_without_a_flag_and_lazy_buffers_are_refused_in_one_sentence(one: DeviceMesh) -> None:
    class Again(Layers):
        def forward(self, x: Tensor) -> Tensor:
            self.first.register_forward_hook(lambda module, given, made: 2 * made)
            return self.first(x).sum()

    class Mask(Layers):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.ones(16, 16).triu(1))
            return (self.first(x) @ self.mask[:8, :8]).sum()

    with pytest.raises(TraceError, match=r"registers a hook on module first without noting that it has"):
        autopar.compile(Again(), one)(torch.randn(4, 8))
    with pytest.raises(TraceError, match=r"makes the buffer mask, of shape \(16, 16\)"):
        autopar.compile(Mask(), one)(torch.randn(4, 8))
    called = Mask()
    called(torch.randn(4, 8))  # what the sentence says
    same_training(called, one, [torch.randn(4, 8)])
