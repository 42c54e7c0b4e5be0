"""transformers' models, default configurations made small, called with labels and in train()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.outside.script import Batch, Script, adamw, tokens

VOCABULARY = 128
NO_DROPOUT = "no dropout"
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _model(kind: str, head: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **options)
        made = getattr(transformers, head)
        return made.from_config(config) if head.startswith("Auto") else made(config)

    return model


def _causal(kind: str, told: str = "", head: str = "AutoModelForCausalLM", **options: Any) -> Script:
    def batch(n: int) -> Batch:
        ids = tokens(n, 16, VOCABULARY)
        return {"input_ids": ids, "labels": ids.clone()}

    return Script(
        f"transformers/{kind}", ("transformers",), _model(kind, head, SMALL | options), batch, optimizer=adamw,
        told=told,
    )  # fmt: skip


def _padded(n: int) -> Batch:
    """As a tokenizer gives it: rows of several lengths."""
    ids, mask = tokens(n, 16, VOCABULARY), torch.ones(n, 16, dtype=torch.long)
    mask[::2, 11:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _masked(kind: str, head: str = "AutoModelForMaskedLM", **options: Any) -> Script:
    """Masked words, or classes of sentences or words, with padding."""

    def batch(n: int) -> Batch:
        given = _padded(n)
        if "Sequence" in head:
            return given | {"labels": torch.randint(0, 3, (n,))}
        if "Question" in head:
            return given | {"start_positions": torch.arange(n), "end_positions": torch.arange(n) + 3}
        most = 3 if "Token" in head else VOCABULARY
        hidden = torch.where(torch.rand(n, 16) < 0.5, torch.randint(0, most, (n, 16)), -100)
        hidden[0, 0] = 1
        return given | {"labels": hidden}

    task = "" if head == "AutoModelForMaskedLM" else f" {head.removeprefix('AutoModelFor')}"
    return Script(
        f"transformers/{kind}{task}", ("transformers",), _model(kind, head, SMALL | options), batch, optimizer=adamw,
        told=NO_DROPOUT,
    )  # fmt: skip


def _pixels(kind: str, size: int = 32, told: str = NO_DROPOUT, **options: Any) -> Script:
    def batch(n: int) -> Batch:
        return {"pixel_values": torch.randn(n, 3, size, size), "labels": torch.randint(0, 5, (n,))}

    model = _model(kind, "AutoModelForImageClassification", {"num_labels": 5, "image_size": size} | options)
    return Script(f"transformers/{kind}", ("transformers",), model, batch, optimizer=adamw, told=told)


def _pair(kind: str, **options: Any) -> Script:
    def batch(n: int) -> Batch:
        return _padded(n) | {"labels": tokens(n, 8, VOCABULARY)}

    sizes = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    model = _model(kind, "AutoModelForSeq2SeqLM", sizes | options)
    return Script(f"transformers/{kind}", ("transformers",), model, batch, optimizer=adamw, told=NO_DROPOUT)


def _sound(n: int) -> Batch:
    return {"input_features": torch.randn(n, 16, 32), "labels": tokens(n, 8, VOCABULARY)}


def _clip(n: int) -> Batch:
    return {"input_ids": tokens(n, 8, VOCABULARY), "pixel_values": torch.randn(n, 3, 32, 32), "return_loss": True}


def _wav(n: int) -> Batch:
    return {"input_values": torch.randn(n, 1600), "labels": torch.randint(0, 3, (n,))}


def _series(n: int) -> Batch:
    return {"past_values": torch.randn(n, 32, 3), "future_values": torch.randn(n, 8, 3)}


FEW = {"num_key_value_heads": 2}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "max_position_embeddings": 64,
}  # fmt: skip
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "patch_size": 8}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
SCRIPTS = [
    _causal("gpt2", NO_DROPOUT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    _causal("llama", **FEW),
    _causal("mistral", sliding_window=8, **FEW),
    _causal("qwen2", **FEW),
    _causal("qwen3", head_dim=16, **FEW),
    _causal("gemma", head_dim=16, **FEW),
    _causal("gemma2", head_dim=16, sliding_window=8, **FEW),
    _causal("gemma3_text", head_dim=16, sliding_window=8, **FEW),
    _causal("phi"),
    _causal("phi3", original_max_position_embeddings=64, **FEW),
    _causal("opt", NO_DROPOUT, word_embed_proj_dim=64, ffn_dim=128, dropout=0.0),
    _causal("bloom", n_layer=2, n_head=4),
    _causal("gpt_neox"),
    _causal("gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4, window_size=8),
    _causal("gptj", n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
    _causal("falcon"),
    _causal("mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=64),
    _causal("stablelm", **FEW),
    _causal("olmo2", **FEW),
    _causal("cohere", **FEW),
    _causal("granite", **FEW),
    _causal("starcoder2", NO_DROPOUT, residual_dropout=0.0, embedding_dropout=0.0, **FEW),
    _causal("mixtral", num_local_experts=4, **FEW),
    _causal("qwen2_moe", num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=64, **FEW),
    _causal("mamba", state_size=8),
    _causal("mamba2", num_heads=8, head_dim=16, state_size=16, n_groups=1, chunk_size=8),
    _causal("rwkv", attention_hidden_size=64),
    _masked("bert", **NO_DROPS),
    _masked("bert", "AutoModelForSequenceClassification", num_labels=3, **NO_DROPS),
    _masked("bert", "AutoModelForQuestionAnswering", **NO_DROPS),
    _masked("roberta", **NO_DROPS),
    _masked("distilbert", dim=64, n_layers=2, n_heads=4, hidden_dim=128, dropout=0.0, attention_dropout=0.0),
    _masked("electra", "AutoModelForTokenClassification", num_labels=3, embedding_size=32, **NO_DROPS),
    _masked("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], **NO_DROPS),
    _masked("albert", embedding_size=32, **NO_DROPS),
    _masked("mpnet", "AutoModelForSequenceClassification", num_labels=3, **NO_DROPS),
    _masked("modernbert", global_attn_every_n_layers=2, local_attention=8),
    _masked("fnet", "AutoModelForSequenceClassification", num_labels=3, hidden_dropout_prob=0.0),
    _masked(
        "convbert", "AutoModelForSequenceClassification", num_labels=3, embedding_size=64, conv_kernel_size=3,
        **NO_DROPS,
    ),
    _pair("t5", **T5),
    _pair("bart", **BART),
    _pair("pegasus", **BART),
    _pixels("vit", **VIT),
    _pixels("beit", drop_path_rate=0.0, **VIT),
    _pixels("dinov2", **(VIT | {"mlp_ratio": 2})),
    _pixels("swin", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, patch_size=4, drop_path_rate=0.0),
    _pixels("convnext", hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1], told=""),
    _pixels("resnet", hidden_sizes=[16, 24], depths=[1, 1], embedding_size=8, layer_type="basic", told=""),
    _pixels(
        "segformer", hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 4],
        drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    ),
    Script(
        "transformers/whisper", ("transformers",), _model(
            "whisper", "WhisperForConditionalGeneration", BART | {
                "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 16, "vocab_size": VOCABULARY,
                "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
            },
        ), _sound, optimizer=adamw,
    ),
    Script(
        "transformers/clip", ("transformers",), _model("clip", "CLIPModel", {
            "text_config": SMALL | {"hidden_size": 32}, "vision_config": VIT | {"image_size": 32}, "projection_dim": 16,
        }), _clip, optimizer=adamw,
    ),
    Script(
        "transformers/wav2vec2", ("transformers",), _model("wav2vec2", "AutoModelForAudioClassification", SMALL | {
            "hidden_size": 32, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_labels": 3,
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
            "layerdrop": 0.0, "activation_dropout": 0.0, "apply_spec_augment": False, "classifier_proj_size": 16,
        }), _wav, optimizer=adamw, told="no dropout, no masked frames",
    ),
    Script(
        "transformers/patchtst", ("transformers",), _model("patchtst", "PatchTSTForPrediction", {
            "num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 32,
            "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 64, "prediction_length": 8, "loss": "mse",
            "head_dropout": 0.0,
        }), _series, optimizer=adamw,
    ),
]  # fmt: skip
