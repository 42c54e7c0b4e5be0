"""Model flops counted by hand, their share of the peak, and what a plan processes in a second."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.plan.utilisation import flops_by_dtype, utilisation
from autopar.price.pricer import Pricer
from autopar.search import Request, search
from autopar.search.__main__ import main
from autopar.search.backends import with_backends
from autopar.trace import capture, graph_of
from autopar.trace.precision import precision_named
from cost_models.hardware import Hardware
from tests.support.tiny import BUILD, TINY

H100 = Hardware.load("h100-sxm")
TWO = Mesh(("data",), (2,))
BATCH, IN, WIDTH, OUT = 8, 24, 48, 12
# up: forward, and the weight's gradient (the input needs none); down: forward, and both gradients
BY_HAND = 2 * BATCH * IN * WIDTH * 2 + 2 * BATCH * WIDTH * OUT * 3


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Sequential(nn.Linear(IN, WIDTH), nn.ReLU()), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).square().mean()


class Attending(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.q, self.causal = nn.Parameter(torch.zeros(2, 4, 16, 8)), causal

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.q, x, x, is_causal=self.causal).sum()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


def graph(model: nn.Module, *args: Tensor, precision: str = "fp32") -> Graph:
    policy = precision_named(precision)
    return graph_of(capture(model, args, {}, precision=policy), policy)


def test_two_layers_by_hand() -> None:
    assert flops_by_dtype(graph(Two(), torch.zeros(BATCH, IN))) == {"float32": BY_HAND}
    assert flops_by_dtype(graph(Two(), torch.zeros(BATCH, IN), precision="bf16")) == {"bfloat16": BY_HAND}
    assert flops_by_dtype(graph(Two(), torch.zeros(BATCH, IN)), ("matmul",)) == {"tf32": BY_HAND}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_six_products_and_half_of_them_where_it_is_causal(causal: bool) -> None:
    traced = graph(Attending(causal), torch.zeros(2, 4, 16, 8))
    one = 2 * (2 * 4 * 16 * 8) * 16
    assert sum(flops_by_dtype(traced).values()) == pytest.approx(6 * one / (2 if causal else 1))


def test_a_convolution_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 4, 3, padding=1, bias=False))
    one, other = 2 * (2 * 8 * 6 * 6) * 3 * 9, 2 * (2 * 4 * 6 * 6) * 8 * 9
    traced = graph_of(capture(model, (torch.zeros(2, 3, 6, 6),), {}))
    assert flops_by_dtype(traced) == {"float32": 2 * one + 3 * other}


def test_mfu_is_model_flops_over_what_all_ranks_could_do() -> None:
    plan = search(graph(Two(), torch.zeros(BATCH, IN), precision="bf16"), TWO, H100)
    found = utilisation(plan)
    assert found.dtype == "bfloat16" and found.peak_flops_per_s == 989.4e12, "the data sheet's, not what is reached"
    assert found.mfu == pytest.approx(BY_HAND / (plan.predicted_seconds * 2 * 989.4e12))
    assert utilisation(replace(plan, step_seconds=2 * plan.step_seconds)).mfu == pytest.approx(found.mfu / 2)


def test_what_is_run_again_does_not_count() -> None:
    traced = graph(Two(), torch.zeros(BATCH, IN))
    kept = search(traced, TWO, H100, Request(pin={"up": "recompute"}))
    again = [node for node in kept.graph.nodes if node.op == "autopar.einsum" and node.target]
    assert len(again) == 1 and sum(flops_by_dtype(kept.graph).values()) > BY_HAND, "a product is run again"
    assert utilisation(kept).model_flops == BY_HAND


def test_a_profile_of_ones_own_gpus_has_mfu_too(tmp_path: Path) -> None:
    own = replace(H100, launch_s=1e-6)
    found = search(graph(Two(), torch.zeros(BATCH, IN), precision="bf16"), TWO, own)
    plan = with_backends(found, Pricer.on(TWO, own, "adamw"))
    plan.save(tmp_path / "plan.json")
    for one in (plan, Plan.load(tmp_path / "plan.json")):
        found = utilisation(one)
        assert found.mfu == pytest.approx(BY_HAND / (plan.predicted_seconds * 2 * 989.4e12))
        assert "MFU" in one.explain()


def test_with_a_profile_of_processors_that_is_not_known_there_is_none() -> None:
    plan = search(graph(Two(), torch.zeros(BATCH, IN)), TWO, replace(Hardware.load("cpu-gloo"), launch_s=1e-6))
    assert utilisation(plan).mfu is None and "MFU" not in plan.explain()
    assert "model flops" in plan.explain()


def test_samples_and_tokens_come_from_the_inputs() -> None:
    ids = torch.zeros(6, 10, dtype=torch.int64)
    plan = search(graph(Tokens(), ids, ids), TWO, H100)
    found = utilisation(plan)
    assert (found.samples, found.tokens) == (6, 60)
    told = found.to_json()
    assert told["tokens_per_s"] == pytest.approx(60 / plan.predicted_seconds)
    assert told["samples_per_s_and_rank"] == pytest.approx(3 / plan.predicted_seconds)
    assert f"{60 / plan.predicted_seconds / 2:,.0f} on each rank" in " ".join(plan.explain().split())
    images = utilisation(search(graph(Two(), torch.zeros(BATCH, IN)), TWO, H100))
    assert (images.samples, images.tokens) == (BATCH, None)
    apart = utilisation(search(graph(Attending(False), torch.zeros(2, 4, 16, 8)), TWO, H100))
    assert apart.samples == 2


def test_it_is_in_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.py").write_text(TINY + BUILD)
    monkeypatch.chdir(tmp_path)
    assert main(["tiny.py:build", "--mesh", "a=2", "--hardware", "cpu-gloo", "--json", "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = told["utilisation"]
    assert found["model_flops"] == 2 * 8 * 24 * 48 * 2 + 2 * 8 * 48 * 24 * 3
    assert found["peak_flops_per_s"] == 101e9 and found["dtype"] == "float32" and found["samples_per_s"] > 0
    assert found["tokens_per_s"] is None and "each once" in found["model_flops_counted"]
