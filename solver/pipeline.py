"""Cutting a chain of layers into pipeline stages: the problem, tables of stages, and the referee.

    minimise    sum_s l_s  +  (B - 1) max_s l_s
    subject to  fixed_s + min(B, n_s + 1) saved_s  <=  limit     bytes on each device of stage s
                sum_s devices_s  <=  devices                     (= devices where use_all)

A stage s is a run of neighbouring layers on one group of devices, under one of its options. l_s is its latency: the
seconds of one micro-batch, forward and backward, plus those of sending across the cut behind it. B counts the
micro-batches of a step, n_s the stages that follow s: under 1F1B that many forwards run ahead of the first backward,
so n_s + 1 micro-batches are in flight. Layers, groups and options are numbers; nothing here knows what they stand for.

Sources: Alpa (Zheng et al., OSDI 2022), section 5; 1F1B is PipeDream-Flush (Narayanan et al., ICML 2021). Why the send
counts into the latency: docs/design/0008-pipeline-cuts.md.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from solver.problem import Array


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage: a point of its front of time against memory.

    seconds      of one micro-batch, forward and backward, without sends to the next stage
    fixed_bytes  per device, however many micro-batches are in flight: parameters, gradients, optimizer states, and
                 the most that temporaries take at once
    saved_bytes  per device and micro-batch in flight: what forward keeps for backward
    """

    seconds: float
    fixed_bytes: float
    saved_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class StageTable:
    """All options of all stages, as arrays indexed [first layer, last layer, group, option]; see StageOption.

    The last layer is included. Infinite seconds mean that the option is not offered, and its bytes are then not
    looked at; nor is any entry whose last layer comes before its first. Raises ValueError for what makes no sense.
    """

    seconds: Array
    fixed_bytes: Array
    saved_bytes: Array

    def __post_init__(self) -> None:
        for name in ("seconds", "fixed_bytes", "saved_bytes"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        shape = self.seconds.shape
        if len(shape) != 4 or shape[0] != shape[1] or 0 in shape:
            raise ValueError(f"seconds have shape {shape}; [layers, layers, groups, options] is needed, none empty")
        real = np.broadcast_to(np.triu(np.ones(shape[:2], dtype=bool))[:, :, None, None], shape)
        _check_each("seconds", self.seconds, real & ~(self.seconds >= 0), "not be negative or nan; inf forbids")
        offered = real & np.isfinite(self.seconds)
        for name in ("fixed_bytes", "saved_bytes"):
            array: Array = getattr(self, name)
            if array.shape != shape:
                raise ValueError(f"{name} have shape {array.shape}, but the seconds make it {shape}")
            _check_each(name, array, offered & ~((array >= 0) & (array < np.inf)), "be finite and not negative")

    @property
    def layers(self) -> int:
        """How many there are."""
        return self.seconds.shape[0]


def _check_each(name: str, array: Array, wrong: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], must: str) -> None:
    if wrong.any():
        first, last, group, option = (int(at) for at in np.argwhere(wrong)[0])
        value = array[first, last, group, option]
        where = f"layers {first} to {last} on group {group}, option {option}"
        raise ValueError(f"{name} of {where} are {value:g}; they must {must}")


