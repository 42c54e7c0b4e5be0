"""What each axis of the mesh does in a plan, by its textbook name where there is one; and why it does nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.ir.layout import Layout, Partial, Placement, Replicate, Shard
from autopar.ir.work import FETCH, VIEWS
from autopar.plan.reading import OTHERWISE, flops_in, is_weighted, parameters_of, split_of, weights_of, wrapped
from autopar.plan.tell import shown_nodes, traffic_by_part
from autopar.plan.unsplit import unsplit
from autopar.plan.value import PlanValue, is_product
from autopar.rewrite.gather_once import is_gathered_once
from cost_models.steps import axes_of

MOST = 0.9  # of bytes or flops: from here on a word stands without a percentage
WHOLE, PARTIAL = "whole", "as partial sums"  # how activations stand that no axis splits
SUMS = ("all_reduce", "reduce_scatter")
SOME = 0.005  # below this, not worth a word


@dataclass
class Use:
    """What one axis does: flops of the forward products with parameters; bytes of parameters and activations."""

    products: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    between: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    stored_split: float = 0.0
    gathered: float = 0.0  # of these, brought together before the product that reads them
    sums: bool = True  # whether anything is summed over it behind the forward pass


def uses(plan: PlanValue) -> list[Use]:
    parts = traffic_by_part(plan)
    sums = [over for part in ("backward", "gradients") for what, over in parts[part] if what in SUMS]
    summed = {axis for over in sums for axis in axes_of(over)}
    found = [Use(sums=name in summed) for name in plan.mesh.names]
    weight_of = weights_of(plan.graph)
    taken: dict[str, list[Layout]] = defaultdict(list)  # parameter -> how the forward operators take it
    for node in plan.graph.nodes:
        if node.phase == "forward" and node.op not in (*VIEWS, FETCH) and node.name not in weight_of:
            for ref, layout in zip(node.operands, plan.choices[node.name].takes, strict=True):
                if ref.name in weight_of:
                    taken[weight_of[ref.name]].append(layout)
    for node in shown_nodes(plan):
        choice, type = plan.choices[node.name], node.outputs[0]
        for axis, use in enumerate(found):
            if is_product(choice):
                if is_weighted(node, weight_of):
                    use.products[split_of(choice, axis, True)] += flops_in(plan, node)
            elif type is not None and len(type.shape) == 3 and node.op not in VIEWS and not node.is_source:
                use.between[_activation(choice.gives[0][axis])] += type.nbytes
    for node, type in parameters_of(plan):
        for axis, use in enumerate(found):
            if isinstance(plan.choices[node.name].gives[0][axis], Shard):
                use.stored_split += type.nbytes
                if taken[node.name] and all(isinstance(layout[axis], Replicate) for layout in taken[node.name]):
                    use.gathered += type.nbytes
    return found


def _activation(placement: Placement) -> str:
    match placement:
        case Shard(0):
            return "along the batch"
        case Shard(1):
            return "along the sequence"
        case Shard():
            return "by features"
        case Partial():
            return PARTIAL
        case Replicate():
            return WHOLE


def words(plan: PlanValue) -> Iterator[str]:
    total = sum(type.nbytes for _, type in parameters_of(plan))
    for axis, size, use in zip(plan.mesh.names, plan.mesh.sizes, uses(plan), strict=True):
        if size == 1:
            yield f"{axis}: one rank, nothing to split"
            continue
        yield from wrapped(f"{axis}: {_named(use, total, _sharded_as(plan))}")
        if told := unsplit(plan, axis):
            yield from wrapped(f"{axis}: {told}")


def _sharded_as(plan: PlanValue) -> str:
    """What it is called that parameters are stored in pieces and gathered as this graph has it."""
    shared = {node.name for node in plan.graph.nodes if is_gathered_once(node)}
    gradients = {result.ref.name for result in plan.graph.results if result.kind == "gradient" and result.ref}
    if shared & gradients:
        return "ZeRO-1"
    return "SHARD_GRAD_OP / ZeRO-2" if shared else "FSDP / ZeRO-3"


def _named(use: Use, parameter_bytes: float, sharded_as: str) -> str:
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
            means += " with the whole of their parameters; "
            means += "gradients are summed" if use.sums else "activations are gathered for gradients, which are whole"
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
    if OTHERWISE in share:
        names.append(f"split in a way without a name in {share[OTHERWISE]:.0%} of the layers' arithmetic")
    if "nothing" in share:
        names.append(f"the same work repeated on every rank in {share['nothing']:.0%} of the layers' arithmetic")
    if not names:
        names.append("no matrix product with parameters")
    if columns or rows:
        names += between_told(use)
    if stored > SOME and not gathered > SOME:
        names.append(f"{stored:.0%} of the parameter bytes are split over it")
    return "; ".join(names)


def between_told(use: Use) -> list[str]:
    """How activations stand outside the split products; along the sequence, it is Megatron's sequence parallelism."""
    outside = {what: nbytes for what, nbytes in use.between.items() if what != "by features"}
    total = sum(outside.values())
    told: list[str] = []
    for what, nbytes in sorted(outside.items(), key=lambda item: (-item[1], item[0])):
        if nbytes > (1 - MOST) * total:
            how = f"kept {what}" if what in (WHOLE, PARTIAL) else f"split {what}"
            name = " (sequence parallel)" if what == "along the sequence" else ""
            told.append(f"{how}{name}" if nbytes >= MOST * total else f"{nbytes / total:.0%} {how}{name}")
    return [f"elsewhere activations are {', '.join(told)}"] if told else []
