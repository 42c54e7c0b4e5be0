"""Examples that no call of a program takes are refused by the search, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.plan import Plan
from autopar.search.__main__ import main
from tests.support.tiny import BUILD, TINY

MODEL = f"""{TINY}{BUILD}
def wants_gradient():
    return Tiny(), (torch.zeros(8, 24, requires_grad=True), torch.zeros(8, 24))

def sparse():
    return Tiny(), (torch.zeros(8, 24).to_sparse(), torch.zeros(8, 24))
"""


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("sparse", "argument ['x'] has the layout sparse_coo, and a plan splits dense tensors"),
    ],
)
def test_examples_that_no_program_takes_are_refused(
    factory: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    status = main([f"tiny.py:{factory}", "--mesh", "a=2", "--hardware", "cpu-gloo", "--quiet", "-o", "plan.json"])
    said = capsys.readouterr().err
    assert status == 2 and f"autopar.search: tiny.py:{factory}: {told}" in said and said.count("\n") == 1
    assert not (tmp_path / "plan.json").exists()


def test_an_example_that_requires_grad_is_planned_with_its_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    call = ["tiny.py:wants_gradient", "--mesh", "a=2", "--hardware", "cpu-gloo", "-o", "plan.json"]
    assert main([*call, "--dot", "plan.dot", "--html", "plan.html"]) == 0
    assert "arguments with gradients: ['x']" in capsys.readouterr().out
    plan = Plan.load(tmp_path / "plan.json")
    assert [node.target for node in plan.graph.inputs_with_gradient] == ["['x']"]
