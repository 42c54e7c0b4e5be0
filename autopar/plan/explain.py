"""A plan in one screen of text: what it does, why, and how that is called in textbooks."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.graph import Node
from autopar.layout import Partial, Placement, Replicate, Shard, local_type, show
from autopar.plan.plan import Choice, Plan
from autopar.plan.tell import home, human, is_product, shown_nodes
from autopar.work import VIEWS
from cost_models.steps import Compute

WIDTH = 110
MAX_PARAMETERS, MAX_PRODUCTS, MAX_NOTES = 11, 7, 4  # lines; all in all a screen of 40
TIGHT = 0.95  # of the memory limit: from here on memory shaped the plan
MOST = 0.9  # of bytes or flops: from here on a word stands without a percentage
SOME = 0.005  # below this, not worth a word


def explain(plan: Plan) -> str:
    """At most 40 lines of at most 110 columns."""
    lines = [
        *_head(plan),
        *_time(plan),
        *_memory(plan),
        *_words(plan),
        *_parameters(plan),
        *_products(plan),
        *_notes(plan),
    ]
    return "\n".join(_cut(line) for line in lines) + "\n"


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


# --- figures ---------------------------------------------------------------------------------------------------------


def _head(plan: Plan) -> Iterator[str]:
    yield f"mesh {plan.mesh} ({plan.mesh.ranks} ranks) on {plan.hardware}, optimizer {plan.optimizer}"


def _time(plan: Plan) -> Iterator[str]:
    yield f"step time {_ms(plan.step_seconds)}, predicted (simulated), steps one after the other: nothing overlaps"
    for name in ("compute", "optimizer", "copies"):
        yield _time_line(plan, name, plan.seconds_by.get(name, 0.0), "")
    for axis in plan.mesh.names:
        sent = [f"{collective} {human(n)}" for (collective, on), n in plan.comm_bytes.items() if on == axis]
        seconds = plan.seconds_by.get(f"comm:{axis}", 0.0)
        yield _time_line(plan, f"communication, {axis}", seconds, f"a rank receives {', '.join(sent) or 'nothing'}")
    known = {"compute", "optimizer", "copies", *(f"comm:{axis}" for axis in plan.mesh.names)}
    for name in sorted(plan.seconds_by.keys() - known):
        yield _time_line(plan, name, plan.seconds_by[name], "")
    if plan.bound > 0:
        yield f"proven: no plan of the searched space takes less than {_ms(plan.bound)}; gap {100 * plan.gap:.2f} %"
    else:
        yield "no lower bound is known for this plan"


def _time_line(plan: Plan, name: str, seconds: float, tail: str) -> str:
    line = f"  {name:<22}{_ms(seconds):>14}{_percent(seconds, plan.step_seconds):>7}"
    return f"{line}   {tail}".rstrip()


def _memory(plan: Plan) -> Iterator[str]:
    for tier, nbytes in sorted(plan.peak_bytes.items()):
        limit = plan.memory_limit
        if limit is None:
            yield f"memory peak {human(nbytes)} of {tier} per rank, predicted; no limit was given"
            continue
        tight = nbytes >= TIGHT * limit
        why = "memory is tight and shaped this plan" if tight else "memory is not what limits this plan"
        yield f"memory peak {human(nbytes)} of {tier} per rank, {_percent(nbytes, limit)} of the limit {human(limit)}; {why}"


# --- what each axis does -------------------------------------------------------------------------------------------------


@dataclass
class _Use:
    """What one axis does. Arithmetic in flops of the forward products, parameters and activations in bytes."""

    products: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    between: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    stored_split: float = 0.0
    gathered: float = 0.0  # of these, brought together before the product that reads them


def _split_of(choice: Choice, axis: int) -> str:
    """What an axis splits of a product: batch, sequence, heads, columns, rows, nothing, or something else.

    Read off the layouts. Columns and rows are those of the second operand, which is the weight of a linear layer: split
    by columns, each rank makes some of the result's features; by rows, each makes a term of a sum over the ranks.
    """
    given = choice.gives[0][axis]
    match [layout[axis] for layout in choice.takes[:2]], given:
        case [Replicate(), Replicate()], Replicate():
            return "nothing"
        case [Shard(), Replicate()], Shard(dim):
            return "sequence" if dim else "batch"
        case [Shard(), Shard()], Shard(dim):
            return "heads" if dim else "batch"
        case [Replicate(), Shard()], Shard():
            return "columns"
        case [Shard(), Shard()], Partial():
            return "rows"
        case _:
            return "something else"


def _flops(plan: Plan, node: Node) -> float:
    """Of the whole mesh, so that what every rank repeats counts as often."""
    return sum(step.flops for step in plan.choices[node.name].steps if isinstance(step, Compute)) * plan.mesh.ranks


def _weights(plan: Plan) -> dict[str, str]:
    """Node -> the parameter that it is another look at."""
    found: dict[str, str] = {}
    for node in plan.graph.nodes:
        if node.op == "parameter":
            found[node.name] = node.name
        elif node.op in VIEWS and node.operands[0].name in found:
            found[node.name] = found[node.operands[0].name]
    return found


def _uses(plan: Plan) -> list[_Use]:
    uses = [_Use() for _ in plan.mesh.names]
    weight_of = _weights(plan)
    node_of = plan.graph.by_name
    taken: dict[str, list[Sequence[Placement]]] = defaultdict(list)
    for node in shown_nodes(plan):
        if node.is_source:
            continue
        choice = plan.choices[node.name]
        with_weight = False
        for ref, layout in zip(node.operands, choice.takes, strict=True):
            if ref.name in weight_of:
                with_weight = True
                taken[weight_of[ref.name]].append(layout)
        type = node.outputs[0]
        for axis, use in enumerate(uses):
            if is_product(node, choice):
                if with_weight:
                    use.products[_split_of(choice, axis)] += _flops(plan, node)
            elif type is not None and len(type.shape) == 3 and node.op not in VIEWS:
                use.between[_activation(choice.gives[0][axis])] += type.nbytes
    for node in plan.graph.nodes:
        type = node.outputs[0] if node.op == "parameter" else None
        if type is None:
            continue
        for axis, use in enumerate(uses):
            if isinstance(plan.choices[node.name].gives[0][axis], Shard):
                use.stored_split += type.nbytes
                readers = taken[node.name] or [plan.choices[r.name].takes[r.operands.index(ref)]
                                               for r in node_of.values() for ref in r.operands if ref.name == node.name]  # fmt: skip
                if all(isinstance(layout[axis], Replicate) for layout in readers):
                    use.gathered += type.nbytes
    return uses


def _activation(placement: Placement) -> str:
    match placement:
        case Shard(0):
            return "along the batch"
        case Shard(1):
            return "along the sequence"
        case Shard():
            return "by features"
        case Partial():
            return "as terms of a sum"
        case Replicate():
            return "whole"


def _words(plan: Plan) -> Iterator[str]:
    total = sum(type.nbytes for type in _parameter_types(plan))
    for axis, size, use in zip(plan.mesh.names, plan.mesh.sizes, _uses(plan), strict=True):
        if size == 1:
            yield f"{axis}: one rank, nothing to split"
            continue
        told = f"{axis}: {_named(use, total)}"
        yield from textwrap.wrap(told, WIDTH, subsequent_indent="  ")


def _parameter_types(plan: Plan) -> list:
    return [node.outputs[0] for node in plan.graph.nodes if node.op == "parameter" and node.outputs[0] is not None]


def _named(use: _Use, parameter_bytes: float) -> str:
    """The textbook's name where there is one, then what it means here."""
    flops = sum(use.products.values())
    share = {what: part / flops for what, part in use.products.items() if flops and part / flops > SOME}
    stored = use.stored_split / parameter_bytes if parameter_bytes else 0.0
    gathered = use.gathered / parameter_bytes if parameter_bytes else 0.0
    batch, columns, rows = share.get("batch", 0.0), share.get("columns", 0.0), share.get("rows", 0.0)
    names: list[str] = []
    if batch:
        amount = "" if batch >= MOST else f" in {batch:.0%} of the layers' arithmetic"
        if gathered >= MOST:
            names.append(f"fully sharded data parallel (FSDP / ZeRO-3){amount}: each rank computes a part of the batch and "
                         "keeps a part of each parameter, which is gathered for use")  # fmt: skip
        elif gathered > SOME:
            names.append(f"data parallel{amount}, {gathered:.0%} of the parameter bytes sharded as in FSDP / ZeRO-3: "
                         "each rank computes a part of the batch")  # fmt: skip
        else:
            names.append(f"data parallel{amount}: each rank computes a part of the batch and keeps these parameters whole "
                         "on this axis; gradients are summed")  # fmt: skip
    if columns and rows:
        names.append(f"column/row tensor parallel (Megatron) in {columns + rows:.0%} of the layers' arithmetic: "
                     "weights split by columns, then by rows, one sum after each pair")  # fmt: skip
    elif columns or rows:
        which, means = ("column", "each rank makes some of the features") if columns else ("row", "each rank makes a term of a sum")
        names.append(f"{which}-parallel weights in {columns + rows:.0%} of the layers' arithmetic: {means}")
    if "sequence" in share:
        names.append(f"sequence split in {share['sequence']:.0%} of the layers' arithmetic")
    if "something else" in share:
        names.append(f"split in a way without a name in {share['something else']:.0%} of the layers' arithmetic")
    if "nothing" in share:
        names.append(f"the same work repeated on every rank in {share['nothing']:.0%} of the layers' arithmetic")
    if not names:
        names.append("no matrix product with parameters")
    if columns or rows:
        names += _between(use)
    if stored > SOME and not gathered > SOME:
        names.append(f"{stored:.0%} of the parameter bytes are split over it")
    return "; ".join(names)


