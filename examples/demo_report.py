"""What the demo says of its two training runs: how far apart their losses are, and how far they may be.

It is imported by demo.py, beside which it lies.
"""

from __future__ import annotations

import csv
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# How far the losses may differ, relatively: in the first so many steps, and in the mean of the last tenth of all steps.
# Training amplifies rounding, so the line is drawn between two things measured on one process without autopar (torch
# 2.13, AMD EPYC, 2026-11-20, two texts, batches of two seeds); the largest difference in 10 and in 50 steps, when
#   every weight is moved by one rounding, or every activation rounded once more    at most  2.2e-7  2.3e-7
#   one bias of 384 misses half of the batch                                        at least 3.4e-6  4.9e-5
# (7.2e-7 with three more seeds.) That holds at this rate of learning. At 1e-3 the largest gradient may be three times
# that of the steps around it, as at step 25 on one of the texts: from there on one rounding made 7.2e-5.
# tests/examples/test_demo.py measures both again.
TOLERANCES, END_TOLERANCE = {10: 1e-6, 50: 5e-6}, 1e-2
SAME = "SAME: in parallel it learns what one process learns"
DIFFERENT = "DIFFERENT: this is a defect of autopar; please report it, with losses.csv"


def say(*text: object) -> None:
    """Print on rank 0."""
    if os.environ["RANK"] == "0":
        print(*text, flush=True)


@dataclass
class History:
    """Of every step, the loss and the seconds it took."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """The median; the first steps, which warm up, count little in it."""
        return statistics.median(self.seconds)

    @property
    def end_loss(self) -> float:
        """The mean of the last tenth: single batches are harder or easier."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


def relative(one: History, other: History) -> list[float]:
    """|one - other| / other of the steps that both have made."""
    return [abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=False)]


def compare(ours: History, alone: History, held_out: tuple[float, float, float], plan: Any, predicted: bool) -> bool:
    """Say how the two runs compare; whether they agree."""
    differences = relative(ours, alone)
    found = {steps: max(differences[:steps], key=worst) for steps in TOLERANCES}
    at_end = abs(ours.end_loss / alone.end_loss - 1)
    reloaded = max((abs(loss / held_out[0] - 1) for loss in held_out[1:]), key=worst)
    agrees = all(found[steps] <= allowed for steps, allowed in TOLERANCES.items())  # nan agrees with nothing
    agrees = agrees and at_end <= END_TOLERANCE and reloaded <= TOLERANCES[10]
    say("\n--- how they compare\n")
    if predicted:
        took, told = ours.step_s * 1e3, plan.predicted_seconds * 1e3
        say(f"    step time         predicted {told:.0f} ms, measured {took:.0f} ms")
    say(f"    on one process    {alone.step_s * 1e3:.0f} ms, {alone.step_s / ours.step_s:.2f} times as long")
    for steps, allowed in TOLERANCES.items():
        told = f"losses differ by {found[steps]:.1e} at most, allowed {allowed:.0e}"
        say(f"    first {min(steps, len(ours.losses)):2} steps    {told}")
    say(f"    last tenth        mean losses differ by {at_end:.1e}, allowed {END_TOLERANCE:.0e}")
    say(f"    held-out loss     {held_out[0]:.6f} in parallel")
    say(f"                      {held_out[1]:.6f} in a plain model that loaded model.pt")
    say(f"                      {held_out[2]:.6f} in a plain model that loaded checkpoint")
    say(f"\n    {SAME if agrees else DIFFERENT}")
    return agrees


def worst(difference: float) -> float:
    """A key by which nan is the largest of all."""
    return float("inf") if difference != difference else difference


def write_losses(path: Path, ours: History, alone: History) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "parallel_loss", "one_process_loss", "parallel_s", "one_process_s"])
        for step, row in enumerate(zip(ours.losses, alone.losses, ours.seconds, alone.seconds, strict=True), start=1):
            writer.writerow([step, *row])


def draw(path: Path, ours: History, alone: History, processes: int) -> None:
    """Both curves over each other, and below them how far apart they are."""
    try:
        import matplotlib
    except ImportError:
        say("\n    no picture: matplotlib is missing (pip install -e '.[demo]'); losses.csv has the numbers")
        path.unlink(missing_ok=True)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(ours.losses) + 1)
    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    upper.plot(steps, alone.losses, color="#f2a65a", linewidth=5, label="one process, plain PyTorch")
    upper.plot(steps, ours.losses, color="#1f3b73", linewidth=1.2, label=f"{processes} processes, autopar")
    upper.set_ylabel("loss (nats per byte)")
    upper.set_title("GPT-2 learns Python's standard library")
    upper.legend(frameon=False)
    # Equal losses have no place on a logarithmic axis: they stand at 1e-8, below float32's grain.
    lower.semilogy(steps, [max(d, 1e-8) for d in relative(ours, alone)], ".", color="#1f3b73", markersize=3)
    last = 0
    for until, allowed in TOLERANCES.items():
        lower.plot(
            (last + 1, max(last + 1, min(until, len(steps)))), (allowed, allowed), color="#b3261e", linewidth=1.5
        )
        last = until
    lower.annotate("allowed", (1, TOLERANCES[10]), xytext=(0, 4), textcoords="offset points", color="#b3261e")
    lower.set_ylabel("relative difference")
    lower.set_xlabel("step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
