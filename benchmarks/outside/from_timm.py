"""timm's image models, made small, trained with the usual cross entropy outside of the model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from benchmarks.outside.script import Script, cross_entropy, images, of_x


def _script(name: str, size: int = 64, *, told: str = "", **options: Any) -> Script:
    def model() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=10, **options)

    return Script(
        f"timm/{name}", ("timm", "torchvision"), model, lambda n: images(n, size), call=of_x, loss=cross_entropy,
        told=told,
    )  # fmt: skip


def _class(name: str, path: str, **options: Any) -> Script:
    """One whose size only its class lets one choose."""

    def model() -> nn.Module:
        module, _, made = path.partition(":")
        return getattr(import_module(f"timm.models.{module}"), made)(num_classes=10, **options)

    return Script(f"timm/{name}", ("timm", "torchvision"), model, images, call=of_x, loss=cross_entropy)


def _mixer(name: str, block: str) -> Script:
    def model() -> nn.Module:
        from timm.models import mlp_mixer

        layer = getattr(mlp_mixer, block)
        return mlp_mixer.MlpMixer(num_classes=10, img_size=64, num_blocks=2, embed_dim=48, block_layer=layer)

    return Script(f"timm/{name}", ("timm", "torchvision"), model, images, call=of_x, loss=cross_entropy)


def _pools() -> Script:
    def model() -> nn.Module:
        from timm.models import metaformer

        sizes: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)}
        return metaformer.MetaFormer(num_classes=10, token_mixers=metaformer.Pooling, **sizes)

    return Script("timm/poolformer", ("timm", "torchvision"), model, images, call=of_x, loss=cross_entropy)


NO_PATHS = "no stochastic depth"
SCRIPTS = [
    _script("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 24, 32, 48)),
    _script("convnextv2_atto", depths=(1, 1, 2, 1), dims=(16, 24, 32, 48)),
    _script("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3),
    _script("vit_relpos_small_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3),
    _script("deit_tiny_distilled_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3),
    _script("eva02_tiny_patch14_224", 56, img_size=56, depth=2, embed_dim=48, num_heads=3),
    *(
        _script(
            name,
            img_size=64,
            window_size=4,
            embed_dim=24,
            depths=(2, 2),
            num_heads=(2, 4),
            drop_path_rate=0.0,
            told=NO_PATHS,
        )
        for name in ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256")
    ),
    _script("resnet10t"),
    _script("resnext50_32x4d", layers=(1, 1, 1, 1)),
    _script("seresnet50", layers=(1, 1, 1, 1)),
    _script("test_efficientnet"),
    _script("regnetx_002"),
    _mixer("mixer", "MixerBlock"),
    _script("mobilenetv3_small_050"),
    _script("densenet121", block_config=(2, 2, 2), growth_rate=8),
    _script("coatnet_pico_rw_224", img_size=64, depths=(1, 1, 1, 1), embed_dim=(16, 32, 64, 64), stem_width=(8, 16)),
    _script("maxvit_pico_rw_256", img_size=64, depths=(1, 1), embed_dim=(32, 64), stem_width=16),
    _script("beit_base_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3),
    _script("cait_xxs24_224", img_size=64, depth=2, embed_dim=48, num_heads=3, depth_token_only=1),
    _script("xcit_nano_12_p16_224", img_size=64, depth=2, embed_dim=32, num_heads=2, cls_attn_layers=1),
    _pools(),
    _script("ghostnet_050", drop_rate=0.0),
    _script("levit_128s", 64, img_size=64, embed_dim=(32, 48, 64), depth=(1, 1, 1), num_heads=(2, 3, 4)),
    _script("efficientformer_l1", 224, depths=(1, 1, 1, 1), embed_dims=(16, 24, 32, 48), num_vit=1),
    _script("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(16, 32, 40, 64)),
    _script("mobilevit_xxs"),
    _script("edgenext_xx_small", depths=(1, 1, 2, 1), dims=(16, 24, 32, 48)),
    _script("repvgg_a0", 96),
    _script("test_nfnet"),
    _class("convmixer", "convmixer:ConvMixer", dim=32, depth=2, kernel_size=5),
    _script("hrnet_w18_small"),
    _script("twins_svt_small", embed_dims=(16, 32, 48, 64), depths=(1, 1, 1, 1)),
]
