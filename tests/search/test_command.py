"""The command line: what it prints and writes; for everything else one clear sentence and the right exit status."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from autopar import NoAnswerInTime, Plan
from autopar.compile import compile
from autopar.search.__main__ import main
from autopar.search.policies import POLICIES
from cost_models.hardware import Hardware
from cost_models.reserve import room_in
from tests.support.tiny import TINY

ROOT = Path(__file__).parent.parent.parent
FACTORIES = """
class Branching(Tiny):
    def forward(self, x, y):
        while super().forward(x, y) > 0:  # depends on values
            x = -x
        return super().forward(x, y)

def build():
    print("a model may print")
    with torch.device("meta"):
        return Tiny(), (torch.empty(8, 24), torch.empty(8, 24))

def by_keyword():
    return Tiny(), (), {"y": torch.zeros(8, 24), "x": torch.zeros(8, 24)}

def branching():
    return Branching(), (torch.zeros(8, 24), torch.zeros(8, 24))

def with_argument(width):
    return None

def raising():
    raise RuntimeError("no such weights")

def model_only():
    return Tiny()

def four():
    return 1, 2, 3, 4

def no_model():
    return "gpt2", ()

def bare_tensor():
    return Tiny(), torch.zeros(8, 24)

def listed():
    return Tiny(), (), [1]

def one_input():
    return Tiny(), (torch.zeros(8, 24),)

def swallowing():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:  # as Python does in a weak reference's callback
        pass
    return build()

def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    return build()

def _private():
    return build()
"""
MODEL = f"\nimport os, signal{TINY}{FACTORIES}"
BROKEN = "import torch\n\nwidth = heigth\n"
GOOD = ("--mesh", "a=2,b=2", "--hardware", "h100-sxm")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "unfinished.py").write_text("def build(:\n")
    (tmp_path / "empty.py").write_text("from os.path import join\n")
    (tmp_path / "bare.toml").write_text('name = "bare"\n')
    (tmp_path / "own.toml").write_text((resources.files("cost_models") / "profiles" / "h100-sxm.toml").read_text())
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("plan")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command that must fail: nothing on stdout, one line on stderr, no file. Gives status and sentence."""

    def run(*arguments: str) -> tuple[int, str]:
        before = files(folder)
        status = main([*arguments, "--quiet", "--json"])
        out, err = capfd.readouterr()
        told = err.removeprefix("a model may print\n")
        assert not out and told.count("\n") == 1 and told.startswith("autopar.search: "), (out, err)
        assert files(folder) == before
        return status, told.removeprefix("autopar.search: ").rstrip()

    return run


# --- a plan is found -------------------------------------------------------------------------------------------------


def test_the_command_writes_plan_and_picture_and_prints_one_object(folder: Path) -> None:
    """In a process of its own, from another folder, with no process group and no GPU."""
    (folder / "work").mkdir()
    given = [
        "../tiny.py:build",
        *GOOD,
        "--json",
        "--baselines",
        "-o",
        "plan.json",
        "--dot",
        "plan.dot",
        "--html",
        "p.html",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "autopar.search", *given, "--memory", "4GiB"],
        cwd=folder / "work", env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told, plan = json.loads(done.stdout), Plan.load(folder / "work" / "plan.json")
    assert files(folder / "work") == {"plan.json", "plan.dot", "p.html"}
    page = (folder / "work" / "p.html").read_text()
    assert all(f">{row['policy']}</th>" in page for row in told["baselines"]) and "../tiny.py:build" in page
    assert "a model may print" in done.stderr and "refereed" in done.stderr
    assert (folder / "work" / "plan.dot").read_text() == plan.to_dot()

    assert (told["step_seconds"], told["bound"], told["gap"]) == (plan.step_seconds, plan.bound, plan.gap)
    assert told["peak_bytes"] == dict(plan.peak_bytes) and told["memory_limit"] == 2**32
    assert {(c["collective"], c["axis"]): c["bytes"] for c in told["comm_bytes"]} == plan.comm_bytes
    assert told["mesh"] == {"a": 2, "b": 2} and told["hardware"] == plan.hardware == "h100-sxm"
    assert told["parameters"] == 24 * 48 * 2 + 48 + 24 and told["layouts"].keys() == plan.parameters.keys()
    assert told["nodes"] == len(plan.graph.nodes) and told["variables"] > told["items"] > 0
    assert told["seconds"]["total"] >= told["seconds"]["search"] > 0
    assert told["cpu_seconds"] > 0 and 2**26 < told["peak_rss_bytes"] < 2**33
    assert [row["policy"] for row in told["baselines"]] == list(command_policies())
    assert all(row["fits"] and told["step_seconds"] <= row["step_seconds"] for row in told["baselines"])


