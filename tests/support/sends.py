"""Programs on CPUs that send as those on GPUs do: beside work, not waited for at once (docs/design/0018)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autopar.emit import Emitted, emit
from autopar.plan import Plan


def send_beside_work(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """For the rest of the test, whatever is compiled: the plans of that, as they come."""
    sent: list[Plan] = []

    def as_on_gpus(plan: Plan, groups: Mapping[str, str], device: str, *, one_at_a_time: bool) -> Emitted:
        sent.append(plan)
        return emit(plan, groups, device)

    monkeypatch.setattr("autopar.attach.runners.emit", as_on_gpus)
    return sent
