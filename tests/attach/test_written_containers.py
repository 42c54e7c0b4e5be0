"""Containers among the arguments that forward writes to: the caller has them as the plain model leaves them."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils.generic import ModelOutput

import autopar
from autopar import TraceError
from tests.processes.compare import near, same_gradients

ROWS, WIDTH = 8, 4


@dataclass
class Batch:
    x: Tensor
    h: Tensor | None = None
    seen: list[Any] | None = None


@dataclass
class Given(ModelOutput):
    x: Tensor | None = None
    h: Tensor | None = None


class Own(dict[str, Tensor]):
    __getattr__ = dict.__getitem__


class Boxed:
    """As DETR's NestedTensor is."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.more = x, {"n": 2}


class Pair(NamedTuple):
    loss: Tensor
    batch: Any


class Net(nn.Module):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last, self.form = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), form

    def forward(self, batch: Any, more: Any = None) -> Any:
        return self.form(self, batch) if more is None else self.form(self, batch, more)

    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x).relu()


def new_entries(model: Net, batch: Any) -> Any:
    batch["h"] = model.hidden(batch["x"])
    batch["logits"] = model.last(batch["h"])
    return batch["logits"].square().mean()


def returned(model: Net, batch: Any) -> Any:
    batch["h"] = model.hidden(batch["x"])
    batch["loss"] = model.last(batch["h"]).square().mean()
    return batch


def replaced(model: Net, batch: Any) -> Any:
    batch["x"] = batch["x"] * 2
    batch.update(n=batch["n"] + 1, name="done", shape=(2, 3))
    return model.last(model.hidden(batch["x"])).square().mean()


def taken_and_renamed(model: Net, batch: Any) -> Any:
    batch["input"] = batch.pop("x")
    del batch["y"]
    return model.last(model.hidden(batch["input"])).square().mean()


def by_default(model: Net, batch: Any) -> Any:
    mask = batch.setdefault("mask", torch.ones_like(batch["x"]))
    return model.last(model.hidden(batch["x"] * mask)).square().mean()


def one_in_another(model: Net, batch: Any) -> Any:
    batch["more"]["h"] = [model.hidden(batch["x"]), {"x": batch["x"], "y": batch["y"].float() * 2}]
    batch["again"] = batch["more"]
    return Pair(model.last(batch["more"]["h"][0]).square().mean(), batch)


def swapped(model: Net, batch: Any) -> Any:
    batch["x"], batch["y"] = batch["y"], batch["x"]
    return {"loss": model.last(model.hidden(batch["y"])).square().mean(), "batch": batch["more"]}


def emptied(model: Net, batch: Any) -> Any:
    x = batch["x"]
    batch.clear()
    batch["sum"] = x.sum()
    return [model.last(model.hidden(x)).square().mean(), batch]


def number_of_values(model: Net, batch: Any) -> Any:
    loss = model.last(model.hidden(batch["x"])).square().mean()
    batch["loss"], batch["at"] = loss.item(), batch["n"] * 2
    return loss


def appended(model: Net, batch: Any) -> Any:
    batch["list"].append(model.hidden(batch["x"]))
    batch["list"].insert(0, batch["x"])
    return model.last(batch["list"][-1]).square().mean()


def changed_in_place_too(model: Net, batch: Any) -> Any:
    batch["x"].mul_(2)
    batch["again"] = batch["x"]
    return model.last(model.hidden(batch["x"])).square().mean()


def fields_set(model: Net, batch: Any) -> Any:
    batch.h = model.hidden(batch.x)
    batch.seen = [batch.x, batch.h]
    batch.beside = batch.h.sum()
    return Pair(model.last(batch.h).square().mean(), batch)


def only_in_branch(model: Net, batch: Any) -> Any:
    h = model.hidden(batch["x"])
    if model.training:
        batch["h"] = h
    return model.last(h).square().mean()


def under_two_names(model: Net, batch: Any) -> Any:
    feats = {"h": model.hidden(batch["x"])}
    losses = {"loss": model.last(feats["h"]).square().mean(), "more": [feats]}
    batch["about"] = batch["x"].shape, [batch["x"].dtype]
    batch["feats"] = batch["alias"] = feats
    batch["more"]["losses"] = losses
    return losses


