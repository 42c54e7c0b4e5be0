"""`python -m autopar.measure`: real processes move what the plan says; what makes no sense is told in one sentence."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.ir.mesh import Mesh
from autopar.measure.__main__ import main
from autopar.plan import Plan
from autopar.search.__main__ import main as search_command
from cost_models.hardware import Hardware
from tests.support.families import family
from tests.support.plans import PlanSampler
from tests.support.tiny import BUILD, TINY

ROOT = Path(__file__).parents[2]
MODEL = f"""{TINY}{BUILD}
def wider():
    return Tiny(96), (torch.zeros(8, 24), torch.zeros(8, 24))

def one_input():
    return Tiny(), (torch.zeros(8, 24),)

def frozen():
    return Tiny().requires_grad_(False), (torch.randn(8, 24), torch.randn(8, 24))  # others on each rank
"""
FAMILY = """
from tests.support.families import family

def build():
    case = family({name!r})
    return case.model, (), case.inputs
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(mesh: str = "a=2", hardware: str = "cpu-gloo") -> None:
    given = ["tiny.py:build", "--mesh", mesh, "--hardware", hardware, "--quiet", "-o", "plan.json"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert search_command(given) == 0


def random_plan(folder: Path, name: str, **sizes: int) -> Plan:
    (folder / "model.py").write_text(FAMILY.format(name=name))
    mesh = Mesh(tuple(sizes), tuple(sizes.values()))
    plan = PlanSampler(family(name).graph, mesh, Hardware.load("cpu-gloo")).draw(1)
    plan.save(folder / "plan.json")
    return plan


def command(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """The output of the command in a process of its own, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "autopar.measure", *arguments], cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_model_that_trains_nothing_is_measured_with_the_inputs_of_one_rank(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        given = ["tiny.py:frozen", "--mesh", "a=2", "--hardware", "cpu-gloo", "--quiet", "-o", "plan.json"]
        assert search_command(given) == 0
    out = command(folder, "plan.json", "tiny.py:frozen", "--steps", "2")
    assert "executed with tiny.py:frozen" in out and "DIFFERENT" not in out


def test_two_processes_move_what_the_plan_says(folder: Path) -> None:
    """A random plan of a transformer block, which sends a lot."""
    plan = random_plan(folder, "block", data=2)
    out = command(folder, "plan.json", "model.py:build", "--steps", "2", "--json", "told.json")
    told = json.loads((folder / "told.json").read_text())
    moved = {(one["kind"], one["axis"]): one["nbytes"] for one in told["collectives"]}
    assert told["is_equal"] and moved == {key: [nbytes, nbytes] for key, nbytes in plan.comm_bytes.items()}
    assert len(moved) >= 3 and "DIFFERENT" not in out and "executed with model.py:build" in out
    assert set(told["phases"]) == {"forward", "backward", "optimizer"} and told["steps"] == 2
    assert told["step"]["measured"] > 0 and told["step"]["predicted"] == plan.step_seconds
    assert told["sum_of_parts"]["predicted"] == pytest.approx(plan.step_seconds)
    for phase in ("forward", "backward", "step"):
        pair = told["peak_bytes"][phase]
        assert 0.7 < pair["measured"] / pair["predicted"] < 1.5, phase
    assert "2 processes of " in told["where"] and "1 thread(s) each" in told["where"]


def test_two_stages_send_and_hold_what_their_pipeline_says(folder: Path) -> None:
    given = [
        "tiny.py:build",
        "--mesh",
        "pipe=2",
        "--micro-batches",
        "4",
        "--schedule",
        "1f1b",
        "--hardware",
        "cpu-gloo",
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        assert search_command([*given, "--quiet", "-o", "pipeline.json"]) == 0
    out = command(folder, "pipeline.json", "tiny.py:build", "--steps", "2", "--json", "told.json")
    told, crossing = json.loads((folder / "told.json").read_text()), 2 * 48 * 4  # rows of a micro-batch, width, bytes
    assert told["is_equal"] and "DIFFERENT" not in out and "executed with tiny.py:build" in out
    assert [one["sent"] for one in told["ranks"]] == [[4 * crossing, 4 * crossing]] * 2  # on, and back
    for rank in told["ranks"]:
        assert rank["peak"]["predicted"] == pytest.approx(rank["peak"]["measured"], rel=1e-3)
    assert [one["rank"] for one in told["stages"]] == [0, 1] and told["micro_batches"] == 4
    assert told["schedule_seconds"]["measured"] > 0 and told["step"]["measured"] > 0
    assert all(one[of]["measured"] > 0 for one in told["stages"] for of in ("forward", "backward"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("gpt2", {"data": 2, "tensor": 2}), ("cnn", {"data": 4})], ids=str)
def test_four_processes_move_what_the_plan_says(folder: Path, name: str, sizes: dict[str, int]) -> None:
    plan = random_plan(folder, name, **sizes)
    command(folder, "plan.json", "model.py:build", "--steps", "1", "--json", "told.json")
    told = json.loads((folder / "told.json").read_text())
    assert told["is_equal"]
    assert {(one["kind"], one["axis"]): one["nbytes"][1] for one in told["collectives"]} == plan.comm_bytes


@pytest.mark.slow
def test_it_runs_under_torchrun(folder: Path) -> None:
    plan = random_plan(folder, "mlp", data=2)
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    out = command(folder, "plan.json", "model.py:build", "--steps", "2", "--json", "told.json", launcher=launcher)
    assert out.count("time of a step") == 1 and json.loads((folder / "told.json").read_text())["is_equal"]
    assert plan.comm_bytes


# --- what makes no sense ---------------------------------------------------------------------------------------------


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence of a command that must fail with status 2, and start nothing."""
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("autopar.measure: "), (out, err)
    return err.removeprefix("autopar.measure: ").rstrip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("lost.json", "tiny.py:build"), "plan lost.json cannot be read: No such file or directory; make one with"),
        (("broken.json", "tiny.py:build"), "broken.json is not complete JSON"),
        (("plan.json", "tiny.py:built"), "tiny.py has no function 'built'; its functions are build, wider, one_input"),
        (("plan.json", "lost.py:build"), "file 'lost.py' of MODEL 'lost.py:build' does not exist in "),
        (("plan.json", "tiny.py:one_input"), "tiny.py:one_input returned inputs that its model does not take: missing"),
        (("plan.json", "tiny.py:wider"), "plan.json was made for parameter up.weight float32[48, 24], this model has"),
        (("plan.json", "tiny.py:build", "--steps", "0"), "--steps 0 is no number of steps; give at least 1"),
        (("plan.json", "tiny.py:build", "--json", "lost/told.json"), "lost of --json lost/told.json does not exist"),
        (("plan.json", "tiny.py:build", "--hardware", "h900"), "no hardware profile 'h900'; known profiles: "),
        (("plan.json", "tiny.py:build", "--hardware", "lost.toml"), "hardware profile lost.toml cannot be read: "),
        (("plan.json", "tiny.py:build", "--hardware", "h100-sxm"), "the plan was priced on cpu-gloo with figures "),
        (("plan.json",), "the following arguments are required: FACTORY; see python -m autopar.measure --help"),
        (("plan.json", "tiny.py:build", "--fast"), "unrecognized arguments: --fast"),
    ],
)
def test_what_cannot_be_measured_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    planned()
    (folder / "broken.json").write_text((folder / "plan.json").read_text()[:-100])
    assert sentence in refused(capfd, *arguments)


