"""transformers' models that check their values in forward, in train mode: tiny configurations, float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    CLIPVisionConfig,
    DetrConfig,
    DetrForObjectDetection,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ResNetConfig,
)

import autopar
from tests.processes.compare import LOSS, near, same_gradients

IMAGE = 7  # the token that stands for a patch
Case = tuple[nn.Module, Callable[[], dict[str, Tensor]]]


def llava() -> Case:
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1)

    def batch() -> dict[str, Tensor]:
        ids = torch.randint(8, 32, (4, 10))
        ids[:, 1:5] = IMAGE  # one for each patch
        return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 8, 8).double(), "labels": ids}

    return LlavaForConditionalGeneration(config).double(), batch


class Found(nn.Module):
    """Detection with a loss of its own: the library's matches boxes on the host."""

    def __init__(self) -> None:
        super().__init__()
        backbone = ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        )
        self.detr = DetrForObjectDetection(
            DetrConfig(
                backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, d_model=16,
                encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                encoder_ffn_dim=24, decoder_ffn_dim=24, num_queries=4, num_labels=3, dropout=0.0, auxiliary_loss=False,
            )
        )  # fmt: skip

    def forward(self, pixel_values: Tensor, boxes: Tensor) -> Tensor:
        found = self.detr(pixel_values=pixel_values)
        return (found.pred_boxes - boxes).square().mean() + found.logits.square().mean()


def detr() -> Case:
    return Found().double(), lambda: {
        "pixel_values": torch.randn(4, 3, 32, 32).double(), "boxes": torch.rand(4, 4, 4).double(),
    }  # fmt: skip


@pytest.mark.parametrize("case", [llava, detr])
def test_a_model_that_checks_its_values_trains(one: DeviceMesh, case: Callable[[], Case]) -> None:
    plain, batch = case()
    plain.train()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(2):
        inputs = batch()
        ours, wanted = (
            made["loss"] if isinstance(made := model(**inputs), dict) else made for model in (parallel, plain)
        )
        near(ours, wanted, LOSS, "loss")
        ours.backward(), wanted.backward()
    same_gradients(plain, parallel)


def test_what_the_library_checks_is_told_with_the_line_of_the_model(one: DeviceMesh) -> None:
    plain, batch = llava()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    wrong: dict[str, Any] = batch()
    parallel(**wrong)
    wrong["input_ids"][2, 3] = IMAGE + 1  # a patch more than tokens for them
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        plain(**wrong)
    with pytest.raises(autopar.CheckFailed, match=r"modeling_llava\.py:\d+ \("):
        parallel(**wrong)
