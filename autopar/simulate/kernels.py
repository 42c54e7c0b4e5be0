"""A plan's operators as a compiler runs them, where a plan prices them one by one.

What is compiled at once (a `unit`) runs connected elementwise operators and reductions as one kernel: it reads what
comes from outside once and writes what is read outside, and what lies between never reaches memory. Operators are
connected where one reads the other and no product, attention or collective lies on any way between them. This is the
least that a compiler must move: row and column reductions of one tensor are taken to share a read.

Only seconds change: memory still counts the values inside of a kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.layout import local_type
from autopar.ir.work import LOOKUPS, VIEWS
from autopar.plan import Choice, Plan
from cost_models.steps import MATRIX_KINDS, Comm, Compute

Unit = Callable[[Node], Hashable]  # the unit that a compiler is given at once; None: not compiled


def as_kernels(plan: Plan, unit: Unit = lambda node: None) -> Plan:
    """The plan with the steps of its operators as kernels; a kernel stays inside one `unit` of what is compiled."""
    choices, readers = dict(plan.choices), _readers(plan.graph)
    for kernel in kernels(plan, unit):
        moved = _bytes(plan, kernel, readers)
        *others, last = kernel
        for name in others:
            choices[name] = _moving(choices[name], 0.0, 0)
        choices[last] = _moving(choices[last], float(moved), 1)
    return replace(plan, choices=choices)


def kernels(plan: Plan, unit: Unit) -> list[list[str]]:
    """Operators that run as one kernel, in the order of the program; at least two each."""
    node_of = plan.graph.by_name
    level: dict[str, int] = {}
    kernel_of: dict[str, str] = {}  # every value -> the operator that stood for the kernel that makes it
    part_of: dict[str, str] = {}  # that of a kernel that became part of another -> that of the other
    members: dict[str, list[str]] = defaultdict(list)

    def leads(name: str) -> str:
        """The operator that stands for the kernel of a value now."""
        found = kernel_of[name]
        while found in part_of:
            found = part_of[found]
        return found

    for node in plan.graph.nodes:
        if node.is_source:
            level[node.name] = 0
            continue
        choice = plan.choices[node.name]
        ends = list(zip(node.operands, choice.reads, strict=True))
        moves = {ref: any(isinstance(step, Comm) for change in read for step in change.steps(2)) for ref, read in ends}
        level[node.name] = max((level[ref.name] + (moves[ref] or _is_barrier(node_of[ref.name], plan))
                                for ref, _ in ends), default=0)  # fmt: skip
        if node.op in VIEWS:
            source = node.operands[0]
            if source.name in kernel_of and not moves[source]:
                kernel_of[node.name] = kernel_of[source.name]
            continue
        if not _is_fusable(node, plan) or unit(node) is None:
            continue
        joined = {
            leads(ref.name) for ref, _ in ends
            if ref.name in kernel_of and not moves[ref] and level[leads(ref.name)] == level[node.name]
            and _place(node_of[leads(ref.name)], unit) == _place(node, unit)
        }  # fmt: skip
        leader = min(joined, key=lambda name: members[name][0], default=node.name)
        for other in joined - {leader}:
            members[leader] += members.pop(other)
            part_of[other] = leader
        members[leader].append(node.name)
        kernel_of[node.name] = leader
    place = {node.name: number for number, node in enumerate(plan.graph.nodes)}
    return [sorted(names, key=place.__getitem__) for names in members.values() if len(names) > 1]


def _place(node: Node, unit: Unit) -> tuple[str, Hashable]:
    return node.phase, unit(node)


def _is_barrier(node: Node, plan: Plan) -> bool:
    steps = plan.choices[node.name].steps
    return any(isinstance(step, Comm) or (isinstance(step, Compute) and step.kind in MATRIX_KINDS) for step in steps)


def _is_fusable(node: Node, plan: Plan) -> bool:
    steps = plan.choices[node.name].steps
    plain = all(isinstance(step, Compute) and step.kind not in MATRIX_KINDS for step in steps)
    return bool(steps) and plain and node.op not in LOOKUPS


def _bytes(plan: Plan, kernel: list[str], readers: Mapping[str, set[str]]) -> int:
    """What the kernel reads from outside, each value once, and what it makes that is read outside."""
    node_of, inside = plan.graph.by_name, set(kernel)
    read: dict[Ref, int] = {}
    for name in kernel:
        choice = plan.choices[name]
        for ref, layout in zip(node_of[name].operands, choice.takes, strict=True):
            source = _storage(ref, node_of)
            if source.name not in inside:
                read[source] = max(read.get(source, 0), local_type(plan.graph.type_of(ref), layout, plan.mesh).nbytes)
    written = 0
    for name in kernel:
        if readers[name] - inside:
            written += sum(
                local_type(type, layout, plan.mesh).nbytes
                for type, layout in zip(node_of[name].outputs, plan.choices[name].gives, strict=True)
                if type is not None
            )
    return sum(read.values()) + written


def _readers(graph: Graph) -> Mapping[str, set[str]]:
    """Who reads an operator's storage: operators, through any number of views, or "" for the graph's results."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in graph.nodes:
        if node.op not in VIEWS:
            for ref in node.operands:
                found[_storage(ref, graph.by_name).name].add(node.name)
    for result in graph.results:
        if result.ref is not None:
            found[_storage(result.ref, graph.by_name).name].add("")
    return found


def _storage(ref: Ref, node_of: dict[str, Node]) -> Ref:
    while (node := node_of[ref.name]).op in VIEWS:
        ref = node.operands[0]
    return ref


def _moving(choice: Choice, nbytes: float, launches: int) -> Choice:
    steps = tuple(
        replace(step, flops=0.0, nbytes=nbytes, kernels=launches) if isinstance(step, Compute) else step
        for step in choice.steps
    )
    return replace(choice, steps=steps)
