"""The steps of recurrent layers, one after the other: products with the state before, and what is made of them.

What does not hang on the step before is no part of these loops: products with inputs stand in front of them, and what
backward multiplies by is made for all steps at once. There only gradients go from step to step. A state is [batch,
width]; all steps of it [steps, batch, width]; gates lie side by side, as torch has them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _is_half(state: Tensor) -> bool:
    return state.element_size() == 2


def _summed(state: Tensor) -> Tensor:
    """A copy, in which terms of many steps can be added up: of 16 bits they would be lost."""
    return state.to(torch.float32 if _is_half(state) else state.dtype, copy=True)


@torch.library.custom_op("autopar::lstm_in_turn", mutates_args=())
def lstm_in_turn(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All (h, c, gates) of an LSTM, of the inputs' part of its gates (input, forget, cell, output) and the states
    before.
    """
    width, turned = c.shape[1], weight.t()
    made, cells = (gates.new_empty(*gates.shape[:2], width) for _ in range(2))
    full, c, is_half = torch.empty_like(gates, memory_format=torch.contiguous_format), _summed(c), _is_half(c)
    now = torch.empty_like(c)
    parts = full[:, :, : 2 * width], full[:, :, 2 * width : 3 * width], full[:, :, 3 * width :]
    steps = (gates, full, made, cells, *parts, *parts[0].chunk(2, 2))
    for gate, all_four, own_h, own_c, first, cell, last, enter, forget in zip(
        *(s.unbind() for s in steps), strict=True
    ):
        torch.addmm(gate, h, turned, out=all_four)
        first.sigmoid_()
        cell.tanh_()
        last.sigmoid_()
        if is_half:
            own_c.copy_(c.mul_(forget).addcmul_(enter, cell))
        else:
            c = torch.mul(forget, c, out=own_c).addcmul_(enter, cell)
        torch.tanh(c, out=now)
        torch.mul(last, now, out=own_h)
        h = own_h
    return made, cells, full


