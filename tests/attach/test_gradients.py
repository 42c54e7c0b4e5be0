"""Gradients belong to their parameters: whoever clips or scales one changes nothing else."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autopar
from tests.processes.compare import near, same_gradients


class Alike(nn.Module):
    """Three parameters with one gradient, one whose gradient is the input, and one whose gradient the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.one, self.other = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
        self.scale, self.given = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.linear(x) + self.one + self.other).square() + self.scale * x, self.given * 1


@pytest.mark.parametrize("planned_first", [True, False], ids=["plain tensors", "DTensors"])
def test_each_has_storage_of_its_own(one: DeviceMesh, planned_first: bool) -> None:
    torch.manual_seed(0)
    plain, x, tangents = Alike(), torch.randn(4, 8), (torch.ones(4, 8), torch.randn(3))
    kept = copy.deepcopy((x, *tangents))
    example = {"example_inputs": (x,)} if planned_first else {}
    parallel = autopar.compile(plain, one, outputs="global", **example)
    for model in (plain, parallel):
        torch.autograd.backward(model(x), tangents)
    assert {isinstance(parameter, DTensor) for parameter in parallel.parameters()} == {not planned_first}
    storages = {
        (grad.to_local() if isinstance(grad, DTensor) else grad).untyped_storage().data_ptr()
        for grad in (parameter.grad for parameter in parallel.parameters())
    }
    assert len(storages) == len([*parallel.parameters()])
    for model in (plain, parallel):
        for parameter in model.parameters():
            parameter.grad.mul_(2.0)
    same_gradients(plain, parallel)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (parallel, plain)]
    near(*norms, 1e-6, "the norm")
    same_gradients(plain, parallel)
    assert all(map(torch.equal, (x, *tangents), kept)), "what the caller gave was written to"


def test_accumulated_gradients_are_those_of_both_calls(one: DeviceMesh) -> None:
    plain, x = Alike(), torch.randn(4, 8)
    parallel = autopar.compile(plain, one, outputs="global", example_inputs=(x,))
    for model in (plain, parallel):
        for part in (x, 2 * x):
            sum(output.sum() for output in model(part)).backward()
    same_gradients(plain, parallel)
