"""What may become of forward values: layers are regions, and nothing runs again that would come out differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ir.attention import ATTENTION
from autopar.ir.graph import Graph, Node
from autopar.ir.work import RANDOM, VIEWS, draws
from autopar.measure.twin import traced
from autopar.rewrite import DROP, OFFLOAD, RECOMPUTE, SAVE, Widened, widened
from autopar.rewrite.expose_choices import looked_at
from autopar.rewrite.regions import regions
from autopar.search.memory_options import checkpointed
from tests.support.families import FAMILIES, Case, _gpt2, family
from tests.support.kernels import packets

LAYERED = {"gpt2": "transformer.h.", "llama": "model.layers.", "opt": "model.decoder.layers.", "vit": "vit.layers."}


def dropping() -> Graph:
    """With dropout in embeddings, attention and both branches of a layer."""
    model, inputs = _gpt2(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.1, n_layer=1)
    return Case(model.train(), inputs).graph


def again_at(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Forward node -> its modes."""
    return {again.origin: again.modes for again in widened(graph).again.values()}


# --- regions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_layers_are_regions(name: str) -> None:
    found = regions(family(name).graph)
    node_of, prefix = family(name).graph.by_name, LAYERED[name]
    assert found.keys() == {n.name for n in node_of.values() if n.phase == "forward" and not n.is_source}
    layers = {f"{prefix}{number}" for number in range(2)}
    assert {layer for layer, _ in found.values() if layer} == layers
    for node, (layer, stretch) in found.items():
        path = node_of[node].module
        assert (layer in layers and stretch == 0) == path.startswith(prefix), node
        assert not layer or path == layer or path.startswith(f"{layer}.")


def test_without_layers_there_are_about_as_many_regions_as_the_root_of_the_products() -> None:
    def build(depth: int) -> nn.Module:
        return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(8, 8), nn.ReLU())))

    for depth in (1, 4, 9, 16):
        found = regions(traced(build(depth), (torch.zeros(4, 8),), {}))
        assert len(set(found.values())) == isqrt(depth)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_chain_leaves_its_region(name: str) -> None:
    """Of all that a value reads when it runs again, nothing that may run again lies elsewhere, but for views."""
    graph = family(name).graph
    region, modes, node_of = regions(graph), again_at(graph), graph.by_name
    for origin, may in modes.items():
        if RECOMPUTE in may and node_of[origin].op not in VIEWS:
            for ref in node_of[origin].operands:
                for below in looked_at(ref, node_of):
                    far = below.name in region and region[below.name] != region[origin]
                    assert not (far and RECOMPUTE in modes.get(below.name, ())), (origin, below.name)


# --- what runs again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, "dropout"])
def test_random_operators_and_readers_of_changed_buffers_never_run_again(name: str) -> None:
    graph = dropping() if name == "dropout" else family(name).graph
    changed, modes = graph.written, again_at(graph)
    never = {n.name for n in graph.nodes if draws(n) or any(ref.name in changed for ref in n.operands)}
    assert all(RECOMPUTE not in modes.get(node, ()) for node in never)
    assert bool(never & modes.keys()) == (name in ("cnn", "queue", "dropout"))


def test_attention_draws_where_it_drops() -> None:
    node = Node("a", ATTENTION, (0, 0, 0, None, True, 1.0, 0.1, False), (), (), "forward")
    assert draws(node) and not draws(replace(node, args=(0, 0, 0, None, True, 1.0, 0.0, False)))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.2),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.2, training=True),
    "dropout of channels": lambda x: functional.dropout1d(x, 0.2),
    "rand": lambda x: x * torch.rand_like(x),
    "normal": lambda x: x * torch.normal(0.0, 1.0, x.shape),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(),
    "poisson": lambda x: x * torch.poisson(torch.ones_like(x)),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel softmax": lambda x: functional.gumbel_softmax(x),
}


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.behind, self.draw = nn.Linear(8, 8), nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.draw(self.before(x))).square().mean()


@pytest.mark.parametrize("what", DRAWS)
def test_what_a_model_draws_is_drawn_once(what: str) -> None:
    graph = traced(Drawing(DRAWS[what]), (torch.zeros(4, 8),), {})
    draws = [node for node in graph.nodes if node.phase == "forward" and not node.is_source and tagged(node.op)]
    assert draws and all(RECOMPUTE not in again_at(graph).get(node.name, ()) for node in draws)


def tagged(op: str) -> bool:
    """Whether torch says that the operator draws numbers."""
    library, name, overload = op.split(".")[:3] if op.count(".") == 2 else ("", "", "")
    found = getattr(getattr(torch.ops.aten, name, None), overload, None) if library == "aten" else None
    return found is not None and torch.Tag.nondeterministic_seeded in found.tags


def test_every_operator_that_torch_calls_random_is_known() -> None:
    """But attention, which draws where its probability of dropout says so, the choice of its kernel, which is a number,
    and recurrent layers and nested tensors, which are not traced as one operator.
    """
    unknown: list[str] = []
    for name in sorted(packets()):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = f"aten.{name}.{overload}"
            returns = getattr(packet, overload)._schema.returns
            writes = any(one.alias_info is not None for one in returns)
            if tagged(op) and not writes and not op.startswith(RANDOM):
                unknown.append(op)
    but = ("attention", "sdp_choice", "rnn", "gru", "lstm", "cudnn_init", "nested")
    assert not [op for op in unknown if not any(part in op for part in but)]


# --- modes -----------------------------------------------------------------------------------------------------------


def reads_of(wide: Widened) -> dict[str, set[str]]:
    """Node that comes back -> who reads it."""
    found: dict[str, set[str]] = {name: set() for name in wide.again}
    for node in wide.graph.nodes:
        for ref in node.operands:
            if ref.name in found:
                found[ref.name].add(node.name)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_what_backward_itself_reads_is_not_dropped(name: str) -> None:
    graph = family(name).graph
    wide = widened(graph)
    for one, readers in reads_of(wide).items():
        again = wide.again[one]
        assert readers, f"{one} comes back for nobody"
        if any(reader not in wide.again for reader in readers):
            assert DROP not in again.modes and again.wanted
        assert again.before in graph.by_name and graph.by_name[again.before].phase == "backward"


@pytest.mark.parametrize(("recompute", "offload"), [(False, False), (True, False), (False, True)], ids=str)
def test_ways_that_are_closed_are_not_among_the_modes(recompute: bool, offload: bool) -> None:
    graph = family("gpt2").graph
    modes = {again.origin: again.modes for again in widened(graph, recompute=recompute, offload=offload).again.values()}
    assert any(OFFLOAD in may for may in modes.values()) == offload
    free = {origin for origin in modes if graph.by_name[origin].op in VIEWS}  # a view takes no time
    assert any(RECOMPUTE in may for origin, may in modes.items() if origin not in free) == recompute


def test_checkpointing_saves_only_what_cannot_run_again() -> None:
    graph, wide = family("gpt2").graph, widened(family("gpt2").graph)
    for again in wide.again.values():
        modes = checkpointed(again, graph.by_name[again.origin])
        assert (RECOMPUTE in modes) == (RECOMPUTE in again.modes)
        assert not (SAVE in modes and RECOMPUTE in modes) and OFFLOAD not in modes
