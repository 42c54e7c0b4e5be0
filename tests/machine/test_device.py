"""What a machine has, told by stand-ins for its driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.machine import device as here
from autopar.machine.device import hardware_or_here, has_expandable_segments, is_here, memory_bytes
from cost_models.hardware import Hardware

GIB = 2**30


class Driver:
    """GPUs of one name and size; `calls` are in the order in which they came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA H100 80GB HBM3", gib: float = 79.1) -> None:
        self.calls: list[object] = []
        self.count, self.current, self.is_initialized = 8, 0, False
        self.name, self.total = name, int(gib * GIB)
        for what, told in {
            "get_device_name": lambda: self.name,
            "current_device": lambda: self.current,
            "device_count": lambda: self.count,
            "is_initialized": lambda: self.is_initialized,
            "get_device_properties": lambda _: SimpleNamespace(total_memory=self.total),
            "init": lambda: self.calls.append("init"),
            "set_device": lambda device: self.calls.append(("set_device", device)),
            "mem_get_info": lambda: (60 * GIB, self.total),
            "memory_reserved": lambda: 5 * GIB,
            "memory_allocated": lambda: 3 * GIB,
        }.items():
            monkeypatch.setattr(torch.cuda, what, told)
        monkeypatch.setattr(dist, "is_initialized", lambda: bool(self.calls and self.calls[-1] == "group"))
        monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: self.calls.append("group"))
        monkeypatch.setattr(dist, "get_world_size", lambda: 1)
        monkeypatch.setattr(here, "init_device_mesh", lambda *_, **__: self.calls.append("mesh"))
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


# --- the device of a process -----------------------------------------------------------------------------------------


def test_a_process_takes_the_gpu_of_its_local_rank_before_anything_else(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    autopar.init_mesh("cuda")
    assert driver.calls == [("set_device", 3), "init", "group", "mesh"]


def test_a_gpu_that_was_chosen_stays_and_one_alone_is_the_one(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    autopar.init_mesh("cuda")  # one process, without a launcher
    assert driver.calls[0] == "init"  # a device mesh of torch's chooses by itself before
    monkeypatch.setenv("LOCAL_RANK", "3")
    driver.is_initialized, driver.current = True, 5
    autopar.init_mesh("cuda")
    driver.current, driver.count = 0, 1  # each process was shown a GPU of its own
    autopar.init_mesh("cuda")
    assert not [call for call in driver.calls if call[0] == "set_device"]  # type: ignore[index]
    driver.count = 8  # something went to GPU 0 because nobody had chosen
    autopar.init_mesh("cuda")
    assert ("set_device", 3) in driver.calls


def test_more_processes_than_gpus_are_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(ValueError, match=r"LOCAL_RANK is 8, but this machine shows 8 GPUs; .*--nproc-per-node 8"):
        autopar.init_mesh("cuda")
    assert not driver.calls


@pytest.mark.parametrize("launched", [True, False])
def test_where_no_gpu_is_seen_it_is_said(driver: Driver, monkeypatch: pytest.MonkeyPatch, launched: bool) -> None:
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "0")
    driver.count = 0
    with pytest.raises(ValueError, match=r'sees no GPU: .*; give init_mesh\("cpu", \.\.\.\), or look at the driver'):
        autopar.init_mesh("cuda")
    assert not driver.calls


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"devices": 0}, r"devices=0 are none; give as many as processes run, here devices=1"),
        ({"devices": -1}, r"devices=-1 are none"),
        ({"devices": 3}, r"devices=3 is asked for, but 1 process runs; start 3 processes \(torchrun .*\) or give 1"),
        ({"data": 0}, r"the mesh 0 has an axis of size 0; sizes are whole numbers from 1"),
        ({"data": -1, "tensor": -1}, r"the mesh -1x-1 has an axis of size -1"),
        ({"data": 4, "tensor": 2}, r"the mesh 4x2 has 8 ranks, but 1 process runs; start 8 processes"),
    ],
)
def test_a_number_that_does_not_fit_the_processes_is_refused(driver: Driver, asked: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        autopar.init_mesh("cpu", **asked)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["tpu", "cuda:1"])
def test_other_kinds_of_devices_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"got the device type '{kind}'; programs run on"):
        autopar.init_mesh(kind, data=1)


