"""examples/train_lm.py, but a rank is killed in its second checkpoint, at the moment that KILLED_AT names."""

import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

# moment -> (whose attribute, which, the rank that is killed, whether behind the call)
MOMENTS: dict[str, tuple[Any, str, int, bool]] = {
    "before anything is written": (dcp, "save", 0, False),
    "while data is written": (FileSystemWriter, "write_data", 1, False),
    "behind the data, before what tells of it": (FileSystemWriter, "finish", 0, False),
    "before it has its name": (Path, "rename", 0, False),
    "once it has its name": (Path, "rename", 0, True),
}
CHECKPOINT = "unfinished"  # what is renamed: torch renames files of its own


def killing(call: Callable[..., Any], rank: int, behind: bool) -> Callable[..., Any]:
    calls: list[int] = []

    def killed(*args: Any, **kwargs: Any) -> Any:
        if not (isinstance(args[0], Path) and args[0].name != CHECKPOINT):
            calls.append(1)
        is_time = len(calls) == 2 and int(os.environ["RANK"]) == rank
        if is_time and not behind:
            os.kill(os.getpid(), signal.SIGKILL)
        made = call(*args, **kwargs)
        if is_time:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    return killed


if __name__ == "__main__":
    owner, name, rank, behind = MOMENTS[os.environ["KILLED_AT"]]
    setattr(owner, name, killing(getattr(owner, name), rank, behind))
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_lm.py"), run_name="__main__")
