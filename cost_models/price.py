"""Seconds of a step on a machine: plain arithmetic, called hundreds of thousands of times in a search.

Closed forms of the collectives stand in `cost_models.steps.COLLECTIVES`; which link an axis of the mesh runs on is
decided once per mesh, by `link_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log, prod

from cost_models.curves import INTENSITY, NAMES, Curve
from cost_models.hardware import Factors, Hardware, Link
from cost_models.steps import COLLECTIVES, DEVICE, HOST, Comm, Compute, Loop, Move, Step, axes_of, joined


def link_of(hardware: Hardware, mesh_names: Sequence[str], mesh_sizes: Sequence[int], axis: str) -> Link:
    """What a collective over `axis`, or over several at once (`cost_models.steps.over`), travels on, in a mesh of
    row-major ranks (the last axis is contiguous).

    Ranks 0 .. ranks_per_node - 1 make the first node, and so on. If each group of the axis stays inside a node, it is
    the link inside the node. Otherwise, with g ranks of the group on N nodes and m of them where there are fewest:

    - A ring crosses each node's border through the NICs of the m ranks: bytes_per_s = min(intra, m * inter). So an
      outer axis (m = 1) never beats bytes / NIC, and a group that fills its nodes is not priced as if it had one NIC.
    - A message passes N - 1 borders on its way round: latency_s = ((g - N) * intra + (N - 1) * inter) / (g - 1), the
      mean hop, as NCCL counts it (src/graph/tuning.cc).
    - In an all-to-all every rank sends (g - m) / g of its bytes through its own NIC and the rest inside the node, at
      the same time; `Link.pairwise` carries that bottleneck.
    - What is passed on to one other rank waits for whoever sends over a border, through one NIC: `Link.hop`.

    The groups of one axis all work at once, so the slowest of them decides. Where somebody imagines the links of axes
    otherwise (`Hardware.axes`), an axis alone has just so many times its figures; see `_imagined` for several at once.
    Raises ValueError for an unknown axis.
    """
    if unknown := [one for one in axes_of(axis) if one not in mesh_names]:
        raise ValueError(f"no mesh axis {unknown[0]!r}; this mesh has {', '.join(mesh_names)}")
    if len(mesh_names) != len(mesh_sizes) or min(mesh_sizes) < 1:
        raise ValueError(f"mesh axes {tuple(mesh_names)} do not match sizes {tuple(mesh_sizes)}")
    places = [list(mesh_names).index(one) for one in axes_of(axis)]
    real = _link_over(hardware, mesh_sizes, places)
    if not any(one in hardware.axes for one in axes_of(axis)):
        return real
    links = _imagined(hardware, mesh_names, mesh_sizes, places)
    link = _link_over(replace(hardware, links=links), mesh_sizes, places)
    return replace(link, curves={name: _like(curve, name, real, link) for name, curve in real.curves.items()})


def _imagined(
    hardware: Hardware, mesh_names: Sequence[str], mesh_sizes: Sequence[int], places: Sequence[int]
) -> dict[str, Link]:
    """The links inside a node and between nodes, as a group over these places of the mesh has them where
    `Hardware.axes` changes some: those inside are of the axes with neighbours inside a node, those between of the axes
    that leave it. Of several axes that share a link, the one that is worst off decides.
    """
    able = [place for place in places if mesh_sizes[place] > 1]
    users: dict[str, list[int]] = {"intra": [], "inter": []}
    for place in able:
        nodes = [[rank // hardware.ranks_per_node for rank in group] for group in groups_over([place], mesh_sizes)]
        if any(len(set(group)) < len(group) for group in nodes):
            users["intra"].append(place)
        if any(len(set(group)) > 1 for group in nodes):
            users["inter"].append(place)
    found: dict[str, Link] = {}
    for reach, link in hardware.links.items():
        of = [hardware.axes.get(mesh_names[place], Factors()) for place in users[reach] or able or places]
        slower, narrower = max(one.latency for one in of), min(one.bandwidth for one in of)
        found[reach] = replace(link, latency_s=link.latency_s * slower, bytes_per_s=link.bytes_per_s * narrower)
    return found


def _like(curve: Curve, collective: str, real: Link, link: Link) -> Curve:
    """The measured curve of a collective on the link `real`, for one whose figures are those of `link`."""
    if COLLECTIVES[collective].pairwise:
        real, link = real.pairwise or real, link.pairwise or link
    return curve.scaled(link.latency_s / real.latency_s, real.bytes_per_s / link.bytes_per_s)


def _link_over(hardware: Hardware, mesh_sizes: Sequence[int], places: Sequence[int]) -> Link:
    """`link_of`, by the places of the axes, and by the figures of the profile alone."""
    ranks = prod(mesh_sizes[place] for place in places)
    slowest = hardware.links["intra"]
    seen: set[tuple[int, ...]] = set()
    for members in groups_over(places, mesh_sizes):
        counts = tuple(sorted(Counter(rank // hardware.ranks_per_node for rank in members).values()))
        if counts not in seen:
            seen.add(counts)
            slowest = _slower(slowest, _group_link(hardware, counts), ranks)
    if ranks > 1 and (curves := _measured(hardware, ranks, prod(mesh_sizes), max(len(counts) for counts in seen) > 1)):
        return replace(slowest, curves=curves)
    return slowest


def groups_over(places: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The groups of ranks that differ at those places of the mesh only, each in the order of its ranks."""
    strides = [prod(sizes[place + 1 :]) for place in range(len(sizes))]
    members = sorted(
        sum(index * strides[place] for place, index in zip(places, indices, strict=True))
        for indices in product(*(range(sizes[place]) for place in places))
    )
    firsts = [
        rank for rank in range(prod(sizes)) if all(rank // strides[place] % sizes[place] == 0 for place in places)
    ]
    return [[first + member for member in members] for first in firsts]


def shape_of_groups(ranks: int, world: int, ranks_per_node: int, crosses: bool) -> int:
    """How many groups of an axis are at work on a node at once; with `crosses` each has a part of its ranks there."""
    nodes = -(-world // ranks_per_node) if crosses else 1
    return max(1, min(world, ranks_per_node) * nodes // ranks)


def _measured(hardware: Hardware, ranks: int, world: int, crosses: bool) -> dict[str, Curve]:
    """Collective -> its curve on groups of `ranks`, from the measured shape that is nearest.

    A shape is ranks x groups at once on a node. Where it was not measured, the start-up grows with the hops of the
    closed form and the rest with its pieces; more ranks than measured also wait for the processors that they share.
    """
    groups = shape_of_groups(ranks, world, hardware.ranks_per_node, crosses)
    found: dict[str, Curve] = {}
    for collective, form in COLLECTIVES.items():
        known: list[tuple[float, float, int, int, Curve]] = []
        for name, curve in hardware.curves.items():
            part = NAMES.fullmatch(name)
            if part and part["reach"] == ("inter" if crosses else "intra") and part["collective"] == collective:
                of, at_once = int(part["ranks"]), int(part["groups"])
                far = abs(log(ranks / of)), abs(log(ranks * groups / (of * at_once)))
                known.append((*far, of, at_once, curve))
        if not known:
            continue
        _, _, of, at_once, curve = min(known, key=lambda entry: entry[:4])
        crowd = hardware.slowed_by("memory", ranks * groups) / hardware.slowed_by("memory", of * at_once)
        pieces = (form.pieces(ranks) / ranks) / (form.pieces(of) / of)
        found[collective] = curve.scaled(crowd * form.hops(ranks) / form.hops(of), crowd * pieces)
    return found


def links_of(hardware: Hardware, mesh_names: Sequence[str], mesh_sizes: Sequence[int]) -> dict[str, Link]:
    """`link_of` for every axis of the mesh, and for several at once: what `seconds` takes as `links`."""
    names = (*mesh_names, *joined(mesh_names, mesh_sizes))
    return {axis: link_of(hardware, mesh_names, mesh_sizes, axis) for axis in names}


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
    return Link(latency_s, bytes_per_s, pairwise=Link(pair_latency_s, 1 / s_per_byte), hop=_worse(intra, inter))


def _slower(one: Link, two: Link, ranks: int) -> Link:
    """The worse of two links, figure by figure."""
    if one == two or ranks == 1:
        return one
    pairwise = _worse(one.pairwise or one, two.pairwise or two)
    return replace(_worse(one, two), pairwise=pairwise, hop=_worse(one.hop or one, two.hop or two))


def _worse(one: Link, two: Link) -> Link:
    return Link(max(one.latency_s, two.latency_s), min(one.bytes_per_s, two.bytes_per_s))


@dataclass(frozen=True, slots=True)
class Way:
    """How bytes get from one memory tier to another: the queue of a rank that this occupies, and how fast they go.

    Where the profile has a measured curve `copy.<stream>`, that goes before the rate.
    """

    stream: str
    bytes_per_s: Callable[[Hardware], float]


WAYS = {  # (from, to) -> the way; what is not here cannot be moved
    (HOST, DEVICE): Way("h2d", lambda hardware: hardware.host_link.h2d_bytes_per_s),
    (DEVICE, HOST): Way("d2h", lambda hardware: hardware.host_link.d2h_bytes_per_s),
}


def way_of(move: Move) -> Way:
    """The way that a move takes. Raises ValueError where there is none."""
    way = WAYS.get((move.src, move.dst))
    if way is None:
        known = ", ".join(f"{src} to {dst}" for src, dst in WAYS)
        raise ValueError(f"no way leads from {move.src} to {move.dst}; known ways: {known}")
    return way


def stream_of(step: Compute | Comm | Move) -> str:
    """Which queue of a rank a step occupies: "compute", "host", "comm:<axis>" or that of a way ("h2d", "d2h"). A
    collective over several axes at once stands in the queue of the outermost, which has the slowest link.
    """
    match step:
        case Compute():
            return "host" if step.kind == "host" else "compute"
        case Comm():
            return f"comm:{axes_of(step.axis)[0]}"
        case Move():
            return way_of(step).stream


def _compute_s(step: Compute, curve: Curve, hardware: Hardware) -> float:
    """A step as its curve has it; a matrix product is never quicker than memory can stream its bytes."""
    if step.kernels == 0 and step.flops == 0 and step.nbytes == 0:
        return 0.0
    work_s = curve.seconds(step.flops, step.nbytes) - curve.base_s
    stream = hardware.curves.get("stream.float32") if curve.over == INTENSITY else None
    if stream is not None:
        work_s = max(work_s, stream.seconds(0.0, step.nbytes) - stream.base_s)
    return work_s + step.kernels * curve.base_s


def seconds(step: Step, hardware: Hardware, links: Mapping[str, Link]) -> float:
    """Seconds that one rank spends on `step`, with nothing else running.

    - Compute: the roofline max(flops / rate, nbytes / memory bandwidth), and the launch of each kernel. Work of kind
      "host" is bound by host memory alone, which is what limits an optimizer step there. It launches no kernel, and
      the host's own part for each (`dispatch_s`) is part of it: what else it launches runs beside the device.
      A step that was measured itself takes the seconds it says.
    - Comm: the collective's closed form on its axis' link; one rank pays nothing, nor do zero bytes.
    - Move: one launch, and the bytes at the rate of its way (`WAYS`).
    Where the profile has a measured curve for a step (`cost_models.curves`), that goes before all of these.
    - Loop: rounds times the body; with `overlap` each stream of `stream_of` runs by itself and the first round fills
      the pipe: (rounds - 1) * the busiest stream + one whole body. A loop in a loop overlaps with nothing.

    `links` maps each axis to its link (`links_of`); ValueError if the axis of a Comm is not there.
    """
    match step:
        case Compute():
            if step.seconds is not None:
                return step.seconds
            curve = hardware.curve(step.op, step.kind, step.dtype)
            if step.kind == "host":
                plain_s = step.nbytes / hardware.tiers["host"].bytes_per_s
                work_s = plain_s if curve is None else _compute_s(step, curve, hardware)
                return work_s + step.kernels * (hardware.dispatch_s or 0.0)
            if curve is not None:
                return _compute_s(step, curve, hardware)
            work_s = step.flops / hardware.rate(step.dtype, step.kind)
            memory_s = step.nbytes / hardware.tiers["hbm"].bytes_per_s
            return (work_s if work_s > memory_s else memory_s) + step.kernels * hardware.launch_s
        case Comm():
            return _comm_s(step, links)
        case Move():
            way = way_of(step)
            if (curve := hardware.curves.get(f"copy.{way.stream}")) is not None:
                return curve.seconds(0.0, step.nbytes)
            return hardware.launch_s + step.nbytes / way.bytes_per_s(hardware)
        case Loop():
            return _loop_s(step, hardware, links)


def _comm_s(step: Comm, links: Mapping[str, Link]) -> float:
    if step.ranks == 1 or step.nbytes == 0:
        return 0.0
    link = links.get(step.axis)
    if link is None:
        raise ValueError(f"{step.collective} over axis {step.axis!r}, which has no link; known: {', '.join(links)}")
    if (curve := link.curves.get(step.collective)) is not None:
        return curve.seconds(0.0, step.nbytes)
    form = COLLECTIVES[step.collective]
    if form.pairwise and link.pairwise is not None:
        link = link.pairwise
    if form.shifts and link.hop is not None:
        link = link.hop
    return form.seconds(step.ranks, step.nbytes, link.latency_s, link.bytes_per_s)


def _loop_s(step: Loop, hardware: Hardware, links: Mapping[str, Link]) -> float:
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
