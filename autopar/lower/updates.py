"""What the optimizer does behind backward, parameter by parameter.

Those on the device are updated first, then those whose states stream from the host and back, one by one, then those on
the host: so does `autopar.optim.Streamed`. Where copies overlap with compute, the host works while the device does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.graph import Ref, TensorType
from autopar.ir.layout import Layout
from autopar.lower.listing import Listing
from autopar.lower.program import Alloc, Buffer, Free, Instruction, Kind, Launch, Run, Update, Wait
from autopar.plan.plan import Plan
from autopar.plan.value import Decision, gathers_of
from autopar.price.pricer import Pricer
from cost_models.steps import DEVICE, HOST, Comm, Compute, Move


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter: the place of its gradient among the graph's results, `nbytes` and `dtype` of its local piece, where
    it `resides` (`Plan.residence`), and its value.
    """

    name: str
    place: int
    nbytes: Any
    dtype: str
    resides: str
    value: int


def read_once_a_step(
    plan: Decision | Plan, nbytes: Callable[[TensorType, Layout], Any], pricer: Pricer, listing: Listing
) -> Iterator[Instruction]:
    """What makes of parameters what all micro-batches of a step read: the cast, and the gather of what is stored in
    more pieces. It runs in front of them, and is told with the updates, as it is done as often. `nbytes`: of a rank's
    piece.
    """
    for node in plan.graph.nodes:
        if node.op != "parameter":
            continue
        choice, of = plan.choices[node.name], Update(node.target)
        if node.name in plan.graph.rounds.stored:
            stored, read = plan.graph.stored_type(node), plan.graph.type_of(Ref(node.name))
            step = pricer.cast_step(nbytes(stored, choice.lies), nbytes(read, choice.lies), stored.dtype)
            yield Run(of, (step,), (), ())
        for step in pricer.gathered_once(gathers_of(node, choice, plan.mesh)):
            if isinstance(step, Comm):
                yield Launch(listing.launches, step, of, (), ())
                yield Wait(listing.launches, of)
                listing.launches += 1
            else:
                yield Run(of, (step,), (), ())


def left_by(instructions: Sequence[Instruction], held: Sequence[Buffer]) -> list[Buffer]:
    """Of buffers that are held before instructions, and of those that these allocate, what is there behind them."""
    left = dict.fromkeys(held)
    for one in instructions:
        if isinstance(one, Alloc):
            left[one.buffer] = None
        elif isinstance(one, Free):
            del left[one.buffer]
    return [*left]


@dataclass
class Updates:
    """The optimizer's phase, and the buffers that it keeps from step to step. `gradients`: the value of each, by its
    place; `launches`: so many there were before.
    """

    pricer: Pricer
    beside: bool
    gradients: Mapping[int, int]
    launches: int
    resident: list[Buffer] = field(default_factory=list[Buffer])
    done: list[Instruction] = field(default_factory=list[Instruction])

    def of(self, parameters: Sequence[Trained]) -> Sequence[Buffer]:
        """Issue those of the parameters. Returns what is `resident`."""
        by_residence = {where: [p for p in parameters if p.resides == where] for where in ("device", "stream", HOST)}
        for parameter in parameters:
            self._keep(parameter)
        waits: list[Instruction] = []
        if self.beside:
            waits = self._on_the_host(by_residence[HOST])
        self._on_the_device(by_residence["device"])
        for parameter in by_residence["stream"]:
            self._streamed(parameter)
        if not self.beside:
            self._on_the_host(by_residence[HOST])
        self.done += waits
        return self.resident

    def _keep(self, parameter: Trained) -> None:
        tier = DEVICE if parameter.resides == "device" else HOST
        states = self.pricer.state_bytes(parameter.nbytes)
        if states:
            self.resident.append(Buffer(states, Kind.STATES, f"optimizer states of {parameter.name}", tier))
        if self.pricer.counter_bytes:
            owner = f"count of updates of {parameter.name}"
            self.resident.append(Buffer(self.pricer.counter_bytes, Kind.COUNT, owner))

    def _on_the_device(self, parameters: Sequence[Trained]) -> None:
        """All together, or one after the other, where the one before has not given everything back."""
        made = self.pricer.temporaries
        if self.pricer.updates_together:
            beside = [self._temporary(parameter, made.together) for parameter in parameters]
            self.done += map(Alloc, beside)
            for parameter in parameters:
                self._run(parameter)
            self.done += map(Free, beside)
            return
        for before, parameter in zip((None, *parameters), parameters, strict=False):
            self._run(parameter, self._beside(before, parameter, DEVICE))

    def _on_the_host(self, parameters: Sequence[Trained]) -> list[Instruction]:
        """The waits for those updates that are overlapped with what follows. The host makes one after the other."""
        waits: list[Instruction] = []
        pairs = zip((None, *parameters), parameters, strict=False)
        beside = [self._beside(before, parameter, HOST) for before, parameter in pairs]
        most = max(beside, key=lambda buffers: sum(buffer.nbytes for buffer in buffers), default=())
        self.done += map(Alloc, most)
        for parameter in parameters:
            step = self.pricer.update_step(parameter.nbytes, parameter.dtype, HOST)
            wait = self._launch(parameter, step, (self.gradients[parameter.place],))
            if self.beside:
                waits.append(wait)
            else:
                self.done.append(wait)
        waits += map(Free, most)
        if self.beside:
            return waits
        self.done += waits
        return []

    def _streamed(self, parameter: Trained) -> None:
        made, states = self.pricer.temporaries, self.pricer.state_bytes(parameter.nbytes)
        here = Buffer(states, Kind.STREAMED, f"streamed states of {parameter.name}")
        beside = self._temporary(parameter, made.together if self.pricer.updates_together else made.own)
        self.done.append(Alloc(here))
        self.done.append(self._launch(parameter, Move(HOST, DEVICE, states)))
        self._run(parameter, [beside])
        self.done.append(self._launch(parameter, Move(DEVICE, HOST, states)))
        self.done.append(Free(here))

    def _beside(self, before: Trained | None, parameter: Trained, tier: str) -> list[Buffer]:
        made = self.pricer.temporaries
        left = [] if before is None else [self._temporary(before, made.left, tier)]
        return [*left, self._temporary(parameter, made.own, tier)]

    def _temporary(self, parameter: Trained, times: int, tier: str = DEVICE) -> Buffer:
        owner = f"optimizer's temporaries for {parameter.name}"
        return Buffer(times * parameter.nbytes, Kind.TEMPORARY, owner, tier)

    def _run(self, parameter: Trained, beside: Sequence[Buffer] = ()) -> None:
        steps = self.pricer.update_steps(parameter.nbytes, parameter.dtype, "device")
        self.done += map(Alloc, beside)
        self.done.append(Run(Update(parameter.name), steps, (parameter.value, self.gradients[parameter.place]), ()))
        self.done += map(Free, beside)

    def _launch(self, parameter: Trained, step: Move | Compute, reads: tuple[int, ...] = ()) -> Wait:
        """Begin it. Returns the wait for it."""
        of = Update(parameter.name)
        self.done.append(Launch(self.launches, step, of, reads, ()))
        self.launches += 1
        return Wait(self.launches - 1, of)
