"""What forward hangs on modules at its first call: hooks, other forwards of submodules, buffers.

A program has none of it, and a trace is of a copy. What is installed once, behind a flag ("transformers" does so to
give hidden states and attentions), is taken back from the copy together with its flag: every trace installs it anew,
and the user's model, which is called by nobody, stays as it was. Buffers that forward makes may depend on its inputs:
they are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autopar.errors import TraceError
from autopar.trace.lines import line_here
from autopar.trace.modules import HOOKS
from autopar.trace.reads import Reads
from autopar.trace.standing_in import StandIns
from autopar.trace.values import MISSING


@dataclass(frozen=True)
class Hung:
    """What hung on the modules before forward ran: hooks, by module and kind; forwards of their own; buffers, and what
    shapes they had.
    """

    hooks: Mapping[tuple[str, str], Mapping[int, Any]]
    forwards: Mapping[str, Any]
    buffers: Mapping[tuple[str, str], Tensor | None]
    shapes: Mapping[tuple[str, str], torch.Size]


def hung_on(modules: Mapping[str, nn.Module]) -> Hung:
    buffers = {(path, name): one for path, module in modules.items() for name, one in module._buffers.items()}
    return Hung(
        {(path, kind): dict(getattr(module, kind)) for path, module in modules.items() for kind in HOOKS},
        {path: vars(module).get("forward", MISSING) for path, module in modules.items()},
        buffers,
        {place: one.shape for place, one in buffers.items() if one is not None},
    )


class Rebound(TraceError):
    """Forward sets buffers, at `places`, to what buffers of a program cannot be."""

    def __init__(self, message: str, places: Set[tuple[str, str]]) -> None:
        super().__init__(message)
        self.places = places


def may_be_attribute(place: tuple[str, str], modules: Mapping[str, nn.Module]) -> bool:
    """Whether a buffer is none to those who save the model, so that it may as well be a plain attribute."""
    path, name = place
    return name in modules[path]._buffers and name in modules[path]._non_persistent_buffers_set


def let_be_attributes(places: Iterable[tuple[str, str]], modules: Mapping[str, nn.Module]) -> None:
    """Let these buffers be plain attributes."""
    for path, name in places:
        if may_be_attribute((path, name), modules):
            value = modules[path]._buffers[name]
            delattr(modules[path], name)
            vars(modules[path])[name] = value


@contextlib.contextmanager
def attributes_in_place_of(places: Collection[tuple[str, str]], modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, they are."""
    parts = {path: modules[path] for path, _ in places}
    had = {path: (dict(part._buffers), set(part._non_persistent_buffers_set)) for path, part in parts.items()}
    let_be_attributes(places, modules)
    try:
        yield
    finally:
        for path, name in places:
            vars(modules[path]).pop(name, None)
            buffers, not_saved = had[path]
            modules[path]._buffers.clear()
            modules[path]._buffers.update(buffers)
            modules[path]._non_persistent_buffers_set |= not_saved


def take_back(modules: Mapping[str, nn.Module], before: Hung, reads: Reads) -> None:
    """Leave the modules as they were before forward; `reads` forgets the flags that say that something is installed.

    Raises TraceError for a buffer that is new, or of another shape or dtype, and for hooks without a flag, which would
    become more at every call.
    """
    now = hung_on(modules)
    for (path, name), shape in now.shapes.items():
        had = before.shapes.get((path, name))
        if before.buffers.get((path, name)) is now.buffers[path, name] and shape != had:
            raise TraceError(
                f"forward resizes the buffer {'.'.join(filter(None, (path, name)))} from {tuple(had or ())} to "
                f"{tuple(shape)}, which a program would not do again: call the plain model once before it is compiled, "
                "or make the buffer as large in __init__"
            )
    _write_to_buffers(modules, before.buffers, now.buffers, reads.with_gradient)
    installed = [path for (path, kind), hooks in now.hooks.items() if hooks.keys() - before.hooks[path, kind].keys()]
    replaced = [path for path, forward in now.forwards.items() if forward is not before.forwards[path]]
    for (path, kind), hooks in before.hooks.items():
        found = getattr(modules[path], kind)
        for number in found.keys() - hooks.keys():
            del found[number]
    known = {number for hooks in before.hooks.values() for number in hooks}
    for held in reads.attributes.values():
        if isinstance(held, list) and any(isinstance(one, RemovableHandle) for one in held):
            held[:] = [one for one in held if not isinstance(one, RemovableHandle) or one.id in known]
    for path in replaced:
        _restore(modules[path], "forward", before.forwards[path])
    if not installed and not replaced:
        return
    flags = [key for key, (was, is_, _) in reads.written.items() if key[1] == "forward" or _is_flag(was, is_)]
    if installed and not flags:
        raise TraceError(
            f"forward registers a hook on module {installed[0] or 'self'} without noting that it has, so every call "
            "would register one more; keep a flag that says it is there, as transformers does"
        )
    for path, name in flags:
        was, _, _ = reads.written.pop((path, name))
        _restore(modules[path], name, was)


