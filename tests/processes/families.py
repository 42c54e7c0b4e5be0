"""Whole models train as they do on one device."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
import transformers

import autopar
from autopar.attach.tensors import mesh_of
from autopar.ir.layout import Shard
from autopar.search import Request, search
from tests.processes.compare import LOSS, loss_of, near, same_gradients, same_steps, sgd, splits
from tests.processes.worker import Ranks
from tests.support.families import IGNORED, family
from tests.support.machines import FAST
from tests.support.plans import PlanSampler


def trains(name: str, ranks: Ranks, *sizes: int, **options) -> None:
    case = family(name)
    plain = copy.deepcopy(case.model)
    parallel = autopar.compile(plain, ranks.mesh(*sizes), hardware=FAST, **options)
    same_steps(plain, parallel, case.inputs, **({"make": sgd, "clip": None} if name == "cnn" else {}))
    splits(parallel)
    plain.eval(), parallel.eval()
    with torch.no_grad():
        near(loss_of(parallel(**case.inputs)), loss_of(plain(**case.inputs)), 10 * LOSS, "loss in eval mode")


def check_gpt2(ranks: Ranks) -> None:
    trains("gpt2", ranks)


def check_llama(ranks: Ranks) -> None:
    trains("llama", ranks)


def check_cnn(ranks: Ranks) -> None:
    trains("cnn", ranks)


def check_gpt2_on_two_axes(ranks: Ranks) -> None:
    trains("gpt2", ranks, 2, ranks.count // 2)


def check_llama_on_two_axes(ranks: Ranks) -> None:
    trains("llama", ranks, 2, ranks.count // 2)


def check_cnn_on_two_axes(ranks: Ranks) -> None:
    trains("cnn", ranks, 2, ranks.count // 2)


def check_odd_sizes(ranks: Ranks) -> None:
    """Nothing divides: what cannot be split stays whole, and no number is wrong."""
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=33, n_head=3, vocab_size=101, n_positions=13, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    plain = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 101, (5, 7))
    inputs = {"input_ids": ids, "labels": ids.masked_fill(torch.rand(5, 7) < 0.4, IGNORED)}
    parallel = autopar.compile(plain, ranks.mesh(2, ranks.count // 2), hardware=FAST)
    same_steps(plain, parallel, inputs, steps=3)


def check_random_plans(ranks: Ranks) -> None:
    """Any legal plan, not only the favourite of the solver."""
    mesh = ranks.mesh(2, ranks.count // 2)
    for name, seeds in (("mlp", range(4)), ("cnn", range(2)), ("mixtral", range(2))):
        case = family(name)
        if ranks.rank == 0:
            sampler = PlanSampler(case.graph, mesh_of(mesh))
            for seed in seeds:
                sampler.draw(seed).save(ranks.folder / f"{name}{seed}.json")
        dist.barrier()
        for seed in seeds:
            plain = copy.deepcopy(case.model)
            parallel = autopar.compile(plain, mesh, plan=ranks.folder / f"{name}{seed}.json")
            ours, wanted = loss_of(parallel(**case.inputs)), loss_of(plain(**case.inputs))
            near(ours, wanted, LOSS, f"loss of {name} by random plan {seed}")
            ours.backward(), wanted.backward()
            same_gradients(plain, parallel)


def check_a_collective_over_both_axes(ranks: Ranks) -> None:
    """Nodes of two ranks each: a ring through all of them uses both links between nodes, and rounds cost nothing."""
    mesh, case = ranks.mesh(2, ranks.count // 2), family("mlp")
    if ranks.rank == 0:
        slow = replace(FAST.links["inter"], latency_s=1e-10, bytes_per_s=FAST.links["intra"].bytes_per_s / 8)
        links = {"intra": replace(FAST.links["intra"], latency_s=1e-10), "inter": slow}
        weights = [n.target for n in case.graph.nodes if n.op == "parameter" and n.target.endswith("weight")]
        request = Request(fixed=dict.fromkeys(weights, (Shard(0), Shard(0))), tied=False)
        plan = search(case.graph, mesh_of(mesh), replace(FAST, links=links, ranks_per_node=2), request)
        assert any("+" in axis for _, axis in plan.comm_bytes), plan.comm_bytes
        plan.save(ranks.folder / "joined.json")
    dist.barrier()
    parallel = autopar.compile(case.model, mesh, plan=ranks.folder / "joined.json")
    same_steps(copy.deepcopy(case.model), parallel, case.inputs)


def check_rings(ranks: Ranks) -> None:
    """Every product that may go round a ring of all ranks does; then every one of which the sum may."""
    mesh = ranks.mesh()
    for number, pattern in enumerate(("ring", "ring reduce-scatter")):
        case, file = family("mlp"), ranks.folder / f"rings{number}.json"
        if ranks.rank == 0:
            plan = PlanSampler(case.graph, mesh_of(mesh), FAST).looping(pattern)
            assert plan.comm_bytes["shift", "data"] > 0, plan.comm_bytes
            plan.save(file)
        dist.barrier()
        model = copy.deepcopy(case.model)
        parallel = autopar.compile(model, mesh, plan=file, hardware=FAST)
        same_steps(copy.deepcopy(case.model), parallel, case.inputs)


def check_contexts(ranks: Ranks) -> None:
    """A small Llama whose every attention goes round a ring, forward and backward, as it lies and in zigzag."""
    mesh, case = ranks.mesh(), family("llama")
    patterns = ["context parallel: gathered kv", "context parallel: ring"]
    patterns += ["context parallel: zigzag ring"] if ranks.count == 2 else []  # the rows of four have no halves
    for number, pattern in enumerate(patterns):
        file = ranks.folder / f"context{number}.json"
        if ranks.rank == 0:
            sampler = PlanSampler(case.graph, mesh_of(mesh), FAST)
            looped = [name for name, options in sampler.strategies.items() if any(o.body == pattern for o in options)]
            assert len(looped) == 4, "of two layers, forward and backward"
            sampler.best(dict.fromkeys(looped, lambda one, pattern=pattern: one.body == pattern)).save(file)
        dist.barrier()
        parallel = autopar.compile(copy.deepcopy(case.model), mesh, plan=file, hardware=FAST)
        same_steps(copy.deepcopy(case.model), parallel, case.inputs)


def check_optimus(ranks: Ranks) -> None:
    """A whole Llama in blocks of two by two ranks: products in panels, norms and the loss over both axes."""
    mesh, case, file = ranks.mesh(2, 2), family("llama"), ranks.folder / "optimus.json"
    if ranks.rank == 0:
        search(case.graph, mesh_of(mesh), FAST, Request(policy="optimus-2d")).save(file)
    dist.barrier()
    parallel = autopar.compile(copy.deepcopy(case.model), mesh, plan=file, hardware=FAST)
    same_steps(copy.deepcopy(case.model), parallel, case.inputs)


def check_panels(ranks: Ranks) -> None:
    """Every product that SUMMA may run on two by two ranks is run so."""
    mesh, case, file = ranks.mesh(2, 2), family("mlp"), ranks.folder / "panels.json"
    if ranks.rank == 0:
        sampler = PlanSampler(case.graph, mesh_of(mesh), FAST)
        names = [name for name, options in sampler.strategies.items() if any(one.body == "SUMMA" for one in options)]
        assert len(names) > 3, "too few products"
        sampler.best(dict.fromkeys(names, lambda one: one.body == "SUMMA")).save(file)
    dist.barrier()
    parallel = autopar.compile(copy.deepcopy(case.model), mesh, plan=file, hardware=FAST)
    same_steps(copy.deepcopy(case.model), parallel, case.inputs)
