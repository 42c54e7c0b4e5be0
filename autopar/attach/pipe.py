"""The ranks of a pipeline: a device mesh for each place along `pipe`, what goes from rank to rank, and parameters of
other stages.

`pipe` is the first axis of the mesh; at each place along it are the ranks that have the same stages, one or several. A
rank has parameters, layouts and collectives on the mesh of its own place; of the parameters of the others it has the
names and shapes, with pieces of no elements, so that optimizers, state dicts and checkpoints see the whole model. What
crosses from stage to stage goes between ranks with the same coordinates within their places.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import replace_total_norm, total_norm
from autopar.attach.foreach import mend_lists
from autopar.attach.tensors import device_of, over_pieces, placements_of, take_part
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.search.orders import PIPE, within_stage
from cost_models.price import groups_over

PIPES: weakref.WeakSet[Pipe] = weakref.WeakSet()  # of all modules of this process: a norm sees only gradients


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
        # Names: torch does not swap a parameter (`to_empty`, `double`) to which there is a weak reference.
        self.module: weakref.ref[nn.Module] | None = None
        self.held: frozenset[str] = frozenset()  # parameters of this place
        self.copies: frozenset[str] = frozenset()  # those of them that an earlier place counts
        PIPES.add(self)
        _count_all_stages()
        mend_lists()

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

    def note(self, module: nn.Module, holders: Mapping[str, Sequence[int]]) -> None:
        """What this place holds. Of a parameter that several places hold, the first one counts the gradient."""
        self.module = weakref.ref(module)
        self.held = frozenset(name for name, places in holders.items() if self.place in places)
        self.copies = frozenset(name for name, places in holders.items() if self.place in places[1:])

    def gradients(self, names: Collection[str]) -> list[Tensor]:
        """Those of these parameters that have one."""
        module = None if self.module is None else self.module()
        if module is None:
            return []
        return [grad for name in names if (grad := module.get_parameter(name).grad) is not None]


def is_elsewhere(held: Any) -> bool:
    """Whether a tensor is one of another stage."""
    return isinstance(held, DTensor) and held.device_mesh.get_coordinate() is None


# --- norms over all stages -------------------------------------------------------------------------------------------


def _count_all_stages() -> None:
    """From now on `torch.nn.utils.clip_grad_norm_` and `get_total_norm` of the gradients of a pipeline are of all its
    stages; torch has each stage's own, without a word.
    """
    plain = total_norm()
    if not getattr(plain, "counts_all_stages", False):
        replace_total_norm(_over_stages(plain))


def _over_stages(plain: Any) -> Any:
    @functools.wraps(plain)
    def norm_of(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        pipe = _pipe_of(given)
        if pipe is None:
            return plain(given, norm_type, error_if_nonfinite, foreach)
        copies = pipe.gradients(pipe.copies)
        own = [one for one in given if not any(one is copy for copy in copies)]
        with torch.no_grad():
            norm = plain(own, norm_type, False, foreach)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norm = norm.to(device_of(pipe.whole), torch.float64, copy=True)  # alike in a stage without gradients
            if norm_type == float("inf"):
                dist.all_reduce(norm, dist.ReduceOp.MAX, group=pipe.group)
            else:
                norm = norm**norm_type
                dist.all_reduce(norm, group=pipe.group)
                norm = norm ** (1.0 / norm_type)
            norm = norm.to(max((one.dtype for one in given), key=lambda dtype: torch.finfo(dtype).bits))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To disable "
                "this error and scale the gradients by the non-finite norm anyway, set error_if_nonfinite=False"
            )
        return norm

    norm_of.counts_all_stages = True  # type: ignore[attr-defined]
    return norm_of


def _pipe_of(tensors: Sequence[Tensor]) -> Pipe | None:
    """The pipeline of whose parameters these are the gradients. Equal meshes are one to torch, whichever module they
    were made for, and every module has process groups of its own.
    """
    given = {id(one) for one in tensors}
    for pipe in PIPES:
        if any(id(one) in given for one in pipe.gradients(pipe.held)):
            return pipe
    return None
