"""Pipelines on real processes: stages train, are evaluated, clipped, saved and loaded as one process does it."""

from __future__ import annotations

import copy
import os
import unittest
import unittest.mock
from typing import Any

import torch
from torch import nn

import autopar
from autopar.attach.tensors import is_elsewhere
from autopar.errors import NotCut
from tests.processes.compare import loss_of, step_alike, whole
from tests.processes.worker import Ranks
from tests.support.families import IGNORED, family
from tests.support.machines import machine

STEPS = 3
NEAR = 1e-6  # models of transformers make their loss in float32


def mesh_of(ranks: Ranks) -> Any:
    return autopar.init_mesh("cpu", **({"pipe": 2, "data": 2} if ranks.count == 4 else {"pipe": 2}))


def doubled(name: str) -> tuple[nn.Module, dict[str, Any]]:
    case = family(name)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in case.inputs.items()}
    return copy.deepcopy(case.model).double(), inputs


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x - y).square().mean()


def check_a_model_on_meta_gets_its_values_in_its_stages(ranks: Ranks) -> None:
    """As a model that is too large for one device is made: laid out without values, then loaded; then in float64."""
    torch.manual_seed(3)
    plain, x, y = Skipping(), torch.randn(8, 8), torch.randn(8, 8)
    with torch.device("meta"):
        empty = Skipping()
    parallel = autopar.compile(
        empty,
        mesh_of(ranks),
        example_inputs=(x, y),
        micro_batches=2,
        schedule="1f1b",
        hardware=machine(1e10, flops=1e10),
    )
    parallel.to_empty(device="cpu")
    parallel.load_state_dict(plain.state_dict())
    made, wanted = parallel(x, y), plain(x, y)
    made.backward()
    wanted.backward()
    torch.testing.assert_close(whole(made), wanted, rtol=1e-5, atol=1e-7)
    norm, other = (torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (parallel, plain))
    torch.testing.assert_close(whole(norm), other, rtol=1e-5, atol=1e-7)
    assert parallel.double().layers[0].weight.dtype == torch.float64


def check_what_trains_changes_between_calls(ranks: Ranks) -> None:
    """Of parameters that one stage has, all of them know."""
    plain = Blocks().double()
    given = dict(zip("xy", torch.randn(2, 8, 8, dtype=torch.float64), strict=True))
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    for trains, name in ((False, "layers.0.0.bias"), (True, "layers.0.0.bias"), (False, "layers.3.2.weight")):
        for model in (parallel, plain):
            model.zero_grad()
            model.get_parameter(name).requires_grad_(trains)
            model(**given).backward()
        for (told, ours), theirs in zip(parallel.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), told
            if ours.grad is not None:
                torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-10, atol=1e-12)
    parallel.layers[:3].requires_grad_(False)
    with unittest.TestCase().assertRaisesRegex(ValueError, "stage 0 of 2 holds no parameter that this call tra"):
        parallel(**given)


def check_a_small_model(ranks: Ranks) -> None:
    _check_steps(ranks, (("mlp", "auto", None),))


def check_steps_are_those_of_one_process(ranks: Ranks) -> None:
    _check_steps(ranks, (("gpt2", "1f1b", 2), ("t5", "zb-h1", 4)))


def check_other_schedules(ranks: Ranks) -> None:
    _check_steps(ranks, (("t5", "gpipe", 2), ("gpt2", "zb-h2", 4), ("llama", "zb-h1", 4)))


def check_several_stages_on_a_rank(ranks: Ranks) -> None:
    """Tied weights of stages 0 and 3, which zb-v has on one rank and the others on two."""
    cases = (("gpt2", "interleaved", 4), ("t5", "zb-v", 4), ("llama", "interleaved-zb", 4), ("vit", "zb-v", 2))
    _check_steps(ranks, cases)


class Skipping(nn.Module):
    """What the first layer makes is read by the last one, over all cuts; one weight is in the first and the third
    layer, which interleaved has on one rank; and numbers are dropped.
    """

    def __init__(self, p: float = 0.0, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.layers[4].weight = self.layers[0].weight
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x).tanh()
        for layer in self.layers[1:]:
            x = self.dropout(layer(x).tanh())
        return (x + first - y).square().mean()


def take_equal_gradients(parallel: nn.Module, plain: nn.Module, what: str) -> None:
    """They are equal to 1e-10, and gone then."""
    for name, one in plain.named_parameters():
        mine = parallel.get_parameter(name)
        torch.testing.assert_close(whole(mine.grad), one.grad, rtol=1e-10, atol=1e-12, msg=f"{what}: {name}")
        mine.grad = one.grad = None


