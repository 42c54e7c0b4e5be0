"""Models of torch's own transformer layers, among them the one of pytorch/examples' word_language_model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, HEADS, LENGTH, BATCH = 22, 16, 4, 8, 4


class Positions(nn.Module):
    def __init__(self, width: int, dropout: float, longest: int = 50) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        table, place = torch.zeros(longest, width), torch.arange(longest, dtype=torch.float).unsqueeze(1)
        rates = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
        table[:, 0::2], table[:, 1::2] = torch.sin(place * rates), torch.cos(place * rates)
        self.register_buffer("table", table.unsqueeze(0).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.table[: x.size(0), :])


class WordModel(nn.Transformer):
    """word_language_model's: an encoder under a causal mask of floats, which forward makes once and keeps. Its script
    computes the loss outside. Returns logarithms of probabilities.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(WIDTH, HEADS, dim_feedforward=24, num_encoder_layers=2, num_decoder_layers=1, dropout=dropout)
        self.model_type = "Transformer"
        self.src_mask: Tensor | None = None
        self.pos_encoder = Positions(WIDTH, dropout)
        self.input_emb, self.ninp = nn.Embedding(WORDS, WIDTH), WIDTH
        self.decoder = nn.Linear(WIDTH, WORDS)
        nn.init.uniform_(self.input_emb.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def _generate_square_subsequent_mask(self, size: int) -> Tensor:
        return torch.log(torch.tril(torch.ones(size, size)))

    def forward(self, src: Tensor, has_mask: bool = True) -> Tensor:
        if has_mask:
            device = src.device
            if self.src_mask is None or self.src_mask.size(0) != len(src):
                self.src_mask = self._generate_square_subsequent_mask(len(src)).to(device)
        else:
            self.src_mask = None
        src = self.pos_encoder(self.input_emb(src) * math.sqrt(self.ninp))
        output = self.decoder(self.encoder(src, mask=self.src_mask))
        return functional.log_softmax(output, dim=-1)


class Translated(nn.Module):
    """The whole nn.Transformer, with a mask of one kind or another, and its loss."""

    def __init__(self, masks: str, batch_first: bool = True) -> None:
        super().__init__()
        self.masks = masks
        self.inner = nn.Transformer(
            WIDTH, HEADS, 1, 2, 24, dropout=0.0, batch_first=batch_first, norm_first=batch_first
        )

    def forward(self, source: Tensor, target: Tensor, padded: Tensor) -> Tensor:
        size, options = target.shape[1 if self.inner.batch_first else 0], {}
        causal = nn.Transformer.generate_square_subsequent_mask(size)
        match self.masks:
            case "floats":
                options = {"tgt_mask": causal}
            case "flags":
                options = {"tgt_mask": torch.ones(size, size, dtype=torch.bool).triu(1)}
            case "hint":
                options = {"tgt_mask": causal, "tgt_is_causal": True}
            case "window":  # not causal, though square
                near = torch.ones(size, size, dtype=torch.bool).triu(1) | torch.ones(size, size, dtype=torch.bool).tril(
                    -3
                )
                options = {"tgt_mask": near}
            case "padding":
                options = {"src_key_padding_mask": padded, "memory_key_padding_mask": padded}
        return functional.mse_loss(self.inner(source, target, **options), target)


class Attends(nn.Module):
    """One nn.MultiheadAttention and its loss, of which the weights are a part if they are wanted."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv="bias" in kind)

    def forward(self, x: Tensor, y: Tensor, padded: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        options: dict[str, object] = {"need_weights": "weights" in self.kind}
        if "hint" in self.kind:
            options |= {"attn_mask": causal, "is_causal": True}
        elif "mask" in self.kind:
            options |= {"attn_mask": causal}
        if "padding" in self.kind:
            options |= {"key_padding_mask": padded}
        if "heads" in self.kind:
            options |= {"average_attn_weights": False}
        made, weights = self.inner(x, x, x, **options)
        loss = functional.mse_loss(made, y)
        return loss if weights is None else loss + weights.square().sum()


def batch() -> dict[str, Tensor]:
    padded = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padded[0, 5:] = padded[2, 7:] = True
    return {"x": torch.randn(BATCH, LENGTH, WIDTH), "y": torch.randn(BATCH, LENGTH, WIDTH), "padded": padded}
