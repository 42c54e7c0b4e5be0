"""The command itself, in a few seconds, on two processes; and that autopar finds and uses what it wrote."""

import os
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.calibrate.bench import in_turn
from autopar.calibrate.collectives import TIMED, _middle
from autopar.calibrate.compute import EQUATIONS, WIDE, products
from autopar.calibrate.measure import Clock, Sample
from autopar.calibrate.profile import profile_from
from autopar.ir.mesh import Mesh
from autopar.machine.device import calibrated_path, hardware_or_here
from autopar.search import search
from autopar.trace import capture, graph_of
from cost_models import Comm, Compute, Curve, Hardware

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "autopar.calibrate"]


def calibrate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles") / "mine.toml"
    done = calibrate("-o", str(path), "--processes", "2", "--seconds", "2")
    assert done.returncode == 0, done.stderr
    return path, done


@pytest.mark.slow
def test_it_measures_and_says_how_well(written):
    path, done = written
    assert "matrix products, float32, 2 ranks at once" in done.stderr and "all_to_all of 2 ranks" in done.stderr
    assert "operators not in the fit: median error" in done.stdout and f"written: {path}" in done.stdout
    hardware = Hardware.load(path)
    assert {"matmul.float32", "elementwise.float32", "host.float32", "copy.h2d"} <= set(hardware.curves)
    assert {f"intra.{collective}.2x1" for collective in TIMED} <= set(hardware.curves)
    assert 1e-7 < hardware.launch_s < 1e-3 and hardware.flops_per_s["float32"] > 1e8
    assert "measured on" in hardware.sources["curves.matmul.float32"]


@pytest.mark.slow
def test_search_uses_it(written):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    graph = graph_of(capture(model, (torch.randn(32, 64),), {}))
    hardware = Hardware.load(written[0])
    plan = search(graph, Mesh(("data",), (2,)), hardware)
    assert plan.hardware_digest == hardware.digest and plan.step_seconds > 0


@pytest.mark.slow
def test_a_second_run_shows_what_drifted_and_a_broken_profile_is_replaced(written):
    path, _ = written
    again = calibrate("-o", str(path), "--processes", "1", "--seconds", "2")
    assert again.returncode == 0, again.stderr
    assert "drift against the profile of" in again.stdout and "ratio" in again.stdout
    assert not any(name.startswith("intra.") for name in Hardware.load(path).curves)  # one rank sends nothing
    path.write_text("launch_s = -1")
    broken = calibrate("-o", str(path), "--processes", "1", "--seconds", "2")
    assert broken.returncode == 0 and "cannot be read and is replaced" in broken.stdout


