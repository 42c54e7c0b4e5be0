"""The events of a program: what each instruction occupies which stream for, and what memory it holds meanwhile.

Operators run on the compute stream, one behind the other. A transfer runs on the stream of its axis or direction, no
earlier than what was issued on the compute stream before it has ended, as NCCL's streams do; a wait holds up the
compute stream, and is an event of it. A body waits for its own collectives. The host updates its parameters on a stream
of its own. So a program in which every wait stands behind its launch does one thing after the other.

A buffer is held from when the compute stream comes to where it is allocated until it comes to where it is freed.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.ir.graph import Graph
from autopar.lower.program import (
    MADE_BY_FIRST_UPDATE,
    OPTIMIZER,
    Alloc,
    Buffer,
    Free,
    Instruction,
    Launch,
    Loop,
    Operator,
    Program,
    Receive,
    Run,
    SendTo,
    Wait,
)
from autopar.price.pricer import Pricer
from autopar.simulate.telling import Teller
from cost_models.price import stream_of
from cost_models.simulator import COMPUTE, Event, Hold
from cost_models.steps import Comm, Step


def events(program: Program, graph: Graph, pricer: Pricer, *, told: bool = True) -> list[Event]:
    """The events of one step, each with its instruction (`by`). `told`: with what a viewer shows of them, for which
    `graph` is that of the program.
    """
    return _Simulated(program, pricer).events(Teller(graph) if told else None)


class _Draft(NamedTuple):
    """An event to be: of which step of which instruction; None, of a wait."""

    stream: str
    seconds: float
    after: tuple[int, ...]
    phase: str
    by: Instruction | None
    step: Step | None


class _Simulated:
    def __init__(self, program: Program, pricer: Pricer) -> None:
        self.program, self.pricer = program, pricer
        self.drafts: list[_Draft] = []
        self.holds: dict[int, list[Hold]] = {}  # by the event at which they begin
        self.kernel = 0  # the last event on the compute stream
        self.launched: dict[int, int] = {}  # launch -> its latest event
        self.has_allocated = False  # since the last event
        self.held: dict[Buffer, tuple[int, int]] = {}  # the event at which its hold begins, and that behind which
        self.seconds_of: dict[Step, float] = {}

    def events(self, teller: Teller | None) -> list[Event]:
        self._issue(COMPUTE, 0.0, (), "forward")
        self.holds[0] = [_hold(buffer, None, None) for buffer in self.program.resident]
        for phase, instruction in self.program:
            self._do(instruction, phase)
        latest = {draft.stream: number for number, draft in enumerate(self.drafts)}
        self._issue(COMPUTE, 0.0, tuple(latest.values()), OPTIMIZER)
        for buffer, (begins, since) in self.held.items():
            self.holds.setdefault(begins, []).append(_hold(buffer, since, None))
        return [self._event(number, draft, teller) for number, draft in enumerate(self.drafts)]

    def _event(self, number: int, draft: _Draft, teller: Teller | None) -> Event:
        stream, seconds, after, phase, by, step = draft
        holds, name, about = tuple(self.holds.get(number, ())), "", ()
        if by is None:
            name = "step ends" if number else "step begins"
        elif teller is not None:
            name, about = teller.name(by, step), teller.about(by, step)
        return Event(name, stream, seconds, after, holds, phase, about, by)

    def _do(self, instruction: Instruction, phase: str) -> None:
        match instruction:
            case Alloc():
                self.has_allocated = True
                self.held[instruction.buffer] = len(self.drafts), self.kernel
            case Free():
                begins, since = self.held.pop(instruction.buffer)
                self.holds.setdefault(begins, []).append(_hold(instruction.buffer, since, (self.kernel,)))
            case Run():
                self._run(instruction, phase)
            case Launch():
                step = instruction.step
                sent = self._issue(stream_of(step), self._seconds(step), (self.kernel,), phase, instruction, step)
                self.launched[instruction.number] = sent
            case Wait():
                self._issue(COMPUTE, 0.0, (self.launched[instruction.launch],), phase, instruction)
            case SendTo() | Receive():
                link = self.pricer.resharder.links[instruction.peer.axis]
                seconds = link.latency_s + instruction.nbytes / link.bytes_per_s
                sent = self._issue(f"comm:{instruction.peer.axis}", seconds, (self.kernel,), phase, instruction)
                self.launched[instruction.number] = sent
            case Loop():
                self._loop(instruction, phase)

    def _loop(self, loop: Loop, phase: str) -> None:
        """What a round carries lies, for the next one, where that finds it."""
        for number in range(loop.rounds):
            for instruction in loop.body:
                self._do(instruction, phase)
            for head, foot in loop.carried if number < loop.rounds - 1 else ():
                for ours, theirs in zip(self.program.values[head], self.program.values[foot], strict=True):
                    if ours is not theirs:
                        self.held[ours] = self.held.pop(theirs)

    def _run(self, run: Run, phase: str) -> None:
        for step in run.steps:
            seconds = run.share * self._seconds(step)
            if isinstance(step, Comm):
                sent = self._issue(stream_of(step), seconds, (self.kernel,), phase, run, step)
                self._issue(COMPUTE, 0.0, (sent,), phase, run)
            else:
                self._issue(COMPUTE, seconds, (), phase, run, step)
        if not run.steps and (self.has_allocated or isinstance(run.what, Operator)):
            self._issue(COMPUTE, 0.0, (), phase, run)  # takes no time, but is an instant

    def _issue(
        self, stream: str, seconds: float, after: tuple[int, ...], phase: str, by: Instruction | None = None,
        step: Step | None = None,
    ) -> int:  # fmt: skip
        number = len(self.drafts)
        self.drafts.append(_Draft(stream, seconds, after, phase, by, step))
        self.has_allocated = False
        if stream == COMPUTE:
            self.kernel = number
        return number

    def _seconds(self, step: Step) -> float:
        found = self.seconds_of.get(step)
        if found is None:
            found = self.seconds_of[step] = self.pricer.seconds((step,))
        return found


def _hold(buffer: Buffer, since: int | None, until: tuple[int, ...] | None) -> Hold:
    """None for `since`: it is resident; for `until`: to the end of the step."""
    first = buffer.kind in MADE_BY_FIRST_UPDATE
    return Hold(buffer.owner, buffer.nbytes, buffer.tier, since, until, since is None, first, buffer.kind.value)
