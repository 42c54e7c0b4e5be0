"""MODEL of the command line as a graph: built, called by name, captured for the devices that are planned for."""

# pyright: basic

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.errors import BadArgument, PlanMismatch, TraceError
from autopar.ir.batch_norm import GLOBAL, LOCAL, statistics_of
from autopar.ir.words import count_of
from autopar.search.command.factory import Example, build
from autopar.search.search import Progress, Question
from autopar.trace import Captured, capture
from autopar.trace.ambient import autocast_as_asked
from autopar.trace.asked import Arguments, values_of
from autopar.trace.calls import by_name, flatten_inputs
from autopar.trace.modules import check_dense


def as_ddp(question: Question, with_statistics: Callable[[str], Question]) -> Question | str | None:
    """The question with the batch norms that DDP has, or why there is none; None where the asked one is such."""
    if GLOBAL not in statistics_of(question.graph) or question.pricer.mesh.ranks == 1:
        return None
    try:
        other = with_statistics(LOCAL)
    except TraceError as error:
        return str(error)
    return other if LOCAL in statistics_of(other.graph) else None


def traced(
    text: str, precision: MixedPrecisionPolicy | None, device_type: str, progress: Progress, *, loss_alone: bool
) -> Captured:
    """What `autopar.compile` captures when it is called as the factory says, for devices of that type."""
    with autocast_as_asked(device_type):  # decorators ask for it when the file is read
        example = build(text)
    count = sum(parameter.numel() for parameter in example.model.parameters())
    progress(f"built {type(example.model).__name__}, {count_of(count, 'parameter')}")
    args, kwargs = _call(example, text)
    model = example.model
    training = model.training or any(parameter.requires_grad for parameter in model.parameters())
    try:
        leaves, _ = flatten_inputs(args, kwargs)
        for path, leaf in leaves:
            if isinstance(leaf, Tensor):
                check_dense(leaf, f"argument {path}")
        return capture(
            model, args, kwargs, training=None if training == model.training else training, precision=precision,
            loss_alone=loss_alone, device_type=device_type, arguments=Arguments(values_of(leaves)),
        )  # fmt: skip
    except PlanMismatch as error:
        raise BadArgument(f"{text}: {error}") from error


def _call(example: Example, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        return by_name(example.model.forward, example.args, example.kwargs)
    except TypeError as error:
        name = type(example.model).__name__
        raise BadArgument(f"{text} returned inputs that {name}.forward does not take: {error}") from error
