"""The arguments of the command line: what they are, and what they mean. What can be wrong with them is said here."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.calibrate.operators import DEFAULT_S, profiler
from autopar.errors import BadArgument
from autopar.ir.batch_norm import GLOBAL, STATISTICS
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.outside import Rules
from autopar.machine.cli import Parser, same_file, writable
from autopar.machine.device import hardware_or_here, is_here, memory_bytes
from autopar.machine.rules_files import FLAG, HELP, METAVAR, rules_named
from autopar.plan.value import OUTPUTS
from autopar.price.calls import Profile
from autopar.price.pricer import OPTIMIZER_STATES
from autopar.search.memory_options import ALLOWED, NEEDS_OPTIM, allowed
from autopar.search.meshes import meshes_of
from autopar.search.micro_batches import AUTO
from autopar.search.orders import PIPE, SCHEDULES
from autopar.search.policies import NAMED, POLICIES, policy_named
from autopar.search.search import Progress
from autopar.search.stage_policies import STAGED
from autopar.search.top import checked
from autopar.trace.precision import precision_named
from cost_models.hardware import TF32_KINDS, Hardware, known_hardware

T = TypeVar("T")

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
exit status: 0 plan found, 2 bad arguments, 3 nothing fits in memory, 4 no answer in time,
130 interrupted (Ctrl-C while it searches prints and writes the best plan found by then; twice, it ends at once)
"""


def parser() -> argparse.ArgumentParser:
    made = Parser("python -m autopar.search", DESCRIPTION, EPILOG)
    _what_is_searched(made.add_argument)
    _how_it_is_searched(made.add_argument)
    _what_is_told(made.add_argument)
    return made


def _what_is_searched(add: Callable[..., object]) -> None:
    add("model", metavar="MODEL", help="file.py:function or package.module:function; the function returns "
        "(model, args) or (model, args, kwargs), with inputs of the whole (global) batch")  # fmt: skip
    add("--mesh", metavar="NAME=N[,NAME=N...]",
        help="axes of ranks, outermost first: data=8,tensor=8 is 64 ranks, tensor within a node; a first axis called "
        f"{PIPE} is one of pipeline stages")  # fmt: skip
    add("--devices", metavar="N[,N...]",
        help="in the place of --mesh: so many devices, arranged as is best: all grids of up to three axes are looked "
        "at; several numbers give a table")  # fmt: skip
    add("--hardware", metavar="NAME|FILE",
        help="profile of the machine to plan for (default: this machine's GPU); several with commas between give a "
        "table")  # fmt: skip
    add("--memory", metavar="SIZE",
        help="what a plan may use of each rank's device: 70GiB, 40GB, or 0.9 of it (default: all of it, by the "
        "profile); on GPUs a part of it is left for what no plan counts")  # fmt: skip
    add("--allow", metavar="WORDS",
        help="what may be done where the fastest plan does not fit: some of " + ", ".join(ALLOWED) + " with commas "
        "between, or none (default: what makes sense on the hardware; "
        f"{NEEDS_OPTIM} is only used where it is named, and needs autopar.optim)")  # fmt: skip
    add("--pin", metavar="NAME=WORD[,NAME=WORD...]",
        help="what you settle yourself: save, recompute or offload-activations, of what backward needs of a module; "
        "device, offload-parameters or offload-optimizer, of a parameter or all of a module's; what a mesh axis splits "
        "of a module's products, as plans call it: 'lm_head=tensor: columns'; names may be patterns: "
        "'h.*.mlp=recompute'")  # fmt: skip
    add("--micro-batches", metavar="N|auto",
        help="run a step in so many equal parts of the batch, one behind the other, and add their gradients up; auto: "
        "in as many as are quickest (default: 1; with stages: auto)")  # fmt: skip
    add("--stages", metavar="N[,N...]|auto",
        help="with --devices: in how many pipeline stages the model may be cut; 1 is without, auto any number that "
        "divides the devices")  # fmt: skip
    add("--schedule", choices=("auto", *SCHEDULES),
        help=f"of pipeline stages (--stages, or a first axis of --mesh called {PIPE}): in which order their micro-"
        "batches run (default: auto, the quickest one)")  # fmt: skip
    add("--stages-per-rank", type=int, metavar="V",
        help="of pipeline stages: so many of them on each rank, as interleaved (any number above 1) and zb-v (2) have "
        "them (default: the quickest of 1 to 4 that the schedule allows)")  # fmt: skip
    add(FLAG, metavar=METAVAR, help=HELP)
    add("--optimizer", metavar="NAME", default="adamw", choices=tuple(OPTIMIZER_STATES),
        help=f"whose state memory must hold: {', '.join(OPTIMIZER_STATES)} (default: adamw)")  # fmt: skip
    add("--outputs", choices=OUTPUTS, default="sharded",
        help="leave outputs sharded, bring them whole to every rank, or give scalars alone, as where nobody reads "
        "logits in training: loss (default: sharded)")  # fmt: skip
    add("--precision", metavar="NAME", default="fp32",
        help="bf16: compute in bfloat16 over the stored parameters and sum gradients in float32; fp32: as the model "
        "is (default: fp32)")  # fmt: skip
    add("--tf32", metavar="KINDS",
        help="which products of float32 run as TF32, where the hardware has it: some of matmul, conv with a comma "
        "between, or none (default: as torch is set once MODEL is built; by itself it allows conv)")  # fmt: skip
    add("--batch-norm", choices=STATISTICS, default=GLOBAL,
        help="statistics of batch norms: global, of the whole batch, or local, of each rank's part of it, as DDP has "
        "them (default: global)")  # fmt: skip


