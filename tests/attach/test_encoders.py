"""torch's own transformer encoders where nothing trains: padding that they leave out is 0, behind the last layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but"),
]

ENDS = torch.tensor([[False] * 5, [False, False, True, True, True], [False] * 4 + [True]])
GAP = torch.tensor([[False] * 5, [False, True, False, True, True], [False] * 4 + [True]])


def _encoder(layers: int, norm: bool = False, batch_first: bool = True, **given: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(8) if norm else None, **given)


@pytest.mark.parametrize(
    ("mask", "is_float", "norm"),
    [(ENDS, False, True), (ENDS, True, False), (GAP, False, False), (GAP, True, True)],
    ids=["ends", "ends as numbers", "gap", "gap as numbers"],
)
def test_padding_is_left_out_where_torch_leaves_it_out(
    mask: Tensor, is_float: bool, norm: bool, one: DeviceMesh
) -> None:
    """In evaluation without gradients, and not in training or under autocast; not where padding is anywhere else."""
    torch.manual_seed(0)
    plain = _encoder(2, norm)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x, asked = torch.randn(3, 5, 8), torch.zeros(3, 5).masked_fill(mask, -torch.inf) if is_float else mask

    def compare(where: str) -> Tensor:
        outputs = [model(x, src_key_padding_mask=asked) for model in (plain, parallel)]
        torch.testing.assert_close(outputs[1], outputs[0], msg=lambda told: f"{where}: {told}")
        return outputs[0]

    trained = compare("training")
    plain.eval()
    parallel.eval()
    torch.testing.assert_close(compare("evaluation with gradients"), trained)
    with torch.no_grad():
        left_out = compare("evaluation")
    assert torch.allclose(left_out[mask], trained[mask], atol=1e-5) == (mask is GAP)


@pytest.mark.parametrize("given", [{"batch_first": False}, {"enable_nested_tensor": False}, {"mask_check": False}])
def test_what_keeps_torch_from_it_keeps_autopar_from_it(given: dict[str, bool], one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = _encoder(1, **given).eval()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(3, 5, 8)
    x = x if given.get("batch_first", True) else x.transpose(0, 1)
    with torch.no_grad():
        outputs = [model(x, src_key_padding_mask=ENDS) for model in (plain, parallel)]
    torch.testing.assert_close(outputs[1], outputs[0])


def test_a_whole_transformer(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = nn.Transformer(8, 2, 2, 1, 16, 0.0, batch_first=True).eval()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x, y = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    with torch.no_grad():
        outputs = [model(x, y, src_key_padding_mask=ENDS, memory_key_padding_mask=ENDS) for model in (plain, parallel)]
    torch.testing.assert_close(outputs[1], outputs[0])
