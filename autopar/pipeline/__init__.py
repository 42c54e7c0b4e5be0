"""Pipeline schedules as plain values: made by name, verified, played.

schedule = make_schedule("zb-h1", ranks=4, micro_batches=8)
counts = verify(schedule)                                   # or a sentence that says what is wrong
played = play(schedule, Durations((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), send=(0, 0, 0)))
played.makespan, played.idle, memory(schedule, nbytes)
"""

from autopar.pipeline.bound import least_seconds
from autopar.pipeline.generate import SCHEDULES, make_schedule, placed
from autopar.pipeline.memory import InFlight, RankMemory, StageBytes, in_flight, in_flight_of_stages, memory
from autopar.pipeline.messages import projected, with_messages
from autopar.pipeline.play import Durations, Played, makespans, play
from autopar.pipeline.schedule import Action, Schedule, ScheduleError, receiver_of, sender_of
from autopar.pipeline.verify import verify, violations

__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "InFlight",
    "Played",
    "RankMemory",
    "Schedule",
    "ScheduleError",
    "StageBytes",
    "in_flight",
    "in_flight_of_stages",
    "least_seconds",
    "make_schedule",
    "makespans",
    "memory",
    "placed",
    "play",
    "projected",
    "receiver_of",
    "sender_of",
    "verify",
    "violations",
    "with_messages",
]
