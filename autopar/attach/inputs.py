"""Calls of the module: arguments are matched with those it was planned for, and cut to the layouts of the plan."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.attach.tensors import piece_of, placements_of
from autopar.graph import Node, TensorType
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.plan import PlanMismatch


def by_name(forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with every argument that has a name passed by its name, so that both spellings are one call."""
    signature = inspect.signature(forward)
    bound = signature.bind(*args, **kwargs)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match signature.parameters[name].kind:
            case inspect.Parameter.POSITIONAL_ONLY:
                positional.append(value)
            case inspect.Parameter.VAR_POSITIONAL:
                positional.extend(value)
            case inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            case _:
                named[name] = value
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values()):
        return tuple(args), dict(kwargs)
    return tuple(positional), named


def type_of(value: Tensor) -> TensorType:
    return TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def match_inputs(leaves: list[tuple[str, Any]], planned: tuple[tuple[str, Any], ...]) -> dict[str, Tensor]:
    """Path -> tensor of this call. Raises PlanMismatch naming the first argument that differs from the planned call.

    `planned`: path and TensorType of each tensor, path and value of everything else.
    """
    given, wanted = dict(leaves), dict(planned)
    for path in wanted.keys() - given.keys():
        raise PlanMismatch(
            f"argument {path} is missing: the plan was made for a call with {', '.join(wanted)}; pass the same ones"
        )
    for path in given.keys() - wanted.keys():
        raise PlanMismatch(
            f"argument {path} is new: the plan was made for a call with {', '.join(wanted)}; pass the same arguments"
        )
    tensors: dict[str, Tensor] = {}
    for path, value in given.items():
        expected = wanted[path]
        if isinstance(value, Tensor) != isinstance(expected, TensorType):
            told = type_of(value) if isinstance(value, Tensor) else repr(value)
            raise PlanMismatch(
                f"argument {path} is {told}, the plan was made for {expected}; pass the same kind of argument"
            )
        if isinstance(value, Tensor):
            if type_of(value) != expected:
                raise PlanMismatch(
                    f"argument {path} is {type_of(value)}, the plan was made for {expected}; "
                    "pass that shape and dtype (whole tensors, not this rank's part), or compile again for this one"
                )
            if value.requires_grad:
                raise PlanMismatch(
                    f"argument {path} requires grad; gradients of inputs are not planned, pass {path} detached"
                )
            tensors[path] = value
        elif value != expected and value is not expected:
            raise PlanMismatch(
                f"argument {path} is {value!r}, the plan was made for {expected!r}; compile again for this value"
            )
    return tensors


def planned_inputs(leaves: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """What `match_inputs` compares with: types in the place of tensors."""
    return tuple((path, type_of(leaf) if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves)


def local_inputs(
    inputs: Iterable[Node],
    layouts: Mapping[str, Layout],
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    device_mesh: DeviceMesh,
) -> list[Tensor]:
    """This rank's piece of each of `inputs` (nodes), laid out as `layouts` says by path. A plain tensor is the whole;
    a DTensor says where it lies.
    """
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    pieces: list[Tensor] = []
    for node in inputs:
        value, layout = tensors[node.target], layouts[node.target]
        if isinstance(value, DTensor):
            pieces.append(value.redistribute(device_mesh, placements_of(layout)).to_local())
        else:
            pieces.append(piece_of(value.detach().to(device_mesh.device_type), layout, mesh, coordinate))
    return pieces
