"""Batches and settings in dataclasses of the user's, as arguments of forward."""

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near


@dataclass
class Batch:
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor
    weight: float = 1.0


@dataclass
class Settings:
    weight: float = 1.0


@dataclass
class Scaled:
    """Made once: what its constructor does is not to be done again, and what it was told is nowhere kept."""

    x: Tensor
    y: Tensor
    negative: InitVar[bool]
    weight: float = field(default=0.0, init=False)

    def __post_init__(self, negative: bool) -> None:
        self.x = self.x / 3
        self.weight = -2.0 if negative else 2.0


@dataclass(slots=True, kw_only=True)
class Slots:
    x: Tensor
    y: Tensor
    weight: float | None = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, batch: Any, settings: Settings | None = None) -> Tensor:
        weight = (getattr(batch, "weight", None) or 1.0) if settings is None else settings.weight
        return weight * (self.inner(batch.x) - batch.y).square().mean()


def marked(x: Tensor, y: Tensor, step: int) -> Batch:
    """With something that no field is for."""
    batch = Batch(x, y)
    vars(batch)["weight"] = step + 0.5
    return batch


MADE: dict[str, Callable[[Tensor, Tensor, int], tuple[Any, ...]]] = {
    "plain": lambda x, y, step: (Batch(x, y),),
    "frozen": lambda x, y, step: (Frozen(x, y, step + 0.5),),
    "settings": lambda x, y, step: (Batch(x, y), Settings(step + 0.5)),
    "made once": lambda x, y, step: (Scaled(x, y, step == 1),),
    "slots": lambda x, y, step: (Slots(x=x, y=y, weight=None if step else 3.0),),
    "marked": lambda x, y, step: (marked(x, y, step),),
}


@pytest.mark.parametrize("kind", MADE)
def test_batches_and_settings_may_be_dataclasses(one: DeviceMesh, kind: str) -> None:
    plain = Net()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(3):
        given = MADE[kind](torch.randn(6, 8), torch.randn(6, 4), step)
        near(parallel(*given), plain(*given), 1e-6, f"step {step}")


@dataclass
class Doubled:
    loss: Tensor

    def __post_init__(self) -> None:
        self.loss = 2 * self.loss


class Writes(Net):
    """Forward changes what it is called with, in one of some ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, batch: Any) -> Any:
        match self.how:
            case "field":
                batch.x = 2 * batch.x
            case "entry":
                batch["x"] = 2 * batch["x"]
                return self.inner(batch["x"]).sum()
            case "list":
                batch["seen"].append(batch["x"])
                return self.inner(batch["x"]).sum()
            case "returned":
                batch["x"], batch["loss"] = 2 * batch["x"], self.inner(batch["x"]).sum()
                return batch
            case "taken":
                return self.inner(batch.pop("x")).sum()
            case _:
                return Doubled(super().forward(batch))
        return super().forward(batch)


@pytest.mark.parametrize(
    ("how", "where"),
    [("field", r"\['batch'\].x"), ("entry", r"\['batch'\]\['x'\]"), ("list", r"\['batch'\]\['seen'\]\[0\]")],
)
def test_what_forward_writes_to_the_callers_containers_is_refused(one: DeviceMesh, how: str, where: str) -> None:
    batch = Batch(torch.randn(6, 8), torch.randn(6, 4)) if how == "field" else {"x": torch.randn(6, 8), "seen": []}
    with pytest.raises(
        TraceError, match=f"forward writes to its argument {where}, and the caller's would stay as it is"
    ):
        autopar.compile(Writes(how), one)(batch)


def test_what_forward_returns_or_takes_out_is_not(one: DeviceMesh) -> None:
    for how in ("returned", "taken", "made"):
        plain = Writes(how)
        parallel = autopar.compile(copy.deepcopy(plain), one)
        for _ in range(2):
            x, y = torch.randn(6, 8), torch.randn(6, 4)
            ours, wanted = (one(Batch(x, y) if how == "made" else {"x": x}) for one in (parallel, plain))
            if how == "returned":
                near(ours["x"], wanted["x"], 1e-6, how)
            pick = {"returned": lambda out: out["loss"], "made": lambda out: out.loss}.get(how, lambda out: out)
            near(pick(ours), pick(wanted), 1e-6, how)


class Tokens(UserDict[str, Tensor]):
    """As a tokenizer gives them (transformers' `BatchEncoding`)."""

    def __init__(self, data: dict[str, Tensor], source: str | None = None) -> None:
        super().__init__(data)
        self.source = source

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, batch: Tokens) -> Tensor:
        assert batch.source == "here"
        return nn.functional.mse_loss(self.inner(batch["x"]), batch.y) * len(batch)


@pytest.mark.parametrize("inputs", ["global", "local"])
def test_dicts_of_tokenizers(one: DeviceMesh, inputs: str) -> None:
    plain = Reads()
    parallel = autopar.compile(copy.deepcopy(plain), one, inputs=inputs)
    for _ in range(2):
        batch = Tokens({"x": torch.randn(6, 8), "y": torch.randn(6, 4)}, "here")
        near(parallel(batch), plain(batch), 1e-6, "loss")
    assert len(parallel._autopar.prepared()) == 1


class Strange:
    def __init__(self) -> None:
        self.x, self.y = torch.randn(6, 8), torch.randn(6, 4)


def test_tensors_that_nobody_sees_are_named(one: DeviceMesh) -> None:
    with pytest.raises(autopar.PlanMismatch, match=r"a class of its own \(Strange\), whose tensors are not"):
        autopar.compile(Reads(), one, inputs="local")(Strange())
