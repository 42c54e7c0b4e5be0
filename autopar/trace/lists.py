"""Lists that forward appends to: whether its code looks at what earlier calls have put there, or at how much that is.

    self.losses.append(loss.item())
    if len(self.losses) == 3: ..

A trace sees tensors that are read of a list, and nothing of numbers and lengths. So while a model is traced once more
(`autopar.trace.independent`), lists that note who asks them stand in the place of those that it appends to.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from autopar.trace.beside import Spot
from autopar.trace.values import is_torchs
from autopar.trace.writes import OfModule, Write, content

# Methods whose answer hangs on what is there; of `clear` and `append` nothing is known.
ASKS = (
    "__len__", "__iter__", "__reversed__", "__contains__", "__getitem__", "__setitem__", "__delitem__", "__add__",
    "__mul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__copy__",
    "copy", "count", "index", "insert", "pop", "popleft", "remove", "reverse", "rotate", "sort",
)  # fmt: skip


class Asking:
    """Which lists were asked what: lists of a class of its own note it. `asked`: number of a write -> methods."""

    def __init__(self) -> None:
        self.asked: dict[int, set[str]] = {}
        self._kinds: dict[Any, Any] = {kind: self._noting(kind) for kind in (list, deque)}

    def stand(self, writes: Sequence[Write], modules: Mapping[str, nn.Module]) -> Callable[[], None]:
        """Let such lists stand where these writes append; gives what brings back those that were there."""
        undo: list[Callable[[], None]] = []
        for number, write in enumerate(writes):
            held: Any = write.container(modules) if write.way in ("end", "all") else None
            if type(held) in self._kinds:
                made = self._kinds[type(held)](held, *((held.maxlen,) if isinstance(held, deque) else ()))
                made.__dict__.update(found=len(content(held)), number=number)
                undo.append(write.exchange(made, modules))

        def back() -> None:
            for take_back in reversed(undo):
                take_back()

        return back

    def of_attributes(self, writes: Sequence[Write]) -> Iterator[tuple[Spot, bool]]:
        """The lists among them that attributes hold, and whether no more was asked than how long they are."""
        for number, methods in self.asked.items():
            place = writes[number].place
            if isinstance(place, OfModule):
                yield (place.path, writes[number].name, *writes[number].within), methods == {"__len__"}

    def _noting(self, kind: type) -> Any:
        """A kind of list whose `found` elements, the first ones, were there before forward ran."""
        made = type(kind.__name__, (kind,), {})
        for name in ASKS:
            if hasattr(kind, name):
                setattr(made, name, self._method(kind, name))

        def clear(held: Any) -> None:
            kind.clear(held)
            held.__dict__["found"] = 0

        made.clear = clear
        return made

    def _method(self, kind: Any, name: str) -> Callable[..., Any]:
        of_kind = getattr(kind, name)

        def method(held: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_torchs(sys._getframe(1).f_code.co_filename) and not _is_new(kind, name, held, args):
                self.asked.setdefault(held.__dict__["number"], set()).add(name)
            return of_kind(held, *args, **kwargs)

        return method


def _is_new(kind: Any, name: str, held: Any, args: Sequence[Any]) -> bool:
    """Whether what is asked for was put there by the same forward: the last elements, or of a list that it emptied."""
    found = held.__dict__.get("found", 0)
    if not found:
        return True
    place = args[0] if args else -1 if name == "pop" else None
    if name not in ("__getitem__", "__setitem__", "__delitem__", "pop"):
        return False
    if isinstance(place, slice):
        place = place.start if place.step is None and (place.stop is None or place.stop < 0) else None
    return isinstance(place, int) and place < 0 and kind.__len__(held) + place >= found