def table(x: Tensor, y: Tensor, number: int) -> Any:
    return {"x": x, "y": y, "n": number, "more": {}, "list": []}


FORMS: dict[Callable[..., Any], Callable[[Tensor, Tensor, int], Any]] = {
    new_entries: table,
    returned: table,
    replaced: table,
    taken_and_renamed: table,
    by_default: table,
    one_in_another: table,
    swapped: table,
    emptied: table,
    number_of_values: table,
    appended: table,
    changed_in_place_too: table,
    fields_set: lambda x, y, number: Batch(x),
    only_in_branch: table,
    under_two_names: table,
}
KINDS: dict[str, Callable[[Tensor], Any]] = {
    "UserDict": lambda x: UserDict(x=x),
    "OrderedDict": lambda x: OrderedDict(x=x),
    "defaultdict": lambda x: defaultdict(list, x=x),
    "of transformers": lambda x: Given(x=x),
    "of its own": lambda x: Own(x=x),
    "a deque": lambda x: deque([x], maxlen=2),
    "an object": Boxed,
}


def given(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, WIDTH, (ROWS,), generator=generator)


def alike(ours: Any, wanted: Any, what: str = "batch") -> None:
    """The same kinds of things, in the same order."""
    if isinstance(wanted, Tensor):
        near(ours, wanted, 1e-12, what, 1e-14)
        assert ours.requires_grad == wanted.requires_grad, what
        return
    assert type(ours) is type(wanted), what
    if isinstance(wanted, float):
        assert ours == pytest.approx(wanted, rel=1e-12), what
    elif isinstance(wanted, Mapping):
        assert [*ours] == [*wanted], what
        for key in wanted:
            alike(ours[key], wanted[key], f"{what}[{key!r}]")
    elif isinstance(wanted, (list, tuple, deque)):
        assert len(ours) == len(wanted), what
        for place, pair in enumerate(zip(ours, wanted, strict=True)):
            alike(*pair, f"{what}[{place}]")
    elif hasattr(wanted, "__dict__"):
        assert vars(ours).keys() == vars(wanted).keys(), what
        for name in vars(wanted):
            alike(getattr(ours, name), getattr(wanted, name), f"{what}.{name}")
    else:
        assert ours == wanted, what


def held(value: Any) -> list[Any]:
    """The containers in it, itself first, and their parts, each once."""
    parts = (
        [*value.values()] if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, deque)) else []
    )
    parts = [*vars(value).values()] if isinstance(value, (Batch, Boxed)) else parts
    return [value, *(one for part in parts for one in held(part))] if parts or isinstance(value, dict) else [value]


def same_ones(made: Any, batch: Any) -> list[list[int]]:
    """Which things are one."""
    known = [one for one in held(batch) if not isinstance(one, (int, float, str, Tensor, type(None)))]
    return [[place for place, other in enumerate(known) if other is one] for one in held(made)]


def loss_of(made: Any) -> Tensor:
    if isinstance(made, Mapping):
        return made["loss"]
    return made[0] if isinstance(made, (list, tuple)) else made


def train_alike(plain: nn.Module, parallel: Any, make: Callable[..., Any], number: int) -> None:
    found = list[tuple[Any, Any]]()
    for model in (plain, parallel):
        model.zero_grad()
        batch = make(*given(number), number)
        made = model(batch)
        loss_of(made).backward()
        found.append((made, batch))
    (wanted, theirs), (ours, mine) = found
    alike(mine, theirs)
    alike(ours, wanted, "outputs")
    assert same_ones(ours, mine) == same_ones(wanted, theirs)
    same_gradients(plain, parallel)


