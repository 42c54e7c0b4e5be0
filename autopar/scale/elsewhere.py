"""A plan at other sizes and on another mesh, its choices kept: every node splits what it splits, every value is laid
out as it is, every layout change goes the way it goes, or the cheapest way where that does not divide. Nothing is
searched and nothing is traced.

Steps, layout changes and bytes are computed by the code that computed them for the plan. So sizes may be numbers, which
gives a plan with its predicted time and memory, or forms, which gives the closed forms of both (`autopar.scale.forms`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.decide.referee import refereed
from autopar.ir.graph import Graph, Node, Ref, TensorType
from autopar.ir.layout import Layout, Shard, local_shape, local_type, show
from autopar.ir.mesh import Mesh
from autopar.ir.work import flops_of
from autopar.plan.plan import Plan
from autopar.plan.value import Choice, Decision, Delivery
from autopar.price.pricer import Pricer
from autopar.price.reshard import Reshard, Resharder
from autopar.propose.strategies import operand_types, signature_of, steps_of
from autopar.rules.local import localise
from autopar.rules.patterns import is_pattern
from autopar.rules.table import rule_of
from autopar.scale.growth import Growth
from autopar.scale.sizes import value_of
from cost_models.formulas import Form


class DoesNotSplit(ValueError):
    """At these sizes a dim does not divide by the axes that the plan splits it over; the message says which."""


def elsewhere(
    plan: Plan, growth: Growth, values: Mapping[str, Any], mesh: Mesh, resharder: Resharder | None = None
) -> Decision:
    """`values`: every size that grows, by name; `mesh` has the plan's axes. `resharder`: what finds other ways for
    layout changes on that mesh; forms need none, as they divide. Raises DoesNotSplit.
    """
    return _Move(plan, growth, values, mesh, resharder).run()


def plan_at(plan: Plan, growth: Growth, values: Mapping[str, int], pricer: Pricer) -> Plan:
    """The plan at these sizes on the pricer's mesh, priced by the referee, with no bound. Raises DoesNotSplit.

    It is for reading and pricing: numbers among its operators' arguments (where a slice ends) are not those of a trace.
    """
    there = elsewhere(plan, growth, values, pricer.mesh, pricer.resharder)
    return refereed(
        there.graph, there.choices, there.deliveries, pricer,
        objective=None, bound=0.0, memory=plan.memory_limit, outputs=plan.outputs,
    )  # fmt: skip


def graph_at(growth: Growth, values: Mapping[str, Any]) -> Graph:
    """The plan's graph with other shapes."""
    nodes: list[Node] = []
    type_of: dict[Ref, TensorType] = {}
    exact = not any(isinstance(value, Form) for value in values.values())
    types: dict[object, TensorType] = {}
    for node in growth.graph.nodes:
        found: list[TensorType | None] = []
        for index, type in enumerate(node.outputs):
            if type is None:
                found.append(None)
                continue
            ref = Ref(node.name, index)
            key = growth.dims[ref], type.dtype
            if key not in types:
                types[key] = growth.type_at(ref, values)
            type_of[ref] = types[key]
            found.append(types[key])
        args = node.args
        if exact and not node.is_source:
            args = localise(node, args, found, [type_of[ref] for ref in node.operands])
        nodes.append(replace(node, args=args, outputs=tuple(found)))
    return Graph(tuple(nodes), growth.graph.results, growth.graph.rounds)


