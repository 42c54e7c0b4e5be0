"""What a fake process group gives for what was sent."""

import pytest
import torch
import torch.distributed as dist


def arrives() -> bool:
    """Whether the running fake group gives pieces of what was sent.

    torch 2.13's does, 2.11's leaves what lay in memory.
    """
    ranks = dist.get_world_size()
    sent, pieces, name = torch.arange(4 * ranks) + 3, [4] * ranks, dist.group.WORLD.group_name
    made = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_to_all_single(sent, pieces, pieces, name)
    )
    return bool((made >= 3).all() and (made < 3 + 4 * ranks).all())


def skip_unless_places_arrive(model: str) -> None:
    """For plans that may send places of a table: to look up what is none can end the process.

    Needs a fake group of two ranks, or more.
    """
    if model != "mlp" and not arrives():  # it has none
        pytest.skip(f"{model}: a plan may send places of a table, which this torch's fake group does not give back")