@pytest.mark.parametrize("options", [{}, pytest.param({"inputs": "local"}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_caller_has_what_forward_leaves(one: DeviceMesh, form: Callable[..., Any], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Net(form).double()
    parallel = autopar.compile(copy.deepcopy(plain), one, **options)
    for number in range(4):
        for model in (plain, parallel):
            model.train(number != 2)
        train_alike(plain, parallel, FORMS[form], number)


@pytest.mark.parametrize("kind", KINDS)
def test_containers_may_be_of_other_kinds(one: DeviceMesh, kind: str) -> None:
    plain = Net({"of transformers": filled, "a deque": remembered, "an object": boxed}.get(kind, new_entries)).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for number in range(2):
        train_alike(plain, parallel, lambda x, y, number: KINDS[kind](x), number)


def filled(model: Net, batch: Any) -> Any:
    batch.h = model.hidden(batch["x"])
    return model.last(batch["h"]).square().mean()


def remembered(model: Net, batch: Any) -> Any:
    batch.append(model.hidden(batch[0]))
    batch.append(batch[-1].detach() * 2)
    return model.last(sum(batch)).square().mean()


def boxed(model: Net, batch: Any) -> Any:
    batch.h = model.hidden(batch.x)
    batch.more["n"] += 1
    return Pair(model.last(batch.h).square().mean() * batch.more["n"], batch.more)


class Decoded(dict[str, Tensor]):
    def __getitem__(self, key: str) -> Tensor:
        return super().__getitem__(key) / 2


def test_dicts_that_give_other_than_they_hold_are_refused(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"an object of a class of its own \(.*Decoded\)"):
        autopar.compile(Net(new_entries).double(), one)(Decoded(x=given(0)[0]))


def test_what_is_put_there_has_gradients(one: DeviceMesh) -> None:
    plain = Net(new_entries).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for number in range(2):
        for model in (plain, parallel):
            model.zero_grad()
            batch = table(*given(number), 0)
            loss = model(batch)
            (loss + batch["logits"].sum() + batch["h"].square().sum()).backward()
        same_gradients(plain, parallel)


def test_in_micro_batches(one: DeviceMesh) -> None:
    for form in (new_entries, returned, appended):
        plain = Net(form).double()
        parallel = autopar.compile(copy.deepcopy(plain), one, micro_batches=2)
        for number in range(2):
            train_alike(plain, parallel, FORMS[form], number)


STORE: dict[str, Any] = {}


def to_the_store(model: Net, batch: Any) -> Any:
    STORE["h"] = model.hidden(batch["x"])
    return batch.get("h", STORE["h"]).sum()


def test_a_container_that_forward_sees_elsewhere_too_is_refused(one: DeviceMesh) -> None:
    def into_the_second(model: Net, batch: Any, more: Any) -> Any:
        more["h"] = model.hidden(batch["x"])
        return batch.get("h", more["h"]).square().sum()

    def into_its_own(model: Net, batch: Any) -> Any:
        batch["h"] = model.hidden(batch["x"])
        return model.seen.get("h", batch["h"]).square().sum()  # type: ignore[operator,union-attr]

    batch = table(*given(0), 0)
    with pytest.raises(TraceError, match=r"argument \['batch'\], which is \['more'\] in this call, too.*: pass a copy"):
        autopar.compile(Net(into_the_second).double(), one)(batch, batch)
    own = Net(into_its_own).double()
    own.seen = batch  # type: ignore[assignment]
    parallel = autopar.compile(own, one)
    with pytest.raises(TraceError, match=r"argument \['batch'\], which is .*seen in this call, too"):
        parallel(parallel.seen)
    STORE.update(batch)
    with pytest.raises(TraceError, match=r"argument \['batch'\], which is STORE in this call, too"):
        autopar.compile(Net(to_the_store).double(), one)(STORE)
    assert "h" not in batch


def test_what_no_program_gives_is_refused_and_the_batch_stays(one: DeviceMesh) -> None:
    def puts_a_module(model: Net, batch: Any) -> Any:
        batch["h"] = model.hidden(batch["x"])
        batch["by"] = model.last
        return batch["h"].sum()

    batch = table(*given(0), 0)
    with pytest.raises(TraceError, match=r"forward puts a Linear into its argument \['batch'\], at 'by', which"):
        autopar.compile(Net(puts_a_module).double(), one)(batch)
    assert [*batch] == ["x", "y", "n", "more", "list"]
