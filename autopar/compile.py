"""`autopar.compile`: a sequential model and a device mesh in, a module that trains across the mesh out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from autopar.attach.agree import agreed
from autopar.attach.module import ParallelModule, attach, plan_module
from autopar.attach.over_stages import begin
from autopar.attach.pipe import Pipe
from autopar.attach.tensors import mesh_of
from autopar.attach.watch import PATIENCE_S
from autopar.errors import PlanMismatch
from autopar.ir.batch_norm import STATISTICS
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Rules, told
from autopar.machine.device import Devices, check_size, hardware_or_here, is_here, memory_bytes, tf32_here
from autopar.plan import Plan
from autopar.plan.store import dumps
from autopar.plan.value import AGAIN
from autopar.plan.value import OUTPUTS as HOW_DELIVERED
from autopar.planner import Machine, Planner
from autopar.price.pricer import OPTIMIZER_STATES
from autopar.rules.outside import given as given_rules
from autopar.search import Request
from autopar.search.memory_options import allowed
from autopar.search.micro_batches import AUTO
from autopar.search.orders import PIPE, SCHEDULES, orders_of, ranks_of
from autopar.search.pipeline import Pipeline
from autopar.search.reserved import check_fits
from autopar.trace.calls import by_name
from autopar.trace.precision import precision_named
from cost_models.hardware import Hardware
from cost_models.steps import DEVICE

OUTPUTS = ("auto", *HOW_DELIVERED)
WRAPPERS = (nn.DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule, ParallelModule)
INPUTS = ("global", "local")
BACKENDS = ("eager", "inductor")


def compile(
    model: nn.Module,
    device_mesh: DeviceMesh | Devices,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | Pipeline | str | Path | None = None,
    hardware: str | Path | Hardware | None = None,
    memory: int | float | str | None = None,
    allow: str | Collection[str] | None = None,
    pin: Mapping[str, str] | None = None,
    optimizer: str | None = None,
    precision: MixedPrecisionPolicy | str | None = None,
    outputs: str = "auto",
    inputs: str = "global",
    batch_norm: str = "global",
    cache: str | Path | None = None,
    backend: str = "eager",
    time_limit_s: float = 60.0,
    profile: float | None = None,
    patience_s: float = PATIENCE_S,
    rules: Rules | Iterable[Rules] | None = None,
    micro_batches: int | str | None = None,
    schedule: str | None = None,
    stages_per_rank: int | None = None,
) -> ParallelModule:
    """Find the fastest plan for training `model` on `device_mesh` that fits in memory, and return a module that runs
    it.

    The result means what `model` means: the same losses, gradients and outputs, of the whole (global) batch. `model` is
    left as it is. Tracing and planning happen at the first call, or now where example inputs are given. Rank 0 plans;
    all ranks receive the plan, and rank 0's parameters and buffers as they are then.

    example_inputs, example_kwargs: what the module will be called with: whole tensors (any device, or meta).
    plan: a Plan, or for a mesh with an axis `pipe` a Pipeline, or the path of one, to run without searching.
    hardware: profile name, path of a profile, or Hardware. Default: what `python -m autopar.calibrate` measured on this
    machine, else the known profile of its device; the plan's notes say if it was measured.
    memory: bytes of each rank's device that this module may use: a number, "70GiB", or a share such as 0.9. Default:
    what is free. On GPUs this is what the allocator reserves, with what kernels and collectives take for themselves: a
    plan's tensors get what that leaves.
    allow: what may be done where the fastest plan does not fit, some of "recompute" and "offload-activations" (forward
    values that backward needs), "offload-parameters" (with all that belongs to them) and "offload-optimizer" (optimizer
    states, which then lie on the host; it needs an optimizer of `autopar.optim`); or "none". Default: what makes sense
    on the hardware, without "offload-optimizer".
    pin: what you settle yourself: name of a module -> "save", "recompute" or "offload-activations", for its forward
    values that backward needs; name of a parameter, or of a module with parameters -> "device", "offload-parameters" or
    "offload-optimizer"; name of a module -> "tensor: columns" or "data: batch; tensor: rows", for what mesh axes split
    of its products, in the words of `explain`. Names may be patterns, as "transformer.h.*.mlp"; of two that say
    different things the later one counts.
    optimizer: whose state the memory must hold: adamw, adam, sgd, sgd-momentum, adagrad, rmsprop or none. Default: that
    of the plan, or adamw.
    precision: param_dtype is what parameters are cast to before use, reduce_dtype what gradients are summed in. "bf16"
    is short for bfloat16 and float32, "fp32" for no casts.
    outputs: what outputs other than scalars come back as. "auto": whole plain tensors; beside a scalar loss, where they
    are seldom read, they are put together when somebody reads them, which all ranks must do. "global": whole tensors,
    always put together. "sharded": DTensors in the plan's layouts. "loss": calls that train give None in their place,
    so that no memory holds logits that nobody reads, of all micro-batches least of all; the others do as with "auto".
    inputs: "global": tensors are the whole batch, the same on every rank. "local": each rank passes its own part, as
    under DistributedDataParallel; parts are equal in shape and stand in rank order along dim 0 (`from_local`). A scalar
    loss is that of the whole batch, other outputs with a row for each sample come back as this rank's own rows, and
    gradients through those are averaged over ranks, as DistributedDataParallel averages them.
    batch_norm: "global" takes the statistics of batch norms over the whole batch, as one process does; "local" over
    each of as many equal consecutive parts of it as there are ranks, as DDP does, whatever the plan splits. Running
    statistics are then those of the first part, which is rank 0's. SyncBatchNorm is global always.
    cache: a folder where plans are kept and found again.
    backend: "eager" runs the generated code as it is, "inductor" compiles it.
    profile: seconds for which rank 0 may time the operators that strategies need on its device, before it plans; they
    are kept on disk, so that the next time it has them. One search has them all together, however many meshes or
    numbers of micro-batches it tries. 0 uses what is known. Default: formulas only.
    patience_s: how many seconds beyond its longest step a rank waits for another one in a call, before every rank ends
    with a sentence that names both; ten times as many before the first step and around state dicts. Infinite: as long
    as the process group waits. Planning may take as long as it likes.

    micro_batches: in how many equal parts of the batch a step runs, one behind the other, with gradients added up over
    them: loss, outputs and gradients are those of the whole batch, and only one part's activations are held at a time.
    "auto" leaves the number to the search. Forward must return the loss, and backward runs inside the call, so that
    a loss that is thrown away costs it too. Default: that of the plan, or 1.

    schedule: of a mesh whose first axis is called `pipe`, along which the model is cut into stages: "1f1b", "gpipe",
    "zb-h1", "zb-h2" (zero bubble: backward in two parts), with several stages on each rank "interleaved", "zb-v",
    "interleaved-zb", or "auto" for the quickest, which is the default. A step is run in `micro_batches` of them; by
    default the search decides how many. interleaved and interleaved-zb need a multiple of the ranks along `pipe`.
    stages_per_rank: of such a schedule; by default what is quickest. zb-v has 2.

    rules: an `autopar.Rules`, or several, of packages that bring operators of their own: how these may be split, and
    what they cost. Every rank must be given the same; a plan's file names those that it rests on.

    device_mesh: of torch, or of `autopar.init_mesh`; `init_mesh("cuda", devices=64)` leaves its axes to the plan.

    Raises ValueError for arguments that do not fit, TraceError for a model that cannot be captured, Infeasible where no
    plan fits in memory, PlanMismatch for a plan made for something else.
    """
    _check_kinds(model, device_mesh, plan, pin, cache, example_inputs, example_kwargs)
    is_open = isinstance(device_mesh, Devices)
    device_mesh = device_mesh.flat if isinstance(device_mesh, Devices) else device_mesh
    mesh = _mesh_of_all(device_mesh)
    _check_words(outputs, inputs, backend, batch_norm, optimizer)
    _check_numbers(patience_s, time_limit_s, micro_batches)
    brought, precision = given_rules(rules), precision_named(precision)
    pipe = _pipe_of(device_mesh, mesh, schedule, stages_per_rank, micro_batches)

    def read() -> tuple[Machine, tuple[str, ...] | None, Plan | Pipeline | None]:
        machine = _machine(hardware, memory, profile, device_mesh.device_type)
        given = _given(plan, brought, None if pipe is None else mesh)
        if given is not None:
            check_size(given.mesh.sizes if is_open else mesh.sizes, mesh.ranks)
            _check_asked(given, machine, hardware is not None, memory, optimizer, micro_batches, schedule, outputs)
        return machine, allowed(allow), given

    # files may be other ones on another rank's machine, or not there
    machine, words, given = agreed(read, device_mesh)
    optimizer, outputs = _as_given(given, optimizer, outputs)
    settings: dict[str, object] = {  # hardware is not among them: rank 0 alone searches
        "a plan of digest": None if given is None else _digest(given),
        "outputs": outputs, "inputs": inputs, "backend": backend, "batch_norm": batch_norm, "optimizer": optimizer,
        "precision": precision, "tf32 for": tf32_here(device_mesh.device_type), "allow": words,
        "micro_batches": micro_batches, "schedule": schedule, "stages_per_rank": stages_per_rank,
        "pin": sorted((pin or {}).items()),
        "rules": [told(one.identity) for one in brought],
    }  # fmt: skip
    request = Request(allow=words, pin=pin or {}, simulation=True, time_limit_s=time_limit_s)
    here, count = (device_mesh, 1) if pipe is None else (pipe.here, AUTO)
    rest = settings, given, cache, is_open, brought, micro_batches or count, schedule or AUTO, stages_per_rank
    shape = outputs, backend, precision, inputs, batch_norm, patience_s, brought, pipe
    made = attach(model, here, Planner(here, machine, request, optimizer, outputs, inputs, *rest), *shape)
    return _planned(made, model, example_inputs, example_kwargs)


def _planned(
    parallel: ParallelModule, model: nn.Module, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> ParallelModule:
    """Now, where there are examples of what it will be called with."""
    if args is not None or kwargs is not None:
        positional, named = by_name(type(model).forward.__get__(model), args or (), kwargs or {})
        plan_module(parallel, positional, named)
    return parallel


def _pipe_of(
    device_mesh: DeviceMesh, mesh: Mesh, schedule: str | None, stages_per_rank: int | None,
    micro_batches: int | str | None,
) -> Pipe | None:  # fmt: skip
    """The ranks of a pipeline, where the mesh has an axis of stages."""
    if PIPE not in mesh.names:
        for name, value in (("schedule", schedule), ("stages_per_rank", stages_per_rank)):
            if value is not None:
                raise ValueError(f"{name}={value!r} is of a pipeline, and the mesh {mesh} has no axis {PIPE!r}")
        return None
    ranks = ranks_of(mesh)
    _known("schedule", schedule or AUTO, (AUTO, *SCHEDULES))
    count = micro_batches if isinstance(micro_batches, int) else ranks
    orders_of(schedule or AUTO, ranks, count, stages_per_rank)
    return begin(Pipe(device_mesh, mesh))


def _mesh_of_all(device_mesh: DeviceMesh) -> Mesh:
    mesh = mesh_of(device_mesh)
    check_size(mesh.sizes, dist.get_world_size())
    return mesh


def _check_kinds(
    model: object, device_mesh: object, plan: object, pin: object, cache: object, args: object, kwargs: object
) -> None:  # fmt: skip
    """What is given where something else belongs. `args`, `kwargs`: the examples."""
    _check_examples(args, kwargs)
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        what = f"the class {model.__name__}; give an instance of it" if is_class else f"a {type(model).__name__}"
        raise ValueError(f"the model is no torch.nn.Module but {what}")
    scripted = (one for one in model.named_modules() if isinstance(one[1], torch.jit.ScriptModule))
    if (found := next(scripted, None)) is not None:
        raise ValueError(
            f"{f'module {found[0]} of the model' if found[0] else 'the model'} is compiled by torch.jit "
            f"({type(found[1]).__name__}), which leaves no Python code to trace: give the module that it was made of"
        )
    empty = next((name for name, one in model.named_parameters() if isinstance(one, UninitializedParameter)), None)
    if empty is not None:
        raise ValueError(
            f"parameter {empty} has no shape before the model's first call, which a lazy module learns it from: call "
            "the model once with a batch, under torch.no_grad(), and compile it then"
        )
    held = next((name for name, one in model.named_parameters() if isinstance(one, DTensor)), None)
    if held is not None and not isinstance(model, WRAPPERS):
        raise ValueError(
            f"parameter {held} is a DTensor already: the model is a part of a parallel module, or somebody has "
            "distributed it; compile the whole model, before that"
        )
    if not isinstance(device_mesh, (DeviceMesh, Devices)):
        raise ValueError(
            f"device_mesh is {device_mesh!r} and no device mesh; give autopar.init_mesh('cpu', data=2), or one of torch"
        )
    if cache is not None and not isinstance(cache, (str, Path)):
        raise ValueError(f"cache={cache!r} is no folder; give the path of one in which plans are kept")
    if pin is not None and not isinstance(pin, Mapping):
        raise ValueError(f"pin={pin!r} is no dictionary; give names and what is settled: {{'layers.*': 'recompute'}}")
    if pin and plan is not None:
        raise ValueError(
            "pin= is for a search, and plan= is the answer of one: search with `--pin`, or leave one of them out"
        )
    if isinstance(model, WRAPPERS):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, which parallelizes it already: compile the model that is "
            "inside, before it is wrapped"
        )


def _check_examples(args: object, kwargs: object) -> None:
    if isinstance(args, Mapping):
        raise ValueError("example_inputs= is a dictionary; give arguments by name as example_kwargs=")
    if args is not None and not isinstance(args, (tuple, list)):
        raise ValueError(f"example_inputs= is a {type(args).__name__}; give a tuple of arguments: (x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ValueError(f"example_kwargs= is a {type(kwargs).__name__}; give a dictionary: {{'x': x}}")


def _check_numbers(patience_s: float, time_limit_s: float, micro_batches: int | str | None) -> None:
    if isinstance(time_limit_s, bool) or not time_limit_s > 0:
        raise ValueError(f"time_limit_s={time_limit_s} is not a time; give seconds above 0, for example 60")
    if isinstance(patience_s, bool) or not patience_s > 0:
        raise ValueError(f"patience_s={patience_s} is not a time; give seconds above 0, for example 60, or math.inf")
    count = micro_batches
    if count in (None, AUTO):
        return
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"micro_batches={count!r} is no number of micro-batches; give 1 or more, or {AUTO!r}")


def _check_words(outputs: str, inputs: str, backend: str, batch_norm: str, optimizer: str | None) -> None:
    _known("outputs", outputs, OUTPUTS)
    _known("inputs", inputs, INPUTS)
    if inputs == "local" and outputs != "auto":
        raise ValueError(f"inputs='local' gives each rank its own rows of outputs; outputs={outputs!r} asks for others")
    _known("backend", backend, BACKENDS)
    _known("batch_norm", batch_norm, STATISTICS)
    _known("optimizer", optimizer or "adamw", tuple(OPTIMIZER_STATES))


def _known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{what} {value!r} is not known; choose {', '.join(known)}")


def _given(
    plan: Plan | Pipeline | str | Path | None, rules: tuple[Rules, ...], staged: Mesh | None
) -> Plan | Pipeline | None:
    """What runs without a search. `staged`: the mesh, where it has an axis of stages. Raises PlanMismatch where the one
    has stages and the other none, or others.
    """
    if isinstance(plan, (str, Path)):
        plan = Plan.load(plan, rules) if staged is None else Pipeline.load(plan, rules)
    if not (plan is None or isinstance(plan, (Plan, Pipeline))):
        raise ValueError(f"plan= takes a Plan, a Pipeline or the path of one, and was given a {type(plan).__name__}")
    if staged is None and isinstance(plan, Pipeline):
        raise PlanMismatch(f"the plan has pipeline stages; give the mesh that it was made for, {plan.mesh}")
    if staged is not None and isinstance(plan, Plan):
        raise PlanMismatch(f"the plan has no pipeline stages, and the mesh is {staged}; give its own, {plan.mesh}")
    if isinstance(plan, Pipeline) and plan.mesh != staged:
        raise PlanMismatch(
            f"the pipeline was made for mesh {plan.mesh}, this mesh is {staged}; use a mesh with those names and "
            f"sizes, or {AGAIN}"
        )
    return plan


def _as_given(given: Plan | Pipeline | None, optimizer: str | None, outputs: str) -> tuple[str, str]:
    """The optimizer, and what outputs come back as, where the user leaves them to a plan that is given."""
    if given is None:
        return optimizer or "adamw", outputs
    plan = _whole(given)
    return optimizer or plan.optimizer, "loss" if plan.outputs == "loss" and outputs == "auto" else outputs


def _whole(given: Plan | Pipeline) -> Plan:
    return given.whole if isinstance(given, Pipeline) else given


def _digest(given: Plan | Pipeline) -> str:
    told = given.dumps() if isinstance(given, Pipeline) else dumps(given)
    return hashlib.sha256(told.encode()).hexdigest()[:8]


def _check_asked(
    given: Plan | Pipeline, machine: Machine, is_named: bool, memory: int | float | str | None, optimizer: str | None,
    micro_batches: int | str | None, schedule: str | None, outputs: str,
) -> None:  # fmt: skip
    """What is asked for beside a plan is what the plan was made for. `is_named`: the user gave the machine's hardware.
    Raises PlanMismatch, or ValueError for too little memory.
    """
    again, plan = "leave it out, or run `python -m autopar.search` with it", _whole(given)
    if isinstance(given, Pipeline) and schedule not in (None, AUTO, given.schedule.name):
        raise PlanMismatch(f"schedule={schedule!r} was asked for, and the plan has {given.schedule.name!r}: {again}")
    if optimizer is not None and optimizer != plan.optimizer:
        raise PlanMismatch(
            f"optimizer={optimizer!r} was asked for, and the plan was made for {plan.optimizer!r}, whose states it has "
            f"room for: {again}"
        )
    if plan.outputs == "loss" and outputs not in ("auto", "loss"):
        raise PlanMismatch(f"outputs={outputs!r} was asked for, and the plan gives the loss alone: {again}")
    if micro_batches not in (None, AUTO, plan.graph.rounds.count):
        raise PlanMismatch(
            f"micro_batches={micro_batches} was asked for, and the plan has {plan.graph.rounds.count}: {again}"
        )
    digest = machine.hardware.allowing(plan.tf32).digest
    if is_named and digest != plan.hardware_digest:
        raise PlanMismatch(
            f"hardware={machine.hardware.name!r} (figures {digest[:8]}) was asked for, and the plan was priced on "
            f"{plan.hardware!r} (figures {plan.hardware_digest[:8]}): {again}"
        )
    if memory is not None:
        peak = given.peak_bytes if isinstance(given, Pipeline) else given.peak_bytes[DEVICE]
        check_fits(peak, machine.room(machine.usable, given.mesh), memory)


def _machine(
    hardware: str | Path | Hardware | None, memory: int | float | str | None, profile: float | None, device_type: str
) -> Machine:
    """What there is to plan for."""
    found = hardware_or_here(hardware, device_type)
    if profile is not None:
        _can_profile(profile, found, device_type)
    found = found.allowing(tf32_here(device_type))
    return Machine(found, device_type, memory_bytes(memory, found, device_type), memory is not None, profile)


def _can_profile(budget_s: float, machine: Hardware, device_type: str) -> None:
    if isinstance(budget_s, bool) or not 0 <= budget_s < math.inf:
        raise ValueError(f"profile={budget_s} is not a time; give seconds from 0, for example 60")
    if not is_here(machine, device_type):
        raise ValueError(
            f"profile= times operators on this machine, whose {device_type} is no {machine.name}; "
            "leave hardware= to what is here, or profile= out"
        )
