"""Who gets the GPU memory that is left: more cached blocks, or chunks that live there with their optimizer states.

    r   = 1 + (1 + k) w              a chunk with its states, in elements of the parameter's type;
                                     k = 2 for Adam, 1 for SGD with momentum; w = 2 for half precision, 1 for fp32
    I   = e_p / up + e_p / down      one more element in a cached block: no upload, no download
    J   = (n / r) (4 / up + I + e_p / down + 1 / cpu - 1 / gpu)
                                     the same memory for chunks that live on the GPU, updated there
    rcache_first = I > J

in seconds per element; e_p = bytes of an element, n = ranks, up and down = bytes/s between host and the n GPUs, cpu and
gpu = parameters/s of the optimizer. Elixir, arXiv 2212.05339.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.search.elixir.chunks import OVERLAP_BLOCKS, Packing, round_up

STATE_BYTES = 4  # master copy and optimizer states are fp32
LEAST_BLOCKS = 4
PARAMETER_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
STATES = {"adam": 2, "sgd": 1}


@dataclass(frozen=True, slots=True)
class Training:
    """The parameters' type and the optimizer: what an element weighs on the GPU, and with all its states."""

    dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    optimizer: Literal["adam", "sgd"] = "adam"

    def __post_init__(self) -> None:
        for value, known in ((self.dtype, PARAMETER_BYTES), (self.optimizer, STATES)):
            if value not in known:
                raise ValueError(f"{value!r} is unknown; known are {', '.join(known)}")

    @property
    def parameter_bytes(self) -> int:
        return PARAMETER_BYTES[self.dtype]

    @property
    def elements_with_states(self) -> int:
        """r above: 7 for half precision and Adam (14 bytes), 5 for SGD; 4 and 3 for fp32."""
        return 1 + (1 + STATES[self.optimizer]) * STATE_BYTES // self.parameter_bytes


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Straight lines (a logarithm for the CPU) in the number of ranks n: rates of all of them together, per second."""

    upload_bytes_per_rank: float
    upload_bytes: float
    download_bytes_per_rank: float
    download_bytes: float
    gpu_updates_per_rank: float
    cpu_updates_per_log_rank: float
    cpu_updates: float

    def upload_bytes_per_s(self, ranks: int) -> float:
        return self.upload_bytes_per_rank * ranks + self.upload_bytes

    def download_bytes_per_s(self, ranks: int) -> float:
        return self.download_bytes_per_rank * ranks + self.download_bytes

    def gpu_updates_per_s(self, ranks: int) -> float:
        return self.gpu_updates_per_rank * ranks

    def cpu_updates_per_s(self, ranks: int) -> float:
        return self.cpu_updates_per_log_rank * math.log(ranks) + self.cpu_updates


# The machine of Elixir's authors, as literals in the code they published (1e9 bytes/s, 1e9 parameters/s); not ours.
AUTHORS_MACHINE = MachineRates(
    upload_bytes_per_rank=16.3e9,
    upload_bytes=8.7e9,
    download_bytes_per_rank=15.8e9,
    download_bytes=2.3e9,
    gpu_updates_per_rank=50e9,
    cpu_updates_per_log_rank=1.66e9,
    cpu_updates=5.15e9,
)


@dataclass(frozen=True, slots=True)
class Gains:
    """Seconds saved per element of GPU memory: by one more cached block (I), by a chunk that lives there (J)."""

    cached_s: float
    resident_s: float

    @property
    def rcache_first(self) -> bool:
        return self.cached_s > self.resident_s


def gains(ranks: int, training: Training, rates: MachineRates = AUTHORS_MACHINE) -> Gains:
    """I and J of the module's text."""
    up, down = rates.upload_bytes_per_s(ranks), rates.download_bytes_per_s(ranks)
    nbytes = training.parameter_bytes
    cached_s = nbytes / up + nbytes / down
    updates_s = 1 / rates.cpu_updates_per_s(ranks) - 1 / rates.gpu_updates_per_s(ranks)
    moved_s = STATE_BYTES / up + cached_s + nbytes / down
    return Gains(cached_s, ranks / training.elements_with_states * (moved_s + updates_s))


@dataclass(frozen=True, slots=True)
class Residence:
    """Packed chunks in order, then the tied ones: which live on the GPU. And the blocks that cache the others there."""

    on_device: tuple[bool, ...]
    cache_blocks: int


def share_out(
    packing: Packing,
    tied: Sequence[int],
    room: int,
    *,
    training: Training,
    ranks: int,
    overlap: bool,
    checkpoint_elements: int,
    rcache_first: bool,
) -> Residence:
    """Walk the chunks in order of use, the tied ones last: each lives on the GPU if it still fits with its states.

    With `rcache_first` all blocks are set aside before; else as few as a checkpointed segment of `checkpoint_elements`
    can run in, and blocks get what the walk leaves. `tied`: elements of each tied parameter. `room`: elements.
    """
    size, blocks = packing.elements, packing.blocks
    if not rcache_first and size:
        least = max(LEAST_BLOCKS, -(-checkpoint_elements // size) + 1) + (OVERLAP_BLOCKS if overlap else 0)
        blocks = min(least, blocks)
    left = room - blocks * size
    on_device: list[bool] = []
    for elements in (*[size] * packing.chunks, *(round_up(numel, ranks) for numel in tied)):
        needed = training.elements_with_states * elements // ranks
        on_device.append(needed <= left)
        left -= needed if needed <= left else 0
    if size:
        blocks += min(left // size, packing.blocks - blocks)
    return Residence(tuple(on_device), blocks)
