"""The generated code, compiled."""

from __future__ import annotations

import autopar
from tests.processes.compare import same_steps, splits
from tests.processes.models import batch, net
from tests.processes.worker import Ranks
from tests.support.machines import FAST


def check_inductor(ranks: Ranks) -> None:
    plain = net()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, backend="inductor")
    same_steps(plain, parallel, batch(), steps=3)
    splits(parallel)
