"""What a stage of the benchmark is: a function of a `Setting` that yields rows of figures as it gets them.

It raises `Skipped` with the reason where the machine lacks something, and `Wrong` at the first number that is off; any
other error says that the stage failed, which is neither.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from tests.support.wide import as_double

WORSE, ROUNDED = 3.0, 3e-2  # of bfloat16, whose 8 bits are rounded anew at every operator
Row = dict[str, Any]  # name of a figure -> text or number; rows with the same names stand in one table


@dataclass(frozen=True)
class Setting:
    """`folder`: for what a stage leaves behind for its own processes. `kept`: for what later stages read, beside the
    report. `ranks`: of a node.
    """

    device: str
    folder: Path
    ranks: int = 1
    kept: Path = Path("out")

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def profile(self) -> Path:
        """What calibrate has found of this machine."""
        return self.kept / "profile.toml"

    @property
    def priced_by(self) -> str:
        """The profile that prices plans here. Raises Skipped where calibrate has left none."""
        if not self.is_cuda:
            return "cpu-gloo"
        if not self.profile.exists():
            raise Skipped("the stage calibrate has left no profile")
        return str(self.profile)

    def needs_cuda(self, what: str) -> None:
        if not self.is_cuda:
            raise Skipped(f"{what} needs CUDA, and this is a dry run on the CPU")


Stage = Callable[[Setting], Iterator[Row]]


class Skipped(Exception):
    """Why a stage is of no use here."""


class Wrong(Exception):
    """A number that is not what it has to be: nothing behind it is worth running."""


def off(ours: Tensor, wanted: Tensor) -> float:
    """The largest difference, in units of the largest entry that was wanted; infinite where shapes differ or an entry
    is no number.
    """
    ours, wanted = (as_double(plain(x).detach().cpu()) for x in (ours, wanted))
    if ours.shape != wanted.shape or not ours.isfinite().equal(wanted.isfinite()):
        return float("inf")
    if not wanted.numel():
        return 0.0
    size = wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return (ours - wanted).nan_to_num(0.0).abs().max().item() / (size or 1.0)


def near(ours: Tensor, wanted: Tensor, within: float, what: str) -> float:
    """How far off it is. Raises Wrong where that is more than `within`."""
    found = off(ours, wanted)
    if not found <= within:
        raise Wrong(f"{what} is off by {found:.3g} of its largest entry, {within:.3g} is allowed")
    return found


def same(ours: Tensor, wanted: Tensor, what: str) -> None:
    """Raises Wrong where a bit differs."""
    ours, wanted = plain(ours).detach(), plain(wanted).detach().to(ours.device)
    if not torch.equal(ours, wanted):
        count = int((ours != wanted).sum())
        raise Wrong(f"{what} has {count} of {wanted.numel()} entries with other bits, by {off(ours, wanted):.3g}")


def plain(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def loss_of(output: Any) -> Tensor:
    leaves, _ = pytree.tree_flatten(output)
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim == 0)


def gradients_off(ours: nn.Module, wanted: nn.Module, within: float, what: str) -> float:
    """The worst of all gradients. Raises Wrong where it is more than `within`."""
    found = errors_of(ours, wanted, what)
    for name, error in found.items():
        if not error <= within:
            raise Wrong(f"{what}: the gradient of {name} is off by {error:.3g}, {within:.3g} is allowed")
    return max(found.values(), default=0.0)


def half_gradients_off(ours: nn.Module, eager: nn.Module, exact: nn.Module, what: str) -> tuple[float, float]:
    """The worst gradient of ours, and of eager torch in the same 16 bits, both against float32. Raises Wrong where ours
    is more than `WORSE` times as far off as eager torch's own, and more than `ROUNDED`.
    """
    found, theirs = errors_of(ours, exact, what), errors_of(eager, exact, f"{what}, eager")
    for name, error in found.items():
        if not error <= max(ROUNDED, WORSE * theirs[name]):
            raise Wrong(
                f"{what}: the gradient of {name} is off by {error:.3g}, that of eager torch by {theirs[name]:.3g}"
            )
    return max(found.values(), default=0.0), max(theirs.values(), default=0.0)


def errors_of(ours: nn.Module, wanted: nn.Module, what: str) -> dict[str, float]:
    """How far each gradient is off, in units of its largest entry, or of a hundredth of the largest of all.

    (One that is zero but for rounding, as that of a bias before a norm, has no size of its own.)
    """
    sizes = [p.grad.abs().max().item() for p in wanted.parameters() if p.grad is not None and p.grad.numel()]
    least, found = 0.01 * max(sizes, default=1.0), dict[str, float]()
    for name, parameter in wanted.named_parameters():
        mine = ours.get_parameter(name).grad
        if (mine is None) != (parameter.grad is None):
            raise Wrong(f"{what}: the gradient of {name} is there in one of the two alone")
        if mine is not None and parameter.grad is not None:
            scale = max(1.0, least / (parameter.grad.abs().max().item() or 1e-300))
            found[name] = off(mine.to(parameter.grad.dtype), parameter.grad) / scale
    return found


def called(module: str, *arguments: str) -> str:
    """What `python -m module` says, which is printed, too; its process is a rank of nothing. Raises RuntimeError where
    it fails.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, env=env)
    print(done.stdout, flush=True)
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def moved(inputs: Any, device: str) -> Any:
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)


def exact_products() -> None:
    """No TF32: eager torch and the program shall round alike. (By the older names: torch reads them while it traces,
    and refuses to where convolutions were set by the newer one.)
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
