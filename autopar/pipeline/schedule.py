"""What a pipeline schedule is: for each rank the list of all that it does in a step, as plain values.

A model is cut into stages, a batch into micro-batches. A rank holds one stage or several, and runs its list from the
first action to the last:

    F    forward of a stage for one micro-batch
    B    its whole backward; or, split in two (Qi et al., arXiv 2401.10241):
    I    the gradient of the stage's input, which the stage before waits for
    W    the gradient of its weights, which nobody waits for
    SA   send the activation that F made to the rank of the next stage; RA: receive it there
    SG   send the gradient that B or I made to the rank of the stage before; RG: receive it there

An action is called by the stage whose rank does it: what stage 1 sends as 1SA3 is received as 2RA3. Between stages of
one rank nothing is sent. Messages from one rank to another are one queue, whatever they carry: what is sent first is
received first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.ir.words import count_of

Kind = Literal["F", "B", "I", "W", "SA", "RA", "SG", "RG"]
COMPUTES: frozenset[Kind] = frozenset({"F", "B", "I", "W"})
SENDS: frozenset[Kind] = frozenset({"SA", "SG"})
RECEIVES: frozenset[Kind] = frozenset({"RA", "RG"})


class ScheduleError(ValueError):
    """The lists are no schedule; the message names rank, position and action."""


class Action(NamedTuple):
    """One entry of a rank's list; stages and micro-batches count from 0. Written as `2F3`: stage, kind, micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lists of all ranks.

    name            what users call it
    micro_batches   in a step
    rank_of         the rank that holds each stage
    lists           of each rank, its actions in order

    Raises ScheduleError where there is nothing to run or a rank without a stage; whether the lists are right is for
    `autopar.pipeline.verify`.
    """

    name: str
    micro_batches: int
    rank_of: tuple[int, ...]
    lists: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ScheduleError(f"{self.name} has {self.micro_batches} micro-batches; at least 1 is needed")
        if {*self.rank_of} != {*range(self.ranks)}:
            raise ScheduleError(
                f"{self.name} has {count_of(self.ranks, 'list')}, but its stages lie on ranks "
                f"{sorted({*self.rank_of})}; each rank from 0 on needs one list and at least one stage"
            )

    @property
    def stages(self) -> int:
        """How many there are, on all ranks."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.lists)

    @property
    def stages_per_rank(self) -> int:
        """Most stages that a rank holds."""
        return max(self.rank_of.count(rank) for rank in range(self.ranks))

    @property
    def splits_backward(self) -> bool:
        """Whether backward runs in two, I and W."""
        return any(action.kind == "I" for row in self.lists for action in row)

    def crosses(self, stage: int) -> bool:
        """Whether the stage behind `stage` is on another rank, so that messages cross that cut."""
        return self.rank_of[stage] != self.rank_of[stage + 1]

    def lets_go(self) -> dict[Action, tuple[Action, ...]]:
        """Receive -> the sends of the same rank that have been received once it ends: what comes was sent behind that.
        Until then a rank has to hold what it sends, as the other may be late.
        """
        places = {action: at for row in self.lists for at, action in enumerate(row)}
        found: dict[Action, tuple[Action, ...]] = {}
        for row in self.lists:
            held: dict[int, list[Action]] = {}  # rank -> what it has been sent
            for action in row:
                if action.kind in SENDS:
                    held.setdefault(self.rank_of[receiver_of(action).stage], []).append(action)
                elif action.kind in RECEIVES:
                    sender = sender_of(action)
                    sent = held.get(self.rank_of[sender.stage], [])
                    count = sum(places[receiver_of(one)] < places[sender] for one in sent)
                    found[action] = tuple(sent[:count])
                    del sent[:count]
        return found

    def text(self, rank: int, messages: bool = True) -> str:
        """A rank's list, its actions by spaces; `F3`, without the stage, where each rank has one and none is sent."""
        told = [action for action in self.lists[rank] if messages or action.kind in COMPUTES]
        if messages or self.stages > self.ranks:
            return " ".join(map(str, told))
        return " ".join(f"{action.kind}{action.micro_batch}" for action in told)


def sender_of(receive: Action) -> Action:
    """The send of what is received."""
    return (
        Action("SA", receive.stage - 1, receive.micro_batch)
        if receive.kind == "RA"
        else Action("SG", receive.stage + 1, receive.micro_batch)
    )


def receiver_of(send: Action) -> Action:
    """The receive of what is sent."""
    return (
        Action("RA", send.stage + 1, send.micro_batch)
        if send.kind == "SA"
        else Action("RG", send.stage - 1, send.micro_batch)
    )
