"""settle: the solver's picks say which graph runs, what each of its nodes does, and where parameters reside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.assemble.activations import Rematerialization
from autopar.assemble.problem import Assembled
from autopar.ir.graph import Graph, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.work import FETCH, STORE
from autopar.propose.strategies import Strategy, moved
from autopar.rewrite import DROP, RECOMPUTE, narrowed

Pick = Callable[[str], Strategy]  # of a node, or an output


@dataclass(frozen=True)
class Settled:
    """`graph`: what runs. `pick(name)`: the strategy of a node or output. `residence`: as in `Plan`."""

    graph: Graph
    pick: Pick
    residence: Mapping[str, str]


def picked(assembled: Assembled, picks: Sequence[int]) -> Pick:
    """node or output name -> the strategy that was picked for it."""
    return lambda name: assembled.options[assembled.item_of[name]][picks[assembled.item_of[name]]]


def came(back: Rematerialization, picks: Sequence[int]) -> tuple[str, Strategy | None]:
    """How a forward value comes back."""
    return back.options[0 if back.item is None else picks[back.item]]


def tidied(assembled: Assembled, picks: Sequence[int]) -> tuple[int, ...]:
    """The same picks, but what nobody reads in backward is dropped: it costs less, and is what the program does."""
    found = list(picks)

    def mode(origin: str) -> str:
        return came(assembled.modes[origin], found)[0]

    for origin in reversed(assembled.modes):  # readers stand behind what they read
        readers = assembled.rereads.get(origin)
        if readers is not None and not any(mode(reader) == RECOMPUTE for reader in readers):
            back = assembled.modes[origin]
            assert back.item is not None
            found[back.item] = next(i for i, (mode, _) in enumerate(back.options) if mode == DROP)
    return tuple(found)


def settled(graph: Graph, assembled: Assembled, picks: Sequence[int], mesh: Mesh) -> Settled:
    """`graph`: what was widened for the problem, if it was (`autopar.rewrite.Widened.base`)."""
    pick = picked(assembled, picks)
    resides = {
        node.target: assembled.residences[item][picks[item]]
        for node in graph.nodes
        if node.op == "parameter"
        for item in (assembled.item_of[node.name],)
    }
    residence = {name: where for name, where in resides.items() if where != "device"}
    hosted = [name for name, where in residence.items() if where == "host"]
    if not assembled.modes and not hosted:
        return Settled(graph, pick, residence)
    chosen = {origin: came(back, picks) for origin, back in assembled.modes.items()}
    before: dict[str, list[Ref]] = defaultdict(list)
    for origin, back in assembled.modes.items():
        if chosen[origin][0] != DROP:
            before[back.again.before] += [Ref(origin, index) for index in back.again.reads]
    runs = narrowed(graph, {origin: mode for origin, (mode, _) in chosen.items()}, hosted, before)
    found: dict[str, Strategy] = {}
    for node in runs.nodes:
        if node.op in (STORE, FETCH):
            (ref,) = node.operands
            found[node.name] = moved(node, found[ref.name].gives[ref.index], mesh)
        elif node.target and not node.is_source:
            again = chosen[node.target][1] if node.target in chosen else None
            found[node.name] = pick(node.target) if again is None else again
        else:
            found[node.name] = pick(node.name)
    return Settled(runs, lambda name: found[name] if name in found else pick(name), residence)
