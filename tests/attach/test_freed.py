"""Who drops a parallel module frees it at once, as a plain one: what it holds of a device waits for no collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autopar
from autopar.optim import Streamed
from tests.processes.models import batch, net
from tests.support.machines import FAST


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _trained(overlap: bool | None, **how: Any) -> list[weakref.ref[Any]]:
    """Of a module that has trained for two steps, and of its parameters."""
    mesh = autopar.init_mesh("cpu")
    parallel = autopar.compile(net(), mesh, hardware=FAST, **how)
    optimizer: Any = torch.optim.AdamW(parallel.parameters(), 1e-3)
    if overlap is not None:
        optimizer = Streamed(optimizer, parallel, overlap=overlap)
    for _ in range(2):
        parallel(**batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    return [weakref.ref(one) for one in (parallel, *parallel.parameters())]


@pytest.mark.parametrize(
    "how", [{}, {"example_kwargs": batch()}, {"pin": {"second.*": "offload-parameters"}}], ids=" ".join
)
@pytest.mark.parametrize("overlap", [None, False, True])
def test_a_module_that_is_dropped_is_gone(overlap: bool | None, how: dict[str, Any]) -> None:
    assert [one for one in _trained(overlap, **how) if one() is not None] == []
