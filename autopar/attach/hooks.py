"""Hooks of users: those of submodules, which a program does not call, are refused. (Those of parameters go with them:
`tensors.carry`.)
"""

from __future__ import annotations

from torch import nn

from autopar._compat import global_forward_hooks, global_forward_pre_hooks
from autopar.trace.installed import HOOKS

COMPUTE = "torch.nn.utils."  # weight norm, spectral norm, pruning: they compute weights, and are traced with the rest
# What transformers hangs on modules: on embeddings for checkpoints, that their output requires grad, which it does in a
# program; on layers, at the first call that asks for hidden states or scores of routers, what keeps them, which a trace
# sees. (The name of the latter is misspelt there.)
OF_TRANSFORMERS = (
    "enable_input_require_grads.<locals>.make_inputs_require_grads", ".<locals>.output_capturing_hook",
)  # fmt: skip


def hooked(parallel: nn.Module) -> list[dict[int, object]]:
    """Where hooks stand that no program calls: those of submodules. (The module itself is called as any module is.)"""
    return [getattr(module, kind) for module in parallel.modules() if module is not parallel for kind in HOOKS]


def refuse(parallel: nn.Module) -> None:
    """Raise where a submodule has hooks, naming it and the first of them, or where all modules have."""
    if global_forward_hooks or global_forward_pre_hooks:
        raise RuntimeError(
            "hooks are registered for all modules (register_module_forward_hook), which a compiled step would never "
            "call; remove them"
        )
    for name, module in parallel.named_modules():
        if module is parallel:
            continue
        for kind in HOOKS:
            for hook in getattr(module, kind).values():
                told = getattr(hook, "__qualname__", type(hook).__name__)
                if type(hook).__module__.startswith(COMPUTE) or told.endswith(OF_TRANSFORMERS):
                    continue
                raise RuntimeError(
                    f"module {name} has the hook {told} ({kind.strip('_')}), which a compiled step would never call: "
                    "remove it, return what it looks at, or register it on the whole model or on parameters"
                )
