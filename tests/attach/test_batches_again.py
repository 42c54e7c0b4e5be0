"""Batches that are given again, with what an earlier call has put there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.attach.test_written_containers import Net, alike, given, new_entries, table
from tests.processes.compare import same_gradients


@pytest.mark.parametrize("inputs", ["global", "local"])
def test_a_batch_may_be_given_again_and_again(one: DeviceMesh, inputs: Any) -> None:
    """As loops over batches in memory do. What an earlier call has put there requires grad, and is not read; neither is
    what the script keeps there.
    """
    plain = Net(new_entries).double()
    parallel = autopar.compile(copy.deepcopy(plain), one, inputs=inputs)
    batches = [table(*given(3), 3) for _ in range(2)]
    for _ in range(3):
        for model, batch in zip((plain, parallel), batches, strict=True):
            model.zero_grad()
            batch["loss"] = model(batch) / 2
            batch["loss"].backward()
        alike(batches[1], batches[0])
        same_gradients(plain, parallel)


def goes_on(model: Net, batch: Any) -> Any:
    h = model.hidden(batch["x"])
    batch["h"] = h = h + batch["h"] if "h" in batch else h
    return model.last(h).square().mean()


def goes_on_detached(model: Net, batch: Any) -> Any:
    h = model.hidden(batch["x"])
    batch["h"] = h = h + batch["h"].detach() if "h" in batch else h
    return model.last(h).square().mean()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    ("form", "options", "backward"),
    [
        (goes_on, {}, {"create_graph": True}),
        (goes_on, {}, {"retain_graph": True}),
        (goes_on_detached, {"inputs": "local"}, {}),
    ],
)
def test_gradients_go_back_where_an_entry_of_the_last_call_is_read(
    one: DeviceMesh, form: Callable[..., Any], options: dict[str, Any], backward: dict[str, bool]
) -> None:
    plain = Net(form).double()
    parallel = autopar.compile(copy.deepcopy(plain), one, **options)
    batches = [{"x": given(3)[0]} for _ in range(2)]
    for _ in range(3):
        for model, batch in zip((plain, parallel), batches, strict=True):
            model.zero_grad()
            model(batch).backward(**backward)
        same_gradients(plain, parallel)


def test_batches_are_freed(one: DeviceMesh) -> None:
    parallel, seen = autopar.compile(Net(new_entries).double(), one), list[weakref.ref[Tensor]]()
    for number in range(3):
        batch = table(*given(number), number)
        parallel(batch).backward()
        seen.append(weakref.ref(batch["x"]))
        del batch
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3
