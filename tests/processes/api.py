"""What a user does with a parallel module, on small models."""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

import autopar
from autopar.emit.seeded import seeds
from autopar.search import Request, search
from tests.processes.compare import LOSS, adamw, near, same_gradients, same_state, same_steps, sgd, splits, whole
from tests.processes.models import BATCH, WIDTH, Drop, Logits, Net, Several, batch, net
from tests.processes.worker import Ranks
from tests.support.machines import FAST

FULL = StateDictOptions(full_state_dict=True)
FROM_ZERO = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

# --- training --------------------------------------------------------------------------------------------------------


def check_every_optimizer(ranks: Ranks) -> None:
    """Made before the first call, when parameters have no layout yet, or after; with every implementation torch has."""
    for make, options in ((sgd, {}), (adamw, {"foreach": True}), (adamw, {"fused": True}), (adamw, {"foreach": False})):
        for early in (True, False):
            plain = net()
            parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
            if not early:
                parallel(**batch())
                plain(**batch())
            optimizers = make(plain.parameters(), **options), make(parallel.parameters(), **options)
            same_steps(plain, parallel, batch(), optimizers, steps=3)
            splits(parallel)


def check_accumulation(ranks: Ranks) -> None:
    plain = net()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, example_kwargs=batch())
    optimizers = adamw(plain.parameters()), adamw(parallel.parameters())
    for model, optimizer in zip((plain, parallel), optimizers, strict=True):
        for seed in (1, 2):
            (model(**batch(seed)) / 2).backward()
        optimizer.step()
    same_gradients(plain, parallel)
    same_state(plain, parallel)
    parallel.zero_grad()
    assert all(parameter.grad is None for parameter in parallel.parameters())
    first, second = parallel(**batch(3)), parallel(**batch(4))  # two forwards before their backwards
    (first + 2 * second).backward()
    plain.zero_grad()
    (plain(**batch(3)) + 2 * plain(**batch(4))).backward()
    same_gradients(plain, parallel)


def check_evaluation(ranks: Ranks) -> None:
    """Evaluation uses the running statistics, with and without gradients; training goes on afterwards."""
    plain = net()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
    with torch.no_grad():  # before any training step, and in train mode
        near(parallel(**batch(7)), plain(**batch(7)), LOSS, "loss without gradients")
        assert not parallel(**batch(7)).requires_grad
        plain(**batch(7))
    same_state(plain, parallel)
    optimizers = adamw(plain.parameters()), adamw(parallel.parameters())
    same_steps(plain, parallel, batch(), optimizers, steps=2)
    plain.eval(), parallel.eval()
    before = copy.deepcopy(plain.state_dict())
    with torch.no_grad():
        near(parallel(**batch(2)), plain(**batch(2)), LOSS, "loss of eval mode")
    with torch.inference_mode():
        near(parallel(**batch(2)).clone(), plain(**batch(2)), LOSS, "loss of inference mode")
    near(parallel(**batch(2)), plain(**batch(2)), LOSS, "loss of eval mode with gradients")
    parallel(**batch(2)).backward(), plain(**batch(2)).backward()
    same_gradients(plain, parallel)
    for name, value in before.items():
        near(parallel.state_dict()[name], value, 1e-4, f"{name} after evaluation", 1e-5)
    plain.train(), parallel.train()
    plain.zero_grad(), parallel.zero_grad()
    same_steps(plain, parallel, batch(), optimizers, steps=2)


def check_dropout(ranks: Ranks) -> None:
    mesh, x = ranks.mesh(), torch.randn(64, 64)
    drop = Drop()
    parallel = autopar.compile(drop, mesh, hardware=FAST, outputs="global")
    parallel.manual_seed(3)
    first = parallel(x)
    parallel.manual_seed(3)
    assert torch.equal(first, parallel(x)), "the same seed gives the same mask"
    second = parallel(x)
    assert not torch.equal(first, second)
    kept = first != 0
    assert abs(kept.float().mean().item() - 0.5) < 0.05
    assert abs(((first != 0) & (second != 0)).float().mean().item() - 0.25) < 0.05, "masks of two calls are independent"
    near(first[kept], (2 * drop.inner(x))[kept], 1e-5, "what is kept is scaled up")
    halves = kept.chunk(ranks.count, 0), kept.chunk(ranks.count, 1)
    assert not any(torch.equal(parts[0], parts[1]) for parts in halves), "shards draw masks of their own"
    parallel.eval()
    near(parallel(x), drop.inner(x), 1e-5, "no dropout in eval mode")
    # One row and odd sizes: nothing can be split, so the mask is the one that a single device draws from its seed.
    odd = Drop(width=7)
    whole_plan = autopar.compile(odd, mesh, hardware=FAST, outputs="global")
    x = torch.randn(5, 7)
    torch.manual_seed(int(seeds(4, 0, (0,))))
    wanted = odd(x)
    whole_plan.manual_seed(4)
    assert torch.equal(whole_plan(x), wanted), "replicated dropout is bitwise that of one device"


