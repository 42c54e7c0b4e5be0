"""torchvision's image models, made small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.outside.script import Batch, Script, cross_entropy, images, of_x


def _script(
    name: str, made: Callable[[Any], nn.Module], size: int = 64, *, told: str = "", loss: Any = cross_entropy,
    batch: Callable[[int], Batch] | None = None,
) -> Script:  # fmt: skip
    def model() -> nn.Module:
        import torchvision

        return made(torchvision.models)

    drawn = batch or (lambda n: images(n, size))
    return Script(f"torchvision/{name}", ("torchvision",), model, drawn, call=of_x, loss=loss, told=told)


def _segments(n: int) -> Batch:
    return {"x": torch.randn(n, 3, 48, 48), "y": torch.randint(0, 5, (n, 48, 48))}


def _segmentation(out: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(out["out"], batch["y"])


def _swin(models: Any) -> nn.Module:
    return models.swin_transformer.SwinTransformer(
        patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4],
        stochastic_depth_prob=0.0, num_classes=10,
    )  # fmt: skip


def _vit(models: Any) -> nn.Module:
    return models.vision_transformer.VisionTransformer(
        image_size=64, patch_size=16, num_layers=2, num_heads=2, hidden_dim=48, mlp_dim=96, num_classes=10
    )


def _convnext(models: Any) -> nn.Module:
    setting = models.convnext.CNBlockConfig
    blocks = [setting(16, 32, 1), setting(32, 48, 1), setting(48, None, 1)]
    return models.convnext.ConvNeXt(blocks, num_classes=10)


def _resnet(models: Any) -> nn.Module:
    return models.resnet.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)


SCRIPTS = [
    _script("resnet", _resnet),
    _script("vit", _vit),
    _script("swin", _swin, told="no stochastic depth"),
    _script("convnext", _convnext),
    _script("mnasnet0_5", lambda m: m.mnasnet0_5(num_classes=10, dropout=0.0), told="no dropout"),
    _script("shufflenet_v2_x0_5", lambda m: m.shufflenet_v2_x0_5(num_classes=10)),
    _script("squeezenet1_1", lambda m: m.squeezenet1_1(num_classes=10, dropout=0.0), told="no dropout"),
    _script("mobilenet_v2", lambda m: m.mobilenet_v2(num_classes=10, width_mult=0.35, dropout=0.0), told="no dropout"),
    _script(
        "googlenet", lambda m: m.googlenet(
            num_classes=10, aux_logits=False, init_weights=False, dropout=0.0
        ), told="no dropout, no auxiliary heads",
    ),
    _script(
        "lraspp_mobilenet_v3", lambda m: m.segmentation.lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=5
        ), batch=_segments, loss=_segmentation,
    ),
]  # fmt: skip
