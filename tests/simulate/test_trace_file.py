"""The trace file is what viewers expect, and is written whole or not at all.

Fields as the "Trace Event Format" of the Chromium project names them; chrome://tracing and ui.perfetto.dev read it.
"""

import json
import os
from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.errors import PlanMismatch
from autopar.simulate.timeline import timeline_of, to_trace
from cost_models.simulator import COMPUTE, Event, play
from cost_models.trace_file import trace_events, write_trace
from tests.simulate.plans import drawn
from tests.simulate.reference import random_events
from tests.support.machines import FAST

TIMED = {"X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}, "C": {"name", "ph", "ts", "pid", "tid", "args"}}


def check(entries: list[dict]) -> None:
    names = [entry for entry in entries if entry["ph"] == "M"]
    timed = entries[len(names) :]
    assert names == entries[: len(names)] and {entry["name"] for entry in names} >= {"process_name", "thread_name"}
    threads = {entry["tid"] for entry in names if entry["name"] == "thread_name"}
    for entry in names:
        assert entry["args"].keys() == {"sort_index" if entry["name"] == "thread_sort_index" else "name"}
    for entry in timed:
        assert TIMED[entry["ph"]] <= entry.keys(), entry
        assert entry["ts"] >= 0 and entry["tid"] in threads and entry["pid"] == names[0]["pid"]
        if entry["ph"] == "X":
            assert entry["dur"] >= 0 and isinstance(entry["args"], dict)
        else:
            assert all(isinstance(value, int) for value in entry["args"].values())
    assert all(one["ts"] <= two["ts"] for one, two in pairwise(timed))
    for thread in threads:  # in whole nanoseconds, as viewers count
        slices = [(round(e["ts"] * 1e3), round(e["dur"] * 1e3)) for e in timed if e["ph"] == "X" and e["tid"] == thread]
        assert all(start + length <= later for (start, length), (later, _) in pairwise(slices)), thread


@pytest.mark.parametrize("seed", range(40))
def test_any_timeline_makes_a_valid_trace(seed):
    timeline = play(random_events(seed))
    entries = json.loads(json.dumps(trace_events(timeline), allow_nan=False))
    check(entries)
    for tier, memory in timeline.memory.items():
        levels = [entry["args"][tier] for entry in entries if entry["ph"] == "C" and tier in entry["args"]]
        assert levels[-1] == memory.levels[-1] and max(levels) <= memory.peak_bytes


def test_an_empty_timeline_makes_a_valid_trace():
    check(trace_events(play([])))


def test_a_slice_tells_its_phase_its_stream_and_what_is_known_of_it():
    about = (("module", "layers.0.mlp"), ("source", "model.py:12"), ("bytes", 4096))
    events = [
        Event("gather", "comm:data", 2e-6, (), (), "forward", about),
        Event("mm", COMPUTE, 1e-6, (0,), (), "forward"),
    ]
    entries = trace_events(play(events))
    thread_of = {entry["args"]["name"]: entry["tid"] for entry in entries if entry["name"] == "thread_name"}
    assert list(thread_of) == ["phase", COMPUTE, "comm:data"]
    (gather,) = (entry for entry in entries if entry["name"] == "gather")
    assert (gather["ts"], gather["dur"], gather["tid"]) == (0, 2, thread_of["comm:data"])
    assert gather["args"] == {"event": 0, "phase": "forward", "seconds": 2e-6, **dict(about), "exposed_seconds": 2e-6}
    (phase,) = (entry for entry in entries if entry["name"] == "forward")
    assert (phase["tid"], phase["dur"]) == (thread_of["phase"], 3)


@pytest.mark.parametrize("prefetch", [None, 1])
def test_a_plan_writes_its_trace(tmp_path, prefetch):
    plan, pricer = drawn("gpt2", (2, 2), 1)
    plan = replace(plan, prefetch=prefetch)
    path = tmp_path / "step.json"
    to_trace(plan, path)
    file = json.loads(path.read_text())
    check(file["traceEvents"])
    timeline = timeline_of(plan, pricer, prefetch)
    assert file["otherData"]["step_seconds"] == timeline.seconds
    assert file["otherData"]["peak_bytes.hbm"] == timeline.memory["hbm"].peak_bytes
    slices = [entry for entry in file["traceEvents"] if entry["ph"] == "X"]
    assert {"forward", "backward", "optimizer"} <= {entry["name"] for entry in slices}
    assert len(slices) == sum(event.seconds > 0 for event in timeline.events) + 3
    assert any(entry["args"].get("module", "").startswith("transformer.h.0") for entry in slices)
    assert any(".py:" in entry["args"].get("source", "") for entry in slices)
    if prefetch is None:
        assert max(e["args"]["hbm"] for e in file["traceEvents"] if e["ph"] == "C") == plan.peak_bytes["hbm"]


def test_a_trace_plays_the_plan_as_it_was_chosen(tmp_path):
    """With overlap, and weights as far ahead, where the plan says so; one after the other where it does not."""
    plan, pricer = drawn("gpt2", (2, 2), 1)
    for prefetch in (None, 2):
        plan = replace(plan, prefetch=prefetch)
        to_trace(plan, tmp_path / "step.json")
        told = json.loads((tmp_path / "step.json").read_text())["otherData"]
        assert told["step_seconds"] == timeline_of(plan, pricer, prefetch).seconds
        assert told["prefetch"] == ("nothing overlaps" if prefetch is None else prefetch)


def test_two_traces_of_a_plan_are_the_same_to_the_byte(tmp_path):
    plan, _ = drawn("mlp", (2,), 0)
    to_trace(plan, tmp_path / "one.json")
    to_trace(plan, tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_a_plan_is_not_played_on_another_machine(tmp_path):
    plan, _ = drawn("mlp", (2,), 0)
    with pytest.raises(PlanMismatch, match=r"was priced on h100-sxm.*test-1e\+12"):
        to_trace(plan, tmp_path / "step.json", FAST)
    assert not any(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "step.json"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_trace(play(random_events(0)), path)
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["step.json"]
