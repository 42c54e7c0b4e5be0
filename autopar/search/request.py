"""A request: what is asked of a search, beside the graph, the mesh and the hardware."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autopar.ir.layout import Layout


@dataclass(frozen=True)
class Held:
    """Of what a device holds as backward begins, no more than `most` bytes: of these parameters, with what lies beside
    them, once, and of what forward leaves of these values to backward so many `times`. Both are names of nodes; a value
    is in one such limit only.
    """

    values: frozenset[str]
    parameters: frozenset[str]
    times: float
    most: float


@dataclass(frozen=True)
class Request:
    """What a plan must do, what it may do, and how long it may be looked for.

    memory: bytes of each rank's device that the plan may take; None is no limit.
    outputs: "sharded" leaves outputs in the plan's layouts, "global" brings them whole to every rank.
    fixed: layouts of parameters that are settled already.
    allow: what may be done where the fastest plan does not fit, some of `autopar.search.memory_options.ALLOWED`; None
    is what makes sense on the hardware.
    pin: module or parameter -> what is settled of it (`autopar.search.pins`), for policies, too.
    policy: only plans of this baseline (`autopar.search.policies`).
    held: limits of what a device may hold as backward begins, beside `memory`. What is over is recomputed or
    offloaded, as `allow` has it, or lies in other layouts.
    tied: one choice for repeated layers; None is only where the problem is large.
    simulation: the plan whose simulated step is the quickest of several (`autopar.search.overlap_loop`), not the
    optimum without overlap.
    time_limit_s: seconds that the solver may take.
    buckets_for: bytes of a rank's device that buckets of gradients are sized for; None: its memory. Who asks again with
    a little less memory gives what he had first, so that the problem is the same but for its limit.
    """

    memory: float | None = None
    outputs: str = "sharded"
    fixed: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    allow: Collection[str] | None = None
    pin: Mapping[str, str] = field(default_factory=dict[str, str])
    policy: str | None = None
    held: tuple[Held, ...] = ()
    tied: bool | None = None
    simulation: bool = False
    time_limit_s: float = 60.0
    buckets_for: float | None = None


DEFAULT = Request()
