"""What tables have in common that put the search beside what people do."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from autopar.ir.mesh import Mesh
from autopar.search import Question, Request, answer
from autopar.search.context import Progress
from autopar.search.overlap_loop import best_prefetch
from cost_models.hardware import Hardware
from cost_models.reserve import room_in


def progress_from_now() -> Progress:
    """Lines on stderr, each with the seconds since this call."""
    began = time.perf_counter()

    def progress(text: str) -> None:
        print(f"{time.perf_counter() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    return progress


def memory_on(hardware: Hardware, mesh: Mesh) -> float:
    """Bytes of a whole device that a plan's tensors may hold."""
    return room_in(hardware.tiers["hbm"].capacity_bytes, hardware, mesh.sizes).tensors


def seconds_by_hand(
    question: Question, memory: float | None, policy: str, pin: Mapping[str, str] | None = None
) -> float:
    """Of a step of the best plan of a policy, simulated. Raises Infeasible, NoAnswerInTime."""
    plan = answer(question, Request(memory=memory, policy=policy, pin=pin or {}))
    return best_prefetch(plan, question.pricer, memory).seconds
