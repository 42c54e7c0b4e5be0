"""A plan in one screen of text: what it does, why, and how that is called in textbooks."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from autopar import batch_norm, precision
from autopar.graph import Node, TensorType
from autopar.layout import Layout, Partial, Placement, Replicate, Shard, local_type, show
from autopar.plan.plan import Choice, Plan
from autopar.plan.tell import home, human, is_product, modes_of, shown_nodes
from autopar.plan.utilisation import utilisation
from autopar.saving.once import is_gathered_once
from autopar.work import FETCH, STORE, VIEWS
from cost_models.steps import Compute, Move

WIDTH, HEIGHT = 110, 40
DEVICE, GIB = "hbm", 2**30
MAX_NOTES = 4
TIGHT = 0.95  # of the memory limit: from here on memory shaped the plan
MOST = 0.9  # of bytes or flops: from here on a word stands without a percentage
SOME = 0.005  # below this, not worth a word


def explain(plan: Plan) -> str:
    """About 40 lines of at most 110 columns (a few more on a mesh of many axes, or with long notes)."""
    facts = [*_head(plan), *_time(plan), *_utilisation(plan), *_candidates(plan), *_memory(plan)]
    facts += [*_saving(plan), *_words(plan)]
    notes = [*_notes(plan)]
    left = HEIGHT - len(facts) - len(notes) - 4  # each table has a line above and one below
    products = [*_products(plan, max(3, left * 2 // 5))]
    parameters = [*_parameters(plan, max(3, left + 2 - len(products)))]
    return "\n".join(_cut(line) for line in [*facts, *parameters, *products, *notes]) + "\n"


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


# --- figures ---------------------------------------------------------------------------------------------------------


def _head(plan: Plan) -> Iterator[str]:
    yield f"mesh {plan.mesh} ({plan.mesh.ranks} ranks) on {plan.hardware}, optimizer {plan.optimizer}"
    if norms := batch_norm.told(plan.graph):
        yield f"batch norm: {norms}"
    if casts := precision.told(plan.graph):
        yield f"precision: {casts}"
    if plan.tf32 and (kinds := sorted(_kinds_of_float32(plan) & {*plan.tf32})):
        yield f"tf32: {' and '.join(kinds)} of float32 {'run' if len(kinds) > 1 else 'runs'} as TF32"


def _kinds_of_float32(plan: Plan) -> set[str]:
    """Which kinds of arithmetic the plan does in float32."""
    steps = (step for choice in plan.choices.values() for step in choice.steps)
    return {step.kind for step in steps if isinstance(step, Compute) and step.dtype == "float32"}


def _time(plan: Plan) -> Iterator[str]:
    parts = sum(plan.seconds_by.values())
    hidden = parts - plan.step_seconds
    how = f"{_ms(hidden)} of the parts overlap" if hidden > 1e-6 * parts else "the sum of its parts, nothing overlaps"
    if plan.simulated_seconds is not None and plan.prefetch is not None:
        how = f"collectives run beside compute; one after the other {_ms(plan.step_seconds)}"
    yield f"step time {_ms(plan.predicted_seconds)}, predicted (simulated): {how}"
    for name in ("compute", "optimizer", "copies"):
        yield _time_line(plan, name, plan.seconds_by.get(name, 0.0), "")
    for axis in plan.mesh.names:
        sent = [f"{collective} {human(n)}" for (collective, on), n in plan.comm_bytes.items() if on == axis]
        seconds = plan.seconds_by.get(f"comm:{axis}", 0.0)
        told = f"a rank receives {', '.join(sent) or 'nothing'}"
        if isinstance(waited := plan.search.get(f"exposed:{axis}"), float):
            told = f"{_ms(waited)} of it waited for; {told}"
        line = _time_line(plan, f"communication, {axis}", seconds, "")
        yield from textwrap.wrap(f"{line}   {told}", WIDTH, subsequent_indent=" " * 48, drop_whitespace=True)
    for way, told in (("h2d", "host to device"), ("d2h", "device to host")):
        if way in plan.seconds_by:
            waited = plan.search.get(f"exposed:{way}")
            tail = f"{_ms(waited)} of it waited for" if isinstance(waited, float) else ""
            yield _time_line(plan, told, plan.seconds_by[way], tail)
    known = {"compute", "optimizer", "copies", "h2d", "d2h", *(f"comm:{axis}" for axis in plan.mesh.names)}
    for name in sorted(plan.seconds_by.keys() - known):
        yield _time_line(plan, name, plan.seconds_by[name], "")
    if plan.bound > 0 and plan.prefetch is not None and plan.simulated_seconds is not None:
        yield (
            f"proven: one after the other, no plan of the searched space takes less than {_ms(plan.bound)}; gap "
            f"{100 * plan.gap:.2f} %"
        )
    elif plan.bound > 0:
        yield f"proven: no plan of the searched space takes less than {_ms(plan.bound)}; gap {100 * plan.gap:.2f} %"
    else:
        yield "no lower bound is known for this plan"


def _utilisation(plan: Plan) -> Iterator[str]:
    for line in utilisation(plan).told():
        yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ")


def _time_line(plan: Plan, name: str, seconds: float, tail: str) -> str:
    line = f"  {name:<22}{_ms(seconds):>14}{_percent(seconds, plan.step_seconds):>7}"
    return f"{line}   {tail}".rstrip()


def _candidates(plan: Plan) -> Iterator[str]:
    """Why this plan: the ones that were played."""
    if not plan.candidates:
        return
    beside = " with collectives beside compute" if any(one.prefetch is not None for one in plan.candidates) else ""
    yield f"why this plan: the quickest of those played{beside}"
    rows = [("candidate", "simulated", "one after the other", "peak", "")]
    for one in plan.candidates:
        peak = "" if one.peak_bytes is None else human(one.peak_bytes)
        ahead = f"weights {one.prefetch} products ahead" if one.prefetch else ""
        mark = " (this plan)" if one.name == plan.search.get("candidate") else ""
        times = ["" if s is None else _ms(s) for s in (one.simulated_seconds, one.step_seconds)]
        rows.append((one.name + mark, times[0], times[1], peak, one.why or ahead))
    yield from _columns(rows)


def _memory(plan: Plan) -> Iterator[str]:
    for tier, nbytes in sorted(plan.peak_bytes.items()):
        told, limit = f"memory peak {human(nbytes)} of {tier} per rank (predicted)", plan.memory_limit
        if tier == DEVICE and limit is None:
            told += "; no limit was given"
        elif tier == DEVICE and limit is not None:
            told += f", {_percent(nbytes, limit)} of the limit {human(limit)}: {_role_of(limit, plan, nbytes)}"
        yield from textwrap.wrap(told, WIDTH, subsequent_indent="  ")
    for tier in sorted(plan.peak_bytes):
        yield from _price(plan, tier)


def _role_of(limit: float, plan: Plan, nbytes: int) -> str:
    """What the limit of the device's memory did to the plan."""
    fastest = plan.search.get("fastest_bytes")
    if isinstance(fastest, int) and fastest > limit:
        return f"it shapes the plan; the fastest takes {human(fastest)}"
    if nbytes >= TIGHT * limit:
        return "it shapes the plan"
    if plan.residence or modes_of(plan):
        return "with what is spared"
    return "memory is not what limits it"


