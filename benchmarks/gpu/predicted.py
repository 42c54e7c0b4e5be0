"""Plans for models that people train on one GPU, executed: time and memory beside what the machine's profile predicts.

As a user would: `python -m autopar.search` with the profile that calibrate left, then `python -m autopar.measure`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.stage import Row, Setting, Skipped, called
from examples import gpt2 as gpt2_example
from examples import llama as llama_example

STEPS = 20
SHARE = {"cuda": 0.8, "cpu": 0.9}


def gpt2() -> gpt2_example.Example:
    """The 124M model as it comes, dropout included."""
    return gpt2_example.build(batch=16)


def llama_1b() -> llama_example.Example:
    return llama_example.build(
        layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, tied=True, batch=4, dtype=torch.float32
    )


def small() -> gpt2_example.Example:
    return gpt2_example.build(layers=1, width=64, heads=2, vocabulary=512, batch=2, sequence=32)


MODELS = {"cuda": (gpt2, llama_1b), "cpu": (small,)}


def predicted(setting: Setting) -> Iterator[Row]:
    """bfloat16 over parameters in float32, AdamW; all is kept that fits, then within a share of that memory."""
    if setting.is_cuda and not setting.profile.exists():
        raise Skipped("the stage calibrate has left no profile")
    profile = str(setting.profile) if setting.is_cuda else "cpu-gloo"
    for model in MODELS[setting.device]:
        factory = f"{__name__}:{model.__name__}"
        limit: int | None = None
        for share in (1.0, SHARE[setting.device]):
            plan, found = Path(setting.folder, "plan.json"), Path(setting.folder, "found.json")
            within = [] if limit is None else ["--memory", f"{share * limit / 2**20:.4f}MiB"]
            asked = ["--mesh", "data=1", "--hardware", profile, "--precision", "bf16", *within, "-o", str(plan)]
            called("autopar.search", factory, *asked)
            how = ["--hardware", profile, "--precision", "bf16", "--device", setting.device]
            called("autopar.measure", str(plan), factory, *how, "--steps", str(STEPS), "--json", str(found))
            told = json.loads(found.read_text())
            limit = told["peak_bytes"]["step"]["predicted"]
            yield from _rows(f"{model.__name__}, {'no limit' if share == 1 else f'{share:.0%} of that memory'}", told)


def _rows(what: str, told: dict[str, Any]) -> Iterator[Row]:
    for name, pair in {"step": told["step"], **told["phases"]}.items():
        if pair["predicted"] and pair["measured"]:
            yield {"plan": what, "ms of": name, **_side_by_side(pair, 1e3)}
    yield {"plan": what, "GiB of": "step", **_side_by_side(told["peak_bytes"]["step"], 2**-30)}


def _side_by_side(pair: dict[str, float], unit: float) -> Row:
    shown = {key: round(unit * pair[key], 3) for key in ("predicted", "measured")}
    return shown | {"ratio": round(pair["predicted"] / pair["measured"], 3)}