def _between(use: _Use) -> list[str]:
    """How activations stand outside the split products: Megatron's sequence parallelism, if along the sequence."""
    outside = {what: nbytes for what, nbytes in use.between.items() if what != "by features"}
    if not outside:
        return []
    what, nbytes = max(outside.items(), key=lambda item: (item[1], item[0]))
    if nbytes < 0.5 * sum(outside.values()):
        return []
    name = " (sequence parallel)" if what == "along the sequence" else ""
    return [f"elsewhere activations are kept {what}" if what == "whole" else f"elsewhere activations are split {what}{name}"]


# --- parameters, products, notes -----------------------------------------------------------------------------------------


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _parameters(plan: Plan) -> Iterator[str]:
    groups: dict[tuple[str, str, str], int] = defaultdict(int)
    weight: dict[tuple[str, str, str], int] = defaultdict(int)
    whole = here = 0
    for node in plan.graph.nodes:
        if node.op == "parameter" and (type := node.outputs[0]) is not None:
            layout = plan.choices[node.name].gives[0]
            key = _pattern(node.target), show(layout, plan.mesh, len(type.shape)), str(type)
            groups[key] += 1
            weight[key] += type.nbytes
            whole += type.nbytes
            here += local_type(type, layout, plan.mesh).nbytes
    if not groups:
        return
    yield f"parameters: {human(whole)}, of which a rank stores {human(here)} ({_percent(here, whole)}); [_] is a dim left whole"
    order = sorted(groups, key=lambda key: -weight[key])
    shown = {*order[:MAX_PARAMETERS]}
    rows = [(_short(name), layout, f"{groups[key]}x {type}") for key in groups if key in shown for name, layout, type in (key,)]
    yield from _columns(rows)
    if rest := order[MAX_PARAMETERS:]:
        split = sum(groups[key] for key in rest if key[1].strip("[_, ]"))
        count, nbytes = sum(groups[key] for key in rest), sum(weight[key] for key in rest)
        yield f"  and {count} smaller ones ({_percent(nbytes, whole)} of the bytes): {count - split} whole, {split} split"


