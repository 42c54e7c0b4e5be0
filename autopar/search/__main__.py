"""The command line: `python -m autopar.search MODEL --mesh NAME=N[,NAME=N...]`, on any machine, without weights."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.attach.calls import by_name
from autopar.batch_norm import GLOBAL, LOCAL, STATISTICS, parts_of, statistics_of
from autopar.command import BAD_ARGUMENTS, INTERRUPTED, BadArgument, Parser, writable
from autopar.compile import ways_named
from autopar.graph import Graph
from autopar.here import device_type_of, hardware_or_here, has_expandable_segments, is_here, memory_bytes, tf32_set
from autopar.measure.calls import Profile
from autopar.measure.operators import DEFAULT_S, profiler
from autopar.mesh import parse_mesh
from autopar.plan import Plan
from autopar.price import OPTIMIZER_STATES
from autopar.search import curve
from autopar.search.baselines import Row, compare, table
from autopar.search.document import document
from autopar.search.factory import Example, build
from autopar.search.keep import kept
from autopar.search.limits import size
from autopar.search.reserved import held_within, telling, told
from autopar.search.search import Infeasible, NoAnswerInTime, Progress, Question, answer, ask
from autopar.search.spare import NEEDS_OPTIM, SPARES
from autopar.trace import Captured, TraceError, capture, graph_of
from autopar.trace.ambient import autocast_as_asked
from autopar.trace.interrupts import interruptible
from autopar.trace.precision import precision_named
from cost_models.hardware import TF32_KINDS, Hardware, known_hardware
from cost_models.reserve import room_in
from cost_models.whole_file import write_whole

T = TypeVar("T")

INFEASIBLE, NO_ANSWER = 3, 4

DESCRIPTION = """\
Find the fastest way to train a model on a cluster that fits in memory, and say why. Needs no GPU, no process group and
no weights: the model may be built on the meta device."""

EPILOG = f"""\
example
  $ cat mlp.py
  import torch
  from torch import nn

  class Model(nn.Module):
      def __init__(self):
          super().__init__()
          self.layers = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096))

      def forward(self, x, y):
          return nn.functional.mse_loss(self.layers(x), y)

  def build():
      with torch.device("meta"):  # shapes only, nothing is allocated
          return Model(), (torch.empty(8192, 4096), torch.empty(8192, 4096))

  $ python -m autopar.search mlp.py:build --mesh data=2,tensor=4 --hardware h100-sxm --precision bf16 -o plan.json

  and on the cluster: autopar.compile(model, mesh, plan="plan.json", precision="bf16")

