"""Ten small models of different families, each with a batch of random inputs: small enough to search and to train many
times on a CPU, and of the structure that their large relatives have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Embeddings, Mlp

BATCH, SEQUENCE, WIDTH, HEADS, LAYERS, VOCABULARY = 8, 32, 64, 4, 2, 256

Model = tuple[nn.Module, dict[str, Tensor]]  # with the keyword arguments of a call


class Residual(nn.Module):
    """Two convolutions with batch norm around which the input is added, as in ResNet; a stride halves the picture."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_two(self.two(F.relu(self.norm_one(self.one(x)))))
        return F.relu(inner + self.short(x))


class Resnet(nn.Module):
    def __init__(self, channels: int = 16, classes: int = 100) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            Residual(3, channels, 1), Residual(channels, 2 * channels, 2), Residual(2 * channels, 4 * channels, 2)
        )
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))), y)


class Mixing(nn.Module):
    """A layer of MLP-Mixer: one MLP over places, one over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm_one, self.norm_two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_places(self.norm_one(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm_two(x))


class Mixer(nn.Module):
    def __init__(self, width: int = WIDTH, classes: int = 100) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.Sequential(*[Mixing(64, width) for _ in range(LAYERS)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1)), y)


def _text() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))}


def _pictures(classes: int = 100) -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 3, 32, 32), "y": torch.randint(0, classes, (BATCH,))}


def gpt2() -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY, n_positions=SEQUENCE, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _text()


def llama() -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), _text()


def opt() -> Model:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, ffn_dim=4 * WIDTH, num_attention_heads=HEADS, dropout=0.0,
        vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, word_embed_proj_dim=WIDTH, use_cache=False,
    )  # fmt: skip
    return OPTForCausalLM(config), _text()


def bert() -> Model:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=HEADS,
        vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    return BertForMaskedLM(config), _text()


def t5() -> Model:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=LAYERS, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, num_heads=HEADS, dropout_rate=0.0,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), _text()


def vit() -> Model:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=HEADS,
        image_size=32, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 100
    pictures = _pictures()
    return ViTForImageClassification(config), {"pixel_values": pictures["x"], "labels": pictures["y"]}


def resnet() -> Model:
    return Resnet(), _pictures()


def mixer() -> Model:
    return Mixer(), _pictures()


def mlp() -> Model:
    return Mlp(256), {"x": torch.randn(64, 256), "y": torch.randint(0, 100, (64,))}


def embeddings() -> Model:
    return Embeddings(rows=4000), {"ids": torch.randint(0, 4000, (256, 4)), "y": torch.rand(256)}


SMALL: dict[str, Callable[[], Model]] = {
    "gpt2": gpt2, "llama": llama, "opt": opt, "bert": bert, "t5": t5, "vit": vit,
    "resnet": resnet, "mixer": mixer, "mlp": mlp, "embeddings": embeddings,
}  # fmt: skip


def build(name: str) -> Model:
    """The same weights and inputs every time, and on every rank."""
    torch.manual_seed(0)
    model, inputs = SMALL[name]()
    return model.train(), inputs