def _price(plan: Plan, tier: str) -> Iterator[str]:
    """What a little more memory would save at most, by the solver's price of it, where that is known."""
    price = plan.search.get(f"ms_per_gib:{tier}")
    if not isinstance(price, float) or price <= 0 or (tier == DEVICE and plan.memory_limit is None):
        return
    most, amount = plan.peak_bytes[tier] / 4, GIB  # a step from here, not to another place
    saved = inf
    if tier == DEVICE and isinstance(fastest := plan.search.get("fastest_bytes"), int):
        most, fastest_s = min(most, fastest - (plan.memory_limit or 0.0)), plan.search.get("fastest_s")
        saved = (plan.step_seconds - (fastest_s if isinstance(fastest_s, float) else 0.0)) * 1e3
    while amount > max(most, 1):
        amount //= 4
    saved = min(saved, price * amount / GIB)
    if saved > 0:
        of = "" if plan.simulated_seconds is None else " of the times one after the other"
        whole = human(amount).replace(".00", "").replace(".0", "")
        yield f"price of memory: +{whole} of {tier} would save up to {saved:.3g} ms a step{of}"


def _saving(plan: Plan) -> Iterator[str]:
    """What is not kept on the device."""
    again: list[Node] = []
    offloaded = here = streamed = 0
    for node in plan.graph.nodes:
        if node.op == STORE:
            offloaded += sum(step.nbytes for step in plan.choices[node.name].steps if isinstance(step, Move))
        elif node.target and not node.is_source and node.op not in VIEWS:
            again.append(node)
    told: list[str] = []
    if again:
        part = _percent(sum(_flops(plan, n) for n in again), sum(_flops(plan, n) for n in plan.graph.nodes))
        told.append(f"recomputed in backward: {len(again)} operators, {part} of the arithmetic")
    if offloaded:
        count = sum(node.op == STORE for node in plan.graph.nodes)
        told.append(f"offloaded to the host: {count} values, {human(offloaded)}")
    for node, type in _parameters_of(plan):
        nbytes = local_type(type, plan.choices[node.name].gives[0], plan.mesh).nbytes
        here += nbytes if plan.residence.get(node.target) == "host" else 0
        streamed += nbytes if plan.residence.get(node.target) == "stream" else 0
    counts = Counter(plan.residence.values())
    if here:
        told.append(f"on the host: {counts['host']} parameters, {human(here)}, updated there")
    if streamed:
        told.append(f"on the host: states of {counts['stream']} parameters ({human(streamed)}), which stream")
    yield from textwrap.wrap("; ".join(told), WIDTH, subsequent_indent="  ")


