"""Batch norms by the statistics of each rank's part of the batch, as DDP has them; see `autopar.batch_norm`.

A norm over the batch becomes `autopar.batch_norm_in_parts`. The parts are dims of its statistics, so splitting the
batch between parts needs no communication, by an ordinary rule, and every plan means the same. The new running
statistics are those of part 0, as DDP broadcasts the buffers of rank 0: of all layers together they are one row, from
which one gather takes part 0. Where the parts are split, that is one small collective in a step.

What counts as the batch is the leading dim of the inputs. It is followed through the rules of the operators: a norm is
over it, or beside it (instance norm, which stays as it is), or what it is over cannot be told, and is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.ir.batch_norm import BACKWARD, IN_PARTS, IN_PARTS_BACKWARD, TRAINING
from autopar.ir.graph import Const, Graph, Node, Ref, TensorType, batch_size, reading
from autopar.propose.strategies import operand_types
from autopar.rules.notation import Dim, Rule
from autopar.rules.table import rule_of
from autopar.trace.builder import Builder
from autopar.trace.capture import TraceError

# Where the batch is in a value: in that dim, as its major factor; nowhere, as it does not depend on it; it does, but in
# no dim by itself; or behind an operator without a rule.
Where = int | Literal["nowhere", "mixed", "unknown"]

# Others are kernels of these, which a trace has only where a model calls them by name.
KNOWN = {*TRAINING, BACKWARD, "aten._native_batch_norm_legit_no_training.default"}
INSTEAD = "or batch_norm='global'"


def local_statistics(graph: Graph, parts: int, synced: Collection[str] = ()) -> Graph:
    """The same graph, in which norms over the batch take the statistics of each of so many parts of it.

    `synced`: modules whose statistics are those of the whole batch always (SyncBatchNorm). Raises TraceError where the
    batch cannot be cut into equal parts, or a norm is not over the parts that ranks would have.
    """
    if parts == 1:
        return graph
    norms = [node for node in graph.nodes if _takes(node) and node.module not in synced]
    if other := next((node for node in graph.nodes if "batch_norm" in node.op and node.op not in KNOWN), None):
        raise TraceError(
            f"{_place(other)} calls {other.op}, of which batch_norm='local' does not know the statistics; "
            f"call torch.nn.functional.batch_norm, {INSTEAD}"
        )
    if not norms:
        return graph
    batch = batch_size(graph)
    where = batch_in(graph, batch)
    over = {node.name: node for node in norms if _is_over_the_batch(node, where[node.operands[0]], batch)}
    for node in over.values():
        _check_parts(node, batch, parts)
    return _Rewrite(_without_unused(graph, over), over, parts).run() if over else graph


def _takes(node: Node) -> bool:
    place = TRAINING.get(node.op)
    return place is not None and bool(node.args[place])


def _is_over_the_batch(node: Node, where: Where, batch: int) -> bool:
    """Whether its statistics are over the batch, and the batch is its major dim. Raises TraceError where it cannot be
    told, or where its rows lie in another order than those of ranks.
    """
    assert node.outputs[0] is not None
    rows = node.outputs[0].shape[0]
    if where in ("nowhere", 1):  # the same on every rank; or each sample has statistics of its own
        return False
    if where == 0 or (where == "unknown" and rows == batch):
        return True
    raise TraceError(
        f"batch norm {_place(node)} normalises {rows} rows that are not the batch of {batch} samples in its order, so "
        f"the part of each rank is not told; give it the batch as its first dim, {INSTEAD}"
    )


def _check_parts(node: Node, batch: int, parts: int) -> None:
    if batch % parts:
        raise TraceError(
            f"a batch of {batch} cannot be cut into {parts} equal parts, one for each rank, of which "
            f"batch_norm='local' takes the statistics; pass a multiple of {parts} samples, {INSTEAD}"
        )
    y = node.outputs[0]
    assert y is not None
    if y.numel == parts * y.shape[1]:
        raise TraceError(
            f"batch norm {_place(node)} would take statistics of 1 value per channel on each of {parts} ranks; "
            f"pass a larger batch, {INSTEAD}"
        )


def _without_unused(graph: Graph, norms: Collection[str]) -> Graph:
    """Their backward is given new running statistics, too, which it does not read."""
    b = Builder()
    for node in graph.nodes:
        if _is_backward(node, norms):
            node = replace(node, args=(*node.args[:3], None, None, *node.args[5:]))
        b.keep(node)
    return b.finish(graph.results)


def _is_backward(node: Node, norms: Collection[str]) -> bool:
    return node.op == BACKWARD and isinstance(mean := node.args[5], Ref) and mean.name in norms


def _place(node: Node) -> str:
    return f"{node.module or node.name}{f' ({node.source})' if node.source else ''}"


# --- where the batch is ----------------------------------------------------------------------------------------------


def batch_in(graph: Graph, batch: int) -> dict[Ref, Where]:
    """Where the batch is in every value of the forward pass, by the rules of the operators."""
    node_of = graph.by_name
    found: dict[Ref, Where] = {}
    for node in graph.nodes:
        if node.phase != "forward":
            continue
        if node.is_source:
            type = node.outputs[0]
            assert type is not None
            is_batch = node.op == "input" and type.shape[:1] == (batch,)
            found[Ref(node.name)] = 0 if is_batch else "nowhere"
            continue
        given: list[Where] = [found[ref] for ref in node.operands]
        results: list[Where] = ["nowhere" for _ in node.outputs]
        if any(where != "nowhere" for where in given):
            rule = rule_of(node, operand_types(node, node_of))
            results = _through(rule, given, len(node.outputs))
        found |= {Ref(node.name, index): where for index, where in enumerate(results)}
    return found


def _through(rule: Rule | None, given: Sequence[Where], count: int) -> list[Where]:
    if rule is None:
        return ["unknown"] * count
    factors = {
        _major(rule, dims[where]) for dims, where in zip(rule.inputs, given, strict=True) if isinstance(where, int)
    }
    lost: Where = "unknown" if "unknown" in given else "mixed"
    made: list[Where] = []
    for dims in rule.outputs:
        has = [place for place, dim in enumerate(dims) if factors.intersection(dim)]
        is_major = len(has) == 1 and _major(rule, dims[has[0]]) in factors
        made.append(has[0] if is_major else lost)
    return made


def _major(rule: Rule, dim: Dim) -> str:
    """The outermost factor of a dim; sizes of one do not count."""
    return next((factor for factor in dim if rule.sizes[factor] != 1), "")


# --- the graph in parts ----------------------------------------------------------------------------------------------


@dataclass
class _Rewrite:
    graph: Graph
    norms: dict[str, Node]
    parts: int

    def __post_init__(self) -> None:
        self.b = Builder()
        self.ref_of: dict[Ref, Ref] = {}

    def run(self) -> Graph:
        late = self._behind_running_statistics()
        forward = [node for node in self.graph.nodes if node.phase == "forward"]
        for node in forward:
            if node.name not in late:
                self._take(node)
        self._first_parts()
        for node in forward:
            if node.name in late:
                self._take(node)
        for node in self.graph.nodes:
            if node.phase == "backward":
                self._take(node)
        results = [replace(r, ref=None if r.ref is None else self.ref_of[r.ref]) for r in self.graph.results]
        return self.b.finish(results)

    def _take(self, node: Node) -> None:
        if node.name in self.norms:
            self._norm(node)
        elif _is_backward(node, self.norms):
            self._norm_backward(node)
        else:
            name = self.b.keep(reading(node, self.ref_of))
            self.ref_of |= {Ref(node.name, index): Ref(name, index) for index in range(len(node.outputs))}

    def _norm(self, node: Node) -> None:
        node, name = reading(node, self.ref_of), node.name
        x, weight, bias, *rest = node.args
        running, (_, momentum, eps) = (rest[:2], rest[2:]) if len(rest) == 5 else ((None, None), rest)
        y, *statistics = node.outputs
        types = (y, *(t and TensorType((self.parts, *t.shape), t.dtype) for t in statistics))
        made = self.b.call(node, IN_PARTS, (x, weight, bias, *running, momentum, eps, self.parts), *types, name=name)
        self.ref_of |= {Ref(name, index): Ref(made.name, index) for index in range(len(types))}

    def _norm_backward(self, node: Node) -> None:
        node, name = reading(node, self.ref_of), node.name
        grad, x, weight, _, _, mean, rstd, _, eps, mask = node.args
        args = grad, x, weight, mean, rstd, eps, self.parts, mask
        made = self.b.call(node, IN_PARTS_BACKWARD, args, *node.outputs, name=name)
        self.ref_of |= {Ref(name, index): Ref(made.name, index) for index in range(len(node.outputs))}

    # --- running statistics ------------------------------------------------------------------------------------------

    def _is_running(self, ref: Ref) -> bool:
        return ref.name in self.norms and ref.index in (3, 4)

    def _behind_running_statistics(self) -> set[str]:
        """What is computed from new running statistics, but by norms: of part 0 alone, when that is known. It may lead
        to buffers only, as on each rank it would be another value.
        """
        late: set[str] = set()
        for node in self.graph.nodes:
            if node.name not in self.norms and any(ref.name in late or self._is_running(ref) for ref in node.operands):
                late.add(node.name)
        for result in self.graph.results:
            if result.kind != "buffer" and result.ref is not None and result.ref.name in late:
                self._refuse(result.ref.name)
        for node in self.graph.nodes:
            is_early = node.name in self.norms or node.phase == "backward"
            if is_early and (used := late & {ref.name for ref in node.operands}):
                self._refuse(min(used))
        return late

    def _refuse(self, name: str) -> None:
        raise TraceError(
            f"{_place(self.graph.by_name[name])} reads running statistics that the same step has changed; with "
            "batch_norm='local' they differ between ranks; read them in another step, or batch_norm='global'"
        )

    def _first_parts(self) -> None:
        """Part 0 of the new running statistics that become buffers, or that somebody else reads: of all layers at
        once, one row for each dtype.
        """
        wanted = dict.fromkeys(r.ref for r in self.graph.results if r.ref is not None and self._is_running(r.ref))
        for node in self.graph.nodes:
            if node.name not in self.norms:
                wanted |= dict.fromkeys(ref for ref in node.operands if self._is_running(ref))
        rows: dict[str, list[Ref]] = defaultdict(list)
        for ref in wanted:
            rows[self.graph.type_of(ref).dtype].append(ref)
        for dtype, refs in rows.items():
            self._first_part(refs, dtype)

    def _first_part(self, refs: list[Ref], dtype: str) -> None:
        b = self.b
        like = replace(self.norms[refs[-1].name], module="", source="")
        sizes = tuple(self.graph.type_of(ref).numel for ref in refs)
        count = sum(sizes)
        row = tuple(self.ref_of[ref] for ref in refs)
        both = b.call(like, "aten.cat.default", (row, 1), TensorType((self.parts, count), dtype), name="running")
        where = b.call(
            like, "aten.full.default", ((1, count), 0), TensorType((1, count), "int64"),
            name="part_0", dtype=Const("dtype", "int64"), device=Const("device", "cpu"),
        )  # fmt: skip
        first = b.call(like, "aten.gather.default", (both, 0, where), TensorType((1, count), dtype), name="running_0")
        flat = b.view(like, first, (count,))
        types = [self.graph.type_of(ref) for ref in refs]
        pieces = b.call(like, "aten.split_with_sizes.default", (flat, sizes), *types, name="running_apart")
        self.ref_of |= {ref: Ref(pieces.name, index) for index, ref in enumerate(refs)}