def test_more_ranks_than_this_machine_can_play_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    planned("a=256,b=4", "h100-sxm")
    told = refused(capfd, "plan.json", "tiny.py:build", "--device", "cpu")
    assert told.startswith("the plan is for mesh a=256,b=4; 1024 processes on this machine's ")
    assert told.endswith("run it under torchrun where they have room")


def test_under_torchrun_the_processes_must_be_the_mesh(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    told = refused(capfd, "plan.json", "tiny.py:build")
    assert told == "the plan is for mesh a=2, but 3 processes run; start 2 of them"
    monkeypatch.setenv("RANK", "1")
    assert main(["plan.json", "tiny.py:build"]) == 2
    assert capfd.readouterr() == ("", "")  # rank 0 has said it


def test_a_device_that_is_not_there_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    told = refused(capfd, "plan.json", "tiny.py:build", "--device", "cuda")
    assert told == "--device cuda: 2 ranks need a device each, this machine has 0"


def test_help_has_an_example_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert (
        "python -m autopar.measure plan.json examples/gpt2.py:build" in out and "exit status: 0 measured, 1 the" in out
    )


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    planned()
    source = MODEL.replace(
        "def build():", "import os\ndef build():\n    assert os.environ.get('RANK') != '1', 'no luck'"
    )
    (folder / "tiny.py").write_text(source)
    assert main(["plan.json", "tiny.py:build"]) == 1
    err = capfd.readouterr().err
    assert err.endswith("autopar.measure: process 1 failed; its error stands above\n")