def test_a_cpu_mesh_asks_no_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    autopar.init_mesh("cpu")
    assert driver.calls == ["group", "mesh"]


# --- its profile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gib", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
        ("NVIDIA H200", 139.8, "h200-sxm"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16gb"),
        ("Quadro RTX 5000", 15.7, "rtx5000"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.7, "a100-40gb"),
    ],
)
def test_a_profile_is_found_by_its_pattern_and_the_memory(
    monkeypatch: pytest.MonkeyPatch, name: str, gib: float, profile: str
) -> None:
    Driver(monkeypatch, name, gib)
    assert hardware_or_here(None, "cuda").name == profile


def test_a_device_that_no_pattern_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, "NVIDIA B300", 270)
    with pytest.raises(ValueError, match="no hardware profile fits device 'NVIDIA B300'; pass hardware=, one of a100"):
        hardware_or_here(None, "cuda")


def test_ranks_of_a_node_are_those_that_the_launcher_has_started(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "16")
    found = hardware_or_here(None, "cuda")
    assert found.ranks_per_node == 4 and found.sources["ranks_per_node"] == "LOCAL_WORLD_SIZE of this process"
    assert is_here(found, "cuda") and is_here(Hardware.load("h100-sxm"), "cuda")
    monkeypatch.setenv("WORLD_SIZE", "4")  # all on one node, as they would be by the profile
    assert hardware_or_here(None, "cuda") == Hardware.load("h100-sxm")


# --- its memory ------------------------------------------------------------------------------------------------------


def test_what_is_free_is_what_the_driver_and_torch_have(driver: Driver) -> None:
    assert memory_bytes(None, Hardware.load("h100-sxm"), "cuda") == 62 * GIB


def test_more_than_the_device_has_is_refused_and_the_context_has_its_place(driver: Driver) -> None:
    h100 = Hardware.load("h100-sxm")
    with pytest.raises(
        ValueError, match=r"memory '79\.5GiB' is 79\.5 GiB, and a device of h100-sxm has 79\.1 GiB; give"
    ):
        memory_bytes("79.5GiB", h100, "cuda")
    assert memory_bytes("79GiB", h100, "cuda") == driver.total - h100.reserve["context_bytes"]
    assert memory_bytes("70GiB", h100, "cuda") == memory_bytes("70G", h100, "cuda") == 70 * GIB
    assert memory_bytes("79GiB", h100) == 79 * GIB, "elsewhere it may have 80"
    with pytest.raises(ValueError, match=r"is 81\.0 GiB, and a device of h100-sxm has 80\.0 GiB"):
        memory_bytes("81GiB", h100)
    assert memory_bytes("81GiB", Hardware.load("cpu-gloo"), "cpu") == 81 * GIB
    assert memory_bytes("7e1GiB", h100, "cuda") == memory_bytes("70.GiB", h100, "cuda") == 70 * GIB
    with pytest.raises(ValueError, match=r"'1e12GiB' is .* GiB, and a device of h100-sxm has"):
        memory_bytes("1e12GiB", h100)
    for wrong in ("1e999GiB", "0e5GiB", "1.2.3GiB", ".GiB", "e3GiB"):
        with pytest.raises(ValueError, match=f"memory '{wrong}' is not a size"):
            memory_bytes(wrong, h100)


@pytest.mark.parametrize(
    ("variable", "told", "found"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", False),
    ],
)
def test_the_allocator_is_asked_for_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, told: str, found: bool
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, told)
    assert has_expandable_segments() == found