# --- values ----------------------------------------------------------------------------------------------------------


def check_values_of_rank_zero_win(ranks: Ranks) -> None:
    plain = net(seed=0)
    parallel = autopar.compile(net(seed=ranks.rank), ranks.mesh(), hardware=FAST)
    with torch.no_grad():
        for buffer in parallel.buffers():
            buffer.add_(ranks.rank)
    same_steps(plain, parallel, batch(), steps=2)


def check_the_user_model_stays(ranks: Ranks) -> None:
    plain = net()
    before, kinds = copy.deepcopy(plain.state_dict()), [type(module) for module in plain.modules()]
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
    optimizer = sgd(parallel.parameters())
    for _ in range(2):
        parallel(**batch()).backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    assert all(parameter.grad is None and type(parameter) is torch.nn.Parameter for parameter in plain.parameters())
    assert [type(module) for module in plain.modules()] == kinds
    early = autopar.compile(plain, ranks.mesh(), hardware=FAST)
    early.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items()), (
        "loading wrote to the model"
    )


def check_it_is_still_the_users_module(ranks: Ranks) -> None:
    plain = net()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, memory="1GiB", example_kwargs=batch())
    assert isinstance(parallel, Net) and isinstance(parallel, autopar.ParallelModule)
    assert parallel.describe() == "mine 12" and isinstance(parallel.norm, torch.nn.BatchNorm1d)
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert parallel.third.weight is parallel.first.weight, "a tied weight is one DTensor"
    assert all(isinstance(parameter, DTensor) for parameter in parallel.parameters())
    assert not parallel.scale.requires_grad
    parallel(**batch()).backward()
    assert parallel.scale.grad is None and parallel.first.weight.grad is not None
    code = parallel.program.code
    assert code.count("def forward(") == 1 and code.count("def backward(") == 1
    assert re.search(r"# first; .*(models|linear)\.py:\d+ .*; .* -> \[", code), code
    assert "_c10d_functional" in code
    assert isinstance(parallel.graph_module, torch.fx.GraphModule)
    assert parallel.plan.mesh.ranks == ranks.count and parallel.plan.memory_limit == 2**30


def check_inputs_and_outputs(ranks: Ranks) -> None:
    """Structures keep their form; logits come whole or as DTensors, and either can be trained on."""
    mesh, data = ranks.mesh(), batch()
    for outputs in ("global", "sharded"):
        plain = net(Logits)
        parallel = autopar.compile(plain, mesh, hardware=FAST, outputs=outputs)
        for step in range(2):
            wanted, logits = plain(data["x"]), parallel(data["x"])
            assert isinstance(logits, DTensor) is (outputs == "sharded")
            near(logits, wanted, 1e-5, f"{outputs} logits of step {step}", 1e-6)
            functional.cross_entropy(wanted, data["y"]).backward()
            functional.cross_entropy(whole(logits), data["y"]).backward()
            same_gradients(plain, parallel)
        several = net(Several)
        parallel = autopar.compile(several, mesh, hardware=FAST, outputs=outputs)
        wanted, made = several(data, scale=2.0), parallel(data, scale=2.0)
        assert list(made) == list(wanted) and made["note"] == "fine" and isinstance(made["pair"], tuple)
        for ours, theirs in ((made["logits"], wanted["logits"]), *zip(made["pair"], wanted["pair"], strict=True)):
            near(ours, theirs, 1e-5, f"{outputs} output", 1e-6)
        whole(made["pair"][0]).square().sum().backward()  # only one of the outputs is used
        wanted["pair"][0].square().sum().backward()
        same_gradients(several, parallel)


