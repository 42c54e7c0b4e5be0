"""Which code is given what a function of torch has just made, or a module: what has called it, and whatever passes the
result on as its own (`return function(x)`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import handle_torch_function
from torch.utils.hooks import RemovableHandle

from autopar.trace.modules import leaving_modules
from autopar.trace.statements import returned_in

# Files of what calls modules: torch's own, and what is in its place while that, or torch.fx, or we trace.
CALL_OF_MODULES = {
    one.__code__.co_filename
    for one in (nn.Module.__call__, torch.fx.Tracer.trace, make_fx, cast(Any, leaving_modules).__wrapped__)
}
PASSED_ON = {handle_torch_function.__code__}

Made = TypeVar("Made", bound=Callable[..., Any])


def passes_on(function: Made) -> Made:
    """One of ours, which returns what it has called gives, if not as it is."""
    PASSED_ON.add(cast(FunctionType, function).__code__)
    return function


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """That one, and all that wait for it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def given_to(frame: FrameType | None, calls: Set[CodeType]) -> Iterator[FrameType]:
    """Those that are given what is made in a call of that one, the innermost one first, as far as none of `calls` is
    among them.
    """
    for one in frames(frame):
        if one.f_code in calls:
            return
        yield one
        if one.f_code not in PASSED_ON and one.f_lasti not in returned_in(one.f_code):
            return


def of_modules(given: Callable[[FrameType | None, Any], Any]) -> RemovableHandle:
    """What a module gives is what `given` says, until this is removed, which is called with the code that has called
    that module. Modules with forward hooks of their own are left out: these see what it gives, and may change it.
    """

    def chosen(module: nn.Module, _: Any, result: Any) -> Any:
        caller = next(one for one in frames(sys._getframe(1)) if one.f_code.co_filename not in CALL_OF_MODULES)
        return None if module._forward_hooks else given(caller, result)

    return register_module_forward_hook(chosen)
