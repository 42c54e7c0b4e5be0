"""Message passing over a core: for fixed costs a bound that never falls, picks, and what each option costs at least.

For any messages M the least of

    sum_u [cost_u + sum_v M_v->u](x_u)  +  sum_uv [cost_uv - M_u->v - M_v->u](x_u, x_v)

over all picks is the least cost itself: messages only move cost between items and edges. The sum of the least entry of
every bracket is therefore a bound. TRW-S (Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", 2006) improves the messages item by item, forth and back, so that the bound never falls. On the way it
decodes picks; where they cost no more than the bound, both are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.problem import Array, Problem


@dataclass(slots=True)
class Link:
    """One edge seen from one of its items: rows of `cost` are that item's options."""

    other: int
    cost: Array
    number: int  # the message into this item is messages[number], the one out of it messages[number ^ 1]


class Sweeps:
    """`costs` and the costs of links may be replaced between sweeps; the messages stay and are a good start."""

    def __init__(self, core: Problem) -> None:
        self.costs: list[Array] = list(core.costs)
        self.links: list[list[Link]] = [[] for _ in core.costs]
        self.messages: list[Array] = []
        flips: dict[int, Array] = {}  # one transposed view per array, however many edges share it
        for number, edge in enumerate(core.edges):
            flip = flips.setdefault(id(edge.cost), edge.cost.T)
            self.links[edge.src].append(Link(edge.dst, edge.cost, 2 * number))
            self.links[edge.dst].append(Link(edge.src, flip, 2 * number + 1))
            self.messages += [np.zeros(len(core.costs[edge.src])), np.zeros(len(core.costs[edge.dst]))]
        self._link_of = {link.number: link for links in self.links for link in links}
        self._ahead = [sum(link.other > u for link in links) for u, links in enumerate(self.links)]
        self._weight = [
            1.0 / max(ahead, len(links) - ahead, 1) for ahead, links in zip(self._ahead, self.links, strict=True)
        ]

    def is_consistent(self) -> bool:
        """Whether every option has an allowed partner on every edge; otherwise messages would be infinite."""
        return all((link.cost < np.inf).any(1).all() for links in self.links for link in links)

    def set_edge(self, number: int, cost: Array) -> None:
        """Replace the costs of edge `number` of the core."""
        self._link_of[2 * number].cost, self._link_of[2 * number + 1].cost = cost, cost.T

    def sweep(self, forth: bool) -> tuple[tuple[int, ...], float]:
        """Send messages through all items in (reverse) order; the picks decoded on the way, and the bound."""
        step = 1 if forth else -1
        bound = 0.0
        picks = [0] * len(self.costs)
        messages = self.messages
        for u in range(len(picks)) if forth else range(len(picks) - 1, -1, -1):
            total = self.costs[u]
            choice = total
            for link in self.links[u]:
                message = messages[link.number]
                total = total + message
                choice = choice + (message if (link.other - u) * step > 0 else link.cost[:, picks[link.other]])
            picks[u] = int(choice.argmin())
            least = total.min()
            bound += least
            total = (total - least) * self._weight[u]
            for link in self.links[u]:
                if (link.other - u) * step > 0:
                    sent = (link.cost + (total - messages[link.number])[:, None]).min(0)
                    least = sent.min()
                    bound += least
                    messages[link.number ^ 1] = sent - least
        return tuple(picks), float(bound)

    def reduced_costs(self, forth: bool) -> list[Array]:
        """By how much picks with this option exceed the bound of the sweep, at least. `forth`: the sweep just made.

        After a sweep every bracket (with the item's share moved to the edges ahead) is non-negative but for the least
        entries that make up the bound; the brackets that mention an option add up to what it costs.
        """
        step = 1 if forth else -1
        found: list[Array] = []
        for u, links in enumerate(self.links):
            total = self.costs[u]
            for link in links:
                total = total + self.messages[link.number]
            total = total - total.min()
            ahead = self._ahead[u] if forth else len(links) - self._ahead[u]
            reduced = total * (1 - self._weight[u] * ahead)
            for link in links:
                if (link.other - u) * step > 0:
                    own = total * self._weight[u] - self.messages[link.number]
                    rows = (link.cost - self.messages[link.number ^ 1]).min(1) + own
                    reduced = reduced + (rows - rows.min())
            found.append(reduced)
        return found
