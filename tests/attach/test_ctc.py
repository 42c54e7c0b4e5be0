"""Losses of sequences without alignment in forward, as torch has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

import autopar
from autopar.errors import CheckFailed, TraceError
from tests.processes.compare import GRADIENT, near, same_gradients, same_steps

STEPS, BATCH, LONGEST, CLASSES = 12, 4, 5, 7
HEARD, SPOKEN = (12, 9, 11, 2), (5, 2, 4, 3)  # the last one is too short for what was said


class Heard(nn.Module):
    """`form` of targets, as scripts pass them; `options` of the loss."""

    def __init__(self, form: str = "padded", **options: Any) -> None:
        super().__init__()
        self.linear, self.form, self.options = nn.Linear(8, CLASSES), form, {"zero_infinity": True} | options

    def forward(self, x: Tensor, y: Tensor, heard: Any, spoken: Any) -> Tensor:
        scores = self.linear(x).log_softmax(-1)
        match self.form:
            case "picked":
                spoken, y = (y > 0).sum(1), y.masked_select(y > 0)
            case "in a row":
                y = y.flatten()[: sum(SPOKEN)]
            case "one":
                scores, y, heard, spoken = scores[:, 0], y[0], heard[0], spoken[0]
            case _:
                pass
        function = torch.ctc_loss if isinstance(self.options.get("reduction"), int) else functional.ctc_loss
        loss = function(scores, y, heard, spoken, **self.options)
        return loss if not loss.ndim else loss.sin().sum()


def batch(form: str = "padded") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(1, CLASSES, (BATCH, LONGEST), generator=generator)
    if form == "picked":
        y[torch.arange(LONGEST) >= torch.tensor(SPOKEN).unsqueeze(1)] = -1
        y[0, 1] = -1  # not all of a row's stand in front
    lengths = [HEARD, SPOKEN] if form in ("numbers", "in a row") else [torch.tensor(HEARD), torch.tensor(SPOKEN)]
    return {"x": torch.randn(STEPS, BATCH, 8, generator=generator), "y": y, "heard": lengths[0], "spoken": lengths[1]}


@pytest.mark.parametrize("form", ["padded", "numbers", "picked", "in a row", "one"])
def test_targets_as_scripts_give_them(one: DeviceMesh, form: str) -> None:
    plain = Heard(form)
    same_steps(plain, autopar.compile(plain, one), batch(form), steps=2)


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "none"}, {"blank": 3}, {"reduction": 1}])
def test_its_options(one: DeviceMesh, options: dict[str, Any]) -> None:
    plain = Heard(**options)
    same_steps(plain, autopar.compile(plain, one), batch(), steps=2)


def test_a_loss_that_is_infinite(one: DeviceMesh) -> None:
    plain = Heard(zero_infinity=False)
    assert plain(**batch()) == autopar.compile(plain, one)(**batch()) == torch.inf


def test_micro_batches(one: DeviceMesh) -> None:
    plain = Heard(reduction="sum")
    same_steps(plain, autopar.compile(plain, one, micro_batches=2), batch(), steps=2)


def test_autocast_and_halves(one: DeviceMesh) -> None:
    """Autocast makes it in float32. torch has no kernel for halves, a program that computes in them does."""
    plain = Heard()
    parallel, given = autopar.compile(plain, one), batch()
    losses = []
    for model in (plain, parallel):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**given))
        losses[-1].backward()
    assert losses[1].dtype == losses[0].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=0)
    halved = autopar.compile(Heard(), one, precision="bf16")
    halved.load_state_dict(plain.state_dict())
    torch.testing.assert_close(halved(**given).float(), plain(**given), rtol=5e-2, atol=0)


def test_a_model_of_transformers_with_labels(one: DeviceMesh) -> None:
    config = Wav2Vec2Config(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, layerdrop=0.0,
        mask_time_prob=0.0, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    plain = Wav2Vec2ForCTC(config).double()
    parallel = autopar.compile(plain, one)
    data = {
        "input_values": torch.randn(2, 800, dtype=torch.float64),
        "labels": torch.tensor([[3, 4, 5, -100], [6, 7, -100, -100]]),
    }
    losses = [model(**data).loss for model in (plain, parallel)]
    near(losses[1], losses[0], GRADIENT, "loss")
    for loss in losses:
        loss.backward()
    same_gradients(plain, parallel)


def test_what_is_not_known_says_so(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"has its targets in one row.* pass them as \[batch, longest\]"):
        autopar.compile(Heard("in a row"), one)(**batch())
    picked = batch("picked")

    class Other(Heard):
        def forward(self, x: Tensor, y: Tensor, heard: Tensor, spoken: Tensor) -> Tensor:
            return functional.ctc_loss(self.linear(x).log_softmax(-1), y[y > 0], heard, spoken)

    with pytest.raises(CheckFailed, match="other target_lengths than the targets that a mask has picked"):
        autopar.compile(Other(), one)(**picked)
