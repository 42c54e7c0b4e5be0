"""Of the problem: how forward values come back in backward (`autopar.rewrite`).

Each such value has an item of its own: its options are the modes that run nothing (save, offload, drop), then one
strategy after the other in which it may be run again. It comes back in the layouts in which it was made, so readers
still have their edges to the node that made it. Between that node and the item, a matrix says which strategies bring
those layouts back, what offloading costs, and what is held meanwhile; between the item and what a strategy reads, what
reading it once more costs, and that it must be there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autopar.assemble.builder import HOST, Array, Assembly
from autopar.assemble.liveness import Read, Share
from autopar.ir.graph import Node, Ref
from autopar.ir.work import VIEWS
from autopar.price.overlap_discounts import costs_of, seconds_of
from autopar.propose.strategies import Strategy
from autopar.rewrite import DROP, OFFLOAD, RECOMPUTE, SAVE, Again
from autopar.rewrite.expose_choices import LOOK, looked_at
from cost_models.steps import Move


@dataclass(frozen=True, slots=True)
class Rematerialization:
    """How a forward value may come back: `options` of the `item`, (mode, strategy if it runs again) each. Without an
    item it has one option.
    """

    item: int | None
    options: tuple[tuple[str, Strategy | None], ...]
    again: Again


Modes = dict[str, Rematerialization]  # forward value -> how it may come back


def add_modes(work: Assembly) -> Modes:
    """The items, each with its edge to the node that makes the value."""
    found: Modes = {}
    _find_looks(work)
    for name, again in work.again.items():
        if not again.modes:
            found[again.origin] = Rematerialization(None, ((RECOMPUTE, None),), again)
            continue
        strategies = work.options[work.item_of[again.origin]] if RECOMPUTE in again.modes else ()
        still = [mode for mode in again.modes if mode != RECOMPUTE]
        cost = np.concatenate([np.zeros(len(still)), costs_of(work.pricer, work.shares, strategies)])
        item = work.mode_of[name] = work.add_item(f"{again.origin} in backward", strategies, cost)
        options = (*((mode, None) for mode in still), *((RECOMPUTE, s) for s in strategies))
        found[again.origin] = Rematerialization(item, options, again)
        work.add_edge(work.item_of[name], item, _ways(work, name))
    return found


def has_modes(work: Assembly, name: str) -> bool:
    return name in work.again and bool(work.again[name].modes)


def still_modes(work: Assembly, name: str) -> list[str]:
    return [mode for mode in work.again[name].modes if mode != RECOMPUTE]


def _ways(work: Assembly, name: str) -> Array:
    """Seconds of each mode for each strategy in which the value was made."""
    again, node = work.again[name], work.node_of[name]
    origin = work.item_of[name]
    key = "ways", id(work.options[origin]), again.modes, again.reads, node.outputs

    def made() -> Array:
        options, still = work.options[origin], still_modes(work, name)
        told = [tuple(option.gives[i] for i in again.reads) for option in options]
        cost = np.zeros((len(options), len(still)))
        for column, mode in enumerate(still):
            if mode == OFFLOAD:
                cost[:, column] = sum(_moved(work, size) for i in again.reads for size in (_bytes(work, name, i),))
        if RECOMPUTE not in again.modes:
            return cost
        same = np.array([[one == other for other in told] for one in told])
        return np.concatenate([cost, np.where(same, 0.0, np.inf)], axis=1)

    return work.once(key, made)


def _moved(work: Assembly, sizes: Array) -> Array:
    """Seconds to the host and back."""
    return np.array(
        [
            seconds_of(work.pricer, work.shares, (Move("hbm", "host", int(n)), Move("host", "hbm", int(n))))
            for n in sizes
        ],
        dtype=np.float64,
    )


def _bytes(work: Assembly, name: str, index: int) -> Array:
    """Of a result, in each strategy in which it was made."""
    item, ref = work.item_of[name], Ref(name, index)
    type = work.type(ref)
    key = "made", type, id(work.options[item]), index
    return work.once(key, lambda: work.pricer.nbytes(type, work.gives(item, index)))


def add_rereads(work: Assembly, node: Node) -> None:
    """What running a value again reads, and holds while it runs."""
    item, at = work.mode_of[node.name], work.live.at[node.name]
    if not work.options[item]:
        return
    before = len(still_modes(work, node.name))
    for position, ref in enumerate(node.operands):
        read = node.name, position
        cost, nbytes, room = (_padded(work, array, before) for array in work.read(node, position, item))
        edge = work.add_edge(work.item_of[ref.name], item, cost)
        until = work.needed[Ref(node.name)] if node.op == LOOK else work.live.new_until[read]
        work.changed(edge, at, until, nbytes, room)
        if (turn := work.live.turn_of.get(read)) is not None:
            sizes = _padded(work, work.taken_sizes(node, position, item), before)
            work.taken_over(read, edge, item, turn, work.type(ref), sizes, nbytes)
        if ref.name in work.mode_of and DROP in still_modes(work, ref.name):
            work.add_edge(work.mode_of[ref.name], item, _there(work, ref.name, node.name))
    work.held(item, at, at + 1, _padded(work, work.temporaries(node, item), before))


def rereads(work: Assembly) -> dict[str, tuple[str, ...]]:
    """Forward value that may be dropped -> those that read it when they are run again."""
    found: dict[str, list[str]] = {a.origin: [] for a in work.again.values() if DROP in a.modes}
    for node in work.graph.nodes:
        if (again := work.again.get(node.name)) is not None and RECOMPUTE in again.modes:
            for name in {ref.name for ref in node.operands}:
                if name in work.mode_of and DROP in still_modes(work, name):
                    found[work.again[name].origin].append(again.origin)
    return {origin: tuple(readers) for origin, readers in found.items()}


def _padded(work: Assembly, array: Array, before: int) -> Array:
    """Nothing for the modes that do not run the value again."""
    width = [(0, 0)] * (array.ndim - 1) + [(before, 0)]
    return work.once(("padded", id(array), before, array.ndim), lambda: _kept(work, array, np.pad(array, width)))


def _kept(work: Assembly, array: Array, made: Array) -> Array:
    work.kept.append(array)  # its id is part of a key
    return made


def _there(work: Assembly, storage: str, reader: str) -> Array:
    """What is run again cannot read what was dropped."""
    still, modes = still_modes(work, storage), still_modes(work, reader)
    shape = len(work.costs[work.mode_of[storage]]), len(work.costs[work.mode_of[reader]])
    key = "there", *shape, still.index(DROP), len(modes)

    def made() -> Array:
        cost = np.zeros(shape)
        cost[still.index(DROP), len(modes) :] = np.inf
        return cost

    return work.once(key, made)


def below(work: Assembly, name: str) -> list[str]:
    """The nodes whose storage a value is, through views."""
    return [ref.name for ref in looked_at(Ref(name), work.node_of)]


def _read_last(work: Assembly, ref: Ref) -> int:
    """The instant from which a forward value is held for backward alone. What a view looks at is held as long as the
    forward reads it.
    """
    if (span := work.live.made.get(ref)) is not None:
        return span[1]
    if not work.last_read:
        for node in work.graph.nodes:
            if node.phase == "forward":
                for operand in node.operands:
                    work.last_read[operand.name] = work.live.at[node.name]
    return work.last_read.get(ref.name, work.live.at[ref.name] + 1)


def add_saved(work: Assembly, node: Node, index: int) -> None:
    """Bytes of a result from its last reader in the forward on: while it waits, and then as backward reads it.

    A view that is saved keeps all that it looks at. One that runs again has no bytes of its own: what it looks at stays
    as long as it is needed.
    """
    again, item, mode = work.again[node.name], work.item_of[node.name], work.mode_of[node.name]
    edge = work.add_edge(item, mode, _ways(work, node.name))
    work.edges[edge] = (*work.edges[edge][:3], 1)  # the same edge, and not one more
    ref, is_look = Ref(node.name, index), node.op == LOOK
    start, end = work.live.made[ref]
    end = max(end, work.needed.get(Ref(node.name) if is_look else ref, 0))
    sizes, still = _bytes(work, node.name, index), still_modes(work, node.name)
    columns = len(work.costs[mode])

    def only(sizes: Array, *modes: str) -> Array:
        """The sizes where the mode is one of these."""
        told = [*still, *[RECOMPUTE] * (columns - len(still))]
        key = "only", id(sizes), tuple(told), modes
        return work.once(key, lambda: np.outer(sizes, [float(mode in modes) for mode in told]))

    if index not in again.reads:
        work.held_between(edge, start, end, only(sizes, RECOMPUTE))
        return
    gone = _read_last(work, Ref(again.origin, index))
    if is_look:
        (storage,) = looked_at(Ref(again.origin, index), work.node_of)
        share = Share(work.type(storage).nbytes, work.type(ref).nbytes)
        if index == again.reads[0]:
            whole = work.once(("looked at", id(sizes), share), lambda: share.at_most(sizes, work.type(ref).nbytes))
            work.held_between(edge, gone, end, only(whole, SAVE))
        work.held_between(edge, start, end, only(sizes, OFFLOAD))
    else:
        work.held_between(edge, gone, start, only(sizes, SAVE))
        if DROP in still:
            work.held_between(edge, start, end, only(sizes, SAVE, OFFLOAD, RECOMPUTE))
        else:
            work.held(item, start, end, sizes)
    if OFFLOAD in still:
        # it is fetched before its first reader that runs, which may be any of them
        work.held_between(edge, work.live.at[again.origin], end, only(sizes, OFFLOAD), HOST)


def _find_looks(work: Assembly) -> None:
    """Until when views that run again need what they look at; and of the layout changes that `liveness` takes for the
    last ones to need something, those that may be not.
    """
    live, node_of = work.live, work.node_of
    for result in work.graph.results:
        if result.ref is not None:
            work.needed[_value(work, result.ref)] = live.instants
    for node in reversed(work.graph.nodes):
        for ref in node.operands:
            value = _value(work, ref)
            until = max(live.at[node.name] + 1, work.needed.get(Ref(node.name), 0) if _is_view(node) else 0)
            work.needed[value] = max(work.needed.get(value, 0), until)
    looks = {
        _value(work, ref) for node in work.graph.nodes if node.op == LOOK for ref in (Ref(node.name), *node.operands)
    }
    work.needed = {value: until for value, until in work.needed.items() if value in looks}
    kept = {
        storage
        for again in work.again.values()
        if SAVE in again.modes
        for index in again.reads
        for storage in looked_at(Ref(again.origin, index), node_of)
    }

    def is_last(by: Read | int) -> bool:
        ref = work.graph.results[by].ref if isinstance(by, int) else node_of[by[0]].operands[by[1]]
        assert ref is not None
        below = {*looked_at(ref, node_of)}
        return not below & kept and not {_value(work, one) for one in below} & looks

    gone = {by: share for by, share in live.gone.items() if is_last(by)}
    work.live = replace(live, gone=gone)
    work.stay = kept | looks


def _is_view(node: Node) -> bool:
    return node.op in VIEWS or node.op == LOOK


def _value(work: Assembly, ref: Ref) -> Ref:
    """All results of a view are one value."""
    return Ref(ref.name) if _is_view(work.node_of[ref.name]) else ref
