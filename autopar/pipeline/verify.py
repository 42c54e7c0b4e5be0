"""What every schedule must be, whoever made it. Shares no code with what makes and plays schedules.

    - each rank runs what its stages need, each action once, and nothing else: B, or I and W; sends and receives where
      the next stage is on another rank
    - in each list, what an action reads stands in front of it: F in front of B, I in front of W, a receive in front of
      its reader, the maker in front of its send
    - from one rank to another, messages are received in the order in which they are sent
    - ranks do not wait for each other in a circle, even where a send ends only once its receive has begun

The last is the same as: there is one global order, in which a message is one place, and each list is what concerns its
rank of that order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from autopar.pipeline.memory import InFlight, in_flight
from autopar.pipeline.schedule import RECEIVES, SENDS, Action, Kind, Schedule, ScheduleError


def verify(schedule: Schedule) -> InFlight:
    """How much is in flight on each rank along its list. Raises ScheduleError with the first violation, and how many
    there are.
    """
    if found := violations(schedule):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ScheduleError(f"{schedule.name}: {found[0]}{more}")
    return in_flight(schedule)


def violations(schedule: Schedule) -> list[str]:
    """A sentence for each rule that is broken somewhere, with rank, position and action. None: the schedule is right.

    Orders are looked at where every action is there once, and circles where the orders are right.
    """
    return (
        [*_misplaced(schedule)]
        or [*_miscounted(schedule)]
        or [*_too_early(schedule), *_crossed(schedule)]
        or [*_circle(schedule)]
    )


def _places(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """(rank, position, action) of all lists."""
    for rank, row in enumerate(schedule.lists):
        for position, action in enumerate(row):
            yield rank, position, action


def _misplaced(schedule: Schedule) -> Iterator[str]:
    for rank, position, action in _places(schedule):
        here = f"rank {rank}, position {position}: {action}"
        if not 0 <= action.stage < schedule.stages:
            yield f"{here} is of stage {action.stage}, but there are stages 0 to {schedule.stages - 1}"
        elif not 0 <= action.micro_batch < schedule.micro_batches:
            last = schedule.micro_batches - 1
            yield f"{here} is of micro-batch {action.micro_batch}, but there are micro-batches 0 to {last}"
        elif schedule.rank_of[action.stage] != rank:
            yield f"{here} is of stage {action.stage}, which is on rank {schedule.rank_of[action.stage]}"


def _miscounted(schedule: Schedule) -> Iterator[str]:
    seen: dict[Action, list[int]] = defaultdict(list)
    for _, position, action in _places(schedule):
        seen[action].append(position)
    for stage, rank in enumerate(schedule.rank_of):
        before = stage > 0 and schedule.rank_of[stage - 1] != rank
        behind = stage + 1 < schedule.stages and schedule.rank_of[stage + 1] != rank
        messages: dict[Kind, bool] = {"RA": before, "SA": behind, "RG": behind, "SG": before}
        for number in range(schedule.micro_batches):
            split = Action("I", stage, number) in seen or Action("W", stage, number) in seen
            if split and Action("B", stage, number) in seen:
                yield (
                    f"rank {rank} runs {Action('B', stage, number)} at position {seen[Action('B', stage, number)][0]}, "
                    "and the parts of that, I or W, too; run the one or the other"
                )
                continue
            needed: dict[Kind, bool] = {"F": True, "B": not split, "I": split, "W": split, **messages}
            for kind, wanted in needed.items():
                action = Action(kind, stage, number)
                positions = seen.get(action, [])
                if wanted and not positions:
                    yield f"rank {rank} never runs {action}; its list needs it once"
                elif positions and not wanted:
                    yield f"rank {rank}, position {positions[0]}: {action} has its other end on no other rank"
                elif len(positions) > 1:
                    yield f"rank {rank} runs {action} at positions {', '.join(map(str, positions))}; once is needed"


def _too_early(schedule: Schedule) -> Iterator[str]:
    at = {action: position for _, position, action in _places(schedule)}
    for rank, position, action in _places(schedule):
        for needed in _read_by(schedule, action, at):
            if at[needed] > position:
                yield (
                    f"rank {rank}, position {position}: {action} stands in front of {needed}, at position "
                    f"{at[needed]}, which it needs"
                )


def _read_by(schedule: Schedule, action: Action, at: dict[Action, int]) -> Iterator[Action]:
    """What stands in front of an action in its list."""
    kind, stage, number = action
    backward = Action("B", stage, number) if Action("B", stage, number) in at else Action("I", stage, number)
    match kind:
        case "F" if stage > 0:
            crosses = schedule.rank_of[stage - 1] != schedule.rank_of[stage]
            yield Action("RA", stage, number) if crosses else Action("F", stage - 1, number)
        case "B" | "I":
            yield Action("F", stage, number)
            if stage + 1 < schedule.stages:
                behind = Action("RG", stage, number)
                if schedule.rank_of[stage + 1] == schedule.rank_of[stage]:
                    whole = Action("B", stage + 1, number)
                    behind = whole if whole in at else Action("I", stage + 1, number)
                yield behind
        case "W":
            yield Action("I", stage, number)
        case "SA":
            yield Action("F", stage, number)
        case "SG":
            yield backward
        case _:
            return


def _peer(schedule: Schedule, message: Action) -> tuple[int, Action]:
    """The other rank of a message, and what stands in its list."""
    other = {"SA": "RA", "RA": "SA", "SG": "RG", "RG": "SG"}
    stage = message.stage + (1 if message.kind in ("SA", "RG") else -1)
    kind = other[message.kind]
    assert kind in SENDS or kind in RECEIVES
    return schedule.rank_of[stage], Action(kind, stage, message.micro_batch)


def _crossed(schedule: Schedule) -> Iterator[str]:
    sent: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, position, action in _places(schedule):
        if action.kind in SENDS:
            sent[rank, _peer(schedule, action)[0]].append((position, action))
        elif action.kind in RECEIVES:
            received[_peer(schedule, action)[0], rank].append((position, action))
    for (sender, receiver), messages in sent.items():
        for (place, receive), (position, send) in zip(received[sender, receiver], messages, strict=True):
            if _peer(schedule, send)[1] != receive:
                yield (
                    f"rank {receiver}, position {place}: {receive} would be given what rank {sender} sends as {send} "
                    f"at position {position}; receive in the order of the sends"
                )
                break  # the rest of this link is shifted


def _circle(schedule: Schedule) -> Iterator[str]:
    """Runs the lists with sends and receives that wait for each other; names the ranks that then wait in a circle."""
    places = [0] * schedule.ranks
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        row = schedule.lists[rank]
        while places[rank] < len(row):
            action = row[places[rank]]
            if action.kind in SENDS or action.kind in RECEIVES:
                other, wanted = _peer(schedule, action)
                if places[other] == len(schedule.lists[other]) or schedule.lists[other][places[other]] != wanted:
                    break
                places[other] += 1
                runnable.append(other)
            places[rank] += 1
    stuck = [rank for rank, place in enumerate(places) if place < len(schedule.lists[rank])]
    if stuck:
        # Who is stuck waits for somebody who is: what he waits for is in that list, and has not been run.
        seen: Counter[int] = Counter()
        rank, told = stuck[0], list[str]()
        while seen[rank] < 2:
            seen[rank] += 1
            action = schedule.lists[rank][places[rank]]
            other, _ = _peer(schedule, action)
            if seen[rank] == 2:
                told.append(f"rank {rank} with {action} at position {places[rank]} for rank {other}")
            rank = other
        yield f"ranks wait for each other in a circle: {', '.join(told)}"
