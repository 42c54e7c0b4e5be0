"""A study as text."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from autopar.ir.graph import Node
from autopar.ir.layout import Placement, show
from autopar.ir.words import count_of
from autopar.plan import Plan
from autopar.plan.tell import human
from autopar.plan.value import is_product
from autopar.price.reshard import Reshard
from autopar.scale.forms import Term, terms_of
from autopar.scale.growth import Growth
from autopar.scale.sizes import told
from autopar.scale.study import DEVICE, Reach, Row, Study, Turn, communication
from cost_models.formulas import Form, at, factored
from cost_models.steps import COLLECTIVES

SAME = 5e-3  # relative: plans that are as fast as each other; a search may leave a fifth of it open
WIDTH, INDENT = 110, "    "
SMALL = Fraction(1, 100)  # of a sum: terms below are counted, not shown
MOST_TERMS, MOST_CHANGES, MOST_NOTES = 5, 2, 3


def report(found: Study) -> str:
    """The whole answer."""
    parts = [_head(found), _table(found), _forms(found), _limits(found), _changes(found)]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := [*part])) + "\n"


def _head(found: Study) -> Iterator[str]:
    plan, growth = found.plan, found.growth
    sizes = ", ".join(f"{name} {size}" for name, size in growth.base.items()) or "nothing that grows"
    ranks = count_of(plan.mesh.ranks, "rank")
    yield f"mesh {plan.mesh} ({ranks}) on {plan.hardware}, optimizer {plan.optimizer}; {sizes}"
    for name, dims in growth.sources.items():
        by_dim: dict[int, list[str]] = defaultdict(list)
        for target, dim in dims:
            by_dim[dim].append(spelled(target))
        where = " and ".join(f"dim {dim} of {', '.join(targets)}" for dim, targets in by_dim.items())
        yield f"{name} is {where}"
    yield "parameters keep their sizes, also those that hold something for each position"
    for name, why in found.why_not.items():
        yield f"note: how it grows with {name} is not known: {why}"
    yield from _assumed(growth)
    as_it_is = found.rows[0].kept
    if as_it_is is not None and abs(as_it_is.step_seconds - plan.step_seconds) > 1e-6 * plan.step_seconds:
        yield (
            f"note: the plan says {plan.step_seconds * 1e3:.3f} ms a step, priced in another way (measured operators, "
            "or a step that overlaps); here every row is the sum of its parts, by the hardware profile"
        )


def _assumed(growth: Growth) -> Iterator[str]:
    for ref, dim, size in growth.assumed[:MOST_NOTES]:
        node, type = growth.graph.by_name[ref.name], growth.graph.type_of(ref)
        where = f" ({node.source})" if node.source else ""
        yield f"note: dim {dim} of %{ref.name} {type}{where} is taken to be {told(size)}; no other value tells"
    if (more := len(growth.assumed) - MOST_NOTES) > 0:
        yield f"note: and {more} more dims of the like"


def spelled(target: str) -> str:
    """`['x']` as `x`."""
    return target[2:-2] if target.startswith("['") and target.count("[") == 1 else target


# --- the table -------------------------------------------------------------------------------------------------------


def _table(found: Study) -> Iterator[str]:
    yield "this plan elsewhere, its choices kept: one training step, predicted (the sum of its parts)"
    head = ("", "ms per step", "compute", "optimizer", "communication", "peak per rank", "fits", "best plan there")
    searched = any(row.best is not None or row.best_why for row in found.rows)
    body = [_line(row, found.limit) for row in found.rows]
    width = len(head) if searched else len(head) - 1
    yield from _columns([head[:width], *(line[:width] for line in body)], right=range(1, 6))
    for row in found.rows:
        if row.kept is None:
            yield f"  {row.label}: {row.why}{', which does not divide' if row.word == Row.word else ''}"


def _line(row: Row, limit: float) -> tuple[str, ...]:
    label = row.label or "as it is"
    best = row.best_why or ("" if row.best is None else f"{row.best.step_seconds * 1e3:.3f} ms")
    if row.best is not None and row.kept is not None and row.kept.peak_bytes[DEVICE] <= limit:
        slower = row.kept.step_seconds / row.best.step_seconds - 1
        best += ", this one is as fast" if slower <= SAME else f", this one is {100 * slower:.1f} % slower"
    if row.kept is None:
        return label, *"-" * 5, row.word, best
    plan = row.kept
    parts = plan.seconds_by
    compute = parts["compute"] + parts["reorder"]
    times = (plan.step_seconds, compute, parts["optimizer"], communication(plan))
    fits = "yes" if plan.peak_bytes[DEVICE] <= limit else "no"
    return label, *(f"{seconds * 1e3:.3f}" for seconds in times), human(plan.peak_bytes[DEVICE]), fits, best


def _columns(rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


# --- closed forms ----------------------------------------------------------------------------------------------------


def _forms(found: Study) -> Iterator[str]:
    closed, here = found.totals, found.totals.here
    yield "closed forms, for one rank; the name of an axis stands for its ranks, and a part is that of today's sum"
    yield from _sum(f"arithmetic, {_flops(at(closed.work.flops, here))}", terms_of(closed.work.flops, here), _flops)
    for kind, form in closed.highest(here).items():
        yield from _sum(
            f"{kind} at the instant that is the peak today, {_bytes(at(form, here))}", terms_of(form, here), _bytes
        )
    received = {key: at(form, here) for key, form in closed.work.received.items()}
    shown = {key for key, nbytes in received.items() if nbytes >= SMALL * sum(received.values())}
    for (collective, axis), payload in closed.work.payload.items():
        if (collective, axis) not in shown:
            continue
        times: Form = COLLECTIVES[collective].received(closed.work.mesh.size(axis), 1)  # pyright: ignore[reportAssignmentType]
        name = f"{collective} over {axis}, {_bytes(received[collective, axis])} received: {factored(times)} of"
        yield from _sum(name, terms_of(payload, here), _bytes)
    if rest := [f"{collective} over {axis}" for collective, axis in received if (collective, axis) not in shown]:
        yield f"  and less than 1 % each: {', '.join(rest)}"


def _sum(name: str, terms: Sequence[Term], unit: Callable[[Fraction], str]) -> Iterator[str]:
    yield f"  {name}"
    whole = sum(abs(term.value) for term in terms)
    if not whole:
        yield "    0"
        return
    shown = [term for term in terms if abs(term.value) >= SMALL * whole][:MOST_TERMS]
    rows = [(f"{unit(term.times)}{term.spelled()}", f"{float(100 * term.value / whole):.0f} %") for term in shown]
    if rest := len(terms) - len(shown):
        left = whole - sum(abs(term.value) for term in shown)
        rows.append((f"and {rest} smaller", f"{float(100 * left / whole):.1g} %"))
    yield from (f"    {line.strip()}" for line in _columns(rows))


def _flops(count: Fraction) -> str:
    value = float(count)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if abs(value) < 1000 or unit == "TFLOP":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def _bytes(count: Fraction) -> str:
    return f"{'-' if count < 0 else ''}{human(float(abs(count)))}"


# --- limits and changes ----------------------------------------------------------------------------------------------


def _limits(found: Study) -> Iterator[str]:
    if not found.reaches:
        return
    yield f"memory: {human(found.limit)} per rank ({found.limit_from}); everything else stays as it is"
    for reach in found.reaches:
        yield f"  {_reach(reach, found)}"
    yield "communication and the rest of the step"
    for turn in found.turns:
        yield f"  {_turn(turn, found)}"


def _reach(reach: Reach, found: Study) -> str:
    here, closed = found.growth.base[reach.name], found.totals

    def peak(size: int) -> str:
        return human(float(closed.peak({**closed.here, reach.name: size})))

    step = f", in steps of {reach.unit}" if reach.unit > 1 else ""
    if reach.too_large is None and reach.most is not None and reach.fits is not None:
        end = f"the model's last: {reach.most.table} has no more positions"
        return f"{reach.name} up to {reach.fits} fits ({peak(reach.fits)}), {end}{step}; here {here}"
    if reach.too_large is None:
        return f"{reach.name}: any size fits"
    if reach.fits is None:
        return f"{reach.name}: not even {reach.too_large} fits ({peak(reach.too_large)})"
    end = f"{reach.name} up to {reach.fits} fits ({peak(reach.fits)}), {reach.too_large} does not"
    return f"{end} ({peak(reach.too_large)}){step}; here {here}"


def _turn(turn: Turn, found: Study) -> str:
    (low, first), (high, last) = turn.points[0], turn.points[-1]
    if turn.flip is not None:
        before, after = turn.flip
        which = ("longer", "less long") if first > 0.5 else ("less long", "longer")
        return f"{turn.name}: up to {before} communication takes {which[0]} than the rest, from {after} on {which[1]}"
    which = "longer" if first > 0.5 else "less long"
    return (
        f"{turn.name}: communication takes {which} than the rest from {low} ({100 * first:.0f} % of the step) "
        f"to {high} ({100 * last:.0f} %)"
    )


def _changes(found: Study) -> Iterator[str]:
    searched = [row for row in found.rows if row.best is not None or row.best_why]
    if not searched:
        yield "where the plan would change was not searched"
        return
    yield "where the plan would change: what a new search finds"
    for row in searched:
        yield f"  {row.label}: {_change(row, found)}"
        if row.best is not None and not _stays(row, found.limit):
            yield from textwrap.wrap(
                "; ".join(differences(row.kept or found.plan, row.best)),
                WIDTH,
                initial_indent=INDENT,
                subsequent_indent=INDENT,
            )


def _stays(row: Row, limit: float) -> bool:
    return (
        row.kept is not None
        and row.best is not None
        and row.kept.peak_bytes[DEVICE] <= limit
        and row.kept.step_seconds <= row.best.step_seconds * (1 + SAME)
    )


def _change(row: Row, found: Study) -> str:
    if row.best is None:
        return row.best_why
    there = f"{row.best.step_seconds * 1e3:.3f} ms, {human(row.best.peak_bytes[DEVICE])}"
    if row.kept is None:
        return f"another plan ({there}); this one does not divide"
    if row.kept.peak_bytes[DEVICE] > found.limit:
        return f"another plan ({there}); this one does not fit"
    if _stays(row, found.limit):
        return "this plan stays"
    return f"another plan ({there}) in place of {row.kept.step_seconds * 1e3:.3f} ms"


def _way(changes: Sequence[Reshard]) -> list[tuple[str, Placement, Placement]]:
    return [(change.axis, change.before, change.after) for change in changes]


def differences(ours: Plan, theirs: Plan) -> list[str]:
    """What another plan of the same graph does otherwise, the largest first."""
    moves: dict[tuple[str, str, str], int] = defaultdict(int)
    nbytes: dict[tuple[str, str, str], int] = defaultdict(int)
    products: list[Node] = []
    otherwise = ways = 0
    for node in theirs.graph.nodes:
        mine, yours = ours.choices[node.name], theirs.choices[node.name]
        type = node.outputs[0]
        if node.op == "parameter" and type is not None and mine.gives != yours.gives:
            rank = len(type.shape)
            key = (
                ".".join("*" if part.isdigit() else part for part in node.target.split(".")),
                show(mine.gives[0], ours.mesh, rank),
                show(yours.gives[0], theirs.mesh, rank),
            )
            moves[key] += 1
            nbytes[key] += type.nbytes
        if is_product(yours):
            products.append(node)
            otherwise += (mine.takes, mine.gives) != (yours.takes, yours.gives)
        ways += sum(_way(one) != _way(other) for one, other in zip(mine.reads, yours.reads, strict=True))
    order = sorted(moves, key=lambda key: (-nbytes[key], key))
    lines = [f"{otherwise} of {len(products)} products are split otherwise"]
    if ways:
        lines.append(f"{ways} values are brought into their layouts otherwise")
    lines += [f"{name} {old} -> {new} {moves[name, old, new]}x" for name, old, new in order[:MOST_CHANGES]]
    if rest := order[MOST_CHANGES:]:
        lines.append(f"{sum(moves[key] for key in rest)} more of the parameters")
    return lines
