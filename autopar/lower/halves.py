"""A backward in two: what the results that others wait for need, and the rest.

Zero-bubble schedules run them apart (Qi et al., arXiv 2401.10241, section 2): the gradients of a stage's inputs, which
the stage before waits for, and those of its weights, which nobody does. The first half is all of the program up to
where those results are there; so it is short where the graph has what they need first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from autopar.ir.graph import Graph
from autopar.lower.memory import allocated
from autopar.lower.program import Alloc, Buffer, Free, Instruction, Kind, Launch, Loop, Program, Run, Wait
from cost_models.steps import DEVICE

HELD_THROUGHOUT = (Kind.CAST, Kind.ADDED_UP, Kind.BEFORE)  # from the first micro-batch of a step to the last


def first_half(program: Program, graph: Graph, targets: Collection[str]) -> int:
    """How many instructions of backward the gradients of these targets need to be there; with what comes into it, and
    all that is freed behind the last of them.
    """
    instructions = program.instructions.get("backward", ())
    wanted = {
        value
        for place, value in program.results.items()
        if graph.results[place].kind == "gradient" and graph.results[place].target in targets
    }
    launched = {one.number: one for one in instructions if isinstance(one, Launch)}
    end = 0
    for place in range(len(instructions) - 1, -1, -1):
        one = instructions[place]
        made = launched[one.launch] if isinstance(one, Wait) else one
        if wanted.isdisjoint(_makes(made)):
            continue
        wanted |= {*reads(made)}
        end = max(end, place + 1)
    while end < len(instructions) and _is_bookkeeping(instructions[end]):
        end += 1
    return end


def _is_bookkeeping(one: Instruction) -> bool:
    """Whether it only says what is held: what came in, and what nobody needs any more."""
    return isinstance(one, Free) or (isinstance(one, Alloc) and one.buffer.kind is Kind.TANGENT)


def held_between(program: Program, graph: Graph, end: int, targets: Collection[str], inputs: Collection[str]) -> Any:
    """Bytes of a device that are held between the halves, beside what is resident: what was saved and is not yet read,
    what the first half leaves to the second, those of `inputs` that this reads. What the step gives back counts where
    the second half reads it, and gradients that are not of the targets.
    """
    backward = program.instructions.get("backward", ())
    held: dict[Buffer, None] = {}
    for instruction in [*program.instructions.get("forward", ()), *backward[:end]]:
        for buffer, sign in allocated(instruction):
            if sign > 0:
                held[buffer] = None
            else:
                held.pop(buffer, None)
    read = {buffer for one in backward[end:] for value in reads(one) for buffer in program.values[value]}
    sources = {program.sources[node.name] for node in graph.nodes if node.op == "input" and node.target in inputs}
    held |= {one: None for value in sources for one in program.values[value] if one in read}
    for place, value in program.results.items():
        if graph.results[place].kind != "gradient" or graph.results[place].target in targets:
            for buffer in program.values[value]:
                if buffer not in read:
                    held.pop(buffer, None)
    counted = (buffer for buffer in held if buffer.kind is not Kind.TANGENT or buffer in read)
    return sum(buffer.nbytes for buffer in counted if buffer.tier == DEVICE and buffer.kind not in HELD_THROUGHOUT)


def _makes(one: Instruction) -> Iterator[int]:
    match one:
        case Run() | Launch():
            yield from (value for value in one.makes if value is not None)
        case Loop(body=body, carried=carried):
            for inner in body:
                yield from _makes(inner)
            yield from (head for head, _ in carried)
        case _:
            pass


def reads(one: Instruction) -> Iterator[int]:
    """The values that it reads."""
    match one:
        case Run() | Launch():
            yield from one.reads
        case Loop(body=body, carried=carried):
            for inner in body:
                yield from reads(inner)
            yield from (value for pair in carried for value in pair)
        case _:
            pass
