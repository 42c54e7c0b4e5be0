"""Predicted beside measured: the parts of a prediction are those of the plan, and text and JSON say the same."""

import json

import pytest

from autopar.measure.report import Collective, Measured, Pair, predicted_peaks, predicted_seconds
from autopar.price.pricer import Pricer
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import FAST, SLOW
from tests.support.plans import PlanSampler


@pytest.mark.parametrize(("name", "sizes"), [("mlp", (2,)), ("block", (2, 2)), ("cnn", (2, 2)), ("gpt2", (4,))])
def test_the_parts_of_a_prediction_are_the_plan(name: str, sizes: tuple[int, ...]) -> None:
    sampler = PlanSampler(family(name).graph, mesh_of(*sizes), SLOW)
    for plan in [*map(sampler.draw, range(5)), sampler.best()]:
        phases, collectives = predicted_seconds(plan, sampler.pricer)
        assert sum(phases.values()) + sum(collectives.values()) == pytest.approx(plan.step_seconds)
        assert phases["optimizer"] == pytest.approx(plan.seconds_by["optimizer"])
        assert {kind for kind, seconds in collectives.items() if seconds} == {
            kind for kind, nbytes in plan.comm_bytes.items() if nbytes
        }
        peaks = predicted_peaks(plan, sampler.pricer)
        assert peaks["step"] == plan.peak_bytes["hbm"] == max(peaks.values())
        assert (
            predicted_peaks(plan, Pricer.on(plan.mesh, FAST, plan.optimizer, plan.bucket_bytes)) == peaks
        )  # bytes know no machine


def example(received: int = 96, made: int = 2) -> Measured:
    return Measured(
        "data=2", "cpu-gloo", "adamw", "2 processes of x86_64 cpu", 5, Pair(0.010, 0.015),
        {"forward": Pair(0.003, 0.003), "backward": Pair(0.005, 0.0055), "optimizer": Pair(0.001, 0.002)},
        (Collective("all_reduce", "data", (2, made), (96, received), Pair(0.001, 0.002)),),
        0.0005, {"forward": Pair(2048, 1024), "step": Pair(2048, 4096)}, ("a note",),
    )  # fmt: skip


def test_the_table_has_every_figure() -> None:
    lines = [" ".join(line.split()) for line in example().table().splitlines()]
    assert lines[:2] == [
        "mesh data=2, planned for cpu-gloo, optimizer adamw", "run on 2 processes of x86_64 cpu"
    ]  # fmt: skip
    for line in (
        "time of a step predicted measured ratio",
        "forward, operators 3.000 ms 3.000 ms 1.00",
        "backward, operators 5.000 ms 5.500 ms 1.10",
        "all_reduce over data 1.000 ms 2.000 ms 2.00",
        "optimizer 1.000 ms 2.000 ms 2.00",
        "sum of its parts 10.000 ms 12.500 ms 1.25",
        "step 10.000 ms 15.000 ms 1.50",
        "all_reduce over data 2 2 96 96 equal",
        "step 2.00 KiB 4.00 KiB 2.00",
        "note: a note",
    ):
        assert line in lines, line


def test_json_has_every_figure_and_is_json() -> None:
    told = json.loads(json.dumps(example().to_json(), allow_nan=False))
    assert told["step"] == {"predicted": 0.010, "measured": 0.015}
    assert told["sum_of_parts"]["measured"] == pytest.approx(0.0125)
    assert told["collectives"][0]["nbytes"] == [96, 96] and told["is_equal"] is True
    assert told["peak_bytes"]["step"] == {"predicted": 2048, "measured": 4096}


@pytest.mark.parametrize("wrong", [example(received=97), example(made=3)])
def test_one_byte_or_call_that_differs_is_told(wrong: Measured) -> None:
    assert not wrong.is_equal and wrong.to_json()["is_equal"] is False and "DIFFERENT" in wrong.table()


def test_what_cannot_be_predicted_is_left_open() -> None:
    pair = Pair(None, 1.0)
    assert pair.ratio is None and Pair(0.0, 1.0).ratio is None
    found = Measured("data=1", "gone", "sgd", "here", 1, Pair(1.0, 2.0), {"forward": pair}, (), 0.0, {})
    assert found.parts == Pair(None, 1.0) and found.is_equal
    assert "forward, operators - 1000.000 ms -" in " ".join(found.table().split())
    assert "no collectives" in found.table()
