"""The state of a parallel module leaves it and comes back: whole tensors for the plain model, copies, refusals."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import autopar
from autopar.ir.mesh import Mesh
from autopar.measure.memory import LiveBytes
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.search import Request, search
from autopar.trace import capture, graph_of
from tests.processes.compare import LOSS, adamw, near, same_state, same_steps
from tests.processes.errors import refused
from tests.processes.models import Net, batch, net
from tests.processes.saving_memory import fastest, saving_memory
from tests.processes.worker import Ranks
from tests.support.machines import FAST
from tests.support.nets import batch_of, made
from tests.support.residence import hosted


class Kept(Net):
    """With a buffer that no state dict has, one that it has, and a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passing", torch.linspace(1, 2, 16), persistent=False)
        self.register_buffer("lasting", torch.linspace(2, 3, 16))
        self.again = self.second

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x * self.passing + self.lasting, y)


@cache
def of_policy(kind: type[Net], ranks: int, policy: str | None) -> Plan:
    """The plan of a policy: fsdp has weights in rows, tensor-parallel in rows and in columns."""
    return search(graph_of(capture(net(kind), (), batch())), Mesh(("data",), (ranks,)), FAST, Request(policy=policy))


def laid_out(ranks: Ranks, plain: nn.Module, policy: str = "tensor-parallel") -> autopar.ParallelModule:
    plan = of_policy(type(plain), ranks.count, policy)
    parallel = autopar.compile(plain, ranks.mesh(), example_kwargs=batch(), plan=plan)
    assert any(map(is_split, parallel.parameters())) == (policy != "data-parallel")
    return parallel


def not_called(ranks: Ranks, plain: nn.Module) -> autopar.ParallelModule:
    """Which is planned at its first call."""
    return autopar.compile(plain, ranks.mesh(), plan=of_policy(type(plain), ranks.count, "fsdp"))


def is_split(value: Tensor) -> bool:
    return isinstance(value, DTensor) and any(placement.is_shard() for placement in value.placements)


def whole_values(module: nn.Module) -> dict[str, Tensor]:
    """On every rank, by torch's own means."""
    values = module.state_dict()
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in values.items()}


