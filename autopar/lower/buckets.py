"""Buckets: which gradients are summed together, and up to which size."""

from __future__ import annotations

from autopar.lower.transfers import leaves
from autopar.plan.plan import Plan
from autopar.plan.value import Decision
from autopar.price.pricer import Pricer
from autopar.price.reshard import travels_together
from cost_models.steps import Comm

BucketKey = tuple[tuple[str, ...], str, bool]  # the axes that sum, the dtype, and whether they leave for the host
BUCKETS, SMALL, LARGE = 8, 1 << 22, 1 << 24


def row_bytes(plan: Decision | Plan, place: int) -> int:
    """Bytes that a gradient takes in a bucket."""
    delivery = plan.deliveries[place]
    assert delivery is not None
    return delivery.changes[0].local.nbytes


def bucket_key(plan: Decision | Plan, place: int) -> BucketKey | None:
    """Which gradients that one may be summed together with; None: it is summed by itself."""
    delivery = plan.deliveries[place]
    if delivery is None or not travels_together(delivery.changes, plan.mesh, plan.bucket_bytes):
        return None
    return tuple(change.axis for change in delivery.changes), delivery.changes[0].local.dtype, leaves(plan, place)


def bucket_bytes(pricer: Pricer, gradients: int, memory: float | None) -> int:
    """The size up to which gradients gather before they are summed.

    No more than all `gradients` bytes, and no more than a hundredth of the `memory`, as a bucket is a copy; 0 where
    that leaves next to nothing. Where nothing overlaps, up to LARGE: each bucket takes processors from what computes
    meanwhile. Where collectives overlap compute, several buckets are better than one launched at the end: no more
    than the BUCKETS-th part, from SMALL on; and so many that waiting is a fiftieth of the time per axis, where twice
    the size sums at less than 1.02 times the rate.
    """
    size = 1 << 16
    largest = gradients if memory is None else min(gradients, int(memory / 100))
    if not pricer.hardware.overlaps:
        return min(largest, LARGE) if largest > size and pricer.mesh.ranks > 1 else 0
    largest = min(largest, max(gradients // BUCKETS, SMALL))
    for axis, ranks in zip(pricer.mesh.names, pricer.mesh.sizes, strict=True):

        def rate(nbytes: int, axis: str = axis, ranks: int = ranks) -> float:
            return nbytes * pricer.rounds.count / pricer.seconds((Comm("all_reduce", axis, ranks, nbytes),))

        while ranks > 1 and size < largest and rate(2 * size) > 1.02 * rate(size):
            size *= 2
    return min(size, largest) if largest > 1 << 16 else 0
