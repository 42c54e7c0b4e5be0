"""What a viewer shows of the events of a program: names, and what they are about."""

from __future__ import annotations

from autopar.ir.graph import Graph, Node
from autopar.ir.words import count_of
from autopar.lower.program import (
    Copy,
    Inner,
    Instruction,
    Launch,
    Local,
    Operator,
    Read,
    Receive,
    Run,
    Send,
    SendTo,
    Transfer,
    Update,
    Wait,
    Within,
)
from cost_models.steps import HOST, Comm, Compute, Loop, Move, Step

About = tuple[tuple[str, str | int], ...]


class Teller:
    """Names of what the program of a graph does."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.node_of = graph, graph.by_name
        self.parameters = {node.target: node for node in graph.nodes if node.op == "parameter"}
        self.abouts: dict[str, About] = {}

    def name(self, instruction: Instruction, step: Step | None) -> str:
        """Of an event of the instruction: of one of its steps, or with None of a wait, or of what takes no time."""
        match instruction:
            case Run(Operator(node), steps):
                if step is None:
                    return f"wait for {node}" if steps else node
                return node if step is steps[0] else f"{node}: {told(step)}"
            case Run(Inner(node, do)):
                return f"{node}: {do.name}"
            case Run(Update(parameter)):
                return f"update {parameter}"
            case Run(Local(work, of)):
                return f"{work.value if step is None else told(step)} {self._label(of)}"
            case Launch(of=Update(parameter)):
                return f"update {parameter}" if isinstance(step, Compute) else f"states of {parameter}"
            case Launch(step=sent, of=of):
                return f"{told(sent)} {self._label(of)}"
            case Wait(of=of):
                return f"wait for {self._label(of)}"
            case SendTo(tag=tag):
                return f"send {tag}"
            case Receive(tag=tag):
                return f"receive {tag}"
            case _:
                return ""

    def about(self, instruction: Instruction, step: Step | None) -> About:
        """What the event of that step is about, as (name, value)."""
        match instruction:
            case Run(what):
                about = self._about(what.of if isinstance(what, Local) else what)
            case Launch(of=of) | Wait(of=of):
                about = self._about(of)
            case SendTo(peer=peer, nbytes=nbytes) | Receive(peer=peer, nbytes=nbytes):
                about = (("axis", peer.axis), ("offset", peer.offset), ("bytes", nbytes))
            case _:
                about = ()
        match step:
            case Comm(collective, axis, ranks, nbytes):
                return *about, ("collective", collective), ("axis", axis), ("ranks", ranks), ("bytes", nbytes)
            case Move(src, dst, nbytes):
                return *about, ("copy", f"{src} -> {dst}"), ("bytes", nbytes)
            case _:
                return about

    def _label(self, of: Transfer | Update | Within) -> str:
        match of:
            case Within(node):
                return f"within {node}"
            case Read(reader, position):
                return self.node_of[reader].operands[position].name
            case Copy(node):
                return node
            case Update(parameter):
                return f"the update of {parameter}"
            case Send(places):
                result = self.graph.results[places[0]]
                if len(places) > 1:
                    return f"gradients of {count_of(len(places), 'parameter')} from {result.target}"
                return f"{result.kind} {result.target}"

    def _about(self, what: Operator | Inner | Transfer | Update | Within) -> About:
        match what:
            case Operator(node) | Inner(node) | Copy(node) | Within(node):
                return self._about_node(self.node_of[node])
            case Update(parameter):
                return self._about_node(self.parameters[parameter])
            case Read(reader, position):
                node = self.node_of[reader]
                return ("value", node.operands[position].name), ("reader", reader), *self._about_node(node)
            case Send(places):
                results = [self.graph.results[place] for place in places]
                if len(results) > 1:
                    return (("results", ", ".join(result.target for result in results)),)
                (result,) = results
                assert result.ref is not None
                about = ("value", result.ref.name), ("result", f"{result.kind} {result.target}")
                return *about, *self._about_node(self.node_of[result.ref.name])

    def _about_node(self, node: Node) -> About:
        if node.name not in self.abouts:
            parts = (
                ("node", node.name), ("op", node.op), ("target", node.target), ("module", node.module),
                ("source", node.source),
            )  # fmt: skip
            self.abouts[node.name] = tuple((key, value) for key, value in parts if value)
        return self.abouts[node.name]


def told(step: Step) -> str:
    match step:
        case Comm():
            return step.collective
        case Compute():
            return step.op
        case Loop():
            return "loop"
        case Move():
            return "store" if step.dst == HOST else "fetch"
