"""examples/train_lm.py, but rank 0 is killed in its second checkpoint: behind the data, before what tells of it."""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

finish, calls = FileSystemWriter.finish, []


def finish_or_be_killed(*args: Any, **kwargs: Any) -> None:
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    finish(*args, **kwargs)


FileSystemWriter.finish = finish_or_be_killed  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_lm.py"), run_name="__main__")
