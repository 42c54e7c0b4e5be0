"""What the picture and the text of a plan have in common: sizes in words, traffic, and which layers are equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from autopar.ir.graph import Arg, Node, Ref, TensorType
from autopar.ir.work import FETCH, STORE, VIEWS
from autopar.plan.value import Delivery, PlanValue, is_product, read_once
from autopar.price.reshard import Reshard
from cost_models.steps import Comm, Step, received_bytes, unrolled

Traffic = dict[tuple[str, str], int]  # (collective, axis) -> bytes that one rank receives


def human(nbytes: float) -> str:
    """`1.50 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.{_digits(nbytes)}f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.{_digits(nbytes)}f} GiB"


def _digits(number: float) -> int:
    return 2 if number < 10 else 1 if number < 100 else 0


# --- traffic ---------------------------------------------------------------------------------------------------------


def comms_in(steps: Iterable[Step]) -> list[Comm]:
    """The collectives among steps that move something."""
    return [step for step in unrolled(steps) if isinstance(step, Comm) and step.ranks > 1]


def comms_of_changes(plan: PlanValue, changes: Sequence[Reshard]) -> list[Comm]:
    return comms_in(step for change in changes for step in change.steps(plan.mesh.size(change.axis)))


def comms_of_delivery(plan: PlanValue, delivery: Delivery) -> list[Comm]:
    return comms_of_changes(plan, (*delivery.changes, *delivery.once))


def comms_of_node(plan: PlanValue, node: Node) -> list[Comm]:
    """What a node makes one rank send: to bring its operands into the layouts it takes, then in its own body."""
    choice = plan.choices[node.name]
    before = [comm for read in read_once(node, choice).values() for comm in comms_of_changes(plan, read)]
    return before + comms_in(choice.steps)


def traffic(comms: Iterable[Comm]) -> Traffic:
    total: Traffic = defaultdict(int)
    for comm in comms:
        total[comm.collective, comm.axis] += received_bytes(comm)
    return dict(sorted(total.items()))


def traffic_by_part(plan: PlanValue) -> dict[str, Traffic]:
    """Traffic of the forward pass, the backward pass, and of bringing gradients and outputs into their layouts."""
    parts: dict[str, list[Comm]] = {"forward": [], "backward": [], "gradients": [], "outputs": []}
    for node in plan.graph.nodes:
        parts[node.phase] += comms_of_node(plan, node)
    for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
        if delivery is not None:
            parts["gradients" if result.kind == "gradient" else "outputs"] += comms_of_delivery(plan, delivery)
    return {part: traffic(comms) for part, comms in parts.items()}


# --- what is not kept on the device --------------------------------------------------------------------------------

RECOMPUTED, OFFLOADED = "recomputed", "offloaded"


def modes_of(plan: PlanValue) -> dict[str, str]:
    """Forward node -> what becomes of it, where it is not kept until backward reads it."""
    found: dict[str, str] = {}
    for node in plan.graph.nodes:
        if node.op == STORE:
            found[node.operands[0].name] = OFFLOADED
        elif node.target and not node.is_source and node.op not in VIEWS:
            found[node.target] = RECOMPUTED
    return found


# --- what is worth showing -------------------------------------------------------------------------------------------


def carries(type: TensorType | None) -> bool:
    """Whether a value is of the kind that gradients flow through, and more than a number."""
    return type is not None and type.numel > 1 and type.dtype.startswith(("float", "bfloat", "complex"))


def shown_nodes(plan: PlanValue) -> list[Node]:
    """The nodes of the forward pass that a reader wants to see: on the way from parameters and inputs to the outputs.

    Left out: other looks at a value (views), copies between device and host, constants, numbers, masks and positions;
    but never a node for which something is sent.
    """
    alive: set[str] = set()
    shown: list[Node] = []
    outputs = {r.ref.name for r in plan.graph.results if r.ref is not None and r.kind == "output"}
    for node in plan.graph.nodes:
        if node.phase != "forward":
            continue
        if node.is_source:
            if node.op in ("parameter", "input"):
                shown.append(node)
            if node.op == "parameter" or (node.op == "input" and carries(node.outputs[0])):
                alive.add(node.name)
            continue
        flows = any(ref.name in alive for ref in node.operands) and any(carries(type) for type in node.outputs)
        if flows:
            alive.add(node.name)
        if (flows and node.op not in (*VIEWS, STORE, FETCH)) or node.name in outputs or comms_of_node(plan, node):
            shown.append(node)
    return shown


# --- equal layers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers that are equal in all that is shown of them."""

    layers: tuple[str, ...]

    @property
    def label(self) -> str:
        """`transformer.h.0 .. h.11 (12 equal layers)`."""
        first, last = self.layers[0], self.layers[-1]
        if first == last:
            return first
        return f"{first} .. {'.'.join(last.split('.')[-2:])} ({len(self.layers)} equal layers)"


def home(node: Node) -> str:
    """The module that a node belongs to; a parameter or buffer, to the module that owns it."""
    return node.target.rpartition(".")[0] if node.op in ("parameter", "buffer") else node.module


def backward_homes(plan: PlanValue) -> dict[str, str]:
    """Backward node -> its module. Where it has none: a value kept for several readers counts to the module of the
    first, a sum of gradients to that of the latest value it reads."""
    homes: dict[str, str] = {}
    at: dict[str, int] = {}
    reader: dict[str, str] = {}
    for number, node in enumerate(plan.graph.nodes):
        latest = max((ref.name for ref in node.operands), key=lambda name: at[name], default="")
        inherits = node.phase == "backward" and latest != ""
        homes[node.name] = home(node) or (homes[latest] if inherits else "")
        at[node.name] = number
        for ref in node.operands:
            reader.setdefault(ref.name, home(node))
    return {
        node.name: (reader.get(node.name, "") if node.op in VIEWS and not node.module else "") or homes[node.name]
        for node in plan.graph.nodes
        if node.phase == "backward"
    }


def layer_of(path: str, layers: Mapping[str, object]) -> str:
    """The layer that `path` lies in, or ""."""
    parts = path.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if prefix in layers), "")


def runs_of(plan: PlanValue, shown: Sequence[Node]) -> list[Run]:
    """Runs of equal layers, in the order of their numbers. A layer unlike its neighbours is a run of its own.

    A layer is a module with a number for a name that has modules below it (`transformer.h.3`), the outermost such.
    """
    layers = dict.fromkeys(filter(None, (_outermost(home(node)) for node in shown)))
    told: dict[str, list[object]] = {layer: [] for layer in layers}
    modes = modes_of(plan)
    backward: dict[str, list[str]] = {layer: [] for layer in layers}
    names: dict[str, dict[str, int]] = {layer: {} for layer in layers}
    for node in shown:
        if layer := layer_of(home(node), layers):
            names[layer][node.name] = len(names[layer])
            resides = plan.residence.get(node.target) if node.op == "parameter" else modes.get(node.name)
            told[layer].append((_told(plan, node, layer, names[layer]), resides))
    homes = backward_homes(plan)
    for node in plan.graph.nodes:
        if node.phase == "backward" and (layer := layer_of(homes[node.name], layers)):
            comms = comms_of_node(plan, node)
            if comms or is_product(plan.choices[node.name]):
                below = homes[node.name].removeprefix(layer)
                backward[layer].append(repr((node.op, below, plan.choices[node.name].roles, node.outputs, comms)))
    for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
        if result.kind == "gradient" and (layer := layer_of(result.target, layers)):
            told[layer].append((result.target.removeprefix(layer), delivery))
    runs: list[list[str]] = []
    for layer in sorted(layers, key=_natural):
        before = runs[-1][-1] if runs else ""
        follows = before.rpartition(".")[0] == layer.rpartition(".")[0]
        if follows and told[before] == told[layer] and sorted(backward[before]) == sorted(backward[layer]):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [Run(tuple(run)) for run in runs]


def _outermost(path: str) -> str:
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def _told(plan: PlanValue, node: Node, layer: str, names: Mapping[str, int]) -> object:
    """What is shown of a node. Values from outside the layer, and through what is not shown, count as one."""
    choice = plan.choices[node.name]
    sources = tuple(names.get(ref.name, -1) for ref in node.operands)
    plain = tuple(repr(arg) for arg in (*node.args, *node.kwargs) if not _has_ref(arg))
    target = node.target.removeprefix(layer) if node.is_source else node.target
    below = home(node).removeprefix(layer)
    comms = tuple(comms_of_node(plan, node))
    return node.op, target, below, sources, plain, node.outputs, choice.roles, choice.takes, choice.gives, comms


def _has_ref(arg: Arg) -> bool:
    if isinstance(arg, tuple):
        return any(_has_ref(part) for part in cast("tuple[Arg, ...]", arg))
    return isinstance(arg, Ref)


def deliveries_of(plan: PlanValue, kind: str) -> dict[str, tuple[Ref, Delivery]]:
    """Target -> value and delivery of the results of one kind that exist."""
    return {
        result.target: (result.ref, delivery)
        for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True)
        if result.kind == kind and result.ref is not None and delivery is not None
    }
