"""NCCL with one rank, beside gloo: clipping and checkpoints where parameters lie on the host."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar.ir.mesh import Mesh
from autopar.optim import Streamed
from benchmarks.gpu.stage import Row, Setting, exact_products, gradients_off, loss_of, moved, near, plain, same
from tests.support.families import family
from tests.support.residence import ResidenceSampler

GRADIENT, NORM = 1e-4, 1e-5


def nccl(setting: Setting) -> Iterator[Row]:
    """The same on gloo where there is no CUDA: all but the backend."""
    exact_products()
    if setting.is_cuda:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", "29517")
        dist.init_process_group("cpu:gloo,cuda:nccl")
    mesh = autopar.init_mesh(setting.device)
    yield {"what": "backend", "is": str(dist.get_backend_config())}
    for name, seed in (("block", 5), ("gpt2", 5)):
        case = family(name)
        plan = ResidenceSampler(case.graph, Mesh(("data",), (1,))).draw(seed)
        inputs = moved(case.inputs, setting.device)
        parallel = autopar.compile(copy.deepcopy(case.model), mesh, plan=plan, example_kwargs=inputs)
        reference = copy.deepcopy(case.model).to(setting.device)
        optimizer = Streamed(torch.optim.AdamW(parallel.parameters(), 1e-3), parallel)
        for module in (parallel, reference):
            loss_of(module(**inputs)).backward()
        worst = gradients_off(parallel, reference, GRADIENT, f"{name} before clipping")
        yield {"what": f"{name}: gradients off", "is": f"{worst:.3g}"}
        norms = [torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1) for module in (parallel, reference)]
        yield {"what": f"{name}: norm off", "is": f"{near(norms[0], norms[1], NORM, f'{name}: norm'):.3g}"}
        worst = gradients_off(parallel, reference, GRADIENT, f"{name} after clipping")
        yield {"what": f"{name}: clipped gradients off", "is": f"{worst:.3g}"}
        optimizer.step()
        optimizer.zero_grad()
        yield {"what": f"{name}: on the host", "is": _saved(parallel, optimizer)}


def _saved(parallel: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> str:
    """Model and optimizer saved, spoiled and loaded: the same bits. How many tensors lie where."""
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    before = {name: plain(value).detach().clone() for name, value in model_state.items()}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        model_state, optimizer_state = get_state_dict(parallel, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(parallel, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for name, value in parallel.state_dict().items():
        same(value, before[name], f"{name} after loading")
    homes = [*parallel.plan.residence.values()]
    return f"{homes.count('host')} parameters, states of {homes.count('stream')} more, of {len(before)} tensors saved"
