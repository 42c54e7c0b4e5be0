"""What every test gets: the same seeds and one thread. What some ask for: a mesh of many ranks in one process.

torch is not imported here: tests of solver/, cost_models/ and the plain values of autopar/ run without it.
"""

import gc
import os
import random
import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Read by torch when it is imported, and inherited by the child processes of a test.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# What somebody has measured on this machine changes no test.
os.environ["AUTOPAR_PROFILES"] = "no profiles in tests"

import numpy as np
import pytest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


THINNED: dict[str, dict[str, int]] = tomllib.loads(Path(__file__).with_name("thinned.toml").read_text(encoding="utf-8"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="of the slow tests only the K-th of N parts, K from 0")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen = Counter[tuple[str, str]]()
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        name = item.name.partition("[")[0]
        every = THINNED.get(file, {}).get(name)
        if every is not None and (every == 0 or seen[file, name] % every):
            item.add_marker(pytest.mark.slow)
        seen[file, name] += 1
    if (part := config.getoption("--part")) is not None:
        chosen, count = map(int, part.split("/"))
        runs = {one: is_in_part(one.nodeid, chosen, count) or not one.get_closest_marker("slow") for one in items}
        config.hook.pytest_deselected(items=[one for one in items if not runs[one]])
        items[:] = [one for one in items if runs[one]]


def pytest_collection_finish() -> None:
    """What was collected stays: Python need not look through it again and again for circles."""
    gc.collect()
    gc.freeze()


def is_in_part(name: str, part: int, count: int) -> bool:
    """Which part a slow test is in hangs on its name alone."""
    if not 0 <= part < count:
        raise pytest.UsageError(f"--part {part}/{count}: of {count} parts the first is 0, the last {count - 1}")
    return zlib.crc32(name.encode()) % count == part


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., "DeviceMesh"]]:
    """`fake_mesh(data=2, tensor=4)` is a CPU `DeviceMesh` of 8 ranks in this process, seen from rank 0.

    Shapes come out right and values do not, as nothing is sent. For values, enter `autopar._compat.LocalTensorMode(8)`
    on top of it. A second call replaces the first mesh; the process group ends with the test.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autopar._compat import FakeStore

    def make(**sizes: int) -> "DeviceMesh":
        close()
        ranks = int(np.prod(list(sizes.values())))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def close() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    yield make
    close()
