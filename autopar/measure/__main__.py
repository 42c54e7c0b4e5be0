"""The command line: `python -m autopar.measure plan.json FACTORY`, on this machine's processors or under torchrun."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import BadArgument, NotCut, PlanMismatch, TraceError
from autopar.ir.batch_norm import GLOBAL, parts_of
from autopar.machine.cli import BAD_ARGUMENTS, INTERRUPTED, Parser
from autopar.machine.device import processors
from autopar.machine.local_ranks import environment, local_ranks
from autopar.machine.plan_files import plan_at
from autopar.machine.rules_files import FLAG, HELP, METAVAR, rules_named
from autopar.measure.pipeline import measure_pipeline
from autopar.measure.pipeline_report import MeasuredPipeline
from autopar.measure.report import Measured
from autopar.measure.twin import measure, traced
from autopar.plan import Plan
from autopar.plan.fit import check
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.micro_batches import in_rounds
from autopar.search.command.factory import Example, build
from autopar.search.pipeline import Pipeline
from autopar.search.pipeline_file import is_pipeline
from autopar.simulate.timeline import pricer_of
from autopar.trace.precision import precision_named
from cost_models.hardware import Hardware, known_hardware
from cost_models.whole_file import write_whole

DIFFERENT = 1
OTHER_BYTES = 3  # DIFFERENT, from a process that was started here: 1 is also what Python ends with after an error
RANKS_PER_PROCESSOR = 4  # more of them only wait for each other; up to 8 are started on any machine
LOST_S = 600  # a collective that waits longer has lost its partners
STORE = "AUTOPAR_MEASURE_STORE"  # where processes that were started here meet

DESCRIPTION = """\
Execute a plan and print what was predicted beside what was measured: time by phase, the traffic of every collective,
and peak memory. Starts a process of one thread for each rank of the plan's mesh; under torchrun it uses those."""

EPILOG = """\
example
  $ python -m autopar.search examples/gpt2.py:build --mesh data=2 --hardware cpu-gloo -o plan.json
  $ python -m autopar.measure plan.json examples/gpt2.py:build --steps 5

exit status: 0 measured, 1 the collectives were not those of the plan (a defect) or a process failed, 2 bad arguments,
130 interrupted
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m autopar.measure", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("plan", metavar="PLAN", help="the plan's file, as python -m autopar.search -o writes it")
    add("model", metavar="FACTORY", help="file.py:function or package.module:function, as for python -m autopar.search")
    add("--steps", type=int, default=10, metavar="N", help="undisturbed steps to time (default: 10)")
    add("--hardware", metavar="NAME|FILE",
        help="the profile that priced the plan, where it is neither one of autopar's nor this machine's")  # fmt: skip
    add(FLAG, metavar=METAVAR, help=HELP)
    add("--precision", metavar="NAME", default="fp32", help="as the plan was searched with: bf16 or fp32 (default: "
        "fp32)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one for each rank here")
    add("--json", metavar="FILE", help="write all figures as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Where it is 2, a sentence on stderr says why."""
    try:
        given = _parser().parse_args(arguments)
        if "RANK" in os.environ:
            return _rank(given)
        _checked(given)
        argv = sys.argv[1:] if arguments is None else list(arguments)
        return _start(argv, _planned(given).mesh.ranks)
    except (BadArgument, PlanMismatch, TraceError) as error:
        return _say(error, BAD_ARGUMENTS)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _say(what: object, status: int) -> int:
    if os.environ.get("RANK", "0") == "0" or STORE in os.environ:  # one started here fails by itself
        print(f"autopar.measure: {what}", file=sys.stderr)
    return status


# --- what was asked for ----------------------------------------------------------------------------------------------


def _planned(given: argparse.Namespace) -> Plan | Pipeline:
    """Of a file of either kind."""
    try:
        if is_pipeline(given.plan):
            return Pipeline.load(given.plan, rules_named(given.rules))
    except OSError:
        pass  # which the next line tells
    return plan_at(given.plan, given.rules)


def _checked(
    given: argparse.Namespace, *, fits: bool = False
) -> tuple[Plan | Pipeline, Example, Hardware | None, str]:  # fmt: skip
    """Everything that can be wrong is told before a process is started: the plan must be for this model and machine.
    `fits`: whoever has started this process has looked at that, which takes a trace.
    """
    if given.steps < 1:
        raise BadArgument(f"--steps {given.steps} is no number of steps; give at least 1")
    if given.json is not None and not Path(given.json).absolute().parent.is_dir():
        raise BadArgument(f"folder {Path(given.json).absolute().parent} of --json {given.json} does not exist")
    plan = _planned(given)
    whole, rounds_of = (plan.whole, in_rounds_of_stages) if isinstance(plan, Pipeline) else (plan, in_rounds)
    try:
        precision = precision_named(given.precision)
    except ValueError as error:
        raise BadArgument(str(error)) from error
    device = _device(given.device, plan)
    hardware = _hardware(given.hardware)
    if hardware is not None:
        pricer_of(whole, hardware)  # another profile is refused here
    example = build(given.model)
    if not fits:
        _check_fits(whole, rounds_of, example, precision, device, given)
    return plan, example, hardware, device


