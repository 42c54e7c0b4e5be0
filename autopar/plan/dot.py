"""A plan in Graphviz's language: its forward pass as `autopar.plan.picture` draws it, and a legend.

Boxes are operators, tables are the parameters of a module, both coloured by layout. What is sent stands at the edges,
in the colour of the mesh axis. The backward pass mirrors the forward pass and would double the picture; what it sends
is written at the layer it belongs to, what a gradient sends beside its parameter, and the sums in the legend.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from html import escape

from autopar.ir.graph import Node
from autopar.plan.picture import Box, Edge, Picture, Tree, tree_of
from autopar.plan.tell import (
    Run,
    backward_homes,
    comms_of_delivery,
    comms_of_node,
    deliveries_of,
    human,
    layer_of,
    traffic,
    traffic_by_part,
)
from autopar.plan.value import PlanValue, is_product
from cost_models.steps import Comm, received_bytes

WHOLE = "#f4f4f4"
FILLS = (  # after ColorBrewer's Set3 and Pastel1: light enough for black text
    "#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5", "#d9c8a9", "#bc80bd",
    "#ccebc5", "#ffed6f", "#9fd8f0", "#e5a3a3", "#a3b8e5", "#c9e5a3",
)  # fmt: skip
LEFT = '<BR ALIGN="LEFT"/>'
TABLE = '<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" COLOR="#999999" BGCOLOR="white">'
FETCHED = "#c51b7d"  # what comes from the host
RESIDES = {"host": "on the host", "stream": "states on the host"}
AXIS_COLOURS = ("#b2182b", "#2166ac", "#1b7837", "#762a83", "#b35806", "#35978f")


def to_dot(plan: PlanValue) -> str:
    """Graphviz source; `dot -Tsvg` draws it. The same plan gives the same text."""
    return "\n".join(_Text(Picture(plan)).lines()) + "\n"


class _Text:
    """A picture as lines of Graphviz's language."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.plan = picture.plan
        self.gradients = deliveries_of(self.plan, "gradient")
        self.backward_homes = backward_homes(self.plan)
        self.colours = self._colours()

    def lines(self) -> Iterator[str]:
        yield "digraph plan {"
        yield '  graph [fontname="Helvetica", fontsize=13, labelloc=t, nodesep=0.25, ranksep=0.3, compound=true,'
        yield f"    label=<{self._title()}>];"
        yield '  node [fontname="Helvetica", fontsize=10, shape=box, style="filled,rounded", margin="0.1,0.04"];'
        yield '  edge [fontname="Helvetica", fontsize=9, color="#666666", arrowsize=0.6];'
        yield from self._legend()
        yield from self._cluster(tree_of(self.picture.boxes), "", 1)
        for (source, target), edge in self.picture.edges.items():
            yield f"  {source} -> {target}{self._edge(edge, target.endswith('_more'))};"
        yield "}"

    def _title(self) -> str:
        plan = self.plan
        limit = {} if plan.memory_limit is None else {"hbm": f" of {human(plan.memory_limit)}"}
        peaks = sorted(plan.peak_bytes.items())
        peak = ", ".join(f"{human(nbytes)}{limit.get(tier, '')} of {tier}" for tier, nbytes in peaks)
        took = f"{plan.predicted_seconds * 1e3:.3f} ms a step, {plan.measure}"
        return f"<B>{escape(f'mesh {plan.mesh} on {plan.hardware}: {took}; peak {peak} per rank')}</B>"

    def _cluster(self, tree: Tree, path: str, depth: int) -> Iterator[str]:
        """A module with its boxes; a chain of modules with one thing inside is drawn as one."""
        pad = "  " * depth
        for box in tree.boxes:
            yield f"{pad}{box.name} [{self._box(box, path)}];"
        for layer, name, told in self.picture.more.values():
            if layer == path:
                yield f'{pad}{name} [shape=plain, style="", fontsize=11, label=<<B>{told}</B>>];'
        for name, below in tree.below.items():
            while not below.boxes and len(below.below) == 1 and name not in self.picture.run_of:
                ((more, below),) = below.below.items()
                name = more
            if below.size == 1 and name not in self.picture.run_of:
                yield from self._cluster(below, path, depth)
                continue
            run = self.picture.run_of.get(name)
            yield f'{pad}subgraph "cluster_{name}" {{'
            label = escape(run.label if run is not None else name.removeprefix(f"{path}."))
            heavy = run is not None
            if run is not None:
                label = f"<B>{label}</B>{self._backward(run)}"
            yield f'{pad}  label=<{label}>; labeljust=l; fontsize={12 if heavy else 10}; style="rounded";'
            yield f'{pad}  color="{"#444444" if heavy else "#bbbbbb"}"; penwidth={1.5 if heavy else 0.8};'
            yield from self._cluster(below, name, depth + 1)
            yield f"{pad}}}"

    def _backward(self, run: Run) -> str:
        """What the backward pass of one layer sends."""
        layer = {run.layers[0]: run}
        homes = self.backward_homes
        nodes = [n for n in self.plan.graph.nodes if n.phase == "backward" and layer_of(homes[n.name], layer)]
        comms = [comm for node in nodes for comm in comms_of_node(self.plan, node)]
        lines = [f"{collective} {human(nbytes)} over {axis}" for (collective, axis), nbytes in traffic(comms).items()]
        each = " of each layer" if len(run.layers) > 1 else ""
        told = "; ".join(lines) or "nothing is sent"
        return f'{LEFT}<FONT POINT-SIZE="9">backward{each}: {escape(told)}</FONT>{LEFT}'

    def _box(self, box: Box, path: str) -> str:
        first, last = box.nodes[0], box.nodes[-1]
        if first.op == "parameter":
            return f'shape=plain, style="", label=<{self._table(box, path)}>'
        type = last.outputs[0]
        assert type is not None
        lines: list[str] = []
        if first.op in ("input", "output"):
            name = first.target[2:-2] if first.target.count("[") == 1 and "'" in first.target else first.target
            lines.append(f"<B>{first.op} {escape(name)}</B>")
        else:
            below = box.home.removeprefix(f"{path}.") if box.home != path else ""
            lines += [f"<B>{escape(told)}</B>" for told in filter(None, (below, _operators(box.nodes)))]
            choice = self.plan.choices[first.name]
            if is_product(choice) and (split := roles_told(choice.roles, self.plan.mesh.names)):
                lines.append(escape(split))
        layout = None if first.op == "output" else self.picture.gives(last)
        told = self.picture.fill_of[box.name] if layout is None else self.picture.told_layout(layout, type.shape)
        lines.append(escape(f"{_shape(type.shape)}  {told}"))
        lines += [self._sent("", comm) for comm in box.sends]
        fill = self.colours.get(told, WHOLE)
        shape = "" if first.op not in ("input", "output") else "shape=ellipse, style=filled, "
        match self.picture.modes.get(last.name):
            case "recomputed":
                shape += 'style="filled,rounded,dashed", '
            case "offloaded":
                shape += f'color="{FETCHED}", penwidth=2, '
            case _:
                pass
        return f'{shape}fillcolor="{fill}", label=<{"<BR/>".join(lines)}>'

    def _table(self, box: Box, path: str) -> str:
        """The parameters of a module: name, shape, layout, and what bringing the gradient into that layout sends."""
        alike: dict[tuple[str, str, str, tuple[str, ...], str], list[str]] = {}
        for node in box.nodes:
            (type,) = node.outputs
            assert type is not None
            told, stored = self.picture.told_layout(self.picture.gives(node), type.shape), ""
            if apart := self.plan.choices[node.name].stored:
                stored = f", stored {self.picture.told_layout(apart, type.shape)}"
            comms: list[Comm] = []
            if node.target in self.gradients:
                comms = comms_of_delivery(self.plan, self.gradients[node.target][1])
            where = RESIDES.get(self.plan.residence.get(node.target, ""), "")
            key = _shape(type.shape), told, stored, tuple(self._sent("", comm) for comm in comms), where
            alike.setdefault(key, []).append(node.target.removeprefix(f"{path}.") if path else node.target)
        rows: list[str] = []
        for (shape, told, stored, sent, where), names in alike.items():
            mark = f' <FONT COLOR="{FETCHED}">{where}</FONT>' if where else ""
            rows.append(
                f'<TR><TD ALIGN="LEFT">{escape(", ".join(names))}{mark}</TD><TD>{shape}</TD>'
                f'<TD BGCOLOR="{self.colours.get(told, WHOLE)}">{escape(told + stored)}</TD></TR>'
            )
            if sent:
                each = "each gradient" if len(names) > 1 else "gradient"
                rows.append(f'<TR><TD COLSPAN="3" ALIGN="LEFT">{each}: {LEFT.join(sent)}{LEFT}</TD></TR>')
        return f"{TABLE}{''.join(rows)}</TABLE>"

    def _edge(self, edge: Edge, carried: bool) -> str:
        told = [*dict.fromkeys(self._sent(name, comm) for name, comm in edge.sends)]
        marks: list[str] = []
        if carried:
            marks.append("style=dashed")
        if edge.sends:
            marks.append(f'color="{self._axis_colour(edge.sends[0][1].axis)}", penwidth=1.6')
        if told:
            marks.append(f"label=<{'<BR/>'.join(told)}>")
        return f" [{', '.join(marks)}]" if marks else ""

    def _axis_colour(self, axis: str) -> str:
        return AXIS_COLOURS[self.plan.mesh.places(axis)[0] % len(AXIS_COLOURS)]

    def _sent(self, what: str, comm: Comm) -> str:
        told = f"{what}: " if what else ""
        told += f"{comm.collective} {human(received_bytes(comm))} over {comm.axis}"
        return f'<FONT COLOR="{self._axis_colour(comm.axis)}">{escape(told)}</FONT>'

    # --- legend ------------------------------------------------------------------------------------------------------

    def _colours(self) -> dict[str, str]:
        """Layout as shown -> colour; whole values stay grey. By first use, so that a plan keeps its colours."""
        colours: dict[str, str] = {}
        told = [
            self.picture.fill_of.get(box.name) or self._box_layout(box, node)
            for box in self.picture.boxes
            for node in box.nodes
        ]
        for layout in told:
            if layout.strip("[_, ]") and layout not in colours:
                colours[layout] = FILLS[len(colours)] if len(colours) < len(FILLS) else _spread(len(colours))
        return colours

    def _box_layout(self, box: Box, node: Node) -> str:
        type = node.outputs[0]
        assert type is not None
        return self.picture.told_layout(self.picture.gives(node), type.shape)

    def _legend(self) -> Iterator[str]:
        cell = '<TR><TD BGCOLOR="{}" ALIGN="LEFT">{}</TD></TR>'
        rows = [cell.format(WHOLE, "whole on every rank")]
        rows += [cell.format(colour, escape(told)) for told, colour in self.colours.items()]
        if self.picture.modes or self.plan.residence:
            rows.append('<TR><TD ALIGN="LEFT">dashed: run again in backward</TD></TR>')
            rows.append(f'<TR><TD ALIGN="LEFT"><FONT COLOR="{FETCHED}">fetched from the host</FONT></TD></TR>')
        head = "<TR><TD><B>layout: the axes that split each dim (_ none); +axis: partial sum</B></TD></TR>"
        layouts = f"{TABLE}{head}{''.join(rows)}</TABLE>"
        yield "  subgraph cluster_legend {"
        yield '    label="legend"; style=dotted; color="#888888";'
        yield f'    legend_layouts [shape=plain, style="", label=<{layouts}>];'
        yield f'    legend_traffic [shape=plain, style="", label=<{self._traffic()}>];'
        yield "  }"

    def _traffic(self) -> str:
        """Bytes that one rank receives in a step, by collective, axis and part of the step."""
        parts = {part: found for part, found in traffic_by_part(self.plan).items() if found}
        keys = sorted({key for found in parts.values() for key in found})
        head = "".join(f"<TD><B>{name}</B></TD>" for name in ("received by a rank in a step", "axis", *parts))
        rows = [f"<TR>{head}</TR>"]
        for collective, axis in keys:
            numbers = [found.get((collective, axis)) for found in parts.values()]
            cells = "".join(f'<TD ALIGN="RIGHT">{human(n) if n else ""}</TD>' for n in numbers)
            axis_cell = f'<TD><FONT COLOR="{self._axis_colour(axis)}">{escape(axis)}</FONT></TD>'
            rows.append(f'<TR><TD ALIGN="LEFT">{collective}</TD>{axis_cell}{cells}</TR>')
        if not keys:
            rows.append('<TR><TD COLSPAN="2">nothing is sent</TD></TR>')
        return f"{TABLE}{''.join(rows)}</TABLE>"


def roles_told(roles: Sequence[str], axes: Sequence[str]) -> str:
    """`tensor splits n`; a role that is a partial sum is told as such."""
    told = [f"{axis} {'passes a partial sum' if role.startswith('+') else f'splits {role}'}"
            for role, axis in zip(roles, axes, strict=True) if role]  # fmt: skip
    return ", ".join(told)


def _operators(nodes: Sequence[Node]) -> str:
    """`einsum b s k, k n -> b s n, add`; long chains are cut in the middle."""
    names = [_operator(node) for node in nodes]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, .. {names[-1]} ({len(names)} operators)"


def _operator(node: Node) -> str:
    name = node.op.split(".")[1] if "." in node.op else node.op
    match name:
        case "einsum":
            return f"product {node.args[0]}"
        case "share":
            return "the same value"
        case _:
            return name.strip("_")


def _shape(shape: Sequence[int]) -> str:
    return "\u00d7".join(map(str, shape)) or "scalar"


def _spread(number: int) -> str:
    """More light colours, as unlike as may be: steps of the golden ratio around the colour circle."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.35, 0.95)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"