def check_stages_of_a_rank_hand_over(ranks: Ranks) -> None:
    """To 1e-10 of one process under every schedule with several stages on a rank, with receive buffers that hold NaN
    until something has come; then a smaller batch, which does not go into groups of the ranks.
    """
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    for schedule, stages, count in (
        ("interleaved", 2, 4), ("interleaved", 4, 2), ("zb-v", None, 3), ("zb-v", 2, 4), ("interleaved-zb", 2, 4),
    ):  # fmt: skip
        plain = Skipping().double()
        parallel = autopar.compile(
            copy.deepcopy(plain), mesh_of(ranks), schedule=schedule, stages_per_rank=stages, micro_batches=count,
            memory="4GiB", time_limit_s=10,
        )  # fmt: skip
        for rows in (2 * count * ranks.count, 2 * count * ranks.count, 3 * ranks.count):
            x, y = torch.randn(2, rows, 8, dtype=torch.float64)
            with unittest.mock.patch("autopar.attach.pipe.torch.empty", poisoned):
                loss = parallel(x, y)
            right = plain(x, y)
            loss.backward()
            right.backward()
            torch.testing.assert_close(whole(loss.detach()), right.detach(), rtol=1e-10, atol=1e-12)
            norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in (parallel, plain)]
            torch.testing.assert_close(*norms, rtol=1e-10, atol=0, check_dtype=False)
            take_equal_gradients(parallel, plain, schedule)
        rank_of = parallel.pipeline.schedule.rank_of
        assert len(rank_of) == (stages or 2) * 2 and parallel.pipeline.schedule.name == schedule
        with torch.no_grad():
            torch.testing.assert_close(whole(parallel(x, y)), plain(x, y), rtol=1e-10, atol=1e-12)


def check_stages_of_a_rank_draw(ranks: Ranks) -> None:
    """Dropout: a step with stages on one rank is a step of one seed; another one draws others; both train."""
    parallel = autopar.compile(
        Skipping(0.5).double(), mesh_of(ranks), schedule="zb-v", micro_batches=4, memory="4GiB", time_limit_s=10
    )
    x, y = torch.randn(2, 32, 8, dtype=torch.float64)
    losses = []
    for _ in range(2):
        loss = parallel(x, y)
        loss.backward()
        losses.append(float(whole(loss.detach())))
    assert losses[0] != losses[1]
    norm = torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1e9)
    assert torch.isfinite(norm) and norm > 0


def _check_steps(ranks: Ranks, cases: tuple[tuple[str, str, int | None], ...]) -> None:
    """Losses, clipped norms and parameters after some steps; in each model a tied weight that both stages hold."""
    for name, schedule, count in cases:
        model, inputs = doubled(name)
        plain = copy.deepcopy(model)
        hardware = machine(1e10, flops=1e10)  # on which batches are split and some gradients are partial sums
        parallel = autopar.compile(
            model, mesh_of(ranks), hardware=hardware, schedule=schedule, micro_batches=count, memory="4GiB",
            time_limit_s=10,
        )  # fmt: skip
        train_alike(parallel, plain, inputs, name)
        if ranks.count == 4 and (name, count) == ("gpt2", 2):  # the axis `data` splits a micro-batch of two
            sums = [one for plan in parallel.pipeline.plans for one in plan.deliveries if one is not None and one.once]
            assert sums, f"{name}: no gradient is summed behind all micro-batches"
        held = [one for one in parallel.parameters() if not is_elsewhere(one)]
        assert 0 < len(held) < len([*plain.parameters()]) + 1


def train_alike(parallel: Any, plain: nn.Module, inputs: dict[str, Any], what: str) -> None:
    """Losses and clipped norms of some steps, all that is held behind them, and an evaluation."""
    optimizers = [torch.optim.SGD(one.parameters(), 1e-1, momentum=0.9) for one in (parallel, plain)]
    for _ in range(STEPS):
        step_alike((parallel, plain), optimizers, inputs, NEAR)
    state, right = parallel.full_state_dict(rank0_only=False), plain.state_dict()
    assert state.keys() == right.keys()
    for key, value in state.items():
        assert torch.allclose(value, right[key], rtol=NEAR, atol=1e-8), f"{what}: {key}"
    with torch.no_grad():
        torch.testing.assert_close(loss_of(parallel(**inputs)), loss_of(plain(**inputs)), rtol=NEAR, atol=1e-8)


