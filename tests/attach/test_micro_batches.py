"""A module that is compiled with `micro_batches=` trains with the numbers of plain PyTorch on the whole batch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import autopar
from autopar.errors import NotCut, PlanMismatch
from autopar.plan import Plan
from tests.attach.test_masked import FORMS, Masked, batch
from tests.processes.compare import whole

OF_THE_WHOLE = {  # losses that make something of all rows that is no sum of terms: the operator that does
    "largest": "max.default",
    "over rows": "pow.Tensor_Scalar",
    "spread": "sub.Tensor",
    "logs of what is positive": "div.Tensor",
    "its inverse": "div.Tensor",
    "one of all rows": "_softmax.default",
    "spread over rows": "sub.Tensor",
    "batch norm": "sub.Tensor",
    "values that differ": "add.Tensor",
    "behind each other": "cat.default",
    "at places of two dims": "index.Tensor",
    "counted": "clamp.default",
}


def same(parallel: nn.Module, plain: nn.Module, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in FORMS if name not in OF_THE_WHOLE])
def test_a_loss_is_that_of_the_whole_batch(one: DeviceMesh, name: str, count: int) -> None:
    torch.manual_seed(0)
    plain = Masked(FORMS[name], hides=False).double()
    parallel = autopar.compile(plain, one, micro_batches=count)
    for seed in (1, 2, 3):
        expected, found = plain(*batch(seed)), parallel(*batch(seed))
        (expected * 3).backward()
        (found * 3).backward()
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=0)
        same(parallel, plain)
        for model in (plain, parallel):
            model.zero_grad()
    assert parallel.plan.graph.rounds.count == count


@pytest.mark.parametrize("name", OF_THE_WHOLE)
def test_what_is_made_of_all_rows_is_named(one: DeviceMesh, name: str) -> None:
    parallel = autopar.compile(Masked(FORMS[name], hides=False).double(), one, micro_batches=2)
    with pytest.raises(NotCut, match=rf"test_masked.py.*: {OF_THE_WHOLE[name]} works on the whole batch"):
        parallel(*batch(1))


class Net(nn.Module):
    """Gives its loss, its scores, and the sum of squares of its inputs, which is the same whatever is cut."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(12, 16), nn.Linear(16, 5), nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.last(self.dropout(self.first(x).relu()))
        return {"loss": F.cross_entropy(scores, y), "scores": scores, "norm": x.square().sum()}


def numbers(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 12, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (size,), generator=generator)


def pair(mesh: DeviceMesh, **options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net().double()
    return plain, autopar.compile(copy.deepcopy(plain), mesh, **options)


def test_a_user_may_add_up_gradients_scale_losses_and_clip(one: DeviceMesh) -> None:
    plain, parallel = pair(one, micro_batches=4)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (plain, parallel)]
    for step in range(3):
        for model in (plain, parallel):
            for part in range(2):
                loss = model(*numbers(8, 10 * step + part))["loss"]
                (loss / 2 + 0.1 * loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        same(parallel, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.detach()), theirs.detach(), rtol=1e-8, atol=1e-10)


def test_parameters_may_live_on_the_host(one: DeviceMesh) -> None:
    """Their gradients are added up there. The program could not be written."""
    plain, parallel = pair(one, micro_batches=4, pin={"*": "offload-parameters"})
    for model in (plain, parallel):
        for part in range(2):
            model(*numbers(8, part))["loss"].backward()
    same(parallel, plain)
    assert set(parallel.plan.residence.values()) == {"host"}


@pytest.mark.parametrize(("size", "count"), [(8, 4), (6, 6), (5, 5), (4, 4), (2, 1), (16, 4)])
def test_another_batch_has_as_many_or_as_few_more_as_divide_it(one: DeviceMesh, size: int, count: int) -> None:
    plain, parallel = pair(one, micro_batches=4)
    for rows in (8, size):
        expected, found = plain(*numbers(rows)), parallel(*numbers(rows))
        assert {key: tuple(value.shape) for key, value in found.items()} == {
            key: tuple(value.shape) for key, value in expected.items()
        }
        for key, value in expected.items():
            torch.testing.assert_close(whole(found[key].detach()), value.detach(), rtol=1e-9, atol=1e-12)
        expected["loss"].backward()
        found["loss"].backward()
    same(parallel, plain)
    counts = [prepared.plan.graph.rounds.count for kept in parallel._autopar.programs.values() for prepared in kept]
    assert count in counts


def test_evaluation_takes_the_whole_batch_at_once(one: DeviceMesh) -> None:
    plain, parallel = pair(one, micro_batches=4)
    parallel(*numbers(8))["loss"].backward()
    with torch.no_grad():
        for model in (plain, parallel):
            model.eval()
        torch.testing.assert_close(parallel(*numbers(7))["scores"], plain(*numbers(7))["scores"], rtol=1e-9, atol=0)


