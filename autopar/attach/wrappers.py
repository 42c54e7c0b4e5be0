"""The class of a parallel module: the user's own, with our forward. What would wrap it a second time is refused.

Scripts for DistributedDataParallel keep a line too many now and then, and accelerate adds that wrapper by itself.
Around a module that is parallel already it fails deep inside, or would reduce gradients that are complete.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.attach.placing import as_user_class


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
    own = {"forward": forward, **REFUSED}
    if not hasattr(model_class, "no_sync"):
        own["no_sync"] = _no_sync
    saves = getattr(model_class, "save_pretrained", None)
    if saves is not None and _takes(inspect.signature(saves), "state_dict", "is_main_process"):
        own["save_pretrained"] = _saving_whole_tensors(saves)
    return _setting(model_class)(f"Parallel{model_class.__name__}", (base, model_class), own)


def _setting(model_class: type[nn.Module]) -> Any:
    """The kind of such classes: what is set of one (`type(model).scale = 2`) is set of the user's."""

    def __setattr__(_: type, name: str, value: Any) -> None:
        setattr(model_class, name, value)

    def __delattr__(_: type, name: str) -> None:
        delattr(model_class, name)

    kind = type(model_class)
    return type(kind.__name__, (kind,), {"__setattr__": __setattr__, "__delattr__": __delattr__})


def _no_sync(self: Any) -> contextlib.AbstractContextManager[None]:
    """What scripts for DistributedDataParallel accumulate in. Gradients are complete behind each backward, and add up
    as they are: nothing is put off.
    """
    return contextlib.nullcontext()


def _takes(signature: inspect.Signature, *names: str) -> bool:
    """Whether a function takes arguments of these names, one of them (peft's `state_dict`) maybe among any others."""
    others = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    return len(set(names) - signature.parameters.keys()) <= others


def _saving_whole_tensors(saves: Any) -> Any:
    """`save_pretrained` of transformers and peft, which all ranks have to call: rank 0 writes what the plain model
    would.
    """
    signature = inspect.signature(saves)

    @functools.wraps(saves)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        others = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")
        holds = {
            name: given.arguments if name in signature.parameters else given.arguments[others]
            for name in ("state_dict", "is_main_process")
        }
        if holds["state_dict"].get("state_dict") is None:
            holds["state_dict"]["state_dict"] = self.full_state_dict()
            asked = holds["is_main_process"].get("is_main_process", True)
            holds["is_main_process"]["is_main_process"] = asked and dist.get_rank() == 0
        with as_user_class(self):  # by whose name it is loaded
            return saves(*given.args, **given.kwargs)

    return save_pretrained
