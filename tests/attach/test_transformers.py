"""torch's own transformer layers: masks of every kind, hints, and never the kernels that are for inference only."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from tests.processes.compare import LOSS, adamw, near, same_gradients, same_state, same_steps
from tests.support.transformers import BATCH, LENGTH, WORDS, Attends, Translated, WordModel, batch

NESTED = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


@NESTED
def test_the_transformer_of_the_word_language_model_trains_and_is_evaluated(one: DeviceMesh) -> None:
    plain = WordModel()
    parallel = autopar.compile(plain, one, outputs="global")
    optimizers = adamw(plain.parameters()), adamw(parallel.parameters())
    for _ in range(2):
        words, targets = torch.randint(0, WORDS, (2, LENGTH, BATCH))
        losses = [functional.nll_loss(model(words).view(-1, WORDS), targets.view(-1)) for model in (plain, parallel)]
        near(losses[1], losses[0], LOSS, "loss")
        for loss in losses:
            loss.backward()
        same_gradients(plain, parallel)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_state(plain, parallel)
    plain.eval(), parallel.eval()
    with torch.no_grad():
        near(parallel(words), plain(words), LOSS, "logarithms in evaluation")


@pytest.mark.parametrize(
    ("masks", "batch_first"),
    [("floats", False), *((masks, True) for masks in ("none", "flags", "hint", "window", "padding"))],
)
@NESTED
def test_the_whole_transformer_trains_under_any_mask(one: DeviceMesh, masks: str, batch_first: bool) -> None:
    plain, data = Translated(masks, batch_first), batch()
    parallel = autopar.compile(plain, one)
    inputs = {"source": data["x"], "target": data["y"], "padded": data["padded"]}
    same_steps(plain, parallel, inputs, steps=2)


@pytest.mark.parametrize("kind", ["weights", "weights heads mask", "mask", "hint", "hint weights", "padding", "bias"])
def test_attention_trains_with_and_without_its_weights(one: DeviceMesh, kind: str) -> None:
    plain = Attends(kind)
    same_steps(plain, autopar.compile(plain, one), batch(), steps=2)


@NESTED
def test_kernels_for_inference_are_never_taken(one: DeviceMesh) -> None:
    """torch takes them in evaluation where nothing requires grad; no gradient and no rule goes through them."""
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    parallel, x = autopar.compile(plain, one, outputs="global"), batch()["x"]
    with torch.no_grad():
        near(parallel(x), plain(x), LOSS, "an encoding", 1e-6)
    assert not [n.op for n in parallel.plan.graph.nodes if "_fwd" in n.op or "_native_multi_head" in n.op]