# --- what each axis does ---------------------------------------------------------------------------------------------


@dataclass
class _Use:
    """What one axis does: flops of the forward products with parameters; bytes of parameters and activations."""

    products: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    between: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    stored_split: float = 0.0
    gathered: float = 0.0  # of these, brought together before the product that reads them


def _split_of(choice: Choice, axis: int, weighted: bool) -> str:
    """What an axis splits of a product: batch, sequence, heads, columns, rows, nothing, or something else.

    Read off the layouts. Columns and rows are those of the second operand, in a linear layer the weight: split by
    columns, each rank makes some of the result's features; by rows, each makes a term of a sum over the ranks.
    `weighted`: whether an operand is a parameter.
    """
    given = choice.gives[0][axis]
    match [layout[axis] for layout in choice.takes[:2]], given:
        case [Replicate(), Replicate()], Replicate():
            return "nothing"
        case [Shard(), Replicate()], Shard(dim):
            return "sequence" if dim else "batch"
        case [Shard(), Shard()], Shard(dim):
            return "groups" if weighted else "heads" if dim else "batch"
        case [Replicate(), Shard()], Shard():
            return "columns"
        case [Shard(), Shard()], Partial():
            return "rows"
        case _:
            return "something else"


def _flops(plan: Plan, node: Node) -> float:
    """Of one rank, so that work which every rank repeats weighs as much as it costs."""
    return sum(step.flops for step in plan.choices[node.name].steps if isinstance(step, Compute))


def _weights(plan: Plan) -> dict[str, str]:
    """Node -> the parameter that it is another look at, or a cast of."""
    found: dict[str, str] = {}
    for node in plan.graph.nodes:
        if node.op == "parameter":
            found[node.name] = node.name
        elif node.op in (*VIEWS, FETCH, precision.CAST) and node.operands[0].name in found:
            found[node.name] = found[node.operands[0].name]
    return found


