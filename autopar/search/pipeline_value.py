"""A step in stages, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.pipeline import Durations, Played, RankMemory, Schedule, StageBytes, least_seconds
from autopar.plan import Plan
from autopar.rewrite.stages import Stage


@dataclass(frozen=True)
class PipelineValue:
    """A step in stages.

    stages, plans   of each stage: its graph with what crosses its cuts, and how it runs on the mesh of one stage
    ends            behind how many forward operators of the whole plan's graph each stage but the last one ends
    schedule        what every rank of `pipe` does, in order; `played`: when, for one micro-batch of `durations`
    memory          bytes of a device of each rank of `pipe`, along its list; `schedule.rank_of` says which has a stage
    step_seconds    of the schedule, with the updates behind it; simulated
    whole           the plan that was cut
    nbytes          of a device of each stage, from which `memory` is
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    plans: tuple[Plan, ...]
    ends: tuple[int, ...]
    schedule: Schedule
    durations: Durations
    played: Played
    memory: tuple[RankMemory, ...]
    step_seconds: float
    whole: Plan
    nbytes: StageBytes

    @property
    def peak_bytes(self) -> int:
        """Of the device that holds the most."""
        return round(max(rank.peak for rank in self.memory))

    @property
    def least_seconds(self) -> float:
        """Below which no order of these stages ends a schedule (`autopar.pipeline.least_seconds`)."""
        return least_seconds(self.schedule.rank_of, self.schedule.micro_batches, self.durations)

    @property
    def bubble(self) -> float:
        """The share of the schedule in which the mean rank computes nothing."""
        return sum(self.played.idle) / len(self.played.idle) / self.played.makespan
