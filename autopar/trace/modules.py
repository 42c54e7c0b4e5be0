"""Copies of a user's module with other tensors in the place of its parameters and buffers."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from autopar._compat import FakeTensor, FakeTensorMode
from autopar.errors import PlanMismatch, TraceError
from autopar.trace.closures import globals_of, look_at_copies, with_parts
from autopar.trace.standing_in import StandIns
from autopar.trace.values import held_in, put_in

# Attributes of parameters that are no user's: ours, and torch's.
OWN = ("borrowed", "is_new", "_is_param", "_is_buffer", "_local_tensor", "_spec")
MAY_BE_HELD = torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc  # layouts of buffers
REGISTERED = ("_parameters", "_buffers", "_modules")  # where a module holds what is registered with it
# What every module has; `training` alone says something about what forward computes.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")


def check_names(model: nn.Module) -> None:
    """torch.fx writes the names of modules into code between quotes, as they are, and finds tensors by the methods of
    the model. Raises TraceError for names that are something else there, or no code at all, and for methods that give
    others than there are.
    """
    _check_members(model)
    for name, _ in model.named_modules():
        part = name.rpartition(".")[2]
        if any(one in part for one in '"\\\n\r'):
            raise TraceError(
                f"module {name!r} has a double quote, a backslash or a line break in its name, which torch.fx cannot "
                "write into the code of a graph: call it otherwise"
            )


def _check_members(model: nn.Module) -> None:
    own: list[tuple[str, Any, Any]] = [
        ("named_parameters", model.named_parameters(), nn.Module.named_parameters(model)),
        ("parameters", enumerate(model.parameters()), enumerate(dict(nn.Module.named_parameters(model)).values())),
        ("named_buffers", model.named_buffers(), nn.Module.named_buffers(model)),
    ]
    for name, found, there in own:
        if [(key, id(one)) for key, one in found] != [(key, id(one)) for key, one in there]:
            raise TraceError(
                f"{type(model).__name__}.{name}() gives others than torch.nn.Module.{name}() finds, and torch finds "
                "what a model has by it: call that method otherwise (def trained_parameters(self))"
            )


def check_tensors(model: nn.Module) -> None:
    """Raises PlanMismatch for parameters and attributes that are no dense tensors, and buffers that are nested or in
    blocks. Sparse buffers may be there, as long as forward does not read them.
    """
    for name, module in model.named_modules():
        buffers = {key: value for key, value in module._buffers.items() if value is not None}
        refused = {key: value for key, value in buffers.items() if value.layout not in MAY_BE_HELD or value.is_nested}
        held = {**vars(module), **module._parameters, **refused}
        for key, value in held.items():
            if isinstance(value, torch.Tensor):
                check_dense(value, f"{name}.{key}".removeprefix(".") + " of the model")


def sparse_buffers(model: nn.Module) -> dict[str, torch.layout]:
    """Buffers whose values do not lie in rows and columns, by name."""
    named = model.named_buffers(remove_duplicate=False)
    return {name: buffer.layout for name, buffer in named if buffer.layout is not torch.strided}


def check_dense(value: torch.Tensor, what: str) -> None:
    """Raises PlanMismatch for a tensor whose values do not lie in rows and columns; `what`: what it is."""
    if value.layout is not torch.strided:
        kind = name_of_layout(value.layout)
        way = "pad it to one length" if value.is_nested else "pass it dense (.to_dense())"
        raise PlanMismatch(f"{what} has the layout {kind}, and a plan splits dense tensors: {way}")


def name_of_layout(layout: torch.layout) -> str:
    """As users write it, without `torch.`."""
    return str(layout).removeprefix("torch.")


def with_tensors(
    model: nn.Module,
    tensor_of: Mapping[int, torch.Tensor],
    originals: dict[int, Any] | None = None,
    shared: Mapping[int, Any] | None = None,
) -> nn.Module:
    """A structural copy of `model` in which the tensor with `id` i is `tensor_of[i]`. `originals`: is told what the
    object with `id` i is a copy of. `shared`: by `id`, objects that the copy has as they are.

    Names, aliases (one module or tensor under two names) and the user's attributes stay as they are; functions that
    look at the model look at the copy. Of what hooks hold, that alone is copied which the model holds, too. `model` is
    not changed, and no parameter or buffer storage is copied.
    """
    for value in (*model.parameters(), *model.buffers()):
        vars(tensor_of.get(id(value), value)).update(noted_on(value))
    hooks = [getattr(part, kind) for part in model.modules() for kind in HOOKS]
    given: dict[int, Any] = {**(shared or {}), **tensor_of, **{id(held): type(held)() for held in hooks}}
    given |= {id(value): value for held in hooks for value in globals_of(held.values())}
    copy_of = dict(given)
    try:
        made = copy.deepcopy(model, copy_of)
    except Exception:  # whatever a class raises that cannot be copied: locks, files, generators
        copy_of = _shared(model, given) | given
        made = copy.deepcopy(model, copy_of)
    _fill_as_held(copy_of)
    copied = [(copy_of[id(one)], one) for one in copy_of.get(id(copy_of), ()) if id(one) in copy_of]
    for held in hooks:
        copy_of[id(held)].update({key: copy_of.get(id(hook), hook) for key, hook in held.items()})
    copied += look_at_copies(made, copy_of)
    if originals is not None:
        originals |= {id(copy): original for copy, original in copied}
    return made


def registered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters and buffers, by name."""
    parameters, buffers = tensors_by_name(model)
    return {**parameters, **buffers}


