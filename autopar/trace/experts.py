"""Layers of experts stay products of rows from the model to the program: `autopar.expert_mm`.

What libraries run sorts all tokens by expert, multiplies groups of them, and sorts back: behind the sort nothing tells
which row is whose, so that neither a batch nor its micro-batches can be cut. Here rows stay in their places, and to
sort them is for the kernel (`autopar.emit.experts`), on each rank those that it has.

transformers asks for its layers of experts through a table (`ExpertsInterface`), whose own entries are ours while a
model is captured. What a user has put there, layers of the user's own that compute in turn, and layers that stand in
no such table are traced as they are.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LIBRARY = "transformers."
MODULE, TABLE = f"{LIBRARY}integrations.moe", "ALL_EXPERTS_FUNCTIONS"
# Ways to compute one thing, one expert after the other or all at once; others bring kernels of their own.
IN_TURN, TOGETHER = (None, "eager"), ("grouped_mm", "batched_mm")

_operators = torch.library.Library("autopar", "FRAGMENT")
_operators.define("expert_mm(Tensor rows, Tensor weight, Tensor ids, bool turned) -> Tensor")
_operators.define("expert_mm_weight(Tensor left, Tensor right, Tensor ids, int experts) -> Tensor")


def _fake(rows: Tensor, weight: Tensor, ids: Tensor, turned: bool) -> Tensor:
    return rows.new_empty(*ids.shape, weight.shape[1 if turned else 2])


def _fake_weight(left: Tensor, right: Tensor, ids: Tensor, experts: int) -> Tensor:
    return left.new_empty(experts, left.shape[2], right.shape[2])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    *tensors, ctx.turned = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, weight, ids = ctx.saved_tensors
    of_rows = of_weight = None
    if ctx.needs_input_grad[0]:
        of_rows = torch.ops.autopar.expert_mm(grad, weight, ids, not ctx.turned)
        of_rows = of_rows if rows.shape[1] == ids.shape[1] else of_rows.sum(1, keepdim=True)
    if ctx.needs_input_grad[1]:
        left, right = (grad, rows) if ctx.turned else (rows, grad)
        of_weight = torch.ops.autopar.expert_mm_weight(left, right, ids, weight.shape[0])
    return of_rows, of_weight, None, None


torch.library.register_fake("autopar::expert_mm", _fake, lib=_operators)
torch.library.register_fake("autopar::expert_mm_weight", _fake_weight, lib=_operators)
torch.library.register_autograd("autopar::expert_mm", _backward, setup_context=_keep, lib=_operators)


@contextlib.contextmanager
def experts_kept() -> Iterator[None]:
    """Within it layers of experts of transformers are products of rows. For one thread at a time, as `capture` sees
    to; those that run in other threads are as they were.
    """
    table = getattr(sys.modules.get(MODULE), TABLE, None)
    if table is None:
        yield
        return
    owner, get = threading.get_ident(), table.get_interface

    def asked(name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        found = get(name, default)
        if threading.get_ident() != owner:
            return found
        if name in TOGETHER and _home(found) == MODULE:
            return _experts
        return functools.partial(_in_turn, found) if name in IN_TURN and found is default else found

    table.get_interface = asked
    try:
        yield
    finally:
        del table.get_interface


def _in_turn(forward: Callable[..., Any], layer: Any, *args: Any, **named: Any) -> Any:
    return (_experts if _is_librarys(layer, forward) else forward)(layer, *args, **named)


def _is_librarys(layer: Any, forward: Callable[..., Any]) -> bool:
    """Whether nothing of a layer is a user's: its own forward may then be another function than that of its parts."""
    homes = type(layer).__module__, _home(forward), _home(layer._apply_gate)
    return all(home.startswith(LIBRARY) for home in homes)


def _home(function: Any) -> str:
    """The module in which a function is written, whatever it is wrapped to look like; empty for what is none."""
    return getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", "")


def _experts(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What each of the tokens [tokens, width] is to its experts [tokens, k], in their weighted sum. The arguments are
    called as in the library.
    """
    ids, up = top_k_index, "gate_up_proj" if layer.has_gate else "up_proj"
    made = _linear(layer, up, hidden_states.unsqueeze(1), ids).flatten(0, 1)
    made = layer._apply_gate(made) if layer.has_gate else layer.act_fn(made)
    made = _linear(layer, "down_proj", made.unflatten(0, ids.shape), ids)
    if layer.has_post_expert_norm:
        made = layer.post_expert_norm(made.flatten(0, 1)).unflatten(0, ids.shape)
    return (made * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _linear(layer: Any, name: str, rows: Tensor, ids: Tensor) -> Tensor:
    weight: nn.Parameter = getattr(layer, name)
    bias: nn.Parameter | None = getattr(layer, f"{name}_bias") if layer.has_bias else None
    dtype = _dtype_of(layer, weight)
    made = torch.ops.autopar.expert_mm(rows.to(dtype), weight.to(dtype), ids, not layer.is_transposed)
    return made if bias is None else made + functional.embedding(ids, bias)


def _dtype_of(layer: Any, weight: Tensor) -> torch.dtype:
    """Products of groups are made as weights are stored; one expert after the other, as autocast says."""
    device = weight.device.type
    casts = layer.config._experts_implementation in IN_TURN and weight.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts and torch.is_autocast_enabled(device) else weight.dtype
