"""What each module does in a plan: one entry for all that are equal, in the order in which forward comes to them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from autopar.ir.layout import show
from autopar.ir.precision import CAST
from autopar.ir.work import FETCH, STORE, VIEWS
from autopar.plan.patterns import patterns
from autopar.plan.reading import is_weighted, layouts_told, parameters_of, split_of, weights_of
from autopar.plan.tell import (
    Traffic,
    backward_homes,
    comms_in,
    comms_of_changes,
    comms_of_delivery,
    comms_of_node,
    deliveries_of,
    home,
    modes_of,
    shown_nodes,
    traffic,
)
from autopar.plan.value import PlanValue, is_product, read_once
from cost_models.steps import Comm

PARTS = ("weights", "activations", "own", "backward", "gradients")
RESIDES = {"host": "on the host", "stream": "states on the host"}
QUIET = (*VIEWS, STORE, FETCH, CAST)  # of which nothing is to be said but what they send


@dataclass(frozen=True)
class Module:
    """Equal modules. `pattern`: `h.*.mlp`; `names`: those that it stands for; "" is the model itself.

    `weights`: (name, type, layout, where it lives if not on the device) of each parameter; `does`: operators, each
    once; `splits`: what each axis splits of its products; `makes`: type and layout of its last value; `kept`: what
    becomes of values for backward. `sends`: what one of the modules makes a rank receive, by part of `PARTS`: for
    forward to bring weights and activations into the layouts that it takes, in its own operators and to hand on
    results; for backward, and to bring its gradients where they belong.
    """

    pattern: str
    names: tuple[str, ...]
    weights: tuple[tuple[str, str, str, str], ...]
    does: tuple[str, ...]
    splits: tuple[str, ...]
    makes: tuple[str, str] | None
    kept: tuple[str, ...]
    sends: dict[str, Traffic]


@dataclass
class _Found:
    """Of one module, in the order of the graph."""

    weights: list[tuple[str, str, str, str]] = field(default_factory=list[tuple[str, str, str, str]])
    does: list[str] = field(default_factory=list[str])
    splits: list[str] = field(default_factory=list[str])
    makes: tuple[str, str] | None = None
    kept: list[str] = field(default_factory=list[str])
    sends: dict[str, list[Comm]] = field(default_factory=lambda: {part: list[Comm]() for part in PARTS})


def modules_of(plan: PlanValue) -> tuple[Module, ...]:
    """Every module with parameters, operators or traffic of its own, in exactly one entry."""
    found: dict[str, _Found] = defaultdict(_Found)
    _add_forward(plan, found)
    _add_parameters(plan, found)
    _add_backward(plan, found)
    alike: dict[str, list[str]] = defaultdict(list)
    place: dict[str, int] = {}
    for number, (name, of) in enumerate(found.items()):
        told = _module("", (), of)
        if told != _module("", (), _Found()):
            alike[repr(told)].append(name)
            place[name] = number
    groups = [group for one in patterns(alike).values() for group in one.items()]
    groups.sort(key=lambda group: place[group[1][0]])
    return tuple(_module(pattern, names, found[names[0]]) for pattern, names in groups)


def _module(pattern: str, names: tuple[str, ...], of: _Found) -> Module:
    sends = {part: traffic(comms) for part, comms in of.sends.items() if comms}
    kept = tuple(f"{of.kept.count(one)} {one}" for one in dict.fromkeys(of.kept))
    splits = tuple(dict.fromkeys(of.splits))
    does = tuple(f"{one} x{count}" if count > 1 else one for one, count in Counter(of.does).items())
    return Module(pattern, names, tuple(of.weights), does, splits, of.makes, kept, sends)


def _add_forward(plan: PlanValue, found: dict[str, _Found]) -> None:
    weight_of, modes, node_of = weights_of(plan.graph), modes_of(plan), plan.graph.by_name
    shown = {node.name for node in shown_nodes(plan)}
    for node in plan.graph.nodes:
        if node.phase != "forward" or node.is_source:
            continue
        choice, of = plan.choices[node.name], found[home(node)]
        for position, read in read_once(node, choice).items():
            comms, weight = comms_of_changes(plan, read), weight_of.get(node.operands[position].name)
            if weight is None:
                of.sends["activations"] += comms
            else:  # a cast belongs to no module
                found[home(node) or home(node_of[weight])].sends["weights"] += comms
        of.sends["own"] += comms_in(choice.steps)
        if node.name in modes:
            of.kept.append(modes[node.name])
        if node.name in shown and node.op not in QUIET:
            of.does.append(_called(node.op))
            type = node.outputs[0]
            if type is not None:
                of.makes = str(type), show(choice.gives[0], plan.mesh, len(type.shape))
            if is_product(choice):
                weighted = is_weighted(node, weight_of)
                of.splits += [
                    f"{axis} splits {what}"
                    for place, axis in enumerate(plan.mesh.names)
                    if (what := split_of(choice, place, weighted)) != "nothing"
                ] or ["repeated on every rank"]
    for kind in ("output", "buffer"):
        for ref, delivery in deliveries_of(plan, kind).values():
            found[home(node_of[ref.name])].sends["own"] += comms_of_delivery(plan, delivery)


def _add_parameters(plan: PlanValue, found: dict[str, _Found]) -> None:
    gradients = deliveries_of(plan, "gradient")
    for node, type in parameters_of(plan):
        layout = layouts_told(plan, node)
        of, name = found[home(node)], node.target.rpartition(".")[2]
        of.weights.append((name, str(type), layout, RESIDES.get(plan.residence.get(node.target, ""), "")))
        if node.target in gradients:
            of.sends["gradients"] += comms_of_delivery(plan, gradients[node.target][1])


def _add_backward(plan: PlanValue, found: dict[str, _Found]) -> None:
    node_of = plan.graph.by_name
    for name, where in backward_homes(plan).items():
        found[where].sends["backward"] += comms_of_node(plan, node_of[name])


def _called(op: str) -> str:
    """`aten.native_layer_norm.default` -> `native_layer_norm`; an einsum is a product."""
    if op == "autopar.einsum":
        return "product"
    return "attention" if "attention" in op else op.partition(".")[2].partition(".")[0]
