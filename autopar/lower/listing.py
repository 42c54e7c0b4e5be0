"""The list that becomes a program: instructions as they are issued, and how long each buffer is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.lower.program import Alloc, Buffer, Free, Instruction, Kind, Launch, Loop, Run, Wait
from cost_models.steps import DEVICE

InBody = Callable[[Collection[int]], Buffer]  # places of operands that nobody needs any more -> what it takes


class Listing:
    """Instructions so far, the values that they make, and the last one that needs each buffer."""

    def __init__(self) -> None:
        self.values: list[tuple[Buffer, ...]] = []
        self.done: list[Instruction] = []
        self.ends: dict[str, int] = {}  # phase -> how many instructions there are with those of it
        self.launches = 0
        self._launched: dict[int, Launch] = {}
        self._made_at: dict[int, list[Buffer]] = {}  # instruction -> buffers that it makes or takes
        self._maker_of: dict[Buffer, int] = {}  # and the other way round
        self._needed: dict[Buffer, int] = {}
        self._bodies: dict[int, InBody] = {}

    # --- values --------------------------------------------------------------------------------------------------

    def value(self, buffers: tuple[Buffer, ...]) -> int:
        """A new value that lies in these buffers."""
        self.values.append(buffers)
        return len(self.values) - 1

    def new(self, nbytes: Any, kind: Kind, owner: str, tier: str = DEVICE) -> int:
        """A new value in a buffer of its own."""
        return self.value((Buffer(nbytes, kind, owner, tier),))

    def view(self, value: int) -> int:
        """Another value that lies where this one does."""
        return self.value(self.values[value])

    def given(self, buffer: Buffer) -> int:
        """A value that is not made here."""
        self._needed[buffer] = -1
        return self.value((buffer,))

    def is_made_behind(self, buffer: Buffer, phase: str) -> bool:
        return self._maker_of.get(buffer, -1) >= self.ends[phase]

    # --- instructions --------------------------------------------------------------------------------------------

    def do(
        self, instruction: Instruction, makes: Sequence[int | None] = (), takes: Sequence[Buffer] = (),
        in_body: InBody | None = None,
    ) -> None:  # fmt: skip
        """Issue an instruction; what it makes in buffers of its own, and takes, is allocated for it. `in_body`: what it
        takes besides, which hangs on the operands that nobody needs behind it.
        """
        if in_body is not None:
            self._bodies[len(self.done)] = in_body
        at, needed = len(self.done), self._needed
        new = [*takes]
        for value in makes:
            if value is not None:
                new += [buffer for buffer in self.values[value] if buffer not in needed]
        self.done.append(instruction)
        if new:
            self._made_at[at] = new
            for buffer in new:
                self._maker_of[buffer] = needed[buffer] = at
        match instruction:
            case Run() | Launch():
                self._need(instruction.reads, at)
                if isinstance(instruction, Launch):
                    self._launched[instruction.number] = instruction
                    self.launches += 1
            case Wait():
                sent = self._launched.pop(instruction.launch)
                self._need((*sent.reads, *sent.makes), at)
            case _:
                pass

    def inside(self, given: Collection[int]) -> Listing:
        """A list of its own for the body of a loop that begins with these values."""
        inner = Listing()
        inner.values, inner.launches = self.values, self.launches
        inner._needed = {buffer: -1 for value in given for buffer in self.values[value]}
        return inner

    def loop(self, inner: Listing, rounds: int, carried: Sequence[tuple[int, int]]) -> None:
        """Issue that list as a loop. `carried`: as in `Loop`; what lies in other buffers at the foot of a round takes
        the place of what lay in those at its head, which is gone.
        """
        at, values = len(self.done), self.values
        gone = {b for head, foot in carried for b in values[head] if b not in values[foot]}
        left = {b for head, foot in carried for b in values[foot] if b not in values[head]}
        kept = {*self._needed, *left} - gone
        inner.ends = {"": len(inner.done)}
        (body,) = inner.with_memory(kept, {}).values()
        self.done.append(Loop(rounds, body, tuple(carried)))
        self.launches = inner.launches
        self._needed |= {buffer: at for buffer, last in inner._needed.items() if last >= 0 and buffer in kept}
        for buffer in gone:
            del self._needed[buffer]
        for buffer in left:
            self._maker_of[buffer] = self._needed[buffer] = at

    def keep(self, buffers: Sequence[Buffer]) -> None:
        """They are needed up to here."""
        self._needed |= dict.fromkeys(buffers, len(self.done) - 1)

    def _need(self, values: Sequence[int], at: int) -> None:
        for value in values:
            for buffer in self.values[value]:
                self._needed[buffer] = at

    def with_memory(
        self, kept: Collection[Buffer], opens: Mapping[str, Sequence[Buffer]]
    ) -> dict[str, tuple[Instruction, ...]]:
        """The instructions of each phase, buffers allocated in front of their makers and freed behind their last use.

        `kept`: those that are not freed here. `opens`: what others allocate at the head of a phase.
        """
        last: dict[int, list[Buffer]] = {}
        for buffer, at in self._needed.items():
            if buffer not in kept:
                last.setdefault(at, []).append(buffer)
        found: dict[str, tuple[Instruction, ...]] = {}
        start = 0
        for phase, end in self.ends.items():
            issued: list[Instruction] = [*map(Alloc, opens.get(phase, ()))]
            for at in range(start, end):
                issued += map(Alloc, self._made_at.get(at, ()))
                issued += self._with_body(at, last.get(at, ()))
                issued += map(Free, last.get(at, ()))
            found[phase], start = tuple(issued), end
        return found

    def _with_body(self, at: int, freed: Sequence[Buffer]) -> list[Instruction]:
        """An instruction with what it takes besides."""
        run = self.done[at]
        if at not in self._bodies or not isinstance(run, Run):
            return [run]
        dies = [
            bool(self.values[value]) and run.reads.count(value) == 1 and all(one in freed for one in self.values[value])
            for value in run.reads
        ]
        taken = self._bodies[at]([place for place, does in enumerate(dies) if does])
        if isinstance(taken.nbytes, int) and not taken.nbytes:
            return [run]
        return [Alloc(taken), replace(run, takes=(*run.takes, taken)), Free(taken)]
