"""One script under autopar and under plain PyTorch on one process: losses, gradients, weights, outputs."""

from __future__ import annotations

import copy
import hashlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf, isnan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autopar
from autopar._compat import pytree
from autopar.ir.work import VIEWS, flops_of
from autopar.plan import Plan
from autopar.propose.strategies import operand_types
from benchmarks.outside.script import Batch, Script
from cost_models.hardware import Hardware, Link
from cost_models.steps import Compute

STEPS, ROWS, EVAL_ROWS = 3, 4, 3
# Relative to the largest entry: of the loss, of a gradient, of a weight or buffer, of an output.
WITHIN = {"float32": (1e-5, 1e-4, 1e-5, 1e-4), "float64": (1e-9, 1e-9, 1e-9, 1e-9)}
INSIDE_FLOAT32 = (1e-6, 1e-5, 1e-6, 1e-5)  # a float64 model that computes a part of itself in float32 or narrower
DIFFER = "ranks differ"
LEAST = 1e-3  # of the largest gradient: the unit of gradients that are smaller still
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
REFUSALS = (autopar.TraceError, autopar.PlanMismatch, autopar.Infeasible, autopar.NoAnswerInTime)


def easy_links() -> Hardware:
    """The machine that the tests run on, had it links as quick as its memory: whatever a rule can split, is split."""
    known, quick = Hardware.load("cpu-gloo"), Link(1e-8, 1e12)
    return replace(known, name="cpu-easy-links", launch_s=1e-9, links={"intra": quick, "inter": quick}, sources={})


@dataclass
class Trained:
    """What a training run leaves behind; tensors are whole, on the CPU."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    def in_it(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return pytree.tree_map(in_it, batch)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its real and complex numbers in this precision."""
    for one in [*model.parameters(), *model.buffers()]:
        if one.is_floating_point() or one.is_complex():
            one.data = one.data.to(dtype.to_complex() if one.is_complex() else dtype)
    return model


def without_dropout(model: nn.Module) -> bool:
    """Let its dropout modules keep everything; whether there was one that did not."""
    found = [one for one in model.modules() if isinstance(one, DROPOUTS) and one.p > 0]
    for one in found:
        one.p = 0.0
    return bool(found)


def draws(script: Script, model: nn.Module, batch: Batch) -> bool:
    """Whether the loss depends on the seed."""
    losses: list[Tensor] = []
    for seed in (2, 3):
        torch.manual_seed(seed)
        own = copy.deepcopy(model).train()
        with torch.no_grad():
            losses.append(script.loss(script.call(own, copy.deepcopy(batch)), batch))
    return not losses[0].equal(losses[1])


def batches(script: Script, dtype: torch.dtype) -> list[Batch]:
    """A batch for each step, then a smaller one for evaluation; the same in every process."""
    torch.manual_seed(1)
    return [in_dtype(script.batch(ROWS if i < STEPS else EVAL_ROWS), dtype) for i in range(STEPS + 1)]