@pytest.mark.slow
def test_interrupted_it_writes_nothing_and_leaves_no_process(tmp_path):
    path = tmp_path / "mine.toml"
    process = subprocess.Popen(
        # What a shell starts in the background ignores Ctrl-C, and so would all that tests start there.
        ["env", "--default-signal=INT", *COMMAND, "-o", str(path), "--processes", "2"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "ranks at once" in line:
                    break
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(30) == 130
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert not path.exists() and list(tmp_path.iterdir()) == []
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a process of the calibration is left")


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--seconds", "0.1"], "too short"), (["--processes", "0"], "not a number of processes")]
)
def test_bad_arguments_are_refused(arguments, told, capsys):
    from autopar.calibrate.__main__ import main

    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and told in capsys.readouterr().err


def test_where_it_could_not_write_it_measures_nothing(tmp_path, capsys, monkeypatch):
    from autopar.calibrate import __main__ as command

    monkeypatch.setattr(command, "start", lambda *_: pytest.fail("it measured"))
    monkeypatch.delenv("RANK", raising=False)
    assert command.main(["-o", str(tmp_path / "lost" / "here.toml")]) == 2
    assert "lost of -o" in (told := capsys.readouterr().err) and "does not exist; make it first" in told


def test_what_was_measured_here_is_found_and_a_broken_one_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_PROFILES", str(tmp_path))
    assert hardware_or_here(None, "cpu") == Hardware.load("cpu-gloo")
    Hardware.load("cpu-gloo").save(calibrated_path("cpu"))
    text = calibrated_path("cpu").read_text()
    calibrated_path("cpu").write_text(text.replace('name = "cpu-gloo"', 'name = "mine"'))
    assert hardware_or_here(None, "cpu").name == "mine"
    assert (
        hardware_or_here(None, "cpu", calibrated=False).name == hardware_or_here("cpu-gloo", "cpu").name == "cpu-gloo"
    )
    calibrated_path("cpu").write_text(text.replace("launch_s = { value = ", "launch_s = { value = -"))
    with pytest.raises(ValueError, match="launch_s is -"):
        hardware_or_here(None, "cpu")


def test_samples_travel_as_json():
    for step in (Compute("mm", 1.0, 2.0), Comm("all_gather", "a0", 2, 8)):
        sample = Sample("matmul.float32", step, 1e-3, (2, 2), True)
        assert Sample.from_json(sample.to_json()) == sample


def test_operands_take_turns_and_results_stay_for_a_while():
    seen, made = [], []

    def target(x, ways):
        seen.append(x.data_ptr())
        made.append(weakref.ref(result := x + 1))
        return result

    x = torch.ones(2**20)  # of 4 MiB: ten of them take turns, four results stay
    call = in_turn(target, (x, [1, 2]), 2**22)
    for _ in range(20):
        call()
    assert len(set(seen)) == 10 and seen[:10] == seen[10:] and seen[0] == x.data_ptr()
    assert [one() is not None for one in made] == [False] * 16 + [True] * 4


def test_a_large_product_stands_for_a_linear_layer_in_training():
    wide = [bench for bench in products(torch.device("cpu"), torch.float32) if bench.counts > 1]
    assert len(wide) == len(WIDE) and {bench.counts for bench in wide} == {len(EQUATIONS)}
    assert max(bench.step.nbytes for bench in wide) > 2**26


def test_the_mean_of_passes_leaves_out_the_quickest_and_the_slowest():
    assert _middle([3.0, 9.0]) == 6.0
    assert _middle([2.0, 50.0, 1.0, 3.0, 4.0]) == 3.0


def test_more_ranks_are_compared_with_the_median_of_what_few_took():
    base, add = Hardware.load("cpu-gloo"), Compute("aten.add.Tensor", 0.0, 1e6, "float32", 1, "elementwise")
    samples = [Sample(name, add, 1e-3, (2,)) for name in ("elementwise.float32", "stream.float32")]
    samples += [Sample("elementwise.float32", add, s, (ranks,)) for ranks, s in ((2, 1.2e-3), (2, 9e-3), (4, 3e-3))]
    hardware = profile_from(samples, base, "mine", "here", shares_processors=True)
    assert hardware.slowdown["memory.4"] == pytest.approx(3 / 1.2)


def test_the_clock_does_not_count_time_asleep_and_lets_ranks_take_turns():
    def work():
        time.sleep(0.002)
        return sum(range(1000))

    one, many = (Clock(torch.device("cpu"), ranks).seconds(work, 0.02) for ranks in (1, 64))
    assert one < 0.001 and many > 4 * one


COMPILES = """
import torch, autopar
mesh = autopar.init_mesh("cpu", data=1)
parallel = autopar.compile(torch.nn.Linear(8, 8), mesh, example_inputs=(torch.randn(4, 8),))
print(parallel.plan.hardware, *parallel.plan.notes, sep="; ")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_call_that_takes_long_is_made_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 products, where no unit of the processor runs them, are 24 times as slow as float32's."""
    now, calls = [0.0], {"long": 0, "short": 0}
    monkeypatch.setattr(Clock, "now", lambda self: now[0])

    def work(what: str, seconds: float) -> None:
        calls[what] += 1
        now[0] += seconds

    clock = Clock(torch.device("cpu"), 1)
    assert clock.seconds(lambda: work("long", 3.0), 0.0) == pytest.approx(3.0)
    assert clock.seconds(lambda: work("short", 0.1), 0.0) == pytest.approx(0.1)
    assert calls == {"long": 3, "short": 6}


def test_compile_uses_what_was_measured_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_PROFILES", str(tmp_path))
    curve = Curve(((1e3, 1e9), (1e6, 9e10)), 2e-6)
    base = Hardware.load("cpu-gloo")
    sources = {**base.sources, "curves.elementwise.float32": "a test"}
    replace(base, name="mine", curves={"elementwise.float32": curve}, sources=sources).save(calibrated_path("cpu"))
    done = subprocess.run([sys.executable, "-c", COMPILES], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine; ") and "priced with what was measured: profile mine" in done.stdout