hardware profiles: {", ".join(known_hardware())}; or your own file.toml
exit status: 0 plan found, 2 bad arguments, 3 nothing fits in memory, 4 no answer in time, 130 interrupted
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m autopar.search", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("model", metavar="MODEL", help="file.py:function or package.module:function; the function returns "
        "(model, args) or (model, args, kwargs), with inputs of the whole (global) batch")  # fmt: skip
    add("--mesh", required=True, metavar="NAME=N[,NAME=N...]",
        help="axes of ranks, outermost first: data=8,tensor=8 is 64 ranks, tensor within a node")  # fmt: skip
    add("--hardware", metavar="NAME|FILE", help="profile of the machine to plan for (default: this machine's GPU)")
    add("--memory", metavar="SIZE",
        help="what a plan may use of each rank's device: 70GiB, 40GB, or 0.9 of it (default: all of it, by the "
        "profile); on GPUs a part of it is left for what no plan counts")  # fmt: skip
    add("--spare", metavar="WAYS",
        help="what may be done where the fastest plan does not fit: some of " + ", ".join(SPARES) + " with commas "
        "between, or none (default: what makes sense on the hardware; "
        f"{NEEDS_OPTIM} is only used where it is named, and needs autopar.optim)")  # fmt: skip
    add("--keep", metavar="NAME=WHAT[,NAME=WHAT...]",
        help="what you settle yourself: save, recompute or offload, of what backward needs of a module; device, host "
        "or stream, of a parameter or all of a module's; names may be patterns: 'h.*.mlp=recompute'")  # fmt: skip
    add("--memory-curve", nargs="?", const="", metavar="FILE",
        help="also find the plans for less memory and for more, and print step time over memory; FILE is an SVG "
        "picture of it")  # fmt: skip
    add("--optimizer", metavar="NAME", default="adamw", choices=tuple(OPTIMIZER_STATES),
        help=f"whose state memory must hold: {', '.join(OPTIMIZER_STATES)} (default: adamw)")  # fmt: skip
    add("--outputs", choices=("sharded", "global"), default="sharded",
        help="leave outputs in pieces, or bring them whole to every rank (default: sharded)")  # fmt: skip
    add("--precision", metavar="NAME", default="fp32",
        help="bf16: compute in bfloat16 over the stored parameters and sum gradients in float32; fp32: as the model "
        "is (default: fp32)")  # fmt: skip
    add("--tf32", metavar="KINDS",
        help="which products of float32 run as TF32, where the hardware has it: some of matmul, conv with a comma "
        "between, or none (default: as torch is set once MODEL is built; by itself it allows conv)")  # fmt: skip
    add("--batch-norm", choices=STATISTICS, default=GLOBAL,
        help="statistics of batch norms: global, of the whole batch, or local, of each rank's part of it, as DDP has "
        "them (default: global)")  # fmt: skip
    add(
        "--time-limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for the solver, the same again for each baseline and each point of the curve (default: 60)",
    )
    add("--profile", nargs="?", type=float, const=DEFAULT_S, metavar="SECONDS",
        help="time the operators that strategies need on this machine's device, for so many seconds at most (default: "
        f"{DEFAULT_S:g}; 0 uses what is known), and price them so; the times are kept")  # fmt: skip
    add("--operators", metavar="FILE",
        help="database where --profile keeps its times (default: operators.sqlite3 beside the calibrated "
        "profile)")  # fmt: skip
    add("--no-simulation", action="store_true",
        help="choose by the sum of times also where collectives run beside compute; else such plans are simulated, "
        "and the quickest is chosen")  # fmt: skip
    add("--baselines", action="store_true", help="compare with data parallel, FSDP, tensor parallel, "
        "and on GPUs with ZeRO-2, checkpointed layers, parameters on the host, and Elixir's rule")  # fmt: skip
    add("-o", "--output", metavar="FILE", help="write the plan as JSON, for autopar.compile(..., plan=FILE)")
    add("--dot", metavar="FILE", help="write a picture of the plan for Graphviz (dot -Tsvg FILE)")
    add("--trace", metavar="FILE", help="write the predicted step for chrome://tracing or ui.perfetto.dev")
    add("--json", action="store_true", help="print one JSON object in the place of the explanation")
    add("--quiet", action="store_true", help="no progress lines on stderr")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Unless it is 0, a sentence on stderr says why, no file is written."""
    try:
        given = _parser().parse_args(arguments)
        with interruptible(always=True) as check, _seldom_collected():
            return _search(given, check)
    except (BadArgument, TraceError) as error:
        return _say(error, BAD_ARGUMENTS)
    except Infeasible as error:
        return _say(error, INFEASIBLE)
    except NoAnswerInTime as error:
        return _say(error, NO_ANSWER)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _say(what: object, status: int) -> int:
    print(f"autopar.search: {what}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Python looks for cycles whenever some hundred objects were made. Here millions are, and most of them stay: that
    takes a fifth of the time of a search, and of tracing.
    """
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _search(given: argparse.Namespace, check: Callable[[], None]) -> int:
    started = time.perf_counter()

    def progress(text: str) -> None:
        check()
        if not given.quiet:
            print(f"{time.perf_counter() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    # Everything that can be wrong without running the user's code is said first.
    mesh = _or_bad(lambda: parse_mesh(given.mesh))
    hardware = _hardware(given.hardware)
    memory = _memory(given.memory, hardware)
    room = room_in(memory, hardware, mesh.sizes, expandable=has_expandable_segments())
    spare = _or_bad(lambda: ways_named(given.spare))
    keep = _keep(given.keep)
    precision = _or_bad(lambda: precision_named(given.precision))
    if not 0 < given.time_limit < math.inf:
        raise BadArgument(f"--time-limit {given.time_limit:g} is not a time; give seconds above 0, for example 60")
    asked_tf32 = _tf32(given)
    profile = _profile(given, hardware, progress)
    paths = _paths(
        {"-o": given.output, "--dot": given.dot, "--trace": given.trace, "--memory-curve": given.memory_curve or None}
    )

    seconds: dict[str, float] = {}
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints must not mix with our answer
        measured = ", a profile that was measured" if hardware.is_measured else ""
        progress(f"mesh {mesh}, {mesh.ranks} ranks of {hardware.name}{measured}, {size(memory)} each")
        captured = _timed(seconds, "trace", lambda: _trace(given.model, precision, device_type_of(hardware), progress))

        if device_type_of(hardware) == "cuda":
            hardware = hardware.allowing(tf32_set() if asked_tf32 is None else asked_tf32)

        def graph_with(statistics: str) -> Graph:
            return graph_of(captured, precision, parts=parts_of(statistics, mesh))

        graph = graph_with(given.batch_norm)
        progress(f"traced {len(graph.nodes):,} operators, forward and backward")
        _or_bad(lambda: kept(keep, graph))

        def asked(graph: Graph) -> Question:
            return ask(graph, mesh, hardware, optimizer=given.optimizer, profile=profile, progress=progress)

        question = _timed(seconds, "propose", lambda: asked(graph))
        limits: dict[str, Any] = {"outputs": given.outputs, "time_limit_s": given.time_limit, "keep": keep}
        open_: dict[str, Any] = {"simulation": not given.no_simulation, "spare": spare}

        def held(most: float) -> Plan:
            return answer(question, memory=most, **limits, **open_, progress=progress)

        with telling(room):
            plan = _timed(seconds, "search", lambda: held_within(room, held, question.pricer))
        rows: tuple[Row, ...] = ()
        if given.baselines:
            plan, rows = _timed(
                seconds,
                "baselines",
                lambda: compare(
                    question, plan, memory=room.tensors, spare=spare, **limits,
                    as_ddp=_as_ddp(graph_with, question, asked), progress=progress,
                ),
            )  # fmt: skip
            plan = told(plan, room, question.pricer)
        points: tuple[curve.Point, ...] = ()
        if given.memory_curve is not None:
            points = _timed(
                seconds,
                "memory_curve",
                lambda: curve.memory_curve(question, (plan,), **limits, **open_, progress=progress),
            )
            points = tuple(replace(point, limit=math.ceil(room.taken(point.limit))) for point in points)
        writers: dict[str, Callable[[Path], None]] = {
            "-o": plan.save,
            "--dot": _writer(plan.to_dot() if "--dot" in paths else ""),
            "--trace": lambda path: plan.to_trace(path, hardware),
            "--memory-curve": _writer(curve.picture(points) if "--memory-curve" in paths else ""),
        }
    seconds["total"] = time.perf_counter() - started
    if given.json:
        text = json.dumps(document(given.model, plan, rows, points, seconds, room), indent=1, allow_nan=False) + "\n"
    else:
        tables = [*([table(plan, rows)] if rows else []), *([curve.table(points)] if points else [])]
        text = "\n".join([plan.explain(), *tables])
    check()
    for flag, path in paths.items():
        try:
            writers[flag](path)
        except OSError as error:
            raise BadArgument(f"cannot write {error.filename or path}: {error.strerror}") from error
        progress(f"wrote {path}")
    print(text, end="")
    return 0


def _writer(text: str) -> Callable[[Path], None]:
    return lambda path: write_whole(path, text)


def _timed(seconds: dict[str, float], part: str, work: Callable[[], T]) -> T:
    began = time.perf_counter()
    done = work()
    seconds[part] = time.perf_counter() - began
    return done


# --- arguments -------------------------------------------------------------------------------------------------------


def _or_bad(read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise BadArgument(str(error)) from error


def _hardware(name: str | None) -> Hardware:
    """The named profile, else that of this machine's GPU: a plan for whatever CPU one happens to sit at is no use."""
    known = f"{', '.join(known_hardware())}, or a profile file.toml"
    if name is None:
        if not torch.cuda.is_available():
            raise BadArgument(f"this machine has no GPU to plan for; give --hardware, one of {known}")
        return _or_bad(lambda: hardware_or_here(None, "cuda"))
    try:
        return Hardware.load(name)
    except ValueError as error:
        raise BadArgument(str(error)) from error
    except OSError as error:
        raise BadArgument(f"hardware profile {name} cannot be read: {error.strerror}; give one of {known}") from error


def _profile(given: argparse.Namespace, hardware: Hardware, progress: Progress) -> Profile | None:
    """What times operators, where that is asked for and the machine to plan for is this one."""
    if given.profile is None:
        if given.operators is not None:
            raise BadArgument("--operators names the database of --profile; give --profile too")
        return None
    if not 0 <= given.profile < math.inf:
        raise BadArgument(f"--profile {given.profile:g} is not a time; give seconds from 0, for example 60")
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        if is_here(hardware, device):
            if device == "cpu":  # as ranks run, whatever this process would use
                torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            return profiler(device, given.profile, hardware, given.operators, progress)
    raise BadArgument(
        f"--profile times operators on this machine, which is no {hardware.name}; run it on one, or leave --profile out"
    )


def _tf32(given: argparse.Namespace) -> tuple[str, ...] | None:
    """Kinds of products; None for torch's settings."""
    if given.tf32 is None:
        return None
    if given.profile is not None:
        raise BadArgument(
            "--profile times operators under torch's own settings of TF32; set those in the file of MODEL, and leave "
            "--tf32 out"
        )
    words = [word.strip() for word in given.tf32.split(",")]
    if words == ["none"]:
        return ()
    if unknown := [word for word in words if word not in TF32_KINDS]:
        raise BadArgument(f"--tf32 {unknown[0]!r} is not known; choose some of {', '.join(TF32_KINDS)}, or none alone")
    return tuple(kind for kind in TF32_KINDS if kind in words)


def _memory(text: str | None, hardware: Hardware) -> float:
    """Bytes per rank: a size with a unit, or a share of the device; by default all of it, whatever is free here."""
    if text is None:
        return memory_bytes(None, hardware)
    try:
        share = float(text)
    except ValueError:
        return _or_bad(lambda: memory_bytes(text, hardware))
    if not 0 < share <= 1:
        raise BadArgument(
            f"memory {text!r} is not a size; write for example 70GiB, 512MB or 0.9 (a share of the device)"
        )
    return _or_bad(lambda: memory_bytes(share, hardware))


def _keep(text: str | None) -> dict[str, str]:
    """Name -> what is settled of it."""
    parts = [part.strip().rpartition("=") for part in text.split(",")] if text is not None else []
    if wrong := [word for name, _, word in parts if not name]:
        raise BadArgument(f"--keep {wrong[0]!r} is not NAME=WHAT; write for example lm_head.weight=device")
    settled: dict[str, str] = {}
    for name, _, word in parts:
        if settled.setdefault(name, word) != word:
            raise BadArgument(f"--keep says {settled[name]!r} and {word!r} of {name}; leave one out")
    return settled


def _paths(named: Mapping[str, str | None]) -> dict[str, Path]:
    """flag -> the file to write; each is another."""
    paths = {flag: writable(path, flag) for flag, path in named.items() if path is not None}
    for one, other in combinations(paths, 2):
        if paths[one] == paths[other]:
            raise BadArgument(f"{one} and {other} both name {named[one]}; give each its own file")
    if (picture := paths.get("--memory-curve")) is not None and picture.suffix != ".svg":
        raise BadArgument(f"--memory-curve {named['--memory-curve']} is no picture; name a file.svg")
    return paths


# --- work ------------------------------------------------------------------------------------------------------------


def _as_ddp(
    graph_with: Callable[[str], Graph], question: Question, asked: Callable[[Graph], Question]
) -> Question | str | None:
    """The question with the batch norms that DDP has, or why there is none; None where the asked one is such."""
    if GLOBAL not in statistics_of(question.graph) or question.pricer.mesh.ranks == 1:
        return None
    try:
        graph = graph_with(LOCAL)
    except TraceError as error:
        return str(error)
    return asked(graph) if LOCAL in statistics_of(graph) else None


def _trace(text: str, precision: MixedPrecisionPolicy | None, device_type: str, progress: Progress) -> Captured:
    """What `autopar.compile` captures when it is called as the factory says, for devices of that type."""
    with autocast_as_asked(device_type):  # decorators ask for it when the file is read
        example = build(text)
    count = sum(parameter.numel() for parameter in example.model.parameters())
    progress(f"built {type(example.model).__name__}, {count:,} parameters")
    args, kwargs = _call(example, text)
    model = example.model
    training = model.training or any(parameter.requires_grad for parameter in model.parameters())
    with _without_torchs_dump():
        captured = capture(
            model, args, kwargs, training=None if training == model.training else training, precision=precision,
            device_type=device_type,
        )  # fmt: skip
    return captured


@contextlib.contextmanager
def _without_torchs_dump() -> Iterator[None]:
    """Where a model cannot be captured, torch prints the half of it that could be; our sentence names the line."""
    said, log = io.StringIO(), logging.getLogger("torch")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(said):
            yield
    except TraceError:
        said = io.StringIO()
        raise
    finally:
        log.setLevel(before)
        sys.stderr.write(said.getvalue())


def _call(example: Example, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        return by_name(example.model.forward, example.args, example.kwargs)
    except TypeError as error:
        name = type(example.model).__name__
        raise BadArgument(f"{text} returned inputs that {name}.forward does not take: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
