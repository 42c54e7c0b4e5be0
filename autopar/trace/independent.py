"""Whether what forward computes, and leaves outside of its modules, hangs on what earlier calls have left there."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import FakeTensor, FakeTensorMode
from autopar.errors import TraceError
from autopar.trace.closures import parts_of
from autopar.trace.counted import Counting
from autopar.trace.formulas import Place
from autopar.trace.left import Left
from autopar.trace.lists import Asking
from autopar.trace.lookups import Of
from autopar.trace.modules import HOOKS, OF_EVERY_MODULE, REGISTERED
from autopar.trace.numbers import Number
from autopar.trace.origins import tensors_in
from autopar.trace.reads import Reads, refuse
from autopar.trace.records import leads_to
from autopar.trace.values import Change, held_in, is_installed, is_torchs, own_names
from autopar.trace.writes import number_of

MOST = 10_000  # objects that hooks lead to are looked at, at most
Again = Callable[[Sequence[Tensor]], tuple[Left, torch.export.ExportedProgram, Change | None]]


def hangs_on_nothing(
    left: Left,
    model: nn.Module,
    mode: FakeTensorMode,
    exported: torch.export.ExportedProgram,
    again: Again,
    counting: Counting,
) -> None:
    """Find it out, by a second trace (`again`) with something there that an earlier call may have left. Where it is the
    same, guards need not look at it; where it is not, each state has a program of its own. `model`: its containers and
    objects are as they were behind that. `mode`: of fake tensors. `counting` is told which lists were asked.

    Raises TraceError where each call would leave another state.
    """
    modules = dict(model.named_modules())
    with mode:
        values = left.as_before()
    is_first = left.is_first(modules)
    undo = [write.as_it_is(modules) for write in left.writes]
    for write, value in zip(left.writes, values, strict=True):
        write.make_often(value, modules)
    asking = Asking()
    undo.append(asking.stand(left.writes, modules))
    counter, error = None, None
    try:
        with counting.kept():
            writes, other, changed = again(tensors_in(values))
    except Exception as raised:  # the first trace had none: it comes of what is left, which forward reads then
        reads_it, error = True, raised
    else:
        is_alike = left.told() == writes.told()
        left.is_independent = is_alike and not asking.asked and not counting.beside.was_changed
        counting.beside.found |= {*asking.of_attributes(left.writes)}
        counter = left.counted(writes) if is_alike else None
        taken = other.graph_signature.inputs_to_lifted_tensor_constants.values()
        reads_it = changed is not None or any(isinstance(other.constants[name], FakeTensor) for name in taken)
        # (what is asked of a list has programs of its own)
        reads_it = reads_it or (is_alike and not asking.asks_lists and str(other.graph) != str(exported.graph))
    finally:
        for take_back in reversed(undo):
            take_back()
    left.is_independent = left.is_independent and not reads_it
    if not left.is_independent:
        counting.asked_for |= left.attributes | _leading_to(left, modules)
    if counter is None and reads_it and left.has_constants_alone():
        counter = left.writes[0]
    if counter is not None:
        refuse(Change(counter.called))
    if reads_it and not is_first:
        raise left.refused() from error


def _leading_to(left: Left, modules: Mapping[str, nn.Module]) -> set[Place]:
    """The attributes of modules that lead to objects which forward writes to."""
    objects = [write.place.holder for write in left.writes if isinstance(write.place, Of)]
    return {
        (path, name)
        for path, part in modules.items()
        for name, value in (vars(part).items() if objects else ())
        if name not in OF_EVERY_MODULE and any(leads_to(value, one) for one in objects)
    }


def refuse_fakes(model: nn.Module, reads: Reads, originals: Collection[int]) -> None:
    """Raise TraceError where forward, or a hook of the model, has left a traced tensor in what nobody sees, and a
    script would find it. `originals`: what is a copy for the trace, by ids: that holds such tensors.
    """
    hooks = [hook for part in model.modules() for kind in HOOKS for hook in getattr(part, kind).values()]
    found = [(place.get(name), name) for place, name, _, _ in reads.names if number_of(place) not in originals]
    every = [*hooks, *(value for value, _ in found)]
    if holds_fakes(every, originals):
        name = next((name for value, name in found if holds_fakes([value], originals)), "")
        where = f" (by {name!r})" if name else ""
        raise TraceError(
            f"forward, or a hook, keeps a tensor where a compiled step cannot write to{where}: "
            "keep it in a dict, in a list, or as an attribute of a module of this model or of an object of a class "
            "without __slots__"
        )


def refuse_modules(had: Mapping[str, nn.Module], there: Mapping[str, nn.Module], lines: Mapping[str, str]) -> None:
    """Raise TraceError where forward leaves another module behind than there was. `lines`: which set one."""
    changed = [path for path in {**had, **there} if had.get(path) is not there.get(path)]
    if changed:
        path = next((one for one in changed if one in lines), changed[0])
        line = f" at {lines[path]}" if path in lines else ""
        was, now = (type(one[path]).__name__ if path in one else "another, or none" for one in (had, there))
        raise TraceError(
            f"forward changes which module is at self.{path}{line} (now {now}, before {was}), and a program has those "
            "that were there: do that ahead of the call, as by one call of the plain model before it is compiled"
        )


def holds_fakes(left: list[Any], originals: Collection[int] = ()) -> bool:
    """Whether these values, or what they lead to, hold a traced tensor."""
    looked: dict[int, Any] = {}
    while left and len(looked) < MOST:
        value = left.pop()
        if isinstance(value, (FakeTensor, Number)) and not isinstance(value, nn.Parameter):
            return True
        if id(value) not in looked and id(value) not in originals:
            looked[id(value)] = value
            left += _held_by(value)
    return False


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        named = map(value.__globals__.get, value.__code__.co_names)
        return [*parts_of(value), *vars(value).values(), *named, *_traced(value.__globals__)]
    if isinstance(value, nn.Module):
        held = [held for name, held in vars(value).items() if name not in REGISTERED]
        return [*held, *value._buffers.values()]
    if isinstance(value, types.ModuleType):
        file = getattr(value, "__file__", None) or ""
        return [] if is_torchs(file) or is_installed(file) else _traced(vars(value))
    if isinstance(value, (type, Tensor)):
        return _traced(vars(value))
    if parts := parts_of(value) or held_in(value):
        return parts
    if type(value).__module__.partition(".")[0] in ("torch", "autopar"):
        return []
    return [*(own_names(value) or {}).values()]


def _traced(names: Mapping[str, Any]) -> list[Any]:
    return [value for value in [*names.values()] if issubclass(type(value), (FakeTensor, Number))]
