"""Prices of what is overlapped with compute: a search counts the share of a transfer for which compute waits.

Which share that is the timeline of a plan tells (`autopar.search.overlap_loop`). Transfers are told apart by what they
carry: "weights" that are fetched for use, "gradients" that are brought to their parameters, and "moves" between device
and host. All other communication is between two operators, which wait for it, and keeps its price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.price.pricer import Array, Pricer
from autopar.propose.strategies import Strategy
from cost_models.hardware import Link
from cost_models.price import stream_of
from cost_models.steps import Compute, Loop, Move, Step, axes_of, unrolled

WEIGHTS, GRADIENTS, MOVES = ("weights", "gradients", "moves")

# (kind, mesh axis) -> share; of moves, (kind, "d2h" | "h2d" | "host"). What is left out has its full price.
Shares = Mapping[tuple[str, str], float]


def cheaper(pricer: Pricer, shares: Shares, kind: str) -> Pricer:
    """The pricer for which communication costs the shares of that kind. Copies keep their price."""
    share_of = {axis: share for (of, axis), share in shares.items() if of == kind}
    if not share_of:
        return pricer
    links = {axis: _scaled(link, share_of.get(axes_of(axis)[0], 1.0)) for axis, link in pricer.resharder.links.items()}
    return replace(pricer, resharder=pricer.resharder.at(links))


def seconds_of(pricer: Pricer, shares: Shares, steps: Sequence[Step]) -> float:
    """Seconds of steps, of which moves and the host's work cost their shares."""

    def share(step: Step) -> float:
        if isinstance(step, Move) or (isinstance(step, Compute) and step.kind == "host"):
            return shares.get((MOVES, stream_of(step)), 1.0)
        return 1.0

    return sum(pricer.seconds((step,)) * share(step) for step in steps)


def costs_of(pricer: Pricer, shares: Shares, strategies: tuple[Strategy, ...]) -> Array:
    """Seconds of each strategy. Where anything is overlapped, what a loop sends runs beside the work of its own round,
    and counts as far as it takes longer than that: what a timeline exposes of it, unless others are on the link.
    """
    if not shares:
        return pricer.costs(strategies)
    return np.array([sum(_beside_s(pricer, step) for step in strategy.steps) for strategy in strategies])


def _beside_s(pricer: Pricer, step: Step) -> float:
    if not isinstance(step, Loop):
        return pricer.seconds((step,))
    busy_s: dict[str, float] = defaultdict(float)
    for inner in unrolled(step.body):
        busy_s[stream_of(inner)] += pricer.seconds((inner,))
    return step.rounds * max(busy_s.values())


def _scaled(link: Link, share: float) -> Link:
    """The link on which everything takes `share` of its time."""
    return Link(
        link.latency_s * share,
        link.bytes_per_s / share,
        None if link.pairwise is None else _scaled(link.pairwise, share),
        {name: curve.scaled(share, share) for name, curve in link.curves.items()},
        None if link.hop is None else _scaled(link.hop, share),
    )
