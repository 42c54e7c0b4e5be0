"""What a device holds that no plan counts, and what that leaves for a plan.

    context       what the driver takes for a process: outside of what it calls free
    groups        what NCCL takes for each communicator, from the driver: one for each mesh axis of two ranks or more,
                  and one for all ranks together where there are several such axes; the first all-to-all of a group
                  takes more for each peer
    workspaces    what cuBLAS and cuBLASLt keep in torch's allocator, for each handle and stream. There are two handles:
                  one of the thread that calls forward, one of autograd's
    gaps          rounding, and room between values that stay, which nothing fits into: of what tensors hold a share;
                  see `caching_allocator`

The first three are figures of a profile's table `reserve`, each with its source. A profile without that table, as one
of a CPU, is of a machine whose memory is shared with all that runs on it: nothing is left free there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cost_models.caching_allocator import PAGE, SMALL_PAGE
from cost_models.hardware import Hardware
from cost_models.steps import COLLECTIVES, axes_of

WORKSPACES = 4  # two libraries, each on two threads
# What a search leaves for gaps, of what tensors hold; what it finds is then simulated. Plans of GPT-2 had 0.02 to 0.21
# by default, in the middle 0.10, and 0.00 to 0.06 with expandable segments, in the middle 0.01 (docs/design/0029).
GAPS, GAPS_EXPANDABLE = 0.12, 0.02


@dataclass(frozen=True)
class Room:
    """`limit` bytes of a device: `fixed` of them are for groups and workspaces, and beside each byte that tensors hold
    another `gaps` are reserved. `expandable`: the allocator's segments are.
    """

    limit: float
    fixed: float = 0.0
    gaps: float = 0.0
    expandable: bool = False

    @property
    def tensors(self) -> float:
        """Bytes that tensors of a plan may hold at its peak."""
        return max(0.0, (self.limit - self.fixed) / (1 + self.gaps))

    @property
    def left(self) -> float:
        """Bytes that they may not."""
        return self.limit - self.tensors

    def taken(self, held: float) -> float:
        """Bytes of the device that a plan takes whose tensors hold so many."""
        return held * (1 + self.gaps) + self.fixed


def room_in(limit: float, hardware: Hardware, sizes: Sequence[int], *, expandable: bool = False) -> Room:
    """What a plan may do with `limit` bytes of each rank's device, on a mesh of these sizes."""
    if not hardware.reserve:
        return Room(limit)
    pages = PAGE + SMALL_PAGE  # the last of each class, which is seldom full
    fixed = outside_bytes(hardware, sizes) + sum(workspaces(hardware)) + pages
    return Room(limit, fixed, GAPS_EXPANDABLE if expandable else GAPS, expandable)


def workspaces(hardware: Hardware) -> list[int]:
    """Blocks of the allocator that libraries keep."""
    return [int(hardware.reserve["workspace_bytes"])] * WORKSPACES if hardware.reserve else []


def outside_bytes(hardware: Hardware, sizes: Sequence[int], peers: int = 0, joined: int = 0) -> float:
    """Bytes that collectives take beside the allocator. `peers`: of all groups that do an all-to-all, together;
    `joined`: groups over several axes at once.
    """
    if not hardware.reserve:
        return 0.0
    split = [size for size in sizes if size > 1]
    groups = len(split) + (len(split) > 1) + joined
    return groups * hardware.reserve["group_bytes"] + peers * hardware.reserve["peer_bytes"]


def peers_of(collectives: Sequence[tuple[str, str]], sizes: Mapping[str, int]) -> int:
    """Peers of the groups in which every rank talks to every other, of (collective, axis or several at once)."""
    axes = {axis for collective, axis in collectives if COLLECTIVES[collective].pairwise}
    return sum(prod(sizes[one] for one in axes_of(axis)) - 1 for axis in axes)
