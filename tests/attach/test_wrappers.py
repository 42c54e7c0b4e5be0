"""A parallel module has the signature of the user's forward, and says so where a wrapper would parallelize it again."""

import inspect
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
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


def test_a_model_that_is_parallel_already_is_refused(one: DeviceMesh) -> None:
    parallel = autopar.compile(net(), one)
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel, which parallelizes it already"):
        autopar.compile(DistributedDataParallel(net()), one)
    with pytest.raises(ValueError, match=r"wrapped in Parallel\w+, which"):
        autopar.compile(parallel, one)
    with pytest.raises(ValueError, match=r"wrapped in FSDP\w+, which"):
        autopar.compile(cast(nn.Module, fully_shard(net(), mesh=one)), one)


def test_accelerate_is_told_what_to_prepare(one: DeviceMesh) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is in the dev extra")
    parallel = autopar.compile(net(), one)
    optimizer = torch.optim.AdamW(parallel.parameters())
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match=r"prepare the optimizer and the loaders.*accelerator\.autocast\(\)"):
        accelerator.prepare(parallel, optimizer)