def _how_it_is_searched(add: Callable[..., object]) -> None:
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
        help="choose by the sum of times also where collectives overlap with compute; else such plans are simulated, "
        "and the quickest is chosen")  # fmt: skip


def _what_is_told(add: Callable[..., object]) -> None:
    add("--baselines", action="store_true", help="compare with data parallel, FSDP, tensor parallel, "
        "and on GPUs with ZeRO-2, checkpointed layers, parameters on the host, and Elixir's rule; the plan stays the "
        "same")  # fmt: skip
    add(
        "--policy",
        metavar="NAME[,NAME...]",
        help="compare with these, in the place of --baselines or beside them: "
        + ", ".join({**POLICIES, **NAMED})
        + "; in pipeline stages: "
        + ", ".join(STAGED),
    )
    add("--memory-curve", nargs="?", const="", metavar="FILE",
        help="also find the plans for less memory and for more, and print step time over memory; FILE is an SVG "
        "picture of it")  # fmt: skip
    add("--top", type=int, default=1, metavar="K",
        help="also show the quickest of the other plans that the search has simulated, up to K together; -o plan.json "
        "writes them as plan.2.json and so on")  # fmt: skip
    add("--price", metavar="P|NAME=P[,...]",
        help="in the table: what an hour of a device costs, or of each machine's")  # fmt: skip
    add("--tokens", type=float, metavar="N",
        help="in the table: how many days it takes to train on so many (samples, where the inputs are no "
        "tokens)")  # fmt: skip
    add("--days", type=float, metavar="D", help="with --tokens: which of the table does it within so many days")
    add("--picture", metavar="FILE", help="write the table as a picture, an SVG")
    add("-o", "--output", metavar="FILE", help="write the plan as JSON, for autopar.compile(..., plan=FILE)")
    add("--html", metavar="FILE",
        help="write the plan as a page for a browser: why, modules, the step and its memory over time")  # fmt: skip
    add("--dot", metavar="FILE", help="write a picture of the plan for Graphviz (dot -Tsvg FILE)")
    add("--trace", metavar="FILE", help="write the predicted step for chrome://tracing or ui.perfetto.dev")
    add("--problem", metavar="FILE",
        help="write the integer program whose bound the plan carries, for python -m solver FILE (.gz compresses "
        "it)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object in the place of the explanation")
    add("--quiet", action="store_true", help="no progress lines on stderr")


# --- what they mean ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the arguments ask for; `tf32` None: as torch is set once the model is built. `meshes`: those among which the
    best is wanted; one, or all of so many devices. `paths`: flag -> its file.
    """

    model: str
    meshes: tuple[Mesh, ...]
    hardware: Hardware
    memory: float
    batch_norm: str
    allow: tuple[str, ...] | None
    pin: Mapping[str, str]
    precision: MixedPrecisionPolicy | None
    tf32: tuple[str, ...] | None
    profile: Profile | None
    paths: Mapping[str, Path]
    rules: tuple[Rules, ...] = ()
    policies: tuple[str, ...] = ()
    micro_batches: int | str = 1
    loss_alone: bool = False


def files_read(given: argparse.Namespace) -> list[str]:
    """What the command reads, as far as these are files: none of them may be written to."""
    model, _, _ = given.model.rpartition(":")
    return [model, given.operators or "", *(given.hardware or "").split(",")]


def read(given: argparse.Namespace, progress: Progress) -> tuple[Asked, ...]:
    """What is asked of each machine and number of devices, in the order in which they are named. Everything that can be
    wrong without running the user's code is said here. Raises BadArgument.
    """
    names = [None] if given.hardware is None else _listed(given.hardware, "--hardware")
    counts = [None] if given.devices is None else _listed(given.devices, "--devices")
    return tuple(_read(given, name, count, progress) for name in names for count in counts)


def _listed(text: str, flag: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not word or words.count(word) > 1]:
        told = "names nothing between two commas" if not wrong[0] else f"names {wrong[0]!r} twice"
        raise BadArgument(f"{flag} {text!r} {told}; leave that out")
    return words


def _read(given: argparse.Namespace, name: str | None, count: str | None, progress: Progress) -> Asked:
    hardware = hardware_named(name)
    meshes = _meshes(given.mesh, count, hardware)
    memory = memory_given(given.memory, hardware)
    allow, pin = or_bad(lambda: allowed(given.allow)), pins_given(given.pin)
    precision = or_bad(lambda: precision_named(given.precision))
    check_time_limit(given.time_limit)
    files = {
        "-o": given.output, "--html": given.html, "--dot": given.dot, "--trace": given.trace,
        "--problem": given.problem, "--memory-curve": given.memory_curve or None,
    }  # fmt: skip
    or_bad(lambda: checked(given.top))
    if given.output is not None:
        output = Path(given.output)
        files |= {f"-o {n}": str(output.with_suffix(f".{n}{output.suffix}")) for n in range(2, given.top + 1)}
    return Asked(
        given.model, meshes, hardware, memory, given.batch_norm,
        allow, pin, precision, _tf32(given), _profile(given, hardware, progress), _paths(files, files_read(given)),
        rules_named(given.rules), policies_named(given.policy, staged=PIPE in meshes[0].names),
        _micro_batches(given.micro_batches, meshes), given.outputs == "loss",
    )  # fmt: skip


def _micro_batches(text: str | None, meshes: Sequence[Mesh]) -> int | str:
    if text is None:
        return AUTO if PIPE in meshes[0].names else 1
    if text == AUTO:
        return text
    if not text.isdecimal() or int(text) < 1:
        raise BadArgument(f"--micro-batches {text!r} is no number of micro-batches; give 1 or more, or {AUTO}")
    return int(text)


def check_time_limit(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise BadArgument(f"--time-limit {seconds:g} is not a time; give seconds above 0, for example 60")


def _meshes(mesh: str | None, devices: str | None, hardware: Hardware) -> tuple[Mesh, ...]:
    """The mesh that is named, or all there are of so many devices."""
    if (mesh is None) == (devices is None):
        raise BadArgument(
            "give --mesh, for example data=8,tensor=8, or --devices 64 for the best mesh of so many; one of the two"
        )
    if mesh is not None:
        return (or_bad(lambda: parse_mesh(mesh)),)
    if devices is None or not devices.isdecimal():
        raise BadArgument(f"--devices {devices!r} is not a number of devices; write for example 64")
    return or_bad(lambda: meshes_of(int(devices), hardware))


def or_bad(read: Callable[[], T]) -> T:
    """What it reads; a value that makes no sense is the command line's fault."""
    try:
        return read()
    except ValueError as error:
        raise BadArgument(str(error)) from error