class Live(LiveBytes):
    """gloo's threads hold what they sent and received a little longer than it takes, in one run and not in another:
    they get copies, which are not counted.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.c10d.broadcast_.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        (sent,), *rest = args
        (copied,), work = func([sent.clone()], *rest)
        work.wait()
        sent.copy_(copied)
        return [sent], work


def saved_and_loaded(state: Mapping[str, Any], plain: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    return plain


# --- whole state dicts -----------------------------------------------------------------------------------------------


def check_a_whole_state_dict_is_what_the_plain_model_loads(ranks: Ranks) -> None:
    for policy in ("fsdp", "tensor-parallel", "data-parallel"):
        plain = net(Kept, seed=1)
        parallel = laid_out(ranks, plain, policy)
        same_steps(plain, parallel, batch(2), steps=2)
        for rank0_only in (True, False):
            found, wanted = parallel.full_state_dict(rank0_only=rank0_only), whole_values(parallel)
            if rank0_only and ranks.rank:
                assert found == {}
                continue
            assert list(found) == list(plain.state_dict()) and "passing" not in found
            assert all(type(value) is Tensor and value.device.type == "cpu" for value in found.values())
            assert found["first.weight"] is found["third.weight"] and found["second.bias"] is found["again.bias"]
            loaded = saved_and_loaded(found, net(Kept, seed=5))
            assert all(torch.equal(value, wanted[name]) for name, value in loaded.state_dict().items())
            same_state(plain, loaded)


def check_a_whole_state_dict_is_a_copy(ranks: Ranks) -> None:
    for policy in ("fsdp", "data-parallel"):
        parallel = laid_out(ranks, net(Kept), policy)
        wanted, found = whole_values(parallel), parallel.full_state_dict(rank0_only=False)
        with torch.no_grad():
            for value in (*parallel.parameters(), *parallel.buffers()):
                value.add_(1)
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def check_a_whole_state_dict_before_the_first_call(ranks: Ranks) -> None:
    plain = net(Kept)
    parallel = not_called(ranks, plain)
    found = parallel.full_state_dict(rank0_only=False)
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    parallel.to("meta")
    refused(
        RuntimeError,
        r"\S+ is on the meta device and has no values to gather: call to_empty\(device=...\)",
        parallel.full_state_dict,
    )


def check_no_rank_holds_two_whole_tensors(ranks: Ranks) -> None:
    """Counted: what is gathered for rank 0 takes the others one piece at a time; what is loaded from it, one whole
    tensor beside the pieces that are kept.
    """
    plain = net(Kept)
    for policy in ("fsdp", "tensor-parallel"):
        parallel = laid_out(ranks, plain, policy)
        largest = max(value.nbytes for value in plain.state_dict().values())
        pieces = sum(
            v.to_local().nbytes if isinstance(v, DTensor) else v.nbytes for v in parallel.state_dict().values()
        )
        table = next(parallel.parameters()).device_mesh.mesh.nbytes  # the mesh's numbers of ranks, counted once
        with Live() as live:
            live.watch([*parallel.parameters(), *parallel.buffers()])
            before = live.current
            kept = parallel.full_state_dict()
        if ranks.rank:
            assert kept == {} and live.current - before <= table
            assert 0 < live.peak - before <= largest // ranks.count + table, (live.peak - before, largest)
        else:
            whole = sum({id(value): value.nbytes for value in kept.values()}.values())
            assert live.peak - before <= whole + largest // ranks.count + table, (live.peak - before, whole)
        with Live() as live:
            live.watch([*parallel.parameters(), *parallel.buffers(), kept])
            before = live.current
            parallel.load_full_state_dict(kept)
        assert live.current - before <= table
        assert live.peak - before <= pieces + largest + table, (live.peak - before, pieces, largest)


def check_what_lies_on_the_host_is_gathered_too(ranks: Ranks) -> None:
    for name in ("half-frozen", "mlp"):
        plan = next(
            plan
            for plan in (saving_memory(fastest(name, ranks.count), seed) for seed in range(50))
            if any("Shard" in str(plan.parameters[key]) for key in hosted(plan.residence))
        )
        parallel = autopar.compile(made(name), ranks.mesh(), example_kwargs=batch_of(name, 0), plan=plan)
        optimizer = Streamed(adamw(parallel.parameters()), parallel, overlap=True)
        parallel(**batch_of(name, 0)).backward()
        optimizer.step()
        found = parallel.full_state_dict(rank0_only=False)  # right behind the step, which still goes on
        assert all(torch.equal(found[key], value) for key, value in whole_values(parallel).items())
        plain = saved_and_loaded(found, made(name, 3))
        near(parallel(**batch_of(name, 1)), plain(**batch_of(name, 1)), LOSS, f"loss of {name}")
        other = autopar.compile(made(name, 4), ranks.mesh(), example_kwargs=batch_of(name, 0), plan=plan)
        other.load_full_state_dict(found if ranks.rank == 0 else None)
        assert all(torch.equal(found[key], value) for key, value in whole_values(other).items())


def check_a_state_dict_of_rank_zero_alone_is_loaded(ranks: Ranks) -> None:
    source = net(Kept, seed=1)
    source(**batch())  # running statistics, too
    state = copy.deepcopy(source.state_dict())
    mine = state if ranks.rank == 0 else None
    for policy in ("fsdp", "tensor-parallel", "data-parallel", None):
        plain = net(Kept, seed=2)
        parallel = laid_out(ranks, plain, policy) if policy else not_called(ranks, plain)
        assert not any(parallel.load_full_state_dict(mine))
        same_state(source, parallel, 0.0)
        same_steps(copy.deepcopy(source), parallel, batch(), steps=2)
        near(plain.first.weight, net(Kept, seed=2).first.weight, 0.0, "the user's model")
    few = {name: value for name, value in state.items() if name != "head.bias"} if ranks.rank == 0 else None
    told = parallel.load_full_state_dict(few, strict=False)
    assert told.missing_keys == ["head.bias"] and not told.unexpected_keys
    refused_on_all = {
        "Missing key.s. in state_dict: .head.bias.": lambda s: {k: v for k, v in s.items() if k != "head.bias"},
        "Unexpected key.s. in state_dict: .tail.": lambda s: {**s, "tail": torch.randn(3)},
        "size mismatch for head.weight": lambda s: {**s, "head.weight": torch.randn(3, 4)},
        "head.bias of the state dict is a str, and load_full_state_dict sends whole tensors only; give every rank": (
            lambda s: {**s, "head.bias": "text"}
        ),
        "head.bias of the state dict is on the meta device": lambda s: {**s, "head.bias": s["head.bias"].to("meta")},
        "rank 0 gave no state dict": lambda s: None,
    }
    for what, change in refused_on_all.items():
        given = change(state) if ranks.rank == 0 else state
        with pytest.raises((RuntimeError, ValueError), match=what):
            parallel.load_full_state_dict(given)
    same_steps(copy.deepcopy(source), parallel, batch(), steps=1)


class Listed(Net):
    """With a buffer that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("listed", torch.eye(4).to_sparse())


def check_sparse_buffers_are_those_of_rank_zero(ranks: Ranks) -> None:
    plain = net(Listed)
    with torch.no_grad():
        plain.listed.mul_(ranks.rank + 1)
    parallel = not_called(ranks, plain)
    parallel(**batch())
    near(parallel.listed.to_dense(), torch.eye(4), 0.0, "listed")
    near(parallel.full_state_dict(rank0_only=False)["listed"].to_dense(), torch.eye(4), 0.0, "listed")
    given = net(Listed).state_dict() | {"listed": torch.full((4, 4), 2.0).to_sparse()}
    assert not any(parallel.load_full_state_dict(given if ranks.rank == 0 else None))
    near(parallel.listed.to_dense(), torch.full((4, 4), 2.0), 0.0, "listed")


def check_transformers_saves_what_it_loads(ranks: Ranks) -> None:
    """`save_pretrained(folder)` without a word of pieces, by all ranks: whole tensors, under the plain model's name."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    plain, ids = GPT2LMHeadModel(config), torch.randint(0, 64, (4, 8))
    inputs = {"input_ids": ids, "labels": ids}
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    mesh = ranks.mesh()
    graph = graph_of(capture(plain, (), inputs))
    plan = search(graph, Mesh(("data",), (ranks.count,)), FAST, Request(policy="fsdp"))
    parallel = autopar.compile(plain, mesh, plan=plan)
    parallel(**inputs).loss.backward()
    assert any(type(one.placements[0]) is Shard for one in parallel.parameters() if isinstance(one, DTensor))
    parallel.save_pretrained(folder[0])
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder[0])
    assert type(loaded) is GPT2LMHeadModel and loaded.config.architectures == ["GPT2LMHeadModel"]
    for mine, theirs in zip(loaded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
