"""One rank: joins the others, then tries the scripts one after the other."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from benchmarks.outside.script import Script, use_packages
from benchmarks.outside.trial import DIFFER, attempt, easy_links

SHRUNK = 1e-8  # float64 rounds 5e8 times as fine as float32


def tried(script: Script, mesh: Any, dtypes: list[str], links: str) -> dict[str, Any]:
    """The row of a script. What is off in float32 alone is rounding, which float64 tells."""
    hardware = easy_links() if links == "easy" else None
    row = attempt(script, mesh, dtypes[0], hardware)
    others = dtypes[1:]
    if dtypes == ["float32"] and said_by_zero(row["verdict"]) == "wrong":
        others = ["float64"]
    for dtype in others:
        if said_by_zero(row["verdict"]) in ("right", "wrong"):
            again = attempt(script, mesh, dtype, hardware)
            row[dtype] = again.get("off") or again.get("told", "")
            if row["verdict"] == "wrong" and is_rounding(row, again):
                row |= {"verdict": "right", "told": f"rounding, right in {dtype}: {row['told']}"}
            elif again["verdict"] != "right":
                row |= {"verdict": again["verdict"], "told": f"{dtype}: {again.get('told', '')}"}
    return row


def is_rounding(row: dict[str, Any], again: dict[str, Any]) -> bool:
    """Whether what is off in a row is gone in float64, or has shrunk as the precision has; a mistake does neither."""
    if DIFFER in row["told"] or DIFFER in again["told"]:
        return False
    shrunk = "off" in again and all(again["off"][what][0] <= SHRUNK * row["off"][what][0] for what in row["off"])
    return again["verdict"] == "right" or shrunk


def said_by_zero(value: Any) -> Any:
    said = [value]
    dist.broadcast_object_list(said, 0)
    return said[0]


def main(folder: str) -> None:
    faulthandler.enable()
    given = json.loads(Path(folder, "asked.json").read_text())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    use_packages(given["packages"])
    rank = int(os.environ["RANK"])
    store, count = f"file://{folder}/store", int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=given["limit_s"] + 30)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=limit)
    beside = dist.new_group(timeout=limit)  # what is said about an error does not meet a collective of the model
    mesh = autopar.init_mesh("cpu", **dict(zip(("data", "tensor"), given["sizes"], strict=False)))
    scripts = {
        script.name: script
        for script in import_module(given.get("catalogue", "benchmarks.outside.catalogue")).scripts()
    }
    for name in given["names"]:
        if rank == 0:
            Path(folder, "current").write_text(name)
        started = time.monotonic()
        try:
            row = tried(scripts[name], mesh, given["dtypes"], given["links"])
        except BaseException as error:  # one of the ranks alone, perhaps
            row = {"verdict": "crash", "told": f"{type(error).__name__}: {error}"[:600]}
            row["trace"] = traceback.format_exc()[-3000:]
        if row["verdict"] not in ("right", "wrong"):
            Path(folder, f"said.{rank}").write_text(json.dumps({"name": name} | row))
        every: list[Any] = [None] * count
        dist.all_gather_object(every, row, group=beside)
        bad = [one for one in every if one["verdict"] not in ("right", "wrong")]
        row = bad[0] if bad else every[0]
        row["seconds"] = round(time.monotonic() - started, 1)
        if rank == 0:
            with Path(folder, "rows.jsonl").open("a") as file:
                file.write(json.dumps({"name": name} | row) + "\n")
        del row, every, bad
        gc.collect()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then when they are taken down


if __name__ == "__main__":
    main(sys.argv[1])
