"""Places for plans and profiles that cannot be read or written: a warning at most, and training goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import planner
from autopar.search import Request
from tests.processes.compare import LOSS, near
from tests.processes.models import batch, net


def blocked(folder: Path, where: str) -> None:
    """Nothing can be written to `folder`."""
    match where:
        case "a file":
            folder.write_text("mine")
        case "below a file":
            folder.parent.write_text("mine")
        case "a dangling link":
            folder.symlink_to(folder.parent / "gone" / "nowhere")
        case "a link to itself":
            folder.symlink_to(folder)
        case _:
            folder.mkdir()


@pytest.mark.parametrize("where", ["a file", "below a file", "a link to itself", "full"])
def test_training_goes_on_where_a_plan_cannot_be_kept(
    one: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = tmp_path / "parent" / "plans" if where == "below a file" else tmp_path / "plans"
    blocked(folder, where)
    if where == "full":

        def no_space(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(autopar.Plan, "save", no_space)
    plain = net()
    with pytest.warns(UserWarning, match="cannot be kept") as told:
        parallel = autopar.compile(plain, one, cache=folder, example_kwargs=batch())
    assert len(told) == 1
    near(parallel(**batch()), plain(**batch()), LOSS, "loss")


def instead(path: Path, what: str) -> None:
    path.unlink()
    match what:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case _:
            path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize("what", ["a pipe", "a folder", "a dangling link"])
def test_what_is_no_file_is_not_waited_for(one: DeviceMesh, tmp_path: Path, what: str) -> None:
    wanted = autopar.compile(net(), one, cache=tmp_path, example_kwargs=batch()).plan
    (kept,) = tmp_path.glob("*.plan.json")
    instead(kept, what)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = autopar.compile(net(), one, cache=tmp_path, example_kwargs=batch()).plan
    assert found.choices == wanted.choices
    assert len([one for one in told if "cannot be kept" in str(one.message)]) == (what == "a folder")


@pytest.mark.parametrize("later_s", [5.0, 60.0, 120.0])
def test_a_plan_that_time_has_cut_serves_where_no_more_is_given(
    one: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later_s: float
) -> None:
    find, calls = planner.answer, list[float]()

    def slow(question: Any, request: Request) -> Any:
        calls.append(request.time_limit_s)
        if request.time_limit_s == 60.0:  # as if the search had ended at its limit
            past = time.monotonic
            monkeypatch.setattr(planner.time, "monotonic", lambda: past() + 60)
        return find(question, request)

    monkeypatch.setattr(planner, "answer", slow)
    autopar.compile(net(), one, cache=tmp_path, example_kwargs=batch(), time_limit_s=60.0)
    autopar.compile(net(), one, cache=tmp_path, example_kwargs=batch(), time_limit_s=later_s)
    assert calls == ([60.0, 120.0] if later_s == 120.0 else [60.0])


def run(script: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in (os.environ | environment).items() if value is not None}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user whom the system does not know")
def test_no_home_is_no_error() -> None:
    script = (
        "import os, autopar\n"
        "from autopar.machine.device import hardware_or_here, operators_path\n"
        "hardware_or_here(None, 'cpu')  # imports what it needs, while it may read it\n"
        "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "print(hardware_or_here(None, 'cpu').name, operators_path())"
    )
    done = run(script, HOME=None, XDG_CACHE_HOME=None, AUTOPAR_PROFILES=None, TMPDIR="/tmp")
    assert done.stdout.split() == ["cpu-gloo", "/tmp/autopar-54321/.cache/autopar/profiles/operators.sqlite3"], (
        done.stderr
    )


def test_a_script_compiles_without_home(tmp_path: Path) -> None:
    script = (
        "import torch, autopar\n"
        "parallel = autopar.compile(torch.nn.Linear(4, 4), autopar.init_mesh('cpu', data=1))\n"
        "print(parallel(torch.randn(2, 4)).shape)"
    )
    done = run(script, HOME=None, XDG_CACHE_HOME=None, TMPDIR=str(tmp_path))
    assert done.stdout == "torch.Size([2, 4])\n", done.stderr
