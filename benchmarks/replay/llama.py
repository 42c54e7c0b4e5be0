"""Llama as the published runs trained it, as a graph: shapes only, nothing is fetched or allocated.

The model is transformers' `LlamaForCausalLM` on the meta device. torchtitan's own Llama computes the same products on
the same weights; it differs in the arithmetic of the rotary embedding (complex float32 in the place of bfloat16) and
in that its labels are shifted by the data loader. Attention is causal without a mask tensor, as torchtitan's is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from autopar.ir.graph import Graph
from autopar.trace import capture, graph_of

CAUSAL = "causal_without_mask"
SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128256},
    "llama-2-13b": {"layers": 40, "width": 5120, "heads": 40, "kv_heads": 40, "hidden": 13824, "vocabulary": 32000},
    "llama-2-70b": {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocabulary": 32000},
    "llama-3.1-405b": {
        "layers": 126,
        "width": 16384,
        "heads": 128,
        "kv_heads": 8,
        "hidden": 53248,
        "vocabulary": 128256,
    },
    "llama-3.1-70b": {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocabulary": 128256},
}  # fmt: skip


def _causal(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: object = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    groups = module.num_key_value_groups
    if groups > 1:
        key, value = (_repeated(tensor, groups) for tensor in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2).contiguous(), None


def _repeated(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    batch, heads, sequence, width = tensor.shape
    wide = tensor[:, :, None].expand(batch, heads, groups, sequence, width)
    return wide.reshape(batch, heads * groups, sequence, width)


AttentionInterface.register(CAUSAL, _causal)
AttentionMaskInterface.register(CAUSAL, lambda *args, **kwargs: None)


def model_of(shape: dict[str, int], layers: int, sequence: int) -> LlamaForCausalLM:
    """The model with so many layers, in float32 on the device in force."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=shape["width"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["hidden"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=sequence,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation=CAUSAL,
    )
    return LlamaForCausalLM(config)


def graph_of_model(shape: dict[str, int], layers: int, batch: int, sequence: int) -> Graph:
    """One training step on `batch` sequences in all: parameters float32, arithmetic bfloat16, gradients float32."""
    with torch.device("meta"):
        model = model_of(shape, layers, sequence)
        ids = torch.empty(batch, sequence, dtype=torch.long)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return graph_of(capture(model, (), {"input_ids": ids, "labels": ids}, precision=precision), precision)


@cache
def half_precision_graph(shape: str, layers: int, batch: int, sequence: int) -> Graph:
    """One micro-batch, forward and backward, all in bfloat16: what is cast and summed once a step is not in it."""
    with torch.device("meta"):
        model = model_of(SHAPES[shape], layers, sequence).bfloat16()
        ids = torch.empty(batch, sequence, dtype=torch.long)
    return graph_of(capture(model, (), {"input_ids": ids, "labels": ids}))


def with_batch(graph: Graph, traced: int, batch: int, sequence: int) -> Graph:
    """The graph of another batch: tracing takes a second, this does not.

    `traced` must be a number that no other size of the model is; products of it with the sequence length count as well.
    """
    sizes = {traced: batch, traced * sequence: batch * sequence}

    def resized(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(resized(part) for part in arg)
        return sizes.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg

    nodes = tuple(
        replace(
            node,
            args=resized(node.args),
            kwargs=tuple((key, resized(arg)) for key, arg in node.kwargs),
            outputs=tuple(type and replace(type, shape=resized(type.shape)) for type in node.outputs),
        )
        for node in graph.nodes
    )
    return Graph(nodes, graph.results)
