"""Llama for the search.

    python -m autopar.search examples/llama.py:build_8b --mesh data=8,tensor=8 --hardware h100-sxm --memory 70GiB

Shapes only: nothing is fetched or allocated.
"""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # the model, its positional and its keyword arguments


def build_1b() -> Example:
    """The shapes of Llama 3.2 1B."""
    return build(layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, tied=True)


def build_8b() -> Example:
    """The shapes of Llama 3.1 8B."""
    return build(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336)


def build(
    *,
    layers: int = 2,
    width: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 768,
    tied: bool = False,
    vocabulary: int = 128256,
    batch: int = 16,
    sequence: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
) -> Example:
    """Any Llama, training on `batch` sequences in all (not per rank)."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=hidden,
        vocab_size=vocabulary,
        max_position_embeddings=sequence,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=tied,
        use_cache=False,  # training keeps no keys and values for later tokens
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
        ids = torch.empty(batch, sequence, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": ids}