def test_backward_comes_once_and_from_the_loss(one: DeviceMesh) -> None:
    _, parallel = pair(one, micro_batches=2)
    found = parallel(*numbers(4))
    found["loss"].backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran a second time"):
        found["loss"].backward()
    with pytest.raises(RuntimeError, match="a gradient arrives for an output beside the loss"):
        parallel(*numbers(4))["scores"].sum().backward()


class LossAndTerms(nn.Module):
    """Gives what its loss is made of beside it, each a scalar with a gradient, as models with routed experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(x).relu()
        main, penalty = self.head(hidden).square().mean(), hidden.pow(2).mean()
        return {"main": main, "loss": main + 0.1 * penalty, "penalty": penalty}


@pytest.mark.parametrize("outputs", ["sharded", "loss"])
def test_what_a_loss_is_made_of_may_come_with_it(one: DeviceMesh, outputs: str) -> None:
    plain = LossAndTerms().double()
    parallel = autopar.compile(plain, one, micro_batches=2, outputs=outputs)
    x = numbers(8)[0].double()
    expected, found = plain(x), parallel(x)
    for key, value in expected.items():
        torch.testing.assert_close(found[key].detach(), value.detach(), rtol=1e-9, atol=0)
    expected["loss"].backward()
    found["loss"].backward()
    same(parallel, plain)
    with pytest.raises(RuntimeError, match="a gradient arrives for an output beside the loss"):
        found = parallel(x)
        (found["loss"] + found["penalty"]).backward()


@pytest.mark.parametrize("outputs", ["sharded", "loss"])
def test_without_micro_batches_each_of_them_may_be_differentiated(one: DeviceMesh, outputs: str) -> None:
    plain = LossAndTerms().double()
    parallel = autopar.compile(plain, one, outputs=outputs)
    x = numbers(8)[0].double()
    for weight in (0.0, 0.5, 0.7):
        for model in (plain, parallel):
            model.zero_grad()
            made = model(x)
            (made["loss"] if not weight else made["loss"] * 2 + weight * made["penalty"] + made["main"]).backward()
        same(parallel, plain)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Halves(Scores):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.half()).float().square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(12, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).square().mean()


def test_what_cannot_be_is_said_in_one_sentence(one: DeviceMesh) -> None:
    x = numbers(8)[0].float()
    with pytest.raises(NotCut, match=r"from one loss that forward returns; .* output 0 .*: return the loss"):
        autopar.compile(Scores(), one, micro_batches=2)(x)
    with pytest.raises(PlanMismatch, match="float16 needs its loss scaled before backward"):
        autopar.compile(Halves().half(), one, micro_batches=2)(x)
    with pytest.raises(NotCut, match=r"F.batch_norm.*: _native_batch_norm.* works on the whole batch at once"):
        autopar.compile(Normed(), one, micro_batches=2)(x)
    with pytest.raises(NotCut, match=r"a batch of 8 cannot be cut into 3 equal micro-batches; .* divides 8"):
        autopar.compile(Net(), one, micro_batches=3)(x, numbers(8)[1])


@pytest.mark.parametrize("wrong", [0, -2, 2.0, True, "many"])
def test_a_number_that_is_none_is_refused(one: DeviceMesh, wrong: object) -> None:
    with pytest.raises(ValueError, match="is no number of micro-batches; give 1 or more, or 'auto'"):
        autopar.compile(Net(), one, micro_batches=wrong)


def test_dropout_is_drawn_anew_for_each(one: DeviceMesh) -> None:
    parallel = autopar.compile(Net(dropout=0.5).double(), one, micro_batches=2)
    x, y = numbers(4)
    scores = parallel(torch.cat([x, x]), torch.cat([y, y]))["scores"]
    assert not torch.allclose(scores[:4], scores[4:])


def test_a_plan_says_how_many_and_is_held_to_it(one: DeviceMesh, tmp_path: Path) -> None:
    plain, parallel = pair(one, micro_batches=4)
    parallel(*numbers(8))["loss"].backward()
    path = tmp_path / "plan.json"
    parallel.plan.save(path)
    assert Plan.load(path) == parallel.plan
    assert "4 micro-batches, one behind the other" in parallel.plan.explain()
    again = autopar.compile(copy.deepcopy(plain), one, plan=path)
    again(*numbers(8))["loss"].backward()
    plain(*numbers(8))["loss"].backward()
    same(again, plain)
    assert again.plan.graph.rounds.count == 4
    with pytest.raises(PlanMismatch, match="micro_batches=2 was asked for, and the plan has 4"):
        autopar.compile(copy.deepcopy(plain), one, plan=path, micro_batches=2)
    with pytest.raises(PlanMismatch, match=r"input \['x'\] float64\[8, 12\], this call passes float64\[16, 12\]"):
        autopar.compile(copy.deepcopy(plain), one, plan=path)(*numbers(16))
    plain.last = nn.Linear(16, 5, bias=False).double()
    with pytest.raises(PlanMismatch, match=r"parameter last\.bias float64\[5\], this model has none of that name"):
        autopar.compile(plain, one, plan=path)(*numbers(8))
    plain = pair(one)[0]
    whole_step = autopar.compile(copy.deepcopy(plain), one)
    whole_step(*numbers(8))
    whole_step.plan.save(path)
    with pytest.raises(PlanMismatch, match="micro_batches=4 was asked for, and the plan has 1"):
        autopar.compile(copy.deepcopy(plain), one, plan=path, micro_batches=4)


class Terms(nn.Module):
    """A loss with a number, a term of weights alone, and the sizes of its rows turned round: the batch is dim 1."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(12, 5), how

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.inner(x)
        match self.how:
            case "weights":
                return F.cross_entropy(scores, y) + 0.1 * self.inner.weight.square().sum() + self.inner.bias.abs().sum()
            case "number":
                return 1 - F.cosine_similarity(scores, scores.detach().roll(1, -1)).mean() + 0.5
            case "mean squared":
                return F.cross_entropy(scores, y) + scores.mean(0).square().sum()
            case "mixed":
                return F.cross_entropy(scores, y) * torch.rand(())
            case "connections":
                return F.cross_entropy(F.linear(x, F.dropout(self.inner.weight, 0.5)), y)
            case _:
                return F.mse_loss(scores.transpose(0, 1)[0].sum(-1), y.double()) + scores.square().mean()


