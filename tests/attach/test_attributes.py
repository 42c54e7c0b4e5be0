"""What forward leaves on its modules: forgotten where every call makes it alike, refused where calls build on it."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import TraceError
from tests.processes.compare import LOSS, both_backward, near, same_gradients


class Leaves(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = nn.Linear(6, 6), what
        self.mask: Tensor | None = None
        self.state, self.calls, self.longest, self.seen = torch.ones(6), 0, 0, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.inner(x))
        match self.what:
            case "a mask of the length":
                if self.mask is None or self.mask.shape[0] != len(x):
                    self.mask = torch.log(torch.tril(torch.ones(len(x), len(x))))
                made = torch.softmax(made @ made.T + self.mask, -1) @ made
            case "the longest length":
                self.longest = max(self.longest, len(x))
                made = made * self.longest
            case "the last state":
                made = made + self.state
                self.state = made.detach().mean(0)
            case "a first batch":
                self.mask = x if self.mask is None else self.mask
                made = made * self.mask
            case "a decay":
                self.state = self.state * 0.9
                made = made * self.state
            case "a counter":
                self.calls += 1
                made = made / self.calls
            case "a counter of tensors":
                self.mask = torch.ones(()) if self.mask is None else self.mask + 1
                made = made / self.mask
            case "what it saw":
                self.seen.append(made.detach())
            case "a list that grows":
                self.seen = [*self.seen, made.detach().mean(0)]
                made = made * self.seen[0]
            case "grids":
                if not self.seen or len(self.seen[0]) != len(x):
                    self.seen = [torch.linspace(start, 1, len(x)) for start in (0.2, 0.5)]
                made = made * self.seen[0][:, None] + self.seen[1][:, None]
            case "noise":
                self.mask = torch.randn(6)
                made = made * self.mask
        return made.square().sum()


CARRIED = ["a counter", "the last state", "a decay", "a counter of tensors", "a list that grows"]


@pytest.mark.parametrize("what", ["a mask of the length", "the longest length", "a first batch", "grids", *CARRIED])
def test_what_a_call_makes_and_later_ones_find_is_kept(one: DeviceMesh, what: str) -> None:
    plain = Leaves(what)
    parallel = autopar.compile(plain, one)
    for _ in range(3):
        both_backward(plain, parallel, torch.randn(4, 6))
    same_gradients(plain, parallel)


def test_a_list_that_forward_fills_has_what_each_call_made(one: DeviceMesh) -> None:
    plain = Leaves("what it saw")
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(3):
        x = torch.randn(4, 6)
        plain(x), parallel(x)
    assert len(parallel.seen) == len(plain.seen) == 3
    for ours, theirs in zip(parallel.seen, plain.seen, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_forward_draws_and_keeps_is_there_after_every_call(one: DeviceMesh) -> None:
    parallel, kept = autopar.compile(Leaves("noise"), one), list[Tensor]()
    for _ in range(2):
        parallel(torch.randn(4, 6))
        kept.append(parallel.mask)
    assert kept[0].shape == (6,) and not kept[0].equal(kept[1])


class Shows(nn.Module):
    """Keeps what its layers made for whoever looks at it, in a new list at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.made = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.made.append(x)
        self.told = {"layers": len(self.made), "means": (x.mean().detach(), [x.mean(0), None])}
        return x.square().mean()


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_lists_of_tensors_that_forward_keeps_are_there_after_every_call(
    one: DeviceMesh, micro_batches: int | None
) -> None:
    plain = Shows().double()
    parallel = autopar.compile(plain, one, micro_batches=micro_batches)
    for rows in (4, 4, 8):
        x = torch.randn(rows, 6, dtype=torch.float64)
        for model in (plain, parallel):
            model.zero_grad()
            loss = model(x)
            (loss if micro_batches else loss + model.made[1].square().sum()).backward()
        assert type(parallel.made) is list and type(parallel.told["means"]) is tuple
        assert len(parallel.made) == 3 and parallel.told["layers"] == 3 and parallel.told["means"][1][1] is None
        pairs = zip(parallel.made, plain.made, strict=True)
        for ours, theirs in (*pairs, (parallel.told["means"][1][0], plain.told["means"][1][0])):
            near(ours, theirs, 1e-12, "what is kept")
        near(parallel.told["means"][0], plain.told["means"][0], 1e-12, "a number that is kept")
        same_gradients(plain, parallel)


class Named(nn.Linear):
    """A layer whose subclasses are kept under a name that they must give."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, name: str) -> None:
        Named.known[name] = cls

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def test_classes_that_ask_their_subclasses_for_a_name_are_left_alone(one: DeviceMesh) -> None:
    x = torch.randn(4, 6)
    for plain in (Named(6, 6), nn.Sequential(nn.Linear(6, 6), Named(6, 6))):
        parallel = autopar.compile(plain, one)
        assert isinstance(parallel, type(plain)) and Named.known == {}
        near(parallel(x), plain(x), LOSS, "output")
        plain(x).sum().backward(), parallel(x).sum().backward()
        same_gradients(plain, parallel)


class Refused(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = nn.Linear(6, 1), what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "freezes":
            self.inner.weight.requires_grad = False
        elif self.what == "freezes a part":
            self.inner.requires_grad_(False)
        made = self.inner(x)
        if self.what == "scales a gradient":
            made.register_hook(lambda gradient: 0.1 * gradient)
        return made.square().sum()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("freezes", "sets requires_grad of a parameter at .*test_attributes"),
        ("freezes a part", "sets requires_grad of a parameter at .*test_attributes"),
        ("scales a gradient", "registers a hook on a tensor at .*test_attributes"),
    ],
)
def test_what_forward_does_to_gradients_by_the_way_is_refused(one: DeviceMesh, what: str, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        autopar.compile(Refused(what), one)(torch.randn(3, 6))


@dataclass
class Parts:
    loss: Tensor
    rest: dict[str, Tensor]


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Parts:
        x = x.clone().requires_grad_()
        made = checkpoint(lambda value: torch.tanh(self.first(value)), x, use_reentrant=True)
        return Parts(self.second(made).square().mean(), {"made": made})


def test_dataclasses_come_back_and_checkpoints_of_either_kind_are_traced(one: DeviceMesh) -> None:
    plain, x = Answers(), torch.randn(3, 6)
    parallel = autopar.compile(plain, one)
    wanted, ours = plain(x), parallel(x)
    assert isinstance(ours, Parts)
    near(ours.rest["made"], wanted.rest["made"], LOSS, "an output")
    near(ours.loss, wanted.loss, LOSS, "loss")
    wanted.loss.backward(), ours.loss.backward()
    same_gradients(plain, parallel)


class Irreducible(tuple[int, int]):
    """As e3nn's pairs of a dimension and a parity."""

    def __len__(self) -> int:
        raise NotImplementedError


class Labelled(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.inner, self.held = nn.Linear(6, 6), held

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


@pytest.mark.parametrize("within", [lambda one: one, lambda one: [one], lambda one: {"a": (one, one)}])
def test_containers_that_tell_no_length_may_be_attributes(within, one: DeviceMesh) -> None:
    plain, x = Labelled(within(Irreducible((1, 2)))), torch.randn(3, 6)
    parallel = autopar.compile(plain, one)
    for _ in range(2):
        near(parallel(x), plain(x), LOSS, "loss")
    parallel.held = within(Irreducible((1, 3)))
    near(parallel(x), plain(x), LOSS, "loss with another attribute, which forward does not read")
