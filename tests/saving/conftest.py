"""A process group of one: what `autopar.init_mesh` makes where no launcher is."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A CPU mesh of one rank; its process group ends with the test."""
    import torch.distributed as dist

    import autopar

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield autopar.init_mesh("cpu", data=1)
    dist.destroy_process_group()
