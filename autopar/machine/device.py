"""What this machine has: the profile that fits its device, and the memory that is free on it."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar._compat import HashStore
from autopar.ir.words import count_of
from autopar.plan.tell import human
from cost_models.hardware import TF32_KINDS, Hardware, known_hardware

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 2**10,  # as torch and the shell have it
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True)
class Devices:
    """Devices whose arrangement is left to the plan. `flat`: all of them along one axis, until there is a plan."""

    flat: DeviceMesh


@overload
def init_mesh(device_type: str = "cpu", *, devices: int) -> Devices: ...


@overload
def init_mesh(device_type: str = "cpu", *, devices: None = None, **axes: int) -> DeviceMesh: ...


def init_mesh(device_type: str = "cpu", *, devices: int | None = None, **axes: int) -> DeviceMesh | Devices:
    """A device mesh with named axes, `init_mesh("cuda", data=4, tensor=2)`; starts the process group if there is none.

    `devices`: in the place of axes, how many devices there are: `autopar.compile` then takes the best mesh of so many.

    Under torchrun all its processes take part; without it, one process makes a mesh of size one. Beside NCCL there is
    gloo: for parameters on the host, whose gradient norms are summed and whose pieces are put together there. Each
    process takes the GPU of its LOCAL_RANK. Raises ValueError where the axes do not multiply to the number of
    processes, where there is no such GPU, and for other kinds of devices.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f'init_mesh got the device type {device_type!r}; programs run on "cpu" and "cuda": give one')
    if device_type == "cuda":
        _take_device()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if devices is not None and axes:
        told = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"devices={devices} leaves the axes to the plan, and {told} names them; give one of the two")
    if devices is not None:
        _check_devices(devices, dist.get_world_size())
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(f"axis {name} has size {size!r}; sizes are whole numbers from 1: {name}=2")
    if not axes:
        axes = {"data": dist.get_world_size()}
    check_size(tuple(axes.values()), dist.get_world_size())
    made = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return made if devices is None else Devices(made)


def _take_device() -> None:
    """Make the GPU of LOCAL_RANK the current one, before anything lies on another.

    A process that sees one GPU only has that, whatever its number among others; one that has chosen a GPU keeps it.
    CUDA is started here, or a device mesh would choose by itself: by LOCAL_RANK, or with a warning.
    """
    local, count = os.environ.get("LOCAL_RANK"), torch.cuda.device_count()
    if not count:
        raise ValueError(
            'this process sees no GPU: torch.cuda.device_count() is 0; give init_mesh("cpu", ...), or look at the '
            "driver, at CUDA_VISIBLE_DEVICES, and whether torch was built with CUDA"
        )
    has_chosen = torch.cuda.is_initialized() and torch.cuda.current_device() != 0
    if local is not None and count > 1 and not has_chosen:
        if not local.isdigit() or int(local) >= count:
            raise ValueError(
                f"LOCAL_RANK is {local}, but this machine shows {count} GPUs; start as many processes on it as it has "
                f"GPUs (torchrun --nproc-per-node {count})"
            )
        torch.cuda.set_device(int(local))
    torch.cuda.init()


def check_size(sizes: tuple[int, ...], world: int) -> None:
    told = "x".join(map(str, sizes))
    if any(size < 1 for size in sizes):
        raise ValueError(f"the mesh {told} has an axis of size {min(sizes)}; sizes are whole numbers from 1")
    if (total := math.prod(sizes)) != world:
        raise ValueError(f"the mesh {told} has {total} ranks, but {_start(total, world)} or make a mesh of {world}")


def _check_devices(devices: int, world: int) -> None:
    if devices < 1:
        raise ValueError(f"devices={devices} are none; give as many as processes run, here devices={world}")
    if devices != world:
        raise ValueError(f"a mesh of devices={devices} is asked for, but {_start(devices, world)} or give {world}")


def _start(wanted: int, world: int) -> str:
    run = "1 process runs" if world == 1 else f"{world} processes run"
    start = count_of(wanted, "process", "processes")
    return f"{run}; start {start} (torchrun --nproc-per-node {wanted})"


