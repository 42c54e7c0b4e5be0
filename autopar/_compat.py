"""Every private name of torch that autopar uses, under our own names. Nothing else imports from `torch._*`.

Tried on torch 2.11.0, 2.12.0, 2.12.1 and 2.13.0. Each entry is executed by tests/test_compat.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed._state_dict_utils as _state_dict_utils
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._C._distributed_c10d import HashStore
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor, peek_interpreter_stack
from torch._export.passes import replace_set_grad_with_hop_pass
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.cuda import _sleep as cuda_sleep
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed._local_tensor._c10d import _prepare_collective_groups
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.distributed_c10d import _resolve_process_group as group_of_name  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops import _math_ops
from torch.nn.modules.module import _global_forward_hooks as global_forward_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as global_forward_pre_hooks
from torch.nn.utils import clip_grad, parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Without `functional_collectives` imported, a raw `_c10d_functional` op that meets autograd gives silently wrong
# gradients.


def default_store() -> Any:
    """Where the processes of the default group find each other; a `clone` of it belongs to another thread."""
    return _get_default_store()


def group_named(name: str) -> Any:
    """The process group of that name, as functional collectives have it."""
    return group_of_name(name)  # pyright: ignore[reportArgumentType]


def groups_like(name: str) -> list[list[int]]:
    """The ranks of each group that stands for the group of that name where one process plays all ranks."""
    ranks, offsets, _ = _prepare_collective_groups(group_named(name))
    return [[offset + rank for rank in ranks] for offset in offsets]


class _Answer:
    """Stands for a flag, and says yes to whom `to` says so, by the file of whoever asks."""

    def __init__(self, to: Callable[[str], bool]) -> None:
        self._to = to

    def __bool__(self) -> bool:
        return self._to(sys._getframe(1).f_code.co_filename)

    def __or__(self, other: Any) -> Any:
        return self._to(sys._getframe(1).f_code.co_filename) | other

    def __and__(self, other: Any) -> Any:
        return self._to(sys._getframe(1).f_code.co_filename) & other

    def __eq__(self, other: object) -> bool:
        return self._to(sys._getframe(1).f_code.co_filename) == other

    __ror__, __rand__, __hash__ = __or__, __and__, object.__hash__


@contextlib.contextmanager
def told_of_export(to: Callable[[str], bool]) -> Iterator[None]:
    """Within `torch.export`: inside, code of those files alone is told that it is compiled, or exported."""
    flags = "_is_compiling_flag", "_is_exporting_flag"
    before = {name: getattr(torch.compiler, name) for name in flags}
    for name, flag in before.items():
        if flag is True:
            setattr(torch.compiler, name, _Answer(to))
    try:
        yield
    finally:
        for name, flag in before.items():
            setattr(torch.compiler, name, flag)


def is_transforming() -> bool:
    """Whether what runs now is within `torch.func.grad`, `vmap`, `jvp` or their like."""
    return peek_interpreter_stack() is not None


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Within it functions of torch compute, whatever traces them around it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def is_batched(value: torch.Tensor) -> bool:
    """Whether it stands for a batch of values: within `vmap`, or as `is_grads_batched=True` has gradients."""
    return is_batchedtensor(value) or is_legacy_batchedtensor(value)


def is_wanted(function: Any) -> bool:
    """Whether the backward that runs will go on to this function, of autograd. Of what gives a leaf its gradient, which
    torch does not tell, that it may.
    """
    if function is None:
        return False
    return hasattr(function, "variable") or torch._C._will_engine_execute_node(function)


@contextlib.contextmanager
def without_parametrization_cache() -> Iterator[None]:
    """Inside `torch.nn.utils.parametrize.cached()`, within which nothing is cached here, nor found there."""
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before


@contextlib.contextmanager
def keeping_grad_modes() -> Iterator[None]:
    """Inside, torch.export keeps a `no_grad` that stands in an autocast context: it looks for that at the head of each
    part of the graph, where the autocast is begun anew (torch 2.11 to 2.13), and drops it elsewhere, silently.
    """
    original = replace_set_grad_with_hop_pass._is_set_grad_enabled_sub_mod

    def is_one(node: torch.fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
        if node.op != "call_module":
            return False
        part: Any = getattr(node.graph.owning_module, str(node.target))
        modes = [one.args[0] for one in part.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)]
        return bool(modes) and not (omit_if_same_with_ambient and modes[0] == torch.is_grad_enabled())

    replace_set_grad_with_hop_pass._is_set_grad_enabled_sub_mod = is_one
    try:
        yield
    finally:
        replace_set_grad_with_hop_pass._is_set_grad_enabled_sub_mod = original


@contextlib.contextmanager
def checking_truths(tensor_of: Callable[[Any], torch.Tensor | None]) -> Iterator[None]:
    """Inside, `torch._check` and `torch._check_with` (of transformers' models of images and text) take what stands for
    a truth, as a tensor: `tensor_of` gives that, or None for all else.
    """
    check, check_with = torch._check, torch._check_with

    def of_any(cond: Any, message: Any = None) -> None:
        made = tensor_of(cond)
        check(cond, message) if made is None else torch._check_tensor_all(made, message)

    def of_any_with(error: type[Exception], cond: Any, message: Any = None) -> None:
        made = tensor_of(cond)
        check_with(error, cond, message) if made is None else torch._check_tensor_all_with(error, made, message)

    torch._check, torch._check_with = of_any, of_any_with
    try:
        yield
    finally:
        torch._check, torch._check_with = check, check_with


@contextlib.contextmanager
def scripted_as_written() -> Iterator[None]:
    """Inside, functions of torch.jit.script run operator by operator. Once they have run, they have a plan otherwise,
    with a backward of its own, which is none of the graph that is traced.
    """
    kind: Any = torch.jit.ScriptFunction
    call = kind.__call__

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        function._debug_flush_compilation_cache()
        return call(function, *args, **kwargs)

    kind.__call__ = called
    try:
        with cast(Any, torch.jit).optimized_execution(False):
            yield
    finally:
        kind.__call__ = call


def keeps_graph() -> bool:
    """Whether the backward that runs may be followed by another one through the same graph (`retain_graph=True`)."""
    return _get_current_graph_task_keep_graph()


def is_in_backward() -> bool:
    """Whether autograd runs a backward, in this thread."""
    return torch._C._current_graph_task_id() != -1


def without_torch_function() -> Any:
    """Inside, functions of torch are those of torch, whatever their tensors' classes make of them."""
    return torch._C.DisableTorchFunctionSubclass()


def with_torch_function() -> Any:
    """Inside, they are what their tensors' classes make of them, also within `without_torch_function`."""
    return torch._C._EnableTorchFunction()


def total_norm() -> Any:
    """What `torch.nn.utils.clip_grad_norm_` measures gradients with."""
    return clip_grad._get_total_norm


def replace_total_norm(by: Any) -> None:
    """Measure them with something else, in `torch.nn.utils.get_total_norm`, too."""
    clip_grad._get_total_norm = by
    torch.nn.utils.get_total_norm = by


def distribute_tensors() -> Any:
    """What puts whole values into a state dict (`set_model_state_dict`): called with (state dict with (held, whole) for
    each key, keys, device, process group).
    """
    return _state_dict_utils._distribute_tensors


def replace_distribute_tensors(by: Any) -> None:
    """Put them in with something else."""
    _state_dict_utils._distribute_tensors = by


def named_dims() -> Any:
    """What DTensor reads the dims of a reduction with: (dims, ndim) -> dims, or None for all."""
    return _math_ops._infer_reduction_dims


def replace_named_dims(by: Any) -> None:
    """Read them with something else."""
    _math_ops._infer_reduction_dims = by


def wrap_dtensor_dispatch(beside: Any, given: Any, laid_out: Any) -> None:
    """Let DTensors ask `beside(theirs, operator, plain number, ...)` before a plain number counts as one that all ranks
    have, `laid_out(theirs, operator, args, kwargs, ...)` for how a result lies (or for the result), and `given(theirs,
    operator, args, ...)` behind what ranks have made of their pieces; `theirs` is what torch does, where it has that.
    """
    dispatcher = DTensor._op_dispatcher
    for name, by in (
        ("_try_replicate_spec_for_scalar_tensor", beside),
        ("_propagate_op_sharding_dispatch_slow_path", laid_out),
        ("_dispatch_fast_path_python_tail", given),
    ):
        if (theirs := getattr(dispatcher, name, None)) is not None:
            setattr(dispatcher, name, functools.wraps(theirs)(functools.partial(by, theirs)))


# Operator -> what DTensor does for it instead of looking for layouts: called with (operator, args, kwargs).
check_tensor_all_with = torch._check_tensor_all_with
dtensor_handlers = DTensor._op_dispatcher._custom_op_handlers

__all__ = [
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "HashStore",
    "LocalTensor",
    "LocalTensorMode",
    "TorchDispatchMode",
    "aot_export_joint_with_descriptors",
    "check_tensor_all_with",
    "checking_truths",
    "cuda_sleep",
    "default_store",
    "distribute_tensors",
    "dtensor_handlers",
    "functional_collectives",
    "fx_graph_cse",
    "global_forward_hooks",
    "global_forward_pre_hooks",
    "group_named",
    "groups_like",
    "is_batched",
    "is_in_backward",
    "is_transforming",
    "is_wanted",
    "keeping_grad_modes",
    "keeps_graph",
    "named_dims",
    "outside_modes",
    "pytree",
    "replace_distribute_tensors",
    "replace_named_dims",
    "replace_total_norm",
    "scripted_as_written",
    "told_of_export",
    "total_norm",
    "with_torch_function",
    "without_parametrization_cache",
    "without_torch_function",
    "wrap_dtensor_dispatch",
]
