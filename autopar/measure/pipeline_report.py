"""A pipeline's prediction beside what a run of it measured: the figures, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.measure.report import Moved, Pair, columns, ms, ratio
from autopar.plan.tell import human


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """Seconds of one micro-batch, with the collectives within the stage. `rank`: of the pipe, which has the stage."""

    rank: int
    forward: Pair
    backward: Pair


@dataclass(frozen=True, slots=True)
class MeasuredRank:
    """A rank of the pipe: of its devices the largest. `sent`: bytes to other stages, planned and made, with those of
    the gradients of tied parameters. `collectives`: (collective, axis) -> bytes received, planned and made.
    """

    peak: Pair
    sent: tuple[int, int]
    collectives: Mapping[Moved, tuple[int, int]]

    @property
    def is_equal(self) -> bool:
        return all(planned == made for planned, made in (self.sent, *self.collectives.values()))


@dataclass(frozen=True)
class MeasuredPipeline:
    """One step in stages, executed. `schedule_seconds`: predicted, and played again with the seconds that the stages
    were measured to take by themselves, so that what is above that in a step is waiting, sends and updates.
    """

    mesh: str
    hardware: str
    schedule: str
    micro_batches: int
    optimizer: str
    where: str
    steps: int
    step: Pair
    schedule_seconds: Pair
    stages: tuple[MeasuredStage, ...]
    ranks: tuple[MeasuredRank, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether messages and collectives were those of the plan, to the byte."""
        return all(one.is_equal for one in self.ranks)

    def to_json(self) -> dict[str, Any]:
        def of_rank(rank: MeasuredRank) -> dict[str, Any]:
            moved = [
                {"kind": kind, "axis": axis, "nbytes": nbytes} for (kind, axis), nbytes in rank.collectives.items()
            ]
            return {"peak": asdict(rank.peak), "sent": rank.sent, "collectives": moved, "is_equal": rank.is_equal}

        return {**asdict(self), "ranks": [of_rank(rank) for rank in self.ranks], "is_equal": self.is_equal}

    def table(self) -> str:
        lines = [
            f"mesh {self.mesh}, planned for {self.hardware}, schedule {self.schedule}, {self.micro_batches} "
            f"micro-batches, optimizer {self.optimizer}",
            f"run on {self.where}",
            "",
            *columns([("time", "predicted", "measured", "ratio"), *self._times()]),
            f"  step: the median of {self.steps} undisturbed steps on the slowest rank; forward and backward: of one",
            "  micro-batch, with the collectives within the stage, timed by themselves; the schedule of the measured",
            "  ones is played, not run: it says what the step would take if nothing else took time",
            "",
        ]
        moved = [
            (what, f"{planned:,}", f"{made:,}", "equal" if planned == made else "DIFFERENT")
            for what, (planned, made) in self._moved()
        ]
        lines += [*columns([("bytes of a step and device", "planned", "moved", ""), *moved]), ""]
        memory = [
            (f"rank {at} of pipe", human(rank.peak.predicted or 0), human(rank.peak.measured), ratio(rank.peak))
            for at, rank in enumerate(self.ranks)
        ]
        lines += columns([("memory peak of a device", "predicted", "measured", "ratio"), *memory])
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def _times(self) -> list[tuple[str, ...]]:
        rows = [("step", self.step), ("schedule", self.schedule_seconds)]
        for at, stage in enumerate(self.stages):
            rows += [(f"stage {at} (rank {stage.rank}), forward", stage.forward)]
            rows += [(f"stage {at} (rank {stage.rank}), backward", stage.backward)]
        return [(name, ms(pair.predicted or 0.0), ms(pair.measured), ratio(pair)) for name, pair in rows]

    def _moved(self) -> list[tuple[str, tuple[int, int]]]:
        found: list[tuple[str, tuple[int, int]]] = []
        for at, rank in enumerate(self.ranks):
            found.append((f"rank {at}, sent to other stages", rank.sent))
            found += [(f"rank {at}, {kind} over {axis}", both) for (kind, axis), both in rank.collectives.items()]
        return found
