"""A model never goes whole to a device: what is made there is counted, on a device that there need not be."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar._compat import FakeStore, FakeTensorMode, TorchDispatchMode
from autopar.attach.inputs import local_input
from autopar.attach.parameters import become, whole_parameter
from autopar.attach.tensors import mesh_of, parameter_on, piece_as
from autopar.ir import layout as plain
from autopar.ir.layout import Layout, Shard

tensors: Any = importlib.import_module("autopar.attach.tensors")
FAKE_CUDA = torch.device("cuda", 0)
ROWS, COLUMNS = 64, 96


@pytest.fixture
def cuda_mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DeviceMesh]]:
    """A mesh of GPUs seen from rank 0, with tensors that have shapes and devices but no values."""

    def make(**sizes: int) -> DeviceMesh:
        ranks = torch.Size(sizes.values()).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        made = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        monkeypatch.setattr(dist, "get_rank", lambda: 1)  # fake tensors cannot copy to a device that is not there
        return made

    monkeypatch.setattr(dist, "broadcast", lambda value, src: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tensors, "agreed", lambda work, mesh: work())  # which would read a value
    yield make
    dist.destroy_process_group()


class Made(TorchDispatchMode):
    """Elements of the storage of every tensor that an operator makes on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (list, tuple)) else (out,):
            is_real = isinstance(one, Tensor) and not isinstance(one, DTensor)  # which only stands for the whole
            if is_real and one.device.type == "cuda":
                self.numels.append(one.untyped_storage().nbytes() // one.element_size())
        return out


LAYOUTS: list[tuple[dict[str, int], Layout, int]] = [
    ({"data": 4}, (Shard(0),), 4),
    ({"data": 4}, (Shard(1),), 4),
    ({"data": 2, "tensor": 4}, (Shard(0), Shard(1)), 8),
    ({"data": 2, "tensor": 4}, (plain.REPLICATE, Shard(0)), 4),
    ({"data": 4}, (plain.REPLICATE,), 1),
    ({"data": 1}, (plain.REPLICATE,), 1),
]


@pytest.mark.parametrize(("sizes", "layout", "pieces"), LAYOUTS, ids=str)
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_a_device_gets_pieces_and_nothing_larger(
    cuda_mesh: Callable[..., DeviceMesh], sizes: dict[str, int], layout: Layout, pieces: int, on_host: bool
) -> None:
    device_mesh = cuda_mesh(**sizes)
    with FakeTensorMode():
        given = nn.Parameter(torch.empty(ROWS, COLUMNS))
        with Made() as made:
            held = whole_parameter(given, device_mesh)
        assert not made.numels and held.device.type == "cpu", "nothing goes there before there is a plan"
        with Made() as made:
            laid_out = parameter_on(mesh_of(device_mesh), device_mesh, held, layout, on_host=on_host)
    local: Tensor = laid_out._local_tensor  # type: ignore[attr-defined]  # as autograd has no fake streams
    assert local.numel() == ROWS * COLUMNS // pieces and laid_out.shape == (ROWS, COLUMNS)
    assert local.device.type == ("cpu" if on_host else "cuda")
    assert made.numels and max(made.numels) == local.numel()


def test_a_parameter_keeps_its_place_in_an_optimizer_when_it_goes_to_its_device(
    cuda_mesh: Callable[..., DeviceMesh],
) -> None:
    device_mesh = cuda_mesh(data=4)
    with FakeTensorMode():
        held = whole_parameter(nn.Parameter(torch.empty(ROWS, COLUMNS)), device_mesh)
        optimizer = torch.optim.AdamW([held])
        become(held, parameter_on(mesh_of(device_mesh), device_mesh, held, (Shard(0),)))
        (there,) = optimizer.param_groups[0]["params"]
    assert there is held and held.device.type == "cuda" and held.requires_grad
    assert held._local_tensor.shape == (ROWS // 4, COLUMNS)  # type: ignore[attr-defined]


def test_what_is_loaded_and_what_comes_in_is_cut_before_it_goes_there(cuda_mesh: Callable[..., DeviceMesh]) -> None:
    device_mesh, layout = cuda_mesh(data=4), (Shard(0),)
    with torch.no_grad(), FakeTensorMode():  # autograd has no fake streams
        whole = torch.empty(ROWS, COLUMNS)
        held = parameter_on(
            mesh_of(device_mesh), device_mesh, whole_parameter(nn.Parameter(whole), device_mesh), layout
        )
        with Made() as made:
            loaded = piece_as(whole, held)  # type: ignore[arg-type]
            piece = local_input(whole, layout, mesh_of(device_mesh), device_mesh)
    assert loaded._local_tensor.device == piece.device == FAKE_CUDA
    assert {*made.numels} == {ROWS * COLUMNS // 4}


def test_ranks_receive_one_piece_after_the_other(
    cuda_mesh: Callable[..., DeviceMesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All take part in each broadcast, of one piece each."""
    device_mesh = cuda_mesh(data=2, tensor=4)
    sent: list[Tensor] = []
    monkeypatch.setattr(dist, "broadcast", lambda value, src: sent.append(value))
    with FakeTensorMode():
        held = whole_parameter(nn.Parameter(torch.empty(ROWS, COLUMNS)), device_mesh)
        parameter_on(mesh_of(device_mesh), device_mesh, held, (plain.REPLICATE, Shard(0)))
    assert [value.shape for value in sent] == [(ROWS // 4, COLUMNS)] * 4
    assert all(value.device == FAKE_CUDA and value.is_contiguous() for value in sent)
