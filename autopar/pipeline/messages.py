"""From lists of computing to lists with messages, all of them projections of one global order.

Every action of a step stands in one order over all ranks. A message is one place of it: there the sender sends and the
receiver receives. A rank's list is what concerns it of that order. So ranks cannot wait for each other in a circle,
even where a send ends only when its receive has begun (gloo; NCCL where messages are large): of all that is left, the
first in the order can always run. And what one rank sends another, that receives in the order in which it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.pipeline.play import Durations, play
from autopar.pipeline.schedule import SENDS, Action, Schedule, receiver_of


def with_messages(name: str, micro_batches: int, rank_of: Sequence[int], lists: Sequence[Sequence[Action]]) -> Schedule:
    """The schedule of these lists of F, B, I and W, with a send behind each action whose result another rank reads.

    The global order is that of the ends of actions where F, I and W take equally long and messages no time; a receive
    stands where its send does in it, behind all that has ended by then. Raises ScheduleError where the lists wait for
    each other.
    """
    bare = Schedule(name, micro_batches, tuple(rank_of), tuple(_with_sends(rank_of, one) for one in lists))
    even = (1.0,) * bare.stages
    times = play(bare, Durations(even, even, even, send=(0.0,) * (bare.stages - 1))).times
    # Sorting is stable, and a play's order has each action behind those it needs.
    order = sorted(times, key=lambda action: (times[action][1], action.kind in SENDS))
    return projected(name, micro_batches, rank_of, order)


def projected(name: str, micro_batches: int, rank_of: Sequence[int], order: Iterable[Action]) -> Schedule:
    """The schedule whose lists are those of one global order, in which sends stand for messages.

    The order is taken as it is: it is legal where each action stands behind what it needs.
    """
    lists: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    for action in order:
        lists[rank_of[action.stage]].append(action)
        if action.kind in SENDS:
            receive = receiver_of(action)
            lists[rank_of[receive.stage]].append(receive)
    return Schedule(name, micro_batches, tuple(rank_of), tuple(map(tuple, lists)))


def send_behind(rank_of: Sequence[int], made_by: Action) -> Action | None:
    """The send of what F, B or I makes; None where the reader is on the same rank, and where there is none."""
    stage = made_by.stage
    match made_by.kind:
        case "F" if stage + 1 < len(rank_of) and rank_of[stage] != rank_of[stage + 1]:
            return Action("SA", stage, made_by.micro_batch)
        case "B" | "I" if stage > 0 and rank_of[stage] != rank_of[stage - 1]:
            return Action("SG", stage, made_by.micro_batch)
        case _:
            return None


def _with_sends(rank_of: Sequence[int], computes: Iterable[Action]) -> tuple[Action, ...]:
    listed: list[Action] = []
    for action in computes:
        send = send_behind(rank_of, action)
        listed += [action] if send is None else [action, send]
    return tuple(listed)