def _write_to_buffers(
    modules: Mapping[str, nn.Module],
    before: Mapping[tuple[str, str], Tensor | None],
    now: Mapping[tuple[str, str], Tensor | None],
    with_gradient: set[str],
) -> None:
    """What forward has set buffers of parts to (`self.mean = 0.9 * self.mean + ..`) is written to those that were
    there, as torch.export does it for the whole model's own alone. `with_gradient`: what is set to a tensor with one.
    """
    if taken := [".".join(filter(None, place)) for place in before if place not in now]:
        raise TraceError(
            f"forward takes the buffer {taken[0]} away, which a program would not do again: set it to zeros, or take "
            "it away outside of forward"
        )
    changed = {place: buffer for place, buffer in now.items() if before.get(place, MISSING) is not buffer}
    owned = {id(buffer) for place, buffer in before.items() if place not in changed}
    of_others = {id(buffer) for buffer in before.values()}
    written: list[tuple[tuple[str, str], Tensor, Tensor]] = []
    for (path, name), buffer in changed.items():
        was, called = before.get((path, name)), ".".join(filter(None, (path, name)))
        if was is None or buffer is None or was.shape != buffer.shape:
            shape = None if buffer is None else tuple(buffer.shape)
            raise Rebound(
                f"forward makes the buffer {called}, of shape {shape}, which a program would not do again; make it in "
                "__init__, or call the model once with its largest inputs before it is compiled",
                {*changed},
            )
        if was.dtype != buffer.dtype:
            raise TraceError(
                f"forward sets the buffer {called} of {was.dtype} to one of {buffer.dtype}; write .to({was.dtype}), or "
                "make it that in __init__"
            )
        if id(was) in owned or sum(other is was for other in before.values()) > 1:
            raise TraceError(
                f"forward sets the buffer {called} to another tensor, and another name has the one that it was; "
                "make them two (clone)"
            )
        if buffer.requires_grad:
            with_gradient.add(called)
        buffer = buffer.clone() if id(buffer) in of_others else buffer
        if path:
            written.append(((path, name), was, buffer))
        else:
            setattr(modules[path], name, buffer)  # which torch.export sees; not what is put into `_buffers`
    for path, part in modules.items():  # by whose order it names them: one may have been taken away and put back
        held = part._buffers
        for name in [*(name for at, name in before if at == path and name in held)]:
            held[name] = held.pop(name)
    for (path, name), was, buffer in written:
        modules[path]._buffers[name] = was
        was.copy_(buffer.detach())  # under no_grad torch would make a graph of its own of it


def refuse_gradients_between_calls(exported: torch.export.ExportedProgram, with_gradient: Set[str]) -> None:
    """Raise TraceError where one of these buffers would hand a gradient on: what forward returns is made of it, too."""
    names = exported.graph_signature.inputs_to_buffers
    returned = {*exported.graph_signature.user_outputs}
    for node in exported.graph.nodes:
        if node.op != "placeholder" or names.get(node.name) not in with_gradient:
            continue
        made, left = {node}, [node]
        while left:
            users = {user for user in left.pop().users if "detach" not in str(user.target)} - made
            made |= users
            left += users
        if any(one.name in returned for one in made):
            name = names[node.name]
            raise Rebound(
                f"forward sets the buffer {name} to a tensor with a gradient that goes on into the next call, and "
                "buffers of a program have none: detach it (.detach()), keep it as a plain attribute, or register it "
                "with persistent=False",
                {(path, leaf) for path, _, leaf in (one.rpartition(".") for one in with_gradient)},
            )


def _is_flag(was: Any, is_: Any) -> bool:
    """Whether an attribute that was not set, or unset, now says that something is installed."""
    handles = is_ if isinstance(is_, (list, tuple)) else [is_]
    return (is_ is True and (was is MISSING or not was)) or (
        bool(handles) and all(isinstance(one, RemovableHandle) for one in handles)
    )


def _restore(module: nn.Module, name: str, was: Any) -> None:
    if was is MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = was


@contextlib.contextmanager
def unsaved_as_attributes(reads: Reads) -> Iterator[None]:
    """Inside, a buffer that forward registers, that nobody saves and that is none when the call begins, is a plain
    attribute.
    """
    registering, standing = nn.Module.register_buffer, StandIns(("register_buffer",))

    def register_buffer(self: Any, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if reads.is_open and name in self._buffers and persistent == (name in self._non_persistent_buffers_set):
            raise TraceError(
                f"forward registers the buffer {name} of a {type(self).__name__} again{line_here()}, with persistent="
                f"{persistent}, as it was not before: write to it (self.{name}.copy_), or register it so in __init__"
            )
        is_new = not persistent and not hasattr(self, name)
        if reads.is_open and (is_new or name in vars(self)):
            setattr(self, name, tensor)
        else:
            registering(self, name, tensor, persistent)

    standing.put(nn.Module, [register_buffer])
    try:
        yield
    finally:
        standing.restore()
