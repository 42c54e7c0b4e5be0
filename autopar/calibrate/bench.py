"""What is timed: a call, the step that it is, and operands that take turns as they do in a program."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.machine.device import tf32_here
from cost_models.steps import Compute, Move

ROTATED_BYTES = 40 * 2**20  # of operands that take turns: more than a rank's part of the last cache
KEPT_BYTES = 16 * 2**20  # of results that stay for a while
MOST_SETS = 16


@dataclass(frozen=True)
class Bench:
    """A call to be timed, the step that it is, and the curve to which it counts."""

    curve: str
    step: Compute | Move
    call: Callable[[], object]
    held: bool = False
    counts: int = 1  # how many times the call does the step


Made = Iterator[Bench]


def nbytes_of(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes_of, value)) if isinstance(value, (tuple, list)) else 0


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def work(
    op: str, kind: str, flops: float, target: Callable[..., Any], *args: Any, own: bool = False, held: object = False,
) -> Bench:  # fmt: skip
    """The bench of an operator: bytes are those of operands and results; it has its own curve or its kind's."""
    result = target(*args)
    first = result if isinstance(result, Tensor) else result[0]
    dtype = name_of(first.dtype)
    if dtype == "float32" and kind in tf32_here(first.device.type):
        dtype = "tf32"
    step = Compute(op, flops, float(nbytes_of(args) + nbytes_of(result)), dtype, 1, kind)
    call = in_turn(target, args, nbytes_of(result))
    return Bench(f"ops.{op}.{dtype}" if own else f"{kind}.{dtype}", step, call, bool(held))


def in_turn(target: Callable[..., Any], args: tuple[Any, ...], made: int) -> Callable[[], object]:
    """The call, each time on other operands, and with its last results kept: as in a program, where what an operator
    reads, and where its result will lie, is seldom in the caches. `made`: bytes of the result.
    """
    sets = [args, *(_copied(args) for _ in range(_count(nbytes_of(args), rotated_bytes(args)) - 1))]
    following, kept = itertools.cycle(sets), deque[object](maxlen=_count(made, KEPT_BYTES))

    def call() -> None:
        kept.append(target(*next(following)))

    return call


def rotated_bytes(args: tuple[Any, ...]) -> int:
    """So many bytes of operands take turns that none is in the last cache when it is read again: on CUDA four times as
    many as its L2 holds.
    """
    device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
    if device is None or device.type != "cuda":
        return ROTATED_BYTES
    return max(ROTATED_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)


def _count(nbytes: int, room: int) -> int:
    return max(1, min(MOST_SETS, room // nbytes)) if nbytes else 1


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if isinstance(value, (tuple, list)) else value
