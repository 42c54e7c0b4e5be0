"""Autocast of a GPU, where there is none: its casts are in the graph, or the model is refused; it is never left out."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar import Plan
from autopar.errors import TraceError
from autopar.ir.graph import Graph
from autopar.ir.precision import told
from autopar.search.__main__ import main
from autopar.trace import capture, graph_of
from autopar.trace.ambient import autocast_as, autocast_as_asked, autocast_state

HAS_CUDA = torch.cuda.is_available()


class Mixed(nn.Module):
    """A product, a norm, a part without autocast that reads dtypes, a loss; in a region of autocast, or not."""

    def __init__(self, region: str = "", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.region, self.dtype = region, dtype
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 12)

    def body(self, x: Tensor, y: Tensor) -> Tensor:
        made = functional.gelu(self.first(x))
        wide = torch.softmax(made, -1, dtype=torch.float32).to(made.dtype)
        with torch.autocast("cuda", enabled=False):
            apart = self.second(self.norm(x)) + wide.float()
        return functional.cross_entropy(self.last(apart * torch.rsqrt(made.float().square().mean(-1, True) + 1)), y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.region, self.dtype) if self.region else contextlib.nullcontext():
            return self.body(x, y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randint(0, 12, (8,))


@contextlib.contextmanager
def autocast_of_cuda(dtype: str = "bfloat16") -> Iterator[None]:
    """torch.autocast switches itself off where there is no CUDA."""
    with autocast_as((("cuda", True, dtype),)):
        yield


def traced(model: nn.Module, device: str = "cuda") -> Graph:
    return graph_of(capture(model, batch(), {}, device_type=device))


def forward_of(graph: Graph) -> list[tuple[str, str]]:
    """(operator, dtype of what it makes) of the forward, views and casts left out."""
    left_out = ("_to_copy", "view", "permute", "share")
    return [
        (name, node.outputs[0].dtype)
        for node in graph.nodes
        if node.phase == "forward" and not node.is_source and node.outputs[0] is not None
        if (name := node.op.split(".")[1]) not in left_out
    ]


BY_CUDA = {  # what https://pytorch.org/docs/stable/amp.html lists for CUDA
    "gelu": {"bfloat16"},  # of a product
    "native_layer_norm": {"float32"},
    "einsum": {"bfloat16", "float32"},  # float32 is the part without
    "rsqrt": {"float32"},
    "_softmax": {"float32"},
    "nll_loss_forward": {"float32"},
    "_log_softmax": {"bfloat16"},  # within cross_entropy, which is not listed itself, as torch calls it there
}


@pytest.mark.parametrize("where", ["around", "inside", "both"])
def test_the_casts_are_those_of_cuda(where: str) -> None:
    model = Mixed(region="" if where == "around" else "cuda")
    with contextlib.nullcontext() if where == "inside" else autocast_of_cuda():
        graph = traced(model)
    made: dict[str, set[str]] = {}
    for name, dtype in forward_of(graph):
        made.setdefault(name, set()).add(dtype)
    assert {name: made[name] for name in BY_CUDA} == BY_CUDA
    assert graph.digest == traced_around().digest, "however it is asked for"
    assert {result.kind for result in graph.results} == {"output", "gradient"}
    of = {n.target: n.outputs[0] for n in graph.nodes if n.op == "parameter"}
    for result in graph.results:
        if result.kind == "gradient" and result.ref is not None:
            assert graph.type_of(result.ref) == of[result.target], "gradients have the dtype of their parameters"


def traced_around() -> Graph:
    with autocast_of_cuda():
        return traced(Mixed())


def test_products_are_rounded_as_they_would_be() -> None:
    graph = traced_around()
    for node in graph.nodes:
        if node.op == "autopar.einsum":
            assert len({graph.type_of(ref).dtype for ref in node.operands}) == 1, "operands of one dtype"


def test_float16_and_no_autocast_are_other_graphs() -> None:
    with autocast_of_cuda("float16"):
        half = traced(Mixed())
    assert ("gelu", "float16") in forward_of(half)
    assert len({half.digest, traced_around().digest, traced(Mixed()).digest}) == 3
    assert told(traced(Mixed())) == "" and "compute in bfloat16" in told(traced_around())


def test_what_trains_is_what_trained() -> None:
    model = Mixed()
    model.first.requires_grad_(False)
    with autocast_of_cuda():
        graph = traced(model)
    trained = {r.target for r in graph.results if r.kind == "gradient" and r.ref is not None}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_autocast_of_another_device_does_nothing() -> None:
    plain = traced(Mixed()).digest
    assert traced(Mixed(region="cpu")).digest == plain, "tensors lie on cuda"
    with autocast_as((("cpu", True, "bfloat16"),)):
        assert traced(Mixed()).digest == plain
    with autocast_of_cuda():
        assert traced(Mixed(), device="cpu").digest == traced(Mixed(), device="cpu").digest
    with autocast_of_cuda():
        on_cpu = traced(Mixed(), device="cpu")
    assert told(on_cpu) == ""


@pytest.mark.skipif(HAS_CUDA, reason="torch then switches nothing off")
def test_it_is_as_asked_only_while_a_model_is_traced() -> None:
    def is_on(device: str, *, enabled: bool = True) -> bool:
        with torch.autocast(device, torch.bfloat16, enabled):
            return torch.is_autocast_enabled(device)

    before = torch.autocast.__init__
    with autocast_as_asked("cuda"):
        assert is_on("cuda") and is_on("cpu") and not is_on("cuda", enabled=False)
    assert torch.autocast.__init__ is before
    with autocast_as_asked("cpu"), pytest.warns(UserWarning, match="Disabling autocast"):
        assert not is_on("cuda")


def test_tracing_leaves_autocast_as_it_is() -> None:
    before = autocast_state()
    with autocast_of_cuda():
        inside = autocast_state()
        traced(Mixed(region="cuda"))
        assert autocast_state() == inside
    assert autocast_state() == before


class Indexing(Mixed):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x[:, :16], y)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="built with CUDA, torch can index such tensors")
def test_what_torch_without_cuda_cannot_do_on_its_tensors_is_refused_with_the_line() -> None:
    wanted = (
        r"autocast is on.* built without cuda at .*test_autocast\.py:\d+ .*x\[:, :16\].* precision=\"bf16\" \(--prec"
    )
    with autocast_of_cuda(), pytest.raises(TraceError, match=wanted):
        traced(Indexing())


REGION = """
import torch
from torch import nn

class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(24, 48)

    {decorator}
    def forward(self, x):
        {inside}
            return self.up(x).square().mean()

def build():
    with torch.device("meta"):
        return Casting(), (torch.empty(8, 24),)
"""
WITH = 'with torch.autocast("cuda", torch.bfloat16):'
DECORATOR = '@torch.autocast("cuda", torch.bfloat16)'


@pytest.mark.parametrize(("decorator", "inside"), [("", WITH), (DECORATOR, "if True:")], ids=["with", "decorator"])
def test_the_search_plans_for_gpus_what_the_model_casts_there(
    decorator: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "casting.py").write_text(REGION.format(decorator=decorator, inside=inside))
    monkeypatch.chdir(tmp_path)
    assert main(["casting.py:build", "--mesh", "a=2", "--hardware", "h100-sxm", "--quiet", "-o", "plan.json"]) == 0
    assert told(Plan.load("plan.json").graph) == "float32 parameters compute in bfloat16"
