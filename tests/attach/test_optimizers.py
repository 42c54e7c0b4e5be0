"""An optimizer that was made from the plain model would train nothing; its step says so."""

import gc

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import MakeOptimizer, adamw, sgd
from tests.processes.models import batch, net


@pytest.mark.parametrize("make", [adamw, sgd])
def test_an_optimizer_of_the_plain_model_is_refused_at_its_step(one: DeviceMesh, make: MakeOptimizer) -> None:
    plain = net()
    optimizer = make(plain.parameters())  # as scripts for DistributedDataParallel make it
    parallel = autopar.compile(plain, one)
    parallel(**batch()).backward()
    with pytest.raises(
        RuntimeError, match=r"holds \S+ and \d+ more parameters of the plain model.*behind autopar.comp"
    ):
        optimizer.step()


def test_both_models_train_side_by_side(one: DeviceMesh) -> None:
    """What a comparison does: each has an optimizer of its own, in any order, also while the other has no gradients."""
    plain = net()
    parallel = autopar.compile(plain, one)
    optimizers = adamw(plain.parameters()), adamw(parallel.parameters())
    for model, optimizer in zip((plain, parallel), optimizers, strict=True):
        model(**batch()).backward()
        before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()
        optimizer.step()
        assert not torch.equal(before, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for optimizer in optimizers:
        optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.step()  # without gradients anywhere, as torch has it: nothing happens


def test_an_optimizer_goes_on_where_its_parallel_module_is_gone(one: DeviceMesh) -> None:
    plain = net()
    optimizer = adamw(plain.parameters())
    parallel = autopar.compile(plain, one)
    parallel(**batch()).backward()
    del parallel
    gc.collect()
    optimizer.step()
    plain(**batch()).backward()
    optimizer.step()


def test_an_optimizer_that_calls_its_closure_itself_is_no_whole_one(one: DeviceMesh) -> None:
    parallel = autopar.compile(torch.nn.Linear(4, 4), one)
    with pytest.raises(ValueError, match="LBFGS calls the closure of its step itself"):
        autopar.optim.Whole(parallel.parameters(), torch.optim.LBFGS, lr=0.1)
