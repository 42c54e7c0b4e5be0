"""A user's package: operators of its own by `torch.library`, and rules for them.

`toyrules::scaled_sum` sums over the last dim; its backward is an operator, too, with a size among its arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar import OperatorRule, Rules

SUM, SPREAD, CURVED = "toyrules.scaled_sum.default", "toyrules.spread.default", "toyrules.curved.default"


@torch.library.custom_op("toyrules::scaled_sum", mutates_args=())
def scaled_sum(x: Tensor, scale: float) -> Tensor:
    return x.sum(-1) * scale


@torch.library.custom_op("toyrules::spread", mutates_args=())
def spread(grad: Tensor, scale: float, width: int) -> Tensor:
    return (grad * scale)[..., None].repeat_interleave(width, -1)


@torch.library.custom_op("toyrules::curved", mutates_args=())
def curved(x: Tensor) -> Tensor:
    return x.square().sum(-1)


@torch.library.custom_op("toyrules::drawn", mutates_args=())
def drawn(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


@torch.library.custom_op("toyrules::doubled", mutates_args=("x",))
def doubled(x: Tensor) -> None:
    x.mul_(2)


scaled_sum.register_fake(lambda x, scale: x.new_empty(x.shape[:-1]))
spread.register_fake(lambda grad, scale, width: grad.new_empty((*grad.shape, width)))
curved.register_fake(lambda x: x.new_empty(x.shape[:-1]))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.scale, ctx.width = inputs[1], inputs[0].shape[-1]


def _backward(ctx: Any, grad: Tensor) -> Any:
    return spread(grad, ctx.scale, ctx.width), None


scaled_sum.register_autograd(_backward, setup_context=_keep)


def _sizes(local: Any) -> Any:
    return local.shape[-1]


def _flops(node: Any, types: Any) -> float:
    return 2.0 * types[0].numel


OPERATORS = {
    SUM: OperatorRule("a b c -> a b | 0", flops=_flops),
    SPREAD: OperatorRule("a b -> a b c | 0", local={2: _sizes}, flops=_flops),
}
RULES = Rules("toyrules", "1.0", OPERATORS)
NEWER = Rules("toyrules", "1.1", OPERATORS)


class Net(nn.Module):
    """Two layers with the operator between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(24, 48), nn.Linear(12, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.out(scaled_sum(torch.relu(self.up(x)), 0.3)), y)


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A factory, as the command line takes it."""
    with torch.device("meta"):
        return Net(), (torch.empty(4, 12, 24), torch.empty(4, 6))