class _Move:
    def __init__(
        self, plan: Plan, growth: Growth, values: Mapping[str, Any], mesh: Mesh, resharder: Resharder | None
    ) -> None:
        if mesh.names != plan.mesh.names:
            raise ValueError(f"the plan's axes are {', '.join(plan.mesh.names)}, not {', '.join(mesh.names)}")
        self.plan, self.growth, self.values, self.mesh, self.resharder = plan, growth, values, mesh, resharder
        self.graph = graph_at(growth, values)
        self.known: dict[object, Any] = {}  # equal nodes have equal steps, equal reads equal changes

    def run(self) -> Decision:
        type_of: dict[Ref, TensorType] = {}
        gives: dict[Ref, Layout] = {}
        choices: dict[str, Choice] = {}
        for node in self.graph.nodes:
            choice = self.plan.choices[node.name]
            types = tuple(type_of[ref] for ref in node.operands)
            self._check_roles(node, choice)
            for index, (type, layout) in enumerate(zip(node.outputs, choice.gives, strict=True)):
                if type is not None:
                    self._check_layout(node, type, layout)
                    type_of[Ref(node.name, index)], gives[Ref(node.name, index)] = type, layout
            reads = tuple(
                self._changes(node, type, gives[ref], read)
                for ref, type, read in zip(node.operands, types, choice.reads, strict=True)
            )
            choices[node.name] = replace(
                choice, steps=self._steps(node, types, choice), reads=reads, body_size=self._body_size(node, choice)
            )
        deliveries = tuple(
            None
            if result.ref is None or delivery is None
            else Delivery(
                self._changes(
                    self.graph.by_name[result.ref.name], type_of[result.ref], gives[result.ref], delivery.changes
                ),
                delivery.layout,
            )
            for result, delivery in zip(self.graph.results, self.plan.deliveries, strict=True)
        )
        return Decision(self.graph, self.mesh, choices, deliveries)

    def _steps(self, node: Node, types: tuple[TensorType, ...], choice: Choice) -> Any:
        if node.is_source:
            return ()
        if is_pattern(choice.body):
            raise NotImplementedError(f"%{node.name} runs {choice.body!r}, of which there is no closed form")
        key = signature_of(node, types), choice.roles, choice.takes, choice.gives, choice.body
        if key not in self.known:
            self.known[key] = steps_of(
                node, types, choice.roles, choice.takes, choice.gives, choice.body, choice.body_axes, self.mesh,
                *flops_of(node, types),
            )  # fmt: skip
        return self.known[key]

    def _changes(self, node: Node, type: TensorType, at: Layout, changes: tuple[Reshard, ...]) -> tuple[Reshard, ...]:
        """The same way from `at`, else another one to the same end."""
        if not changes:
            return ()
        key = type, at, changes
        if key not in self.known:
            try:
                self.known[key] = tuple(self._same_way(node, type, at, changes))
            except DoesNotSplit:
                end = at
                for change in changes:
                    end = change.applied(end, self.mesh)
                self._check_layout(node, type, end)
                if self.resharder is None:
                    raise
                self.known[key] = self.resharder.path(type, at, end)
        return self.known[key]

    def _same_way(self, node: Node, type: TensorType, at: Layout, changes: tuple[Reshard, ...]) -> Iterator[Reshard]:
        for change in changes:
            yield replace(change, local=local_type(type, at, self.mesh))
            at = change.applied(at, self.mesh)
            self._check_layout(node, type, at)

    def _body_size(self, node: Node, choice: Choice) -> int:
        rule = self.growth.rules.get(node.name)
        if rule is None or not choice.body:
            return choice.body_size
        sizes = self.growth.factors[node.name]
        factors = [factor for factor, body in rule.bodies.items() if body == choice.body]
        return math.prod(value_of(sizes[factor], self.values) if factor in sizes else 1 for factor in factors)

    # --- does it divide? ---------------------------------------------------------------------------------------------

    def _check_roles(self, node: Node, choice: Choice) -> None:
        """Every factor divides by the axes that split it; what stands behind others is split where those are in
        pieces of one.
        """
        sizes, rule = self.growth.factors.get(node.name, {}), self.growth.rules.get(node.name)
        behind: Mapping[str, frozenset[str]] = {} if rule is None else rule.behind
        counts: dict[str, Any] = {}
        for role, ranks in zip(choice.roles, self.mesh.sizes, strict=True):
            for other in behind.get(role, ()):
                assert rule is not None
                whole = value_of(sizes[other], self.values) if other in sizes else rule.sizes[other]
                pieces = counts.get(other, 1)
                if isinstance(whole, int) and isinstance(pieces, int) and pieces != whole:
                    raise DoesNotSplit(
                        f"%{node.name} ({node.module or node.op}) splits what stands behind {whole} that are in "
                        f"{pieces} pieces"
                    )
            counts[role] = counts.get(role, 1) * ranks
        for role, count in counts.items():
            if role in sizes and value_of(sizes[role], self.values) % count:
                raise DoesNotSplit(
                    f"%{node.name} ({node.module or node.op}) splits {value_of(sizes[role], self.values)} over {count}"
                )

    def _check_layout(self, node: Node, type: TensorType, layout: Layout) -> None:
        if local_shape(type.shape, layout, self.mesh) is None:
            laid = show(layout, self.mesh, len(type.shape))
            raise DoesNotSplit(f"%{node.name} ({node.module or node.target or node.op}) lays out {type} as {laid}")


def splits_behind(plan: Plan, node: Node) -> bool:
    """Whether an axis splits what stands behind another factor in one dim, as the sequence behind a batch of one a
    rank: a plan of one size.
    """
    roles = {*plan.choices[node.name].roles} - {""}
    if len(roles) < 2 or node.is_source:
        return False
    rule = rule_of(node, operand_types(node, plan.graph.by_name))
    return rule is not None and not roles.isdisjoint(rule.behind)


def units(plan: Plan, growth: Growth) -> dict[str, int]:
    """Name -> the number of which it must be a multiple, for the plan's choices to divide on its mesh.

    The present value of the others is taken for granted.
    """
    needs: set[tuple[tuple[Any, ...], int]] = set()
    for node in growth.graph.nodes:
        choice = plan.choices[node.name]
        counts: dict[str, int] = {}
        for role, ranks in zip(choice.roles, plan.mesh.sizes, strict=True):
            counts[role] = counts.get(role, 1) * ranks
        sizes = growth.factors.get(node.name, {})
        needs |= {(sizes[role], count) for role, count in counts.items() if role in sizes and count > 1}
        for index, layout in enumerate(choice.gives):
            for dim, size in enumerate(growth.dims.get(Ref(node.name, index), ())):
                split = math.prod(
                    ranks for place, ranks in zip(layout, plan.mesh.sizes, strict=True) if place == Shard(dim)
                )
                if split > 1:
                    needs.add((size, split))
    found: dict[str, int] = {}
    for name in growth.base:
        unit = 1
        for size, count in needs:
            parts = [part for part in size if part.name == name]
            rest = math.prod(part.at(growth.base) for part in size if part.name != name)
            if len(parts) == 1 and not parts[0].plus:
                unit = math.lcm(unit, count // math.gcd(count, rest))
        found[name] = unit
    return found