def _uses(plan: Plan) -> list[_Use]:
    uses = [_Use() for _ in plan.mesh.names]
    weight_of = _weights(plan)
    taken: dict[str, list[Layout]] = defaultdict(list)  # parameter -> how the forward operators take it
    for node in plan.graph.nodes:
        if node.phase == "forward" and node.op not in (*VIEWS, FETCH) and node.name not in weight_of:
            for ref, layout in zip(node.operands, plan.choices[node.name].takes, strict=True):
                if ref.name in weight_of:
                    taken[weight_of[ref.name]].append(layout)
    for node in shown_nodes(plan):
        choice, type = plan.choices[node.name], node.outputs[0]
        for axis, use in enumerate(uses):
            if is_product(node, choice):
                if _weighted(node, weight_of):
                    use.products[_split_of(choice, axis, True)] += _flops(plan, node)
            elif type is not None and len(type.shape) == 3 and node.op not in VIEWS and not node.is_source:
                use.between[_activation(choice.gives[0][axis])] += type.nbytes
    for node, type in _parameters_of(plan):
        for axis, use in enumerate(uses):
            if isinstance(plan.choices[node.name].gives[0][axis], Shard):
                use.stored_split += type.nbytes
                if taken[node.name] and all(isinstance(layout[axis], Replicate) for layout in taken[node.name]):
                    use.gathered += type.nbytes
    return uses


def _weighted(node: Node, weight_of: Mapping[str, str]) -> bool:
    return any(ref.name in weight_of for ref in node.operands)


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
    total = sum(type.nbytes for _, type in _parameters_of(plan))
    for axis, size, use in zip(plan.mesh.names, plan.mesh.sizes, _uses(plan), strict=True):
        if size == 1:
            yield f"{axis}: one rank, nothing to split"
            continue
        told = f"{axis}: {_named(use, total, _sharded_as(plan))}"
        yield from textwrap.wrap(told, WIDTH, subsequent_indent="  ")


def _parameters_of(plan: Plan) -> list[tuple[Node, TensorType]]:
    found: list[tuple[Node, TensorType]] = []
    for node in plan.graph.nodes:
        type = node.outputs[0] if node.op == "parameter" else None
        if type is not None:
            found.append((node, type))
    return found


def _sharded_as(plan: Plan) -> str:
    """What it is called that parameters are stored in pieces and gathered as this graph has it."""
    shared = {node.name for node in plan.graph.nodes if is_gathered_once(node)}
    gradients = {result.ref.name for result in plan.graph.results if result.kind == "gradient" and result.ref}
    if shared & gradients:
        return "ZeRO-1"
    return "SHARD_GRAD_OP / ZeRO-2" if shared else "FSDP / ZeRO-3"


def _named(use: _Use, parameter_bytes: float, sharded_as: str) -> str:
    """The textbook's name where there is one, then what it means here."""
    flops = sum(use.products.values())
    share = {what: part / flops for what, part in use.products.items() if flops and part / flops > SOME}
    stored = use.stored_split / parameter_bytes if parameter_bytes else 0.0
    gathered = use.gathered / parameter_bytes if parameter_bytes else 0.0
    batch, columns, rows = share.get("batch", 0.0), share.get("columns", 0.0), share.get("rows", 0.0)
    names: list[str] = []
    if batch:
        amount = "" if batch >= MOST else f" in {batch:.0%} of the layers' arithmetic"
        means = "each rank computes a part of the batch"
        if gathered >= MOST:
            means += " and keeps a part of each parameter, which is gathered for use"
            names.append(f"fully sharded data parallel ({sharded_as}){amount}: {means}")
        elif gathered > SOME:
            how = f"{gathered:.0%} of the parameter bytes sharded and gathered for use as in {sharded_as}"
            names.append(f"data parallel{amount}, {how}: {means}")
        else:
            means += " with the whole of their parameters; gradients are summed"
            names.append(f"data parallel{amount}: {means}")
    if columns and rows:
        means = "weights split by columns, then by rows, one sum after each pair"
        where = f"in {columns + rows:.0%} of the layers' arithmetic"
        names.append(f"column/row tensor parallel (Megatron) {where}: {means}")
    elif columns or rows:
        which, means = ("columns", "some of the features") if columns else ("rows", "a term of a sum")
        where = f"in {columns + rows:.0%} of the layers' arithmetic"
        names.append(f"weights split by {which} {where}: each rank makes {means}")
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
    """How activations stand outside the split products; along the sequence, it is Megatron's sequence parallelism."""
    outside = {what: nbytes for what, nbytes in use.between.items() if what != "by features"}
    total = sum(outside.values())
    told: list[str] = []
    for what, nbytes in sorted(outside.items(), key=lambda item: (-item[1], item[0])):
        if nbytes > (1 - MOST) * total:
            how = f"kept {what}" if what in ("whole", "as terms of a sum") else f"split {what}"
            name = " (sequence parallel)" if what == "along the sequence" else ""
            told.append(f"{how}{name}" if nbytes >= MOST * total else f"{nbytes / total:.0%} {how}{name}")
    return [f"elsewhere activations are {', '.join(told)}"] if told else []


