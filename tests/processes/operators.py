"""Operators and habits that are not in every model: the numbers of torch, or one sentence."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import autopar
from autopar import PlanMismatch
from tests.attach import test_ctc, test_embeddings
from tests.attach.test_autocast import Mixed
from tests.processes.compare import (
    LOSS,
    PARAMETER,
    adamw,
    near,
    same_gradients,
    same_state,
    same_steps,
    sgd,
    splits,
    whole,
)
from tests.processes.errors import refused
from tests.processes.worker import Ranks
from tests.support import packed, recurrent, toy_rules
from tests.support.machines import FAST
from tests.support.transformers import WORDS, Translated, WordModel, batch


def check_recurrent_networks(ranks: Ranks) -> None:
    for case in ("lstm two layers both ways", "gru", "lstm batch first"):
        plain = recurrent.made(case)
        parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, outputs="global")
        same_steps(plain, parallel, recurrent.batch_of(plain), steps=2)
        splits(parallel)
        state = recurrent.batch_of(plain, seed=2)["state"]
        data, wanted, ours = recurrent.batch_of(plain, seed=3), state, state
        for _ in range(2):  # the state of one call goes into the next
            (loss, wanted), (made, ours) = plain(data["x"], data["y"], wanted), parallel(data["x"], data["y"], ours)
            near(made, loss, LOSS, "loss")
            wanted, ours = (
                tuple(part.detach() for part in one) if isinstance(one, tuple) else one.detach()
                for one in (wanted, ours)
            )
        loss.backward(), made.backward()
        same_gradients(plain, parallel)


def check_packed_sequences(ranks: Ranks) -> None:
    for plain in (packed.Packed(nn.LSTM, bidirectional=True, num_layers=2), packed.Packed(nn.GRU), packed.Captions()):
        parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
        same_steps(plain, parallel, packed.batch(), steps=2)
        splits(parallel)


def check_losses_without_alignment(ranks: Ranks) -> None:
    for form in ("padded", "picked"):
        plain = test_ctc.Heard(form)
        same_steps(plain, autopar.compile(plain, ranks.mesh(), hardware=FAST), test_ctc.batch(form), steps=2)


def check_autocast(ranks: Ranks) -> None:
    """Sums over ranks are made in bfloat16 too, which rounds at other places than one product: it may be no further
    from the gradients of float64 than twice what torch's autocast is.
    """
    for region in (None, torch.bfloat16):
        plain = Mixed(region)
        exact, parallel = Mixed().double(), autopar.compile(plain, ranks.mesh(), hardware=FAST)
        exact.load_state_dict(plain.state_dict())
        for _ in range(2):
            x, y = torch.randn(8, 16), torch.randint(0, 12, (8,))
            losses = []
            for model in (exact, plain, parallel):
                model.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=region is None and model is not exact):
                    losses.append(model(x.double() if model is exact else x, y))
                losses[-1].backward()
            near(losses[2], losses[1], 2.0**-8, "loss")
            for name, parameter in exact.named_parameters():
                theirs, ours = (whole(model.get_parameter(name).grad) for model in (plain, parallel))
                off, allowed = ((grad - parameter.grad).abs().max() for grad in (ours, theirs))
                assert off <= 2 * allowed, f"gradient of {name} is off by {off:.3g}, torch's by {allowed:.3g}"
        splits(parallel)
        types = {
            type.dtype for n in parallel.plan.graph.nodes if n.op == "autopar.einsum" for type in n.outputs if type
        }
        assert types == {"bfloat16", "float32"}


def check_tables(ranks: Ranks) -> None:
    """Frequencies are counted over the whole batch; bags, which have no rule, are looked up on every rank."""
    for options in test_embeddings.TABLES.values():
        plain = test_embeddings.Looked(**options)
        parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
        same_steps(plain, parallel, test_embeddings.batch(), steps=2)


def check_transformers_of_torch(ranks: Ranks) -> None:
    plain = Translated("floats")
    parallel, data = autopar.compile(plain, ranks.mesh(), hardware=FAST), batch()
    same_steps(plain, parallel, {"source": data["x"], "target": data["y"], "padded": data["padded"]}, steps=2)
    splits(parallel)
    words = WordModel()
    parallel = autopar.compile(words, ranks.mesh(), hardware=FAST, outputs="global")
    ids = torch.randint(0, WORDS, (8, 4))
    for model in (words, parallel):
        functional.nll_loss(model(ids).view(-1, WORDS), ids.flatten()).backward()
    same_gradients(words, parallel)
    splits(parallel)


def check_gradient_scaling(ranks: Ranks) -> None:
    """GradScaler's loop with parameters in pieces and whole, and every way of torch's optimizers; a step with an
    infinity in the piece of one rank alone is skipped by all. Once in float16, which rounds at other places than torch.
    """
    half = {"half": True}
    for make, options in (
        (sgd, half),
        (sgd, {}),
        (adamw, {"foreach": True}),
        (adamw, {"foreach": False}),
        (adamw, {"fused": True}),
    ):
        for planned_first in (False, True):
            plain, is_half = Mixed(inner_off=False), options is half
            x, y = torch.randn(8, 16), torch.randint(0, 12, (8,))
            example = {"example_inputs": (x, y)} if planned_first else {}
            parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, **example)
            scalers = [torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2) for _ in range(2)]
            optimizers = [make(model.parameters(), **({} if is_half else options)) for model in (parallel, plain)]
            for step in range(4):
                for model, scaler, optimizer in zip((parallel, plain), scalers, optimizers, strict=True):
                    optimizer.zero_grad()
                    with torch.autocast("cpu", dtype=torch.float16, enabled=is_half):
                        loss = model(x, y)
                    scaler.scale(loss).backward()
                    if step == 2:
                        _break_one_entry(model, ranks)
                    if step != 3:
                        scaler.unscale_(optimizer)
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    before = copy.deepcopy(model.state_dict()) if step == 2 else None
                    scaler.step(optimizer)
                    scaler.update()
                    if before is not None:
                        for name, value in model.state_dict().items():
                            assert torch.equal(whole(value), whole(before[name])), f"{name} was changed"
                scales = [scaler.get_scale() for scaler in scalers]
                assert scales == [128.0 if step == 0 else 256.0 if step == 1 else 128.0] * 2, (step, scales)
            same_state(plain, parallel, 1e-3 if is_half else PARAMETER)


def _break_one_entry(model: torch.nn.Module, ranks: Ranks) -> None:
    """The last entry of the gradient of a parameter becomes an infinity; of a split one it lies on the last rank."""
    name = "first.weight"
    gradient = model.get_parameter(name).grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    is_split = isinstance(gradient, DTensor) and any(placement.is_shard() for placement in gradient.placements)
    if not is_split or ranks.rank == ranks.count - 1:
        local.view(-1)[-1] = torch.inf


def check_an_infinity_of_one_rank_reaches_all_whatever_gradient_comes_first(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    autopar.compile(Mixed(), mesh, hardware=FAST)
    for layouts in (([Replicate()], [Shard(0)]), ([Shard(0)], [Replicate()]), ([Shard(0)], [Shard(1)])):
        parameters = [torch.nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, layout)) for layout in layouts]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter) * 3
        if ranks.rank == ranks.count - 1:
            place = next(i for i in (1, 0) if layouts[i][0].is_shard())
            parameters[place].grad.to_local()[0, 0] = torch.nan
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer, scaler = sgd(parameters), torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1.0, "the scale is halved on every rank"
        assert all(torch.equal(whole(one), whole(other)) for one, other in zip(parameters, before, strict=True))


def check_operators_of_a_users_package(ranks: Ranks) -> None:
    """With its rules the operator is split, and its plan is found again by those who give the same rules."""
    torch.manual_seed(3)
    plain, data = toy_rules.Net(), {"x": torch.randn(4, 12, 24), "y": torch.randn(4, 6)}
    cache, path = ranks.folder / "cache", ranks.folder / f"ruled-{ranks.rank}.plan.json"
    ruled = autopar.compile(plain, ranks.mesh(), hardware=FAST, rules=toy_rules.RULES, cache=cache)
    bare = autopar.compile(plain, ranks.mesh(), hardware=FAST, cache=cache)
    for parallel in (ruled, bare):
        same_steps(copy.deepcopy(plain), parallel, data, steps=3)
    assert ruled.plan.choices["scaled_sum"].roles != ("",) and bare.plan.choices["scaled_sum"].roles == ("",)
    assert ruled.plan.rules == (toy_rules.RULES.identity,) and bare.plan.rules == ()
    again = autopar.compile(plain, ranks.mesh(), hardware=FAST, rules=toy_rules.RULES, cache=cache)
    again(**data)
    assert again.plan == ruled.plan and len([*cache.iterdir()]) == 2
    ruled.plan.save(path)
    given = autopar.compile(copy.deepcopy(plain), ranks.mesh(), hardware=FAST, plan=path, rules=toy_rules.RULES)
    same_steps(copy.deepcopy(plain), given, data, steps=2)
    refused(
        PlanMismatch, "rules of toyrules 1.0 .* not given here", lambda: autopar.compile(plain, ranks.mesh(), plan=path)
    )
    held = autopar.compile(plain, ranks.mesh(), plan=ruled.plan)  # a plan that was read elsewhere, without its rules
    refused(PlanMismatch, "rules of toyrules 1.0 .* not given here", lambda: held(**data))
