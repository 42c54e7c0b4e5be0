"""What every program must be, whoever made it.

    - each wait has its launch, each launch its wait, in the same phase
    - nothing is read before it is there, while it is written, or after it is freed; nothing is made where no memory is
    - what is written in place is read by nobody else any more
    - what is allocated is freed, once; what is resident never is
    - a loop leaves what it finds: it carries values of the same size from round to round
    - what one rank sends is what the other receives, in the same order (`verify_together`)

All ranks of a mesh run one program, so that the order of collectives is the same for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.lower.program import (
    Alloc,
    Buffer,
    Free,
    Instruction,
    Kind,
    Launch,
    Loop,
    Program,
    Receive,
    Run,
    SendTo,
    Wait,
)


class ProgramError(AssertionError):
    """A program is none: a defect of autopar, never of the user. The message says where."""


def verify(program: Program) -> None:
    """Raises ProgramError for the first instruction that breaks a rule."""
    resident = frozenset(program.resident)
    state = _State(program, {*resident}, resident)
    state.ready = {value for value in program.sources.values() if {*program.values[value]} <= resident}
    given = {buffer for buffer in resident if buffer.kind in (Kind.ADDED_UP, Kind.PARAMETER)}
    first = {buffers: value for value, buffers in reversed([*enumerate(program.values)])}  # others are its sums
    state.ready |= {first[buffer,] for buffer in given if (buffer,) in first}
    for phase, instructions in program.instructions.items():
        for number, instruction in enumerate(instructions):
            state.where = f"{phase} {number}: {type(instruction).__name__}"
            state.do(instruction)
        state.where = f"the end of {phase}"
        state.demand(not state.in_flight, f"nobody waits for launches {sorted(state.in_flight)}")
    left = [buffer.owner for buffer in state.alive if buffer not in resident]
    state.demand(not left, f"{', '.join(left[:3])} is never freed")


def verify_together(programs: Mapping[int, Program], axis: str) -> None:
    """Of programs by their ranks' coordinate on an axis: what is sent along it is received, in the order in which it is
    sent. Raises ProgramError.
    """
    sent: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for at, program in programs.items():
        verify(program)
        for instruction in flat(program):
            match instruction:
                case SendTo(peer=peer, tag=tag, nbytes=nbytes) if peer.axis == axis:
                    sent[at, at + peer.offset].append((tag, nbytes))
                case Receive(peer=peer, tag=tag, nbytes=nbytes) if peer.axis == axis:
                    received[at + peer.offset, at].append((tag, nbytes))
                case _:
                    pass
    for edge in sorted({*sent, *received}):
        if sent[edge] != received[edge]:
            raise ProgramError(
                f"rank {edge[0]} of axis {axis} sends rank {edge[1]} {sent[edge]}, which receives {received[edge]}"
            )


def flat(program: Program) -> Iterable[Instruction]:
    """All instructions, those of loops as often as they run."""

    def of(instructions: Iterable[Instruction]) -> Iterable[Instruction]:
        for instruction in instructions:
            if isinstance(instruction, Loop):
                for _ in range(instruction.rounds):
                    yield from of(instruction.body)
            else:
                yield instruction

    return of(instruction for _, instruction in program)


@dataclass
class _State:
    """Where a program stands: buffers `alive`, values that are `ready`, launches `in_flight`, and values whose memory
    somebody has `overwritten`.
    """

    program: Program
    alive: set[Buffer]
    resident: frozenset[Buffer]
    ready: set[int] = field(default_factory=set[int])
    in_flight: dict[int, Launch | SendTo | Receive] = field(default_factory=dict[int, "Launch | SendTo | Receive"])
    overwritten: set[int] = field(default_factory=set[int])
    where: str = ""

    def demand(self, holds: bool, told: str) -> None:
        if not holds:
            raise ProgramError(f"{self.where}: {told}")

    def do(self, instruction: Instruction) -> None:
        match instruction:
            case Alloc(buffer):
                self.demand(buffer not in self.alive, f"{buffer.owner} is allocated twice")
                self.alive.add(buffer)
                self.ready |= {value for value in self.program.sources.values() if buffer in self._lies_in(value)}
                if buffer.kind is Kind.ADDED_UP:
                    self.ready.add(self.program.values.index((buffer,)))
            case Free(buffer):
                self._free(buffer)
            case Run(reads=reads, makes=makes, takes=takes):
                self._read(reads)
                self.demand({*takes} <= self.alive, "runs without the memory that it takes")
                self._make([value for value in makes if value is not None])
                self.ready.update(value for value in makes if value is not None)
            case Launch(number, reads=reads, makes=makes) as launch:
                self._read(reads)
                self._make(makes)
                if launch.in_place:
                    self._overwrite(reads, makes)
                self._launch(number, launch)
            case SendTo(number, reads=reads) as launch:
                self._read(reads)
                self._launch(number, launch)
            case Receive(number, makes=makes) as launch:
                self._make(makes)
                self._launch(number, launch)
            case Wait(number):
                self.demand(number in self.in_flight, f"nothing is under way that is called {number}")
                self.ready.update(getattr(self.in_flight.pop(number), "makes", ()))
            case Loop():
                self._loop(instruction)

    def _lies_in(self, value: int) -> tuple[Buffer, ...]:
        return self.program.values[value]

    def _launch(self, number: int, launch: Launch | SendTo | Receive) -> None:
        self.demand(number not in self.in_flight, f"{number} is under way already")
        self.in_flight[number] = launch

    def _read(self, reads: Sequence[int]) -> None:
        for value in reads:
            self.demand(value in self.ready, f"reads value {value} before it is there")
            self.demand(value not in self.overwritten, f"reads value {value}, which was overwritten")
            gone = [buffer.owner for buffer in self._lies_in(value) if buffer not in self.alive]
            self.demand(not gone, f"reads value {value} after {', '.join(gone)} was freed")

    def _make(self, makes: Sequence[int]) -> None:
        for value in makes:
            self.demand(value not in self.ready, f"makes value {value} a second time")
            none = [buffer.owner for buffer in self._lies_in(value) if buffer not in self.alive]
            self.demand(not none, f"makes value {value} where no memory is for {', '.join(none)}")

    def _overwrite(self, reads: Sequence[int], makes: Sequence[int]) -> None:
        written = {buffer for value in makes for buffer in self._lies_in(value)}
        read = {buffer for value in reads for buffer in self._lies_in(value)}
        given = {buffer for buffer in self.resident if buffer.kind is not Kind.ADDED_UP}
        self.demand(written <= read and not written & given, "writes in place what it does not read")
        self.overwritten |= {value for value in self.ready if written & {*self._lies_in(value)}}

    def _free(self, buffer: Buffer) -> None:
        self.demand(buffer in self.alive, f"{buffer.owner} is freed, and is not there")
        self.demand(buffer not in self.resident, f"{buffer.owner} is freed, and is resident")
        for number, launch in self.in_flight.items():
            values = (*getattr(launch, "reads", ()), *getattr(launch, "makes", ()))
            used = {one for value in values for one in self._lies_in(value)}
            self.demand(buffer not in used, f"{buffer.owner} is freed while launch {number} needs it")
        self.alive.remove(buffer)

    def _loop(self, loop: Loop) -> None:
        where, alive, in_flight = self.where, {*self.alive}, {*self.in_flight}
        self._read([head for head, _ in loop.carried])
        for number, instruction in enumerate(loop.body):
            self.where = f"{where}, {number}: {type(instruction).__name__}"
            self.do(instruction)
        self.where = f"{where}, its foot"
        self._read([foot for _, foot in loop.carried])
        stands_for: dict[Buffer, Buffer] = {}
        for head, foot in loop.carried:
            for ours, theirs in zip(self._lies_in(head), self._lies_in(foot), strict=True):
                alike = ours.nbytes == theirs.nbytes and ours.tier == theirs.tier
                self.demand(alike, f"carries {theirs.nbytes} bytes where it found {ours.nbytes}")
                if theirs not in alive:
                    stands_for[theirs] = ours
        left = {stands_for.get(buffer, buffer) for buffer in self.alive}
        self.demand(left == alive and len(self.alive) == len(alive), "does not leave the memory that it found")
        self.demand({*self.in_flight} == in_flight, "does not leave under way what it found under way")
