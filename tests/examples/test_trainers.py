"""accelerate and transformers' Trainer around a parallel module learn what they learn around the plain one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

pytest.importorskip("accelerate", reason="accelerate is in the dev extra")

ROOT = Path(__file__).parents[2]
PLAIN = Path(__file__).with_name("without_autopar.py")


def run(ranks: int, script: str, out: Path, *args: str, plain: bool = False) -> subprocess.CompletedProcess[str]:
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    what = [str(PLAIN), script] if plain else [str(ROOT / "examples" / script)]
    command = [sys.executable, *torchrun, *what, "--out", str(out), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_accelerate_trains_on_two_processes_as_the_plain_model_on_one(tmp_path: Path) -> None:
    for out, ranks, batch in ((tmp_path / "alone", 1, "8"), (tmp_path / "pair", 2, "4")):
        ran = run(ranks, "with_accelerate.py", out, "--batch", batch, plain=ranks == 1)
        assert ran.returncode == 0, ran.stderr
    wanted, found = (json.loads((tmp_path / out / "losses.json").read_text()) for out in ("alone", "pair"))
    assert found == pytest.approx(wanted, rel=1e-5) and wanted[-1] < wanted[0]
    wanted, found = (torch.load(tmp_path / out / "model.pt", weights_only=True) for out in ("alone", "pair"))
    assert found.keys() == wanted.keys()
    difference = max((found[name] - wanted[name]).abs().max().item() for name in wanted if "c_attn.bias" not in name)
    assert difference < 1e-3, "key biases get nothing but noise, the others agree"


def history(out: Path) -> dict[tuple[int, str], float]:
    """Losses of updates and evaluations."""
    lines = json.loads((out / "history.json").read_text())
    return {(line["step"], name): line[name] for line in lines for name in ("loss", "eval_loss") if name in line}


@pytest.mark.slow
def test_trainer_trains_on_two_processes_as_on_one_and_goes_on_from_either(tmp_path: Path) -> None:
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    ran = run(1, "trainer.py", alone, "--batch", "8", plain=True)
    assert ran.returncode == 0, ran.stderr
    wanted = history(alone)
    assert len(wanted) == 10
    ran = run(2, "trainer.py", pair, "--batch", "4")
    assert ran.returncode == 0, ran.stderr
    assert history(pair) == pytest.approx(wanted, rel=1e-5)

    for ranks, batch in ((1, "8"), (2, "4")):  # from what two have saved, and then from what one has
        shutil.rmtree(pair / "checkpoint-8")
        (pair / "history.json").unlink()
        ran = run(ranks, "trainer.py", pair, "--batch", batch, "--resume")
        assert ran.returncode == 0, ran.stderr
        assert history(pair) == pytest.approx(wanted, rel=1e-5)
        GPT2LMHeadModel.from_pretrained(pair / "checkpoint-8")


@pytest.mark.slow
def test_a_parallel_module_in_a_plain_trainer_says_what_to_do(tmp_path: Path) -> None:
    text = re.sub(r"trainer = ParallelTrainer\(", "trainer = Trainer(", (ROOT / "examples" / "trainer.py").read_text())
    (tmp_path / "plain_trainer.py").write_text(text)
    ran = run(1, str(tmp_path / "plain_trainer.py"), tmp_path / "out")
    assert ran.returncode == 1
    assert "do not pass a parallel module to accelerator.prepare()" in ran.stderr
