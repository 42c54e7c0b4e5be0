"""Losses that match predictions with targets by scipy, as DETR has it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.optimize import linear_sum_assignment
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import both_backward, same_gradients
from tests.support.matching import Matched, batch

ORIGINAL = linear_sum_assignment


@pytest.mark.parametrize("way", ["tensors", *(pytest.param(way, marks=pytest.mark.slow) for way in ("arrays", "most"))])
def test_matchings_are_those_of_each_call(one: DeviceMesh, way: str) -> None:
    torch.manual_seed(0)
    plain = Matched(way).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for sizes in ((2, 3), (2, 3), (2, 3), (7, 1)):  # more targets than queries, too
        given = batch(sizes)
        plain.zero_grad(), parallel.zero_grad()
        both_backward(plain, parallel, *given, within=1e-12)
        same_gradients(parallel, plain)
    assert len(parallel._autopar.prepared()) == 2
    assert linear_sum_assignment is ORIGINAL and scipy.optimize.linear_sum_assignment is ORIGINAL


def test_what_scipy_says_of_a_matrix_is_said_in_that_call(one: DeviceMesh) -> None:
    plain = Matched("tensors").double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x, labels, boxes = batch((2, 3))
    parallel(x, labels, boxes)
    with pytest.raises(ValueError, match="invalid numeric entries"):
        parallel(x * np.nan, labels, boxes)
