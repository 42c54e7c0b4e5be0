"""A plan, executed: step time, phases, traffic and memory beside what was predicted of them.

Three passes over the same module. First whole steps as a user runs them, undisturbed: the step time. Then steps whose
program runs node by node, each timed by itself (`watch.Stopwatch`): the phases. Then one step in which every live
storage and every collective is counted: memory and traffic.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar._compat import pytree
from autopar.attach.module import ParallelModule
from autopar.calibrate.values import as_trained
from autopar.compile import compile
from autopar.emit import Emitted
from autopar.ir.batch_norm import GLOBAL
from autopar.ir.graph import Graph
from autopar.ir.outside import Rules
from autopar.lower.program import PHASES
from autopar.machine.device import device_name, processors
from autopar.measure.memory import LiveBytes, one_phase
from autopar.measure.ready import inputs_of, materialise, pricer_at_hand, without_history
from autopar.measure.report import Collective, Measured, Moved, Pair, predicted_peaks, predicted_seconds
from autopar.measure.watch import WAITING, Stopwatch, Traffic, emitted_calls, now
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.search.pipeline import Pipeline
from autopar.trace import capture, graph_of
from autopar.trace.calls import by_name
from autopar.trace.modules import tensors_by_name
from cost_models.hardware import Hardware

WARM_UP = 2  # steps: the first call plans its buffers, the second has optimizer states
WATCHED = 3  # steps that are run node by node
OTHER = ("other collectives", "")  # which the program does not have
RATE = 1e-6  # of learning: values hardly change

OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, RATE),
    "adam": lambda parameters: torch.optim.Adam(parameters, RATE),
    "sgd": lambda parameters: torch.optim.SGD(parameters, RATE),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, RATE, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, RATE),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, RATE),
}


def traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, parts: int = 1,
    precision: MixedPrecisionPolicy | None = None, device_type: str = "cpu", rules: Sequence[Rules] = (),
    loss_alone: bool = False,
) -> Graph:  # fmt: skip
    """The graph that `autopar.compile` would plan for this call; `parts` and `rules` as in `graph_of`, `loss_alone` as
    in `capture`. Raises TraceError.
    """
    positional, named = by_name(model.forward, args, kwargs)
    training = is_trained(model)
    captured = capture(
        model, positional, named, training=None if training == model.training else training, precision=precision,
        loss_alone=loss_alone, device_type=device_type,
    )  # fmt: skip
    return graph_of(captured, precision, parts=parts, rules=rules)


def is_trained(model: nn.Module) -> bool:
    return model.training or any(parameter.requires_grad for parameter in model.parameters())


def measure(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    steps: int = 10,
    hardware: Hardware | None = None,
    precision: MixedPrecisionPolicy | None = None,
    device_type: str = "cpu",
) -> Measured:
    """Execute the plan on the running process group, whose size is the mesh's, and say what it took. All ranks call it,
    and all get the same answer.

    A model, or inputs, on the meta device get random values of the right kind; `model` itself is left as it is.
    `hardware`: the profile that priced the plan, where it is none that autopar knows. Raises PlanMismatch where the
    plan is for something else, ValueError where the process group is of another size.
    """
    twin, pricer, notes = twin_of(plan, model, args, kwargs, hardware, precision, device_type)
    return twin.measured(steps, pricer, notes)


def memory_of(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    hardware: Hardware | None = None,
    device_type: str = "cpu",
) -> dict[str, Pair]:
    """phase -> the most that a rank holds in it, predicted and measured, as `measure` tells it; nothing is timed."""
    twin, pricer, _ = twin_of(plan, model, args, kwargs, hardware, None, device_type)
    for _ in range(WARM_UP):
        twin.step()
    _, peaks = twin.counted()
    return twin.memory(pricer, dict(zip(peaks, twin.largest(list(peaks.values())), strict=True)))


def twin_of(
    plan: Plan | Pipeline, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None,
    hardware: Hardware | None, precision: MixedPrecisionPolicy | None, device_type: str,
) -> tuple[Twin, Pricer | None, tuple[str, ...]]:  # fmt: skip
    """What is measured, the prices of its plan if its profile is at hand, and notes. Raises as `measure` does."""
    if dist.get_world_size() != plan.mesh.ranks:
        raise ValueError(f"the plan is for {plan.mesh.ranks} ranks, the process group has {dist.get_world_size()}")
    device_mesh = init_device_mesh(device_type, plan.mesh.sizes, mesh_dim_names=plan.mesh.names)
    whole = plan.whole if isinstance(plan, Pipeline) else plan
    pricer = pricer_at_hand(whole, hardware, device_type)
    positional, named = by_name(model.forward, args, kwargs or {})
    parallel = compile(
        model, device_mesh, example_inputs=positional, example_kwargs=named, plan=plan, outputs=whole.outputs,
        batch_norm=whole.batch_norm or GLOBAL, precision=precision,
        hardware=None if pricer is None else pricer.hardware, rules=whole.graph.outside,
    )  # fmt: skip
    parallel.train(is_trained(model))
    notes = materialise(parallel, device_type)
    positional, named = inputs_of(whole, positional, named, device_mesh)
    if not positional:
        named = without_history(parallel.shard_batch(named))  # as they lie in the plan: cutting them is not timed
    return Twin(whole, parallel, positional, named, device_mesh), pricer, notes


@dataclass
class Twin:
    """A module that is ready to train, and the passes over it."""

    plan: Plan
    parallel: ParallelModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device_mesh: DeviceMesh

    def __post_init__(self) -> None:
        self.device = torch.device(self.device_mesh.device_type)
        self.given: Any = None  # by the last step
        trained = [parameter for parameter in self.parallel.parameters() if parameter.requires_grad]
        make = OPTIMIZERS.get(self.plan.optimizer)
        self.trains = any(r.kind == "gradient" and r.ref is not None for r in self.plan.graph.results)
        self.optimizer = make(trained) if make is not None and self.trains else None
        if self.optimizer is not None and self.plan.residence:
            self.optimizer = Streamed(self.optimizer, self.parallel)

    @property
    def axis_of(self) -> Mapping[str, str]:
        """Name of a process group -> the axis, or several at once, that it is of; without those of one rank."""
        return {name: axis for axis, name in self.parallel._autopar.groups.items() if self.plan.mesh.size(axis) > 1}

    def measured(self, steps: int, pricer: Pricer | None, notes: tuple[str, ...]) -> Measured:
        self.warm_up()
        undisturbed = self.undisturbed(steps)
        spent = self.node_by_node()
        traffic, peaks = self.counted()
        return self.report(steps, pricer, notes, undisturbed, spent, traffic, peaks)

    def warm_up(self) -> None:
        """Steps until every later one is like the one before, with states as a trained model has them."""
        for _ in range(WARM_UP):
            self.step()
        if self.optimizer is not None:
            as_trained(self.optimizer)

    # --- passes ------------------------------------------------------------------------------------------------------

    def step(self, between: Callable[[str], None] = lambda phase: None) -> None:
        """One training step, or one forward; `between` is called behind each phase."""
        with contextlib.nullcontext() if self.trains else torch.no_grad():
            made = self.parallel(*self.args, **self.kwargs)
        # what a training loop's variable held until here is gone; numbers are few bytes, and no plan counts them
        self.given = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.ndim]
        between("forward")
        if not self.trains:
            return
        ends = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.requires_grad]
        ends = [end for end in ends if not end.ndim] or ends  # a plan has no gradients of outputs beside a loss
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        between("backward")
        if self.optimizer is not None:
            self.optimizer.step()
        between("optimizer")
        del made, ends
        self.parallel.zero_grad()
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Tensor):
                leaf.grad = None

    def undisturbed(self, steps: int) -> float:
        times: list[float] = []
        dist.barrier()
        for _ in range(steps):
            begin = now(self.device)
            self.step()
            times.append(now(self.device) - begin)
        return median(times)

    def node_by_node(self) -> dict[str | Moved, float]:
        """Median seconds of each phase, of each collective, and of waiting for other ranks before those."""
        found = [self._one_watched() for _ in range(WATCHED)]
        keys = dict.fromkeys(key for spent in found for key in spent)
        return {key: median(spent.get(key, 0.0) for spent in found) for key in keys}

    def _one_watched(self) -> dict[str | Moved, float]:
        spent: dict[str | Moved, float] = {}
        at = 0.0

        def between(phase: str) -> None:
            nonlocal at
            if phase == "optimizer":
                spent[phase] = now(self.device) - at
            dist.barrier()
            at = now(self.device)

        with self.instead(lambda program: self._watched(program, spent)):
            self.step(between)
        return spent

    def _watched(self, program: Emitted, spent: dict[str | Moved, float]) -> Emitted:
        parts = {"forward": program.forward, "backward": program.backward}
        watches: dict[str, Any] = {
            phase: None if module is None else Stopwatch(module, phase, self.axis_of, self.device, spent)
            for phase, module in parts.items()
        }
        return replace(program, **watches)

    @contextlib.contextmanager
    def instead(self, change: Callable[[Emitted], Emitted]) -> Iterator[None]:
        """Inside the context the module runs a changed program."""
        before = [(prepared, prepared.runner) for prepared in self.parallel._autopar.prepared()]
        for prepared, runner in before:
            prepared.runner = replace(runner, program=change(runner.program))
        try:
            yield
        finally:
            for prepared, runner in before:
                prepared.runner = runner

    def counted(self) -> tuple[Traffic, dict[str, int]]:
        """What the collectives of one step move, and the most that is held in each phase."""
        traffic, peaks = Traffic(self.plan.mesh, self.axis_of), {}
        if self.device.type == "cuda":

            def between(phase: str) -> None:
                peaks[phase] = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()

            torch.cuda.reset_peak_memory_stats()
            with traffic:
                self.step(between)
        else:
            live = LiveBytes()

            def between(phase: str) -> None:
                peaks[phase] = live.peak
                live.peak = live.current

            live.watch(self.on_host(), on_host=True)
            live.watch([*self.parallel.parameters(), *self.parallel.buffers(), self.args, self.kwargs])
            live.watch(self.given)
            live.watch([self.optimizer.state_dict()["state"] if self.optimizer is not None else ()])
            programs = self.parallel._autopar.prepared()
            live.watch([[dict(prepared.constants), prepared.runner.coordinates] for prepared in programs])
            with live, traffic:
                self.step(between)
            if live.host_peak:
                return traffic, {**peaks, "step": max(peaks.values()), "host": live.host_peak}
        return traffic, {**one_phase(peaks, self.plan.graph.rounds.count), "step": max(peaks.values())}

    def on_host(self) -> list[Any]:
        """What the plan has on the host: parameters, and states of optimizers."""
        parameters, _ = tensors_by_name(self.parallel)
        found: list[Any] = []
        for name, where in self.plan.residence.items():
            if where == "host":
                found.append(parameters[name])
            if self.optimizer is not None:
                states = self.optimizer.state.get(parameters[name], {}).values()
                found += [state for state in states if state.shape == parameters[name].shape]
        return found

    # --- all ranks together ------------------------------------------------------------------------------------------

    def report(
        self, steps: int, pricer: Pricer | None, notes: tuple[str, ...], undisturbed: float,
        spent: Mapping[str | Moved, float], traffic: Traffic, peaks: Mapping[str, int],
    ) -> Measured:  # fmt: skip
        plan, rounds = self.plan, self.plan.graph.rounds.count
        emitted = emitted_calls(self.parallel.program, self.axis_of, rounds)
        planned, calls, nbytes = plan.comm_bytes, traffic.calls, traffic.nbytes
        kinds = sorted({*emitted, *planned})
        calls[OTHER] = sum(count for kind, count in calls.items() if kind not in kinds)
        kinds.append(OTHER)
        phases = [phase for phase in PHASES if phase in peaks and (phase != "optimizer" or self.optimizer is not None)]
        seconds = self.largest([undisturbed, *(spent.get(key, 0.0) for key in (*phases, *kinds, WAITING))])
        told = dict(zip(("step", *phases, *kinds, WAITING), seconds, strict=True))
        held = dict(zip(peaks, self.largest(list(peaks.values())), strict=True))
        counts = [calls[kind] for kind in kinds] + [nbytes[kind] for kind in kinds]
        most = [int(count) for count in self.largest(counts)]
        if most != [-int(count) for count in self.largest([-count for count in counts])]:
            notes = (*notes, "ranks received different numbers of bytes; the largest stand above")
        rooms = [room for room in ("step", "host") if room in held]
        in_phase, in_collective = ({}, {}) if pricer is None else predicted_seconds(plan, pricer)
        if pricer is None:
            notes = (*notes, f"profile {plan.hardware} is not at hand: give it with --hardware to see all predictions")
        return Measured(
            str(plan.mesh), plan.hardware, plan.optimizer,
            here(self.device, plan.mesh.ranks), steps,
            Pair(plan.predicted_seconds, told["step"]),
            {phase: Pair(in_phase.get(phase), told[phase]) for phase in phases},
            tuple(
                Collective(
                    *kind, (emitted[kind], most[i]), (planned.get(kind, 0), most[len(kinds) + i]),
                    Pair(None if pricer is None else in_collective.get(kind, 0.0), told[kind]),
                )
                for i, kind in enumerate(kinds)
                if kind != OTHER or most[i]
            ),
            told[WAITING], self.memory(pricer, {phase: held[phase] for phase in (*phases, *rooms)}), notes,
        )  # fmt: skip

    def memory(self, pricer: Pricer | None, held: Mapping[str, float]) -> dict[str, Pair]:
        """Bytes are the same on any profile of this kind of device."""
        plan, rounds = self.plan, self.plan.graph.rounds.count
        here = Hardware.load("cpu-gloo" if self.device.type == "cpu" else "h100-sxm")
        on = pricer or Pricer.on(plan.mesh, here, plan.optimizer, plan.bucket_bytes, plan.graph.rounds)
        room = one_phase(predicted_peaks(plan, on), rounds)
        return {phase: Pair(room.get(phase), nbytes) for phase, nbytes in held.items()}

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest over the ranks."""
        told = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return told.tolist()


def here(device: torch.device, ranks: int) -> str:
    """Where a measurement was made, and when."""
    where = f"{ranks} processes of {device_name(device.type)} on {platform.node()}"
    if device.type == "cpu":
        where += f", {processors()} processors, {torch.get_num_threads()} thread(s) each"
    return f"{where}, {dist.get_backend()}, torch {torch.__version__}, {date.today()}"
