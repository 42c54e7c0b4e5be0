"""What the host takes to launch a kernel, measured by a process that trains a small model alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from autopar.machine.local_ranks import environment
from cost_models.hardware import Hardware

PATIENCE_S = 180  # imports of torch among them
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def with_dispatch(hardware: Hardware, device_type: str, how: str) -> Hardware:
    """The profile with this host's figure. `how`: for its source. Raises RuntimeError where that cannot be found."""
    command = [sys.executable, "-m", "autopar.measure.dispatch", device_type]
    alone = {name: value for name, value in environment().items() if name not in OF_RANKS}
    try:
        ran = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command[1:])} has not ended after {PATIENCE_S} s; run it by itself") from None
    if ran.returncode != 0:
        why = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{' '.join(command[1:])} failed: {why}")
    seconds, count = ran.stdout.split()[-2:]
    told = f"measured {how}: a step of {count} kernels with nearly nothing to do, AdamW on lists"
    return replace(hardware, dispatch_s=float(seconds), sources={**hardware.sources, "dispatch_s": told})
