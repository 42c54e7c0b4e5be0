"""What goes wrong says so in a sentence, on every rank, before anything is changed and without a hang."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import Infeasible, PlanMismatch, TraceError
from autopar.attach.tensors import mesh_of
from autopar.measure.twin import traced
from autopar.search import Request, search
from tests.processes.compare import near, same_steps
from tests.processes.models import Logits, Net, batch, net
from tests.processes.worker import Ranks
from tests.support.machines import FAST, SLOW
from tests.support.toy_rules import NEWER, RULES


def refused(kind: type[Exception], told: str, call: Callable[[], Any]) -> None:
    """The call raises this kind of error, whose one sentence (or two) matches `told`."""
    try:
        call()
    except Exception as error:
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        assert re.search(told, str(error)), str(error)
        assert len(str(error)) < 1000 and "\n" not in str(error).strip(), str(error)
        return
    raise AssertionError(f"nothing was raised, wanted {kind.__name__}: {told}")


def check_arguments(ranks: Ranks) -> None:
    plain, mesh = net(), ranks.mesh()
    refused(
        ValueError,
        rf"the mesh 3 has 3 ranks, but {ranks.count} processes run; start 3",
        lambda: autopar.init_mesh(data=3),
    )
    part = init_device_mesh("cpu", (ranks.count, 1), mesh_dim_names=("data", "tensor"))["tensor"]
    refused(ValueError, f"has 1 ranks, but {ranks.count} processes run", lambda: autopar.compile(plain, part))
    refused(
        ValueError,
        r"no hardware profile 'h1000'; did you mean h100-sxm\? known profiles: .*h100-sxm",
        lambda: autopar.compile(plain, mesh, hardware="h1000"),
    )
    for name, value in (("optimizer", "adam-w"), ("outputs", "whole"), ("backend", "cudagraphs")):
        refused(
            ValueError,
            f"{name} '{value}' is not known; choose ",
            lambda n=name, v=value: autopar.compile(plain, mesh, **{n: v}),
        )
    for memory in ("much", "70", -1, 0, True):
        refused(
            ValueError, "memory .* write for example 70GiB", lambda m=memory: autopar.compile(plain, mesh, memory=m)
        )


def check_calls(ranks: Ranks) -> None:
    plain, data = net(), batch()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
    refused(RuntimeError, "there is no plan yet: call the module once, or give example_inputs=", lambda: parallel.plan)
    refused(TypeError, "missing a required argument: 'y'", lambda: parallel(data["x"]))
    refused(TypeError, "unexpected keyword argument 'z'", lambda: parallel(**data, z=1))
    parallel(**data)
    half = {name: value[:4] for name, value in data.items()}
    plain(**data)
    near(parallel(**half), plain(**half), 1e-5, "loss of another size")
    other = {**data, "x": data["x"].double()}
    refused(RuntimeError, "same dtype", lambda: parallel(**other))
    refused(
        TraceError,
        "does not run with its inputs, .* must be Tensor, not int.* Without autopar it fails",
        lambda: parallel(data["x"], 3),
    )
    loss = parallel(**data)
    loss.backward()
    refused(RuntimeError, "backward ran a second time .* pass retain_graph=True the first time", loss.backward)
    parallel.zero_grad()
    plain(**data)  # batch norm counts the call
    same_steps(plain, parallel, data, steps=2)  # none of this did any harm
    refused(PlanMismatch, "is float64.* the plan has it as float32.* compile again", lambda: parallel.double()(**data))


def check_a_rank_that_differs(ranks: Ranks) -> None:
    """One rank alone has another shape, model or broken model: all are told, none waits for the others."""
    last, data = ranks.rank == ranks.count - 1, batch()
    mine = {name: value[:4] for name, value in data.items()} if last else data
    parallel = autopar.compile(net(), ranks.mesh(), hardware=FAST)
    told = "ranks 0 and .* arguments of other shapes or dtypes, .* every rank has to make the same call"
    refused(PlanMismatch, told, lambda: parallel(**mine))
    same_steps(net(), parallel, data, steps=1)  # it can be called rightly afterwards
    parallel = autopar.compile(Net(classes=24 if last else 12), ranks.mesh(), hardware=FAST)
    refused(
        PlanMismatch,
        r"plan of rank 0 was made for parameter head.weight float32\[12, 32\], this model has",
        lambda: parallel(**data),
    )
    parallel = autopar.compile(Branching() if last else net(Logits), ranks.mesh(), hardware=FAST)
    refused(TraceError, "which way forward goes depends on values at", lambda: parallel(data["x"]))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        while made.sum() > 0:  # this line
            made = made * 2
        return made.sum()


def check_a_rank_that_is_told_something_else(ranks: Ranks) -> None:
    """Another plan file on one node, another keyword, or no file: the same error everywhere, before anything runs."""
    last, data = ranks.rank == ranks.count - 1, batch()
    searched = [(traced(net(), (), data), policy) for policy in ("fsdp", "data-parallel")]
    plans = [search(graph, mesh_of(ranks.mesh()), FAST, Request(policy=policy)) for graph, policy in searched]
    path = ranks.folder / f"told-{ranks.rank}.plan.json"
    plans[last].save(path)
    for options, told in (
        ({"plan": path}, "has a plan of digest '[0-9a-f]{8}' on rank . and '[0-9a-f]{8}' on rank 0"),
        ({"batch_norm": "local" if last else "global"}, "has batch_norm 'local' on rank . and 'global' on rank 0"),
        (
            {"allow": "offload-activations" if last else "none"},
            r"has allow \('offload-activations',\) on rank . and \(\) on rank 0",
        ),
        (
            {"pin": {"head": "offload-parameters"} if last else None},
            r"has pin \[\('head', 'offload-parameters'\)\] on rank . and \[\] on rank 0",
        ),
        (
            {"rules": NEWER if last else RULES},
            r"has rules \['toyrules 1\.1 \(\w{8}\)'\] on rank . and \['toyrules 1\.0 \(\w{8}\)'\] on rank 0",
        ),
    ):
        parallel = autopar.compile(net(), ranks.mesh(), hardware=FAST, **options)
        refused(ValueError, told, lambda p=parallel: p(**data))
    path = ranks.folder / ("is-not-there.json" if last else path.name)
    refused(FileNotFoundError, "is-not-there", lambda: autopar.compile(net(), ranks.mesh(), plan=path))


def check_a_model_that_cannot_be_captured(ranks: Ranks) -> None:
    plain = Branching()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
    refused(
        TraceError,
        r"depends on values at .*errors\.py:\d+ \(while made.sum\(\) > 0: +# this line\)",
        lambda: parallel(batch()["x"]),
    )
    assert isinstance(parallel, Branching) and isinstance(parallel, autopar.ParallelModule)
    refused(TraceError, "this line", lambda: parallel(batch()["x"]))  # the same again: nothing is half done
    assert list(parallel.state_dict()) == list(plain.state_dict())


def check_too_little_memory(ranks: Ranks) -> None:
    plain, data = net(), batch()
    for memory in ("2KiB", 1000):
        parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, memory=memory)
        refused(
            Infeasible,
            "no plan fits in .* per rank: .* needed.*(five largest tenants|Give more memory)|the least that would do",
            lambda p=parallel: p(**data),
        )
        assert all(isinstance(value, DTensor) for value in parallel.parameters())
    options = {"hardware": SLOW, "example_kwargs": data}
    roomy = autopar.compile(plain, ranks.mesh(), memory="1GiB", **options).plan.peak_bytes["hbm"]
    tight = autopar.compile(plain, ranks.mesh(), memory=int(roomy * 0.8), **options)
    assert tight.plan.peak_bytes["hbm"] <= 0.8 * roomy
    same_steps(plain, tight, data, steps=2)


def check_plans_of_something_else(ranks: Ranks) -> None:
    mesh, data, mine = ranks.mesh(), batch(), ranks.folder / f"other{ranks.rank}.json"
    plan = autopar.compile(net(), mesh, hardware=FAST, example_kwargs=data).plan

    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        return lambda: autopar.compile(model, mesh, plan=mine, **kwargs)(*args)

    plan.save(mine)
    x, y = data["x"], data["y"]
    refused(
        PlanMismatch,
        r"made for parameter head.weight float32\[12, 32\], this model has float32\[24, 32\]",
        run(Net(classes=24), x, y),
    )
    refused(
        PlanMismatch,
        r"made for input \['x'\] float32\[8, 16\], this call passes float32\[4, 16\]",
        run(net(), x[:4], y[:4]),
    )
    refused(PlanMismatch, "made for", run(net(Logits), x))
    flat = init_device_mesh("cpu", (ranks.count,), mesh_dim_names=("tensor",))
    refused(
        PlanMismatch,
        "made for mesh data=2, this mesh is tensor=2",
        lambda: autopar.compile(net(), flat, plan=mine)(x, y),
    )
    made = autopar.compile(net(Logits), mesh, hardware=FAST, example_inputs=(x,), outputs="sharded")
    made.plan.save(mine)
    refused(
        PlanMismatch, "outputs='sharded', this call asks for outputs='global'", run(net(Logits), x, outputs="global")
    )
    text = mine.read_text()
    for broken in (text[: len(text) // 2], text.replace("float32", "float64", 3), "{}", "", text.replace("R", "S0", 1)):
        mine.write_text(broken)
        refused(PlanMismatch, f"{mine.name}.*", run(net(Logits), x))
    mine.unlink()
    refused(FileNotFoundError, mine.name, run(net(Logits), x))


def check_pieces_that_another_rank_has_saved(ranks: Ranks) -> None:
    """What scripts for DistributedDataParallel do: rank 0 saves state dicts, all ranks load them."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    x, file = torch.randn(16, 512), ranks.folder / "rank0.pt"
    parallel = autopar.compile(plain, ranks.mesh(), example_inputs=(x,), hardware=FAST)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(x).square().mean().backward()
    optimizer.step()
    split = [name for name, tensor in parallel.named_parameters() if isinstance(tensor, DTensor)]
    assert split
    if ranks.rank == 0:
        with warnings.catch_warnings(record=True) as told:
            torch.save((parallel.state_dict(), optimizer.state_dict()), file)
        assert any("saved as the piece" in str(one.message) and "full_state_dict()" in str(one.message) for one in told)
    dist.barrier()
    weights, states = torch.load(file, weights_only=True)
    if ranks.rank == 0:
        parallel.load_state_dict(weights)
    else:
        told = rf"holds the piece of one rank among {ranks.count}, and not of this one.*full_state_dict\(\)"
        refused(RuntimeError, told, lambda: parallel.load_state_dict(weights))
        optimizer.load_state_dict(states)
        refused(RuntimeError, told, optimizer.step)


def check_inference_has_no_backward(ranks: Ranks) -> None:
    parallel = autopar.compile(net(), ranks.mesh(), hardware=FAST)
    with torch.no_grad():
        loss = parallel(**batch())
    refused(RuntimeError, "does not require grad", loss.backward)
    assert parallel.first.weight.to_local().is_inference() is False