def check_sharded_batches(ranks: Ranks) -> None:
    plain, data = net(), batch()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, example_kwargs=data)
    sharded = parallel.shard_batch(data)
    assert list(sharded) == list(data) and all(isinstance(value, DTensor) for value in sharded.values())
    near(sharded["x"], data["x"], 0.0, "the batch put together again")
    near(parallel(**sharded), plain(**data), LOSS, "loss of a sharded batch")
    near(
        parallel(*parallel.shard_batch((data["x"], data["y"]))),
        plain(**data),
        LOSS,
        "loss of a positional sharded batch",
    )
    rows = BATCH // ranks.count
    mine = slice(ranks.rank * rows, (ranks.rank + 1) * rows)
    ours = {name: DTensor.from_local(value[mine], ranks.mesh(), [Shard(0)]) for name, value in data.items()}
    near(parallel(**ours), plain(**data), LOSS, "loss of a batch that each rank loaded its part of")
    parallel(**sharded).backward(), plain(**data).backward()
    same_gradients(plain, parallel)


def check_positional_and_keyword_calls_are_one(ranks: Ranks) -> None:
    plain, data = net(), batch()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
    first = parallel(data["x"], data["y"])
    plan = parallel.plan
    parallel.eval(), parallel.train()
    near(parallel(data["x"], y=data["y"]), first, LOSS, "loss of the other spelling")
    assert parallel.plan is plan


def check_whole_parameters_are_plain_tensors(ranks: Ranks) -> None:
    """Where nothing of the model is split and nobody holds its parameters yet; they load from DTensors and into
    them.
    """
    plain = net()
    split = autopar.compile(plain, ranks.mesh(), hardware=FAST, example_kwargs=batch())
    assert all(isinstance(parameter, DTensor) for parameter in split.parameters())
    plan = search(split.plan.graph, split.plan.mesh, FAST, Request(policy="data-parallel"))
    parallel = autopar.compile(plain, ranks.mesh(), plan=plan, example_kwargs=batch())
    assert all(type(parameter) is torch.nn.Parameter for parameter in parallel.parameters())
    assert parallel.third.weight is parallel.first.weight and not parallel.scale.requires_grad
    same_steps(plain, parallel, batch(), steps=3)
    splits(parallel)
    late = autopar.compile(plain, ranks.mesh(), plan=plan)
    early = adamw(late.parameters())
    late(**batch())
    assert all(isinstance(parameter, DTensor) for parameter in late.parameters())
    split.load_state_dict(parallel.state_dict())
    late.load_state_dict(split.state_dict())
    parallel.load_state_dict(split.state_dict(), assign=True)
    assert all(type(parameter) is torch.nn.Parameter for parameter in parallel.parameters())
    for model in (split, late, parallel):
        same_state(plain, model)
    same_steps(plain, late, batch(), (adamw(plain.parameters()), early), steps=2)


# --- state dicts -----------------------------------------------------------------------------------------------------


def check_state_dicts(ranks: Ranks) -> None:
    source, target = net(seed=1), net(seed=2)
    source(**batch())  # running statistics too
    whole_state = copy.deepcopy(source.state_dict())
    for planned in (False, True):
        for load in (
            lambda model: model.load_state_dict(whole_state),
            lambda model: set_model_state_dict(model, whole_state),
            lambda model: set_model_state_dict(
                model, dict(whole_state), options=FULL
            ),  # torch writes to what it is given
            lambda model: set_model_state_dict(model, dict(whole_state), options=FROM_ZERO),
            lambda model: [
                child.load_state_dict(getattr(source, name).state_dict()) for name, child in model.named_children()
            ],
        ):
            parallel = autopar.compile(target, ranks.mesh(), hardware=FAST, example_kwargs=batch() if planned else None)
            load(parallel)
            same_state(source, parallel, 0.0)
            near(parallel(**batch(2)), copy.deepcopy(source)(**batch(2)), LOSS, "loss after loading")
    assert list(parallel.state_dict()) == list(source.state_dict())
    optimizer = sgd(parallel.parameters())
    parallel(**batch(3)).backward()
    optimizer.step()
    full = get_model_state_dict(parallel, options=FULL)
    assert not any(isinstance(value, DTensor) for value in full.values())
    back = net(seed=3)
    back.load_state_dict(full)
    same_state(back, parallel, 0.0)
    again = autopar.compile(net(seed=4), ranks.mesh(), hardware=FAST, example_kwargs=batch())
    again.load_state_dict(parallel.state_dict())  # DTensors into DTensors
    same_state(back, again, 0.0)
    try:
        again.load_state_dict({**whole_state, "head.weight": torch.zeros(3, 4)})
    except RuntimeError as error:
        assert "size mismatch for head.weight" in str(error)
    else:
        raise AssertionError("a tensor of another shape was loaded")


