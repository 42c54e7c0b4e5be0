"""How long a sequence a model can take: as long as the model itself runs, and not one position more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.ir.mesh import Mesh
from autopar.scale import growth_of, usual_sources
from autopar.scale.positions import beyond, most_positions
from autopar.scale.report import report
from autopar.scale.study import Ground, study
from autopar.search import search
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware

H100 = Hardware.load("h100-sxm")
ROWS, OFFSET = 24, 2


class Counted(nn.Module):
    """Ids in, a loss out; a row for each position, from `first` on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(ROWS, 16)
        self.head, self.how = nn.Linear(16, 32), how

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        if self.how == "arange":
            places = torch.arange(length).unsqueeze(0)
        elif self.how == "from two":
            places = torch.arange(length) + OFFSET
        else:
            places = torch.ones(ids.shape).cumsum(1).long() - 1 + OFFSET
        return self.head(self.words(ids) + self.places(places)).logsumexp(-1).mean()


class Told(Counted):
    """The caller says the positions."""

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids) + self.places(places)).logsumexp(-1).mean()


@pytest.mark.parametrize("how", ["arange", "from two", "a running sum"])
def test_it_ends_where_the_model_does(how: str) -> None:
    model = Counted(how)
    graph = graph_of(capture(model, (), {"ids": torch.zeros(4, 8, dtype=torch.int64)}))
    most = most_positions(growth_of(graph, usual_sources(graph)))["sequence"]
    assert most.table == "places.weight"
    model(torch.zeros(4, most.value, dtype=torch.int64))
    with pytest.raises(IndexError):
        model(torch.zeros(4, most.value + 1, dtype=torch.int64))
    assert beyond({"sequence": most}, {"sequence": most.value, "batch": 10**6}) == ""
    assert "positions (places.weight)" in beyond({"sequence": most}, {"sequence": most.value + 1})


def test_where_the_caller_says_the_positions_nothing_is_known() -> None:
    ids = torch.zeros(4, 8, dtype=torch.int64)
    graph = graph_of(capture(Told("told"), (), {"ids": ids, "places": ids}))
    assert most_positions(growth_of(graph, usual_sources(graph))) == {}


def test_the_report_calls_nothing_beyond_it_fitting() -> None:
    graph = graph_of(capture(Counted("arange"), (), {"ids": torch.zeros(4, 8, dtype=torch.int64)}))
    plan = search(graph, Mesh(("data",), (2,)), H100)
    found = study(Ground(plan, growth_of(graph, usual_sources(graph)), H100), (3, 4), search_s=10)
    row = {row.label: row for row in found.rows}
    assert row["sequence 24"].kept is not None and row["sequence 24"].best is not None
    assert row["sequence 32"].kept is None and row["sequence 32"].best is None, "no search either"
    (reach,) = (reach for reach in found.reaches if reach.name == "sequence")
    assert (reach.fits, reach.too_large) == (ROWS, None)
    text = report(found)
    assert "sequence up to 24 fits (" in text and "the model's last: places.weight has no more positions" in text
    assert "sequence 32: the model has 24 positions (places.weight), not 32" in text and "too long" in text
    assert all(size <= ROWS for turn in found.turns if turn.name == "sequence" for size, _ in turn.points)
    assert "simulated" not in text and "predicted (the sum of its parts)" in text
