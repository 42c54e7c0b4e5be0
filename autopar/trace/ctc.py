"""The loss of sequences without alignment stays one operator, `autopar.ctc`: torch's own has sizes that depend on
values. Each sequence of a batch is by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from autopar.errors import TraceError
from autopar.trace.checks import Checks
from autopar.trace.lines import line_here
from autopar.trace.masked import Picked

_operators = torch.library.Library("autopar", "FRAGMENT")
REDUCTIONS = ("none", "mean", "sum")  # by torch's numbers
GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zeroes"
_operators.define(f"ctc({GIVEN}) -> Tensor")
_operators.define(f"ctc_backward(Tensor grad, {GIVEN}) -> Tensor")
LENGTHS = "ctc_loss{} has other target_lengths than the targets that a mask has picked from its rows"
IN_A_ROW = (
    "ctc_loss{} has its targets in one row, and where each begins depends on values: pass them as [batch, longest], "
    "padded, or as picked from those by a mask (labels[labels >= 0])"
)


def _fake(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _backward_fake(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zeroes = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise TraceError("forward takes a gradient of ctc_loss that has a gradient itself, which torch has not either")
    return torch.ops.autopar.ctc_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zeroes), None, None, None, None, None


torch.library.register_fake("autopar::ctc", _fake, lib=_operators)
torch.library.register_fake("autopar::ctc_backward", _backward_fake, lib=_operators)
torch.library.register_autograd("autopar::ctc", _backward, setup_context=_keep, lib=_operators)


def kept_as_one(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], checks: Checks
) -> Callable[[], Tensor] | None:
    """What gives what `func` gives, where that is the loss."""
    return partial(_loss, checks, *args, **kwargs) if func in (functional.ctc_loss, torch.ctc_loss) else None


def _loss(
    checks: Checks, log_probs: Tensor, targets: Tensor | Picked, input_lengths: Any, target_lengths: Any,
    blank: int = 0, reduction: str | int = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """As `torch.nn.functional.ctc_loss`, and `torch.ctc_loss`, which has a number in the place of `reduction`."""
    reduction = REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    is_one = log_probs.ndim == 2
    if torch.is_autocast_enabled(log_probs.device.type) and log_probs.dtype != torch.float64:
        log_probs = log_probs.float()  # as autocast has it
    log_probs = log_probs.unsqueeze(1) if is_one else log_probs
    if isinstance(targets, Tensor) and targets.ndim == 1 and isinstance(target_lengths, (list, tuple)):
        targets = pad_sequence([*targets.split([*target_lengths])], batch_first=True)
    input_lengths, target_lengths = (
        torch.as_tensor(one, dtype=torch.int64, device=log_probs.device).reshape(-1)
        for one in (input_lengths, target_lengths)
    )
    if isinstance(targets, Picked):
        targets = _in_rows(checks, targets, target_lengths)
    elif targets.ndim == 1 and log_probs.shape[1] == 1:
        targets = targets.unsqueeze(0)
    elif targets.ndim == 1:
        raise TraceError(IN_A_ROW.format(line_here()))
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    loss = torch.ops.autopar.ctc(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, torch.zeros_like(loss), loss)
    if reduction == "mean":
        return (loss / target_lengths.clamp(min=1).to(loss.dtype)).mean()
    return loss.sum() if reduction == "sum" else loss.squeeze(0) if is_one else loss


def _in_rows(checks: Checks, targets: Picked, lengths: Tensor) -> Tensor:
    """Those of each sequence from the beginning of its row on."""
    if targets.mask.ndim != 2 or targets.row:
        raise TraceError(IN_A_ROW.format(line_here()))
    checks.add(LENGTHS.format(line_here()), targets.mask.sum(1) != lengths)
    _, order = targets.mask.logical_not().to(torch.int8).sort(dim=1, stable=True)
    return targets.kept().gather(1, order)
