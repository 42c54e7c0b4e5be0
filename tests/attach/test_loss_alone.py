"""outputs="loss": what training does not read is not there, and everything else is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import Infeasible, TraceError
from autopar.search import Request, search
from autopar.trace import capture, graph_of
from cost_models.steps import DEVICE
from tests.processes.compare import near, same_gradients
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import FAST


class Several(nn.Module):
    """A loss among other things, one of which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        y = self.layer(x)
        self.last = y
        found: dict[str, Any] = {"y": y, "n": 3, "pair": (y.detach().sum(), [y + 1])}
        return found if labels is None else {"loss": (y - labels).square().mean(), **found}


class Words(nn.Module):
    """Few widths and many words: its logits are what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4096, 8), nn.Linear(8, 4096)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.words(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_calls_that_train_give_scalars_alone(one: DeviceMesh, micro_batches: int) -> None:
    torch.manual_seed(0)
    case = family("gpt2")
    parallel = autopar.compile(case.model, one, outputs="loss", micro_batches=micro_batches)
    ours, theirs = parallel(**case.inputs), case.model(**case.inputs)
    assert type(ours) is type(theirs) and ours.logits is None
    near(ours.loss, theirs.loss, 1e-6, "loss")
    case.model.zero_grad()
    ours.loss.backward()
    theirs.loss.backward()
    same_gradients(case.model, parallel)
    case.model.zero_grad()
    with torch.no_grad():
        near(parallel(**case.inputs).logits, theirs.logits.detach(), 1e-6, "logits")


def test_what_forward_keeps_and_what_is_no_tensor_stays(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x, labels = Several(), torch.randn(4, 8), torch.randn(4, 8)
    parallel = autopar.compile(model, one, outputs="loss")
    ours, theirs = parallel(x, labels), model(x, labels)
    near(ours["loss"], theirs["loss"], 1e-6, "loss")
    near(ours["pair"][0], theirs["pair"][0], 1e-5, "a scalar without a gradient")
    near(parallel.last, model.last, 1e-6, "kept")
    assert ours["y"] is None and ours["pair"][1] == [None] and ours["n"] == 3
    with pytest.raises(TraceError, match="outputs='loss' was asked for, and forward returns no scalar that has a grad"):
        parallel(x)
    with torch.no_grad():
        near(parallel(x)["y"], theirs["y"].detach(), 1e-6, "without labels")


def test_a_plan_without_outputs_is_run_as_it_was_made(one: DeviceMesh, tmp_path: Path) -> None:
    case = family("gpt2")
    made = autopar.compile(case.model, one, outputs="loss", example_kwargs=case.inputs)
    assert made.plan.outputs == "loss"
    made.plan.save(tmp_path / "plan.json")
    again = autopar.compile(case.model, one, plan=tmp_path / "plan.json")
    assert again(**case.inputs).logits is None
    with pytest.raises(autopar.PlanMismatch, match="outputs='global' was asked for, and the plan gives the loss alone"):
        autopar.compile(case.model, one, plan=tmp_path / "plan.json", outputs="global")
    usual = autopar.compile(case.model, one, example_kwargs=case.inputs).plan
    with pytest.raises(autopar.PlanMismatch, match="made for outputs='sharded', this call asks for outputs='loss'"):
        autopar.compile(case.model, one, plan=usual, outputs="loss")(**case.inputs)


def test_they_take_no_memory_and_a_refusal_names_the_way() -> None:
    """Of all micro-batches logits would be there as the step ends."""
    asked = Words(), (), {"ids": torch.randint(0, 4096, (8, 16))}
    whole = graph_of(capture(*asked))
    alone = graph_of(capture(*asked, loss_alone=True))
    logits = 8 * 16 * 4096 * 4
    plans = [search(graph, mesh_of(1), FAST, Request(allow=())) for graph in (whole, alone)]
    spared = plans[0].peak_bytes[DEVICE] - plans[1].peak_bytes[DEVICE]
    assert logits - 4096 <= spared <= logits + 4096, (spared, logits)
    limit = Request(allow=(), memory=plans[1].peak_bytes[DEVICE] + logits / 2, outputs="loss")
    assert search(alone, mesh_of(1), FAST, limit).peak_bytes[DEVICE] <= limit.memory
    told = r"leave out what training does not read beside the loss \(--outputs loss, outputs='loss'\)"
    with pytest.raises(Infeasible, match=told):
        search(whole, mesh_of(1), FAST, Request(allow=(), memory=limit.memory))
