"""Updates that a thread makes beside what the program does next, one after the other.

While its update is under way, a parameter is what it was, but for its local tensor, which is `Late`: whoever reads or
writes that waits for this one update first, be it the program, which fetches it, or the user. So are its gradient and
its states. `Updates.finish` waits for all of them, and puts the local tensors back.

The thread works on plain local tensors: a collective there would come at another time on each rank, and DTensor enters
dispatch modes, of which torch keeps count for all threads at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.attach.late import Late


@dataclass(frozen=True)
class _Update:
    future: Future[None]
    parameter: DTensor
    states: Sequence[DTensor]
    made: Callable[[], None]

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        """What is being updated, and read for it. The gradient is its parameter's: who drops it there frees it."""
        return self.parameter, self.parameter.grad, *self.states


class Updates:
    """Those of one module's parameters. Only the thread that trains it may call these."""

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._pending: list[_Update] = []

    def begin(
        self, parameter: DTensor, states: Sequence[DTensor], work: Callable[[], None], made: Callable[[], None]
    ) -> None:
        """Have `work`, the update of a parameter, done behind all that was begun before. It reads and writes the memory
        of parameter, gradient and states through tensors of its own. `made` is called by `finish` once it is done.
        """
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "autopar-updates")
        before = self._pending[-1].future if self._pending else None
        future = self._worker.submit(_behind, work, before)
        update = _Update(future, parameter, states, made)
        self._pending.append(update)
        for tensor in update.tensors:
            assert isinstance(tensor, DTensor)
            tensor._local_tensor = self._late(tensor._local_tensor, future)

    def finish(self) -> None:
        """Wait until all is updated. Raises the error of the first update that failed, once; those behind it have not
        been made.
        """
        wait([update.future for update in self._pending])
        pending, self._pending = self._pending, []
        for update in pending:
            for tensor in update.tensors:
                if isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, Late):
                    tensor._local_tensor = tensor._local_tensor._shown
            if update.future.exception() is None:
                update.made()
        for update in pending:
            update.future.result()

    def _late(self, updated: Tensor, future: Future[None]) -> Late:
        held = weakref.ref(self)  # what a tensor holds by its gradient Python cannot collect: it would hold the module

        def arrive() -> Tensor:
            if future.exception() is not None and (updates := held()) is not None:
                updates.finish()
            future.result()
            return updated

        return Late(updated, arrive)

    def __deepcopy__(self, memo: Any) -> Updates:
        self.finish()
        return Updates()


def _behind(work: Callable[[], None], before: Future[None] | None) -> None:
    if before is not None:
        before.result()  # what failed there, fails here
    with torch.no_grad():
        work()
