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
from transformers.modeling_outputs import CausalLMOutput

import autopar
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


class Makes(Net):
    """Gives one that its constructor would change once more."""

    def forward(self, batch: Any, settings: Settings | None = None) -> Any:
        return Doubled(super().forward(batch, settings))


def test_what_forward_returns_is_as_it_made_it(one: DeviceMesh) -> None:
    plain = Makes()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(2):
        batch = Batch(torch.randn(6, 8), torch.randn(6, 4))
        near(parallel(batch).loss, plain(batch).loss, 1e-6, "loss")


SCALES = {"scale": 1.0}


class Scales(Batch):
    """What its class says, and what its methods read, counts as what the model's own code reads."""

    times = 1.0

    def scaled(self) -> Tensor:
        return self.x * SCALES["scale"]


class OfMethods(Net):
    def forward(self, batch: Any, settings: Settings | None = None) -> Tensor:
        return (self.inner(batch.scaled()) - batch.y).square().mean() * batch.times


def test_what_classes_of_batches_say_and_their_methods_read_is_seen(
    one: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = OfMethods()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for times, scale in ((1.0, 1.0), (0.5, 1.0), (0.5, 3.0)):
        monkeypatch.setattr(Scales, "times", times)
        monkeypatch.setitem(SCALES, "scale", scale)
        batch = Scales(torch.randn(6, 8), torch.randn(6, 4))
        near(parallel(batch), plain(batch), 1e-6, f"{times} {scale}")


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
        self.x, self.y, self.of = torch.randn(6, 8), torch.randn(6, 4), object()


def test_tensors_that_nobody_sees_are_named(one: DeviceMesh) -> None:
    with pytest.raises(autopar.PlanMismatch, match=r"a class of its own \(Strange\), whose tensors are not"):
        autopar.compile(Reads(), one, inputs="local")(Strange())


class Written(nn.Module):
    """Sets the loss behind what its dataclass has behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, given: CausalLMOutput, x: Tensor) -> tuple[CausalLMOutput, CausalLMOutput]:
        given.logits = self.inner(given.logits) + given.hidden_states
        given["loss"] = given.logits.square().mean()
        made = CausalLMOutput(logits=self.inner(x))
        made.loss = made.logits.square().mean() + given.loss
        return given, made


def test_outputs_of_transformers_have_their_entries_in_the_order_in_which_they_were_set(one: DeviceMesh) -> None:
    plain = Written()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(2):
        found: list[Any] = []
        for model in (parallel, plain):
            torch.manual_seed(0)
            given = CausalLMOutput(logits=torch.randn(3, 8))
            given["hidden_states"], given["loss"] = torch.randn(3, 4), torch.randn(5)
            found.append(model(given, torch.randn(2, 8)))
            assert found[-1][0] is given
        for ours, wanted in zip(*found, strict=True):
            assert [*ours] == [*wanted] and ours[0].shape == wanted[0].shape
            for name in wanted:
                near(ours[name], wanted[name], 1e-6, name)
                near(getattr(ours, name), wanted[name], 1e-6, name)


class Beside(nn.Module):
    """Has attributes that are not its entries: none, one that was entered without, and a name that is no field's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, given: CausalLMOutput) -> CausalLMOutput:
        made = CausalLMOutput(logits=self.inner(given["logits"]), attentions=(given["more"],))
        if given.hidden_states is not None:
            made["loss"] = self.inner(given.hidden_states).square().mean()
        made.logits = None
        del made.attentions
        made["more"] = 3 * given.more
        return made


def test_outputs_of_transformers_have_attributes_beside_their_entries(one: DeviceMesh) -> None:
    plain = Beside()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(4):
        found: list[Any] = []
        for model in (parallel, plain):
            torch.manual_seed(step)
            given = CausalLMOutput(logits=torch.randn(3, 8))
            given["more"] = torch.randn(2)
            if step % 2:  # as attribute alone, and the same tensor as an entry is
                vars(given)["hidden_states"] = given.logits if step == 1 else torch.randn(5, 8)
            found.append(model(given))
        ours, wanted = found
        assert [*ours] == [*wanted] and vars(ours).keys() == vars(wanted).keys()
        assert ours.logits is None and ours.attentions is None and ours.more is ours["more"]
        assert ("loss" in ours) == bool(step % 2)
        for name in wanted.keys() - {"attentions"}:
            near(ours[name], wanted[name], 1e-6, name)
