"""The process of one stage: `python -m benchmarks.gpu.worker MODULE:FUNCTION DEVICE RANKS FOLDER KEPT`.

Appends each row to FOLDER/found as it comes, and leaves status and reason in FOLDER/end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from benchmarks.gpu.report import DONE, FAILED, SKIPPED, WRONG
from benchmarks.gpu.stage import Setting, Skipped, Stage, Wrong


def main(function: str, device: str, ranks: str, folder: str, kept: str) -> None:
    status, reason = DONE, ""
    try:
        module, _, name = function.partition(":")
        stage: Stage = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
        with Path(folder, "found").open("a", buffering=1) as found:
            for row in stage(Setting(device, Path(folder), int(ranks), Path(kept))):
                found.write(json.dumps(row, default=str) + "\n")
    except Skipped as error:
        status, reason = SKIPPED, str(error)
    except Wrong as error:
        status, reason = WRONG, str(error)
    except Exception as error:  # said here and in the report; the next stage may still be worth something
        traceback.print_exc()
        status, reason = FAILED, f"{type(error).__name__}: {error}"
    Path(folder, "end").write_text(json.dumps([status, " ".join(reason.split())[:500]]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # process groups of all kinds may be up; nothing is left to be said


if __name__ == "__main__":
    main(*sys.argv[1:])