def device_name(device_type: str) -> str:
    """What the driver calls the device; for a CPU its architecture."""
    return torch.cuda.get_device_name() if device_type == "cuda" else f"{platform.machine()} {device_type}"


def calibrated_path(device_type: str) -> Path:
    """Where `python -m autopar.calibrate` keeps the profile of this machine's device: in $AUTOPAR_PROFILES, else in
    $XDG_CACHE_HOME/autopar/profiles, else in ~/.cache/autopar/profiles."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{platform.node()} {device_name(device_type)}".lower()).strip("-")
    return _profiles() / f"{name}.toml"


def operators_path() -> Path:
    """Where the times of single operators are kept (`cost_models.measured`): beside the calibrated profiles."""
    return _profiles() / "operators.sqlite3"


def _profiles() -> Path:
    given = os.environ.get("AUTOPAR_PROFILES")
    home = os.path.expanduser("~")
    if home == "~":  # no HOME, and a user whom the system does not know, as in containers
        home = os.path.join(tempfile.gettempdir(), f"autopar-{os.getuid()}")
    cache = os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache")
    return Path(given or Path(cache) / "autopar" / "profiles")


def is_here(hardware: Hardware, device_type: str) -> bool:
    """Whether a profile is that of this machine's device: one that autopar takes by itself, or one calibrated here."""
    measured = f"measured on {platform.node()}, {device_name(device_type)},"
    if any(source.startswith(measured) for source in hardware.sources.values()):
        return True
    for calibrated in (True, False):
        with contextlib.suppress(ValueError, OSError):
            here = hardware_or_here(None, device_type, calibrated=calibrated)
            if here.digest in (hardware.digest, _with_ranks_here(hardware).digest):
                return True
    return False


def tf32_set() -> tuple[str, ...]:
    """Of `cost_models.hardware.TF32_KINDS` those that torch's settings allow; by default convolutions alone.

    Since torch 2.9 there are two ways to set each; where the newer one was used, reading the older one is an error.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(products, "fp32_precision"):
        allowed = products.fp32_precision == "tf32", convolutions.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    else:
        allowed = products.allow_tf32, convolutions.allow_tf32
    return tuple(kind for kind, is_allowed in zip(TF32_KINDS, allowed, strict=True) if is_allowed)


def tf32_here(device_type: str) -> tuple[str, ...]:
    """What of `tf32_set` is true of this machine's device: TF32 came with compute capability 8."""
    if device_type != "cuda" or (torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)):
        return ()
    return tf32_set()


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


ALONE = 2**21  # elements, whose update takes one thread 2 to 3 ms
SPARE = 2  # processors, for what launches kernels and for autograd's thread


def host_threads(elements: int) -> int:
    """With how many threads a rank of a GPU updates so many elements on the host: its part of this machine's processors
    but for a few. Threads of OpenMP spin until the last has ended, and where one of them has no processor that is when
    the scheduler gives it one: 7 to 15 ms here, 10 on an H200's host. So what is soon done has one thread.
    """
    own = processors() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 1 if elements < ALONE else max(1, own - SPARE)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch computes on the host with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_type_of(hardware: Hardware) -> str:
    """torch's name for the devices of a profile: "cpu" where their memory is the host's, else "cuda"."""
    tiers = hardware.tiers
    return "cpu" if tiers["hbm"].bytes_per_s == tiers["host"].bytes_per_s else "cuda"


