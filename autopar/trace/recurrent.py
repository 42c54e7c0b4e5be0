"""Recurrent layers stay loops from the model to the program: `autopar.lstm`, `autopar.gru`, `autopar.rnn`.

torch takes them apart into their steps where it traces them, some tens of operators for each. Here products with the
inputs stand in front, as any others; what goes from step to step is one operator (`autopar.emit.recurrent`), one for
each layer and direction. And what torch takes layers apart into has no dropout between them at all (torch 2.11 to 2.13:
`torch._decomp`, where a condition is the wrong way round).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_operators = torch.library.Library("autopar", "FRAGMENT")
_operators.define("lstm(Tensor gates, Tensor h, Tensor c, Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)")
_operators.define(
    "lstm_backward(Tensor grad, Tensor grad_c, Tensor h, Tensor c, Tensor weight, Tensor made, Tensor cells, "
    "Tensor full) -> (Tensor, Tensor, Tensor, Tensor)"
)
_operators.define("gru(Tensor gates, Tensor h, Tensor weight, Tensor bias) -> Tensor")
_operators.define(
    "gru_backward(Tensor grad, Tensor gates, Tensor h, Tensor weight, Tensor bias, Tensor made) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_operators.define("rnn(Tensor gates, Tensor h, Tensor weight, bool relu) -> Tensor")
_operators.define(
    "rnn_backward(Tensor grad, Tensor h, Tensor weight, Tensor made, bool relu) -> (Tensor, Tensor, Tensor)"
)


# --- what a trace knows of them ---------------------------------------------------------------------------------------


def _lstm_fake(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    made = gates.new_empty(*gates.shape[:2], weight.shape[1])
    return made, gates.new_empty(c.shape), torch.empty_like(made), gates.new_empty(gates.shape)


def _state_fake(gates: Tensor, h: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return gates.new_empty(*gates.shape[:2], weight.shape[1])


def _new(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in tensors)


def _lstm_backward_fake(
    grad: Tensor, grad_c: Tensor, h: Tensor, c: Tensor, weight: Tensor, made: Tensor, cells: Tensor, full: Tensor
) -> tuple[Tensor, ...]:
    return _new(full, h, c, weight)


def _gru_backward_fake(grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    return _new(*given[:4])


def _rnn_backward_fake(grad: Tensor, h: Tensor, weight: Tensor, made: Tensor, relu: bool) -> tuple[Tensor, ...]:
    return _new(made, h, weight)


def _keep_lstm(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    made, _, cells, full = output
    ctx.mark_non_differentiable(cells, full)
    ctx.save_for_backward(*inputs, made, cells, full)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    ctx.relu = inputs[-1] is True
    ctx.save_for_backward(*tensors, output)


def _lstm_gradients(ctx: Any, grad: Tensor | None, grad_c: Tensor | None, *_: Any) -> tuple[Any, ...]:
    *given, made, cells, full = ctx.saved_tensors
    grad = torch.zeros_like(made) if grad is None else grad
    grad_c = torch.zeros_like(given[2]) if grad_c is None else grad_c
    if torch.is_grad_enabled():
        return _step_by_step(_lstm_steps, ctx, given, (grad, grad_c))
    return torch.ops.autopar.lstm_backward(grad, grad_c, *given[1:], made, cells, full)


def _gru_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *given, made = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _step_by_step(_gru_steps, ctx, given, (grad,))
    return torch.ops.autopar.gru_backward(grad, *given, made)


def _rnn_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *given, made = ctx.saved_tensors
    if torch.is_grad_enabled():
        steps = functools.partial(_rnn_steps, torch.relu if ctx.relu else torch.tanh)
        return *_step_by_step(steps, ctx, given, (grad,)), None
    return *torch.ops.autopar.rnn_backward(grad, *given[1:], made, ctx.relu), None


def _step_by_step(
    steps: Callable[..., tuple[Tensor, ...]], ctx: Any, given: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients: of the same by operators that have them."""
    wanted = [one for one, asked in zip(given, ctx.needs_input_grad, strict=False) if asked]
    found = iter(torch.autograd.grad(steps(*given), wanted, grads, create_graph=True))
    return tuple(next(found) if asked else None for asked in ctx.needs_input_grad[: len(given)])


