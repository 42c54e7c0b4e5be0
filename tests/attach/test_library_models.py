"""Models of transformers that do otherwise where they are traced, or draw outside of torch: as the library runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from tests.processes.compare import near, same_gradients

transformers = pytest.importorskip("transformers")

Made = tuple[nn.Module, Callable[[int], dict[str, Any]]]
VOCABULARY, ROWS, LENGTH = 40, 2, 16
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _words(*names: str, length: int = LENGTH) -> Callable[[int], dict[str, Any]]:
    return lambda _: {name: torch.randint(2, VOCABULARY, (ROWS, length)) for name in names}


def nystromformer() -> Made:
    config = transformers.NystromformerConfig(**SMALL, num_landmarks=8, segment_means_seq_len=LENGTH)
    return transformers.NystromformerForMaskedLM(config), _words("input_ids", "labels")


def experts_of_switch_transformers() -> Made:
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=2,
        num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0,
        dropout_rate=0.0, router_jitter_noise=0.0,
    )  # fmt: skip
    return transformers.SwitchTransformersForConditionalGeneration(config), _words("input_ids", "labels")


def blocks_of_big_bird() -> Made:
    config = transformers.BigBirdConfig(**SMALL, block_size=4, num_random_blocks=2, max_position_embeddings=64)
    return transformers.BigBirdForMaskedLM(config), _words("input_ids", "labels", length=64)


def _speech(kind: str) -> Made:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, mask_time_length=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, feat_extract_norm="layer", layerdrop=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip

    def batch(number: int) -> dict[str, Any]:
        samples = 2000
        heard = torch.ones(ROWS, samples, dtype=torch.int64)
        heard[1, 1000 + 300 * number :] = 0
        labels = torch.randint(1, VOCABULARY, (ROWS, 6))
        return {"input_values": torch.randn(ROWS, samples).double(), "attention_mask": heard, "labels": labels}

    return getattr(transformers, f"{kind}ForCTC")(config), batch


def masked_speech_of_wav2vec2() -> Made:
    return _speech("Wav2Vec2")


def masked_speech_of_hubert() -> Made:
    return _speech("Hubert")


MODELS = {
    made.__name__: made
    for made in (
        nystromformer, experts_of_switch_transformers, blocks_of_big_bird, masked_speech_of_wav2vec2,
        masked_speech_of_hubert,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_without_autopar(one: DeviceMesh, name: str) -> None:
    plain, batch = MODELS[name]()
    plain = plain.train() if name.startswith("experts") else plain.double().train()  # their router is float32
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for number in range(2):
        inputs = batch(number)
        for model in (plain, parallel):
            np.random.seed(number)
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            if model is plain:
                wanted = loss.detach()
        near(loss, wanted, 1e-6, "loss")  # of which some are computed in float32
        same_gradients(plain, parallel)
    assert sum(map(len, parallel._autopar.programs.values())) == 1


def test_one_that_changes_its_attention_for_short_sequences_says_so(one: DeviceMesh) -> None:
    plain, _ = blocks_of_big_bird()
    short = _words("input_ids", "labels")(0)
    with pytest.raises(TraceError, match=r"changes which module is at self\.\S+\.attention\.self at \S+py:\d+ \(now"):
        autopar.compile(copy.deepcopy(plain), one)(**short)
    plain(**short)  # which has the other attention now
    parallel = autopar.compile(copy.deepcopy(plain).eval(), one)
    near(parallel(**short).loss, plain.eval()(**short).loss, 1e-5, "loss")
