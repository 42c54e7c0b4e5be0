"""GPT-2 for the search.

    python -m autopar.search examples/gpt2.py:build --mesh data=4,tensor=2 --hardware h100-sxm --precision bf16

Shapes only: nothing is fetched or allocated.
"""

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # the model, its positional and its keyword arguments


def build(
    layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, batch: int = 16, sequence: int = 1024
) -> Example:
    """The 124M model by default, training on `batch` sequences in all (not per rank)."""
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=sequence,
        bos_token_id=None,  # the default, 50256, need not be in the vocabulary
        eos_token_id=None,
        use_cache=False,  # training keeps no keys and values for later tokens
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        ids = torch.empty(batch, sequence, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": ids}


def build_xl() -> Example:
    """The 1.5B model."""
    return build(layers=48, width=1600, heads=25)
