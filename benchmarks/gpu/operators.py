"""Every operator with a rule, on the tests' samples: float32 and bfloat16 on the device against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.emit.writer import target_of
from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD
from autopar.ir.work import RANDOM
from benchmarks.gpu.stage import Row, Setting, Wrong, exact_products, off
from tests.rules import samples_nn, samples_pointwise, samples_reduce, samples_shape
from tests.rules.harness import make_call, resolve

ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 6e-2}  # of the largest entry; samples have 10 to 10,000 terms
UNDEFINED = ("empty", "resize", "native_dropout.")
# By kernels of their own, or with operands that another call of the same precision has to have made.
ELSEWHERE = (
    ATTENTION,
    ATTENTION_BACKWARD,
    "autopar.share",
    "autopar.store",
    "autopar.fetch",
    "autopar.to_reduce_dtype",
)
NO_DOUBLE = ("aten._grouped_mm.default",)
SHOWN = 12


def operators(setting: Setting) -> Iterator[Row]:
    torch.manual_seed(0)
    exact_products()
    samples = {
        **samples_pointwise.samples(), **samples_shape.samples(), **samples_reduce.samples(), **samples_nn.samples(),
    }  # fmt: skip
    for dtype in ALLOWED:
        done, refused, errors, left = 0, dict[str, str](), dict[str, float](), list[str]()
        for op, calls in samples.items():
            if op in ELSEWHERE or op.startswith(RANDOM) or any(word in op for word in UNDEFINED) or not _exists(op):
                left.append(op)
                continue
            for args, kwargs in calls:
                try:
                    found = _off(op, args, kwargs, dtype, setting.device)
                except (RuntimeError, NotImplementedError) as error:
                    if "CUDA error" in str(error):  # the device takes nothing more from this process
                        raise RuntimeError(f"{op} in {dtype}: {error}") from error
                    refused[op] = str(error).splitlines()[0][:80]
                    continue
                errors[op] = max(found, errors.get(op, 0.0))
                done += 1
        name = str(dtype).removeprefix("torch.")
        yield {"dtype": name, "calls": done, "operators": len(errors), "refused": len(refused), "not tried": len(left)}
        worst = sorted(errors, key=lambda op: -errors[op])[:SHOWN]
        yield from ({"dtype": name, "furthest off": op, "by": errors[op]} for op in worst)
        yield from ({"dtype": name, "refused": op, "because": why} for op, why in refused.items())
        if wrong := [op for op in errors if not errors[op] <= ALLOWED[dtype]]:
            told = ", ".join(f"{op} ({errors[op]:.3g})" for op in wrong)
            raise Wrong(f"in {name} {len(wrong)} operators are off by more than {ALLOWED[dtype]:.3g}: {told}")


def _exists(op: str) -> bool:
    """Whether the library has it, in the version that is here: transformers adds operators from time to time."""
    try:
        resolve(op)
    except AttributeError:
        return False
    return True


def _off(op: str, args: Any, kwargs: Any, dtype: torch.dtype, device: str) -> float:
    """The worst of the results that are floating-point; what else there is must be equal where it depends on no
    rounding. Results beside the first may have another shape on another device: what backward there reads.
    """

    def cast(value: Any, to: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return value.to(to) if value.is_floating_point() else value
        return to if value in (torch.float64, torch.float32, torch.bfloat16) else value

    def here(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(device)
        return value.to(device) if isinstance(value, Tensor) else value

    low = pytree.tree_map(lambda value: cast(value, dtype), (args, kwargs))
    rounded = any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(low))
    widest = torch.float32 if op in NO_DOUBLE else torch.float64
    wide_args, wide_kwargs = pytree.tree_map(lambda value: cast(value, widest), low)
    wanted = make_call(op, wide_args, wide_kwargs).outputs
    here_args, here_kwargs = pytree.tree_map(here, low)
    run = resolve(op) if op == "aten._fused_rms_norm_backward.default" and device == "cpu" else target_of(op)
    made = run(*here_args, **here_kwargs)
    made = [*made] if isinstance(made, tuple | list) else [made]
    if op.startswith("aten.nll_loss") and "forward" in op and args[3] == 0:
        made = made[:1]  # without a reduction CUDA leaves the sum of the weights as it finds it
    worst = 0.0
    for place, (ours, theirs) in enumerate(zip(made, wanted, strict=False)):
        if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor) or (rounded and not _is_real(ours)):
            continue
        if place and ours.shape != theirs.shape:
            continue
        worst = max(worst, off(ours, theirs))
    return worst


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
