"""Lookups in tables: every mode of bags, frequencies, sparse gradients and tables that forward would rescale."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar.errors import TraceError
from tests.processes.compare import LOSS, near, same_gradients, same_steps, sgd

ROWS, WIDTH, CLASSES = 10, 6, 4


class Looked(nn.Module):
    """Rows of a table, one for each id or one for each bag of ids, and a classifier."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.weighted = options.pop("weighted", False)
        self.flat = options.pop("flat", False)
        self.table, self.head = kind(ROWS, WIDTH, **options), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        if isinstance(self.table, nn.Embedding):
            return functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), y.flatten())
        weights = {"per_sample_weights": torch.sigmoid(ids.float())} if self.weighted else {}
        if self.flat:
            starts = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
            weights = {name: value.flatten() for name, value in weights.items()}
            return functional.cross_entropy(self.head(self.table(ids.flatten(), starts, **weights)), y[:, 0])
        return functional.cross_entropy(self.head(self.table(ids, **weights)), y[:, 0])


def batch() -> dict[str, Tensor]:
    """Ids that occur several times, and one that does not."""
    ids = torch.randint(0, ROWS - 1, (4, 6))
    ids[0] = 2
    return {"ids": ids, "y": torch.randint(0, CLASSES, (4, 6))}


TABLES: dict[str, dict[str, Any]] = {
    "frequencies": {"kind": nn.Embedding, "scale_grad_by_freq": True},
    "padding": {"kind": nn.Embedding, "padding_idx": 2},
    "bag sum": {"kind": nn.EmbeddingBag, "mode": "sum"},
    "bag mean": {"kind": nn.EmbeddingBag, "mode": "mean", "padding_idx": 2},
    "bag max": {"kind": nn.EmbeddingBag, "mode": "max"},
    "bag with offsets": {"kind": nn.EmbeddingBag, "mode": "mean", "flat": True},
    "bag with weights": {"kind": nn.EmbeddingBag, "mode": "sum", "weighted": True, "flat": True},
    "bag with frequencies": {"kind": nn.EmbeddingBag, "mode": "mean", "scale_grad_by_freq": True},
}


@pytest.mark.parametrize("case", TABLES)
def test_a_table_trains_with_the_numbers_of_torch(one: DeviceMesh, case: str) -> None:
    plain = Looked(**TABLES[case])
    same_steps(plain, autopar.compile(plain, one), batch(), steps=2)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_gradient_is_dense_with_the_same_numbers_and_a_note(one: DeviceMesh, kind: type[nn.Module]) -> None:
    options = {"mode": "sum"} if kind is nn.EmbeddingBag else {}
    plain, data = Looked(kind, sparse=True, **options), batch()
    dense = Looked(kind, **options)
    dense.load_state_dict(plain.state_dict())
    parallel = autopar.compile(plain, one)
    with pytest.warns(UserWarning, match=r"sparse=True at .*test_embeddings\.py:\d+ .*dense here.*SparseAdam does not"):
        near(parallel(**data), plain(**data), LOSS, "loss")
    same_steps(dense, parallel, data, (sgd(dense.parameters()), sgd(parallel.parameters())), steps=2)
    assert plain.table.sparse and copy.deepcopy(parallel.table.sparse), "the user's flag stays"


class Functional(nn.Module):
    """A table that is a bare parameter, looked up by the functions of torch."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.options = nn.Parameter(torch.randn(ROWS, WIDTH)), options

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.table, **self.options).square().mean()


def test_lookups_by_function_are_as_those_by_module(one: DeviceMesh) -> None:
    plain, ids = Functional(scale_grad_by_freq=True), batch()["ids"]
    parallel = autopar.compile(plain, one)
    near(parallel(ids), plain(ids), LOSS, "loss")
    parallel(ids).backward(), plain(ids).backward()
    same_gradients(plain, parallel)
    with pytest.warns(UserWarning, match="sparse=True"):
        autopar.compile(Functional(sparse=True), one)(ids)


@pytest.mark.parametrize("make", [
    lambda: Functional(max_norm=0.5),
    lambda: Looked(nn.EmbeddingBag, max_norm=0.5),
], ids=["rows", "bags"])  # fmt: skip
def test_a_table_that_forward_rescales_is_refused(one: DeviceMesh, make: Any) -> None:
    plain = make()
    before, data = copy.deepcopy(plain.state_dict()), batch()
    data = {"ids": data["ids"]} if isinstance(plain, Functional) else data
    with pytest.raises(TraceError, match=r"max_norm rescales .*test_embeddings\.py:\d+ .*leave max_norm out"):
        autopar.compile(plain, one)(**data)
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


class Writing(nn.Module):
    """Forward writes to its parameter, also behind torch's back."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = nn.Linear(6, 6), what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "parameter":
            with torch.no_grad():
                self.inner.weight.clamp_(-0.1, 0.1)
        elif self.what == "data":
            self.inner.weight.data.mul_(0.9)
        return self.inner(x).square().sum()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("parameter", r"forward changes parameter inner\.weight in place.*after optimizer\.step\(\)"),
        ("data", r"forward changes parameter inner\.weight in place.*after optimizer\.step\(\)"),
    ],
)
def test_a_forward_that_writes_to_what_is_not_its_own_is_refused(one: DeviceMesh, what: str, told: str) -> None:
    plain, x = Writing(what), torch.randn(3, 6)
    kept = x.clone()
    with pytest.raises(TraceError, match=told):
        autopar.compile(plain, one)(x)
    assert torch.equal(x, kept)
