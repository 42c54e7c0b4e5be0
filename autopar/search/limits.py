"""Limits of memory: what a little more of it would save, and what is short where no plan fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autopar.assemble.builder import DEVICE, HOST
from autopar.assemble.liveness import liveness
from autopar.assemble.problem import output_name
from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.graph import Graph, Node, batch_size, gives_loss
from autopar.search.memory_options import ALLOWED
from solver import Shortage, Solution

CERTAIN = 0.05  # of the cost: prices belong to a bound, and where that lies far from the plan they say little of it
GIB = 2**30
TOGETHER = "if the others were larger"  # the solver's word for limits of which none alone is too small
VALUES, WEIGHTS = "values of the step", "parameters with their gradients and optimizer states"
OUTPUT = output_name("")[:-1]  # how the names of outputs begin in problems
SAFE = "counted on the safe side"
# What to allow where most is held by that; offload-optimizer, too, for those who have `autopar.optim`.
ALLOWS = {VALUES: ("recompute", "offload-activations"), WEIGHTS: ("offload-parameters",)}


def prices_of(solution: Solution) -> dict[str, float | int | str]:
    """`ms_per_gib:TIER` for each tier whose limit binds, for `Plan.search`: by the prices of the relaxation that the
    proven bound comes of. There the first bytes save so much and no more of them save more; whole choices may.
    """
    found: dict[str, float | int | str] = {}
    if solution.picks is None or solution.gap > CERTAIN:
        return found
    for tier in (DEVICE, HOST):
        price = sum(price for (resource, _), price in solution.prices.items() if resource == tier)
        if price > 0:
            found[f"ms_per_gib:{tier}"] = price * GIB * 1e3
    return found


def picks_or_raise(
    solution: Solution,
    graph: Graph,
    memory: float | None,
    time_limit_s: float,
    closed: Collection[str],
    policy: str | None,
) -> tuple[int, ...]:
    """The picks; without any, the reason: Infeasible, or NoAnswerInTime. Arguments as in `nothing_fits`."""
    if solution.picks is not None:
        return solution.picks
    if solution.status == "infeasible":
        raise _infeasible(solution, graph, memory, closed, policy)
    raise NoAnswerInTime(
        f"no plan was found within {time_limit_s:g} s; give the search more time (--time-limit), or more memory"
    )


def _infeasible(
    solution: Solution, graph: Graph, memory: float | None, closed: Collection[str], policy: str | None
) -> Infeasible:
    explanation = solution.explanation
    shortages = explanation.shortages if explanation is not None else ()
    shortage = min(shortages, key=lambda one: one.resource != DEVICE, default=None)
    if shortage is None and explanation is not None and memory is not None and TOGETHER in explanation.text:
        return Infeasible(
            f"no plan fits in {size(memory)} per rank together with what the host has; each of the two would do if the "
            "other were larger. Give more memory or more ranks, or make the batch smaller."
        )
    if shortage is None and memory is not None and explanation is not None and not explanation.contradictory:
        return Infeasible(f"{'no plan' if policy is None else f'no {policy} plan'} fits in {size(memory)} per rank.")
    if shortage is None or memory is None:
        return Infeasible(
            "no combination of strategies is consistent. Where pin= or a policy says that a parameter lies on the "
            "host which only values read that are run again, save one of these; else this is a defect of autopar, "
            "please report the model"
        )
    told = nothing_fits(shortage, graph, memory, closed, policy)
    if shortage.resource != DEVICE:
        return Infeasible(told)
    return Infeasible(told, shortage.at_least, shortage.enough)


def nothing_fits(shortage: Shortage, graph: Graph, memory: float, closed: Collection[str], policy: str | None) -> str:
    """The least that would do, when and for what, and what would help most.

    `graph`: that of the problem's instants; `memory`: the limit of the device; `closed`: ways that make sense on the
    machine, but may not be used.
    """
    node_of = graph.by_name
    of = "" if shortage.resource == DEVICE else f" of the {shortage.resource}"
    if shortage.enough is None:
        least = f"at least {size(shortage.at_least)}{of} is needed ({SAFE})"
    elif shortage.enough <= shortage.at_least * (1 + 1e-6):
        least = f"the least that would do is {size(shortage.enough)}{of} ({SAFE})"
    else:
        least = (
            f"the least that would do lies between {size(shortage.at_least)} ({SAFE}) and {size(shortage.enough)}{of}, "
            "for which a plan was found"
        )
    what = "no plan" if policy is None else f"no {policy} plan"
    if shortage.resource == DEVICE:
        room = f"{size(memory)} per rank"
    else:
        room = f"{size(memory)} of the device and {size(shortage.limit)} of its {shortage.resource} per rank"
    if shortage.enough is None:  # no plan is known, and so no peak
        return f"{what} fits in {room}: {least}. {_help(shortage, graph, closed if policy is None else ())}"
    node = node_of.get(liveness(graph).node_at[shortage.instant])
    where = "the optimizer makes its step" if node is None else f"{_called(node)} runs in {node.phase}"
    told = [f"{what} fits in {room}: {least}, at the peak while {where}."]
    if shortage.tenants:
        tenants = "; ".join(f"{_tenant(name, node_of)} {size(nbytes)}" for name, nbytes in shortage.tenants)
        told.append(f"The five largest tenants there: {tenants}.")
    told.append(_help(shortage, graph, closed if policy is None else ()))
    return " ".join(told)


IN_ROUNDS = (
    " In micro-batches a search leaves parameters on the device; a pin puts them on the host (--pin "
    "'layers.*=offload-parameters', pin={'layers.*': 'offload-parameters'})."
)


def _help(shortage: Shortage, graph: Graph, closed: Collection[str]) -> str:
    node_of, gradients = graph.by_name, {r.ref.name for r in graph.results if r.kind == "gradient" and r.ref}
    held = dict.fromkeys((VALUES, WEIGHTS), 0.0)
    for name, nbytes in shortage.tenants:
        ends = [end.removesuffix(" in backward") for end in name.split(" -> ")]
        of_weight = any(end in gradients or (end in node_of and node_of[end].op == "parameter") for end in ends)
        held[WEIGHTS if of_weight else VALUES] += nbytes
    most = max(held, key=lambda kind: held[kind])
    others = ["give more ranks or more memory"] if most == VALUES else ["give more memory, or make the batch smaller"]
    first = "make the batch smaller" if most == VALUES else "give more ranks"
    if shortage.resource == HOST:
        return f"Give a machine with more memory beside its devices, or {first}."
    if not shortage.tenants:
        return "Give more memory or more ranks, or make the batch smaller."
    if ways := [word for word in ALLOWS[most] if ALLOWED[word] in closed]:
        others.insert(0, f"let --allow (allow=) have {' and '.join(ways)}, too")
    if gradients and any(name.startswith(OUTPUT) for name, _ in shortage.tenants) and gives_loss(graph):
        others.insert(0, "leave out what training does not read beside the loss (--outputs loss, outputs='loss')")
    if most == VALUES and gradients and batch_size(graph) > 1:  # rows of one micro-batch, which others can have
        more = "more micro-batches" if graph.rounds.count > 1 else "micro-batches"
        others.insert(0, f"run the step in {more} (--micro-batches auto, micro_batches='auto')")
    all_of_it = sum(held.values())
    share = f"{'all' if held[most] == all_of_it else size(held[most])} of these tenants' {size(all_of_it)} are {most}"
    pinned = IN_ROUNDS if graph.rounds.count > 1 and held[WEIGHTS] else ""
    return f"What would help most: {first}, for {share}; else {', or '.join(others)}.{pinned}"


def _called(node: Node) -> str:
    return f"%{node.name} ({node.module or node.op})"


def _tenant(name: str, node_of: Mapping[str, Node]) -> str:
    """What an item or an edge of the problem is in the model."""

    def called(end: str) -> str:
        node = node_of.get(end)
        if node is None:
            return end
        return node.target if node.op in ("parameter", "buffer", "input") else f"%{end}"

    one, arrow, other = name.partition(" -> ")
    if not arrow:
        node = node_of.get(name)
        at = f" ({node.module})" if node is not None and node.module and not node.is_source else ""
        return called(name) + at
    reader = node_of.get(other)
    if reader is not None and reader.op == "parameter":
        return f"gradient of {reader.target}"
    at = f" ({reader.module})" if reader is not None and reader.module else ""
    return f"{called(one)} as {called(other)}{at} takes it"


def size(nbytes: float) -> str:
    """`12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError
