"""Elixir's plan for a model on one kind of GPU: chunk size, cached blocks, and which chunks live on the host.

    room = floor(0.95 (fraction capacity - 2 GiB - buffers - 1.25 activations) / e_p) - hook - tied

in elements of e_p bytes: 2 GiB for the driver, 1.25 and 0.95 for fragmentation, `hook` for the buffer into which a
module's parameters are copied at each use, and tied parameters, which always keep a block. Elixir, arXiv 2212.05339.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.search.elixir.chunks import DoesNotFit, Parameter, choose_chunks, round_up
from autopar.search.elixir.residence import AUTHORS_MACHINE, MachineRates, Training, gains, share_out

DRIVER_BYTES = 2 * 2**30
ACTIVATION_FRAGMENTS = 1.25
USABLE = 0.95


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parameters that move together, `elements` with padding; on the GPU or on the host, always with their states."""

    names: tuple[str, ...]
    elements: int
    tied: bool
    on_device: bool


@dataclass(frozen=True, slots=True)
class ElixirPlan:
    """What Elixir decides. Counts are of elements of `training.parameter_bytes`, over all ranks, unless said.

    `room`: elements of one GPU for blocks and chunks. `chunks`: packed ones in order of first use, each of
    `chunk_elements`, then the tied ones. `waste_elements`: padding of packed chunks. `blocks`, `moves`: what the chunk
    size was chosen for: chunks cached on the GPU, uploads and downloads in a training step. `cache_blocks`: blocks that
    are left once chunks have their place; `rcache_first` says which of the two came first.
    """

    room: int
    chunk_elements: int
    chunks: tuple[Chunk, ...]
    waste_elements: int
    blocks: int
    moves: int
    rcache_first: bool
    cache_blocks: int
    training: Training

    @property
    def packed_chunks(self) -> int:
        """How many chunks there are, without the tied ones."""
        return sum(not chunk.tied for chunk in self.chunks)

    @property
    def device_chunks(self) -> int:
        """How many packed chunks live on the GPU, optimizer states included."""
        return sum(chunk.on_device for chunk in self.chunks if not chunk.tied)

    @property
    def tied_on_device(self) -> bool:
        """Whether every tied parameter lives on the GPU; True if there is none."""
        return all(chunk.on_device for chunk in self.chunks if chunk.tied)

    @property
    def host_bytes(self) -> int:
        """Parameters and optimizer states on the host, all ranks together."""
        return self._host_bytes(self.chunks)

    @property
    def host_bytes_without_tied(self) -> int:
        return self._host_bytes([chunk for chunk in self.chunks if not chunk.tied])

    @property
    def chunk_of(self) -> Mapping[str, int]:
        """Parameter -> its position in `chunks`."""
        return {name: position for position, chunk in enumerate(self.chunks) for name in chunk.names}

    @property
    def is_on_device(self) -> Mapping[str, bool]:
        """Parameter -> whether it lives on the GPU (else on the host, and is uploaded for use)."""
        return {name: chunk.on_device for chunk in self.chunks for name in chunk.names}

    def _host_bytes(self, chunks: Sequence[Chunk]) -> int:
        nbytes = self.training.elements_with_states * self.training.parameter_bytes
        return sum(chunk.elements * nbytes for chunk in chunks if not chunk.on_device)


