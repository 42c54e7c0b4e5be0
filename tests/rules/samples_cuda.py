"""Attention kernels that exist on CUDA only: their operands as types, and the rule we expect. Not run by any test here.

Sizes: batch 2, heads 4, query positions 12, key positions 18, head dim 8. Signatures are those of torch 2.11 to 2.13.
"""

from __future__ import annotations

from autopar.graph import Node, Ref, TensorType

B, H, S, T, D = 2, 4, 12, 18, 8
Q, K = TensorType((B, H, S, D), "bfloat16"), TensorType((B, H, T, D), "bfloat16")
FEW = TensorType((B, 2, T, D), "bfloat16")  # grouped queries: two key heads
BIAS, LSE, SEED = TensorType((B, 1, S, T), "bfloat16"), TensorType((B, H, S), "float32"), TensorType((), "int64")
PADDED, COLUMN = TensorType((B, H, 32), "float32"), TensorType((B, H, S, 1), "float32")
ALL = (True,) * 4
RNG = TensorType((2,), "uint64")


def _node(
    name: str, args: tuple[object, ...], outputs: tuple[TensorType | None, ...]
) -> tuple[Node, tuple[TensorType, ...]]:
    types = tuple(value for value in args if isinstance(value, TensorType))
    refs = iter(Ref(f"x{place}") for place in range(len(types)))
    plain = tuple(next(refs) if isinstance(value, TensorType) else value for value in args)
    return Node(name, f"aten._scaled_dot_product_{name}.default", plain, (), outputs), types


FLASH, EFFICIENT, CUDNN = "flash_attention", "efficient_attention", "cudnn_attention"
KV = "b h t! d!, b h t! e!"
CASES = [
    (*_node(FLASH, (Q, K, K, 0.0, True, False), (Q, LSE, None, None, None, None, RNG, SEED, None)),
     f"b h s! d!, {KV} -> b h s! e!, b h s!, -, -, -, -, z6_0! ^same, . ^same, -"),
    (*_node(FLASH, (Q, FEW, FEW, 0.0, True, False), (Q, LSE, None, None, None, None, RNG, SEED, None)),
     f"b (h=2 r) s! d!, {KV} -> b (h=2 r) s! e!, b (h=2 r) s!, -, -, -, -, z6_0! ^same, . ^same, -"),
    (*_node(f"{FLASH}_backward", (Q, Q, K, K, Q, LSE, None, None, S, T, 0.0, True, RNG, SEED), (Q, K, K)),
     f"b h s! e!, b h s! d!, {KV}, b h s! e!, b h s!, u12_0!, . -> b h s! d!, {KV} | 0"),
    (*_node(EFFICIENT, (Q, K, K, BIAS, True, 0.0, False), (Q, PADDED, SEED, SEED)),
     f"b h s! d!, {KV}, b 1 s! t! -> b h s! e!, b h rows!, . ^same, . ^same"),
    (*_node(f"{EFFICIENT}_backward", (Q, Q, K, K, BIAS, Q, PADDED, SEED, SEED, 0.0, ALL, False), (Q, K, K, BIAS)),
     f"b h s! e!, b h s! d!, {KV}, b 1 s! t!, b h s! e!, b h rows!, ., . -> b h s! d!, {KV}, b 1 s! t! | 0"),
    (*_node(CUDNN, (Q, K, K, None, True, 0.0, True, False), (Q, COLUMN, None, None, None, None, SEED, SEED, None)),
     f"b h s! d!, {KV} -> b h s! e!, b h s! 1, -, -, -, -, . ^same, . ^same, -"),
    (*_node(f"{CUDNN}_backward", (Q, Q, K, K, Q, COLUMN, SEED, SEED, None, None, None, S, T, 0.0, True), (Q, K, K)),
     f"b h s! e!, b h s! d!, {KV}, b h s! e!, b h s! 1, ., . -> b h s! d!, {KV} | 0"),
]  # fmt: skip
DROPOUT = _node(FLASH, (Q, K, K, 0.1, True, False), (Q, LSE, None, None, None, None, RNG, SEED, None))
OPERATORS = {node.op for node, _, _ in CASES}