def _short(name: str) -> str:
    return name if len(name) <= 52 else f"..{name[-50:]}"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _products(plan: Plan) -> Iterator[str]:
    groups: dict[tuple[str, str, str], int] = defaultdict(int)
    flops: dict[tuple[str, str, str], float] = defaultdict(float)
    for node in plan.graph.nodes:
        choice = plan.choices[node.name]
        if node.phase == "forward" and is_product(node, choice):
            split = [(axis, _split_of(choice, i)) for i, axis in enumerate(plan.mesh.names) if plan.mesh.sizes[i] > 1]
            told = ", ".join(f"{axis}: {what}" for axis, what in split if what != "nothing")
            key = _pattern(home(node)) or "(model)", told or "whole on every rank", _kind(node)
            groups[key] += 1
            flops[key] += _flops(plan, node)
    if not groups:
        return
    yield "forward products, and what each axis splits of them (columns, rows: of the weight):"
    order = sorted(groups, key=lambda key: -flops[key])
    shown = {*order[:MAX_PRODUCTS]}
    total = sum(flops.values())
    yield from _columns(
        [(_short(key[0]), key[1], f"{groups[key]}x {key[2]}", f"{_percent(flops[key], total)} of flops") for key in groups if key in shown]
    )
    if rest := order[MAX_PRODUCTS:]:
        yield f"  and {sum(groups[key] for key in rest)} smaller ones"


def _kind(node: Node) -> str:
    if node.op == "autopar.einsum":
        return "product"
    return "attention" if "attention" in node.op else node.op.removeprefix("aten.").partition(".")[0]


def _notes(plan: Plan) -> Iterator[str]:
    for note in plan.notes[:MAX_NOTES]:
        yield f"note: {note}"
    if len(plan.notes) > MAX_NOTES:
        yield f"and {len(plan.notes) - MAX_NOTES} more notes, in plan.notes"
