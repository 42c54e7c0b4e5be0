"""Seconds of a step on a machine: plain arithmetic, called hundreds of thousands of times in a search.

Closed forms of the collectives stand in `cost_models.steps.COLLECTIVES`; which link an axis of the mesh runs on is
decided once per mesh, by `link_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from cost_models.hardware import Hardware, Link
from cost_models.steps import COLLECTIVES, Comm, Compute, Loop, Move, Step


def link_of(hardware: Hardware, mesh_names: Sequence[str], mesh_sizes: Sequence[int], axis: str) -> Link:
    """What a collective over `axis` travels on, in a mesh of row-major ranks (the last axis is contiguous).

    Ranks 0 .. ranks_per_node - 1 make the first node, and so on. If each group of the axis stays inside a node, it is
    the link inside the node. Otherwise, with g ranks of the group on N nodes and m of them where there are fewest:

    - A ring crosses each node's border through the NICs of the m ranks: bytes_per_s = min(intra, m * inter). So an
      outer axis (m = 1) never beats bytes / NIC, and a group that fills its nodes is not priced as if it had one NIC.
    - A message passes N - 1 borders on its way round: latency_s = ((g - N) * intra + (N - 1) * inter) / (g - 1), the
      mean hop, as NCCL counts it (src/graph/tuning.cc).
    - In an all-to-all every rank sends (g - m) / g of its bytes through its own NIC and the rest inside the node, at
      the same time; `Link.pairwise` carries that bottleneck.

    The groups of one axis all work at once, so the slowest of them decides. Raises ValueError for an unknown axis.
    """
    if axis not in mesh_names:
        raise ValueError(f"no mesh axis {axis!r}; this mesh has {', '.join(mesh_names)}")
    if len(mesh_names) != len(mesh_sizes) or min(mesh_sizes) < 1:
        raise ValueError(f"mesh axes {tuple(mesh_names)} do not match sizes {tuple(mesh_sizes)}")
    place = list(mesh_names).index(axis)
    ranks, stride = mesh_sizes[place], prod(mesh_sizes[place + 1 :])
    slowest = hardware.links["intra"]
    seen: set[tuple[int, ...]] = set()
    for block in range(0, prod(mesh_sizes), ranks * stride):
        for first in range(block, block + stride):
            members = range(first, first + ranks * stride, stride)
            counts = tuple(sorted(Counter(rank // hardware.ranks_per_node for rank in members).values()))
            if counts in seen:
                continue
            seen.add(counts)
            slowest = _slower(slowest, _group_link(hardware, counts), ranks)
    return slowest


def links_of(hardware: Hardware, mesh_names: Sequence[str], mesh_sizes: Sequence[int]) -> dict[str, Link]:
    """`link_of` for every axis of the mesh: what `seconds` takes as `links`."""
    return {axis: link_of(hardware, mesh_names, mesh_sizes, axis) for axis in mesh_names}


def _group_link(hardware: Hardware, counts: tuple[int, ...]) -> Link:
    """The link of a group with so many ranks on each of its nodes; see `link_of`."""
    intra, inter = hardware.links["intra"], hardware.links["inter"]
    ranks, nodes, fewest, most = sum(counts), len(counts), min(counts), max(counts)
    if nodes == 1:
        return intra
    hops, neighbours = ranks - 1, most - 1
    latency_s = ((ranks - nodes) * intra.latency_s + (nodes - 1) * inter.latency_s) / hops
    bytes_per_s = min(intra.bytes_per_s, fewest * inter.bytes_per_s)
    # Of the `hops` pieces that a rank receives, ranks - fewest come through its NIC, at most `neighbours` from inside.
    s_per_byte = max((ranks - fewest) / inter.bytes_per_s, neighbours / intra.bytes_per_s) / hops
    pair_latency_s = ((ranks - fewest) * inter.latency_s + (fewest - 1) * intra.latency_s) / hops
    return Link(latency_s, bytes_per_s, pairwise=Link(pair_latency_s, 1 / s_per_byte))


def _slower(one: Link, two: Link, ranks: int) -> Link:
    """The worse of two links, figure by figure."""
    if one == two or ranks == 1:
        return one
    one_pair, two_pair = one.pairwise or one, two.pairwise or two
    pairwise = Link(
        max(one_pair.latency_s, two_pair.latency_s),
        min(one_pair.bytes_per_s, two_pair.bytes_per_s),
    )
    return Link(max(one.latency_s, two.latency_s), min(one.bytes_per_s, two.bytes_per_s), pairwise)


def stream_of(step: Compute | Comm | Move) -> str:
    """Which queue of a rank a step occupies: "compute", "host", "h2d", "d2h" or "comm:<axis>"."""
    match step:
        case Compute():
            return "host" if step.kind == "host" else "compute"
        case Comm():
            return f"comm:{step.axis}"
        case Move():
            return "h2d" if step.dst == "hbm" else "d2h"


def seconds(step: Step, hardware: Hardware, links: Mapping[str, Link]) -> float:
    """Seconds that one rank spends on `step`, with nothing else running.

    - Compute: the roofline max(flops / rate, nbytes / memory bandwidth), and the launch of each kernel. Work of kind
      "host" is bound by host memory alone, which is what limits an optimizer step there, and launches no kernel.
    - Comm: the collective's closed form on its axis' link; one rank pays nothing, nor do zero bytes.
    - Move: one launch, and the bytes over the host link.
    - Loop: rounds times the body; with `overlap` each stream of `stream_of` runs by itself and the first round fills
      the pipe: (rounds - 1) * the busiest stream + one whole body. A loop in a loop overlaps with nothing.

    `links` maps each axis to its link (`links_of`); ValueError if the axis of a Comm is not there.
    """
    match step:
        case Compute():
            if step.kind == "host":
                return step.nbytes / hardware.tiers["host"].bytes_per_s
            work_s = step.flops / hardware.rate(step.dtype, step.kind)
            memory_s = step.nbytes / hardware.tiers["hbm"].bytes_per_s
            return (work_s if work_s > memory_s else memory_s) + step.kernels * hardware.launch_s
        case Comm():
            if step.ranks == 1 or step.nbytes == 0:
                return 0.0
            link = links.get(step.axis)
            if link is None:
                raise ValueError(
                    f"{step.collective} over axis {step.axis!r}, which has no link; known: {', '.join(links)}"
                )
            form = COLLECTIVES[step.collective]
            if form.pairwise and link.pairwise is not None:
                link = link.pairwise
            return form.seconds(step.ranks, step.nbytes, link.latency_s, link.bytes_per_s)
        case Move():
            ways = hardware.host_link
            return hardware.launch_s + step.nbytes / (
                ways.h2d_bytes_per_s if step.dst == "hbm" else ways.d2h_bytes_per_s
            )
        case Loop():
            busy_s: Counter[str] = Counter()
            alone_s = 0.0  # inner loops: they hold every stream
            body_s = 0.0
            for inner in step.body:
                inner_s = seconds(inner, hardware, links)
                body_s += inner_s
                if isinstance(inner, Loop):
                    alone_s += inner_s
                else:
                    busy_s[stream_of(inner)] += inner_s  # pyright: ignore[reportArgumentType]
            if not step.overlap:
                return step.rounds * body_s
            return (step.rounds - 1) * (alone_s + max(busy_s.values(), default=0.0)) + body_s