def noted_on(tensor: torch.Tensor) -> dict[str, Any]:
    """What the user has put on a parameter or buffer (`weight.scale = 2.0`)."""
    own = ((name, value) for name, value in vars(tensor).items() if value is not None)
    beside = {*OWN, *_of_fakes()} if isinstance(tensor, FakeTensor) else OWN
    return {name: value for name, value in own if not name.startswith("__") and name not in beside}


@functools.cache
def _of_fakes() -> frozenset[str]:
    """Attributes that every fake tensor has."""
    with FakeTensorMode():
        return frozenset(vars(torch.empty(0)))


def _fill_as_held(copy_of: dict[int, Any]) -> None:
    """Let copies of containers hold copies of what these hold. `copy.deepcopy` fills those of lists, sets and
    dictionaries with what iterating gives, which a class with an `__iter__` of its own may make up, and attributes that
    are entries (`self.__dict__ = self`) are lost. `copy_of`: what it
    leaves in its memo, the originals among it.
    """
    for one in [*copy_of.get(id(copy_of), ())]:
        kind, made = type(one), copy_of.get(id(one), one)
        base = next((base for base in (list, set, dict) if isinstance(one, base)), None)
        if isinstance(one, dict) and getattr(one, "__dict__", None) is one:  # its entries are its attributes
            made.__dict__ = made
        if made is one or base is None or kind.__reduce__ is not base.__reduce__:
            continue
        if hasattr(kind, "__deepcopy__") or kind.__reduce_ex__ is not object.__reduce_ex__:
            continue
        if isinstance(one, list) and kind.__iter__ is not list.__iter__:
            list.__setitem__(made, slice(None), [copy.deepcopy(part, copy_of) for part in list.__iter__(one)])
        elif isinstance(one, set) and kind.__iter__ is not set.__iter__:
            set.clear(made)
            set.update(made, [copy.deepcopy(part, copy_of) for part in set.__iter__(one)])
        elif isinstance(one, dict) and kind.items is not dict.items:
            dict.clear(made)
            dict.update(made, {key: copy.deepcopy(part, copy_of) for key, part in dict.items(one)})


def _shared(model: nn.Module, given: Mapping[int, Any]) -> dict[int, Any]:
    """By id, what modules hold and cannot be copied: a copy of the model holds the very same."""
    found: dict[int, Any] = {}
    for part in model.modules():
        for name, value in vars(part).items():
            if name not in REGISTERED:
                try:
                    copy.deepcopy(value, dict(given) | {id(model): model})
                except Exception:  # as above; a copy of all raises again whatever is not mended by this
                    found[id(value)] = value
    return found


def as_plain_modules(model: nn.Module) -> None:
    """Let graph modules of torch.fx, in a copy that is only traced, be ordinary modules with their generated forward:
    torch.export takes arguments and results of a graph module as its graph has them, and not as its forward does.
    """
    for part in model.modules():
        if isinstance(part, torch.fx.GraphModule):
            kind, plain = type(part), cast(Any, part)
            plain.__class__ = type(
                kind.__name__, (nn.Module,), {"forward": kind.forward, "__module__": kind.__module__}
            )


