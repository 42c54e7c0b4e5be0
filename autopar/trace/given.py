"""What forward does to the containers that it is called with: a program is given their tensors, and writes to none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.records import attributes, is_record


@dataclass(frozen=True)
class Given:
    """A container among the arguments, and what was in it when forward began: `parts`, by how they are spelled."""

    path: str
    container: Any
    parts: Mapping[str, Any]


def given_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Given]:
    """All containers among the arguments."""
    found = [one for place, value in enumerate(args) for one in _within(f"[{place}]", value)]
    return found + [one for name, value in kwargs.items() for one in _within(f"['{name}']", value)]


def refuse_what_is_written(given: list[Given], outputs: Any) -> None:
    """Raise where forward has given a container another part, or a list one more, and does not return it: the caller's
    stays as it is. What forward takes out, puts in under a new name or keeps for itself (`_name`) is nothing that
    anybody reads by mistake.
    """
    returned = {id(one.container) for one in _within("", outputs)}
    for one in given:
        now = _parts(one.container)
        if id(one.container) in returned or now is None:
            continue
        longer = [*now][len(one.parts) :] if isinstance(one.container, list) else []
        for name in [*(name for name in one.parts if _is_another(one.parts[name], now.get(name))), *longer]:
            if not name.startswith("._"):
                raise TraceError(
                    f"forward writes to its argument {one.path}{name}, and the caller's would stay as it is: return "
                    "what is written to, or have forward copy it first"
                )


def _is_another(was: Any, now: Any) -> bool:
    if now is was or now is None:
        return False
    if isinstance(was, Tensor) or isinstance(now, Tensor) or _parts(now) is not None:
        return True
    return bool(was != now)


def _within(path: str, value: Any) -> Iterator[Given]:
    parts = _parts(value)
    if parts is not None:
        yield Given(path, value, parts)
        for name, part in parts.items():
            yield from _within(f"{path}{name}", part)


def _parts(value: Any) -> dict[str, Any] | None:
    """None: no container that is known."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{place}]": part for place, part in enumerate(value)}
    if is_record(value):
        return {f".{name}": part for name, part in attributes(value).items()}
    return None
