"""Code of packages: where it lies, and what it may note for itself while a model is traced."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from autopar.trace.values import is_installed
from tests.processes.compare import both_backward


def test_packages_are_installed_where_pip_has_put_them(tmp_path: Path) -> None:
    for folder in ("cloned", "installed"):
        for file in ("package/__init__.py", "package/inner/__init__.py", "package/inner/file.py", "train.py"):
            (tmp_path / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / file).touch()
    record = tmp_path / "installed" / "package-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("package/inner/file.py,sha256=0,0\npackage/other/file.py,sha256=0,0\n")
    assert is_installed(str(tmp_path / "installed/package/inner/file.py")) and is_installed(np.__file__)
    assert is_installed(str(tmp_path / "installed/package/other/file.py")), "in a folder without __init__.py"
    assert not is_installed(str(tmp_path / "installed/train.py")), "a script beside it"
    assert not is_installed(str(tmp_path / "cloned/package/inner/file.py"))


REGISTRY = """
class State:
    def __init__(self, kinds):
        self.kinds = dict(kinds)

class Registry:
    def __init__(self):
        self.state = State({})

    def factor_of(self, tensor, counts):
        more = {len(self.state.kinds): 1.0} if counts else {}
        self.state = State({type(tensor): 2.0, **self.state.kinds, **more})
        return self.state.kinds[type(tensor)]

registry = Registry()
"""


noting: Any = None  # the package


class Noting(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(4, 2), counts

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * noting.registry.factor_of(x, self.counts)


@pytest.mark.parametrize("counts", [False, True])
def test_a_package_may_make_its_tables_anew(
    one: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    """As einx does at every call; what is more after every call is a change."""
    package = _package("noting", REGISTRY, tmp_path, monkeypatch)
    monkeypatch.setitem(globals(), "noting", package)
    model, x = Noting(counts), torch.rand(3, 4)
    parallel = autopar.compile(model, one)
    if counts:
        with pytest.raises(TraceError, match="forward changes state"):
            parallel(x)
    else:
        torch.testing.assert_close(parallel(x).detach(), model(x).detach())


PAIRS = """
import torch
from torch import nn

def sizes_are_one(rows, others):
    return isinstance(rows, torch.Tensor) and all(len(one) == len(rows) for one in others)

class Pairs(nn.Module):
    def pairs(self, labels):
        same = (labels[None] == labels[:, None]).byte()
        same.fill_diagonal_(0)
        return torch.where(same)

    def reduced(self, made):
        kept = made[made > 0]
        count = len(kept)
        if count >= 1:
            loss = torch.mean(kept)
        else:
            loss = torch.sum(made * 0)
        self.kept = count
        return loss

    def forward(self, made, labels):
        return self.compute(made, labels)

    def compute(self, made, labels):
        first, second = self.pairs(labels)
        if len(first) == 0:
            return made.sum() * 0
        rows = (made[first] * made[second]).sum(1)
        assert sizes_are_one(rows, (first, second))
        return self.reduced(rows)
"""


class Paired(nn.Module):
    """A loss of pairs that labels tell, as packages of metric learning have them."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 3).double(), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.linear(x), labels)


def test_methods_of_packages_ask_of_rows_what_those_of_scripts_do(
    one: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Paired(_package("pairing", PAIRS, tmp_path, monkeypatch).Pairs())
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step, told in enumerate(([0, 0, 1, 1, 2], [0, 1, 2, 3, 4], [3, 1, 0, 3, 1])):
        torch.manual_seed(step)
        both_backward(plain, parallel, torch.randn(5, 4).double(), torch.tensor(told), within=1e-12)
        assert getattr(parallel.loss, "kept", None) == getattr(plain.loss, "kept", None)


def _package(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As pip installs one."""
    (file := folder / f"{name}.py").write_text(text)
    (folder / f"{name}-1.0.dist-info").mkdir()
    (folder / f"{name}-1.0.dist-info" / "RECORD").write_text(f"{name}.py,sha256=0,0\n")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, made)
    spec.loader.exec_module(made)
    return made


ELSEWHERE = """
import torch, transformers, autopar
from transformers import GPT2Config, GPT2LMHeadModel
assert "site-packages" not in transformers.__file__
torch.manual_seed(0)
sizes = dict(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=None, eos_token_id=None))
ids = torch.randint(0, 32, (2, 8))
wanted = model(input_ids=ids, labels=ids).loss.item()
parallel = autopar.compile(model, autopar.init_mesh())
for _ in range(2):
    assert abs(parallel(input_ids=ids, labels=ids).loss.item() - wanted) < 1e-5
assert len(parallel._autopar.prepared()) == 1
"""


def test_a_library_may_lie_where_the_users_code_lies(tmp_path: Path) -> None:
    """As one that is installed with `pip install -e` or `--target` does: what we change in it while a model is traced
    is not taken for what forward changes.
    """
    (tmp_path / "transformers").symlink_to(Path(transformers.__file__).parent, target_is_directory=True)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
