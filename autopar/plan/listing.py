"""The two tables of a plan's text: its parameters, and the products of its forward pass; equal layers together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Node
from autopar.ir.layout import local_type
from autopar.plan.patterns import patterns
from autopar.plan.reading import flops_in, layouts_told, parameters_of, percent, split_told, weights_of
from autopar.plan.tell import home, human
from autopar.plan.value import PlanValue, is_product


@dataclass
class _Row:
    """Parameters of one module pattern that have the same layout and type. `first`: its place among all."""

    first: int
    names: list[str] = field(default_factory=list[str])
    count: int = 0
    nbytes: int = 0


def parameters(plan: PlanValue, limit: int) -> Iterator[str]:
    """By pattern, equal layers together, and the parameters of one module that have the same type and layout."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)  # (layout, type) -> names
    place: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    here = 0
    for node, type in parameters_of(plan):
        layout = plan.choices[node.name].lies
        alike[layouts_told(plan, node), str(type)].append(node.target)
        place[node.target], nbytes[node.target] = len(place), type.nbytes
        here += local_type(type, layout, plan.mesh).nbytes
    if not place:
        return
    rows: dict[tuple[str, str, str], _Row] = {}
    for (layout, type), told in patterns(alike).items():
        for pattern, members in told.items():
            module, _, name = ("", "", pattern) if " " in pattern else pattern.rpartition(".")
            row = rows.setdefault((module, layout, type), _Row(place[members[0]]))
            row.names.append(name)
            row.count += len(members)
            row.nbytes += sum(nbytes[member] for member in members)
    whole = sum(nbytes.values())
    stored = f"{human(whole)}, of which a rank stores {human(here)} ({percent(here, whole)})"
    yield f"parameters: {stored}; the axes that split each dim, _ where none does:"
    order = sorted(sorted(rows, key=lambda key: rows[key].first), key=lambda key: -rows[key].nbytes)
    shown = sorted(order[:limit], key=lambda key: rows[key].first)
    names = [_short(".".join(filter(None, (key[0], ", ".join(rows[key].names))))) for key in shown]
    yield from columns([(name, key[1], f"{rows[key].count}x", key[2]) for name, key in zip(names, shown, strict=True)])
    if rest := order[limit:]:
        count = sum(rows[key].count for key in rest)
        split = sum(rows[key].count for key in rest if key[1].strip("[_, ]"))
        share = percent(sum(rows[key].nbytes for key in rest), whole)
        yield f"  and {count} more ({share} of the bytes): {count - split} whole, {split} split"


def _short(name: str) -> str:
    return name if len(name) <= 52 else f"..{name[-50:]}"


def columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def products(plan: PlanValue, limit: int) -> Iterator[str]:
    """Matrix products, attention and convolutions of the forward pass; those of the backward pass follow them."""
    weight_of = weights_of(plan.graph)
    alike: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)  # (splits, kind) -> modules
    counts: dict[tuple[str, str, str], int] = defaultdict(int)  # and module ->
    flops: dict[tuple[str, str, str], float] = defaultdict(float)
    for node in plan.graph.nodes:
        choice = plan.choices[node.name]
        if node.phase == "forward" and is_product(choice):
            split = {name: split_told(plan, node, i, weight_of) for i, name in enumerate(plan.mesh.names)}
            told = ", ".join(f"{name} splits {what}" for name, what in split.items() if what != "nothing")
            key = told or "repeated on every rank", _kind(node), home(node)
            alike[key[:2]][key[2]] = None
            counts[key] += 1
            flops[key] += flops_in(plan, node)
    if not counts:
        return
    yield "products of the forward pass (columns and rows are those of the weight), and their part of the arithmetic:"
    place = {key: number for number, key in enumerate(counts)}
    rows = [
        (pattern, [(*key, module) for module in modules])
        for key, told in patterns({key: [*modules] for key, modules in alike.items()}).items()
        for pattern, modules in told.items()
    ]
    rows.sort(key=lambda row: place[row[1][0]])
    parts = {keys[0]: sum(flops[key] for key in keys) for _, keys in rows}
    order = sorted(rows, key=lambda row: -parts[row[1][0]])
    shown, whole = [row for row in rows if row in order[:limit]], sum(flops.values())
    yield from columns([
        (_short(pattern or "(model)"), keys[0][0], f"{sum(counts[key] for key in keys)}x", keys[0][1],
         percent(parts[keys[0]], whole))
        for pattern, keys in shown
    ])  # fmt: skip
    if rest := order[limit:]:
        count = sum(counts[key] for _, keys in rest for key in keys)
        yield f"  and {count} more, {percent(sum(parts[keys[0]] for _, keys in rest), whole)} together"


def _kind(node: Node) -> str:
    if node.op == "autopar.einsum":
        return "product"
    return "attention" if "attention" in node.op else node.op.partition(".")[2].partition(".")[0]
