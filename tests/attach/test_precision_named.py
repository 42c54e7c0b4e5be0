"""precision="bf16" in autopar.compile: short for a policy, and part of what a plan is known by."""

import copy
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

import autopar
from autopar.ir.precision import told
from tests.processes.compare import near

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IN_WORDS = "float32 parameters compute in bfloat16; gradients are summed in float32"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.down(torch.relu(self.up(x))), y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 24), torch.randn(8, 24)


def test_compile_takes_the_short_form(one: DeviceMesh) -> None:
    x, y = batch()
    named, policy = (autopar.compile(Tiny(), one, example_inputs=(x, y), precision=p) for p in ("bf16", BF16))
    assert named.plan.graph == policy.plan.graph and told(named.plan.graph) == IN_WORDS
    named(x, y).backward()
    assert {p.grad.dtype for p in named.parameters() if p.grad is not None} == {torch.float32}


def test_a_cache_keeps_precisions_apart(one: DeviceMesh, tmp_path: Path) -> None:
    for precision in ("bf16", "fp32", "bf16"):
        made = autopar.compile(Tiny(), one, example_inputs=batch(), precision=precision, cache=tmp_path)
        assert told(made.plan.graph) == (IN_WORDS if precision == "bf16" else "")
    assert len(list(tmp_path.glob("*.plan.json"))) == 2


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d], ids=["batch", "instance"])
def test_norms_with_statistics_compute_beside_bfloat16(norm: type[nn.Module], one: DeviceMesh) -> None:
    """No kernel takes their statistics in float32 beside parameters in bfloat16."""
    torch.manual_seed(0)
    options = {} if norm is nn.BatchNorm1d else {"affine": True, "track_running_stats": True}
    plain = nn.Sequential(nn.Conv1d(4, 8, 3), norm(8, **options), nn.ReLU(), nn.Conv1d(8, 2, 3))
    parallel, x = autopar.compile(copy.deepcopy(plain), one, precision="bf16"), torch.randn(16, 4, 20)
    for _ in range(3):
        for model in (plain, parallel):
            model.zero_grad()
            model(x).float().square().mean().backward()
    for name, parameter in plain.named_parameters():
        near(parallel.get_parameter(name).grad, parameter.grad, 0.05, name, 1e-3)
    for name, buffer in plain.named_buffers():
        near(parallel.get_buffer(name), buffer, 0.01, name)
    near(parallel.eval()(x).float(), plain.eval()(x), 0.02, "evaluation")


@pytest.mark.parametrize("name", ["fp16", "bfloat16", ""])
def test_another_name_is_refused(name: str, one: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=f"precision '{name}' is not known; choose bf16 or fp32"):
        autopar.compile(Tiny(), one, precision=name)


def test_a_cache_keeps_settings_of_tf32_apart(one: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kinds in ((), ("conv",), ("matmul", "conv"), ("conv",)):
        monkeypatch.setattr(sys.modules["autopar.compile"], "tf32_here", lambda device, kinds=kinds: kinds)
        made = autopar.compile(Tiny(), one, example_inputs=batch(), hardware="h100-sxm", cache=tmp_path)
        assert made.plan.tf32 == kinds
    assert len(list(tmp_path.glob("*.plan.json"))) == 3


def test_ranks_compare_precision_and_tf32(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Mapping[str, object]] = []
    monkeypatch.setattr(sys.modules["autopar.planner"], "same_everywhere", lambda told, _: compared.append(told))
    monkeypatch.setattr(sys.modules["autopar.compile"], "tf32_here", lambda device: ("conv",))
    for precision in ("bf16", "fp32"):
        autopar.compile(Tiny(), one, example_inputs=batch(), hardware="h100-sxm", precision=precision)
    assert [told["precision"] for told in compared] == [BF16, None]
    assert [told["tf32 for"] for told in compared] == [("conv",), ("conv",)]