@dataclass(frozen=True, slots=True, eq=False)
class PipelineProblem:
    """What may be cut, and onto what.

    stages         the options of every stage
    groups         devices in each kind of group; a kind may be used by any number of stages
    devices        available in all. That groups of these sizes can be laid out side by side is for the caller to see
                   to: sizes 1, 2, 4, ... of one node and whole nodes always can (Alpa, section 5.2)
    micro_batches  B, in a step
    send_s         seconds to send one micro-batch across each cut, its gradients back included; entry k is the cut
                   behind layer k, so there is one less than there are layers
    limit_bytes    of each device; inf: no limit
    use_all        the stages take exactly `devices`, as in Alpa. Otherwise at most, and more devices never cost more
    names          of the layers, for messages

    Raises ValueError naming the first thing that does not fit. Arrays are shared: do not write to them afterwards.
    """

    stages: StageTable
    groups: tuple[int, ...]
    devices: int
    micro_batches: int
    send_s: Array
    limit_bytes: float = math.inf
    use_all: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        layers, kinds = self.stages.layers, self.stages.seconds.shape[2]
        object.__setattr__(self, "groups", tuple(_count(n, f"devices of group {g}") for g, n in enumerate(self.groups)))
        object.__setattr__(self, "devices", _count(self.devices, "devices"))
        object.__setattr__(self, "micro_batches", _count(self.micro_batches, "micro_batches"))
        object.__setattr__(self, "send_s", np.asarray(self.send_s, dtype=np.float64))
        object.__setattr__(self, "limit_bytes", float(self.limit_bytes))
        object.__setattr__(self, "names", tuple(self.names))
        if len(self.groups) != kinds:
            raise ValueError(f"{len(self.groups)} groups are given, but the table of stages has {kinds}")
        if self.send_s.shape != (layers - 1,):
            raise ValueError(
                f"send_s has shape {self.send_s.shape}; {layers} layers have {layers - 1} cuts between them"
            )
        for cut, seconds in enumerate(self.send_s):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"send_s behind layer {cut} is {seconds:g}; it must be finite and not negative")
        if not self.limit_bytes >= 0:
            raise ValueError(f"limit_bytes is {self.limit_bytes:g}; it must not be negative")
        if self.names and len(self.names) != layers:
            raise ValueError(f"{len(self.names)} names for {layers} layers; give one name per layer or none")
        seconds = self.stages.seconds[np.isfinite(self.stages.seconds)]
        total = (float(seconds.max(initial=0)) + float(self.send_s.max(initial=0))) * (layers + self.micro_batches)
        if total > 1e300:
            raise ValueError(f"the seconds may add up to {total:g}, which overflows; use a larger unit of time")

    def name(self, layer: int) -> str:
        """What messages call the layer."""
        return f"layer {layer} ({self.names[layer]})" if self.names else f"layer {layer}"


def _count(value: int, what: str) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{what} is {value!r}; a whole number is needed") from None
    if count < 1:
        raise ValueError(f"{what} is {count}; at least 1 is needed")
    return count


# --- making tables -------------------------------------------------------------------------------------------------


def stage_table(layers: int, groups: int, options: Callable[[int, int, int], Sequence[StageOption]]) -> StageTable:
    """The table of what `options(first, last, group)` offers; an empty answer forbids the stage on that group."""
    offers = {
        (first, last, group): options(first, last, group)
        for first in range(layers)
        for last in range(first, layers)
        for group in range(groups)
    }
    most = max((len(offer) for offer in offers.values()), default=0)
    seconds, fixed, saved = np.full((3, layers, layers, groups, max(most, 1)), np.inf)
    for at, offer in offers.items():
        for number, option in enumerate(offer):
            seconds[*at, number] = option.seconds
            fixed[*at, number] = option.fixed_bytes
            saved[*at, number] = option.saved_bytes
    return StageTable(seconds, fixed, saved)


def additive_stages(
    seconds: ArrayLike, fixed_bytes: ArrayLike, saved_bytes: ArrayLike, peak_bytes: ArrayLike | None = None
) -> StageTable:
    """The table of stages whose layers run one after the other, each under the same option.

    All arrays are [layer, group, option]. Seconds, fixed and saved bytes of the layers add up; `peak_bytes`, the
    temporaries that only one layer at a time holds, count with the largest. Raises ValueError.
    """
    layer_s = np.asarray(seconds, dtype=np.float64)
    if layer_s.ndim != 3:
        raise ValueError(f"seconds of the layers have shape {layer_s.shape}; [layers, groups, options] is needed")
    held = {"fixed_bytes": fixed_bytes, "saved_bytes": saved_bytes}
    held |= {"peak_bytes": np.zeros(layer_s.shape) if peak_bytes is None else peak_bytes}
    layer_bytes = {name: np.asarray(given, dtype=np.float64) for name, given in held.items()}
    for name, given in layer_bytes.items():
        if given.shape != layer_s.shape:
            raise ValueError(f"{name} of the layers have shape {given.shape}, but the seconds make it {layer_s.shape}")
        if (given[np.isfinite(layer_s)] < 0).any():  # sums and maxima would hide it
            raise ValueError(f"{name} of the layers go down to {given.min():g}; they must not be negative")
    if (layer_s < 0).any():
        raise ValueError(f"seconds of the layers go down to {layer_s.min():g}; they must not be negative")
    # Summed anew from each first layer: differences of prefix sums would make equal stages of equal layers differ.
    layers = len(layer_s)
    total_s, total_fixed, total_saved = np.full((3, layers, *layer_s.shape), np.inf)
    for first in range(layers):
        total_s[first, first:] = np.cumsum(layer_s[first:], axis=0)
        total_saved[first, first:] = np.cumsum(layer_bytes["saved_bytes"][first:], axis=0)
        peak = np.maximum.accumulate(layer_bytes["peak_bytes"][first:], axis=0)
        total_fixed[first, first:] = np.cumsum(layer_bytes["fixed_bytes"][first:], axis=0) + peak
    return StageTable(total_s, total_fixed, total_saved)


