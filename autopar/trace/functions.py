"""Functions with a backward of their own: `torch.autograd.Function`.

`torch.export` keeps the operators of their forward alone, whose derivative is another one: a reversed gradient, a
straight-through estimator or a fused operator would train wrongly, and nothing would say so. So while a model is
exported, each application of such a function is one operator of ours; in what was exported it is the function again,
so that AOTAutograd sees its backward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from autopar._compat import TorchDispatchMode, pytree
from autopar.errors import TraceError
from autopar.trace.ambient import autocast_state
from autopar.trace.exported import SPARSE
from autopar.trace.lines import line_here
from autopar.trace.masked import Picked
from autopar.trace.numbers import Number
from autopar.trace.passed_on import passes_on

_LIBRARY = torch.library.Library("autopar_functions", "DEF")
_LIBRARY.define("apply(Tensor[] tensors, int number) -> Tensor[]")
_CALLABLES = (nn.Module, types.FunctionType, types.MethodType, functools.partial)
# What backward names that computes again, and gives the gradients of that.
OF_CHECKPOINTS = {
    "torch", "enable_grad", "autograd", "grad", "detach", "requires_grad_", "view_as", "run_function", "input_tensors",
    "input_params", "x", "tuple", "list", "ctx", "cuda", "amp", "autocast", "gpu_autocast_kwargs",
}  # fmt: skip
_here = threading.local()  # applications: those of the export that runs in this thread


@dataclass
class _Application:
    """One function applied to arguments, of which the tensors are left out."""

    kind: type[torch.autograd.Function]
    leaves: list[Any]
    spec: pytree.TreeSpec
    given: list[Any] = field(default_factory=list[Any])  # the leaves of what it returns
    given_spec: pytree.TreeSpec | None = None

    def shapes(self, tensors: list[Tensor]) -> list[Tensor]:
        """What it gives, where shapes alone are asked for."""
        versions = [tensor._version for tensor in tensors]
        with torch.no_grad():
            made = self(tensors)
        if versions != [tensor._version for tensor in tensors]:
            raise TraceError(
                f"{self.kind.__name__} has a backward of its own and changes its arguments in place; let it return new "
                "tensors"
            )
        return [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in made]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        rest = iter(tensors)
        args = pytree.tree_unflatten([next(rest) if leaf is Tensor else leaf for leaf in self.leaves], self.spec)
        self.given, self.given_spec = pytree.tree_flatten(_ORIGINAL(self.kind, *args))
        return [leaf for leaf in self.given if isinstance(leaf, Tensor)]


@passes_on
def applied(application: Any, tensors: list[Tensor]) -> list[Tensor]:
    """What it gives, in an operator that `with_functions` has it in the place of; by itself where nothing is exported
    (forward runs once more, to see why it was not). It has `shapes`, too.
    """
    if getattr(_here, "applications", None) is None:
        return application(tensors)
    _here.applications.append(application)
    return torch.ops.autopar_functions.apply(tensors, len(_here.applications) - 1)


@passes_on
def as_operator(kind: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `Function.apply` is while a model is exported."""
    if (taken := _computed_again(kind, args)) is not None:  # which is the plan's to say
        return args[0](*taken)
    applications: list[Any] | None = getattr(_here, "applications", None)
    is_inside = getattr(_here, "is_inside", False)
    if applications is None or is_inside or kwargs or _is_plain(kind):
        return _ORIGINAL(kind, *args, **kwargs)
    leaves, spec = pytree.tree_flatten(args)
    leaves = [_as_tensor(leaf.as_given()) if isinstance(leaf, Number) else leaf for leaf in leaves]
    if any(isinstance(leaf, _CALLABLES) for leaf in leaves):
        raise TraceError(
            f"{kind.__name__}{line_here()}, which has a backward of its own, is given a module or function, whose "
            "parameters a program would not train; call that without it"
        )
    if any(isinstance(leaf, Picked) for leaf in leaves):
        raise TraceError(
            f"{kind.__name__}{line_here()} has a backward of its own, and is given rows that values pick, as many as "
            "each call has, which a program computes on all rows; apply it to all rows and choose behind it "
            "(torch.where)"
        )
    if any(enabled for _, enabled, _ in autocast_state()):
        raise TraceError(
            f"{kind.__name__}{line_here()} has a backward of its own, which is not traced under autocast; call the "
            "model without it, or compile it with precision="
        )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    application = _Application(kind, [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    made = iter(applied(application, tensors))
    assert application.given_spec is not None
    given = [next(made) if isinstance(leaf, Tensor) else leaf for leaf in application.given]
    return pytree.tree_unflatten(given, application.given_spec)


def _computed_again(kind: type[torch.autograd.Function], args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What the function is called with that comes first, where all that `kind` does is to call it, and again in
    backward: torch's, and that of diffusion models, which is told of the parameters behind `length` arguments.
    """
    if kind is CheckpointFunction:
        return args[2:]
    names = getattr(kind.backward, "__code__", _CODE).co_names
    is_alike = kind.__name__ == "CheckpointFunction" and set(names) <= OF_CHECKPOINTS
    if not is_alike or [*inspect.signature(kind.forward).parameters][1:3] != ["run_function", "length"]:
        return None
    module, told = getattr(args[0], "__self__", None), args[2 + args[1] :]
    if not isinstance(module, nn.Module) or {*map(id, told)} != {*map(id, module.parameters())}:
        return None  # others would have no gradients
    return args[2 : 2 + args[1]]


def _as_tensor(number: Any) -> Any:
    """A number of each call (drawn, counted, or out of a tensor) as its backward may keep it; others are themselves. A
    truth is answered where that can be: it is there to choose by.
    """
    if not isinstance(number, Number) or number.tensor.dtype != torch.bool:
        return number.tensor if isinstance(number, Number) else number
    known = number.known()
    return number.tensor if known is None else bool(known)


def _is_plain(kind: type) -> bool:
    """Whether it is one of torch's, whose operators are traced; those of distributions draw, with a backward of their
    own.
    """
    return kind.__module__.startswith("torch.") and not kind.__module__.startswith("torch.distributions.")


class _WithoutSparse(TorchDispatchMode):
    """What a function computes within is no operator of the graph, and is not looked at behind the trace."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if isinstance(made, Tensor) and made.layout is not torch.strided:
            raise TraceError(SPARSE.format(line_here()))
        return made


def _shapes(tensors: list[Tensor], number: int) -> list[Tensor]:
    _here.is_inside = True
    try:
        with _WithoutSparse():
            return _here.applications[number].shapes(tensors)
    finally:
        _here.is_inside = False


def _of_constants(tensors: list[Tensor], number: int) -> list[Tensor]:
    """What it gives for a constant of one element (`torch.tensor(0.0)`), with which torch computes while it traces."""
    return [one.detach().clone() for one in copy.copy(_here.applications[number])(tensors)]


torch.library.register_fake("autopar_functions::apply", _shapes, lib=_LIBRARY)
_LIBRARY.impl("apply", _of_constants, "CPU")

# The function itself is changed, not the name: `swish = Swish.apply`, at the head of a module, was bound long ago.
_FUNCTION: types.FunctionType = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_CODE = _FUNCTION.__code__
_ORIGINAL = types.FunctionType(_CODE, _FUNCTION.__globals__, "apply", _FUNCTION.__defaults__, _FUNCTION.__closure__)


class _Instead:
    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Runs among torch's names, and with the one free variable of the code whose place it takes."""
        assert __class__
        from sys import modules

        return modules["autopar.trace.functions"].as_operator(cls, args, kwargs)


_lock = threading.RLock()


@contextlib.contextmanager
def functions_kept() -> Iterator[list[Any]]:
    """While a model is exported within, functions with a backward of their own are operators, which `with_functions`
    needs the list for.
    """
    with _lock:
        _here.applications = []
        _FUNCTION.__code__ = _Instead.apply.__func__.__code__
        try:
            yield _here.applications
        finally:
            _FUNCTION.__code__ = _CODE
            _here.applications = None


def with_functions(module: torch.fx.GraphModule, applications: list[Any]) -> None:
    """Put the functions in the place of their operators, in an exported module and those inside of it."""
    if not applications:
        return

    def run(tensors: list[Tensor], number: int) -> list[Tensor]:
        return applications[number](tensors)

    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=torch.ops.autopar_functions.apply.default):
                node.target = run
                if getattr(applications[cast(int, node.args[1])], "is_in_place", False):
                    _let_be(node)
            part.recompile()


def _let_be(node: torch.fx.Node) -> None:
    """Behind a node, what it gives is what it was given."""
    ((given,), _), (made,) = cast("tuple[list[torch.fx.Node], int]", node.args), node.users
    order = {one: place for place, one in enumerate(node.graph.nodes)}
    given.replace_all_uses_with(made, lambda user: order[user] > order[made])