def command_policies() -> tuple[str, ...]:
    return tuple(POLICIES)


def test_the_explanation_and_the_table_go_to_stdout_and_progress_to_stderr(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny.py:by_keyword", *GOOD, "--baselines", "-o", "plan.json"]) == 0
    out, err = capsys.readouterr()
    plan = Plan.load("plan.json")
    assert out.startswith(plan.explain())
    table = out.removeprefix(plan.explain())
    assert "predicted (simulated)" in table and all(policy in table for policy in command_policies())
    assert "traced" in err and "solved" in err and "baseline fsdp" in err and "wrote" in err


def test_quiet_says_nothing_on_stderr_and_a_file_is_replaced_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plan.json").write_text("old")
    assert main(["tiny.py:by_keyword", *GOOD, "--quiet", "-o", "plan.json"]) == 0
    assert capsys.readouterr().err == ""
    assert Plan.load("plan.json").mesh.sizes == (2, 2)


def test_the_same_command_writes_the_same_file(folder: Path) -> None:
    for name in ("one.json", "two.json"):
        assert main(["tiny.py:build", *GOOD, "--quiet", "-o", name]) == 0
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()


def test_a_module_of_a_package_is_found_from_the_present_folder(folder: Path) -> None:
    (folder / "some_package").mkdir()
    (folder / "some_package" / "models.py").write_text(MODEL)
    path = list(sys.path)
    assert main(["some_package.models:build", *GOOD, "--quiet", "-o", "plan.json", "--outputs", "global"]) == 0
    assert sys.path == path
    assert Plan.load("plan.json").outputs == "global"


@pytest.mark.parametrize("factory", ["build", "by_keyword"])
def test_compile_takes_the_plan_however_the_inputs_are_passed(
    folder: Path, fake_mesh: Callable[..., object], factory: str
) -> None:
    import torch

    assert (
        main([f"tiny.py:{factory}", "--mesh", "a=2,b=2", "--hardware", "cpu-gloo", "--quiet", "-o", "plan.json"]) == 0
    )
    model = vars(sys.modules["autopar_model_tiny"])["Tiny"]()
    example = (torch.zeros(8, 24), torch.zeros(8, 24))
    parallel = compile(model, fake_mesh(a=2, b=2), example_inputs=example, plan="plan.json")  # type: ignore[arg-type]
    assert parallel.plan == Plan.load("plan.json")


@pytest.mark.parametrize(("text", "nbytes"), [("4GiB", 2**32), ("4 GB", 4e9), ("0.5", 40e9), ("1", 80e9), (None, 80e9)])
def test_memory_is_a_size_or_a_share_and_by_default_what_the_profile_has(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str | None, nbytes: float
) -> None:
    given = [] if text is None else ["--memory", text]
    assert main(["tiny.py:build", *GOOD, "--json", "--quiet", *given]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["memory_limit"] == nbytes
    groups = 3 * Hardware.load("h100-sxm").reserve["group_bytes"]  # of each axis, and of all ranks
    assert groups < told["reserve_bytes"] < groups + 0.2e9 + 0.12 * nbytes
    assert told["peak_bytes"]["hbm"] < told["reserved_bytes"] <= nbytes


def test_help_has_an_example_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "python -m autopar.search mlp.py:build --mesh data=2,tensor=4" in out
    assert "h100-sxm" in out and "exit status: 0 plan found, 2 bad arguments, 3 nothing fits" in out


# --- no plan is found ------------------------------------------------------------------------------------------------

HOW = "write file.py:function or package.module:function"
WANTED = "it must return (model, args) or (model, args, kwargs)"


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("tiny.py", f"MODEL 'tiny.py' names no function; {HOW}"),
        ("tiny.py:", f"MODEL 'tiny.py:' names no function; {HOW}"),
        ("lost.py:build", "file 'lost.py' of MODEL 'lost.py:build' does not exist in "),
        ("lost.module:build", f"there is no module 'lost' for MODEL 'lost.module:build'; {HOW}"),
        ("tiny.py:built", "tiny.py has no function 'built'; its functions are build, by_keyword, branching, "),
        ("empty.py:build", "empty.py has no function 'build'; it defines no function"),
        ("broken.py:build", "broken.py:3: NameError: name 'heigth' is not defined"),
        ("broken:build", "broken.py:3: NameError: name 'heigth' is not defined"),
        ("unfinished.py:build", "unfinished.py:1: SyntaxError: "),
        ("tiny.py:with_argument", "cannot be called without arguments: missing a required argument: 'width'; give"),
        ("tiny.py:raising", "tiny.py:raising failed at "),
        ("tiny.py:raising", "RuntimeError: no such weights"),
        ("tiny.py:model_only", f"tiny.py:model_only returned a model without example inputs; {WANTED}"),
        ("tiny.py:four", f"tiny.py:four returned a tuple of 4; {WANTED}"),
        ("tiny.py:no_model", f"tiny.py:no_model returned a str in the place of the model; {WANTED}"),
        ("tiny.py:bare_tensor", "a Tensor in the place of args, a tuple; for one input, write (model, (x,))"),
        ("tiny.py:listed", "tiny.py:listed returned a list in the place of kwargs, a dict by argument name"),
        ("tiny.py:one_input", "inputs that Tiny.forward does not take: missing a required argument: 'y'"),
        ("tiny.py:branching", "tiny.py:16 (while super().forward(x, y) > 0:"),
    ],
)
def test_a_model_that_cannot_be_had_is_told(
    refused: Callable[..., tuple[int, str]], factory: str, sentence: str
) -> None:
    status, told = refused(factory, *GOOD, "-o", "plan.json", "--dot", "plan.dot")
    assert status == 2 and sentence in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--mesh", "a2"), "mesh part 'a2' is not NAME=SIZE; write for example data=8,tensor=8"),
        (("--mesh", "a=2,a=2"), "repeat; give each axis its own name"),
        (("--mesh", "a=0"), "mesh axis 'a' has size 0"),
        (("--mesh", "a=1000000000"), "1,000,000,000 devices are more than autopar plans for; give 1,048,576 at most"),
        (
            ("--hardware", "h900"),
            "no hardware profile 'h900'; known profiles: a100-40gb, a100-80gb, cpu-gloo",
        ),
        (("--hardware", "h100"), "no hardware profile 'h100'; did you mean h100-sxm? known profiles:"),
        (
            ("--hardware", "lost.toml"),
            "hardware profile lost.toml cannot be read: No such file or directory; give one of",
        ),
        (("--hardware", "bare.toml"), "hardware profile bare.toml: ranks_per_node is missing"),
        (("--memory", "much"), "memory 'much' is not a size; write for example 70GiB"),
        (("--memory", "70"), "memory '70' is not a size; write for example 70GiB"),
        (("--memory", "nan"), "memory 'nan' is not a size"),
        (("--memory", "-1GiB"), "--memory"),
        (("--optimizer", "lion"), "invalid choice: 'lion' (choose from "),
        (("--outputs", "some"), "invalid choice: 'some' (choose from "),
        (("--time-limit", "0"), "--time-limit 0 is not a time; give seconds above 0, for example 60"),
        (("--time-limit", "nan"), "--time-limit nan is not a time"),
        (("--time-limit", "soon"), "invalid float value: 'soon'"),
        (("-o", "lost/plan.json"), "lost of -o lost/plan.json does not exist; make it first"),
        (("-o", "."), "-o . is a folder; name a file in it"),
        (("--dot", "lost/plan.dot"), "lost of --dot lost/plan.dot does not exist; make it first"),
        (("-o", "plan", "--dot", "plan"), "-o and --dot both name plan; give each its own file"),
        (("-o", "plan", "--dot", "sub/../plan"), "-o and --dot both name plan; give each its own file"),
        (("-o", "link", "--dot", "plan"), "-o and --dot both name link; give each its own file"),
        (("-o", ""), "-o '' names no file; write for example -o FILE"),
        (("-o", "tiny.py"), "-o tiny.py is a file that this command reads, and would be overwritten; name another"),
        (("--html", "sub/../tiny.py"), "--html sub/../tiny.py is a file that this command reads"),
        (("--hardware", "own.toml", "--trace", "own.toml"), "--trace own.toml is a file that this command reads"),
        (("--trace", "lost/step.json"), "lost of --trace lost/step.json does not exist; make it first"),
        (("--pin", "a=save,a=recompute"), "--pin says 'save' and 'recompute' of a; leave one out"),
        (("--fast",), "unrecognized arguments: --fast; see python -m autopar.search --help"),
    ],
)
def test_an_argument_that_makes_no_sense_is_told(
    refused: Callable[..., tuple[int, str]], arguments: tuple[str, ...], sentence: str
) -> None:
    status, told = refused("tiny.py:build", *GOOD, *arguments)
    assert status == 2 and sentence in told


