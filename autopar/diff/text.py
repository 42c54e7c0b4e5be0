"""The difference of two plans as text: first one sentence, then a table for each thing that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.diff.account import OPERATORS, OPERATORS_AGAIN, OPTIMIZER, PRODUCTS, PRODUCTS_AGAIN, REORDER
from autopar.diff.compare import ALIKE, RESULTS, Changed, Difference, Pair, Seconds
from autopar.diff.compare import PRODUCTS as PRODUCTS_LAID_OUT
from autopar.plan.listing import columns
from autopar.plan.reading import wrapped
from autopar.plan.tell import human

MOST = 8  # rows of a table
COMPUTED = (PRODUCTS, OPERATORS, PRODUCTS_AGAIN, OPERATORS_AGAIN, REORDER, OPTIMIZER)
AB: Pair = ("A", "B")


def report(found: Difference, names: Pair = AB) -> str:
    """A screen of text that ends with a newline."""
    return "\n".join(_lines(found, names)) + "\n"


def _lines(found: Difference, names: Pair) -> Iterator[str]:
    yield from wrapped(sentence(found, names))
    for what, (first, second) in found.made_for.items():
        yield from wrapped(f"{what}: {first} -> {second}")
    yield from _times(found, names)
    yield from _memory(found, names)
    if found.sent:
        yield f"collectives that differ: how often, and what one rank receives ({names[0]} -> {names[1]}):"
        yield from columns([
            (f"{row.collective} over {row.axis}", f"{row.counts[0]}x -> {row.counts[1]}x",
             f"{human(row.nbytes[0])} -> {human(row.nbytes[1])}")
            for row in found.sent
        ])  # fmt: skip
    yield from _changes("kept otherwise for backward, or elsewhere", found.kept, names)
    yield from _changes("laid out otherwise", found.layouts, names)


def sentence(found: Difference, names: Pair = AB) -> str:
    """Which of the plans is quicker, by how much, and the class that has most to do with it."""
    (one, other), (first, second) = found.steps, names
    if found.is_empty:
        return f"{second} does what {first} does: {_ms(one)} ms, {_measure(found)}"
    if found.is_simulated[0] == found.is_simulated[1]:
        times = f"{_ms(one)} -> {_ms(other)} ms, {_measure(found)}"
    else:
        measures = ["simulated" if simulated else "summed" for simulated in found.is_simulated]
        times = f"{_ms(one)} ms {measures[0]} -> {_ms(other)} ms {measures[1]}"
    if abs(other - one) <= ALIKE * max(found.steps):
        return f"{second} takes as long as {first} ({times}), and differs in what it does"
    share = f"{100 * abs(other - one) / one:.1f} % {'quicker' if other < one else 'slower'}" if one else "slower"
    return f"{second} is {share} ({times}), mostly because of {_because(found)}"


def in_a_line(found: Difference) -> str:
    """What makes the second plan another one: its largest class, and where the products or parameters differ."""
    parts = [_because(found)] if abs(found.steps[1] - found.steps[0]) > ALIKE * max(found.steps) else []
    products = [row for row in found.layouts if row.what == PRODUCTS_LAID_OUT]
    rows = [*found.kept[:1], *(products or found.layouts)[:1]]
    parts += [f"{row.where} {row.told[0]} -> {row.told[1]}" for row in rows]
    return "; ".join(parts) or "the same step in another way"


def _because(found: Difference) -> str:
    """The class that went furthest the way the step went, and where."""
    sign = 1 if found.steps[1] > found.steps[0] else -1
    row = max(found.seconds, key=lambda row: sign * row.more)
    modules = [module for module, more in row.modules if module and sign * more > 0.5 * abs(row.more)]
    where = f", {modules[0]}" if modules else ""
    return f"{_label(row, found)} ({_ms(row.seconds[0])} -> {_ms(row.seconds[1])} ms{where})"


def _measure(found: Difference) -> str:
    return "simulated" if found.is_simulated[1] else "summed"


def _label(row: Seconds, found: Difference) -> str:
    """`exposed`: where transfers overlap, this is only the part of them that compute waits for."""
    return row.what if row.what in COMPUTED or not any(found.is_simulated) else f"exposed {row.what}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds >= 1e-3 or not seconds else f"{seconds * 1e3:.3g}"


def _times(found: Difference, names: Pair) -> Iterator[str]:
    """The classes that differ, then those that do not in one line; together they are the step."""
    least = ALIKE * max(found.steps)
    differ = [row for row in found.seconds if abs(row.more) > least]
    if not differ:
        return
    yield f"where the step's time goes, in ms ({names[0]} -> {names[1]}); these add up to the difference:"
    rows = [
        (_label(row, found), _ms(row.seconds[0]), _ms(row.seconds[1]), f"{row.more * 1e3:+.3g}", _hidden(row),
         _where(row))
        for row in differ
    ]  # fmt: skip
    total = found.steps[1] - found.steps[0]
    rows.append(("the step", _ms(found.steps[0]), _ms(found.steps[1]), f"{total * 1e3:+.3g}", "", ""))
    yield from columns(rows)
    same = [
        f"{_label(row, found)} {_ms(row.seconds[1])}" for row in found.seconds if row not in differ and any(row.seconds)
    ]
    if same:
        yield from wrapped(f"  the same in both: {', '.join(same)}", "    ")


def _hidden(row: Seconds) -> str:
    """What is overlapped, where anything is."""
    hidden = [max(0.0, busy - exposed) for busy, exposed in zip(row.busy, row.seconds, strict=True)]
    hidden = [one if one > ALIKE * busy else 0.0 for one, busy in zip(hidden, row.busy, strict=True)]
    if not any(hidden):
        return ""
    return f"hidden {_ms(hidden[0])} -> {_ms(hidden[1])}"


def _where(row: Seconds) -> str:
    told = [f"{module or '(model)'} {more * 1e3:+.2g}" for module, more in row.modules[:2]]
    return ", ".join(told) + (", ..." if len(row.modules) > 2 else "")


def _memory(found: Difference, names: Pair) -> Iterator[str]:
    if found.peaks[0] == found.peaks[1]:
        return
    yield f"memory peak of a rank ({names[0]} -> {names[1]}): {human(found.peaks[0])} -> {human(found.peaks[1])}"
    differ = [row for row in found.held if row.nbytes[0] != row.nbytes[1]]
    yield from columns([(row.what, f"{human(row.nbytes[0])} -> {human(row.nbytes[1])}") for row in differ])


def _changes(title: str, rows: tuple[Changed, ...], names: Pair) -> Iterator[str]:
    """A table of each sort of things."""
    for what in dict.fromkeys(row.what for row in rows):
        of = [row for row in rows if row.what == what]
        if what == RESULTS:  # a line: they follow from what stands above
            places: Counter[str] = Counter()
            for row in of:
                places[row.where] += row.count
            most = ", ".join(f"{where} ({count:,})" for where, count in places.most_common(3))
            yield from wrapped(f"{what}, {title}: {places.total():,}, most in {most}")
            continue
        shown = of[:MOST]
        yield f"{what}, {title} ({names[0]} -> {names[1]}):"
        yield from columns([(row.where, f"{row.count}x", f"{row.told[0]} -> {row.told[1]}") for row in shown])
        if rest := of[MOST:]:
            yield f"  and {sum(row.count for row in rest)} more in {len(rest)} rows of --json"
