"""Lists and dicts that forward writes to: whether its code looks at what earlier calls have put there, or at how much
that is.

    self.losses.append(loss.item())
    if len(self.losses) == 3: ..

A trace sees tensors that are read there, and nothing of numbers and lengths. So while a model is traced once more
(`autopar.trace.independent`), lists and dicts that note who asks them stand in the place of those that it writes to.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from autopar._compat import pytree
from autopar.trace.formulas import Place
from autopar.trace.values import is_torchs
from autopar.trace.writes import OfModule, Write, content

# Methods whose answer hangs on what is there; of `clear` and `append` nothing is known.
ASKS = (
    "__len__", "__iter__", "__reversed__", "__contains__", "__getitem__", "__delitem__", "__add__", "__mul__", "__eq__",
    "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__copy__", "copy", "count", "index", "insert", "pop",
    "popleft", "remove", "reverse", "rotate", "sort", "get", "items", "keys", "values", "popitem", "setdefault",
)  # fmt: skip
BUILTIN = str(Path(__file__).with_name("builtin.py"))
OF_A_KEY = ("__contains__", "__getitem__", "__delitem__", "get", "pop", "setdefault")
OF_A_PLACE = ("__getitem__", "__delitem__", "pop")


@dataclass
class _Stood:
    """Of what stands in a trace: who is told, the number of the write, and what was there before forward ran."""

    asking: Asking
    number: int
    found: Any

    def __deepcopy__(self, _: Any) -> _Stood:
        return _Stood(self.asking, self.number, self.found)


class Asking:
    """Which lists and dicts were asked what. `asked`: number of a write -> methods."""

    def __init__(self) -> None:
        self.asked: dict[int, set[str]] = {}
        self._lists = set[int]()  # numbers of writes to lists

    def stand(self, writes: Sequence[Write], modules: Mapping[str, nn.Module]) -> Callable[[], None]:
        """Let such stand where these writes go; gives what brings back those that were there."""
        undo, known = list[Callable[[], None]](), set[int]()
        for number, write in enumerate(writes):
            held: Any = write.container(modules) if write.way != "value" else None
            if type(held) not in NOTING or id(held) in known:
                continue
            made = NOTING[type(held)](held, *((held.maxlen,) if isinstance(held, deque) else ()))
            keys = {one.key for one in writes if one.way == "key" and one.container(modules) is held}
            found = keys if isinstance(held, dict) else len(content(held))
            made.stood = _Stood(self, number, found)
            known |= {id(held), id(made)}
            undo.append(write.exchange(made, modules))
            if not isinstance(held, dict):
                self._lists.add(number)

        def back() -> None:
            for take_back in reversed(undo):
                take_back()

        return back

    @property
    def asks_lists(self) -> bool:
        return bool(self._lists & self.asked.keys())

    def of_attributes(self, writes: Sequence[Write]) -> Iterator[Place]:
        """The lists among them that attributes hold, and that were asked how long they are."""
        for number, methods in self.asked.items():
            place = writes[number].place
            if isinstance(place, OfModule) and "__len__" in methods:
                yield place.path, writes[number].name, *writes[number].within


def _is_users(frame: FrameType | None) -> bool:
    """Whether code of the user's asks, by a function of Python's too (`autopar.trace.builtin`)."""
    while frame is not None and frame.f_code.co_filename == BUILTIN:
        frame = frame.f_back
    return frame is not None and not is_torchs(frame.f_code.co_filename)


def _noting(kind: Any) -> Any:
    """A kind of list or dict: of a list the first `found` elements, of a dict those keys, were there before forward."""
    made = type(kind.__name__, (kind,), {})
    for name in ASKS:
        if hasattr(kind, name):
            setattr(made, name, _method(kind, name))

    def clear(held: Any) -> None:
        kind.clear(held)
        held.stood.found = set[Any]() if kind is dict else 0

    def put(held: Any, key: Any, value: Any) -> None:
        if _is_users(sys._getframe(1)):  # nobody who copies it
            held.stood.found = held.stood.found - {key}
        kind.__setitem__(held, key, value)

    made.clear = clear
    if kind is dict:
        made.__setitem__ = put
    return made


def _method(kind: Any, name: str) -> Callable[..., Any]:
    of_kind = getattr(kind, name)

    def method(held: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_users(sys._getframe(1)) and not _is_new(kind, name, held, args):
            _note(held, name)
        return of_kind(held, *args, **kwargs)

    return method


def _note(held: Any, name: str) -> None:
    held.stood.asking.asked.setdefault(held.stood.number, set()).add(name)


def _is_new(kind: Any, name: str, held: Any, args: Sequence[Any]) -> bool:
    """Whether what is asked for was put there by the same forward: the last elements, a key that it has set, what is in
    a list that it emptied; or is none that it writes to.
    """
    found = held.stood.found
    if not found:
        return True
    if kind is dict:
        return name in OF_A_KEY and args[0] not in found
    place = args[0] if args else -1 if name == "pop" else None
    if name not in OF_A_PLACE:
        return False
    if isinstance(place, slice):
        place = place.start if place.step is None and (place.stop is None or place.stop < 0) else None
    return isinstance(place, int) and place < 0 and kind.__len__(held) + place >= found


NOTING: dict[Any, Any] = {kind: _noting(kind) for kind in (list, deque, dict)}
# Whoever takes them apart, as forward may return them, finds what is in them.
for _kind, _made in NOTING.items():
    pytree.register_pytree_node(
        _made,
        (lambda held: ([*dict.values(held)], [*dict.keys(held)]))
        if _kind is dict
        else (lambda held, _kind=_kind: ([*_kind.__iter__(held)], None)),
        (lambda parts, keys: dict(zip(keys, parts, strict=True))) if _kind is dict else (lambda parts, _: [*parts]),
        serialized_type_name=f"autopar.noting.{_kind.__name__}",
    )
