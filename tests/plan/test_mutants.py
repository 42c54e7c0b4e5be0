"""Plans by the thousand: 4,000 damaged files and 1,000 that somebody has edited and signed anew.

A damaged file is refused in a sentence, or is the plan that it was. A forged one is refused, or runs as the model does:
what may differ are notes and predictions, and those cannot be told to a plan from a cache.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from pathlib import Path
from random import Random

import pytest

from autopar.errors import PlanMismatch
from autopar.measure.__main__ import main as measure
from autopar.plan import Plan
from autopar.plan.store import check, dumps
from autopar.rewrite.apply_choices import plain
from autopar.scale.__main__ import main as scale
from autopar.search import Request, search
from tests.plan.nets import MESH, net_graph, plan_of, sharded, sign
from tests.support.machines import FAST
from tests.support.mutants import damaged, forged, one_sentence

KINDS = (PlanMismatch,)
EACH = 100


@pytest.fixture(scope="module")
def saving_memory() -> Plan:
    """With copies in backward, and ways to the host and back."""
    graph = net_graph(batch=64, length=32, layers=2, classes=32)
    return search(graph, MESH, FAST, Request(pin={"layers.0": "recompute", "layers.1": "offload-activations"}))


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan_of(net_graph(layers=1, width=8, classes=8, batch=8, length=4), layout_of=sharded)


def executed(plan: Plan) -> object:
    """All of a plan that runs; the lines of the model that a node comes from do not."""
    choices = [plan.choices[node.name] for node in plan.graph.nodes]
    return (
        plan.mesh, plan.graph.digest, plan.deliveries, plan.residence, plan.outputs,
        [(c.takes, c.gives, c.reads, c.body, c.body_axes, c.body_size) for c in choices],
    )  # fmt: skip


@pytest.mark.parametrize("batch", range(40))
def test_a_damaged_plan_is_refused_or_the_same(small: Plan, tmp_path: Path, batch: int) -> None:
    path, content = tmp_path / "plan.json", dumps(small).encode()
    for case, mutant in damaged(content, range(batch * EACH, (batch + 1) * EACH)):
        path.write_bytes(mutant)
        try:
            found = Plan.load(path)
        except ValueError as error:
            one_sentence(error, KINDS, case, str(path))
        else:
            assert found == small, case


@pytest.mark.parametrize("batch", range(20))
def test_a_forged_plan_is_refused_or_runs_as_the_model_does(saving_memory: Plan, batch: int) -> None:
    content, graph, wanted = json.loads(dumps(saving_memory)), plain(saving_memory.graph), executed(saving_memory)
    for seed in range(batch * 50, (batch + 1) * 50):
        case, document = forged(content, seed)
        try:
            plan = Plan.loads(sign(document), "forged.json")
            check(plan, graph, MESH, origin="forged.json")
        except ValueError as error:
            one_sentence(error, KINDS, case, "forged.json")
            continue
        assert plan.explain().isascii() and plan.to_dot(), case  # whatever it claims can be shown
        if executed(plan) != wanted:  # layouts may be others: by rules, by collectives that exist
            assert plain(plan.graph).digest == graph.digest, case
            assert plan.peak_bytes["hbm"] > 0 and plan.bound <= plan.step_seconds * (1 + 1e-6), case


@pytest.mark.parametrize("batch", range(5))
def test_the_commands_say_it_in_one_sentence(small: Plan, tmp_path: Path, batch: int) -> None:
    path, content = tmp_path / "plan.json", json.loads(dumps(small))
    for seed in range(batch * 8, (batch + 1) * 8):
        case, document = forged(content, Random(seed).randrange(10**6))
        path.write_text(sign(document))
        for command, more in ((scale, ["--no-search", "--quiet"]), (measure, ["tests/plan/nets.py:nobody"])):
            said, told = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
                status = command([str(path), *more])
            assert status in (0, 2), case
            if status == 2:
                assert len(told.getvalue().splitlines()) == 1 and not said.getvalue(), f"{case}: {told.getvalue()}"


# --- what is no file -------------------------------------------------------------------------------------------------


def test_nobody_waits_for_a_pipe_or_reads_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    began = time.monotonic()
    for name, kind in (
        ("pipe", OSError),
        ("device", OSError),
        ("folder", IsADirectoryError),
        ("link", FileNotFoundError),
    ):
        with pytest.raises(OSError) as caught:
            Plan.load(tmp_path / name)
        one_sentence(caught.value, (kind,), name, name)
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            assert scale([str(tmp_path / name)]) == 2
        assert len(told.getvalue().splitlines()) == 1
    assert time.monotonic() - began < 5


def test_a_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes, at most"):
        Plan.load(tmp_path / "plan.json")


def test_a_device_is_never_replaced(tmp_path: Path, small: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root could: the draft would be renamed to it."""
    (tmp_path / "plan.json").write_text("a device")
    monkeypatch.setattr(Path, "is_char_device", lambda path: path.name == "plan.json")
    with pytest.raises(OSError, match="it is a device, not a file"):
        small.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == "a device" and os.listdir(tmp_path) == ["plan.json"]
