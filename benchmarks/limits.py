"""Do memory limits hold? Ten models, five limits each: the peak that a plan was searched for, predicted and measured.

    python -m benchmarks.limits --write docs/benchmarks/limits.md

The limits of a model lie in even ratios between the least that a plan was found for and what the fastest plan takes.
Under each, one search decides layouts, recomputation, offloading and where parameters and optimizer states live; then
the plan trains on gloo processes. Peaks are those of `autopar.measure`: all live storages of a whole step with forward,
backward and optimizer, on the rank that holds the most. The claims, of every row:

- what was measured is not above the limit, and the prediction is within 5 % of it
- the first losses are those of the plain model in one process
- within a model, the predicted step time does not rise when the limit does

Ends with status 1 if one is broken. Step times are the profile's predictions; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import Plan
from autopar._compat import pytree
from autopar.ir.mesh import Mesh
from autopar.measure.twin import memory_of, traced
from autopar.optim import Streamed
from autopar.plan.tell import human
from autopar.search.curve import offloaded_bytes, recomputed
from autopar.search.memory_options import ALLOWED
from autopar.search.request import Request
from autopar.search.search import Infeasible, NoAnswerInTime, Question, answer, ask
from benchmarks.small import SMALL, build
from cost_models.hardware import Hardware
from cost_models.whole_file import write_whole

PROCESSES = 2
LIMITS = 5
WITHIN = 0.05  # how far the predicted peak may lie from the measured one, as a share of that
LOSS = 1e-5  # how far losses may differ, relatively: float32 sums in another order, through some updates
STEPS = 3  # losses that are compared
NEAR, TRIES = 1.05, 6  # the least limit is sought to this ratio, or in so many searches
RISES = 1e-9  # relatively; a step time that rises by less has been added up in another order


@dataclass(frozen=True)
class Row:
    """One limit of one model. Bytes are of a rank's device; `error` stands where there is no plan, or it did not run.

    `recomputed`: operators that run twice; `offloaded`: bytes of forward values; `hosted`, `streamed`: parameters that
    live on the host, or whose states do; `gap`: how far from the best the plan may be, relatively; `loss_off`: the
    largest relative difference of a loss.
    """

    model: str
    limit: float
    predicted: float = math.nan
    measured: float = math.nan
    predicted_s: float = math.nan
    gap: float = math.nan
    recomputed: int = 0
    offloaded: int = 0
    hosted: int = 0
    streamed: int = 0
    loss_off: float = math.nan
    error: str = ""

    @property
    def broken(self) -> str:
        """Which claims it breaks; "" none."""
        if self.error:
            return self.error
        found: list[str] = []
        if not self.measured <= self.limit:
            found.append("above the limit")
        if not abs(self.predicted / self.measured - 1) <= WITHIN:
            found.append("predicted wrongly")
        if not self.loss_off <= LOSS:
            found.append("another loss")
        return ", ".join(found)


def rising(rows: Iterable[Row]) -> set[tuple[str, float]]:
    """(model, limit) of the rows that are slower than one of the same model with a smaller limit."""
    found: set[tuple[str, float]] = set()
    best: dict[str, float] = {}
    for row in sorted((row for row in rows if not row.error), key=lambda row: row.limit):
        if row.predicted_s > best.get(row.model, math.inf) * (1 + RISES):
            found.add((row.model, row.limit))
        best[row.model] = min(row.predicted_s, best.get(row.model, math.inf))
    return found


# --- plans -----------------------------------------------------------------------------------------------------------


def question_of(name: str) -> Question:
    model, inputs = build(name)
    return ask(traced(model, (), inputs), Mesh(("data",), (PROCESSES,)), Hardware.load("cpu-gloo"))


def limits_between(find: Callable[[float | None], Plan], count: int = LIMITS) -> list[float]:
    """So many limits in even ratios, from the least that a plan is found for to what the fastest plan takes."""
    ample = float(find(None).peak_bytes["hbm"])
    least = least_limit(find, ample)
    ratio = (ample / least) ** (1 / (count - 1))
    return [least, *(float(math.ceil(least * ratio**place)) for place in range(1, count - 1)), ample]


def least_limit(find: Callable[[float | None], Plan], ample: float) -> float:
    """The least limit that a plan was found for. A search that fails says mostly what would do, if not the least."""
    low, high, limit = 0.0, ample, 1.0
    for _ in range(TRIES):
        enough = None
        try:
            find(limit)
            high = limit
        except Infeasible as error:
            low, enough = max(low, limit, error.at_least or 0.0), error.enough
        except NoAnswerInTime:
            low = max(low, limit)
        if high <= low * NEAR:
            break
        limit = math.ceil(enough if enough is not None and low <= enough < high else math.sqrt(low * high))
    return high


def search_all(name: str, count: int, folder: Path, time_limit_s: float) -> list[Row]:
    """A row for each limit, with what was predicted; the plans are written to `folder`, by number of the limit."""
    question = question_of(name)

    def find(limit: float | None) -> Plan:
        return answer(question, Request(memory=limit, allow=ALLOWED, time_limit_s=time_limit_s))

    rows: list[Row] = []
    limits = limits_between(find, count)
    if limits[0] == limits[-1]:
        return [Row(name, limits[0], error="no plan found in less than the fastest takes: give --time-limit more")]
    for number, limit in enumerate(limits):
        began = time.perf_counter()
        try:
            plan = find(limit)
        except (Infeasible, NoAnswerInTime) as error:
            rows.append(Row(name, limit, error=f"{type(error).__name__}: {error}"))
            continue
        plan.save(folder / f"{number}.json")
        where = list(plan.residence.values())
        rows.append(
            Row(
                name, limit, plan.peak_bytes["hbm"], predicted_s=plan.predicted_seconds, gap=plan.gap,
                recomputed=recomputed(plan), offloaded=offloaded_bytes(plan),
                hosted=where.count("host"), streamed=where.count("stream"),
            )
        )  # fmt: skip
        told = f"{name} in {human(limit)}: {plan.predicted_seconds * 1e3:.3f} ms, gap {plan.gap:.2%}"
        print(f"{told}, searched for {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return rows


# --- running ---------------------------------------------------------------------------------------------------------


def losses(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[float]:
    """The first losses of a training loop; `model` is trained."""
    # An eps above rounding noise: a gradient that is zero but for rounding is no reason to move.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-6)
    if isinstance(model, autopar.ParallelModule):
        optimizer = Streamed(optimizer, model)
    found: list[float] = []
    for _ in range(STEPS):
        leaves = pytree.tree_leaves(model(**inputs))
        loss = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim == 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def run_plan(name: str, plan: Plan, mesh: DeviceMesh) -> tuple[float, float]:
    """(the measured peak in bytes, the largest relative difference of a loss)."""
    model, inputs = build(name)
    peak = memory_of(plan, model, (), inputs)["step"].measured
    parallel = autopar.compile(model, mesh, example_kwargs=inputs, plan=plan)
    pairs = zip(losses(parallel, inputs), losses(build(name)[0], inputs), strict=True)
    return peak, max(abs(ours - wanted) / abs(wanted) for ours, wanted in pairs)


def worker(name: str, folder: Path) -> None:
    """A rank: runs the plans in `folder`; rank 0 tells what came of them."""
    torch.set_num_threads(1)
    mesh = autopar.init_mesh("cpu", data=int(os.environ["WORLD_SIZE"]))
    for file in sorted(folder.glob("*.json")):
        peak, off = run_plan(name, Plan.load(file), mesh)
        if dist.get_rank() == 0:
            print("RAN " + json.dumps([file.stem, peak, off]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(name: str, count: int = LIMITS, time_limit_s: float = 60.0) -> list[Row]:
    """The rows of a model."""
    with tempfile.TemporaryDirectory(prefix="autopar-limits-") as place:
        rows = search_all(name, count, Path(place), time_limit_s)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES), "-m",
            "benchmarks.limits", "--worker", name, "--folder", place,
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [line.removeprefix("RAN ") for line in done.stdout.splitlines() if line.startswith("RAN ")]
    ran = {int(number): (peak, off) for number, peak, off in map(json.loads, lines)}
    for number, row in enumerate(rows):
        if number in ran:
            measured, off = ran[number]
            rows[number] = Row(**{**asdict(row), "measured": measured, "loss_off": off})
        elif not row.error:
            rows[number] = Row(**{**asdict(row), "error": f"did not run: status {done.returncode}"})
    return rows


# --- the page --------------------------------------------------------------------------------------------------------


def verdict(rows: Sequence[Row]) -> list[str]:
    """The figures that say whether the claims hold."""
    ran, slower = [row for row in rows if not row.error], rising(rows)
    lines = [
        f"- {len(rows)} limits of {len({row.model for row in rows})} models; plans that were found and ran: {len(ran)}",
        f"- measured peak at most the limit: {sum(row.measured <= row.limit for row in ran)} of {len(rows)}",
    ]
    if ran:
        ratios = [row.predicted / row.measured for row in ran]
        lines += [
            f"- predicted / measured peak: {min(ratios):.4f} to {max(ratios):.4f}",
            f"- losses of the first {STEPS} steps: at most {max(row.loss_off for row in ran):.1e} off, relatively",
            f"- measured peak / limit: {min(row.measured / row.limit for row in ran):.4f} to "
            f"{max(row.measured / row.limit for row in ran):.4f}",
        ]
    lines.append(f"- rows with a step time that rises with the limit: {len(slower)}")
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| model | limit KiB | predicted KiB | measured KiB | ratio | predicted ms | gap | recomputed "
        "| offloaded KiB | on the host | streamed | loss off | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    slower = rising(rows)
    for row in rows:
        told = row.broken
        if (row.model, row.limit) in slower:
            told = f"{told}, slower with more" if told else "slower with more"
        lines.append(
            f"| {row.model} | {row.limit / 2**10:.1f} | {row.predicted / 2**10:.1f} | {row.measured / 2**10:.1f} "
            f"| {row.predicted / row.measured:.4f} | {row.predicted_s * 1e3:.3f} | {row.gap:.2%} | {row.recomputed} "
            f"| {row.offloaded / 2**10:.1f} | {row.hosted} | {row.streamed} | {row.loss_off:.0e} | {told or 'ok'} |"
        )
    return lines


def markdown(rows: Sequence[Row], command: str) -> str:
    return (
        "\n".join(
            [
                "# Memory limits, kept",
                "",
                f"`{command}`, {date.today()}, torch {torch.__version__}, {machine()}, {os.cpu_count()} cores; "
                f"{PROCESSES} gloo processes, AdamW, profile cpu-gloo, all of {', '.join(ALLOWED)} open.",
                "",
                "Peaks are bytes of live storages on a rank, over a whole step; ratio: predicted over measured. "
                "Recomputed: operators that run twice. On the host: parameters with gradient and states; streamed: "
                "parameters whose states alone live there. Gap: how far the plan may be from the best, proven. "
                "Loss off: the largest relative difference to one process.",
                "",
                *verdict(rows),
                "",
                *table(rows),
            ]
        )
        + "\n"
    )


def machine() -> str:
    """The processor's name."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip() if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SMALL), choices=list(SMALL))
    parser.add_argument("--limits", type=int, default=LIMITS, help="of each model")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="of each search")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there, too")
    parser.add_argument("--rows", type=Path, help="JSON lines: models that stand there are not run again")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.folder)
        return
    kept = given.rows.read_text().splitlines() if given.rows and given.rows.exists() else []
    known = [Row(**json.loads(line)) for line in kept]
    rows: list[Row] = []
    for name in given.models:
        found = [row for row in known if row.model == name]
        if not found:
            found = run(name, given.limits, given.time_limit)
            kept += [json.dumps(asdict(row)) for row in found]
            if given.rows:
                write_whole(given.rows, "\n".join(kept) + "\n")
        rows += found
        print("\n".join(table(found)), file=sys.stderr, flush=True)
    text = markdown(rows, "python -m benchmarks.limits " + " ".join(sys.argv[1:]))
    print(text)
    if given.write:
        write_whole(given.write, text)
    if any(row.broken for row in rows) or rising(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