@dataclass(frozen=True, slots=True)
class Value:
    """What `producer` computes and `readers` read: `nbytes` that cross every cut between it and its last reader."""

    producer: str
    readers: tuple[str, ...]
    nbytes: float


def chain_cuts(order: Sequence[str], values: Iterable[Value]) -> Array:
    """Bytes that cross each cut of a graph laid out in topological order; entry k is the cut behind `order[k]`.

    A value whose readers lie further on crosses every cut on the way (the stages between hand it on), and crosses it
    once however many readers it has beyond. Bytes are those of forward; gradients go back beside them. For layers of
    several operators take the entries of their last operators. Raises ValueError where the order is not topological.
    """
    at = {name: number for number, name in enumerate(order)}
    if len(at) != len(order):
        twice = next(name for number, name in enumerate(order) if at[name] != number)
        raise ValueError(f"{twice!r} stands in the order twice; each operator stands there once")
    crossing = np.zeros(max(len(order) - 1, 0))
    for value in values:
        for name in (value.producer, *value.readers):
            if name not in at:
                raise ValueError(
                    f"{name!r} is not in the order of {len(order)} operators; add it or leave the value out"
                )
        if not 0 <= value.nbytes < math.inf:
            raise ValueError(f"{value.producer!r} gives {value.nbytes:g} bytes; they must be finite and not negative")
        for reader in value.readers:
            if at[reader] <= at[value.producer]:
                raise ValueError(f"{reader!r} reads {value.producer!r} but does not come after it; sort topologically")
        last = max((at[reader] for reader in value.readers), default=0)
        crossing[at[value.producer] : last] += value.nbytes
    return crossing


# --- the referee ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first` to `last`, both included, on one group of kind `group` under option number `option`."""

    first: int
    last: int
    group: int
    option: int


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """What a cut costs: seconds of a step (inf if an option is not offered), and per stage its latency in seconds,
    the micro-batches in flight and the bytes on each device. `fits`: bytes and devices are within the problem's."""

    seconds: float
    stage_s: tuple[float, ...]
    in_flight: tuple[int, ...]
    nbytes: tuple[float, ...]
    devices: int
    fits: bool


def pipeline_cost(problem: PipelineProblem, cut: Sequence[Stage]) -> PipelineCost:
    """Price a cut the plain way. Shares no code with the search, so that an error there cannot hide itself here.

    Raises ValueError if the stages do not cover the layers one after the other, or name what does not exist.
    """
    table = problem.stages
    expected = 0
    for number, stage in enumerate(cut):
        if stage.first != expected or not stage.first <= stage.last < table.layers:
            raise ValueError(
                f"stage {number} has layers {stage.first} to {stage.last}; "
                f"it must begin with layer {expected} and end with one of {expected} to {table.layers - 1}"
            )
        kinds, options = table.seconds.shape[2:]
        for name, value, known in (("group", stage.group, kinds), ("option", stage.option, options)):
            if not 0 <= value < known:
                raise ValueError(f"stage {number} names {name} {value}, but they are 0 to {known - 1}")
        expected = stage.last + 1
    if expected != table.layers:
        raise ValueError(f"the stages cover {expected} of {table.layers} layers; each layer is in one stage")
    stage_s: list[float] = []
    in_flight: list[int] = []
    nbytes: list[float] = []
    for number, stage in enumerate(cut):
        followers = len(cut) - 1 - number
        at = (stage.first, stage.last, stage.group, stage.option)
        sent_s = float(problem.send_s[stage.last]) if followers else 0.0
        held = min(problem.micro_batches, followers + 1)
        stage_s.append(float(table.seconds[at]) + sent_s)
        in_flight.append(held)
        nbytes.append(float(table.fixed_bytes[at]) + held * float(table.saved_bytes[at]))
    largest = max(stage_s)
    # not 0 * inf, which is nan
    seconds = math.fsum(stage_s) + (problem.micro_batches - 1) * largest if largest < math.inf else math.inf
    devices = sum(problem.groups[stage.group] for stage in cut)
    enough = devices == problem.devices if problem.use_all else devices <= problem.devices
    fits = enough and all(held <= problem.limit_bytes for held in nbytes)
    return PipelineCost(seconds, tuple(stage_s), tuple(in_flight), tuple(nbytes), devices, fits)