# --- parameters, products, notes -------------------------------------------------------------------------------------


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _parameters(plan: Plan, limit: int) -> Iterator[str]:
    """By pattern, equal layers together, and the parameters of one module that have the same type and layout."""
    groups: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)  # (module, layout, type) -> name -> count
    nbytes: dict[tuple[str, str, str], int] = defaultdict(int)
    here = 0
    for node, type in _parameters_of(plan):
        layout = plan.choices[node.name].gives[0]
        module, _, name = _pattern(node.target).rpartition(".")
        key = module, show(layout, plan.mesh, len(type.shape)), str(type)
        groups[key][name] = groups[key].get(name, 0) + 1
        nbytes[key] += type.nbytes
        here += local_type(type, layout, plan.mesh).nbytes
    if not groups:
        return
    whole = sum(nbytes.values())
    stored = f"{human(whole)}, of which a rank stores {human(here)} ({_percent(here, whole)})"
    yield f"parameters: {stored}; the axes that split each dim, _ where none does:"
    order = sorted(groups, key=lambda key: -nbytes[key])
    shown = {*order[:limit]}
    rows: list[tuple[str, ...]] = []
    for key, names in groups.items():
        if key in shown:
            module, layout, type = key
            told = _short(".".join(filter(None, (module, ", ".join(names)))))
            rows.append((told, layout, f"{sum(names.values())}x", type))
    yield from _columns(rows)
    if rest := order[limit:]:
        counts = {key: sum(groups[key].values()) for key in rest}
        count, split = sum(counts.values()), sum(n for key, n in counts.items() if key[1].strip("[_, ]"))
        share = _percent(sum(nbytes[key] for key in rest), whole)
        yield f"  and {count} more ({share} of the bytes): {count - split} whole, {split} split"


def _short(name: str) -> str:
    return name if len(name) <= 52 else f"..{name[-50:]}"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _products(plan: Plan, limit: int) -> Iterator[str]:
    """Matrix products, attention and convolutions of the forward pass; those of the backward pass follow them."""
    weight_of = _weights(plan)
    groups: dict[tuple[str, str, str], int] = defaultdict(int)
    flops: dict[tuple[str, str, str], float] = defaultdict(float)
    for node in plan.graph.nodes:
        choice = plan.choices[node.name]
        if node.phase == "forward" and is_product(node, choice):
            weighted = _weighted(node, weight_of)
            split = {name: _split_of(choice, i, weighted) for i, name in enumerate(plan.mesh.names)}
            told = ", ".join(f"{name} splits {what}" for name, what in split.items() if what != "nothing")
            key = _pattern(home(node)) or "(model)", told or "repeated on every rank", _kind(node)
            groups[key] += 1
            flops[key] += _flops(plan, node)
    if not groups:
        return
    yield "products of the forward pass (columns and rows are those of the weight), and their part of the arithmetic:"
    order = sorted(groups, key=lambda key: -flops[key])
    shown = {*order[:limit]}
    rows: list[tuple[str, ...]] = []
    for key, count in groups.items():
        if key in shown:
            rows.append((_short(key[0]), key[1], f"{count}x", key[2], _percent(flops[key], sum(flops.values()))))
    yield from _columns(rows)
    if rest := order[limit:]:
        part = sum(flops[key] for key in rest)
        yield f"  and {sum(groups[key] for key in rest)} more, {_percent(part, sum(flops.values()))} together"


def _kind(node: Node) -> str:
    if node.op == "autopar.einsum":
        return "product"
    return "attention" if "attention" in node.op else node.op.removeprefix("aten.").partition(".")[0]


def _notes(plan: Plan) -> Iterator[str]:
    for note in plan.notes[:MAX_NOTES]:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="  ")
    if len(plan.notes) > MAX_NOTES:
        yield f"and {len(plan.notes) - MAX_NOTES} more notes, in plan.notes"
