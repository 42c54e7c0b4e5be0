"""What the picture of a plan shows: boxes of operators, tables of parameters, outputs, and the edges between them.

Each layer that repeats is drawn once: a node of a further layer stands for its twin in the first, and what a layer
hands to the next goes to a mark that says how many more there are. How it is written is for `autopar.plan.dot`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Node, Ref
from autopar.ir.layout import Layout, show
from autopar.ir.words import count_of
from autopar.plan.tell import (
    Run,
    comms_in,
    comms_of_changes,
    comms_of_delivery,
    comms_of_node,
    home,
    layer_of,
    modes_of,
    runs_of,
    shown_nodes,
)
from autopar.plan.value import PlanValue, is_product
from cost_models.steps import Comm


@dataclass
class Box:
    """One drawn thing: operators of one module in one layout, the parameters of one module, or an output."""

    name: str
    home: str
    nodes: list[Node] = field(default_factory=list[Node])
    sends: list[Comm] = field(default_factory=list[Comm])  # within the operator's own body


@dataclass
class Edge:
    """`sends`: what is sent on the way, each with the name of the parameter, if it is one."""

    sends: list[tuple[str, Comm]] = field(default_factory=list["tuple[str, Comm]"])


class Picture:
    """All that is drawn of a plan; the same plan gives the same boxes in the same order."""

    def __init__(self, plan: PlanValue) -> None:
        self.plan = plan
        self.node_of = plan.graph.by_name
        self.shown = shown_nodes(plan)
        self.modes = modes_of(plan)
        self.runs = runs_of(plan, self.shown)
        self.run_of = {layer: run for run in self.runs for layer in run.layers}
        self.stands_for = self._stands_for()
        self.boxes: list[Box] = []
        self.box_of: dict[str, Box] = {}  # every shown node -> where it, or its twin in the first layer, is drawn
        self.edges: dict[tuple[str, str], Edge] = {}
        self.more: dict[str, tuple[str, str, str]] = {}  # box -> what stands for its value in further layers
        self.fill_of: dict[str, str] = {}  # box of an output -> its layout as told
        self.sources_of: dict[str, tuple[str, ...]] = {name: (name,) for name in self.stands_for}
        self._add_boxes()
        self._add_edges()
        self._add_outputs()

    def told_layout(self, layout: Layout, shape: tuple[int, ...]) -> str:
        """The layout in words, of a value of this shape."""
        return show(layout, self.plan.mesh, len(shape))

    def gives(self, node: Node) -> Layout:
        """The layout of the node's first value."""
        return self.plan.choices[node.name].gives[0]

    def _layer(self, node: Node) -> tuple[Run | None, int]:
        """The run that a node lies in, and the number of its layer in the run."""
        layer = layer_of(home(node), self.run_of)
        run = self.run_of.get(layer)
        return run, run.layers.index(layer) if run is not None else 0

    def _stands_for(self) -> dict[str, str]:
        """Shown node -> the node that is drawn in its place: its twin in the first layer of the run, or itself."""
        found: dict[str, str] = {}
        members: dict[tuple[Run, int], list[str]] = defaultdict(list)
        for node in self.shown:
            run, number = self._layer(node)
            found[node.name] = node.name
            if run is not None:
                members[run, number].append(node.name)
                found[node.name] = members[run, 0][len(members[run, number]) - 1]
        return found

    def _sources(self, name: str) -> tuple[str, ...]:
        """The shown nodes that a value comes from: itself, or those behind views and the like."""
        if name not in self.sources_of:
            found = (source for ref in self.node_of[name].operands for source in self._sources(ref.name))
            self.sources_of[name] = tuple(dict.fromkeys(found))
        return self.sources_of[name]

    def _new_box(self, where: str) -> Box:
        self.boxes.append(Box(f"n{len(self.boxes)}", where))
        return self.boxes[-1]

    def _add_boxes(self) -> None:
        tables: dict[str, Box] = {}
        for node in self.shown:
            if self.stands_for[node.name] == node.name:
                if node.op == "parameter":
                    if home(node) not in tables:
                        tables[home(node)] = self._new_box(home(node))
                    box = tables[home(node)]
                else:
                    box = self._joined(node) or self._new_box(home(node))
                    box.sends += comms_in(self.plan.choices[node.name].steps)
                box.nodes.append(node)
                self.box_of[node.name] = box
            else:
                self.box_of[node.name] = self.box_of[self.stands_for[node.name]]

    def _joined(self, node: Node) -> Box | None:
        """The box that an operator continues: its only producer's, if module and layout stay and nothing is sent."""
        if node.is_source or is_product(self.plan.choices[node.name]) or comms_of_node(self.plan, node):
            return None
        sources = [self.node_of[name] for ref in node.operands for name in self._sources(ref.name)]
        boxes = {id(self.box_of[n.name]): self.box_of[n.name] for n in sources if n.op != "parameter"}
        if len(boxes) != 1 or any(home(n) != node.module for n in sources):
            return None
        (box,) = boxes.values()
        last = box.nodes[-1]
        same = self.gives(last) == self.gives(node) and not box.nodes[0].is_source
        return box if same and self.modes.get(last.name) == self.modes.get(node.name) else None

    def _add_edges(self) -> None:
        for node in self.shown:
            choice = self.plan.choices[node.name]
            run, number = self._layer(node)
            seen: set[tuple[Ref, Layout]] = set()
            for ref, takes, read in zip(node.operands, choice.takes, choice.reads, strict=True):
                if (ref, takes) in seen:
                    continue
                seen.add((ref, takes))
                comms = comms_of_changes(self.plan, read)
                for source in self._sources(ref.name):
                    its_run, its_number = self._layer(self.node_of[source])
                    if number == 0:
                        self._add_edge(source, self.box_of[node.name].name, comms)
                        comms = []
                    elif run is not None and run == its_run and (its_number, number) == (0, 1):
                        self._add_edge(source, self._further(run, self.box_of[source]), comms)
                        comms = []
                if comms and number == 0:  # sent for a value that comes from nowhere: a mask, a position
                    self.box_of[node.name].sends += comms

    def _further(self, run: Run, box: Box) -> str:
        """The mark that stands for further layers behind a box of the first one."""
        name = f"{box.name}_more"
        count = len(run.layers) - 1
        told = f"{count_of(count, 'more layer')} like this"
        self.more[box.name] = run.layers[0], name, told
        return name

    def _add_edge(self, source: str, target: str, comms: Sequence[Comm]) -> None:
        box = self.box_of[source]
        if box.name == target and not comms:
            return
        start = box.name
        if self.stands_for[source] != source and box.name in self.more:
            start = self.more[box.name][1]  # the value of the last layer
        node = self.node_of[source]
        what = node.target.rpartition(".")[2] if node.op == "parameter" else ""
        sends = self.edges.setdefault((start, target), Edge()).sends
        sends += [(what, comm) for comm in comms if (what, comm) not in sends or not target.endswith("_more")]

    def _add_outputs(self) -> None:
        for result, delivery in zip(self.plan.graph.results, self.plan.deliveries, strict=True):
            if result.kind == "output" and result.ref is not None and delivery is not None:
                type = self.plan.graph.type_of(result.ref)
                box = self._new_box("")
                box.nodes.append(Node(f"output {result.target}", "output", (), (), (type,), target=result.target))
                self.fill_of[box.name] = self.told_layout(delivery.layout, type.shape)
                comms = comms_of_delivery(self.plan, delivery)
                for source in self._sources(result.ref.name):
                    self._add_edge(source, box.name, comms)
                    comms = []


@dataclass
class Tree:
    """Boxes by module path; `below` by full path."""

    boxes: list[Box] = field(default_factory=list[Box])
    below: dict[str, Tree] = field(default_factory=dict[str, "Tree"])

    @property
    def size(self) -> int:
        return len(self.boxes) + sum(tree.size for tree in self.below.values())


def tree_of(boxes: Iterable[Box]) -> Tree:
    """The boxes in the modules that they belong to."""
    root = Tree()
    for box in boxes:
        at, parts = root, box.home.split(".") if box.home else []
        for count in range(1, len(parts) + 1):
            at = at.below.setdefault(".".join(parts[:count]), Tree())
        at.boxes.append(box)
    return root
