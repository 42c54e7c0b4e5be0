"""What forward keeps in lists, dicts and attributes from call to call, in the ways in which models are written."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar._compat import pytree
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients


class Kept(nn.Module):
    """`begin` makes what is kept, `step` computes with it and changes it."""

    def __init__(self, begin: Callable[[Any], None], step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.step = step
        begin(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, self.inner(x))


def nested(model: Any, h: Tensor) -> Tensor:
    inner = model.kept["a"]
    made = (h * inner["t"]).square().mean() * (1 + inner["n"][0])
    inner["n"][0] += 1
    inner["t"] = h.detach().mean(0)
    return made


def in_tuples(model: Any, h: Tensor) -> Tensor:
    counts, states = model.kept
    counts[0] += 1
    states[0] = h.detach().mean(0)
    return (h * states[0] * counts[0]).square().mean()


def rebound(model: Any, h: Tensor) -> Tensor:
    model.kept.append(h.detach().mean(0))
    model.kept = model.kept[-2:]
    return (h + sum(model.kept)).square().mean()


def filtered(model: Any, h: Tensor) -> Tensor:
    model.kept["h"] = h.detach()
    model.kept["gone"] = 1
    model.kept = {key: value for key, value in model.kept.items() if key != "gone"}
    return (h * (1 + len(model.kept))).square().mean()


def detached_at_the_end(model: Any, h: Tensor) -> Tensor:
    for place in range(2):
        model.kept[place] = h + (0 if model.kept[place] is None else model.kept[place])
    made = sum(one.square().mean() for one in model.kept)
    model.kept = [one.detach() for one in model.kept]
    return made


def detached_at_the_start(model: Any, h: Tensor) -> Tensor:
    made = h if model.kept is None else h + model.kept.detach()
    model.kept = made.tanh()
    return made.square().mean()


def in_a_table_by_count(model: Any, h: Tensor) -> Tensor:
    model.count = (model.count + 1) % 2
    model.kept = {**model.kept, model.count: h.detach().mean(0)}
    return (h * model.kept[model.count]).square().mean()


def reordered(model: Any, h: Tensor) -> Tensor:
    model.kept.move_to_end(next(iter(model.kept)))
    model.kept["a"] = h.detach().mean(0) + 0.5 * model.kept["a"]
    return (h * model.kept["a"] + model.kept["b"] * model.kept["c"]).square().mean()


WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "dicts in dicts": (lambda: {"a": {"n": [0], "t": torch.ones(8) / 3}}, nested),
    "lists in tuples": (lambda: ([0], [torch.ones(8)]), in_tuples),
    "written to, then set": (list, rebound),
    "written to, then made anew": (dict, filtered),
    "detached at the end": (lambda: [None, None], detached_at_the_end),
    "detached at the start": (lambda: None, detached_at_the_start),
    "in another order": (lambda: OrderedDict(a=torch.ones(8), b=0.5, c=2), reordered),
    "by a count": (lambda: {0: torch.ones(8), 1: torch.ones(8) / 2}, in_a_table_by_count),
}


def same_kept(ours: Any, theirs: Any, told: str) -> None:
    (made, spec), (wanted, as_wanted) = pytree.tree_flatten(ours), pytree.tree_flatten(theirs)
    assert spec == as_wanted, told
    assert not isinstance(theirs, dict) or [*ours] == [*theirs], told
    for one, other in zip(made, wanted, strict=True):
        assert type(one) is type(other), told
        if isinstance(other, Tensor):
            near(one, other, 1e-5, told)
            assert one.requires_grad == other.requires_grad, told
        else:
            assert one == other, told


@pytest.mark.parametrize("way", WAYS)
def test_it_is_as_in_the_plain_model(one: DeviceMesh, way: str) -> None:
    make, step = WAYS[way]

    def begin(model: Any) -> None:
        model.kept, model.count = make(), 0

    plain = Kept(begin, step)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    before = parallel.kept
    for number in range(5):
        x, losses = torch.randn(4, 8), list[Tensor]()
        for model in (plain, parallel):
            model.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
        near(losses[1], losses[0], 1e-5, f"step {number}")
        same_gradients(plain, parallel)
        same_kept(parallel.kept, plain.kept, f"step {number}")
    if way == "dicts in dicts":
        assert parallel.kept is before and parallel.kept["a"] is before["a"]


def test_a_property_may_hold_a_count(one: DeviceMesh) -> None:
    class Held(Kept):
        @property
        def count(self) -> int:
            return self._count

        @count.setter
        def count(self, value: int) -> None:
            self.__dict__["_count"] = value

    def begin(model: Any) -> None:
        model.count = 0

    def step(model: Any, h: Tensor) -> Tensor:
        model.count += 1
        return h.square().mean() * model.count

    plain = Held(begin, step)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for number in range(3):
        x = torch.randn(4, 8)
        near(parallel(x), plain(x), 1e-5, f"step {number}")
        assert parallel.count == plain.count == number + 1
        assert "count" not in vars(parallel)


def test_two_attributes_may_be_one_list(one: DeviceMesh) -> None:
    """That forward makes, or one may have the other in it."""

    def step(model: Any, h: Tensor) -> Tensor:
        model.kept = model.also = [h.detach().mean(0), 1]
        return h.square().mean()

    parallel = autopar.compile(Kept(lambda model: None, step), one)
    for _ in range(2):
        parallel(torch.randn(4, 8))
        assert parallel.kept is parallel.also

    def begin(model: Any) -> None:
        model.kept = [0]
        model.also = [model.kept]

    def writes(model: Any, h: Tensor) -> Tensor:
        model.also[0][0] += 1
        return h.square().mean() * model.kept[0]

    counting = autopar.compile(Kept(begin, writes), one)
    for call in range(1, 4):
        counting(torch.randn(4, 8))
        assert counting.kept == [call]
        assert counting.also[0] is counting.kept


def test_a_buffer_that_hands_on_a_gradient_is_refused(one: DeviceMesh) -> None:
    """A program would drop it, in parts and in the whole model; where nothing is made of it, there is none to drop."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.rand(8))

        def forward(self, h: Tensor) -> Tensor:
            self.state = 0.9 * self.state + h.mean(0)
            return h - h.mean(0) if self.what == "a mean" else self.state

        what = "a state"

    for what in ("a state", "a mean"):

        def begin(model: Any, what: str = what) -> None:
            model.part = Holds()
            model.part.what = what

        plain = Kept(begin, lambda model, h: model.part(h).square().mean())
        parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.randn(4, 8)
        if what == "a state":
            with pytest.raises(TraceError, match=r"the buffer part\.state to a tensor with a gradient that goes on"):
                parallel(x)
            continue
        near(parallel(x), plain(x), 1e-5, "loss")
        near(parallel.part.state, plain.part.state, 1e-5, "the buffer")
