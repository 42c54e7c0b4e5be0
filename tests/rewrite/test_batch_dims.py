"""Which dim of an output is the batch, against what models give for half of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.rewrite.batch_dims import Lies, Of, batch_dims
from autopar.trace import capture, graph_of

ROWS, WIDTH = 8, 6


class Made(nn.Module):
    def __init__(self, made: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.made, self.linear, self.norm = made, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.table, self.scale = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> object:
        return self.made(self, x)


ROWWISE: dict[str, tuple[Callable[[nn.Module, Tensor], object], int]] = {
    "a layer": (lambda m, x: m.linear(x), 0),
    "as long as the batch, behind it": (lambda m, x: m.linear(x).transpose(0, 1), 1),
    "rows and times as one": (lambda m, x: m.linear(x).view(-1, WIDTH), 0),
    "means over time": (lambda m, x: m.linear(x).mean(1), 0),
    "in the middle": (lambda m, x: m.linear(x).permute(2, 0, 1), 1),
    "softmax": (lambda m, x: m.linear(x).softmax(-1).argmax(-1), 0),
    "a gate": (lambda m, x: m.scale.exp() * x @ m.table.t(), 0),
    "positions as long as the batch": (
        lambda m, x: (m.linear(x) + m.table[torch.arange(x.shape[1])].expand_as(x)).transpose(0, 1),
        1,
    ),
    "zeros of rows": (lambda m, x: (torch.zeros(x.shape[0], x.shape[1], 1) + x).transpose(0, 1), 1),
    "recurrent, time first": (lambda m, x: m.rnn(x.transpose(0, 1))[0], 1),
    "recurrent, its last state": (lambda m, x: m.rnn(x.transpose(0, 1))[1], 1),
    "recurrent, flattened": (lambda m, x: m.rnn(x.transpose(0, 1))[0].transpose(0, 1).reshape(-1, WIDTH), 0),
    "two parts": (lambda m, x: torch.cat([m.linear(x), x], -1).chunk(2, -1)[1], 0),
}
NO_ROWS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "a table of as many rows": lambda m, x: m.table * 1,
    "a number": lambda m, x: m.scale.exp(),
}
ALL_ROWS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "the mean": lambda m, x: m.linear(x).mean(0),
    "a loss": lambda m, x: m.linear(x).square().mean(),
    "the mean, as long as the batch": lambda m, x: m.linear(x).mean(0),
    "the first row": lambda m, x: m.linear(x)[0],
    "products of columns": lambda m, x: m.linear(x).flatten(0, 1).t() @ x.flatten(0, 1),
    "products of columns of each time": lambda m, x: torch.einsum("bti,btj->ij", m.linear(x), x),
    "times in front of rows, as one": lambda m, x: m.linear(x).transpose(0, 1).reshape(-1, WIDTH),
}


TIMES = {"the mean": 4, "times in front of rows, as one": 4}  # others are as long as the batch


def traced(made: Callable[[nn.Module, Tensor], object], *, times: int = ROWS) -> tuple[Made, Tensor, Graph]:
    torch.manual_seed(0)
    model, x = Made(lambda m, x: (made(m, x), m.linear(x).sum())), torch.randn(ROWS, times, WIDTH)
    return model, x, graph_of(capture(model, (x,), {}))


def lies_in(graph: Graph) -> Lies:
    return batch_dims(graph, {node.name for node in graph.nodes if node.op == "input"}, 2)["0"]


@pytest.mark.parametrize("name", ROWWISE)
def test_rows_lie_where_those_of_parts_do(name: str) -> None:
    """Also where another dim is as long as the batch."""
    made, dim = ROWWISE[name]
    model, x, graph = traced(made)
    assert lies_in(graph) == dim
    parts = [model(half)[0] for half in x.chunk(2)]
    torch.testing.assert_close(torch.cat(parts, dim), model(x)[0])


@pytest.mark.parametrize("name", NO_ROWS)
def test_what_no_row_is_in(name: str) -> None:
    assert lies_in(traced(NO_ROWS[name])[2]) is Of.NO_ROWS


@pytest.mark.parametrize("name", ALL_ROWS)
def test_what_is_of_all_rows(name: str) -> None:
    assert lies_in(traced(ALL_ROWS[name], times=TIMES.get(name, ROWS))[2]) is Of.ALL_ROWS


def test_a_norm_over_the_batch_keeps_rows() -> None:
    assert lies_in(traced(lambda m, x: m.norm(x.flatten(0, 1)).view_as(x))[2]) == 0


def test_each_row_with_each_is_by_rows() -> None:
    """Also behind what changes nothing about that."""
    for after in (torch.exp, lambda x: x.softmax(1), lambda x: x + x.t()):
        made = traced(lambda m, x, after=after: after(m.linear(x).flatten(1) @ x.flatten(1).t()))
        assert lies_in(made[2]) == 0