def check_a_model_without_memory(ranks: Ranks) -> None:
    """Planned on the meta device; materialised as shards only, then initialised or loaded."""
    plain = net()
    state = copy.deepcopy(plain.state_dict())
    with torch.device("meta"):
        empty = Net()
        empty.third.weight = empty.first.weight
        shapes = {"x": torch.empty(BATCH, WIDTH), "y": torch.empty(BATCH, dtype=torch.int64)}
    parallel = autopar.compile(empty, ranks.mesh(), hardware=FAST, memory="1GiB", example_kwargs=shapes)
    assert all(value.is_meta for value in parallel.state_dict().values())
    try:
        parallel(**batch())
    except RuntimeError as error:
        assert "to_empty" in str(error), error
    else:
        raise AssertionError("a model without values ran")
    parallel.to_empty(device="cpu")
    assert parallel.third.weight is parallel.first.weight, "ties survive"
    optimizer = adamw(parallel.parameters())
    parallel.load_state_dict(state)
    assert not any(value.is_meta for value in parallel.state_dict().values())
    same_steps(plain, parallel, batch(), (adamw(plain.parameters()), optimizer), steps=3)


# --- plans -----------------------------------------------------------------------------------------------------------


def check_plan_files_and_caches(ranks: Ranks) -> None:
    """A plan found elsewhere runs without a search; a cached one is found again by all who ask the same question."""
    mesh, plain, cache = ranks.mesh(), net(), ranks.folder / "cache"
    searched = _count_searches()
    hardware_file = ranks.folder / f"fast{ranks.rank}.toml"
    replace(FAST, sources=dict.fromkeys(FAST.figures, "a test")).save(hardware_file)
    options = {"hardware": hardware_file, "memory": "1GiB", "example_kwargs": batch(), "cache": cache}
    first = autopar.compile(plain, mesh, **options)
    assert len(searched) == (ranks.rank == 0), "rank 0 searches, for all"
    again = autopar.compile(plain, mesh, **options)
    assert len(searched) == (ranks.rank == 0), "the second time nobody searches"
    assert again.plan == first.plan
    for changed in ({"memory": "2GiB"}, {"hardware": "h100-sxm"}, {"optimizer": "sgd"}, {"outputs": "global"}):
        before = len(searched)
        autopar.compile(plain, mesh, **(options | changed))
        assert len(searched) - before == (ranks.rank == 0), f"{changed} is another question"
    dist.barrier()
    path = ranks.folder / "plan.json"
    if ranks.rank == 0:
        first.plan.save(path)
        assert len(list(cache.glob("*.plan.json"))) == 5
        assert not list(cache.glob(".*")), "no half-written file is left"
    dist.barrier()
    before = len(searched)
    for given in (path, str(path), first.plan):
        offline = autopar.compile(plain, mesh, plan=given)
        near(offline(**batch()), plain(**batch()), LOSS, "loss of a plan found elsewhere")
    assert len(searched) == before
    for file in cache.glob("*.plan.json") if ranks.rank == 0 else ():  # a cache that was cut short is made anew
        file.write_text(file.read_text()[:1000])
    dist.barrier()
    assert autopar.compile(plain, mesh, **options).plan == first.plan
    dist.barrier()


def _count_searches() -> list[int]:
    """A list that grows with every search of this process."""
    module, calls = sys.modules["autopar.planner"], []
    answer = module.answer
    if hasattr(answer, "calls"):
        return answer.calls

    def counted(*args, **options):
        calls.append(1)
        return answer(*args, **options)

    counted.calls = calls
    module.answer = counted
    return calls
