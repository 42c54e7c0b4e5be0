"""All scripts, in order."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.outside import (
    from_diffusers,
    from_small_packages,
    from_timm,
    from_torchvision,
    from_transformers,
    snippets,
)
from benchmarks.outside.script import Script, without_compiled_torchvision


def scripts() -> list[Script]:
    """Those whose packages are here."""
    without_compiled_torchvision()
    every = [
        *snippets.SCRIPTS,
        *from_transformers.SCRIPTS,
        *from_timm.SCRIPTS,
        *from_torchvision.SCRIPTS,
        *from_diffusers.SCRIPTS,
        *from_small_packages.SCRIPTS,
    ]
    return [script for script in every if all(find_spec(name) for name in script.needs)]


PACKAGES = (  # their dependencies are named too, as none is taken from the index by itself: never another torch
    "timm diffusers peft accelerate psutil x-transformers einops einx loguru torch-einops-utils torch-geometric xxhash "
    "aiohttp requests urllib3 charset-normalizer certifi importlib-metadata zipp torchvision==0.28.0 "
    "rotary-embedding-torch vector-quantize-pytorch vit-pytorch segmentation-models-pytorch monai neuraloperator "
    "tensorly tensorly-torch opt-einsum zencfg beartype jaxtyping wadler-lindig performer-pytorch linformer "
    "reformer-pytorch product-key-memory axial-positional-embedding colt5-attention perceiver-pytorch local-attention "
    "axial-attention g-mlp-pytorch mlp-mixer-pytorch nystrom-attention siren-pytorch conformer minGRU-pytorch "
    "efficientnet-pytorch mambapy slot-attention lambda-networks linear-attention-transformer hyper-connections "
    "egnn-pytorch kornia kornia-rs assoc-scan"
)
