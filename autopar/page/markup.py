"""HTML and SVG from plain values. Whatever is not markup already is escaped, so no name can become part of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

VOID = frozenset({"br", "hr", "input", "meta"})  # of HTML: they have no end
SHAPES = frozenset({"circle", "line", "path", "rect", "use"})  # of SVG: they end at once, unless they have a title


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def tag(name: str, /, *content: str, **attributes: str | float | bool) -> Markup:
    """`<name attributes>content</name>`.

    Of an attribute's name, an underscore at the end is left out, and others are hyphens (`class_`, `text_anchor`). One
    that is True stands alone, one that is False or "" is left out; numbers are written in six digits.
    """
    head = name + "".join(_attribute(key, value) for key, value in attributes.items() if value is not False)
    inner = "".join(as_markup(part) for part in content)
    if name in VOID or (name in SHAPES and not inner):
        return Markup(f"<{head}>" if name in VOID else f"<{head}/>")
    return Markup(f"<{head}>{inner}</{name}>")


def as_markup(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(escape(text))


def joined(*parts: str, between: str = "") -> Markup:
    return Markup(as_markup(between).join(as_markup(part) for part in parts))


def _attribute(key: str, value: str | float) -> str:
    if value == "":
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{escape(value) if isinstance(value, str) else f"{value:.6g}"}"'


def row(cells: Sequence[str], numbers: Sequence[int] = ()) -> Markup:
    """Of a table; its first cell is its header. `numbers`: places of cells that are set to the right."""
    return tag(
        "tr",
        *(
            tag("td" if place else "th", cell, scope="" if place else "row", class_="n" if place in numbers else "")
            for place, cell in enumerate(cells)
        ),
    )


def table(head: Sequence[str], rows: Iterable[Markup], *, numbers: Sequence[int] = (), caption: str) -> Markup:
    """A table with a header and rows that are made. It scrolls by itself where it is too wide."""
    first = (tag("th", text, scope="col", class_="n" if place in numbers else "") for place, text in enumerate(head))
    made = tag("table", tag("caption", caption), tag("thead", tag("tr", *first)), tag("tbody", *rows))
    return tag("div", made, class_="wide", tabindex="0", role="region", aria_label=caption)
