"""The process groups of a program: of each mesh axis, and of several at once where it sends over those."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.mesh import Mesh
from cost_models.price import groups_over


def name_groups(
    names: MutableMapping[str, str], axes: Iterable[str], device_mesh: DeviceMesh, mesh: Mesh
) -> MutableMapping[str, str]:
    """Axis, or several at once (`cost_models.steps.over`), -> name of this rank's process group on it.

    `names` has those that were made before, and gets the others. All ranks call it alike, as a group is made by all.
    """
    for axis in axes:
        if axis in names:
            continue
        if axis in mesh.names:
            names[axis] = device_mesh.get_group(mesh.names.index(axis)).group_name
            continue
        numbers = device_mesh.mesh.flatten().tolist()
        members = [[numbers[place] for place in group] for group in groups_over(mesh.places(axis), mesh.sizes)]
        own, _ = dist.new_subgroups_by_enumeration(members, group_desc=f"mesh_{axis}")
        assert isinstance(own, dist.ProcessGroup), f"this rank is in no group over {axis}"
        names[axis] = own.group_name
    return names
