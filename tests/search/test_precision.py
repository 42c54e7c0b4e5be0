"""--precision bf16: the same plan as with the policy it stands for, told, and another one than without."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar import Plan, PlanMismatch
from autopar.measure.__main__ import main as measure_main
from autopar.plan.fit import check
from autopar.search.__main__ import main
from autopar.trace import capture, graph_of
from autopar.trace.precision import precision_named
from tests.support.tiny import TINY

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IN_WORDS = "float32 parameters compute in bfloat16; gradients are summed in float32"
FACTORY = """
def build():
    return Tiny(), (torch.zeros(8, 24), torch.zeros(8, 24))
"""


def tiny() -> torch.nn.Module:
    named: dict[str, type[torch.nn.Module]] = {}
    exec(TINY, named)
    return named["Tiny"]()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(TINY + FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def search(*more: str) -> int:
    return main(["tiny.py:build", "--mesh", "a=2", "--hardware", "h100-sxm", "--quiet", *more])


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(8, 24), "y": torch.zeros(8, 24)}


def test_bf16_is_bfloat16_over_the_stored_parameters_summed_in_float32(folder: Path) -> None:
    assert search("--precision", "bf16", "-o", "plan.json", "--json") == 0
    plan = Plan.load("plan.json")
    check(plan, graph_of(capture(tiny(), (), batch(), precision=BF16), BF16), plan.mesh)
    dtypes = {plan.graph.type_of(ref).dtype for n in plan.graph.nodes if n.op == "autopar.einsum" for ref in n.operands}
    assert dtypes == {"bfloat16"}
    assert {n.outputs[0].dtype for n in plan.graph.nodes if n.op == "parameter" and n.outputs[0]} == {"float32"}
    assert f"precision: {IN_WORDS}" in plan.explain()
    assert "no matrix product with parameters" not in plan.explain(), "a cast weight is a weight"


def test_the_precision_is_in_the_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search("--precision", "bf16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["precision"] == IN_WORDS
    assert search("--precision", "fp32", "--json") == 0
    assert json.loads(capsys.readouterr().out)["precision"] is None


def test_fp32_is_what_there_is_without(folder: Path) -> None:
    assert search("--precision", "fp32", "-o", "one.json") == search("-o", "other.json") == 0
    assert Plan.load("one.json").graph.digest == Plan.load("other.json").graph.digest
    assert precision_named("fp32") is precision_named(None) is None and precision_named(BF16) is BF16


@pytest.mark.parametrize("name", ["fp16", "fp8", "BF16", ""])
def test_another_name_is_refused_with_what_is_known(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert search("--precision", name) == 2
    said = capfd.readouterr().err
    assert f"precision {name!r} is not known; choose bf16 or fp32" in said and said.count("\n") == 1
    assert ("GradScaler" in said) == (name == "fp16")


def test_a_plan_of_another_precision_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert search("--precision", "bf16", "-o", "plan.json") == 0
    plain = graph_of(capture(tiny(), (), batch()))
    wanted = f"made for {IN_WORDS}, here parameters that are not cast; give the precision it was made with"
    plan = Plan.load("plan.json")
    with pytest.raises(PlanMismatch, match=wanted):
        check(plan, plain, plan.mesh)
    assert measure_main(["plan.json", "tiny.py:build", "--device", "cpu"]) == 2
    assert wanted in capfd.readouterr().err
    assert measure_main(["plan.json", "tiny.py:build", "--device", "cpu", "--precision", "half"]) == 2
    assert "precision 'half' is not known" in capfd.readouterr().err
