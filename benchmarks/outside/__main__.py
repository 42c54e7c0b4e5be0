"""What autopar makes of models and training snippets that nobody here wrote.

    python -m benchmarks.outside --install                       # how to get the packages, in a folder of their own
    python -m benchmarks.outside --packages DIR --rows rows.jsonl --resume -o docs/benchmarks/outside.md

Each script trains for 3 steps on 2 processes, and on 4 as a mesh of 2x2, on different random batches of 4; then it is
evaluated on one of 3. It is right where losses, gradients, weights, buffers and outputs are those of plain PyTorch on
one process, and the same on all ranks: in float32 within 1e-5 (losses, weights) and 1e-4 (gradients, outputs) of the
largest entry. What is off by more is tried in float64, where 1e-9 counts as rounding, or 1e8 times less than in
float32; `--dtypes float32 float64` tries both always. `--links easy` (the default) plans for links as quick as memory,
so that all that a rule can split is split; `--links here` for this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import date
from pathlib import Path

import torch

from benchmarks.outside import catalogue, ranks
from benchmarks.outside.report import HEAD, markdown, summary
from benchmarks.outside.script import use_packages

MESHES = {1: (1,), 2: (2,), 4: (2, 2)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outside", description=__doc__.split("\n")[0])
    parser.add_argument("--packages", metavar="DIR", help="a folder with packages, looked at after all others")
    parser.add_argument("--install", action="store_true", help="print the command that fills such a folder, and end")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scripts whose name contains one of these")
    parser.add_argument("--ranks", nargs="+", type=int, choices=MESHES, default=[2, 4])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "float64"), default=["float32"])
    parser.add_argument("--links", choices=("easy", "here"), default="easy")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write a line of JSON for each script as it ends")
    parser.add_argument("--resume", action="store_true", help="leave out what has a row there")
    parser.add_argument("--limit-s", type=float, default=180.0, help="for one script")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--machine", help="what the table says it ran on")
    given = parser.parse_args(argv)
    if given.install:
        print(f"pip install --no-deps --target {given.packages or 'DIR'} {catalogue.PACKAGES}")
        return 0
    use_packages(given.packages)
    names = [one.name for one in catalogue.scripts() if not given.only or any(part in one.name for part in given.only)]
    old = given.rows.read_text().splitlines() if given.resume and given.rows and given.rows.exists() else []
    rows = [json.loads(line) for line in old]
    if given.rows and not old:
        given.rows.write_text("")
    for count in given.ranks:
        mesh = MESHES[count]
        done = {row["name"] for row in rows if row["mesh"] == list(mesh)}
        left = [name for name in names if name not in done]
        for row in ranks.rows_of(
            left, mesh, packages=given.packages, limit_s=given.limit_s, dtypes=given.dtypes, links=given.links
        ):
            rows.append(row)
            if given.rows:
                with given.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            share = f"{row['share']:.0%} whole" if "share" in row else ""
            print(mesh, row["name"], row["verdict"], share, f"{row['seconds']} s", row["told"], file=sys.stderr)
    told = {script.name: script.told for script in catalogue.scripts()}
    text = markdown(rows, told)
    if given.packages:
        text = text.replace(f"{given.packages.rstrip('/')}/", "")
    if given.output:
        command = f"python -m benchmarks.outside --packages DIR --rows rows.jsonl -o {given.output}"
        machine = given.machine or f"{os.cpu_count()} cores of {platform.machine()}"
        text = HEAD.format(command=command, day=date.today(), torch=torch.__version__, machine=machine) + text
        given.output.write_text(text)
    print(text if not given.output else summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