def hardware_or_here(hardware: str | Path | Hardware | None, device_type: str, *, calibrated: bool = True) -> Hardware:
    """The given profile; else what `python -m autopar.calibrate` measured here; else the known one that fits.

    `calibrated=False` leaves out the second. Raises ValueError listing the known profiles where none fits, or naming
    the figure where a profile is wrong.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        return Hardware.load(hardware)
    if calibrated and (path := calibrated_path(device_type)).is_file():
        return Hardware.load(path)
    if device_type == "cpu":
        return Hardware.load("cpu-gloo")
    name = torch.cuda.get_device_name() if device_type == "cuda" else device_type
    known = [Hardware.known(one) for one in known_hardware()]
    fitting = [one for one in known if one.device and re.search(one.device, name)]
    if not fitting:
        raise ValueError(
            f"no hardware profile fits device {name!r}; pass hardware=, one of {', '.join(known_hardware())}, or a file"
        )
    total = total_bytes(device_type, fitting[0])
    small, *larger = sorted(fitting, key=lambda one: one.tiers["hbm"].capacity_bytes)
    found = [one for one in (small, *larger) if one is small or one.tiers["hbm"].capacity_bytes <= total][-1]
    return _with_ranks_here(found)


def _with_ranks_here(hardware: Hardware) -> Hardware:
    """The profile with as many ranks on a node as the launcher has started on this one, where that moves the border
    between nodes; else a plan would be of another machine than one that was made elsewhere, for nothing.
    """
    local, world = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    ranks, before = int(local) if local.isdigit() else 0, hardware.ranks_per_node
    if ranks in (0, before) or not world.isdigit() or int(world) <= min(ranks, before):
        return hardware
    sources = {**hardware.sources, "ranks_per_node": "LOCAL_WORLD_SIZE of this process"}
    return replace(hardware, ranks_per_node=ranks, sources=sources)


def total_bytes(device_type: str | None, hardware: Hardware) -> float:
    """All memory of a device: of this machine's, or, where there is none, the most that the profile can mean, as what a
    data sheet calls 80 GB is 80 GiB at the most.
    """
    if device_type == "cuda":
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return hardware.tiers["hbm"].capacity_bytes * (2**30 / 10**9)


def memory_bytes(memory: int | float | str | None, hardware: Hardware, device_type: str | None = None) -> float:
    """Bytes of one rank's device that its process may take, beside what the driver takes for it. `cost_models.reserve`
    says how much of that a plan's tensors may hold.

    "70GiB" or "70 GB" are read with their unit; an int, or a float above 1, is bytes; a float up to 1 is that
    share of the profile's capacity. None: what is free on this machine's device, or, where there is none, the
    profile's capacity. Raises ValueError for what is no size, and for more than the device has.
    """
    if memory is None:
        return free_bytes(device_type, hardware)
    nbytes = _given_bytes(memory, hardware)
    if not hardware.reserve:  # a rank of a CPU has as much as the others leave
        return nbytes
    total = total_bytes(device_type, hardware)
    if nbytes > total:
        raise ValueError(
            f"memory {memory!r} is {human(nbytes)}, and a device of {hardware.name} has {human(total)}; give at most "
            "that, or 0.9 (a share of it)"
        )
    return min(nbytes, total - hardware.reserve["context_bytes"])


def _given_bytes(memory: int | float | str, hardware: Hardware) -> float:
    match memory:
        case str():
            number = r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?"  # as Python writes numbers, 1e3 among them
            read = re.fullmatch(rf"\s*({number})\s*([KMGT]?i?B|[KMGT])\s*", memory, re.IGNORECASE)
            if read is None or not 0 < float(read[1]) < math.inf:
                raise ValueError(
                    f"memory {memory!r} is not a size; write for example 70GiB, 512MB or 0.9 (a share of the device)"
                )
            return float(read[1]) * UNITS[read[4].upper()]
        case bool():
            raise ValueError(f"memory {memory!r} is not a size; write for example 70GiB")
        case float() if 0 < memory <= 1:
            return memory * hardware.tiers["hbm"].capacity_bytes
        case _ if memory > 0:
            return float(memory)
        case _:
            raise ValueError(
                f"memory {memory!r} is not positive; write for example 70GiB, or 0.9 (a share of the device)"
            )


def has_expandable_segments() -> bool:
    """Whether torch's allocator is told to have segments that grow, by the environment of this process."""
    told = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:true" in told.replace(" ", "").lower()


def free_bytes(device_type: str | None, hardware: Hardware) -> float:
    """Free device memory, with what torch keeps for itself and nothing lies in; on CPU, this rank's share of what the
    machine has available.
    """
    if device_type == "cuda":
        return float(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    if device_type == "cpu":
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        found = (
            re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
            if Path("/proc/meminfo").exists()
            else None
        )
        if found is not None:
            return float(found[1]) * 1024 / ranks_here
    return float(hardware.tiers["hbm"].capacity_bytes)
