"""A small model of every family we claim to handle, made from a configuration and a seed, with inputs for it.

Dropout is off, unless a test asks for it. Labels are drawn apart from the inputs, and the ignored ones (-100) lie
unevenly: a mean of the shards' means would be wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from autopar._compat import pytree
from autopar.ir.graph import Graph
from autopar.trace import Captured, capture, graph_of
from tests.support.complexes import Fno, Parts, Rotary
from tests.support.derivatives import Forces, Penalty
from tests.support.wide import Wide, in_double, widen

BATCH, SEQUENCE, WIDTH, HEADS, VOCABULARY = 4, 12, 48, 4, 96
IGNORED = -100

Model = tuple[nn.Module, dict[str, Any]]


class Mlp(nn.Module):
    """Two linear layers with a layer norm between; the first weight is also used at the end (tied)."""

    def __init__(self, width: int = 24, hidden: int = 48, tied: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.second = nn.Linear(hidden, width)
        if tied:
            self.last = nn.Linear(width, hidden, bias=False)
            self.last.weight = self.first.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.second(functional.gelu(self.norm(self.first(x))))
        return functional.mse_loss(self.last(x) if hasattr(self, "last") else x, y)


class Block(nn.Module):
    """One pre-norm transformer block with causal attention and a classifier behind it."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 30)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(self.before(x)).split(h, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, s, h))
        x = x + self.down(functional.gelu(self.up(self.between(x))))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Grouped(nn.Module):
    """Causal attention of query heads that share a few kv heads, twice, with a product between."""

    def __init__(self, width: int = WIDTH, heads: int = 8, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        sizes = width, width // heads * kv_heads, width // heads * kv_heads
        self.first, self.second = (nn.ModuleList(nn.Linear(width, size) for size in sizes) for _ in range(2))
        self.between, self.head = nn.Linear(width, width), nn.Linear(width, 30)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + self.between(self._attend(self.first, x))
        x = x + self._attend(self.second, x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def _attend(self, projections: nn.ModuleList, x: Tensor) -> Tensor:
        counts = self.heads, self.kv_heads, self.kv_heads
        q, k, v = (
            one(x).unflatten(-1, (count, -1)).transpose(1, 2) for one, count in zip(projections, counts, strict=True)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class Cnn(nn.Module):
    """Convolutions with batch norm, pooling and group norm, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False)
        self.batch_one, self.batch_two, self.group = nn.BatchNorm2d(12), nn.BatchNorm2d(24), nn.GroupNorm(4, 24)
        self.head = nn.Linear(24 * 4, 12)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.relu(self.batch_one(self.one(x))), 2)
        x = torch.relu(self.group(self.batch_two(self.two(x))))
        return functional.cross_entropy(self.head(functional.adaptive_avg_pool2d(x, 2).flatten(1)), labels)


class Queue(nn.Module):
    """Keys of the batch and of those before, from a queue that is written to behind its use (as MoCo has it); and an
    average by which activations are divided before it is assigned anew.
    """

    def __init__(self, width: int = 12, keys: int = 72) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("queue", functional.normalize(torch.randn(width, keys), dim=0))
        self.register_buffer("average", torch.rand(2 * width) + 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x)) / self.average
        self.average = 0.9 * self.average + 0.1 * hidden.detach().abs().mean(0)
        query, key = functional.normalize(self.head(hidden), dim=1), functional.normalize(y, dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()], 1)
        with torch.no_grad():
            self.queue[:, : len(y)] = key.T
        return functional.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.long))


class Gated(nn.Module):
    """Words through recurrent layers of all kinds, with a loss at every step and one of the last state."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.words, self.there = nn.Embedding(30, width), nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.gates, self.plain = nn.GRU(2 * width, width), nn.RNN(width, width, nonlinearity="relu")
        self.head = nn.Linear(width, 30)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, (_, cell) = self.there(self.words(input_ids))
        x, last = self.plain(self.gates(x.transpose(0, 1))[0])
        loss = functional.cross_entropy(self.head(x.transpose(0, 1)).flatten(0, 1), labels.flatten())
        return loss + cell.square().mean() + last.square().mean()


def _mlp() -> Model:
    return Mlp(), {"x": torch.randn(12, 6, 24), "y": torch.randn(12, 6, 48)}


def _block() -> Model:
    return Block(), {"x": torch.randn(BATCH, SEQUENCE, WIDTH), "labels": labels(30)}


def _grouped() -> Model:
    return Grouped(), {"x": torch.randn(BATCH, SEQUENCE, WIDTH), "labels": labels(30)}


def _cnn() -> Model:
    return Cnn(), {"x": torch.randn(12, 3, 12, 12), "labels": torch.randint(0, 12, (12,))}


def _queue() -> Model:
    return Queue(), {name: torch.randn(12, 12) for name in ("x", "y")}


def labels(classes: int, batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    """Random classes; the first row ignores almost all, the last none."""
    drawn = torch.randint(0, classes, (batch, sequence))
    for row in range(batch - 1):
        drawn[row, : (sequence - 1) // (row + 1)] = IGNORED
    return drawn


def _text(classes: int = VOCABULARY) -> dict[str, Any]:
    return {"input_ids": torch.randint(0, classes, (BATCH, SEQUENCE)), "labels": labels(classes)}


def _gpt2(**changes: Any) -> Model:
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": 2, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": 32}
    config = transformers.GPT2Config(**(sizes | off | {"use_cache": False} | changes))
    return transformers.GPT2LMHeadModel(config), _text()


def _llama() -> Model:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=72, num_attention_heads=HEADS, num_key_value_heads=2,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _text()


def _mixtral() -> Model:
    """Its experts one after the other, as torch's grouped products take no float64."""
    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=24, num_attention_heads=HEADS, num_key_value_heads=2,
        vocab_size=VOCABULARY, use_cache=False, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="eager",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), _text()


def _opt() -> Model:
    config = transformers.OPTConfig(
        num_hidden_layers=2, hidden_size=WIDTH, ffn_dim=96, num_attention_heads=HEADS, vocab_size=101, dropout=0.0,
        max_position_embeddings=32, word_embed_proj_dim=WIDTH, use_cache=False,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config), _text(101)


def _bert() -> Model:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=96, num_attention_heads=HEADS, vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), _text()


def _t5() -> Model:
    config = transformers.T5Config(
        num_layers=2, d_model=WIDTH, d_kv=12, d_ff=96, num_heads=HEADS, vocab_size=VOCABULARY, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), _text()


def _vit() -> Model:
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=96, num_attention_heads=HEADS, image_size=16,
        patch_size=4, num_labels=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 12, (BATCH,))}
    return transformers.ViTForImageClassification(config), images