def _check_fits(
    plan: Plan, rounds_of: Any, example: Example, precision: Any, device: str, given: argparse.Namespace
) -> None:  # fmt: skip
    try:
        graph = traced(
            example.model, example.args, example.kwargs, parts=parts_of(plan.batch_norm or GLOBAL, plan.mesh),
            precision=precision, device_type=device, rules=plan.graph.outside, loss_alone=plan.outputs == "loss",
        )  # fmt: skip
    except TypeError as error:
        raise BadArgument(f"{given.model} returned inputs that its model does not take: {error}") from error
    try:
        rounds = rounds_of(graph, plan.graph.rounds.count)
    except NotCut as why:
        count = plan.graph.rounds.count
        raise BadArgument(
            f"{given.plan} is of a step in {count} micro-batches, which {given.model} does not have: {why}"
        ) from why
    check(plan, rounds, plan.mesh, origin=str(given.plan))


def _device(asked: str | None, plan: Plan | Pipeline) -> str:
    ranks, under_torchrun = plan.mesh.ranks, "RANK" in os.environ
    if under_torchrun and int(os.environ["WORLD_SIZE"]) != ranks:
        raise BadArgument(
            f"the plan is for mesh {plan.mesh}, but {os.environ['WORLD_SIZE']} processes run; start {ranks} of them"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if under_torchrun else ranks
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = asked or ("cuda" if devices >= here else "cpu")
    if device == "cuda" and devices < here:
        raise BadArgument(f"--device cuda: {here} ranks need a device each, this machine has {devices}")
    most = max(8, RANKS_PER_PROCESSOR * processors())
    if not under_torchrun and device == "cpu" and ranks > most:
        raise BadArgument(
            f"the plan is for mesh {plan.mesh}; {ranks} processes on this machine's {processors()} processors would "
            f"measure nothing but waiting, up to {most} are started here; run it under torchrun where they have room"
        )
    return device


def _hardware(name: str | None) -> Hardware | None:
    try:
        return None if name is None else Hardware.load(name)
    except ValueError as error:
        raise BadArgument(str(error)) from error
    except OSError as error:
        known = ", ".join(known_hardware())
        raise BadArgument(f"hardware profile {name} cannot be read: {error.strerror}; known are {known}") from error


# --- processes -------------------------------------------------------------------------------------------------------


def _start(arguments: Sequence[str], ranks: int) -> int:
    """The same command on that many processes here; the first that fails ends all."""
    command = [sys.executable, "-m", "autopar.measure", *arguments]
    with tempfile.TemporaryDirectory(prefix="autopar-measure-") as folder:
        env = environment() | {STORE: f"{folder}/store"}
        with local_ranks(command, ranks, env) as processes:
            codes: list[int | None] = [None]
            while None in codes and not any(codes):
                time.sleep(0.05)
                codes = [process.poll() for process in processes]
            if None in codes:
                time.sleep(0.5)  # others may say why
    failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, OTHER_BYTES)]
    if failed:
        return _say(f"process {failed[0]} failed; its error stands above", DIFFERENT)
    return DIFFERENT if any(codes) else 0


def _rank(given: argparse.Namespace) -> int:
    """One process of several: measure, and on rank 0 say what was found."""
    if STORE in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the starting process, which ends this one
    plan, example, hardware, device = _checked(given, fits=STORE in os.environ)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank, world, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get(STORE)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}" if store else "env://",
        rank=rank, world_size=world, timeout=timedelta(seconds=LOST_S),
    )  # fmt: skip
    how: Any = {"hardware": hardware, "device_type": device, "precision": precision_named(given.precision)}
    if isinstance(plan, Pipeline):
        found = measure_pipeline(plan, example.model, example.args, example.kwargs, steps=given.steps, **how)
    else:
        found = measure(plan, example.model, example.args, example.kwargs, steps=given.steps, **how)
    status = 0 if found.is_equal else DIFFERENT
    if rank == 0:
        _tell(found, given)
    dist.barrier()
    if store:
        sys.stdout.flush()
        os._exit(
            OTHER_BYTES if status else 0
        )  # gloo's threads abort now and then when many groups are taken down at once (torch 2.13)
    dist.destroy_process_group()
    return status


def _tell(found: Measured | MeasuredPipeline, given: argparse.Namespace) -> None:
    print(f"{given.plan}, executed with {given.model}\n{found.table()}", end="", flush=True)
    if given.json is not None:
        content = {"plan": str(given.plan), "model": given.model, **found.to_json()}
        write_whole(given.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
    if not found.is_equal:
        _say("the collectives were not those of the plan: a defect of autopar, please report the model", DIFFERENT)


if __name__ == "__main__":
    sys.exit(main())
