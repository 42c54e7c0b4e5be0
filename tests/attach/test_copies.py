"""Copies of a parallel module of one process, and what is refused of them."""

import copy
import io

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import LOSS, near, same_state, same_steps
from tests.processes.models import batch, net


@pytest.mark.parametrize("called", [False, True], ids=["before a call", "after a call"])
def test_a_copy_trains_by_itself(one: DeviceMesh, called: bool) -> None:
    plain = net()
    parallel = autopar.compile(plain, one)
    if called:
        parallel(**batch(3)).backward(), plain(**batch(3))
    made, twin = copy.deepcopy(parallel), copy.deepcopy(plain)
    assert all(parameter.grad is None for parameter in made.parameters())
    same_steps(twin, made, batch(2), steps=2)
    assert made.program.forward is not None, "it has one of its own"
    parallel.zero_grad()
    same_steps(plain, parallel, batch(), steps=2)


def test_a_whole_state_dict_is_loaded_by_the_plain_model(one: DeviceMesh) -> None:
    plain = net()
    parallel = autopar.compile(plain, one)
    same_steps(plain, parallel, batch(), steps=2)
    loaded, other = net(seed=2), autopar.compile(net(seed=3), one)
    loaded.load_state_dict(parallel.full_state_dict())
    other.load_full_state_dict(parallel.full_state_dict())
    for module in (loaded, other):
        same_state(plain, module)


def test_a_parallel_module_is_not_pickled(one: DeviceMesh) -> None:
    parallel = autopar.compile(net(), one)
    with pytest.raises(TypeError, match=r"a parallel module \(ParallelNet\) .* save parallel.full_state_dict\(\)"):
        torch.save(parallel, io.BytesIO())


@pytest.mark.parametrize("called", [False, True], ids=["before a call", "after a call"])
def test_torch_compile_leaves_the_program_as_it_is(one: DeviceMesh, called: bool) -> None:
    plain = net()
    parallel = autopar.compile(plain, one, example_kwargs=batch() if called else None)
    near(torch.compile(parallel, backend="eager")(**batch()), plain(**batch()), LOSS, "loss")
