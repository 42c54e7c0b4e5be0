"""Files of models that cannot be used as they are: the sentence says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.search.__main__ import main

BARE = """
import torch
from torch import nn

def build():
    return nn.GELU(), (torch.empty(16, 64),)
"""
FILES = {
    "bare.py": BARE,
    "inside/__init__.py": "",
    "inside/parts.py": BARE,
    "inside/model.py": "from .parts import build\n",
    "script.py": "import argparse\n\nargparse.ArgumentParser().parse_args(['--none'])\n",
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("model", "mesh", "sentence"),
    [
        ("bare.py:build", "pipe=2", "the model cannot be cut into 2 stages: it has no parameter"),
        ("inside/model.py:build", "data=2", "is in no package: go to where the package lies, and give package.module"),
        ("script.py:build", "data=2", "put what reads the command line behind `if __name__ == '__main__':`"),
    ],
)
def test_the_sentence_says_what_to_do(capsys: pytest.CaptureFixture[str], model: str, mesh: str, sentence: str) -> None:
    assert main([model, "--mesh", mesh, "--hardware", "h100-sxm", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert err.count(sentence) == 1 and "Traceback" not in err


def test_a_package_is_named_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inside.model:build", "--mesh", "data=2", "--hardware", "h100-sxm", "--quiet"]) == 0
    assert "step time" in capsys.readouterr().out
