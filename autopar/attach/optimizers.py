"""Optimizers of the wrong model: made from the plain model, they would step its parameters, which never get a gradient.

DistributedDataParallel shares its parameters with the model that it wraps, so scripts written for it may make the
optimizer before. A parallel module has parameters of its own. Such an optimizer would train nothing, without a word.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

# Parameter of a plain model -> its name, and the parallel module beside that model.
_BESIDE: Any = WeakIdKeyDictionary()


def refuse_optimizers_of(model: nn.Module, parallel: nn.Module) -> None:
    """From now on the step of an optimizer raises RuntimeError where all that it holds of `model` is without gradients
    while `parallel` has them.
    """
    held = weakref.ref(parallel)
    for name, parameter in model.named_parameters():
        _BESIDE[parameter] = name, held


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found: list[tuple[str, nn.Module]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return
            name, held = _BESIDE.get(parameter, ("", None))
            if held is not None and (parallel := held()) is not None:
                found.append((name, parallel))
    for name, parallel in found:
        if parallel.get_parameter(name).grad is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} holds {name} and {len(found) - 1} more parameters of the plain model "
                "that have no gradient, while the parallel module has them: its step would train nothing. Make the "
                "optimizer behind autopar.compile, from the parallel module's parameters"
            )


register_optimizer_step_pre_hook(_refuse)