def check_parameters_are_cast_once_a_step(ranks: Ranks) -> None:
    """In bfloat16 over float32, as a loop of plain PyTorch that casts for every micro-batch and adds up in float32; the
    learning rate is large, so that a cast of the step before would be seen.
    """
    case, count = family("gpt2"), 2
    plain = copy.deepcopy(case.model)
    parallel = autopar.compile(
        copy.deepcopy(plain), mesh_of(ranks), schedule="zb-h1", micro_batches=count, memory="4GiB", time_limit_s=10,
        precision="bf16",
    )  # fmt: skip
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.5) for one in (parallel, plain))
    losses: list[float] = []
    for _ in range(STEPS):
        found = loss_of(parallel(**case.inputs))
        found.backward()
        total = torch.zeros(())
        labels = [int((part[:, 1:] != IGNORED).sum()) for part in case.inputs["labels"].chunk(count)]
        for number, of in enumerate(labels):
            part = {key: value.chunk(count)[number] for key, value in case.inputs.items()}
            cast = {name: value.bfloat16() for name, value in plain.named_parameters()}
            loss = loss_of(torch.func.functional_call(plain, cast, (), part)).float() * (of / sum(labels))
            loss.backward()
            total += loss.detach()
        torch.testing.assert_close(found.detach().float(), total, rtol=4e-3, atol=0)
        for name, one in plain.named_parameters():
            gradient = parallel.get_parameter(name).grad
            if gradient is None:
                continue
            assert gradient.dtype == torch.float32
            off = (whole(gradient) - one.grad).norm() / one.grad.norm()
            assert off < 5e-2, (name, off)  # bfloat16's own is 2e-2
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total.item())
    assert losses[-1] < 0.95 * losses[0], losses
    held = {one.dtype for one in parallel.parameters()}
    assert held == {torch.float32}


def check_a_state_goes_out_and_in_again(ranks: Ranks) -> None:
    model, inputs = doubled("gpt2")
    parallel = autopar.compile(model, mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    first = loss_of(parallel(**inputs)).detach()
    kept = parallel.full_state_dict(rank0_only=False)
    with torch.no_grad():
        for one in parallel.parameters():
            one.mul_(1.5)
    assert abs(float(loss_of(parallel(**inputs)).detach()) - float(first)) > 1e-3
    parallel.load_state_dict(kept)
    torch.testing.assert_close(loss_of(parallel(**inputs)).detach(), first, rtol=1e-12, atol=0)
    plain = copy.deepcopy(family("gpt2").model).double()
    plain.load_state_dict(kept)


def check_evaluation_and_other_batches(ranks: Ranks) -> None:
    """Planned behind the training step: cut where the parameters lie. Before that a loss is wanted."""
    model, inputs = doubled("gpt2")
    plain = copy.deepcopy(model).eval()
    parallel = autopar.compile(model, mesh_of(ranks), micro_batches=2, memory="4GiB", time_limit_s=10)
    with torch.no_grad():
        try:
            parallel(input_ids=inputs["input_ids"])
        except NotCut as error:
            assert "without gradients, gives no loss that one would begin with" in str(error), error
        else:
            raise AssertionError("no stages are cut without a loss")
        torch.testing.assert_close(parallel(**inputs).loss, plain(**inputs).loss, rtol=NEAR, atol=0)
    loss_of(parallel(**inputs)).backward()
    parallel.eval()
    few = {key: value[:2] for key, value in inputs.items()}
    with torch.no_grad():
        torch.testing.assert_close(parallel(**few).loss, plain(**few).loss, rtol=NEAR, atol=0)
        torch.testing.assert_close(whole(parallel(**few).logits), plain(**few).logits, rtol=NEAR, atol=1e-8)
    parallel.train()
    more = {key: torch.cat([value, value.flip(0)]) for key, value in inputs.items()}
    torch.testing.assert_close(loss_of(parallel(**more)), loss_of(plain(**more)), rtol=NEAR, atol=0)


def check_logits_stay_where_nobody_reads_them(ranks: Ranks) -> None:
    """With outputs="loss" a step gives the loss, the same gradients, and evaluation the logits."""
    model, inputs = doubled("gpt2")
    plain = copy.deepcopy(model)
    parallel = autopar.compile(model, mesh_of(ranks), micro_batches=2, outputs="loss", memory="4GiB", time_limit_s=10)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, parallel)]
    for _ in range(2):
        step_alike([parallel, plain], optimizers[::-1], inputs, NEAR)
    assert parallel(**inputs).logits is None
    with torch.no_grad():
        torch.testing.assert_close(whole(parallel(**inputs).logits), plain(**inputs).logits, rtol=NEAR, atol=1e-8)


