"""Values to measure with: optimizer states of tables of which every row has been met."""

import pytest
import torch

from autopar.calibrate.values import SECOND_MOMENTS, as_trained, random_tensor
from autopar.ir.graph import TensorType

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_second_moment_is_zero_and_nothing_else_changes(name):
    table = torch.nn.Embedding(50, 4)
    optimizer = OPTIMIZERS[name](table.parameters(), 1e-3)
    table(torch.tensor([3, 7])).square().sum().backward()
    optimizer.step()
    (state,) = optimizer.state.values()
    before = {key: value.clone() for key, value in state.items()}
    moments = [key for key in state if key in SECOND_MOMENTS]
    assert len(moments) == 1 and (state[moments[0]] == 0).any()
    as_trained(optimizer)
    assert (state[moments[0]] > 0).all()
    torch.testing.assert_close(state[moments[0]], before[moments[0]], rtol=0, atol=2e-8)
    assert all(torch.equal(state[key], before[key]) for key in state if key not in moments)


def test_an_optimizer_without_second_moments_is_left_as_it_is():
    table = torch.nn.Embedding(50, 4)
    optimizer = torch.optim.SGD(table.parameters(), 1e-3, momentum=0.9)
    table(torch.tensor([3, 7])).square().sum().backward()
    optimizer.step()
    before = optimizer.state[table.weight]["momentum_buffer"].clone()
    as_trained(optimizer)
    assert torch.equal(optimizer.state[table.weight]["momentum_buffer"], before)


def test_no_second_moment_of_a_complex_weight_is_zero_in_either_part():
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))
    optimizer = torch.optim.AdamW([weight], 1e-3)
    weight.real[0].square().sum().backward()
    optimizer.step()
    second = torch.view_as_real(optimizer.state[weight]["exp_avg_sq"])
    assert (second == 0).any()
    as_trained(optimizer)
    assert (second > 0).all()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_both_parts_of_complex_values_are_between_a_tenth_and_one(dtype: str):
    made = random_tensor(TensorType((3, 40), dtype), torch.device("cpu"), order=(1, 0))
    parts = torch.view_as_real(made)
    assert made.dtype == getattr(torch, dtype) and made.stride() == (1, 3)
    assert (parts >= 0.1).all() and (parts <= 1.0).all() and parts.flatten().unique().numel() > 200
