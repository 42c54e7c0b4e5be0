"""The class of a parallel module: the user's own, with our forward. What would wrap it a second time is refused.

Scripts for DistributedDataParallel keep a line too many now and then, and accelerate adds that wrapper by itself.
Around a module that is parallel already it fails deep inside, or would reduce gradients that are complete.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


class Refused:
    """An attribute that nobody but a wrapper reads; once something is assigned to it, it is like any other."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is None:
            return self
        raise RuntimeError(self.sentence)


REFUSED = {
    "_ddp_params_and_buffers_to_ignore": Refused(
        "a parallel module reduces its gradients by itself: leave DistributedDataParallel (or torch.jit, which asks "
        "for the same) out and call the module; if each rank loads a part of the batch, as under "
        "DistributedDataParallel, compile with inputs='local'"
    ),
    "_is_accelerate_prepared": Refused(
        "do not pass a parallel module to accelerator.prepare(): compile with inputs='local', prepare the optimizer "
        "and the loaders, and call the module within accelerator.autocast() (examples/with_accelerate.py; for "
        "transformers' Trainer examples/trainer.py)"
    ),
}


def parallel_class(model_class: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """A class that is both. Its forward has the arguments of the user's: trainers pick columns of data by them."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(model_class.forward)  # type: ignore[attr-defined]
    forward.__doc__ = model_class.forward.__doc__
    return type(f"Parallel{model_class.__name__}", (base, model_class), {"forward": forward, **REFUSED})