def check_a_pipeline_is_given_or_kept(ranks: Ranks) -> None:
    """As a value, as a file and from a cache it is the one that was searched for, and nothing is searched again."""
    model, inputs = doubled("gpt2")
    asked = {"memory": "4GiB", "time_limit_s": 10}
    found = autopar.compile(copy.deepcopy(model), mesh_of(ranks), cache=ranks.folder / "plans", **asked)
    first = loss_of(found(**inputs)).detach()
    path, pipeline = ranks.folder / "pipeline.json", found.pipeline
    if ranks.rank == 0:
        pipeline.save(path)
        assert len([*(ranks.folder / "plans").glob("*.pipeline.json")]) == 1
        assert "stage" in pipeline.explain()
    torch.distributed.barrier()
    with unittest.mock.patch("autopar.attach.staging.pipeline_of", side_effect=AssertionError("searched again")):
        for keywords in ({"plan": path}, {"plan": pipeline}, {"cache": ranks.folder / "plans"} | asked):
            again = autopar.compile(copy.deepcopy(model), mesh_of(ranks), **keywords)
            loss = loss_of(again(**inputs))
            loss.backward()
            assert float(loss) == float(first), keywords
            assert again.pipeline.dumps() == pipeline.dumps(), keywords
    with unittest.mock.patch.dict(os.environ, {"AUTOPAR_PROFILES": str(ranks.folder / "profiles")}):
        asked |= {"cache": ranks.folder / "timed", "profile": 20.0, "micro_batches": 2}
        timed = [autopar.compile(copy.deepcopy(model), mesh_of(ranks), **asked) for _ in range(2)]
        losses = [float(loss_of(one(**inputs)).detach()) for one in timed]
    assert losses[0] == losses[1] and abs(losses[0] / float(first) - 1) < NEAR
    assert timed[0].pipeline.dumps() == timed[1].pipeline.dumps()  # the second timed nothing, and found it
    assert any("are priced from measurements" in note for note in timed[0].pipeline.whole.notes)
    if ranks.rank == 0:
        assert len([*(ranks.folder / "timed").glob("*.pipeline.json")]) == 1
    for keywords, sentence in (
        ({"plan": path, "schedule": "gpipe" if pipeline.schedule.name == "1f1b" else "1f1b"}, "schedule="),
        ({"plan": path, "micro_batches": 1}, "micro_batches=1 was asked for"),
        ({"plan": path, "optimizer": "sgd"}, "optimizer='sgd' was asked for"),
        ({"plan": path, "memory": "1KiB"}, "memory='1KiB' allows 1.00 KiB"),
        ({"plan": found.plan}, "the plan has no pipeline stages"),
    ):
        _refused(model, mesh_of(ranks), keywords, sentence)
    flat = autopar.init_mesh("cpu", data=ranks.count)
    _refused(model, flat, {"plan": path}, "has a step in pipeline stages, and what is wanted is a plan without")
    _refused(model, flat, {"plan": pipeline}, "the plan has pipeline stages; give the mesh that it was made for")
    other = copy.deepcopy(model)
    other.lm_head = nn.Linear(other.lm_head.in_features, other.lm_head.out_features, dtype=torch.float64)
    _refused(other, mesh_of(ranks), {"plan": path}, "was made for", inputs)


def _refused(
    model: nn.Module, mesh: Any, keywords: dict[str, Any], sentence: str, inputs: dict[str, Any] | None = None
) -> None:
    try:
        made = autopar.compile(model, mesh, **keywords)
        if inputs is not None:
            made(**inputs)
    except (ValueError, autopar.PlanMismatch) as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(sentence)


def check_what_is_not_built_is_said(ranks: Ranks) -> None:
    model, _ = doubled("mlp")
    for keywords, sentence in (
        ({"schedule": "zb-w"}, "schedule 'zb-w' is not known"),
        ({"schedule": "1f1b", "stages_per_rank": 2}, "1f1b has 1 stage on each rank, and 2 are asked for"),
        ({"schedule": "interleaved", "micro_batches": 3}, "3 is no multiple of 2; give 2 or 4"),
    ):
        _refused(model, mesh_of(ranks), keywords, sentence)
