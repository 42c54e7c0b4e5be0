"""Hooks of users. Those that submodules run in forward are traced with it; those of their backward, which a program
does not call, are refused. (Those of parameters go with them: `parameters.carry`.)
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from autopar._compat import global_forward_hooks, global_forward_pre_hooks
from autopar.trace.modules import FORWARD_HOOKS, HOOKS

OF_BACKWARD = tuple(kind for kind in HOOKS if kind not in FORWARD_HOOKS)


def hooked(parallel: nn.Module, kinds: Sequence[str] = OF_BACKWARD) -> list[dict[int, object]]:
    """Where hooks of submodules stand. (The module itself is called as any module is.)"""
    return [getattr(module, kind) for module in parallel.modules() if module is not parallel for kind in kinds]


def _for_all_modules() -> bool:
    return bool(global_forward_hooks or global_forward_pre_hooks)


def refuse(parallel: nn.Module) -> None:
    """Raise where a submodule has hooks in backward, naming it and the first of them, or where all modules have."""
    if _for_all_modules():
        raise RuntimeError(
            "hooks are registered for all modules (register_module_forward_hook), which a compiled step would never "
            "call; remove them"
        )
    for name, module in parallel.named_modules():
        if module is parallel:
            continue
        for kind in OF_BACKWARD:
            for hook in getattr(module, kind).values():
                told = getattr(hook, "__qualname__", type(hook).__name__)
                raise RuntimeError(
                    f"module {name} has the hook {told} ({kind.strip('_')}), which a compiled step would never call: "
                    "remove it, change gradients in a torch.autograd.Function, or register it on the whole model or on "
                    "parameters"
                )


class Registered:
    """The hooks that submodules run in forward, as they are now: a program has what they do."""

    def __init__(self, parallel: nn.Module) -> None:
        self._all = hooked(parallel, FORWARD_HOOKS)
        self._count = sum(map(len, self._all))
        self._some = [held for held in self._all if held]
        self._were = [_looked_at(hook) for held in self._some for hook in held.values()]

    def held(self) -> list[tuple[dict[int, object], dict[int, object]]]:
        """Where they stand, and what is there now."""
        return [(held, dict(held)) for held in self._some]

    @contextlib.contextmanager
    def back(self, before: list[tuple[dict[int, object], dict[int, object]]]) -> Iterator[None]:
        """Inside, those stand there that did before, as `held` has said; scripts remove hooks behind forward."""
        now = [(held, dict(held)) for held in self._all]
        for held, _ in now:
            held.clear()
        for held, were in before:
            held.update(were)
        try:
            yield
        finally:
            for held, are in now:
                held.clear()
                held.update(are)

    def changed(self) -> bool:
        """Whether others are there by now, or some for all modules, which are refused."""
        if _for_all_modules() or sum(map(len, self._all)) != self._count:
            return True
        now = [hook for held in self._some for hook in held.values()]
        return len(now) != len(self._were) or any(was() != hook for was, hook in zip(self._were, now, strict=True))


def _looked_at(hook: Any) -> Callable[[], Any]:
    """It, for as long as somebody else holds it: it may hold the module."""
    if isinstance(hook, types.MethodType):
        return weakref.WeakMethod(hook)
    try:
        return weakref.ref(hook)
    except TypeError:  # of a class with slots
        return lambda: hook