def _lstm_steps(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    made: list[Tensor] = []
    for gate in gates.unbind():
        enter, forget, cell, last = (gate + h @ weight.t()).chunk(4, 1)
        c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
        h = last.sigmoid() * c.tanh()
        made.append(h)
    return torch.stack(made), c


def _gru_steps(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    made: list[Tensor] = []
    for gate in gates.unbind():
        (reset, update, new), state = gate.chunk(3, 1), (h @ weight.t() + bias).chunk(3, 1)
        new = (new + (reset + state[0]).sigmoid() * state[2]).tanh()
        h = new + (update + state[1]).sigmoid() * (h - new)
        made.append(h)
    return (torch.stack(made),)


def _rnn_steps(bend: Callable[[Tensor], Tensor], gates: Tensor, h: Tensor, weight: Tensor) -> tuple[Tensor]:
    made: list[Tensor] = []
    for gate in gates.unbind():
        h = bend(gate + h @ weight.t())
        made.append(h)
    return (torch.stack(made),)


for _name, _fake, _backward_fake, _saving, _gradients in (
    ("lstm", _lstm_fake, _lstm_backward_fake, _keep_lstm, _lstm_gradients),
    ("gru", _state_fake, _gru_backward_fake, _keep, _gru_gradients),
    ("rnn", _state_fake, _rnn_backward_fake, _keep, _rnn_gradients),
):
    torch.library.register_fake(f"autopar::{_name}", _fake, lib=_operators)
    torch.library.register_fake(f"autopar::{_name}_backward", _backward_fake, lib=_operators)
    torch.library.register_autograd(f"autopar::{_name}", _gradients, setup_context=_saving, lib=_operators)


# --- in the place of torch's functions --------------------------------------------------------------------------------


def layers_of(
    function: Callable[..., Any], x: Tensor, hx: Any, weights: list[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, mask: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """What `torch.lstm` and its like give for sequences [steps, batch, width] (their arguments): all states, and the
    last ones. `mask` [steps, batch]: of the steps that a sequence has; what lies behind is of no meaning.
    """
    states: Any = hx if isinstance(hx, (tuple, list)) else (hx,)
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    turned, ends = None if mask is None else _turned(mask), list[tuple[Tensor, ...]]()
    for layer in range(num_layers):
        ways: list[Tensor] = []
        for place in range(layer * directions, (layer + 1) * directions):
            own, begin = weights[place * each : (place + 1) * each], [state[place] for state in states]
            way, *end = _one_way(function, _back(x, turned) if ways else x, begin, own, has_biases, mask)
            ways.append(_back(way, turned) if ways else way)
            ends.append(tuple(end))
        x = torch.cat(ways, 2) if bidirectional else ways[0]
        if layer < num_layers - 1:
            x = functional.dropout(x, dropout, train)
    return x, *(torch.stack(parts) for parts in zip(*ends, strict=True))


def _turned(mask: Tensor) -> Tensor:
    """For each step of each sequence the one that it changes places with, from the end of that sequence."""
    steps = torch.arange(len(mask), device=mask.device).unsqueeze(1)
    return torch.where(mask, mask.sum(0) - 1 - steps, steps)


def _back(x: Tensor, turned: Tensor | None) -> Tensor:
    """The steps from the last one on."""
    return x.flip(0) if turned is None else x.gather(0, turned.unsqueeze(2).expand_as(x))


def _padded(
    function: Callable[..., Any], input: Tensor, hx: Any, weights: list[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The same for arguments of padded sequences."""
    x = input.transpose(0, 1) if batch_first else input
    made, *ends = layers_of(function, x, hx, weights, has_biases, num_layers, dropout, train, bidirectional)
    return made.transpose(0, 1) if batch_first else made, *ends


def _one_way(
    function: Callable[..., Any], x: Tensor, begin: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool,
    mask: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(all states, the last ones) of one layer, in the order of `x`."""
    ours = torch.ops.autopar
    if not is_loop(len(weights)):
        states = [state.unsqueeze(0) for state in begin]
        told = states if function is torch.lstm else states[0]
        made, *ends = function(x, told, [*weights], has_biases, 1, 0.0, False, False, False)
        return made, *(end.squeeze(0) for end in ends)
    of_input, of_state, *biases = weights
    dtype = _dtype_of(function, x, begin[0])
    begin, of_state = [state.to(dtype) for state in begin], of_state.to(dtype)
    if function is torch.gru:
        gates = functional.linear(x, of_input, biases[0] if biases else None).to(dtype)
        bias = biases[1].to(dtype) if biases else gates.new_zeros(len(of_state))
        made = ours.gru(gates, begin[0], of_state, bias)
        return made, _last(made, mask)
    gates = functional.linear(x, of_input, biases[0] + biases[1] if biases else None).to(dtype)
    if function is torch.lstm:
        made, last, *_ = ours.lstm(gates if mask is None else _kept_behind(gates, mask), *begin, of_state)
        return made, _last(made, mask), last
    made = ours.rnn(gates, begin[0], of_state, function is torch.rnn_relu)
    return made, _last(made, mask)


def _dtype_of(function: Any, x: Tensor, state: Tensor) -> torch.dtype:
    """What states are kept in. Autocast casts all of a layer, but for a GRU's states on a CPU."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts and (function is not torch.gru or device != "cpu") else state.dtype


def _last(made: Tensor, mask: Tensor | None) -> Tensor:
    """The state [batch, width] behind the last step of each sequence."""
    if mask is None:
        return made[-1]
    place = (mask.sum(0) - 1).clamp(min=0).reshape(1, -1, 1)
    return made.gather(0, place.expand(1, *made.shape[1:])).squeeze(0)


def _kept_behind(gates: Tensor, mask: Tensor) -> Tensor:
    """Gates of an LSTM that behind a sequence let nothing into a cell, and all of it through."""
    closed = gates.new_full((gates.shape[2] // 4,), -torch.inf)
    behind = torch.cat([closed, -closed, torch.zeros_like(closed), torch.zeros_like(closed)])
    return torch.where(mask.unsqueeze(2), gates, behind)


def is_loop(weights: int) -> bool:
    """Whether layers with so many weights each way are operators of ours: not where states are projected, which takes
    an odd number.
    """
    return weights % 2 == 0


def kept_as_loops(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What to run in the place of a function of recurrent layers, where that is for padded sequences."""
    if func not in FUNCTIONS or len(args) != 9 or isinstance(args[3], (list, tuple)) or not len(args[0]):
        return None
    _, _, weights, _, layers, dropout, train, bidirectional, _ = args
    each = len(weights) // (layers * (2 if bidirectional else 1))
    is_drawn = train and dropout and layers > 1
    return functools.partial(_padded, func) if is_drawn or is_loop(each) else None


def with_states_as_given(func: Any, args: Any, result: Any) -> Any:
    """An LSTM's states have the shape of those that it was given. Taken apart by torch 2.11 they have a dim more."""
    if func is not torch.lstm or not isinstance(args[1], (tuple, list)):
        return result
    output, *states = result
    return output, *(made.reshape(given.shape) for made, given in zip(states, args[1], strict=True))


def weights_have_changed(layer: Any) -> bool:
    """What a recurrent layer is told that asks whether to look its weights up anew (`WEIGHTS`): always, in a trace.
    Those that are made of others (`parametrize`) may write to buffers when they are asked for (`spectral_norm`): they
    are asked as often as by torch, which looks first whether there is a new one.
    """
    for name in layer._flat_weights_names:
        if name not in layer._parameters and hasattr(layer, name) and getattr(layer, name) is not None:
            break
    return True


WEIGHTS = "_flat_weights"
FUNCTIONS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
