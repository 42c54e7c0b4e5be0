"""Recurrent layers with dropout between them, one after the other.

What torch takes such layers apart into, where it traces them, has no dropout at all (torch 2.11 to 2.13:
`torch._decomp`, where a condition is the wrong way round).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _in_turn(
    layers: Callable[..., Any], input: Tensor, hx: Any, weights: list[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """What `torch.lstm` and its like give for padded sequences (their arguments)."""
    states: Any = hx if isinstance(hx, (tuple, list)) else (hx,)
    each, directions = len(weights) // num_layers, 2 if bidirectional else 1
    x, ends = input.transpose(0, 1) if batch_first else input, list[tuple[Tensor, ...]]()
    for layer in range(num_layers):
        begin = [state[layer * directions : (layer + 1) * directions] for state in states]
        own = weights[layer * each : (layer + 1) * each]
        of_layer = begin if layers is torch.lstm else begin[0]
        x, *end = layers(x, of_layer, own, has_biases, 1, 0.0, train, bidirectional, False)
        ends.append(tuple(end))
        if layer < num_layers - 1:
            x = functional.dropout(x, dropout, train)
    made = x.transpose(0, 1) if batch_first else x
    return made, *(torch.cat(parts) for parts in zip(*ends, strict=True))


def with_dropout_between(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What to run in the place of a function of recurrent layers, where there is dropout between them."""
    is_padded = func in RECURRENT and len(args) == 9 and not isinstance(args[3], (list, tuple))
    if not is_padded:
        return None
    _, _, _, _, num_layers, dropout, train, _, _ = args
    return functools.partial(_in_turn, func) if train and dropout and num_layers > 1 else None


RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
