"""Ulysses falls out: sequence-split q, k, v come to a head-split attention by all-to-all, and its result goes back."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ir.layout import Shard
from autopar.trace import capture, lower, normalise
from tests.support.check import mesh_of
from tests.support.lockstep import run_all
from tests.support.machines import WIRES
from tests.support.plans import PlanSampler, Wish, gives
from tests.support.traffic import comms, received

BATCH, HEADS, SEQUENCE, WIDTH = 2, 8, 12, 6
SEQ, HEAD = Shard(2), Shard(1)


class Attention(nn.Module):
    """q, k and v are parameters, so that their gradients come out."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        shape = (BATCH, HEADS, SEQUENCE, WIDTH), (BATCH, kv_heads, SEQUENCE, WIDTH)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(shape[i]).double()) for i in (0, 1, 1))

    def forward(self) -> Tensor:
        return functional.scaled_dot_product_attention(self.q, self.spread(self.k), self.spread(self.v), is_causal=True)

    def spread(self, x: Tensor) -> Tensor:
        """Each key or value head for its group of query heads, as transformers writes it."""
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, HEADS // h, s, d).reshape(b, HEADS, s, d)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kv_heads", [8, 4])
def test_sequence_to_heads_and_back(ranks: int, kv_heads: int) -> None:
    """Forward 2 (g-1)/g^2 (E + Ekv), with E elements of q and Ekv of k."""
    module = Attention(kv_heads)
    graph = normalise(lower(capture(module, (), {})))
    core = next(n.name for n in graph.nodes if "attention" in n.op and n.phase == "forward")
    wishes: dict[str, Wish] = {name: gives((SEQ,)) for name in ("q", "k", "v", "output[0]")}
    wishes[core] = lambda strategy: strategy.gives[0] == (HEAD,)
    plan = PlanSampler(graph, mesh_of(ranks), WIRES, optimizer="none").best(wishes)
    forward = comms(plan, "forward")
    assert {comm.collective for comm in forward} == {"all_to_all"} and len(forward) == 4
    elements = BATCH * SEQUENCE * WIDTH * (HEADS + kv_heads)
    assert received(forward) == 2 * (ranks - 1) * elements * 8 // ranks**2
    tangent = next(node.name for node in graph.nodes if node.op == "tangent")
    weights = torch.randn(BATCH, HEADS, SEQUENCE, WIDTH).double()
    values: dict[str, Tensor] = {name: p.detach() for name, p in module.named_parameters()} | {tangent: weights}
    ran, traffic = run_all(plan, values)
    assert traffic == plan.comm_bytes
    wanted = module()
    wanted.backward(weights)
    pairs = {("output", "0"): wanted, **{("gradient", n): p.grad for n, p in module.named_parameters()}}
    for key, value in pairs.items():
        ours = ran.results[key]
        assert ours is not None and value is not None
        assert (ours - value).abs().max() <= 1e-10 * value.abs().max(), key
