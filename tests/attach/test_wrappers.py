"""A parallel module has the signature of the user's forward, and says so where a wrapper would parallelize it again."""

import inspect

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import autopar
from tests.processes.models import batch, net


def test_forward_has_the_arguments_of_the_users(one: DeviceMesh) -> None:
    plain = net()
    parallel = autopar.compile(plain, one)
    assert inspect.signature(parallel.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(parallel).forward) == inspect.signature(type(plain).forward)
    assert inspect.getfullargspec(parallel.forward) == inspect.getfullargspec(plain.forward)


def test_wrappers_that_would_parallelize_again_are_refused(one: DeviceMesh) -> None:
    parallel = autopar.compile(net(), one)
    with pytest.raises(RuntimeError, match=r"reduces its gradients by itself.*inputs='local'"):
        DistributedDataParallel(parallel)
    with pytest.raises(RuntimeError, match=r"do not pass a parallel module to accelerator\.prepare\(\)"):
        parallel._is_accelerate_prepared  # noqa: B018
    parallel._is_accelerate_prepared = True  # as a trainer that knows better does
    assert parallel._is_accelerate_prepared
    parallel(**batch()).backward()


def test_accelerate_is_told_what_to_prepare(one: DeviceMesh) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is in the dev extra")
    parallel = autopar.compile(net(), one)
    optimizer = torch.optim.AdamW(parallel.parameters())
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match=r"prepare the optimizer and the loaders.*accelerator\.autocast\(\)"):
        accelerator.prepare(parallel, optimizer)
