"""No operator without a kernel: every program that is emitted for a device can run there, as far as is seen without it.

Programs run on fake tensors of the device; each operator that is called must have a kernel in torch's own table.
"""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # whose operators have rules
from torch import Tensor, nn
from torch.nn import functional

from autopar._compat import FakeTensorMode
from autopar.emit import Emitted, emit
from autopar.emit.writer import target_of
from autopar.ir.graph import TensorType
from autopar.ir.layout import Layout, local_type
from autopar.plan import Plan
from autopar.rules.table import RULES
from tests.support.check import mesh_of
from tests.support.families import FAMILIES, Case, family
from tests.support.kernels import OPERATOR, Called, has_kernel
from tests.support.plans import PlanSampler
from tests.support.residence import ResidenceSampler

assert transformers.integrations.moe  # imported for what it registers
DEVICES = ("cpu", "cuda")
# Operators with a rule that a device lacks: a trace on the CPU has the parts of a fused RMS norm in their place.
LACKING: dict[str, list[str]] = {"cpu": ["aten._fused_rms_norm_backward.default"], "cuda": []}


def without_kernel(called: Called, device: str) -> list[str]:
    return sorted(str(op) for op in called.ops if not has_kernel(op, device.upper()))


def run_fake(plan: Plan, device: str) -> Called:
    """The operators of one step on fake tensors. Raises AssertionError where a result is not what the plan says."""
    program: Emitted = emit(plan, {axis: axis for axis in plan.mesh.groups}, device)
    mesh = plan.mesh
    with FakeTensorMode() as mode, Called() as called, torch.no_grad():

        def empty(type: TensorType, layout: Layout, on: str) -> Tensor:
            local = local_type(type, layout, mesh)
            return torch.empty(local.shape, dtype=getattr(torch, local.dtype), device=on)

        def source(name: str) -> Tensor:
            (type,) = plan.graph.by_name[name].outputs
            assert type is not None
            return empty(type, plan.choices[name].gives[0], "cpu" if name in on_host else device)

        on_host = {n.name for n in plan.graph.nodes if n.op == "parameter" and plan.residence.get(n.target) == "host"}
        own = [torch.empty((), dtype=torch.int64, device=device) for _ in mesh.groups]
        if program.drawing:
            own.append(torch.empty(len(program.drawing), dtype=torch.int64))
        outputs = program.forward(*(source(node.name) for node in program.inputs), *own)
        done = list(zip(program.results, outputs, strict=False))
        if program.backward is not None:
            saved = list(outputs[len(program.results) :])
            tangents = [source(node.name) for node in program.tangents]
            done += zip(program.gradients, program.backward(saved, *tangents, *own), strict=True)
        for (result, layout), value in done:
            if result.ref is not None and value is not None:
                wanted = local_type(plan.graph.type_of(result.ref), layout, mesh)
                assert (tuple(value.shape), str(value.dtype)) == (wanted.shape, f"torch.{wanted.dtype}"), result
    assert mode is not None
    return called


@pytest.mark.parametrize("name", FAMILIES)
def test_a_program_calls_what_its_device_has(name: str) -> None:
    """Split, with values that are run again or offloaded and with parameters on the host."""
    plan = ResidenceSampler(family(name).graph, mesh_of(2)).draw(5)
    for device in DEVICES:
        called = run_fake(plan, device)
        assert len(called.ops) > 10 and not without_kernel(called, device), device


class Dropped(nn.Module):
    """Attention with dropout and grouped heads, or with a mask that is trained."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 64 if kind == "trained" else 32)
        self.bias = nn.Parameter(torch.randn(1, 4, 16, 16)) if kind == "trained" else None

    def forward(self, x: Tensor) -> Tensor:
        q, kv = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q(x), self.kv(x)))
        out = functional.scaled_dot_product_attention(
            q, kv, kv, self.bias, dropout_p=0.1, is_causal=self.bias is None, enable_gqa=True
        )
        return out.square().mean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["grouped", "trained"])
def test_attention_that_drops_has_a_kernel(kind: str, dtype: torch.dtype, device: str) -> None:
    case = Case(Dropped(kind).to(dtype), {"x": torch.randn(4, 16, 64, dtype=dtype)})
    for sizes in ((1,), (2, 2)):
        if device == "cpu":  # numbers are drawn from a seed, which a fake tensor does not have
            mesh = mesh_of(*sizes)
            program = emit(PlanSampler(case.graph, mesh).draw(1), dict.fromkeys(mesh.groups, ""), device)
            assert '"math"' in program.code or "'math'" in program.code
            continue
        called = run_fake(PlanSampler(case.graph, mesh_of(*sizes)).draw(1), device)
        kernel = "flash" if dtype == torch.bfloat16 and kind == "grouped" else "efficient"
        assert not without_kernel(called, device)
        assert {str(op) for op in called.ops} >= {
            f"aten._scaled_dot_product_{kernel}_attention.default",
            f"aten._scaled_dot_product_{kernel}_attention_backward.default",
        }


# Operators that stand for one another: emitted under another name, or never by themselves.
NOT_EMITTED = ("autopar.store", "autopar.fetch", "autopar.share")


@pytest.mark.parametrize("device", DEVICES)
def test_every_operator_with_a_rule_has_a_kernel(device: str) -> None:
    missing: list[str] = []
    for op in RULES:
        if op in NOT_EMITTED or op.startswith(("autopar.attention", "autopar.einsum", "autopar.batch_norm")):
            continue  # run by the programs above
        target = target_of(op)
        if isinstance(target, OPERATOR) and not has_kernel(target, device.upper()):
            missing.append(op)
    assert missing == LACKING[device]
