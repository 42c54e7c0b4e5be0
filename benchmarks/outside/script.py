"""What one outside script is: a model, random batches, how it is called, and what is its loss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Any]


def by_keyword(model: nn.Module, batch: Batch) -> Any:
    return model(**batch)


def of_x(model: nn.Module, batch: Batch) -> Any:
    return model(batch["x"])


def own_loss(out: Any, batch: Batch) -> Tensor:
    """The loss that the model returns: by that name, first of several, or alone."""
    if isinstance(out, Tensor):
        return out
    loss = out["loss"] if isinstance(out, Mapping) else out[0]
    assert isinstance(loss, Tensor)
    return loss


def cross_entropy(out: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(out, batch["y"])


def to_target(out: Any, batch: Batch) -> Tensor:
    made = out if isinstance(out, Tensor) else out[0]
    return functional.mse_loss(made, batch["y"])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-2)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, eps=1e-3)  # a larger eps: what it divides by is not rounding noise


@dataclass(frozen=True)
class Script:
    """`batch(n)` draws a batch of n rows; `needs`: the packages it imports; `told`: what differs from defaults."""

    name: str
    needs: tuple[str, ...]
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    call: Callable[[nn.Module, Batch], Any] = by_keyword
    loss: Callable[[Any, Batch], Tensor] = own_loss
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    clip: float | None = None
    told: str = ""


def images(n: int, size: int = 64, classes: int = 10, channels: int = 3) -> Batch:
    return {"x": torch.randn(n, channels, size, size), "y": torch.randint(0, classes, (n,))}


def tokens(n: int, length: int = 16, vocabulary: int = 128) -> Tensor:
    return torch.randint(5, vocabulary, (n, length))


def use_packages(folder: str | None) -> None:
    """Let packages be found in a folder, behind all others; torchvision too where its compiled part does not load."""
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


_kept: list[torch.library.Library] = []


def without_compiled_torchvision() -> None:
    """Name the operators that torchvision asks for when imported, where a build for another torch lacks them."""
    if _kept or "torchvision" in sys.modules:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