@pytest.mark.parametrize("how", ["weights", "number"])
def test_what_is_alike_in_all_rounds_counts_once(one: DeviceMesh, how: str) -> None:
    torch.manual_seed(0)
    plain = Terms(how).double()
    parallel = autopar.compile(copy.deepcopy(plain), one, micro_batches=4)
    expected, found = plain(*numbers(8)), parallel(*numbers(8))
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=0)
    expected.backward()
    found.backward()
    same(parallel, plain)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("mean squared", r"scores.mean\(0\).*: pow.Tensor_Scalar works on the whole batch"),
        ("mixed", r"torch.rand.*draws numbers once for the whole batch"),
        ("connections", r"F.dropout.*draws numbers once for the whole batch"),
    ],
)
def test_the_line_that_needs_the_whole_batch_is_named(one: DeviceMesh, how: str, told: str) -> None:
    with pytest.raises(NotCut, match=told):
        autopar.compile(Terms(how).double(), one, micro_batches=2)(*numbers(8))


class Crossed(nn.Module):
    """Attention over other positions, sequence first within: gradients of its weights are products over dims that its
    views merge otherwise than they lie. One of its weights is cut in two before any input meets it, and the queries'
    places are looked up for each row of the batch, as in Whisper.
    """

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.memory, self.query, self.how = nn.Linear(7, 16), nn.Linear(7, 16), how
        self.attention, self.last = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 5)
        self.places = nn.Parameter(torch.randn(12, 16))

    def forward(self, memory: Tensor, query: Tensor, y: Tensor) -> Tensor:
        memory = F.gelu(self.memory(memory))
        query = self.query(query) + self.places[torch.arange(query.shape[1]).repeat(len(query), 1)]
        scores = self.last(self.attention(query, memory, memory, need_weights=False)[0].mean(1))
        return F.cross_entropy(scores - scores.max() if self.how == "largest" else scores, y)


def crossed() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(8, 6, 7).double(), torch.randn(8, 10, 7).double(), torch.randint(0, 5, (8,))


def test_attention_over_other_positions_is_cut(one: DeviceMesh) -> None:
    plain, values = Crossed().double(), crossed()
    parallel = autopar.compile(copy.deepcopy(plain), one, micro_batches=4)
    expected, found = plain(*values), parallel(*values)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=0)
    expected.backward()
    found.backward()
    same(parallel, plain)


def test_a_weight_in_pieces_is_not_what_needs_the_whole_batch(one: DeviceMesh) -> None:
    with pytest.raises(NotCut, match=r"scores.max\(\).*: max.default works on the whole batch.*choose micro_batches=1"):
        autopar.compile(Crossed("largest").double(), one, micro_batches=4)(*crossed())


def test_gradients_of_bfloat16_are_added_up_in_float32(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Net().bfloat16()
    x, y = numbers(256)
    exact, at_once = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    parallel = autopar.compile(copy.deepcopy(plain), one, micro_batches=256)
    for model, given in ((exact, x.bfloat16().double()), (at_once, x.bfloat16()), (parallel, x.bfloat16())):
        model(given, y)["loss"].backward()

    def off(model: nn.Module) -> float:
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        return max((whole(mine.grad).double() - theirs.grad).abs().max().item() for mine, theirs in pairs)

    assert off(parallel) < 2 * off(at_once)


def test_evaluation_may_come_first(one: DeviceMesh) -> None:
    plain, parallel = pair(one, micro_batches=4)
    with torch.no_grad():
        torch.testing.assert_close(parallel(*numbers(7))["scores"], plain(*numbers(7))["scores"], rtol=1e-9, atol=0)
    parallel(*numbers(8))["loss"].backward()
    plain(*numbers(8))["loss"].backward()
    same(parallel, plain)
    counts = {prepared.plan.graph.rounds.count for kept in parallel._autopar.programs.values() for prepared in kept}
    assert 4 in counts
