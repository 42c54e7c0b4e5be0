"""The loss of sequences without alignment (Graves et al. 2006), of each sequence.

torch's kernels save a table as wide as the longest target, which depends on values. Backward makes it again.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("autopar::ctc_alone", mutates_args=())
def ctc_alone(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zeroes: bool
) -> Tensor:
    """`ctc`."""
    given = _wide(log_probs), targets, input_lengths, target_lengths
    return torch.ops.aten._ctc_loss.Tensor(*given, blank, zeroes)[0].to(log_probs.dtype, copy=True)


@torch.library.custom_op("autopar::ctc_backward_alone", mutates_args=())
def ctc_backward_alone(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
    zeroes: bool,
) -> Tensor:  # fmt: skip
    """`ctc_backward`."""
    given = _wide(log_probs), targets, input_lengths, target_lengths
    loss, table = torch.ops.aten._ctc_loss.Tensor(*given, blank, zeroes)
    made = torch.ops.aten._ctc_loss_backward.Tensor(_wide(grad), *given, loss, table, blank, zeroes)
    return made.to(log_probs.dtype)


def _wide(value: Tensor) -> Tensor:
    """As kernels take it: they have no types of 16 bits."""
    return value.float() if value.element_size() == 2 else value


@ctc_alone.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zeroes: bool
) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_backward_alone.register_fake
def _(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
    zeroes: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


# --- what emitted code calls ------------------------------------------------------------------------------------------


def ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zeroes: bool
) -> Tensor:
    """Losses [batch] of log_probs [steps, batch, classes] and targets [batch, longest], each of its lengths [batch].
    `zeroes`: where a loss is infinite it has no gradient.
    """
    return ctc_alone(log_probs, targets, input_lengths, target_lengths, blank, zeroes)


def ctc_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
    zeroes: bool,
) -> Tensor:  # fmt: skip
    """The gradient of log_probs. `grad`: of the losses."""
    return ctc_backward_alone(grad, log_probs, targets, input_lengths, target_lengths, blank, zeroes)
