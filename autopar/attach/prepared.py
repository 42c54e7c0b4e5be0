"""A program of a module, with all that a call of it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.attach.guards import Guards
from autopar.attach.hooks import Registered
from autopar.attach.inputs import type_of
from autopar.attach.run import Runner
from autopar.emit.seeded import drawing
from autopar.ir.batch_norm import leads_to_outputs
from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.layout import Layout
from autopar.plan import Plan
from autopar.trace.asked import Asked
from autopar.trace.counted import Counting, held_at
from autopar.trace.drawn import Draws
from autopar.trace.formulas import Computed, Place
from autopar.trace.given import At, GivenBack, Rewritten
from autopar.trace.modules import noted_on
from autopar.trace.outputs import memory_of
from autopar.trace.sharing import Look, Memory
from autopar.trace.values import copied, snapshot
from autopar.trace.writes import Write
from cost_models.steps import DEVICE


def _lies(held: Tensor) -> tuple[object, object] | None:
    return (held.device_mesh, held.placements) if isinstance(held, DTensor) else None


OTHER_HOOKS = "the hooks of a module are others"
Slot = tuple[dict[str, Any], str]  # a module's own dict of parameters or buffers, and the name there


@dataclass
class Prepared:
    """A program with all that a call of it needs.

    `inputs`: for each input of the program its place among the tensors of a call, and its layout. `parameters`: where
    they are found, in the order of the program; `beside`: those of other stages that train; `buffers`: all that the
    model has. `trained`: which parameters of the model, in any stage, required grad; `held`: which these were. `same`:
    slots that hold one tensor under two names. `hooked`: dicts of hooks that no program calls, and how many there were;
    `hooks`: those that it has. `without_tangent`: outputs whose gradient the program does not take. `writes`:
    attributes that forward sets, as `Reads.written` has them; `sets`: those that are no tensors, and to what, of the
    numbers that are there; `left`: what it writes elsewhere. `counting`: numbers of modules that it takes;
    `drawn`: what it takes from Python's and numpy's generators. `told`: in
    words. `given`: leaves of what forward gives that lie where a tensor of the call (its place) or a buffer does.
    `asked`: what forward asks its arguments, and of which of the tensors of a call, by path. `changed`: leaves that are
    what it has made of an argument in place, and of which tensor of a call. `own_leaves`: likewise, that require grad,
    and lead to no parameter or input. `has_trained`: whether a call with
    gradients ran it.
    """

    plan: Plan
    runner: Runner
    inputs: tuple[tuple[Node, int, Layout], ...]
    parameters: list[Slot]
    beside: list[Slot]
    buffers: dict[str, Slot]
    constants: Mapping[str, Tensor]
    out_spec: Any
    output_constants: Mapping[int, Any]
    guards: Guards
    trained: list[tuple[Slot, bool]]
    same: list[tuple[Slot, Slot]]
    held: list[Tensor]
    hooked: tuple[list[dict[int, object]], int]
    hooks: Registered
    without_tangent: frozenset[str]
    writes: Mapping[tuple[str, str], tuple[Any, Any, str]]
    modules: Mapping[str, nn.Module]
    sets: list[tuple[Place, Callable[[Computed], Any]]]
    left: list[Write]
    checked: list[tuple[Any, Any]]
    counting: Counting
    drawn: Draws
    told: str
    batch_dims: Mapping[str, int]
    given: Mapping[int, tuple[int | Slot, Look | None]]
    asked: Asked
    asks: Mapping[str, int]
    changed: Mapping[int, int]
    own_leaves: frozenset[int]
    has_trained: bool = False

    def __post_init__(self) -> None:
        tensors = [*self.held, *(slot[name] for slot, name in self.buffers.values())]
        self._noted = [(tensor, snapshot(noted)) for tensor in tensors if (noted := noted_on(tensor))]  # by users
        self._lacking = [(*name.rpartition(".")[::2], attribute) for name, attribute in self.asked.lacking]

    @property
    def graph(self) -> Graph:
        """Of the whole model; of several micro-batches one of them."""
        return self.runner.graph

    @cached_property
    def takes_gradients(self) -> frozenset[str]:
        """Inputs by which there are gradients, or may be: outputs beside the loss may turn out to have one."""
        made_of = {
            result.ref.name for result in self.graph.results if result.target in self.without_tangent and result.ref
        }
        for node in reversed(self.graph.nodes):
            if node.name in made_of and node.phase != "backward":
                made_of |= {ref.name for ref in node.operands}
        return frozenset(made_of | {node.name for node in self.graph.inputs_with_gradient})

    @property
    def has_answers(self) -> bool:
        """Whether other calls have other programs, by what is in their arguments, or by what they draw."""
        return bool(self.asks or self.asked.of_draws)

    def fits(self, given: Sequence[Tensor], known: dict[int, Any] | None = None) -> str | None:
        """None where this program still means what the module does with these; else what has changed, in words.
        `known`: as of `Asked.changed`.
        """
        values = {path: given[at] for path, at in self.asks.items()}
        if values and (changed := self.asked.changed(values, {} if known is None else known)) is not None:
            return changed  # looked at first, as it is what tells programs apart
        if torch.is_grad_enabled() or self.counting.asks_what_trains:
            try:
                changed = any(tensors[name].requires_grad != before for (tensors, name), before in self.trained)
            except (KeyError, AttributeError):
                return "a parameter is gone"
            if changed:
                return "a parameter requires grad, or no longer does"
        for (one, name), (other, first) in self.same:
            if one.get(name) is not other.get(first):
                return f"parameter {name} is no longer tied to {first}"
        for number, ((tensors, name), _) in enumerate(self.trained):
            now = tensors.get(name)
            if now is self.held[number] or not isinstance(now, nn.Parameter):  # torch.func puts tensors there
                continue
            is_laid_out = isinstance(now, DTensor) or self.plan.mesh.ranks == 1
            if not is_laid_out or type_of(now) != type_of(self.held[number]):
                return f"parameter {name} is another one"
            if _lies(now) != _lies(self.held[number]):  # on ranks of other stages, too
                return f"parameter {name} is another one, in other pieces"
            self.held[number] = now
        if any(snapshot(noted_on(tensor)) != was for tensor, was in self._noted):
            return "what is noted on a parameter or buffer is something else"
        tensors = ((getattr(self.modules.get(path), leaf, None), told) for path, leaf, told in self._lacking)
        if any(hasattr(tensor, attribute) for tensor, attribute in tensors):
            return "something is noted on a parameter or buffer, for which forward asks"
        for (tensors, name), shape in self._shapes:
            if (now := tensors.get(name)) is None or now.shape != shape:
                return f"buffer {name} {'is not there' if now is None else 'has another shape'}"
        if self.hooks.changed():
            return OTHER_HOOKS
        return self.guards.broken() or self.counting.broken(self.modules)

    @cached_property
    def _shapes(self) -> list[tuple[Slot, tuple[int, ...]]]:
        """Of the buffers that the program reads."""
        read = (node for node in self.runner.own_inputs if node.op == "buffer")
        return [(self.buffers[node.target], type.shape) for node in read for type in node.outputs if type is not None]

    def attributes_now(self) -> dict[Place, Any]:
        """What is at the places that forward sets, or finds numbers at, as it stays whatever is written there."""
        now = {place: copied(value) for place, value in held_at(self.writes, self.modules).items()}
        counted = held_at(self.counting.places, self.modules)
        return now | self.counting.by_all_names(
            {place: pytree.tree_map(_as_it_lies, value) for place, value in counted.items()}
        )

    @cached_property
    def draws(self) -> tuple[tuple[str, tuple[TensorType | None, ...]], ...]:
        """The operators by which a call draws random numbers, in order, and what they give."""
        return tuple((node.op, node.outputs) for node in drawing(self.graph))

    @cached_property
    def written(self) -> tuple[str, ...]:
        """The buffers that it writes."""
        return tuple(result.target for result, _ in self.runner.results if result.kind == "buffer")

    @cached_property
    def written_alone(self) -> frozenset[str]:
        """Those of them whose new values lie where nothing else lies."""
        told, alone = enumerate(self.runner.results), self.runner.program.alone
        return frozenset(result.target for place, (result, _) in told if result.kind == "buffer" and place in alone)

    @cached_property
    def written_and_read(self) -> tuple[str, ...]:
        """Those of them that outputs are made of, as they were before."""
        return tuple(name for name in self.written if leads_to_outputs(self.graph, name))

    @property
    def peak(self) -> int:
        """Bytes of a device at the peak, predicted."""
        return self.plan.peak_bytes[DEVICE]

    @cached_property
    def theirs(self) -> list[Rewritten | GivenBack]:
        """Containers of the caller's that it writes to, or returns, without what is new in them."""
        return pytree.tree_unflatten([None] * self.out_spec.num_leaves, self.out_spec).given

    @cached_property
    def rewritten(self) -> list[At]:
        """Where those are among the arguments that it writes to."""
        return [one.at for one in self.theirs if isinstance(one, Rewritten)]

    @cached_property
    def packed(self) -> frozenset[int]:
        """`Memory.packed`."""
        return memory_of(self.out_spec).packed

    def hold(self) -> None:
        """The parameters that are there now are those that it runs with."""
        self.held = [tensors[name] for (tensors, name), _ in self.trained]


def given_before(
    memory: Memory, places: Mapping[str, int], buffers: Mapping[str, Slot], changed: Mapping[int, int]
) -> dict[int, tuple[int | Slot, Look | None]]:
    """`Prepared.given`. `places`: of arguments, by path, among the tensors of a call."""
    where: dict[str, Mapping[str, int | Slot]] = {"input": places, "buffer": buffers}
    there = (one for one in memory.given if one.name in where[one.kind] and one.leaf not in changed)
    return {one.leaf: (where[one.kind][one.name], one.look) for one in there}


def _as_it_lies(leaf: Any) -> Any:
    """A tensor in whose memory this one lies, and stays when this one is put elsewhere (`tensor.data = other`)."""
    return leaf.detach() if type(leaf) is Tensor and not leaf.requires_grad else leaf
