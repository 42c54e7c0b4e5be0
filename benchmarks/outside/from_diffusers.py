"""diffusers' nets and peft's adapters: noise is predicted, images are rebuilt, a frozen model is adapted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.outside.script import Batch, Script, adamw, own_loss, to_target, tokens

NEEDS = ("diffusers",)


def _net(name: str, **options: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**options)

    return model


def _dit() -> nn.Module:
    """It drops labels at random in training; not here."""
    model = _net(
        "DiTTransformer2DModel", num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=8,
        in_channels=4, out_channels=4, norm_num_groups=4, num_embeds_ada_norm=10,
    )()  # fmt: skip
    for part in model.modules():
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0
    return model


def _noisy(n: int) -> Batch:
    return {"x": torch.randn(n, 3, 16, 16), "t": torch.randint(0, 1000, (n,)), "y": torch.randn(n, 3, 16, 16)}


def _described(n: int) -> Batch:
    made = {"x": torch.randn(n, 4, 16, 16), "t": torch.randint(0, 1000, (n,)), "y": torch.randn(n, 4, 16, 16)}
    return made | {"text": torch.randn(n, 6, 32)}


def _classes(n: int) -> Batch:
    made = {"x": torch.randn(n, 4, 8, 8), "t": torch.randint(0, 1000, (n,)), "y": torch.randn(n, 4, 8, 8)}
    return made | {"c": torch.randint(0, 10, (n,))}


def _picture(n: int) -> Batch:
    x = torch.randn(n, 3, 16, 16)
    return {"x": x, "y": x}


def _denoise(model: Any, batch: Batch) -> Any:
    return model(batch["x"], batch["t"]).sample


def _denoise_described(model: Any, batch: Batch) -> Any:
    return model(batch["x"], batch["t"], encoder_hidden_states=batch["text"]).sample


def _denoise_class(model: Any, batch: Batch) -> Any:
    return model(batch["x"], timestep=batch["t"], class_labels=batch["c"]).sample


def _rebuild(model: Any, batch: Batch) -> Any:
    return model(batch["x"]).sample


def _prior(n: int) -> Batch:
    made = {"x": torch.randn(n, 32), "t": torch.randint(0, 1000, (n,)), "e": torch.randn(n, 32)}
    return made | {"s": torch.randn(n, 6, 32), "y": torch.randn(n, 32)}


def _next(model: Any, batch: Batch) -> Any:
    made = model(batch["x"], batch["t"], proj_embedding=batch["e"], encoder_hidden_states=batch["s"])
    return made.predicted_image_embedding


def _adapted(kind: str, method: str) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        import peft
        import transformers

        sizes: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
        if kind == "gpt2":
            sizes |= {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0}
            sizes |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0}
        else:
            sizes |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        base = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
        if method == "LoRA":
            config: Any = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False)
        elif method == "DoRA":
            config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", use_dora=True)
        elif method == "IA3":
            config = peft.IA3Config(task_type="CAUSAL_LM")
        else:
            config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        return peft.get_peft_model(base, config)

    return model


def _words(n: int) -> Batch:
    ids = tokens(n, 12, 128)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _vq_loss(out: Any, batch: Batch) -> Tensor:
    return functional.mse_loss(out[0], batch["y"]) + out[1]


def _commit(model: Any, batch: Batch) -> Any:
    return model(batch["x"], return_dict=False)


BLOCKS: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
UNET: dict[str, Any] = BLOCKS | {"sample_size": 16, "attention_head_dim": 8}
CODER: dict[str, Any] = BLOCKS | {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4,
}  # fmt: skip
SCRIPTS = [
    Script(
        "diffusers/UNet2DModel", NEEDS, _net(
            "UNet2DModel", down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), **UNET,
        ), _noisy, _denoise, to_target, adamw,
    ),
    Script(
        "diffusers/UNet2DConditionModel", NEEDS, _net(
            "UNet2DConditionModel", down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, **UNET,
        ), _described, _denoise_described, to_target, adamw,
    ),
    Script("diffusers/AutoencoderKL", NEEDS, _net("AutoencoderKL", **CODER), _picture, _rebuild, to_target, adamw),
    Script("diffusers/VQModel", NEEDS, _net("VQModel", num_vq_embeddings=16, **CODER), _picture, _commit, _vq_loss),
    Script(
        "diffusers/DiTTransformer2DModel", NEEDS, _dit, _classes, _denoise_class, to_target, adamw,
        told="no labels dropped",
    ),
    Script(
        "diffusers/PixArtTransformer2DModel", NEEDS, _net(
            "PixArtTransformer2DModel", num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=16,
            in_channels=4, out_channels=4, norm_num_groups=4, cross_attention_dim=32, caption_channels=32,
            use_additional_conditions=False,
        ), _described, lambda model, b: model(
            b["x"], timestep=b["t"], encoder_hidden_states=b["text"], added_cond_kwargs={
                "resolution": None, "aspect_ratio": None}).sample, to_target, adamw,
    ),
    Script(
        "diffusers/PriorTransformer", NEEDS, _net(
            "PriorTransformer", num_attention_heads=4, attention_head_dim=8, num_layers=2, embedding_dim=32,
            num_embeddings=6, additional_embeddings=4,
        ), _prior, _next, to_target, adamw,
    ),
    Script(
        "diffusers/SD3Transformer2DModel", NEEDS, _net(
            "SD3Transformer2DModel", sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
            num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16,
            out_channels=4,
        ), lambda n: _described(n) | {"p": torch.randn(n, 16)}, lambda model, b: model(
            b["x"], encoder_hidden_states=b["text"], pooled_projections=b["p"], timestep=b["t"]).sample, to_target,
        adamw,
    ),
    *(
        Script(f"peft/{method} {kind}", ("peft",), _adapted(kind, method), _words, loss=own_loss, optimizer=adamw)
        for kind, method in (
            ("gpt2", "LoRA"), ("llama", "LoRA"), ("llama", "DoRA"), ("llama", "IA3"), ("gpt2", "prompt"),
        )
    ),
]  # fmt: skip