def elixir_search(
    parameters: Sequence[Parameter],
    steps: Sequence[Collection[str]],
    *,
    capacity_bytes: float,
    activation_bytes: float,
    buffer_bytes: float = 0,
    fraction: float = 1.0,
    ranks: int = 1,
    training: Training | None = None,
    overlap: bool = True,
    hook_elements: int = 0,
    checkpoint_elements: int = 0,
    rates: MachineRates = AUTHORS_MACHINE,
) -> ElixirPlan:
    """Choose chunk size, cached blocks and the place of every chunk, exactly as Elixir does (arXiv 2212.05339).

    parameters: in the order in which a training step first uses them; names are unique. The same parameters in the
        same order give the same plan. One that no step uses is packed like the others and never moved.
    steps: one for each time that a module runs, forward and backward: the names it uses at once.
    capacity_bytes, fraction: memory of one GPU, and how much of it may be used.
    activation_bytes: peak of activations on one GPU, without parameters. buffer_bytes: the model's buffers.
    ranks: GPUs among which every chunk is split.
    training: type and optimizer; half precision with Adam if left out.
    overlap: uploads run ahead of compute; two blocks are then left out of the count of blocks.
    hook_elements: the most parameters that one module holds itself, copied at each use (0: none are copied).
    checkpoint_elements: parameters of the largest segment that is recomputed as a whole.
    rates: of the machine; they only say whether blocks come before chunks that stay. By default the authors'.

    Raises DoesNotFit if the GPU is too small, and says by how much; ValueError for arguments that make no sense.
    """
    training = training or Training()
    position_of = _checked(parameters, steps, fraction, ranks)
    packable = [parameter for parameter in parameters if not parameter.tied]
    tied = [parameter for parameter in parameters if parameter.tied]
    trace = [[position_of[name] for name in step if name in position_of] for step in steps]

    free_bytes = capacity_bytes * fraction - DRIVER_BYTES - buffer_bytes - ACTIVATION_FRAGMENTS * activation_bytes
    usable = math.floor(USABLE * free_bytes) // training.parameter_bytes
    taken = hook_elements + sum(parameter.numel for parameter in tied)
    room = usable - taken
    if room < 0:
        raise _does_not_fit(fraction, capacity_bytes, buffer_bytes, activation_bytes, max(usable, 0), taken)

    packing = choose_chunks(
        packable, trace, room, parameter_bytes=training.parameter_bytes, overlap=overlap, ranks=ranks
    )
    rcache_first = gains(ranks, training, rates).rcache_first
    residence = share_out(
        packing,
        [parameter.numel for parameter in tied],
        room,
        training=training,
        ranks=ranks,
        overlap=overlap,
        checkpoint_elements=checkpoint_elements,
        rcache_first=rcache_first,
    )

    names: list[list[str]] = [[] for _ in range(packing.chunks)]
    for parameter, chunk in zip(packable, packing.chunk_of, strict=True):
        names[chunk].append(parameter.name)
    contents = [(tuple(group), packing.elements, False) for group in names]
    contents += [((parameter.name,), round_up(parameter.numel, ranks), True) for parameter in tied]
    return ElixirPlan(
        room=room,
        chunk_elements=packing.elements,
        chunks=tuple(Chunk(*what, here) for what, here in zip(contents, residence.on_device, strict=True)),
        waste_elements=packing.chunks * packing.elements - sum(parameter.numel for parameter in packable),
        blocks=packing.blocks,
        moves=packing.moves,
        rcache_first=rcache_first,
        cache_blocks=residence.cache_blocks,
        training=training,
    )


def _does_not_fit(
    fraction: float, capacity_bytes: float, buffer_bytes: float, activation_bytes: float, usable: int, taken: int
) -> DoesNotFit:
    return DoesNotFit(
        f"{fraction:g} of {capacity_bytes / 2**30:.2f} GiB, less 2 GiB for the driver, {buffer_bytes / 2**30:.2f} "
        f"GiB of buffers and 1.25 x {activation_bytes / 2**30:.2f} GiB of activations, is room for "
        f"{usable:,} elements; tied parameters and the copies of hooks alone take {taken:,}. "
        "Give more GPU memory or use smaller batches."
    )


def _checked(
    parameters: Sequence[Parameter], steps: Sequence[Collection[str]], fraction: float, ranks: int
) -> Mapping[str, int]:
    """Name -> position among the parameters that are not tied; ValueError for what makes no sense."""
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; at least 1 is needed")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction {fraction:g} of the GPU's memory; it is above 0 and at most 1")
    names = Counter(parameter.name for parameter in parameters)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"parameter {twice[0]!r} stands twice in the list; a tied one is listed once, with tied=True")
    for number, step in enumerate(steps):
        if unknown := sorted(set(step) - names.keys()):
            raise ValueError(f"step {number} uses {unknown[0]!r}, which is not among the {len(names)} parameters")
    return {p.name: position for position, p in enumerate(p for p in parameters if not p.tied)}
