"""Attention is one operator in every graph, whatever it was written as, with the numbers that it had."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import TraceError
from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD, has_bias
from autopar.ir.graph import Graph, Node
from autopar.trace import capture, graph_of
from tests.support.check import difference, mesh_of
from tests.support.families import FAMILIES, Case, family
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler

sdpa = functional.scaled_dot_product_attention
Asked = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attentions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == ATTENTION]


class Model(nn.Module):
    """q, k, v and a mask from parameters, and a loss that sees every entry differently."""

    def __init__(self, ask: Asked, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.ask = ask
        self.q, self.k, self.v, self.mask = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        with torch.no_grad():
            made = ask(self.q, self.k, self.v, self.mask)
        self.register_buffer("weights", torch.randn(made.shape))

    def forward(self) -> Tensor:
        return (self.ask(self.q, self.k, self.v, self.mask) * self.weights).sum()


Q, KV, MASK = (2, 4, 6, 8), (2, 4, 10, 8), (2, 1, 6, 10)
# what is asked, the shapes of q, k, v and the mask, how many operators it is: 0 where it is taken apart
WRITTEN: dict[str, tuple[Asked, tuple[tuple[int, ...], ...], int]] = {
    "four dims": (lambda q, k, v, m: sdpa(q, k, v), (Q, KV, KV, ()), 1),
    "another scale": (lambda q, k, v, m: sdpa(q, k, v, scale=0.7), (Q, KV, KV, ()), 1),
    "causal, oblong": (lambda q, k, v, m: sdpa(q, k, v, is_causal=True), (Q, KV, KV, ()), 1),
    "three dims": (lambda q, k, v, m: sdpa(q, k, v), ((4, 6, 8), (4, 10, 8), (4, 10, 5), ()), 1),
    "two dims": (lambda q, k, v, m: sdpa(q, k, v), ((6, 8), (10, 8), (10, 8), ()), 1),
    "grouped": (lambda q, k, v, m: sdpa(q, k, v, enable_gqa=True), (Q, (2, 2, 10, 8), (2, 2, 10, 8), ()), 1),
    "one batch of keys": (lambda q, k, v, m: sdpa(q, k, v), (Q, (1, 4, 10, 8), (1, 1, 10, 8), ()), 1),
    "a trained mask": (lambda q, k, v, m: sdpa(q, k, v, m), (Q, KV, KV, MASK), 1),
    "a mask of two dims": (lambda q, k, v, m: sdpa(q, k, v, m), (Q, KV, KV, (6, 10)), 1),
    "a mask of three": (lambda q, k, v, m: sdpa(q, k, v, m), ((4, 6, 8), (4, 10, 8), (4, 10, 8), (4, 6, 10)), 1),
    "a boolean mask": (lambda q, k, v, m: sdpa(q, k, v, m > -1.5), (Q, KV, KV, MASK), 1),
    "a mask that hides a row": (lambda q, k, v, m: sdpa(q, k, v, _hiding(m)), (Q, KV, KV, MASK), 1),
    "two that share a mask": (lambda q, k, v, m: sdpa(q, sdpa(k, k, k, m > 0), v), (Q, Q, Q, (6, 6)), 2),
    "one kv head for all": (lambda q, k, v, m: sdpa(q, k, v, m), (Q, (2, 1, 10, 8), (2, 1, 10, 8), MASK), 1),
    "a row hidden by a number": (lambda q, k, v, m: sdpa(q, k, v, _far(m)), (Q, KV, (2, 4, 10, 5), MASK), 1),
    "a hidden row, one kv head": (
        lambda q, k, v, m: sdpa(q, k, v, _far(m.detach())),
        (Q, (2, 1, 10, 8), (2, 1, 10, 8), MASK),
        1,
    ),
    "values by a view": (lambda q, k, v, m: sdpa(q, k, v).view(2, 4, -1), (Q, KV, (2, 4, 10, 5), ()), 1),
    "keys of three dims": (lambda q, k, v, m: sdpa(q, k, v), (Q, (4, 10, 8), (4, 10, 8), ()), 0),
    "queries of three dims": (lambda q, k, v, m: sdpa(q, k, v), ((4, 6, 8), KV, KV, ()), 0),
    "three dims, grouped": (
        lambda q, k, v, m: sdpa(q, k, v, enable_gqa=True),
        ((4, 6, 8), (2, 10, 8), (2, 10, 8), ()),
        0,
    ),
    "other heads in values": (
        lambda q, k, v, m: sdpa(q, k, v, enable_gqa=True),
        (Q, (2, 2, 10, 8), (2, 4, 10, 8), ()),
        0,
    ),
    "five dims": (lambda q, k, v, m: sdpa(q, k, v), ((2, 3, 2, 6, 8), (2, 3, 2, 5, 8), (2, 3, 2, 5, 8), ()), 0),
}


def _far(mask: Tensor) -> Tensor:
    return mask.index_fill(2, torch.tensor([2]), -1e9)


def _hiding(mask: Tensor) -> Tensor:
    rows = torch.arange(6).view(1, 1, 6, 1)
    return (mask > -1.5) & (rows != 2)


@pytest.mark.parametrize("what", WRITTEN)
def test_numbers_and_gradients_are_those_of_the_model(what: str) -> None:
    """On one rank and on any legal plan of two."""
    torch.manual_seed(sum(map(ord, what)))
    ask, shapes, count = WRITTEN[what]
    case = Case(Model(ask, *shapes), {})
    assert len(attentions(case.graph)) == count
    assert not any("scaled_dot_product" in node.op for node in case.graph.nodes)
    for sizes, seed in (((1,), 0), ((2,), 1), ((2,), 2)):
        off, where = difference(PlanSampler(case.wide_graph, mesh_of(*sizes)).draw(seed), case)
        assert off <= 1e-9, where


class Dropped(nn.Module):
    """Values are unit vectors, so that the result shows which probabilities were kept."""

    def __init__(self, kv_heads: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k = nn.Parameter(torch.randn(4, 4, 12, 8)), nn.Parameter(torch.randn(4, kv_heads, 12, 8))
        self.v = nn.Parameter(torch.eye(12).expand(4, kv_heads, -1, -1).clone())
        self.register_buffer("weights", torch.randn(4, 4, 12, 12))

    def forward(self) -> tuple[Tensor, Tensor]:
        out = sdpa(self.q, self.k, self.v, dropout_p=0.25, is_causal=self.causal, enable_gqa=True)
        return (out * self.weights).sum(), out


@pytest.mark.parametrize("sizes", [(1,), (2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize(("kv_heads", "causal"), [(4, True), (2, False)])
def test_any_legal_plan_drops_in_backward_what_it_dropped_in_forward(
    kv_heads: int, causal: bool, sizes: tuple[int, ...]
) -> None:
    case = Case(Dropped(kv_heads, causal), {})
    sampler, split = PlanSampler(case.wide_graph, mesh_of(*sizes)), set[tuple[str, ...]]()
    for seed in range(12):
        plan = sampler.draw(seed)
        ran, _ = run_all(plan, case.values(plan.graph), seed)
        one, other = (plan.choices[n.name] for n in plan.graph.nodes if n.op in (ATTENTION, ATTENTION_BACKWARD))
        assert one.gives[2] == other.takes[-1], "the state of the random numbers was moved"
        split.add(one.roles)
        out = ran.results["output", "1"]
        assert out is not None
        leaves = [x.detach().double().requires_grad_() for x in (case.model.q, case.model.k, case.model.v)]
        group = 4 // kv_heads
        scores = leaves[0] @ leaves[1].repeat_interleave(group, 1).transpose(-1, -2) / 8**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
        wanted = (scores.softmax(-1) * (out != 0) / 0.75) @ leaves[2].repeat_interleave(group, 1)
        assert torch.allclose(out, wanted, atol=1e-12)
        gradients = torch.autograd.grad((wanted * case.model.weights.double()).sum(), leaves)
        for name, gradient in zip("qkv", gradients, strict=True):
            ours = ran.results["gradient", name]
            assert ours is not None and torch.allclose(ours, gradient, atol=1e-10), (name, plan.choices)
    assert len(split) > (1 if len(sizes) == 1 and sizes[0] > 1 else 0)


def test_pieces_draw_numbers_of_their_own() -> None:
    case = Case(Dropped(4, False), {})
    with torch.no_grad():
        case.model.q.zero_(), case.model.k.zero_()
    plan = PlanSampler(case.graph, mesh_of(2)).best(
        {n.name: lambda s: s.roles == ("h",) for n in case.graph.nodes if n.op == ATTENTION}
    )
    kept = run_all(plan, case.values(plan.graph), 3)[0].results["output", "1"] != 0
    agree = (kept[:, :2] == kept[:, 2:]).float().mean()
    assert abs(agree - (0.75**2 + 0.25**2)) < 0.1


# --- masks of transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "vit", "t5"])
def test_masks_that_say_causal_or_everything_are_left_out(name: str) -> None:
    found = attentions(family(name).graph)
    assert found
    causal = [node.args[4] for node in found]
    match name:
        case "gpt2" | "llama" | "opt":
            assert all(causal) and not any(map(has_bias, found))
        case "bert" | "vit":
            assert not any(causal) and not any(map(has_bias, found))
        case _:  # positions that are learnt are added to the scores, and what is causal stands in them
            assert not any(causal) and all(map(has_bias, found))
    heads = {family(name).graph.type_of(node.args[1]).shape[1] for node in found}
    assert heads == {2 if name == "llama" else 4}  # as many as the model has


def llama(**changes: Any) -> nn.Module:
    sizes = {
        "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "use_cache": False,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes)))


def _text(**more: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(64, (4, 12))
    return {"input_ids": ids, "labels": ids} | more


def test_a_mask_that_is_an_argument_stays_and_is_told_of() -> None:
    padding = torch.ones(4, 12, dtype=torch.long)
    padding[1, :5] = padding[3, :2] = 0
    for given, told in (
        ({"attention_mask": padding}, "a padding mask (attention_mask) reaches attention"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]).expand(4, -1)}, "packed sequences"),
    ):
        case = Case(llama(), _text(**given))
        assert [note for note in case.captured.notes if told in note and "12 x 12" in note]
        assert all(has_bias(node) and not node.args[4] for node in attentions(case.graph))
        off, where = difference(PlanSampler(case.wide_graph, mesh_of(2)).draw(3), case)
        assert off <= 1e-9, where


@pytest.mark.parametrize(("window", "is_needed"), [(6, True), (64, False)])
def test_a_window_is_a_mask_where_it_hides_something(window: int, is_needed: bool) -> None:
    config = transformers.MistralConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False, sliding_window=window,
    )  # fmt: skip
    case = Case(transformers.MistralForCausalLM(config), _text())
    assert [has_bias(node) for node in attentions(case.graph)] == [is_needed]
    off, where = difference(PlanSampler(case.wide_graph, mesh_of(2)).draw(1), case)
    assert off <= 1e-9, where


def _edited(edit: Any) -> nn.Module:
    class Edited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, position_ids=edit(torch.arange(12)[None]), labels=ids).loss

    return Edited()


def _in_place(positions: Tensor) -> Tensor:
    positions[:, 5:] -= 5
    return positions


def _through_a_view(positions: Tensor) -> Tensor:
    positions[:, 5:].sub_(5)
    return positions


@pytest.mark.parametrize(
    ("edit", "packed"),
    [
        (_in_place, True),
        (_through_a_view, True),
        (lambda p: p.remainder_(5), True),
        (lambda p: torch.remainder(p, 5, out=p), True),
        (lambda p: p.masked_fill_(p > 6, 3), True),
        (lambda p: p.to(torch.bool).long(), True),
        (lambda p: p % 5, True),
        (lambda p: p + 3, False),
        (lambda p: p.view(-1).to(torch.int32).unsqueeze(0).long(), False),
        (lambda p: p.repeat(4, 1), False),
    ],
)
def test_positions_are_those_that_the_model_uses(edit: Any, packed: bool) -> None:
    case = Case(_edited(edit), {"ids": torch.randint(64, (4, 12))})
    assert [has_bias(node) for node in attentions(case.graph)] == [packed]
    assert any("packed sequences" in note for note in case.captured.notes) == packed
    off, where = difference(PlanSampler(case.wide_graph, mesh_of(2)).draw(3), case)
    assert off <= 1e-9, where


@pytest.mark.parametrize(
    ("config", "argument", "packed"), [(True, None, False), (True, False, True), (False, None, True)]
)
def test_packed_sequences_are_looked_for_where_transformers_does(config: bool, argument: Any, packed: bool) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]).expand(4, -1)
    given = {"position_ids": positions} | ({} if argument is None else {"use_cache": argument})
    model = llama(use_cache=config)
    case = Case(model, _text(**given))
    assert [has_bias(node) for node in attentions(case.graph)] == [packed]
    assert any("looks for no packed sequences" in note for note in case.captured.notes) == (not packed)
    plain = model(**case.inputs).loss
    ran, _ = run_all(PlanSampler(case.graph, mesh_of(1)).draw(0), case.values(case.graph))
    ours = ran.results["output", "0"]
    assert ours is not None and abs(ours - plain) < 1e-5


@pytest.mark.parametrize(("config", "argument"), [(True, {}), (False, {"use_cache": True})])
def test_a_cache_that_is_asked_for_is_left_out_and_told(config: bool, argument: dict[str, Any]) -> None:
    captured = Case(llama(use_cache=config), _text(**argument)).captured
    assert [note for note in captured.notes if "cache" in note.lower() and "is left out: a training step" in note]


def test_a_mask_function_of_the_user_is_asked() -> None:
    masking = sys.modules["transformers.masking_utils"]
    plain = masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def without_the_first(*args: Any, **given: Any) -> Tensor:
        mask = plain(*args, **(given | {"allow_is_causal_skip": False})).clone()
        mask[..., 0] = torch.eye(mask.shape[-1], dtype=torch.bool)[0]
        return mask

    masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = without_the_first
    try:
        assert [has_bias(node) for node in attentions(graph_of(capture(llama(), (), _text())))] == [True]
    finally:
        del masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def test_a_mask_of_float32_beside_halves_stays_one() -> None:
    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.randn(2, 4, 6, 8).bfloat16())

        def forward(self, mask: Tensor) -> Tensor:
            return sdpa(self.q, self.q, self.q, mask).float().square().sum()

    mask = torch.zeros(6, 6).index_fill(0, torch.tensor([2]), torch.finfo(torch.float32).min)
    case = Case(Far(), {"mask": mask})
    plan = PlanSampler(case.graph, mesh_of(1)).draw(0)
    off, where = difference(plan, case)
    assert off <= 2**-6, where


def test_a_chance_that_is_none_is_refused() -> None:
    class Wrong(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return sdpa(q, q, q, dropout_p=1.5)

    with pytest.raises(TraceError, match=r"has to be between 0 and 1, but got 1\.5"):
        capture(Wrong(), (torch.randn(2, 4, 6, 8),), {})


def test_transformers_is_left_as_it_was() -> None:
    masking = importlib.import_module("transformers.masking_utils")
    before = masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], masking.find_packed_sequence_indices
    capture(llama(), (), _text())
    with pytest.raises(TraceError):
        capture(llama(), (), {"inputs_embeds": torch.randn(4, 12, 7)})  # of no such width
    assert before == (masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], masking.find_packed_sequence_indices)
    assert not masking.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping


def test_autocast_casts_attention() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.randn(2, 4, 6, 8))

        def forward(self, mask: Tensor) -> Tensor:
            return sdpa(self.q, self.q, self.q, mask).float().sum()

    with torch.autocast("cpu", torch.bfloat16):
        graph = graph_of(capture(Cast(), (torch.randn(6, 6),), {}))
    (node,) = attentions(graph)
    assert {graph.type_of(ref).dtype for ref in node.operands} == {"bfloat16"}
    assert node.outputs[0] is not None and node.outputs[0].dtype == "bfloat16"
    assert node.outputs[1] is not None and node.outputs[1].dtype == "float32"


def test_all_families_have_it_in_one_piece() -> None:
    for name in sorted(FAMILIES.keys() - {"forces"}):  # of which there are second derivatives
        ops = {node.op for node in family(name).graph.nodes}
        assert not any("scaled_dot_product" in op or "safe_softmax" in op for op in ops), name
