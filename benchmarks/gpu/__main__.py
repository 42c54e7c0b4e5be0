"""What has to be seen on a GPU once, in stages that each take at most nine minutes, the most telling ones first.

    python -m benchmarks.gpu                        # all that is not done on this machine yet
    python -m benchmarks.gpu --stages device models # these
    python -m benchmarks.gpu --nproc 8              # a node: NCCL on all its GPUs
    python -m benchmarks.gpu --device cpu           # a dry run of the machinery, where there is no GPU

Each stage runs in a process of its own. A stage that lacks something is skipped, one that breaks has failed, with the
reason; a number that is wrong stops everything. What was found is kept in a file beside the report, which is written
anew after each stage: the next call goes on with what is left. `--again` runs stages that are done.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.report import DONE, FAILED, WRONG, report
from benchmarks.gpu.stage import Row
from cost_models.whole_file import write_whole

LIMIT_S = 540
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # as the docs say, where nobody says otherwise
STAGES = {  # name -> function, what it shows; numbers before speed
    "device": ("device:device", "versions, copies, a step of every model family against float64"),
    "attention": ("attention:attention", "kernels of attention against the formula in float64"),
    "operators": ("operators:operators", "operators with a rule, in float32 and bfloat16 against float64"),
    "models": ("models:models", "loss and gradients against eager torch, float32 and bfloat16"),
    "copies": ("copies:eager", "50 steps with values and parameters on the host, bitwise, copies delayed"),
    "nccl": ("nccl:nccl", "NCCL beside gloo, one rank: clipping and checkpoints with parameters on the host"),
    "shared-2": ("shared:two", "2 ranks on one GPU, through the host"),
    "peaks": ("peaks:peaks", "memory allocated and reserved, and what was predicted"),
    "profile": ("profiled:profiled", "kernels, gaps and synchronisations of a step, beside eager torch"),
    "attention-times": ("attention:times", "how fast the kernels of attention are, in bfloat16"),
    "shared-4": ("shared:four", "4 ranks on one GPU, through the host"),
    "calibrate": ("calibration:calibration", "the machine measured, and AdamW on the host"),
    "predicted": ("predicted:predicted", "steps of GPT-2 124M and Llama 1B beside what that profile predicts"),
    "twelfth": ("twelfth:twelfth", "GPT-2 of 1.3B in room for a twelfth of its states, beside the same steps without"),
    "capped-125m": ("capped:small", "benchmarks.capped, GPT-2 of 125M"),
    "capped-350m": ("capped:medium", "benchmarks.capped, GPT-2 of 350M"),
    "capped-1.3b": ("capped:large", "benchmarks.capped, GPT-2 of 1.3B"),
    "calibrate-again": ("calibration:again", "the machine measured again: what moved"),
    "shared-2-inductor": ("shared:inductor", "2 ranks on one GPU, in code that inductor compiled"),
    "copies-inductor": ("copies:inductor", "the same copies in code that inductor compiled"),
}
NODE = {
    "node-numbers": ("node:numbers", "plans on all GPUs and on two axes, against one process"),
    "node-collectives": ("node:collectives", "collectives of NCCL, measured beside their price"),
    "node-gpt2": ("node:gpt2", "GPT-2 of 125M: step time and memory, predicted and measured"),
    "node-llama": ("node:two_layers", "two layers of Llama 8B: step time and memory, predicted and measured"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all that was asked for is done or was skipped. 1: a stage failed, or a number is wrong."""
    given = _arguments(arguments)
    stages = NODE if given.nproc > 1 else STAGES
    state = _read(given.state)
    machine = f"{_device(given.device)}, torch {torch.__version__}" + f", {given.nproc} ranks" * (given.nproc > 1)
    if unknown := [name for name in given.stages or () if name not in stages]:
        print(f"error: no stage {unknown[0]!r}; choose some of {', '.join(stages)}", file=sys.stderr)
        return 2
    failed = False
    for name in given.stages or stages:
        known = state.get(name)
        if known and known["status"] == DONE and known["machine"] == machine and not given.again:
            print(f"{name}: done on {known['date']}", flush=True)
            continue
        found = run(name, stages[name][0], given)
        state[name] = found | {"machine": machine, "date": str(date.today()), "shows": stages[name][1]}
        write_whole(given.state, json.dumps(state, indent=1))
        write_whole(given.output, report(state, [*STAGES, *NODE]))
        print(f"{name}: {found['status']} after {found['seconds']:.0f} s {found['reason']}", flush=True)
        failed |= found["status"] in (FAILED, WRONG)
        if found["status"] == WRONG:
            print("stopped at the first wrong number; --stages runs others", flush=True)
            break
    return int(failed)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", metavar="STAGE", help=f"some of {', '.join([*STAGES, *NODE])}")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of the node, one for each GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--again", action="store_true", help="run stages that are done, too")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds a stage may take")
    parser.add_argument("-o", "--output", type=Path, help="the report (default: docs/benchmarks/gpu.md)")
    parser.add_argument("--state", type=Path, help="what was found so far (default: the report's name with .json)")
    given = parser.parse_args(arguments)
    if given.nproc < 1:
        parser.error(f"--nproc {given.nproc} is not a number of processes")
    if given.device == "cuda" and torch.cuda.device_count() < given.nproc:
        parser.error(
            f"--nproc {given.nproc} needs as many CUDA devices, and this machine has {torch.cuda.device_count()}; "
            "--device cpu runs the machinery without"
        )
    if given.output is None:  # a dry run is no result
        given.output = Path("docs/benchmarks/gpu.md" if given.device == "cuda" else "out/gpu-dry-run.md")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.state = given.state or given.output.with_suffix(".json")
    return given