def hardware_named(name: str | None) -> Hardware:
    """The named profile, else that of this machine's GPU: a plan for whatever CPU one happens to sit at is no use."""
    known = f"{', '.join(known_hardware())}, or a profile file.toml"
    if name is None:
        if not torch.cuda.is_available():
            raise BadArgument(f"this machine has no GPU to plan for; give --hardware, one of {known}")
        return or_bad(lambda: hardware_or_here(None, "cuda"))
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


def memory_given(text: str | None, hardware: Hardware) -> float:
    """Bytes per rank: a size with a unit, or a share of the device; by default all of it, whatever is free here."""
    if text is None:
        return memory_bytes(None, hardware)
    try:
        share = float(text)
    except ValueError:
        return or_bad(lambda: memory_bytes(text, hardware))
    if not 0 < share <= 1:
        raise BadArgument(
            f"memory {text!r} is not a size; write for example 70GiB, 512MB or 0.9 (a share of the device)"
        )
    return or_bad(lambda: memory_bytes(share, hardware))


def pins_given(text: str | None) -> dict[str, str]:
    """Name -> what is settled of it."""
    parts = [part.strip().rpartition("=") for part in text.split(",")] if text is not None else []
    if wrong := [word for name, _, word in parts if not name]:
        raise BadArgument(f"--pin {wrong[0]!r} is not NAME=WORD; write for example lm_head.weight=device")
    settled: dict[str, str] = {}
    for name, _, word in parts:
        if settled.setdefault(name, word) != word:
            raise BadArgument(f"--pin says {settled[name]!r} and {word!r} of {name}; leave one out")
    return settled


def policies_named(text: str | None, *, staged: bool = False) -> tuple[str, ...]:
    """Those with which a plan is to be compared; in stages there are others. Raises BadArgument."""
    words = [] if text is None else _listed(text, "--policy")
    if not staged:
        if of_stages := [word for word in words if word in STAGED]:
            raise BadArgument(f"--policy {of_stages[0]} is one of pipeline stages; give --mesh pipe=2, or more axes")
        return tuple(dict.fromkeys(or_bad(lambda word=word: policy_named(word)) for word in words))
    if unknown := [word for word in words if word not in STAGED]:
        raise BadArgument(
            f"--policy {unknown[0]!r} is not known in pipeline stages; choose some of {', '.join(STAGED)}"
        )
    return tuple(dict.fromkeys(words))


def _paths(named: Mapping[str, str | None], read: Sequence[str]) -> dict[str, Path]:
    """flag -> the file to write; each is another, and none of those that are `read`."""
    paths = {flag: writable(path, flag, read) for flag, path in named.items() if path is not None}
    for one, other in combinations(paths, 2):
        if same_file(paths[one], paths[other]):
            raise BadArgument(f"{one} and {other} both name {named[one]}; give each its own file")
    if (picture := paths.get("--memory-curve")) is not None and picture.suffix != ".svg":
        raise BadArgument(f"--memory-curve {named['--memory-curve']} is no picture; name a file.svg")
    return paths