def _rotary() -> Model:
    return Rotary(WIDTH, HEADS, SEQUENCE), {name: torch.randn(BATCH, SEQUENCE, WIDTH) for name in ("x", "y")}


def _fno() -> Model:
    return Fno(), {"x": torch.randn(12, 2, 8, 8), "y": torch.randn(12, 1, 8, 8)}


def _parts() -> Model:
    return Parts(), {name: torch.randn(12, 6, 12) for name in ("x", "y")}


def _through() -> Model:
    """Gradients of both arguments, one of them the labels."""
    model, inputs = _mlp()
    return model, {name: value.requires_grad_() for name, value in inputs.items()}


def _embeds() -> Model:
    """Trained through what stands in the place of tokens, as soft prompts are."""
    model, inputs = _gpt2()
    embeds = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True)
    return model, {"inputs_embeds": embeds, "labels": inputs["labels"]}


def _forces() -> Model:
    kinds = torch.randint(0, 10, (BATCH, 6))
    return Forces(), {"kinds": kinds, "places": torch.randn(BATCH, 6, 3), "forces": torch.randn(BATCH, 6, 3)}


def _penalty() -> Model:
    images = {name: torch.randn(BATCH, 2, 8, 8) for name in ("real", "fake")}
    return Penalty(), {**images, "share": torch.rand(BATCH, 1, 1, 1)}


FAMILIES: dict[str, Callable[[], Model]] = {
    "mlp": _mlp,
    "block": _block,
    "grouped": _grouped,
    "cnn": _cnn,
    "queue": _queue,
    "gated": lambda: (Gated(), _text(30)),
    "rotary": _rotary,
    "fno": _fno,
    "parts": _parts,
    "forces": _forces,
    "through": _through,
    "embeds": _embeds,
    "gpt2": _gpt2,
    "llama": _llama,
    "mixtral": _mixtral,
    "opt": _opt,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
}

# What is split as they are, and is not made larger or cut in stages everywhere: its gradients go there and back twice.
FURTHER: dict[str, Callable[[], Model]] = {"penalty": _penalty}


@dataclass
class Reference:
    """What the plain model gives on one device: flat outputs, gradients (of parameters under every name they have, of
    arguments by path) and buffers.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@dataclass
class Case:
    """A model with inputs, its graph, and what eager torch makes of it. The model itself is never changed."""

    model: nn.Module
    inputs: dict[str, Any]
    seed: int = 0

    @cached_property
    def captured(self) -> Captured:
        return capture(self.model, (), self.inputs)

    @cached_property
    def graph(self) -> Graph:
        return graph_of(self.captured)

    @cached_property
    def wide_graph(self) -> Graph:
        return widen(self.graph)

    @cached_property
    def reference(self) -> Reference:
        return reference(self.model, self.inputs, self.seed)

    @cached_property
    def wide_reference(self) -> Reference:
        with Wide():
            return reference(copy.deepcopy(self.model)._apply(in_double), doubled(self.inputs), self.seed)

    def values(self, graph: Graph) -> dict[str, Tensor]:
        """The sources of `graph` by node name, in its precision."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        leaves = dict(self.captured.leaves)
        found: dict[str, Tensor] = {}
        for node in graph.nodes:
            match node.op:
                case "parameter":
                    value = parameters[node.target].detach()
                case "buffer":
                    value = buffers[node.target]
                case "input":
                    value = leaves[node.target].detach()
                case "constant":
                    value = self.captured.constants[node.target.split(":")[0]]
                case _:
                    continue
            (type,) = node.outputs
            assert type is not None
            found[node.name] = value.to(getattr(torch, type.dtype), copy=True)
        return found


def reference(model: nn.Module, inputs: Mapping[str, Any], seed: int = 0) -> Reference:
    """Forward and backward of a copy of `model`, in its own mode, with the generator at `seed`."""
    model = copy.deepcopy(model)
    model.zero_grad()
    inputs = {
        name: value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    through = {f"[{name!r}]": value for name, value in inputs.items() if isinstance(value, Tensor)}
    torch.manual_seed(seed)
    leaves, _ = pytree.tree_flatten(model(**inputs))
    loss = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim == 0)
    loss.backward()
    return Reference(
        {str(index): leaf.detach() for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)},
        {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
        | {path: value.grad for path, value in through.items()},
        {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)},
    )


def doubled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: in_double(value.detach()).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


@cache
def family(name: str) -> Case:
    """The case of one family; traced once per process."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        model, inputs = (FAMILIES | FURTHER)[name]()
        with torch.no_grad():  # zero biases and unit scales hide gradients that are wrong
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return Case(model.train(), inputs)
