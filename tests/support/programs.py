"""Looks at lowered programs: what is alive where."""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.graph import Graph
from autopar.lower import Program
from autopar.lower.program import Alloc, Buffer, Free, Instruction, Launch, Local, Operator, Run, Send


def held_before(program: Program, is_it: Callable[[Instruction], bool]) -> list[Buffer]:
    """The buffers that are alive when the first such instruction is issued."""
    held = dict.fromkeys(program.resident)
    for _, instruction in program:
        match instruction:
            case Alloc(buffer):
                held[buffer] = None
            case Free(buffer):
                del held[buffer]
            case _ if is_it(instruction):
                return [*held]
            case _:
                pass
    raise AssertionError("there is no such instruction")


def runs(node: str) -> Callable[[Instruction], bool]:
    return lambda instruction: isinstance(instruction, Run) and instruction.what == Operator(node)


def of_a_gradient(graph: Graph) -> Callable[[Instruction], bool]:
    """Whether it is part of bringing a gradient where it belongs."""

    def is_it(instruction: Instruction) -> bool:
        match instruction:
            case Run(Local(of=Send(places))) | Launch(of=Send(places)):
                return graph.results[places[0]].kind == "gradient"
            case _:
                return False

    return is_it
