"""The states of torch's own generators, from which a program of one rank draws; who draws otherwise, or anew."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

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


def refuse_to_repeat() -> None:
    """Raises RuntimeError for a call that `torch.utils.checkpoint` repeats in backward as if nothing had been: it sets
    torch's generators back, and a program that is given seeds would draw others. Without `use_reentrant` what is
    repeated is thrown away, as the program has saved what its backward needs.
    """
    repeats, frame = CheckpointFunction.backward.__code__, sys._getframe()
    while frame is not None:
        if frame.f_code is repeats:
            raise RuntimeError(
                "checkpoint(..., use_reentrant=True) runs the module again in backward, where dropout would draw other "
                "numbers than it did: pass use_reentrant=False, or call the module outside of checkpoint (memory= has "
                "the search run again what saves memory)"
            )
        frame = frame.f_back
