"""The program as one autograd function: parameters as they are held and local tensors in, local tensors out, explicit
collectives in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.attach.tensors import gradient_of, local_of
from autopar.attach.updates import Updates
from autopar.emit import Program
from autopar.emit.moves import settle
from autopar.graph import Node
from autopar.layout import local_shape
from autopar.mesh import Mesh


@dataclass(frozen=True)
class Runner:
    """A program with what every call of it needs: this rank's coordinates, how results are found among its outputs, and
    the updates of parameters that may still be under way.
    """

    program: Program
    mesh: Mesh
    coordinates: tuple[Tensor, ...]
    updates: Updates

    @property
    def parameters(self) -> tuple[Node, ...]:
        return tuple(node for node in self.program.inputs if node.op == "parameter")

    def __call__(
        self, parameters: Sequence[Tensor], others: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[tuple[str, Tensor]]]:
        """(outputs in the model's order, new values of the buffers it writes). Outputs carry gradients where the
        plan has them.
        """
        found: tuple[Tensor | None, ...] = _Step.apply(self, tuple(others), *parameters)  # type: ignore[assignment]
        if not torch.is_grad_enabled():
            settle()  # what is fetched from the host may be changed there from now on
        outputs: list[Tensor | None] = []
        buffers: list[tuple[str, Tensor]] = []
        for (result, _), value in zip(self.program.results, found, strict=True):
            if result.kind == "buffer":
                assert value is not None
                buffers.append((result.target, value))
            else:
                outputs.append(value)
        return outputs, buffers

    def tangents(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of the outputs that backward takes, in its order; an output that nobody used counts as zero."""
        place = {result.target: i for i, (result, _) in enumerate(self.program.results) if result.kind == "output"}
        layout_of = {result.target: layout for result, layout in self.program.results if result.kind == "output"}
        found: list[Tensor] = []
        for node in self.program.tangents:
            given = gradients[place[node.target]]
            if given is None:
                (type,) = node.outputs
                assert type is not None
                shape = local_shape(type.shape, layout_of[node.target], self.mesh)
                assert shape is not None
                given = torch.zeros(shape, dtype=getattr(torch, type.dtype), device=self.coordinates[0].device)
            found.append(given)
        return found


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: Runner, others: tuple[Tensor, ...], *parameters: Tensor) -> tuple[Tensor | None, ...]:
        program = runner.program
        pieces = tuple(map(local_of, parameters))
        outputs = program.forward(*pieces, *others, *runner.coordinates)
        count = len(program.results)
        ctx.runner, ctx.parameters, ctx.saved = runner, parameters, list(outputs[count:])
        results = tuple(_own(value, (*pieces, *others)) for value in outputs[:count])
        differentiable = {node.target for node in program.tangents}
        constant = [
            value
            for (result, _), value in zip(program.results, results, strict=True)
            if value is not None and not (result.kind == "output" and result.target in differentiable)
        ]
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        runner: Runner = ctx.runner
        program = runner.program
        if program.backward is None:
            raise RuntimeError(
                "this call ran the inference program, which has no backward; call the module in grad mode"
            )
        if ctx.saved is None:
            raise RuntimeError("backward ran a second time through the same forward; call the module again first")
        runner.updates.finish()  # of parameters whose next gradients are made now
        saved, ctx.saved = ctx.saved, None
        made = program.backward(saved, *runner.tangents(gradients), *runner.coordinates)
        settle()  # gradients on the host have arrived, and parameters there have been read
        by_name = {result.target: value for (result, _), value in zip(program.gradients, made, strict=True)}
        held = zip(runner.parameters, ctx.parameters, strict=True)
        return None, None, *(gradient_of(parameter, by_name.get(node.target)) for node, parameter in held)


def _own(value: Tensor | None, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """An output that is an input itself becomes a tensor of its own, as autograd wants it."""
    return value.clone() if value is not None and any(value is one for one in inputs) else value
