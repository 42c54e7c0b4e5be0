"""Runs a plan's program for all ranks in one process: node by node, for each rank on plain tensors.

It says the same as `autopar.emit.run_all_ranks`, with collectives written out apart from torch's, several times faster,
and it counts what they move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.emit import emit
from autopar.emit.run_all_ranks import Ran, shard, unshard
from autopar.emit.seeded import pieces_of, seeds
from autopar.ir.graph import TensorType
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from cost_models.price import groups_over

Traffic = dict[tuple[str, str], int]
PerRank = list[Any]
SENDS = ("autopar.shift.default", "autopar.mirror.default")
REDUCE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


@dataclass
class Lockstep:
    """One program of one mesh; `traffic` is what one rank has received so far, per (collective, axis).

    A collective in place leaves no number in what it works on until it is waited for: who reads it before, or holds
    another view of it, gets nan.
    """

    mesh: Mesh
    traffic: Counter[tuple[str, str]]
    in_flight: dict[fx.Node, PerRank] = field(default_factory=dict)

    def execute(self, module: fx.GraphModule, inputs: Sequence[PerRank]) -> list[PerRank]:
        """The module's results, each as a list over the ranks."""
        values: dict[fx.Node, PerRank] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            match node.op:
                case "placeholder":
                    values[node] = next(given)
                case "output":
                    return [
                        values[part] if isinstance(part, fx.Node) else [part] * self.mesh.ranks for part in node.args[0]
                    ]
                case "call_function" if "_c10d_functional" in str(node.target) or str(node.target) in SENDS:
                    values[node] = self.collective(node, values)
                case _:
                    values[node] = self.apply(node, values)
        raise AssertionError("a module without an output")

    def apply(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        made: PerRank = []
        for rank in range(self.mesh.ranks):  # what draws without a seed of its own gives each rank other numbers
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda part, rank=rank: values[part][rank])
            if node.op == "call_method":
                made.append(getattr(args[0], str(node.target))(*args[1:], **kwargs))
            else:
                made.append(node.target(*args, **kwargs))  # type: ignore[operator]
        return made

    def collective(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        called = str(node.target).removeprefix("_c10d_functional.").removeprefix("autopar.").split(".")[0]
        name = called.removesuffix("_")
        sent: PerRank = values[node.args[0]]  # type: ignore[index]
        if name == "wait_tensor":
            for piece, value in zip(sent, self.in_flight.pop(node.args[0], ()), strict=False):  # type: ignore[arg-type]
                piece.copy_(value)
            return sent
        assert all(piece.is_contiguous() for piece in sent), f"{name} sends a tensor that is not contiguous"
        axis = str(node.args[-1])
        received: PerRank = [None] * self.mesh.ranks
        for group in groups_over(self.mesh.places(axis), self.mesh.sizes):
            for rank, value in zip(group, exchange(name, node.args, [sent[rank] for rank in group]), strict=True):
                received[rank] = value
        kind, nbytes = moved(name, self.mesh.size(axis), sent[0].numel() * sent[0].element_size())
        self.traffic[kind, axis] += nbytes
        if called == name:
            return received
        self.in_flight[node] = received
        for piece in sent:
            piece.fill_(torch.nan)
        return sent


def exchange(name: str, args: Sequence[Any], sent: list[Tensor]) -> list[Tensor]:
    """What each rank of one group has afterwards."""
    ranks = len(sent)
    match name:
        case "all_gather_into_tensor":
            return [torch.cat(sent) for _ in sent]
        case "all_reduce":
            return [REDUCE[args[1]](torch.stack(sent), 0) for _ in sent]
        case "reduce_scatter_tensor":
            assert sent[0].shape[0] % ranks == 0, "pieces of unequal size"
            return [piece.clone() for piece in REDUCE[args[1]](torch.stack(sent), 0).chunk(ranks)]
        case "shift":
            return [sent[place - 1].clone() for place in range(ranks)]
        case "mirror":
            return [sent[-1 - place].clone() for place in range(ranks)]
        case "all_to_all_single":
            assert list(args[1]) == list(args[2]) and len(set(args[1])) == 1, "pieces of unequal size"
            cut = [value.split(list(args[2])) for value in sent]
            return [torch.cat([pieces[rank] for pieces in cut]) for rank in range(ranks)]
        case _:
            raise AssertionError(f"a program has no {name}")


def moved(name: str, ranks: int, nbytes: int) -> tuple[str, int]:
    """The collective's name in a plan, and the bytes that one rank receives if `nbytes` stand in its input."""
    match name:
        case "all_gather_into_tensor":
            return "all_gather", (ranks - 1) * nbytes
        case "reduce_scatter_tensor":
            return "reduce_scatter", nbytes - nbytes // ranks
        case "shift" | "mirror":
            return name, nbytes
        case "all_to_all_single":
            return "all_to_all", nbytes - nbytes // ranks
        case _:  # a reduce-scatter and an all-gather, each rounded down where the ranks do not divide it
            return "all_reduce", 2 * ((ranks - 1) * nbytes // ranks)


def zeros(type: TensorType | None) -> Tensor | None:
    """In what gradients are added up."""
    return None if type is None else torch.zeros(type.shape, dtype=getattr(torch, type.dtype))


def run_all(plan: Plan, values: Mapping[str, Tensor], seed: int = 0) -> tuple[Ran, Traffic]:
    """One step of `plan` on all ranks, and the bytes that one rank received. Tangents that are not given are 1."""
    mesh = plan.mesh
    program = emit(plan, {axis: axis for axis in mesh.groups})
    ranks = range(mesh.ranks)
    torch.manual_seed(seed)  # what a program of one rank draws from

    def pieces(name: str, value: Tensor) -> PerRank:
        return [shard(value, plan.choices[name].gives[0], mesh, rank) for rank in ranks]

    indices = [mesh.indices(mesh.coordinate(rank)) for rank in ranks]
    coordinates = [[*map(torch.tensor, one)] for one in zip(*indices, strict=True)]
    if program.drawing:
        coordinates.append([seeds(seed, 0, pieces_of(program.drawing, mesh, mesh.coordinate(rank))) for rank in ranks])
    lockstep = Lockstep(mesh, Counter())
    with torch.no_grad():
        inputs = [pieces(node.name, values[node.name]) for node in program.inputs]
        outputs = lockstep.execute(program.forward, [*inputs, *coordinates])
        done = list(zip(program.results, outputs, strict=False))
        for (result, _), value in done:
            if result.kind == "buffer":  # written where it lies, as the module does
                (place,) = [
                    at for at, one in enumerate(program.inputs) if (one.op, one.target) == ("buffer", result.target)
                ]
                for held, new in zip(inputs[place], value, strict=True):
                    held.copy_(new)
        if program.backward is not None:
            saved = [[value[rank] for value in outputs[len(program.results) :]] for rank in ranks]
            tangents: list[PerRank] = []
            for node in program.tangents:
                (type,) = node.outputs
                assert type is not None
                one = torch.ones(type.shape, dtype=getattr(torch, type.dtype))
                tangents.append(pieces(node.name, values.get(node.name, one)))
            so_far = [[zeros(type) for type in program.added_up] for _ in ranks]
            given = [saved, *tangents, *coordinates, *([so_far] if program.added_up else [])]
            made = lockstep.execute(program.backward, given)
            for place, type in enumerate(program.added_up):
                made[place] = made[place] if type is None else [sums[place] for sums in so_far]
            done += zip(program.gradients, made, strict=True)
            assert not any(saved), "the backward leaves saved values behind"
    whole = {
        (result.kind, result.target): None if value[0] is None else unshard(dict(enumerate(value)), layout, mesh)
        for (result, layout), value in done
    }
    return Ran(whole), {key: nbytes for key, nbytes in sorted(lockstep.traffic.items()) if nbytes}