@contextlib.contextmanager
def calling_forward(model: nn.Module) -> Iterator[None]:
    """Inside, to call `model` is what `nn.Module` makes of it: its class may have a `__call__` of its own, which has
    run by the time that forward is asked for, and goes on with what it gives.
    """
    kind = type(model)
    if kind.__call__ is nn.Module.__call__:
        yield
        return
    own, standing = kind.__call__, StandIns(("__call__",))

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_model = vars(self) is vars(model)  # torch's tracer has objects that stand for it
        return nn.Module.__call__(self, *args, **kwargs) if is_model else own(self, *args, **kwargs)

    standing.put(kind, [__call__])
    try:
        yield
    finally:
        standing.restore()


@contextlib.contextmanager
def leaving_modules() -> Iterator[None]:
    """Inside, torch's tracer knows in which modules it is, also behind exceptions that leave some and are caught."""
    kind: Any = torch.fx.Tracer
    call = kind.call_module

    def call_module(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        around = tracer.module_stack.copy()
        try:
            return call(tracer, *args, **kwargs)
        except BaseException:
            tracer.module_stack.clear()
            tracer.module_stack.update(around)
            raise

    kind.call_module = call_module
    try:
        yield
    finally:
        kind.call_module = call


def replace_tensors(model: nn.Module, tensor_of: Mapping[int, torch.Tensor], *, registered: bool = True) -> None:
    """Put `tensor_of[i]` wherever a module holds the tensor with `id` i: as an attribute, in lists, tuples and
    dictionaries, or in a variable or an argument of a function. Without `registered`, parameters and buffers themselves
    stay.
    """
    replacing = _Replacing(tensor_of)
    for part in model.modules():
        held = vars(part)
        for name in held.keys() - (set() if registered else {"_parameters", "_buffers"}):
            held[name] = replacing.of(held[name])


class _Replacing:
    """`seen`: id of what was looked at -> that, and what stands in its place, wherever it is held again."""

    def __init__(self, tensor_of: Mapping[int, torch.Tensor]) -> None:
        self.tensor_of = tensor_of
        self.seen: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor_of.get(id(value), value)
        if not isinstance(value, (list, tuple, dict, partial, types.FunctionType)):
            return value
        if id(value) not in self.seen:
            self.seen[id(value)] = value, value  # it may hold itself
            made = self._made(value)
            self.seen[id(value)] = value, made
            self.seen[id(made)] = made, made
        return self.seen[id(value)][1]

    def _made(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # not filled yet
                    now = cell.cell_contents
                    if (then := self.of(now)) is not now:
                        cell.cell_contents = then
            if (defaults := self.of(value.__defaults__)) is not value.__defaults__:
                value.__defaults__ = defaults
            return value
        if isinstance(value, partial):
            func, args, keywords = self.of(value.func), self.of(value.args), self.of(value.keywords)
            return value if func is value.func and args is value.args else partial(func, *args, **keywords)
        if isinstance(value, tuple):
            held = held_in(value)
            parts = [*map(self.of, held)]
            return value if all(map(operator.is_, parts, held)) else with_parts(value, parts)
        put_in(value, self.of)
        return value


def tensors_by_name(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Parameters and buffers under every name they have (a tied one appears under each of its names)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return parameters, buffers


def aliases(model: nn.Module) -> dict[str, str]:
    """Further name -> first name, of every parameter or buffer that has several (tied weights)."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for tensors in tensors_by_name(model):
        for name, tensor in tensors.items():
            if (known := first.setdefault(id(tensor), name)) != name:
                found[name] = known
    return found


def computed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Attributes that hooks compute from parameters before each forward (weight norm, pruning), or forward keeps, alone
    or in containers: they belong to a graph of autograd, which cannot be copied, and what they are now is not read
    again.
    """
    own = (vars(module).items() for module in model.modules())
    left: list[Any] = [value for items in own for name, value in items if name not in REGISTERED]
    found, seen = list[torch.Tensor](), set[int]()
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            found.append(value)
        elif type(value) in (list, tuple, dict) and id(value) not in seen:  # it may hold itself
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return found
