"""Models of real widths on one device: loss and gradients against eager torch, in float32 and in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autopar
from benchmarks.capped import SHAPES, build
from benchmarks.gpu.stage import (
    ROUNDED,
    Row,
    Setting,
    exact_products,
    gradients_off,
    half_gradients_off,
    loss_of,
    moved,
    near,
)  # fmt: skip
from benchmarks.models import conv, mlp
from tests.support.families import Block

LOSS, GRADIENT = 1e-5, 2e-4
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def models_of(setting: Setting) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """MLP, CNN, a block and GPT-2, with head dims that kernels of attention like."""
    torch.manual_seed(0)
    for made in (mlp, conv):
        model, inputs, told = made()
        yield told, model, inputs
    width, tokens = (1024, 512) if setting.is_cuda else (128, 32)
    inputs = {"x": torch.randn(4, tokens, width), "labels": torch.randint(0, 30, (4, tokens))}
    yield f"block of width {width}, 4x{tokens}", Block(width, width // 64), inputs
    name, tokens = ("gpt-125m", 512) if setting.is_cuda else ("tiny", 32)
    ids = torch.randint(0, SHAPES[name][3], (4, tokens))
    model = build(name, tokens, "cpu").float()
    yield f"GPT-2 {name}, 4x{tokens}", model, {"input_ids": ids, "labels": ids.clone()}


def models(setting: Setting) -> Iterator[Row]:
    exact_products()
    mesh = autopar.init_mesh(setting.device)
    for name, model, inputs in models_of(setting):
        inputs = moved(inputs, setting.device)
        exact = copy.deepcopy(model).to(setting.device)
        wanted = loss_of(exact(**inputs))
        wanted.backward()
        row: Row = {"model": name}
        parallel, loss = _ran(model, mesh, inputs, None)
        row["fp32: loss off"] = near(loss, wanted, LOSS, f"{name}: loss")
        row["gradient off"] = gradients_off(parallel, exact, GRADIENT, name)
        del parallel
        eager = copy.deepcopy(model).to(setting.device, torch.bfloat16)
        floats = {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()}
        loss_of(eager(**floats)).backward()
        parallel, loss = _ran(model, mesh, inputs, HALF)
        row["bf16: loss off"] = near(loss.float(), wanted, ROUNDED, f"{name}: loss in bfloat16")
        ours, theirs = half_gradients_off(parallel, eager, exact, f"{name} in bfloat16")
        yield row | {"its gradient off": ours, "eager's": theirs}


def _ran(model: nn.Module, mesh: Any, inputs: dict[str, Tensor], precision: Any) -> tuple[Any, Tensor]:
    parallel = autopar.compile(copy.deepcopy(model), mesh, precision=precision, example_kwargs=inputs)
    loss = loss_of(parallel(**inputs))
    loss.backward()
    return parallel, loss