def train(script: Script, model: nn.Module, drawn: list[Batch]) -> Trained:
    """The loop of any script."""
    found = Trained()
    optimizer = script.optimizer(model.parameters())
    model.train()
    for batch in drawn[:-1]:
        loss = script.loss(script.call(model, batch), batch)
        loss.backward()
        if script.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), script.clip)
        found.losses.append(whole(loss))
        named = model.named_parameters()
        found.gradients.append({name: None if one.grad is None else whole(one.grad) for name, one in named})
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        leaves = pytree.tree_leaves(script.call(model, drawn[-1]))
    found.outputs = [whole(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    found.state = {name: whole(value) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return found


def difference(ours: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """The largest one, relative to the largest entry that is wanted or to `least`; inf for another shape or dtype."""
    if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
        return inf
    if not wanted.numel():
        return 0.0
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    ours, wanted = ours.to(kind), wanted.to(kind)
    same = (ours == wanted) | (ours.isnan() & wanted.isnan())  # masks of -inf
    off = torch.where(same, torch.zeros((), dtype=torch.float64), (ours - wanted).abs()).max().item()
    unit = max(wanted.abs().nan_to_num(0.0, 0.0, 0.0).max().item(), least, 1e-12)
    return inf if isnan(off) else off / unit


def differences(ours: Trained, wanted: Trained) -> list[tuple[str, float, str]]:
    """Of losses, gradients, weights, outputs: (which, the worst, where)."""
    return [(what, *max(found, key=lambda one: one[0], default=(0.0, ""))) for what, found in _pairs(ours, wanted)]


def _pairs(ours: Trained, wanted: Trained) -> Iterator[tuple[str, list[tuple[float, str]]]]:
    losses = zip(ours.losses, wanted.losses, strict=True)
    yield "loss", [(difference(a, b), f"step {i}") for i, (a, b) in enumerate(losses)]
    found: list[tuple[float, str]] = []
    for i, (mine, theirs) in enumerate(zip(ours.gradients, wanted.gradients, strict=True)):
        largest = max((one.abs().max().item() for one in theirs.values() if one is not None and one.numel()), default=0)
        for name, grad in theirs.items():
            own = mine.get(name)
            if grad is None or own is None:
                off = 0.0 if grad is own else inf
            else:
                off = difference(own, grad, LEAST * largest)
            found.append((off, f"{name}, step {i}"))
    yield "gradient", found
    missing = [(inf, f"{name} is missing") for name in wanted.state.keys() ^ ours.state.keys()]
    shared = wanted.state.keys() & ours.state.keys()
    yield "weight", missing + [(difference(ours.state[name], wanted.state[name], 1e-2), name) for name in shared]
    if len(ours.outputs) != len(wanted.outputs):
        yield "output", [(inf, f"{len(ours.outputs)} outputs for {len(wanted.outputs)}")]
    else:
        outputs = zip(ours.outputs, wanted.outputs, strict=True)
        yield "output", [(difference(a, b, 1e-6), f"output {i}") for i, (a, b) in enumerate(outputs)]


def share_whole(plan: Plan) -> float:
    """The share of the step's arithmetic that every rank does in whole, of the unsplit step's arithmetic."""
    node_of = {node.name: node for node in plan.graph.nodes}
    total = alone = 0.0
    for node in plan.graph.nodes:
        steps = [step for step in plan.choices[node.name].steps if isinstance(step, Compute)]
        if node.is_source or node.op in VIEWS or not steps:
            continue
        flops, _ = flops_of(node, operand_types(node, node_of))
        total += flops
        alone += flops if sum(step.flops for step in steps) >= 0.99 * flops else 0.0
    return alone / total if total else 0.0


def narrower_than(plan: Plan, dtype: str) -> bool:
    if dtype != "float64":
        return False
    types = [type.dtype for node in plan.graph.nodes for type in node.outputs if type is not None]
    return any(one in ("float32", "bfloat16", "float16", "complex64") for one in types)


def agree_on(value: str) -> bool:
    """Whether all ranks have the same text."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return len(set(every)) == 1


def digest(trained: Trained) -> str:
    made = hashlib.sha256()
    for value in [*trained.losses, *trained.outputs, *(trained.state[name] for name in sorted(trained.state))]:
        real = torch.view_as_real(value) if value.is_complex() else value
        made.update(real.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def sentence(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]


def is_refusal(error: BaseException) -> bool:
    """Whether autopar says no: by an error of its own, or one that it raises by itself in words."""
    if isinstance(error, REFUSALS):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(autopar.__file__).parent)
    last = frames[-1] if frames else None
    return last is not None and last.filename.startswith(own) and (last.line or "").startswith("raise ")


def attempt(script: Script, mesh: DeviceMesh, dtype: str, hardware: Hardware | None) -> dict[str, Any]:
    """The row of one script in one dtype; called by all ranks together."""
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    try:
        plain = cast(script.model(), kind)
    except Exception as error:
        return {"verdict": "unusable", "told": sentence(error)}
    dropped = without_dropout(plain)
    drawn = batches(script, kind)
    wanted, why = None, [""]
    if dist.get_rank() == 0:
        try:
            if draws(script, plain, drawn[0]):
                raise ValueError("this script draws random numbers, which rightly differ")
            wanted = train(script, copy.deepcopy(plain), copy.deepcopy(drawn))
        except Exception as error:
            why = [sentence(error)]
    dist.broadcast_object_list(why, 0)
    if why[0]:
        return {"verdict": "unusable", "told": why[0]}
    try:
        parallel = autopar.compile(plain, mesh, hardware=hardware, time_limit_s=20.0)
        ours = train(script, parallel, drawn)
    except Exception as error:
        verdict = "refused" if is_refusal(error) else "crash"
        return {"verdict": verdict, "told": sentence(error), "trace": traceback.format_exc()[-3000:]}
    plan = parallel.plan
    row: dict[str, Any] = {"share": share_whole(plan), "nodes": len(plan.graph.nodes), "notes": list(plan.notes)[:8]}
    row["dropped"] = dropped
    same = agree_on(digest(ours))
    if wanted is None:  # not rank 0
        return row | {"verdict": "right"}
    found = differences(ours, wanted)
    limits = INSIDE_FLOAT32 if narrower_than(plan, dtype) else WITHIN[dtype]
    off = [f"{what} by {by:.2g} ({at})" for (what, by, at), most in zip(found, limits, strict=True) if not by <= most]
    if not same:
        off.append(DIFFER)
    row["off"] = {what: [by, at] for what, by, at in found}
    return row | {"verdict": "wrong" if off else "right", "told": "; ".join(off)}
