"""Runs a script of examples/ with the plain model in the place of the parallel one, on one process."""

import sys
from pathlib import Path
from typing import Any

from torch import nn

import autopar


def plain(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    model.full_state_dict = model.state_dict  # type: ignore[assignment]
    return model


autopar.compile = plain  # type: ignore[assignment]
script = Path(__file__).parents[2] / "examples" / sys.argv.pop(1)
text = script.read_text().replace("trainer = ParallelTrainer(", "trainer = Trainer(")
exec(compile(text, script, "exec"), {"__name__": "__main__", "__file__": str(script)})
