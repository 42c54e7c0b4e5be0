"""Layers of Llama 3.1 405B's width, for searches of pipelines where little memory is left.

    python -m autopar.search benchmarks/llama_405b.py:layers_24 --mesh pipe=8,data=64,tensor=8 --micro-batches 32 \
        --hardware h100-sxm --precision bf16 --schedule 1f1b --allow recompute --memory 40GB

Parameters are stored in float32, as Llama 3's own run has them. Shapes only: nothing is fetched or allocated.
"""

import torch

from examples.llama import Example, build


def layers_24() -> Example:
    """A fifth of the model: three layers for each of eight stages."""
    return wide(24)


def layers_126() -> Example:
    """All of it."""
    return wide(126)


def wide(layers: int) -> Example:
    """So many layers, training on 2,048 sequences of 8,192 tokens in all."""
    return build(
        layers=layers, width=16384, heads=128, kv_heads=8, hidden=53248, batch=2048, sequence=8192, dtype=torch.float32
    )
