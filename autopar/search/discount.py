"""The same problem with cheaper communication: fetching weights, and bringing gradients to their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.assemble import Assembled
from autopar.graph import Graph, TensorType
from autopar.layout import Layout
from autopar.price import Pricer
from autopar.reshard import Resharder
from autopar.schedule import weights_in
from cost_models.hardware import Link

Array = NDArray[np.float64]


def discounted(
    assembled: Assembled, graph: Graph, pricer: Pricer, shares: Mapping[tuple[str, str], float]
) -> Assembled:
    """The problem in which fetching "weights" and bringing "gradients" over an axis cost that share of their time.

    Copies keep their price. Items, options and memory are the same, so picks mean the same in both.
    """
    work = _Discount(assembled, graph, pricer, shares)
    work.weights()
    work.gradients()
    return replace(assembled, problem=work.problem())


class _Discount:
    def __init__(
        self, assembled: Assembled, graph: Graph, pricer: Pricer, shares: Mapping[tuple[str, str], float]
    ) -> None:
        self.assembled, self.graph, self.pricer = assembled, graph, pricer
        self.cheaper = {
            kind: _with_links(pricer, {axis: share for (of, axis), share in shares.items() if of == kind})
            for kind in ("weights", "gradients")
        }
        self.known: dict[object, Array] = {}
        self.less: dict[tuple[int, int], list[Array]] = defaultdict(list)  # (src, dst) -> what its edges cost less

    def weights(self) -> None:
        weights, item_of = weights_in(self.graph), self.assembled.item_of
        for node in self.graph.nodes:
            refs = node.operands
            if not any(ref.name in weights for ref in refs):
                continue
            item = item_of[node.name]
            options = self.assembled.options[item]
            for position, ref in enumerate(refs):
                if ref.name not in weights:
                    continue
                producer = item_of[ref.name]
                earlier = tuple(place for place in range(position) if refs[place] == ref)
                type = self.graph.type_of(ref)
                gives = self.assembled.options[producer]
                key = ("weights", type, id(gives), ref.index, id(options), position, earlier)
                if key not in self.known:
                    takes = [option.takes[position] for option in options]
                    less = self._less("weights", type, [option.gives[ref.index] for option in gives], takes)
                    again = [any(o.takes[position] == o.takes[place] for place in earlier) for o in options]
                    self.known[key] = np.where(again, 0.0, less)
                self.less[producer, item].append(self.known[key])

    def gradients(self) -> None:
        item_of = self.assembled.item_of
        parameter_of = {node.target: node.name for node in self.graph.nodes if node.op == "parameter"}
        for result in self.graph.results:
            if result.kind != "gradient" or result.ref is None:
                continue
            producer, parameter = item_of[result.ref.name], item_of[parameter_of[result.target]]
            gives, stored = self.assembled.options[producer], self.assembled.options[parameter]
            type = self.graph.type_of(result.ref)
            key = ("gradients", type, id(gives), result.ref.index, id(stored))
            if key not in self.known:
                index = result.ref.index
                before, after = [option.gives[index] for option in gives], [option.gives[0] for option in stored]
                self.known[key] = self._less("gradients", type, before, after)
            self.less[producer, parameter].append(self.known[key])

    def _less(self, kind: str, type: TensorType, gives: Sequence[Layout], takes: Sequence[Layout]) -> Array:
        def price(pricer: Pricer) -> Array:
            return pricer.deliver(type, gives, takes) if kind == "gradients" else pricer.reshard(type, gives, takes)

        usual, less = price(self.pricer), price(self.cheaper[kind])
        return np.where(np.isfinite(usual), np.where(np.isfinite(usual), usual, 0.0) - less, 0.0)

    def problem(self) -> Any:
        problem = self.assembled.problem
        shared: dict[object, Array] = {}
        edges = list(problem.edges)
        for number, edge in enumerate(problem.edges):
            less = self.less.pop((edge.src, edge.dst), None)
            if less is None:
                continue
            key = (id(edge.cost), *map(id, less))
            if key not in shared:  # equal edges share one array, which is what the solver's speed rests on
                shared[key] = edge.cost - np.sum(less, axis=0)
            edges[number] = replace(edge, cost=shared[key])
        assert not self.less, f"no edge joins the items {sorted(self.less)[:4]}"
        return replace(problem, edges=tuple(edges))


def _with_links(pricer: Pricer, share_of: Mapping[str, float]) -> Pricer:
    links = {axis: _scaled(link, share_of.get(axis, 1.0)) for axis, link in pricer.resharder.links.items()}
    return replace(pricer, resharder=Resharder(pricer.mesh, pricer.hardware, links))


def _scaled(link: Link, share: float) -> Link:
    """The link on which everything takes `share` of its time."""
    return Link(
        link.latency_s * share,
        link.bytes_per_s / share,
        None if link.pairwise is None else _scaled(link.pairwise, share),
        {name: curve.scaled(share, share) for name, curve in link.curves.items()},
    )
