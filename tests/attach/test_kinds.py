"""What is given to compile: graph modules are models, and what is none is refused in a sentence."""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import PlanMismatch, TraceError
from autopar.trace import capture
from tests.processes.compare import both_backward, near, same_gradients


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        return {"y": self.last(torch.relu(self.norm(self.first(x)))) * scale}


MADE = {
    "traced": lambda x: torch.fx.symbolic_trace(Net()),
    "exported": lambda x: torch.export.export(Net(), (x,)).module(),
    "a part of it": lambda x: nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 8), nn.GELU())), Net8()),
}


class Net8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.last(x)}


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # torch's, of copies of what it exported
@pytest.mark.parametrize("way", MADE)
def test_a_graph_module_trains(one: DeviceMesh, way: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    plain = MADE[way](x)
    parallel = autopar.compile(plain, one)
    for _ in range(2):  # the second one updates what the first one updated: running statistics
        ours, theirs = parallel(x), plain(x)
        near(ours["y"], theirs["y"], 1e-6, way)
    ours["y"].square().sum().backward()
    theirs["y"].square().sum().backward()
    same_gradients(plain, parallel)
    for (name, ours), theirs in zip(parallel.named_buffers(), plain.buffers(), strict=True):
        near(ours, theirs, 1e-6, name)


REFUSED = (
    (lambda: nn.Linear, {}, "no torch.nn.Module but the class Linear; give an instance"),
    (lambda: torch.relu, {}, "no torch.nn.Module but a builtin"),
    (lambda: torch.jit.script(nn.Linear(2, 2)), {}, "compiled by torch.jit"),
    (lambda: nn.Sequential(nn.LazyLinear(2)), {}, "parameter 0.weight has no shape before the model's first call"),
    (lambda: nn.Linear(2, 2), {"device_mesh": "cpu"}, "device_mesh is 'cpu' and no device mesh"),
    (lambda: nn.Linear(2, 2), {"pin": ["0"]}, "pin=.'0'. is no dictionary"),
    (lambda: nn.Linear(2, 2), {"example_inputs": torch.zeros(4, 2)}, r"is a Tensor; give a tuple of arguments: .x,."),
    (lambda: nn.Linear(2, 2), {"example_inputs": {"input": torch.zeros(4, 2)}}, "by name as example_kwargs="),
    (
        lambda: nn.Linear(2, 2),
        {"example_kwargs": (torch.zeros(4, 2),)},
        "example_kwargs= is a tuple; give a dictionary",
    ),
    (lambda: nn.Linear(2, 2), {"time_limit_s": -1}, "time_limit_s=-1 is not a time"),
)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize(("model", "given", "told"), REFUSED)
def test_what_is_none_is_refused(one: DeviceMesh, model: Any, given: dict[str, Any], told: str) -> None:
    mesh = given.get("device_mesh", one)
    with pytest.raises(ValueError, match=told):
        autopar.compile(model(), mesh, **{name: value for name, value in given.items() if name != "device_mesh"})


def test_a_size_is_a_number(one: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="axis data has size '2'; sizes are whole numbers from 1: data=2"):
        autopar.init_mesh("cpu", data="2")  # type: ignore[call-overload]


def test_an_argument_without_values_is_refused_in_a_step(one: DeviceMesh) -> None:
    parallel = autopar.compile(nn.Linear(4, 2), one)
    with pytest.raises(ValueError, match=r"an argument \[3, 4\] lies on meta"):
        parallel(torch.empty(3, 4, device="meta"))


class Adjacent(nn.Module):
    def __init__(self, adjacent: Tensor | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("own", adjacent)

    def forward(self, x: Tensor, adjacent: Tensor | None = None) -> Tensor:
        given = self.own if adjacent is None else adjacent
        return (given @ self.layer(x)).sum()


def with_attribute(kept: Tensor) -> nn.Module:
    made = Adjacent()
    made.kept = kept
    return made


class Heads(nn.Module):
    """As speech models list their heads that align words: for what is beside a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        heads = torch.zeros(3, 4, dtype=torch.bool)
        heads[1:] = True
        self.register_buffer("heads", heads.to_sparse(), persistent=False)
        self.register_buffer("near", torch.eye(3).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * self.heads.shape[1]


def test_sparse_buffers_that_forward_does_not_read(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Heads()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for x in torch.randn(3, 5, 8):
        loss, expected = parallel(x), plain(x)
        torch.testing.assert_close(loss, expected)
        loss.backward(), expected.backward()
    same_gradients(parallel, plain)
    assert parallel.heads.layout is torch.sparse_coo
    assert torch.equal(parallel.heads.indices(), plain.heads.indices())
    other = Heads().state_dict() | {"near": torch.full((3, 3), 0.5).to_sparse()}
    parallel.load_state_dict(other)
    assert torch.equal(parallel.full_state_dict()["near"].to_dense(), torch.full((3, 3), 0.5))
    parallel.load_full_state_dict(plain.state_dict())
    assert torch.equal(parallel.near.to_dense(), torch.eye(3))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_sparse_tensors_are_refused_wherever_they_are(one: DeviceMesh, layout: str) -> None:
    sparse = torch.eye(6).to_sparse() if layout == "sparse_coo" else torch.eye(6).to_sparse_csr()
    x, told = torch.randn(6, 8), f"has the layout {layout}, and a plan splits dense tensors: pass it dense"
    with pytest.raises(PlanMismatch, match=rf"argument \['adjacent'\] {told}"):
        autopar.compile(Adjacent(), one)(x, sparse)
    with pytest.raises(TraceError, match=f"reads the buffer own at .*, whose layout is {layout}, .*register it dense"):
        autopar.compile(Adjacent(sparse), one)(x)
    with pytest.raises(PlanMismatch, match=f"kept of the model {told}"):
        autopar.compile(with_attribute(sparse), one)
    with pytest.raises(PlanMismatch, match=rf"argument \[1\] {told}"):
        capture(Adjacent(), (x, sparse), {})


def test_optimizers_are_there_by_the_name_that_texts_give() -> None:
    assert autopar.optim.Whole.__module__ == "autopar.attach.whole"


class Tree:
    """Of sentences, as recursive networks have it."""

    def __init__(self, x: Tensor, *children: Tree) -> None:
        self.x, self.children = x, [*children]


class Parented(Tree):
    def __init__(self, x: Tensor, *children: Parented) -> None:
        super().__init__(x, *children)
        self.parent: Parented | None = None
        for child in children:
            child.parent = self


@dataclass
class Linked:
    x: Tensor
    children: list[Linked]
    parent: Linked | None = None


class Watched(Tree):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Lone(Tree):
    """None that has been an argument."""


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, tree: Any) -> Tensor:
        return self.of(tree).square().mean()

    def of(self, tree: Any) -> Tensor:
        return torch.tanh(self.layer(tree.x + sum(map(self.of, tree.children))))


def test_trees_of_any_depth_are_arguments(one: DeviceMesh) -> None:
    def tree(depth: int) -> Tree:
        return Tree(torch.randn(3), *(tree(depth - 1) for _ in range(1 + depth % 2))) if depth else Tree(torch.randn(3))

    torch.manual_seed(0)
    plain = Summed()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for depth in (6, 2):
        given = tree(depth)
        both_backward(plain, parallel, given)
        same_gradients(plain, parallel)


def test_why_an_object_is_no_argument_is_told(one: DeviceMesh) -> None:
    parallel = autopar.compile(Summed(), one)
    child = Linked(torch.randn(3), [])
    child.parent = Linked(torch.randn(3), [child])
    told = {
        r"it holds a Parented that leads to itself": Parented(torch.randn(3), Parented(torch.randn(3))),
        r"an argument holds a Linked that leads to itself .*: pass it without that link": child.parent,
        r"it holds a Watched, whose class has its own way to get or set": Lone(torch.randn(3), Watched(torch.randn(3))),
        r"is a Watched, which .* \(its class has its own way to get or set": Watched(torch.randn(3)),
    }
    for match, given in told.items():
        with pytest.raises(ValueError, match=match):
            parallel(given)


def test_namespaces_are_arguments_that_forward_may_write_to(one: DeviceMesh) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, batch: types.SimpleNamespace) -> types.SimpleNamespace:
            batch.hidden = self.layer(batch.x) * batch.inner.scale
            del batch.inner
            return types.SimpleNamespace(loss=batch.hidden.square().mean())

    plain = Reads()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for scale in (2.0, 2.0, 3.0):
        x = torch.randn(2, 3)
        batches = [types.SimpleNamespace(x=x, inner=types.SimpleNamespace(scale=scale)) for _ in range(2)]
        found = [model(batch) for model, batch in zip((plain, parallel), batches, strict=True)]
        assert all([*vars(batch)] == ["x", "hidden"] for batch in batches)
        near(batches[1].hidden, batches[0].hidden, 1e-6, "hidden")
        plain.zero_grad(), parallel.zero_grad()
        [one.loss.backward() for one in found]
        same_gradients(plain, parallel)