def _read(path: Path) -> dict[str, Any]:
    """What earlier calls found. Raises ValueError where the file is not theirs."""
    if not path.exists():
        return {}
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not what earlier stages left ({error}); move it away, or give --state") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not what earlier stages left; move it away, or give --state")
    return state


def _device(kind: str) -> str:
    return torch.cuda.get_device_name() if kind == "cuda" else "CPU (dry run)"


def run(name: str, function: str, given: argparse.Namespace) -> dict[str, Any]:
    """One stage, in a process of its own, with all that it starts: its status, the reason, seconds and rows."""
    began, shown, limit_s = time.monotonic(), 0, given.limit
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-") as folder:
        told = (function, given.device, str(given.nproc), folder, str(given.output.with_suffix("")))
        command = [sys.executable, "-m", "benchmarks.gpu.worker", *told]
        process = subprocess.Popen(command, start_new_session=True, env=ALLOCATOR | os.environ)
        try:
            while True:
                ended = process.poll() is not None
                rows = _rows(folder)
                for row in rows[shown:]:
                    print(f"  {name}: {'; '.join(f'{what} {value}' for what, value in row.items())}", flush=True)
                shown = len(rows)
                if ended or time.monotonic() - began > limit_s:
                    break
                time.sleep(0.2)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):  # what it has started lives in the same session
                if _ended(process.pid, number):
                    break
                time.sleep(0.5)
            process.wait()
        end = Path(folder, "end")
        status, reason = json.loads(end.read_text()) if end.exists() else (FAILED, "")
        if not ended and status != WRONG:
            status, reason = FAILED, f"it did not end within {limit_s:.0f} s; what it found by then is below"
        elif not end.exists():
            reason = f"its process ended with status {process.returncode} and said nothing"
        return {"status": status, "reason": reason, "seconds": time.monotonic() - began, "rows": rows}


def _rows(folder: str) -> list[Row]:
    file = Path(folder, "found")
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last one may be half a line
    return [json.loads(line) for line in lines]


def _ended(session: int, number: int) -> bool:
    """Whether nothing is left of a session; if not, it gets the signal."""
    try:
        os.killpg(session, number)
    except ProcessLookupError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