def test_the_mesh_must_be_given(refused: Callable[..., tuple[int, str]]) -> None:
    status, told = refused("tiny.py:build", "--hardware", "h100-sxm")
    assert status == 2 and told.startswith("give --mesh, for example data=8,tensor=8, or --devices 64")


def test_without_a_gpu_the_hardware_must_be_named(
    refused: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, told = refused("tiny.py:build", "--mesh", "a=2")
    assert status == 2 and told.startswith("this machine has no GPU to plan for; give --hardware, one of a100-40gb, ")


def test_what_does_not_fit_exits_with_3(refused: Callable[..., tuple[int, str]]) -> None:
    least = room_in(0.0, Hardware.load("h100-sxm"), (2,)).fixed + 1024
    small = ("--mesh", "a=2", "--memory", f"{least:.0f}B")
    status, told = refused("tiny.py:build", *GOOD, *small, "-o", "plan.json", "--dot", "plan.dot", "--baselines")
    assert status == 3
    assert told.startswith("no plan fits in 914 B per rank: the least that would do is ")
    assert re.search(
        r"Of the 838 MiB, 838 MiB are left for workspaces of kernels, .*; with those, about 838 MiB is needed", told
    )
    assert "The five largest tenants there: " in told and "What would help most: " in told


def test_a_limit_below_what_is_left_exits_with_3_and_one_above_the_device_with_2(
    refused: Callable[..., tuple[int, str]],
) -> None:
    status, told = refused("tiny.py:build", *GOOD, "--memory", "1KiB")
    assert status == 3 and told.startswith(
        "no plan fits in 1.00 KiB per rank: 2.16 GiB are taken before a tensor is held, for workspaces of kernels, "
    )
    assert told.endswith("; give more than that") and "Of the 1.00 KiB" not in told
    status, told = refused("tiny.py:build", *GOOD, "--memory", "81GiB")
    assert status == 2
    assert told == (
        "memory '81GiB' is 81.0 GiB, and a device of h100-sxm has 80.0 GiB; give at most that, or 0.9 (a share of it)"
    )


def test_no_answer_in_time_exits_with_4(
    refused: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> Plan:
        raise NoAnswerInTime("no plan was found within 60 s")

    monkeypatch.setattr("autopar.search.command.posing.answer", never)
    assert refused("tiny.py:build", *GOOD, "-o", "plan.json") == (4, "no plan was found within 60 s")


@pytest.mark.parametrize("factory", ["interrupted", "swallowing"])
def test_ctrl_c_exits_with_130(refused: Callable[..., tuple[int, str]], factory: str) -> None:
    assert refused(f"tiny.py:{factory}", *GOOD, "-o", "plan.json") == (
        130,
        "interrupted before any plan was found; nothing is written",
    )


def test_a_file_that_cannot_be_written_leaves_nothing_behind(
    refused: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", "plan.dot")

    monkeypatch.setattr(os, "replace", full)
    status, told = refused("tiny.py:build", *GOOD, "--dot", "plan.dot")
    assert status == 2 and told == "cannot write plan.dot: No space left on device"


@pytest.mark.parametrize("more", [(), ("--no-simulation",), ("--memory", "2.17GiB")])
def test_baselines_change_no_plan(folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    found = []
    for flags in ((), ("--baselines",)):
        assert main(["tiny.py:build", *GOOD, "--quiet", *more, *flags, "-o", "plan.json"]) == 0
        found.append((Path("plan.json").read_bytes(), capsys.readouterr().out))
    (plan, text), (beside, text_beside) = found
    assert beside == plan and text_beside.startswith(text)
