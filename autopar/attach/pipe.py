"""The ranks of a pipeline: a device mesh for each place along `pipe`, what goes from rank to rank, and parameters of
other stages.

`pipe` is the first axis of the mesh; at each place along it are the ranks that have the same stages, one or several. A
rank has parameters, layouts and collectives on the mesh of its own place; of the parameters of the others it has the
names and shapes, with pieces of no elements, so that optimizers, state dicts and checkpoints see the whole model. What
crosses from stage to stage goes between ranks with the same coordinates within their places.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.attach.tensors import device_of, is_elsewhere, over_pieces, placements_of, take_part
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.search.orders import PIPE, within_stage
from cost_models.price import groups_over


class Pipe:
    """All ranks make one together. `meshes`: of each place along `pipe`; `place`: this rank's; `peers`: the ranks that
    have this one's coordinates at each place, one after the other.
    """

    def __init__(self, device_mesh: DeviceMesh, mesh: Mesh) -> None:
        self.whole, self.mesh, self.inner = device_mesh, mesh, within_stage(mesh)
        numbers = device_mesh.mesh.reshape(mesh.sizes[0], *self.inner.sizes)
        self.meshes = [DeviceMesh(device_mesh.device_type, one, mesh_dim_names=self.inner.names) for one in numbers]
        coordinate = device_mesh.get_coordinate()
        assert coordinate is not None
        self.place = coordinate[0]
        at = numbers[self.place].flatten().tolist().index(dist.get_rank())
        self.rank_within, self.ranks_within = at, self.inner.ranks
        self.peers = [int(one.flatten()[at]) for one in numbers]
        self.group = device_mesh.get_group(PIPE)

    @property
    def count(self) -> int:
        """How many places there are along `pipe`."""
        return len(self.meshes)

    @property
    def here(self) -> DeviceMesh:
        """The mesh of this rank's place."""
        return self.meshes[self.place]

    def name_groups(self, names: dict[str, str], axes: Iterable[str]) -> dict[str, str]:
        """As `autopar.emit.groups.name_groups`: groups of several axes at once are made at all places, by all ranks."""
        for axis in sorted(axes):
            if axis in names:
                continue
            if axis in self.inner.names:
                names[axis] = self.here.get_group(self.inner.names.index(axis)).group_name
                continue
            members = [
                [numbers[place] for place in group]
                for numbers in (one.mesh.flatten().tolist() for one in self.meshes)
                for group in groups_over(self.inner.places(axis), self.inner.sizes)
            ]
            own, _ = dist.new_subgroups_by_enumeration(members, group_desc=f"mesh_{axis}")
            assert isinstance(own, dist.ProcessGroup), f"this rank is in no group over {axis}"
            names[axis] = own.group_name
        return names

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, place: int, value: Tensor) -> Any:
        """Begin to send; the caller keeps the value and waits for what comes back. What is sent to a place is received
        there in the order of the sends, of whichever stages it is: that is how both know what it is.
        """
        return dist.isend(value, self.peers[place])

    def receive(self, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        value = torch.empty(tuple(shape), dtype=dtype, device=device_of(self.whole))
        work = dist.irecv(value, self.peers[place])
        assert work is not None
        work.wait()
        return value

    def from_place(self, place: int, value: Tensor) -> Tensor:
        """The value there, at all of them, in place; all ranks of the pipe call it."""
        dist.broadcast(value, self.peers[place], group=self.group)
        return value

    def together(self, what: str, is_there: bool = True) -> list[bool]:
        """At which places it is there. All ranks ask for it; raises RuntimeError on those that ask for another thing
        than the others, where sizes that differ would end the process.
        """
        mine = torch.tensor([zlib.crc32(what.encode()), is_there], dtype=torch.int64, device=device_of(self.whole))
        found = [torch.empty_like(mine) for _ in self.meshes]
        dist.all_gather(found, mine, group=self.group)
        codes, flags = torch.stack(found).t().tolist()
        if others := [rank for rank, code in zip(self.peers, codes, strict=True) if code != codes[self.place]]:
            raise RuntimeError(
                f"this rank asks for {what}, and rank {others[0]} for something else: numbers of parameters and "
                "gradients are of all pipeline stages, so all ranks must ask for the same ones, in the same order, "
                "also where one rank alone prints them"
            )
        return [bool(flag) for flag in flags]

    def first_of(self, value: Tensor, is_there: bool) -> Tensor:
        """The value of the first place where there is one, at all of them, which all call it. Elsewhere `value` is room
        for it.
        """
        first = self.together(f"a tensor {list(value.shape)} of {value.dtype}", is_there).index(True)
        value = value.contiguous()
        parts = torch.view_as_real(value) if value.is_complex() else value
        self.from_place(first, parts.reshape(-1).view(torch.uint8))  # of any dtype
        return value

    def sum_over(self, places: Sequence[int], value: Tensor) -> Tensor:
        """The sum of the values at these places, which all call it, in that order."""
        value = value.contiguous()
        first, *rest = places
        if self.place != first:
            self.send(first, value).wait()
            return self.receive(first, value.shape, value.dtype)
        total = value
        for place in rest:
            total = total + self.receive(place, value.shape, value.dtype)
        for place in rest:
            self.send(place, total).wait()
        return total

    # --- parameters --------------------------------------------------------------------------------------------------

    def elsewhere(self, held: nn.Parameter, layout: Layout, place: int) -> nn.Parameter:
        """A parameter of another place, of which this rank has no elements."""
        device = "meta" if held.is_meta else device_of(self.whole)
        # For a number torch has a number there, too: a detached one would have no elements in its shape.
        nothing = torch.zeros(0 if held.dim() else (), dtype=held.dtype, device=device)
        made = over_pieces(nothing, held.shape, placements_of(layout), self.meshes[place])
        return nn.Parameter(made, requires_grad=held.requires_grad)

    def given_to_others(self, whole: nn.Parameter, layout: Layout, place: int) -> nn.Parameter:
        """`elsewhere`, while the ranks of that place get their pieces (`autopar.attach.tensors.parameter_on`)."""
        value = whole.detach()
        if isinstance(value, DTensor):
            if is_elsewhere(value):
                return whole
            value = value.to_local()
        if not value.is_meta:
            take_part(value, layout, self.inner, self.whole)
        return self.elsewhere(whole, layout, place)
