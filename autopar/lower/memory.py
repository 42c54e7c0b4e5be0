"""What a program holds: a scan over its allocations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from autopar.lower.program import PHASES, Alloc, Buffer, Free, Instruction, Kind, Loop, Program
from cost_models.steps import DEVICE


def changes(program: Program) -> Iterator[tuple[str, Buffer, int]]:
    """(phase, buffer, 1 where it is allocated or -1 where it is freed), in order; of a loop, its first round."""
    for phase, instruction in program:
        for buffer, sign in allocated(instruction):
            yield phase, buffer, sign


def allocated(instruction: Instruction) -> Iterator[tuple[Buffer, int]]:
    """(buffer, 1 where it is allocated or -1 where it is freed), in order; of a loop, its first round."""
    match instruction:
        case Alloc(buffer):
            yield buffer, 1
        case Free(buffer):
            yield buffer, -1
        case Loop(body=body):
            for inner in body:
                yield from allocated(inner)
        case _:
            pass


def resident_bytes(program: Program) -> dict[str, Any]:
    """Tier -> bytes that are held before the step, throughout it and after it."""
    held: dict[str, Any] = defaultdict(int)
    for buffer in program.resident:
        held[buffer.tier] += buffer.nbytes
    return dict(held)


def outputs_before(program: Program) -> Any:
    """Bytes of the device of what the step before gave, which its caller still holds."""
    return sum(buffer.nbytes for _, buffer, sign in changes(program) if sign > 0 and buffer.kind is Kind.BEFORE)


def peaks(program: Program) -> dict[str, int]:
    """Tier -> the most bytes that it holds at a time."""
    level = defaultdict(int, resident_bytes(program))
    found = {DEVICE: 0, **level}
    for _, buffer, sign in changes(program):
        level[buffer.tier] += sign * buffer.nbytes
        found[buffer.tier] = max(found.get(buffer.tier, 0), level[buffer.tier])
    return {tier: nbytes for tier, nbytes in sorted(found.items()) if nbytes or tier == DEVICE}


def peaks_by_phase(program: Program) -> dict[str, int]:
    """Phase -> the most bytes that the device holds in it."""
    level = resident_bytes(program).get(DEVICE, 0)
    found: dict[str, int] = {}
    for phase in PHASES:
        found[phase] = level
        for instruction in program.instructions.get(phase, ()):
            for buffer, sign in allocated(instruction):
                if buffer.tier == DEVICE:
                    level += sign * buffer.nbytes
                    found[phase] = max(found[phase], level)
    return found


def held_at_peak(program: Program, tier: str = DEVICE) -> dict[Buffer, int]:
    """The buffers that the tier holds where that holds the most, with their bytes."""
    most = peaks(program).get(tier, 0)
    held = {buffer: buffer.nbytes for buffer in program.resident if buffer.tier == tier}
    total = sum(held.values())
    for _, buffer, sign in changes(program):
        if total == most:
            break
        if buffer.tier == tier:
            total += sign * buffer.nbytes
            held[buffer] = held.get(buffer, 0) + sign * buffer.nbytes
    return {buffer: nbytes for buffer, nbytes in held.items() if nbytes}


def holders(program: Program, tier: str = DEVICE) -> dict[str, int]:
    """Owner -> bytes that it holds of the tier where that holds the most."""
    held: Counter[str] = Counter()
    for buffer, nbytes in held_at_peak(program, tier).items():
        held[buffer.owner] += nbytes
    return dict(held)
