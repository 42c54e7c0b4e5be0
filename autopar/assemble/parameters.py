"""Where a parameter, its gradient and its optimizer states live, in the problem.

    device    all of them on the device
    host      all of them on the host, which updates the parameter; each phase fetches it for as long as it reads it
    stream    parameter and gradient on the device, states on the host: they stream through the device in the update

A parameter's options are its layouts, once for each residence that is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.assemble.activations import below, has_modes, still_modes
from autopar.assemble.builder import DEVICE, HOST, Array, Assembly
from autopar.assemble.liveness import Liveness
from autopar.ir.graph import Node, Ref, TensorType
from autopar.ir.layout import Layout
from autopar.price.overlap_discounts import seconds_of
from autopar.price.pricer import Pricer, added_up_type, adding_up
from autopar.price.stored import gathers
from autopar.propose.strategies import Strategy
from cost_models.steps import Move, Step


def resident_options(work: Assembly, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    if len(work.residences) == 1:
        return options
    key = work.known.number(options), work.residences
    if key not in work.known.resident:
        work.known.resident[key] = options * len(work.residences)
    return work.known.resident[key]


def settle_residences(work: Assembly, settled: Mapping[str, Sequence[str]]) -> None:
    for node in work.graph.nodes:
        if node.op == "parameter" and (where := settled.get(node.target)) is not None:
            item = work.item_of[node.name]
            work.costs[item] = np.where(_is(work, node, *where) > 0, work.costs[item], np.inf)


def _is(work: Assembly, node: Node, *residences: str) -> Array:
    """1 for each option of the parameter with one of these residences; an input has one."""
    every = work.residences if node.op == "parameter" else ("device",)
    told = [float(r in residences) for r in every for _ in work.strategies[node.name]]
    return work.once(("is", tuple(told)), lambda: np.array(told))


def _sizes(work: Assembly, node: Node) -> Array:
    """Bytes of the parameter, as it is stored, in each option."""
    item = work.item_of[node.name]
    return work.sizes(work.graph.stored_type(node), item, "parameter", lambda: _lies(work, item))


def _lies(work: Assembly, item: int) -> list[Layout]:
    return [strategy.lies for strategy in work.options[item]]


def _sizes_read(work: Assembly, node: Node) -> Array | None:
    """Bytes of what micro-batches read in the place of the parameter; None: they read the parameter."""
    item, type = work.item_of[node.name], work.type(Ref(node.name))
    is_cast = node.name in work.graph.rounds.stored
    if not is_cast and not any(strategy.stored for strategy in work.options[item]):
        return None
    read = work.sizes(type, item, "as it is read", lambda: work.gives(item, 0))
    if is_cast:
        return read
    apart = [bool(strategy.stored) for strategy in work.options[item]]
    return work.once(("read apart", id(read), tuple(apart)), lambda: np.where(apart, read, 0.0))


def update_costs(work: Assembly, node: Node) -> Array:
    """Seconds of the optimizer's pass over the parameter and of adding up its gradients, if it has any, of the cast
    and the gather that are made once a step, and of fetching it from the host.
    """
    type, read = work.graph.stored_type(node), work.type(Ref(node.name))
    options, pricer = work.strategies[node.name], work.pricer
    local = [pricer.local_bytes(type, option.lies) for option in options]
    trained, is_cast = node.target in work.live.update_at, type != read
    key = "update", id(options), type, trained, is_cast and read.dtype
    work.kept.append(options)

    def made() -> Array:
        steps = [list[Step]() for _ in local]
        for once, option, nbytes in zip(steps, options, local, strict=True):
            if is_cast:
                once.append(pricer.cast_step(nbytes, pricer.local_bytes(read, option.lies), type.dtype))
            if option.stored:
                once += pricer.gathered_once(gathers(read, option.stored, option.gives[0], pricer.mesh))
            if trained and work.graph.rounds.count > 1:
                once.append(adding_up(pricer.local_bytes(type, option.gives[0]), type.dtype))
        found = [
            [*before, *(work.pricer.update_steps(n, type.dtype, r) if trained else ())]
            for r in work.residences
            for n, before in zip(local, steps, strict=True)
        ]
        return np.array([seconds_of(work.pricer, work.shares, one) for one in found], dtype=np.float64)

    cost = work.once(key, made)
    if len(work.residences) > 1 and any(option.stored for option in options):  # elsewhere they lie as they are read
        elsewhere = [bool(option.stored) and r != "device" for r in work.residences for option in options]
        cost = np.where(elsewhere, np.inf, cost)
    if "host" not in work.residences:
        return cost
    reads = _readers(work, node)
    phases = bool(reads.forward) + bool(reads.surely)
    fetch = np.array([0.0 if r != "host" else _fetch_s(work, n) for r in work.residences for n in local])
    if len(reads.perhaps) > 1 and not reads.surely:  # whoever comes first would fetch it: no matter of pairs
        fetch = np.where(_is(work, node, "host") > 0, np.inf, 0.0)
    return cost + phases * fetch


def _fetch_s(work: Assembly, nbytes: int) -> float:
    return seconds_of(work.pricer, work.shares, (Move("host", "hbm", nbytes),))


class _Readers:
    """Who reads a parameter, perhaps through views, in the forward and in backward; of the latter `surely` those that
    do in any case, and `perhaps` those that do if they are run again.
    """

    def __init__(self) -> None:
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.surely: list[str] = []
        self.perhaps: list[str] = []


def _readers(work: Assembly, node: Node) -> _Readers:
    if not work.readers:
        work.readers = {n.name: _Readers() for n in work.graph.nodes if n.op == "parameter"}
        for reader in work.graph.nodes:
            for storage in dict.fromkeys(s for ref in reader.operands for s in below(work, ref.name)):
                if (found := work.readers.get(storage)) is None:
                    continue
                if reader.phase == "forward":
                    found.forward.append(reader.name)
                    continue
                found.backward.append(reader.name)
                if any(ref.name == storage for ref in reader.operands):
                    (found.perhaps if has_modes(work, reader.name) else found.surely).append(reader.name)
    return work.readers[node.name]


def add_parameter(work: Assembly, node: Node) -> None:
    """Bytes of the parameter, of its states, and of what the optimizer makes while it steps."""
    live, pricer, item = work.live, work.pricer, work.item_of[node.name]
    nbytes = _sizes(work, node)
    key = id(nbytes)

    def only(what: str, make: Callable[[], Array], *residences: str) -> Array:
        return work.once((what, key, residences), lambda: make() * _is(work, node, *residences))

    work.held(item, 0, live.instants, only("parameter", lambda: nbytes, "device", "stream"))
    if (read := _sizes_read(work, node)) is not None:
        work.held(item, 0, live.gathered_at + 1, read)
    if "host" in work.residences:
        work.held(item, 0, live.instants, only("parameter", lambda: nbytes, "host"), HOST)
        _add_fetches(work, node, only("parameter", lambda: nbytes, "host"))
    if (at := live.update_at.get(node.target)) is None:
        return

    def states() -> Array:
        return np.array([pricer.state_bytes(int(size)) for size in nbytes], dtype=np.float64)

    type = work.graph.stored_type(node)
    work.held(
        item,
        0,
        live.instants,
        work.once(("counted", key), lambda: states() * _is(work, node, "device") + pricer.counter_bytes),
    )
    _add_added_up(work, node, type)
    if len(work.residences) > 1:
        work.held(item, 0, live.instants, only("states", states, "host", "stream"), HOST)
        work.held(item, at, at + 1, only("states", states, "stream"))
    _add_temporaries(work, node, nbytes, at)


def _add_added_up(work: Assembly, node: Node, type: TensorType) -> None:
    """Bytes of the sum of the gradients of a step's micro-batches: of a parameter that lies as it is read all the time,
    else until it has gone where the parameter lies, in its dtype, where it stays.
    """
    item, live, pricer = work.item_of[node.name], work.live, work.pricer
    read = work.sizes(type, item, "added up", lambda: work.gives(item, 0))
    apart = tuple(bool(strategy.stored) for strategy in work.options[item])

    def sums(which: bool) -> Array:
        nbytes = np.array([pricer.accumulated_bytes(int(size), type.dtype) for size in read], dtype=np.float64)
        return np.where(np.array(apart) == which, nbytes, 0.0)

    work.held(item, 0, live.instants, work.once(("added up", id(read), apart, False), lambda: sums(False)))
    if any(apart):
        work.held(item, 0, live.gathered_at + 1, work.once(("added up", id(read), apart, True), lambda: sums(True)))
        arrived = work.sizes(added_up_type(type), item, "arrived", lambda: _lies(work, item))
        where = work.once(("arrived", id(arrived), apart), lambda: np.where(apart, arrived, 0.0))
        work.held(item, live.gathered_at, live.instants, where)


def _add_temporaries(work: Assembly, node: Node, nbytes: Array, at: int) -> None:
    """What the optimizer makes beside the states while it updates the parameter. Of the one that it updated before it
    may still hold something; where parameters of several residences take turns, that may be any earlier one.
    """
    live, pricer, made, item = work.live, work.pricer, work.pricer.temporaries, work.item_of[node.name]
    if len(work.residences) == 1:
        for start, end, times in temporaries(live, pricer, at):
            work.held(
                item, start, end, work.once(("temporaries", id(nbytes), times), lambda times=times: nbytes * times)
            )
        return
    before = made.left * _largest_before(work, node)

    def held(start: int, end: int, tier: str, residence: str, times: int, before: float) -> None:
        key = "temporaries", id(nbytes), residence, times, before
        work.held(
            item, start, end, work.once(key, lambda: (nbytes * times + before) * _is(work, node, residence)), tier
        )  # fmt: skip

    if pricer.updates_together:
        held(live.gathered_at + 1, live.instants, DEVICE, "device", made.together, 0.0)
        held(at, at + 1, DEVICE, "stream", made.together, 0.0)
    else:
        held(at, at + 1, DEVICE, "device", made.own, before)
        held(at, at + 1, DEVICE, "stream", made.own, 0.0)
    held(at, at + 1, HOST, "host", made.own, before)


def _largest_before(work: Assembly, node: Node) -> float:
    """Bytes of the largest parameter that is updated before this one, in any of its layouts."""

    def made() -> Array:
        largest, found = 0.0, dict[str, float]()
        for other in work.graph.nodes:
            if other.op == "parameter" and other.target in work.live.update_at:
                found[other.name] = largest
                largest = max(largest, float(_sizes(work, other).max()))
        work.size_of |= {("largest before", name): np.array(most) for name, most in found.items()}
        return work.size_of["largest before", node.name]

    return float(work.once(("largest before", node.name), made))


def _add_fetches(work: Assembly, node: Node, nbytes: Array) -> None:
    """Bytes of what the forward and backward fetch, from the first reader to the last. Where the first of backward
    reads only if it is run again, it is that one that has it fetched so early.
    """
    reads, live, item = _readers(work, node), work.live, work.item_of[node.name]
    for names in (reads.forward, reads.backward):
        if not names:
            continue
        start, end = live.at[names[0]], live.at[names[-1]] + 1
        if names[0] in reads.perhaps:
            then = live.at[names[1]] if len(names) > 1 else end
            edge, runs = _fetched_for(work, node, names[0], nbytes)
            early = work.once(("early", id(nbytes), runs), lambda runs=runs: np.outer(nbytes, runs))
            work.held_between(edge, start, then, early)
            start = then
        work.held(item, start, end, nbytes)


def _fetched_for(work: Assembly, node: Node, reader: str, nbytes: Array) -> tuple[int, tuple[bool, ...]]:
    """The edge between a parameter and a value of backward that reads it if it is run again, and of which of the
    value's modes that is true. It costs a fetch where nobody else in backward is sure to read the parameter.
    """
    mode, still = work.mode_of[reader], len(still_modes(work, reader))
    runs = tuple(option >= still for option in range(len(work.costs[mode])))
    alone = not _readers(work, node).surely

    def made() -> Array:
        seconds = [_fetch_s(work, int(n)) if n and alone else 0.0 for n in nbytes]
        return np.outer(seconds, runs)

    cost = work.once(("perhaps", id(nbytes), runs, alone), made)
    return work.add_edge(work.item_of[node.name], mode, cost), runs


def add_gradient(work: Assembly, node: Node, place: int) -> None:
    """A gradient's way to its parameter, and from there to the host if the parameter lies there; or to the input that
    it is of.
    """
    result = work.graph.results[place]
    assert result.ref is not None
    type, live, item = work.type(result.ref), work.live, work.item_of[node.name]
    producer = work.item_of[result.ref.name]
    stored = work.gives(item, 0)
    at, until, turn = live.at[result.ref.name], live.sent_until[place], live.sent_turn.get(place)
    adds_up = work.graph.adds_up(result)
    cost, nbytes, room = work.delivered(type, producer, result.ref.index, item, stored, place, adds_up)
    edge = work.add_edge(producer, item, cost)
    if adds_up and (waits := work.waiting(type, producer, result.ref, item, stored)) is not None:
        work.held_between(edge, at + 1, live.gathered_at + 1, waits)
    if (whole := work.graph.put_together(place)) is not None:
        work.held(item, 0, live.instants, whole.nbytes * work.pricer.nbytes(type, stored) // max(1, type.nbytes))
    if place in work.copied:
        here, sizes = _is(work, node, "device", "stream"), work.sizes(type, item, "gradient", lambda: stored)
        copy = work.once(("copy", id(sizes), id(here)), lambda: sizes * here)
        work.held(item, live.gathered_at - 1, live.instants, copy)
    if "host" not in work.residences or node.op != "parameter":
        work.changed(edge, at, until, nbytes, room)
        if turn is not None:
            work.taken_over(place, edge, item, turn, type, work.pricer.nbytes(type, stored), nbytes)
        return
    here = _is(work, node, "device", "stream")
    work.changed(edge, at, until, work.once(("here", id(nbytes), id(here)), lambda: nbytes * here[None, :]), room)
    sizes = work.sizes(type, item, "gradient", lambda: stored)
    work.held(item, at, live.instants, work.once(("away", id(sizes), id(here)), lambda: sizes * (1 - here)), HOST)
    if turn is not None:
        shared = turn.share.at_most(sizes, type.nbytes)
        key = id(sizes), turn.share, id(here)
        work.held(item, turn.start, min(turn.end, at + 1), work.once(("turn", *key), lambda: shared))
        work.held(item, max(turn.start, at + 1), turn.end, work.once(("turn here", *key), lambda: shared * here))


def temporaries(live: Liveness, pricer: Pricer, at: int) -> list[tuple[int, int, int]]:
    """(from instant, until before, times the parameter's bytes) of what the optimizer makes for the parameter that it
    updates at `at`, where all parameters live on the device.
    """
    made = pricer.temporaries
    if pricer.updates_together:
        return [(live.gathered_at + 1, live.instants, made.together)]
    return [(at, at + 1, made.own - made.left), (at, min(at + 2, live.instants), made.left)]
