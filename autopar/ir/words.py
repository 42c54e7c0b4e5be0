"""Numbers of things, for readers."""

from __future__ import annotations


def count_of(number: float, thing: str, several: str = "") -> str:
    """`1 rank`, `8 ranks`, `2,048 ranks`, `0.5 days`; `several`: the plural, where it is not the word with an s."""
    told = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{told} {thing if number == 1 else several or thing + 's'}"
