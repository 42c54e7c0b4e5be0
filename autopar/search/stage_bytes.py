"""What a stage's program holds of a device, for the memory of its rank: by how much each part of a step grows it, and
what crosses its cuts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.lower.halves import HELD_THROUGHOUT, reads
from autopar.lower.memory import allocated, outputs_before, resident_bytes
from autopar.lower.program import Buffer, Instruction, Kind, Program
from autopar.rewrite.stages import Stage
from cost_models.steps import DEVICE


@dataclass(frozen=True)
class Footprint:
    """Bytes of a device that a stage's program holds. `always`: what is resident, what all micro-batches read or
    add to, and gradients that one micro-batch leaves to the updates; `after_forward`: beside that. By how much what is
    held grows at most: in forward, in the halves of backward, behind the tangent, and in the updates.
    """

    always: float
    after_forward: float
    forward: float
    inputs: float
    whole: float
    weight: float
    update: float

    @staticmethod
    def of(program: Program, half: int, gone: float) -> Footprint:
        """`half`: how many instructions of backward are its first half. `gone`: bytes of what other stages get, which
        the program holds to its end.
        """
        ahead, backward = program.instructions.get("forward", ()), program.instructions.get("backward", ())
        tangents, throughout = _allocated(backward, (Kind.TANGENT,)), _allocated(ahead, HELD_THROUGHOUT)
        throughout -= outputs_before(program)  # which every rank holds, `autopar.pipeline.memory` says how long
        made, forward = _grown(ahead)
        first, inputs = _grown(backward[:half])
        second, weight = _grown(backward[half:])
        left = max(0.0, made + first + second - gone)  # by a step of one micro-batch, to its updates
        _, update = _grown(program.instructions.get("optimizer", ()))
        return Footprint(
            resident_bytes(program).get(DEVICE, 0) + throughout + left,
            made,
            forward,
            max(0.0, inputs - tangents),
            max(0.0, inputs - tangents, first + weight - tangents),
            weight,
            max(0.0, update),
        )

    def backward(self, whole: bool) -> float:
        """Of B, or of I."""
        return self.whole if whole else self.inputs


@dataclass(frozen=True)
class Crossing:
    """Bytes of a device of what crosses a stage's cuts in forward. `inputs`: of what the step and other stages give it;
    `kept`: of what comes from these and backward reads. `only_sent`: of what forward makes for the next stage alone;
    `shared`: of what is sent and backward reads, too.
    """

    inputs: float
    kept: float
    only_sent: float
    shared: float

    @staticmethod
    def of(program: Program, graph: Graph, stage: Stage) -> Crossing:
        read = {
            buffer
            for one in program.instructions.get("backward", ())
            for value in reads(one)
            for buffer in program.values[value]
        }
        received = {node.name for node in graph.nodes if node.op == "input" and node.target in stage.receives}
        came = {buffer for name in received for buffer in program.values[program.sources[name]]}
        goes = {
            buffer
            for place, value in program.results.items()
            if graph.results[place].kind == "output" and graph.results[place].target in stage.sends
            for buffer in program.values[value]
        }
        given = (one for one in program.resident if one.kind is Kind.INPUT)
        return Crossing(_bytes(given), _bytes(came & read), _bytes(goes - read - came), _bytes(goes & read))


def _bytes(buffers: Iterable[Buffer]) -> float:
    return float(sum(one.nbytes for one in buffers if one.tier == DEVICE))


def _allocated(instructions: Sequence[Instruction], kinds: Collection[Kind]) -> float:
    """Bytes of a device of the buffers of these kinds that these allocate."""
    found = (buffer for one in instructions for buffer, sign in allocated(one) if sign > 0 and buffer.kind in kinds)
    return _bytes(found)


def _grown(instructions: Sequence[Instruction]) -> tuple[float, float]:
    """(by how many bytes more is held behind these, by how many at most); without what is there throughout."""
    level, most = 0.0, 0.0
    for one in instructions:
        for buffer, sign in allocated(one):
            if buffer.tier == DEVICE and buffer.kind not in HELD_THROUGHOUT:
                level += sign * buffer.nbytes
                most = max(most, level)
    return level, most