@torch.library.custom_op("autopar::gru_in_turn", mutates_args=())
def gru_in_turn(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """All states of a GRU, of the inputs' part of its gates (reset, update, new) and the state before."""
    width = h.shape[1]
    made, both, turned = gates.new_empty(*gates.shape[:2], width), torch.empty_like(gates[0]), weight.t()
    first, new = both[:, : 2 * width], both[:, 2 * width :]
    reset, update = first.chunk(2, 1)
    total, is_half = _summed(h), _is_half(h)
    for gate, own in zip(gates.unbind(), made.unbind(), strict=True):
        torch.addmm(bias, h, turned, out=both)
        first.add_(gate[:, : 2 * width]).sigmoid_()
        new.mul_(reset).add_(gate[:, 2 * width :]).tanh_()
        if is_half:
            own.copy_(total.sub_(new).mul_(update).add_(new))
        else:
            total = torch.lerp(new, total, update, out=own)
        h = own
    return made


@torch.library.custom_op("autopar::rnn_in_turn", mutates_args=())
def rnn_in_turn(gates: Tensor, h: Tensor, weight: Tensor, relu: bool) -> Tensor:
    """All states of a plain recurrent layer, of the inputs' part of them and the state before."""
    made, turned = torch.empty_like(gates, memory_format=torch.contiguous_format), weight.t()
    for gate, own in zip(gates.unbind(), made.unbind(), strict=True):
        torch.addmm(gate, h, turned, out=own)
        h = own.relu_() if relu else own.tanh_()
    return made


@torch.library.custom_op("autopar::lstm_back_in_turn", mutates_args=())
def lstm_back_in_turn(
    grad: Tensor, grad_c: Tensor, by: Tensor, through: Tensor, forget: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (gates, h, c). `by` [steps, batch, 4, width]: what a gate's is, times that of the cell, or, for the
    last gate, of the output; `through`: what of the output's goes into the cell.
    """
    made, grad_h, dtype = torch.empty_like(by), torch.zeros_like(grad_c), grad_c.dtype
    grad_c = _summed(grad_c)
    for step in range(len(grad) - 1, -1, -1):
        own = made[step]
        grad_h += grad[step]
        grad_c.addcmul_(grad_h, through[step])
        torch.mul(by[step, :, :3], grad_c.unsqueeze(1), out=own[:, :3])
        torch.mul(by[step, :, 3], grad_h, out=own[:, 3])
        torch.mm(own.flatten(1), weight, out=grad_h)
        grad_c *= forget[step]
    return made.view(*grad.shape[:2], -1), grad_h, grad_c.to(dtype)


@torch.library.custom_op("autopar::back_in_turn", mutates_args=())
def back_in_turn(grad: Tensor, by: Tensor, kept: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (gates as the state before gives them, all states, the state before the first). `by` [steps, batch,
    gates, width]: what a gate's is, times that of the state; `kept`: what of a state is the one before.
    """
    made, states, grad_h = torch.empty_like(by), torch.empty_like(grad), torch.zeros_like(grad[0])
    for step in range(len(grad) - 1, -1, -1):
        own, state = made[step], states[step]
        torch.add(grad[step], grad_h, out=state)
        torch.mul(by[step], state.unsqueeze(1), out=own)
        torch.mm(own.flatten(1), weight, out=grad_h)
        if kept is not None:
            grad_h.addcmul_(state, kept[step])
    return made.view(*grad.shape[:2], -1), states, grad_h


@lstm_in_turn.register_fake
def _(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = *gates.shape[:2], c.shape[1]
    return gates.new_empty(shape), gates.new_empty(shape), gates.new_empty(gates.shape)


@gru_in_turn.register_fake
def _(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gates.new_empty(*gates.shape[:2], h.shape[1])


@rnn_in_turn.register_fake
def _(gates: Tensor, h: Tensor, weight: Tensor, relu: bool) -> Tensor:
    return torch.empty_like(gates, memory_format=torch.contiguous_format)


@lstm_back_in_turn.register_fake
def _(
    grad: Tensor, grad_c: Tensor, by: Tensor, through: Tensor, forget: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(by).flatten(2), torch.empty_like(grad_c), torch.empty_like(grad_c)


@back_in_turn.register_fake
def _(grad: Tensor, by: Tensor, kept: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(by).flatten(2), torch.empty_like(grad), grad.new_empty(grad.shape[1:])


# --- what emitted code calls: all of a layer, one way -----------------------------------------------------------------


def lstm(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(all h, the last c, all c, all gates), of the inputs' part of the gates [steps, batch, 4 * width], both biases
    in it.
    """
    made, cells, full = lstm_in_turn(gates, h, c, weight)
    return made, cells.select(0, -1).clone(), cells, full


def lstm_backward(
    grad: Tensor, grad_c: Tensor, h: Tensor, c: Tensor, weight: Tensor, made: Tensor, cells: Tensor, full: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (gates, h, c, weight). `grad`: of all h, `grad_c`: of the last c."""
    enter, forget, cell, last = _by_gate(full, 4).unbind(2)
    bent, by = cells.tanh(), _by_gate(torch.empty_like(full), 4)
    _put(by, 0, cell, _slope(enter))
    _put(by, 1, _one_before(c, cells), _slope(forget))
    _put(by, 2, enter, cell.square().neg_().add_(1))
    _put(by, 3, bent, _slope(last))
    through = bent.square_().neg_().add_(1).mul_(last)
    of_gates, grad_h, grad_c = lstm_back_in_turn(grad, grad_c, by, through, forget, weight)
    del bent, by, through
    return of_gates, grad_h, grad_c, _of_weight(of_gates, _one_before(h, made))


def gru(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """All h, of the inputs' part of the gates [steps, batch, 3 * width] with their bias; `bias`: the states' own."""
    return gru_in_turn(gates, h, weight, bias)


def gru_backward(
    grad: Tensor, gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor, made: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (gates, h, weight, bias). `grad`: of all h."""
    before, each = _one_before(h, made), _by_gate(gates, 3)
    states = _by_gate(torch.matmul(before, weight.t()).add_(bias), 3)
    states.narrow(2, 0, 2).add_(each.narrow(2, 0, 2)).sigmoid_()
    reset, update, new_of_state = states.unbind(2)
    new, by = torch.addcmul(each.select(2, 2), reset, new_of_state).tanh_(), torch.empty_like(states)
    _put(by, 1, before - new, _slope(update))
    of_new = new.square_().neg_().add_(1).mul_(1 - update)
    _put(by, 2, of_new, reset)
    _put(by, 0, of_new * new_of_state, _slope(reset))
    of_states, grads, grad_h = back_in_turn(grad, by, update, weight)
    del by, states, reset, update, new_of_state
    of_gates = torch.cat([of_states.narrow(2, 0, 2 * h.shape[1]), grads.mul_(of_new)], 2)
    return of_gates, grad_h, _of_weight(of_states, before), of_states.sum((0, 1))


def rnn(gates: Tensor, h: Tensor, weight: Tensor, relu: bool) -> Tensor:
    """All h, of the inputs' part of them [steps, batch, width], both biases in it; by tanh, or by relu."""
    return rnn_in_turn(gates, h, weight, relu)


def rnn_backward(grad: Tensor, h: Tensor, weight: Tensor, made: Tensor, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (gates, h, weight). `grad`: of all h."""
    by = made.sign() if relu else made.square().neg_().add_(1)
    of_gates, states, grad_h = back_in_turn(grad, by.unsqueeze(2), None, weight)
    del by, states
    return of_gates, grad_h, _of_weight(of_gates, _one_before(h, made))


def _one_before(first: Tensor, states: Tensor) -> Tensor:
    """The states before each step, as a tensor of its own."""
    return torch.cat([first.unsqueeze(0), states.narrow(0, 0, len(states) - 1)])


def _slope(gate: Tensor) -> Tensor:
    """Of a sigmoid, where it is this."""
    return (1 - gate).mul_(gate)


def _put(by: Tensor, gate: int, one: Tensor, other: Tensor) -> None:
    """Their product, as what that gate is multiplied by (not by `out=`, which Dynamo takes of whole tensors alone)."""
    torch.ops.aten.copy_.default(by.select(2, gate), one).mul_(other)  # fake CUDA tensors lack methods and indexing


def _by_gate(gates: Tensor, count: int) -> Tensor:
    return gates.view(*gates.shape[:2], count, gates.shape[2] // count)


def _of_weight(of_gates: Tensor, before: Tensor) -> Tensor:
    return of_gates.reshape(-1, of_gates.shape[2]).t() @ before.reshape(-1, before.shape[2])
