"""Models that share parameters and are compiled each by itself."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar


def headed(trunk: nn.Module) -> nn.Module:
    return nn.Sequential(trunk, nn.Linear(4, 2))


def test_a_trunk_of_two_models_is_told_of(one: DeviceMesh) -> None:
    """Each would train its own, and nothing said so."""
    trunk = nn.Linear(4, 4)
    first = autopar.compile(headed(trunk), one)
    with pytest.warns(UserWarning, match=r"shares 2 parameters \(0.weight, 0.bias\) with another one that is compiled"):
        autopar.compile(headed(trunk), one)
    with pytest.warns(UserWarning, match="put both into one module"):
        autopar.compile(trunk, one)
    assert first is not None


def test_what_is_compiled_again_or_copied_is_no_such_case(one: DeviceMesh) -> None:
    model = headed(nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, again = autopar.compile(model, one), autopar.compile(model, one)
        apart = autopar.compile(copy.deepcopy(model), one)
        assert len({id(first), id(again), id(apart)}) == 3
        trunk = nn.Linear(4, 4)
        of_one = autopar.compile(headed(trunk), one)
        of_one(torch.ones(2, 4))
        del of_one
        gc.collect()
        kept = autopar.compile(headed(trunk), one)
        trunk.requires_grad_(False)
        assert kept is not autopar.compile(headed(trunk), one)


def test_a_part_of_a_parallel_module_is_refused(one: DeviceMesh) -> None:
    """It ended in torch's words about local tensors."""
    parallel = autopar.compile(headed(nn.Linear(4, 4)), one)
    with pytest.raises(ValueError, match=r"parameter weight is a DTensor already: the model is a part of a parallel"):
        autopar.compile(parallel[0], one)
