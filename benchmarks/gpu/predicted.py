"""Plans for models that people train on one GPU, executed: time and memory beside what the machine's profile predicts.

Searched as a user would, by `python -m autopar.search` with the profile that calibrate left, several at a time, and
measured as `python -m autopar.measure` does, one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from autopar.machine.device import init_mesh, processors
from autopar.measure.twin import measure
from autopar.plan import Plan
from autopar.trace.precision import precision_named
from benchmarks.gpu.stage import Row, Setting, called
from cost_models.hardware import Hardware
from examples import gpt2 as gpt2_example
from examples import llama as llama_example

STEPS = 20
Model = Callable[[], gpt2_example.Example]


def gpt2() -> gpt2_example.Example:
    """The 124M model as it comes, dropout included."""
    return gpt2_example.build(batch=16)


def llama_1b() -> llama_example.Example:
    return llama_example.build(
        layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, tied=True, batch=4, dtype=torch.float32
    )


def small() -> gpt2_example.Example:
    return gpt2_example.build(layers=1, width=64, heads=2, vocabulary=512, batch=2, sequence=32)


# model -> what its plans are asked for: all is kept that fits, values are run again, moved to the host, parameters too
ASKED: dict[Model, dict[str, tuple[str, ...]]] = {
    gpt2: {
        "no limit": (),
        "19 GiB": ("--memory", "19GiB"),
        "17 GiB": ("--memory", "17GiB"),
        "15 GiB": ("--memory", "15GiB"),
        "14 GiB, the loss alone": ("--memory", "14GiB", "--outputs", "loss"),
    },
    llama_1b: {
        "no limit": (),
        "40 GiB": ("--memory", "40GiB"),
        "28 GiB, the loss alone": ("--memory", "28GiB", "--outputs", "loss"),
    },
    small: {"no limit": (), "the loss alone": ("--outputs", "loss")},
}
MODELS: dict[str, tuple[Model, ...]] = {"cuda": (gpt2, llama_1b), "cpu": (small,)}


def predicted(setting: Setting) -> Iterator[Row]:
    """bfloat16 over parameters in float32, AdamW."""
    hardware, precision = Hardware.load(setting.priced_by), precision_named("bf16")
    init_mesh(setting.device)
    asked = [(factory, what) for factory in MODELS[setting.device] for what in ASKED[factory]]
    plans = searched(setting, [(f"{__name__}:{factory.__name__}", ASKED[factory][what]) for factory, what in asked])
    examples = {factory: factory() for factory in MODELS[setting.device]}
    for (factory, what), plan in zip(asked, plans, strict=True):
        model, args, kwargs = examples[factory]
        found = measure(
            plan, model, args, kwargs, steps=STEPS, hardware=hardware, precision=precision, device_type=setting.device
        )
        yield from rows(f"{factory.__name__}, {what}", found.to_json())


def searched(setting: Setting, asked: Sequence[tuple[str, tuple[str, ...]]]) -> list[Plan]:
    """The plans of (factory, flags), for one device and bfloat16, by the profile that calibrate left."""
    how = ("--mesh", "data=1", "--hardware", setting.priced_by, "--precision", "bf16", "--time-limit", "20")

    def one(number: int) -> Plan:
        path, (factory, flags) = Path(setting.folder, f"plan-{number}.json"), asked[number]
        called("autopar.search", factory, *how, *flags, "-o", str(path))
        return Plan.load(path)

    with ThreadPoolExecutor(max(1, processors() // 2)) as pool:
        return list(pool.map(one, range(len(asked))))


def rows(what: str, told: dict[str, Any]) -> Iterator[Row]:
    """Of what `Measured.to_json` tells."""
    for name, pair in {"step": told["step"], **told["phases"]}.items():
        if pair["predicted"] and pair["measured"]:
            yield {"plan": what, "ms of": name, **_side_by_side(pair, 1e3)}
    yield {"plan": what, "GiB of": "step", **_side_by_side(told["peak_bytes"]["step"], 2**-30)}


def _side_by_side(pair: dict[str, float], unit: float) -> Row:
    shown = {key: round(unit * pair[key], 3) for key in ("predicted", "measured")}
    return shown | {"ratio": round(pair["predicted"] / pair["measured"], 3)}
