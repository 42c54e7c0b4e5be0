"""What users put on tensors as attributes (`weight.scale = 2.0`), and forward asks for: of parameters and buffers it is
looked at ahead of each call, of arguments it is a part of what tells calls apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.asked import Asked
from autopar.trace.lines import caller, line_here
from autopar.trace.modules import noted_on
from autopar.trace.numbers import Number
from autopar.trace.values import SCALARS, is_torchs


@contextlib.contextmanager
def as_noted(
    registered: Mapping[str, Tensor],
    noted: Mapping[str, Mapping[str, Any]],
    arguments: Iterable[tuple[str, Any]],
    asked: Asked,
) -> Iterator[None]:
    """Inside, parameters and buffers of the trace have what is `noted` on those for which they stand, arguments have
    the numbers and text, and `asked` is told for what parameters and buffers are asked that they do not have. Raises
    TraceError where one has another attribute behind that. `arguments`: (path, what it is).
    """
    for name, tensor in registered.items():
        vars(tensor).update(noted[name])
    had = {name: dict(vars(tensor)) for name, tensor in registered.items()}
    names, others = {id(one): name for name, one in registered.items()}, dict[int, tuple[str, set[str]]]()
    given_now = dict[str, tuple[Tensor, dict[str, Any]]]()
    for path, one in arguments:
        if isinstance(one, Tensor) and (given := asked.arguments.values.get(path)) is not None:
            notes = noted_on(given)
            plain = {name: value for name, value in notes.items() if isinstance(value, SCALARS)}
            vars(one).update(plain)
            given_now[path] = one, noted_on(one)
            others[id(one)] = path, notes.keys() - plain.keys()

    def missing(tensor: Tensor, name: str) -> Any:
        path, beside = others.get(id(tensor), ("", set()))
        if name in beside:
            raise TraceError(
                f"forward asks for .{name} of its argument {path}{line_here()}, which is no number and no text, and a "
                "call is not compared by that: pass it as an argument of its own"
            )
        if id(tensor) in names and not is_torchs(caller(1)):
            asked.lacking.add((names[id(tensor)], name))
        raise AttributeError(f"'{type(tensor).__name__}' object has no attribute '{name}'")

    Tensor.__getattr__ = missing  # type: ignore[attr-defined]  # is called for what is not there alone
    try:
        yield
    finally:
        del Tensor.__getattr__  # type: ignore[attr-defined]
    _refuse_attributes(registered, had)
    for path, (one, noted) in given_now.items():
        now = noted_on(one)
        if name := next((name for name in {**now, **noted} if now.get(name) is not noted.get(name)), None):
            raise TraceError(
                f"forward changes .{name} of its argument {path}, which a compiled step does not write to: return it"
            )


def _refuse_attributes(tensors: Mapping[str, Tensor], had: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise TraceError where a parameter or buffer has another attribute than it had, or a traced tensor as one."""
    for name, tensor in tensors.items():
        for attribute, value in [*vars(tensor).items()]:
            is_tensor = isinstance(value, (Tensor, Number))
            is_new = attribute not in had[name] or (not is_tensor and had[name][attribute] != value)
            if is_new and (is_tensor or attribute in noted_on(tensor)):
                what = "keeps a tensor as" if is_tensor else "sets"
                raise TraceError(
                    f"forward, or a hook, {what} {name}.{attribute}, on a parameter or a buffer, where a "
                    "compiled step does not write to: keep it as an attribute of the module"
                )
