"""What scripts change between calls in objects of torch's and Python's own classes, in base classes, and by
`type(model)`.
"""

from __future__ import annotations

import configparser
import logging
import multiprocessing
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

import autopar


class Data(Dataset[int]):
    noise = 1.0

    def __len__(self) -> int:
        return 3


OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
SCHEDULER = ExponentialLR(OPTIMIZER, 0.5)
PLATEAU = ReduceLROnPlateau(OPTIMIZER, patience=100)
LOADER = DataLoader(Data())
PRIOR = torch.distributions.Normal(0.0, 1.0)
CONFIG = configparser.ConfigParser()
CONFIG.read_string("[loss]\nweight = 1")
EVENT = multiprocessing.Event()


class Above(nn.Module):
    factor = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


class Model(Above):
    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.inner = does, nn.Linear(4, 4)
        self.optimizer, self.event = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0), multiprocessing.Event()

    def scaled(self, x: Tensor) -> Tensor:
        return super().scaled(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.inner(x)).square().mean()


def _worse() -> None:
    PLATEAU.step(1.0)
    PLATEAU.step(2.0)


def _stepped() -> None:
    OPTIMIZER.step()
    SCHEDULER.step()


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, pytest.MonkeyPatch], Any]]] = {
    "a learning rate": (lambda m, x: x * OPTIMIZER.param_groups[0]["lr"], lambda m, p: _stepped()),
    "the last one of a schedule": (lambda m, x: x * SCHEDULER.get_last_lr()[0], lambda m, p: _stepped()),
    "bad epochs": (lambda m, x: x * (1 + PLATEAU.num_bad_epochs), lambda m, p: _worse()),
    "of an optimizer that the model holds": (
        lambda m, x: x * m.optimizer.param_groups[0]["lr"], lambda m, p: m.optimizer.param_groups[0].update(lr=0.1),
    ),
    "a loader's data": (
        lambda m, x: x * LOADER.dataset.noise, lambda m, p: p.setattr(LOADER.dataset, "noise", 3.0, raising=False)
    ),
    "a prior": (lambda m, x: x + PRIOR.loc, lambda m, p: p.setattr(PRIOR, "loc", torch.tensor(3.0))),
    "a configuration file": (
        lambda m, x: x * CONFIG.getfloat("loss", "weight"), lambda m, p: CONFIG.set("loss", "weight", "3")
    ),
    "an event": (lambda m, x: x * 3 if EVENT.is_set() else x, lambda m, p: EVENT.set()),
    "an event that the model holds": (lambda m, x: x * 3 if m.event.is_set() else x, lambda m, p: m.event.set()),
    "a method of a base class": (
        lambda m, x: m.scaled(x), lambda m, p: p.setattr(Above, "scaled", lambda self, x: x * 3)
    ),
    "a number by the class": (lambda m, x: m.scaled(x), lambda m, p: p.setattr(type(m), "factor", 3.0, raising=False)),
    "a method by the class": (
        lambda m, x: m.scaled(x), lambda m, p: p.setattr(m.__class__, "scaled", lambda self, x: x * 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_script_changes_there_is_seen(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    does, change = CASES[name]
    plain, x = Model(does), torch.randn(2, 4)
    parallel = autopar.compile(plain, one)
    was = parallel(x)
    torch.testing.assert_close(was, plain(x))
    parallel(x)
    assert len(parallel._autopar.prepared()) == 1
    change(parallel, monkeypatch)
    if "the model holds" in name:
        change(plain, monkeypatch)
    torch.testing.assert_close(parallel(x), plain(x))
    assert not torch.equal(parallel(x), was)
    assert len(parallel._autopar.prepared()) == 2


def test_what_is_set_of_the_class_is_set_of_the_users(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Model):
        pass

    parallel = autopar.compile(Own(lambda m, x: x), one)
    type(parallel).more = 3
    assert Own.more == parallel.more == 3  # pyright: ignore
    del type(parallel).more
    assert not hasattr(parallel, "more")


class Entries(dict[str, Any]):
    """Whose entries are its attributes, as in many a repository."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


TABLE = {"optimizer": OPTIMIZER, "others": [PRIOR]}
ORDERED = OrderedDict(first=1.0, second=2.0)


def test_entries_that_are_attributes_are_copied(one: DeviceMesh) -> None:
    plain = Model(lambda m, x: x * m.config.width * m.config["depth"])
    plain.config = Entries(width=2.0, depth=3.0)
    parallel, x = autopar.compile(plain, one), torch.randn(2, 4)
    torch.testing.assert_close(parallel(x), plain(x))
    parallel.config.width = plain.config.width = 5.0
    torch.testing.assert_close(parallel(x), plain(x))


HELD: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any]]] = {
    "a table": (
        lambda m, x: x * TABLE["optimizer"].param_groups[0]["lr"],
        lambda: OPTIMIZER.param_groups[0].update(lr=OPTIMIZER.param_groups[0]["lr"] / 2),
    ),
    "a list in a table": (lambda m, x: x + TABLE["others"][0].scale, lambda: setattr(PRIOR, "scale", PRIOR.scale + 2)),
    "an order": (lambda m, x: x * next(iter(ORDERED.values())), lambda: ORDERED.move_to_end("first")),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_it_is_seen_in_tables_and_lists(one: DeviceMesh, name: str) -> None:
    does, change = HELD[name]
    plain, x = Model(does), torch.randn(2, 4)
    parallel = autopar.compile(plain, one)
    was = parallel(x)
    torch.testing.assert_close(was, plain(x))
    change()
    torch.testing.assert_close(parallel(x), plain(x))
    assert not torch.equal(parallel(x), was)


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_what_forward_logs_and_times_is_none_of_it(one: DeviceMesh) -> None:
    logger, handler, timer = logging.getLogger("of_a_forward"), Records(), threading.Barrier(1)
    logger.addHandler(handler)

    def logs(m: Any, x: Tensor) -> Tensor:
        logger.warning("it has %s records", getattr(m, "records", "no"))
        timer.wait()
        return x

    plain, x = Model(logs), torch.randn(2, 4)
    parallel = autopar.compile(plain, one)
    for _ in range(2):
        torch.testing.assert_close(parallel(x), plain(x))
    assert len(parallel._autopar.prepared()) == 1 and handler.records
    logger.removeHandler(handler)
