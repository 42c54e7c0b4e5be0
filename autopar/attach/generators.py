"""The states of torch's own generators, from which a program of one rank draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

States = list[tuple[torch.Generator, Tensor]]


def random_states(ranks: int, device: torch.device) -> States:
    """What a program of one rank draws from: those of several ranks get seeds."""
    if ranks > 1:
        return []
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(generator, generator.get_state()) for generator in generators]


@contextlib.contextmanager
def drawing_from(states: States) -> Iterator[None]:
    """Let the generators draw what they drew from these states, and go on behind that as if nothing had been."""
    now = [(generator, generator.get_state()) for generator, _ in states]
    for generator, state in states:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in now:
            generator.set_state(state)
