"""A call that runs again in its own backward, by another program, on what it found the first time: where a gradient
arrives for an output that its program has none for, and where gradients shall have gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.attach.drawn_ahead import serves
from autopar.attach.generators import States, random_states
from autopar.attach.prepared import Prepared
from autopar.attach.programs import Key, State, prepare
from autopar.attach.run import Runner, Step
from autopar.attach.steps import step_of
from autopar.attach.tensors import as_dtensor, exchange, is_whole
from autopar.ir.graph import input_type
from autopar.ir.layout import Layout
from autopar.trace.calls import Call
from autopar.trace.counted import standing
from autopar.trace.formulas import Place
from autopar.trace.outside import states_outside, undrawn


@dataclass(frozen=True)
class Given:
    """The arguments of a call, of which a rank keeps its pieces alone: who has given whole ones may let them go.

    `leaves`: with None in the place of what `pieces` has (place among them, shape, layout, piece), and of what no
    program reads (`unread`: place, shape, dtype). DTensors are pieces already; what forward asks stays whole.
    """

    call: Call
    leaves: list[Any]
    spec: pytree.TreeSpec
    pieces: list[tuple[int, tuple[int, ...], Layout, Tensor]]
    unread: list[tuple[int, torch.Size, torch.dtype]]
    device_mesh: DeviceMesh

    @staticmethod
    def of(call: Call, prepared: Prepared, step: Step) -> Given:
        leaves, spec = pytree.tree_flatten((call.args, dict(sorted(call.kwargs.items()))))  # as `call.tensors` stand
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        asked = {places[number] for number in prepared.asks.values()}
        pieces: list[tuple[int, tuple[int, ...], Layout, Tensor]] = []
        for (node, number, layout), piece in zip(prepared.inputs, step.watched, strict=True):
            is_cut = number < len(places) and places[number] not in asked
            if is_cut and not isinstance(leaves[places[number]], DTensor):
                shape = input_type(prepared.graph, node).shape
                pieces.append((places[number], shape, layout, step.through.get(node.target, piece)))
        cut, unread = {place for place, *_ in pieces}, list[tuple[int, torch.Size, torch.dtype]]()
        for place in places:
            if place not in asked and not isinstance(leaf := leaves[place], DTensor):
                leaves[place] = None
                unread += [] if place in cut else [(place, leaf.shape, leaf.dtype)]
        bare = replace(call, args=(), kwargs={}, tensors=(), given=((), {}))
        return Given(bare, leaves, spec, pieces, unread, step.device_mesh)

    def again(self) -> Call:
        """The call, of these pieces, with their gradients."""
        leaves = [*self.leaves]
        for place, shape, dtype in self.unread:
            leaves[place] = torch.empty(shape, dtype=dtype, device="meta")
        with torch.enable_grad():
            for place, shape, layout, piece in self.pieces:
                leaves[place] = piece if is_whole(layout) else as_dtensor(piece, shape, layout, self.device_mesh)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return replace(
            self.call, args=args, kwargs=kwargs, tensors=tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        )


@dataclass(frozen=True)
class Before:
    """A call, and what it found: attributes of modules, hooks in forward, buffers that it changes, how many calls drew
    before it, on one rank the states of torch's generators, and those of Python's and numpy's, if it draws from these
    (`outside`). `given`: its arguments, once they are cut. `buffers`: as they were, those of `changed` alone, once it
    has written to them.
    """

    parallel: Any
    prepared: Prepared
    key: Key
    attributes: dict[Place, Any]
    hooks: list[Any]
    changed: frozenset[str]
    buffers: dict[str, Tensor]
    drawn: int
    states: States
    outside: Any
    given: Given | None = None

    @staticmethod
    def of(parallel: Any, prepared: Prepared, key: Key, changed: Iterable[str]) -> Before:
        """`changed`: buffers that are to be as they are now."""
        state, runner = parallel._autopar, prepared.runner
        states = random_states(runner.mesh.ranks, runner.coordinates[0].device) if prepared.draws else []
        attributes, hooks = prepared.attributes_now(), prepared.hooks.held()
        outside, drawn = states_outside() if prepared.drawn.steps else None, state.drawing_calls
        return Before(parallel, prepared, key, attributes, hooks, frozenset(changed), {}, drawn, states, outside)

    def keep(self, name: str, held: Tensor, value: Tensor, alone: bool) -> bool:
        """Of a buffer that is about to become `value`; True where it is so by now. `alone`: nobody else has `value`,
        whose memory is then that of what was before: there are two as it is, and backward would hold a third.
        """
        if name not in self.changed:
            return False
        if alone and exchange(held, value):
            self.buffers[name] = value
            return True
        self.buffers[name] = held.clone()
        return False

    @property
    def call(self) -> Call:
        """As it was."""
        assert self.given is not None
        return self.given.again()

    @property
    def state(self) -> State:
        return self.parallel._autopar

    @property
    def ranks_of_rows(self) -> int:
        """How many ranks have rows of their own."""
        return self.state.mesh.ranks if self.state.inputs == "local" else 1

    @contextlib.contextmanager
    def back(self, for_what: str) -> Iterator[None]:
        """Inside, the module is as the call found it. Raises RuntimeError where it is not the same in other ways;
        `for_what`: it runs again now.
        """
        hooks, buffers = self.prepared.hooks.back(self.hooks), self._buffers_of(self.prepared)
        with torch.enable_grad(), hooks, buffers, self._standing(), undrawn(self.outside):
            given = self.call.tensors if self.prepared.asks else ()
            if (changed := self.prepared.fits(given)) is not None:
                raise RuntimeError(f"{for_what}, but since its forward {changed}; change it behind backward")
            yield

    def _standing(self) -> Any:
        return standing(self.attributes, self.prepared.modules)

    def step(self, full: Prepared, call: Call) -> Step:
        """What that program reads, of what there was."""
        state = self.state
        counted, state.drawing_calls = state.drawing_calls, self.drawn
        try:
            with self._buffers_of(full), self._standing(), undrawn(self.outside):
                made = step_of(state, full, call)
        finally:
            state.drawing_calls = counted
        made.states = self.states
        return made

    @contextlib.contextmanager
    def _buffers_of(self, prepared: Prepared) -> Iterator[None]:
        """Inside, those that the call has written to, and are known, are as it found them."""
        values = {name: tensors[leaf] for name, (tensors, leaf) in prepared.buffers.items()}
        for name, value in self.buffers.items():
            tensors, leaf = prepared.buffers[name]
            tensors[leaf] = value
        try:
            yield
        finally:
            for name, (tensors, leaf) in prepared.buffers.items():
                tensors[leaf] = values[name]


def with_every_tangent(before: Before) -> Callable[[], tuple[Runner, Step]]:
    """What backward calls when a gradient arrives for an output that the program has none for: the same call with a
    program that has, which from now on serves all calls like this one.
    """

    def again() -> tuple[Runner, Step]:
        state, key, prepared, call = before.state, before.key, before.prepared, before.call
        with before.back("a gradient arrives for an output beside the loss, for which the step is planned again now"):
            state.wants_tangents.add(key)
            there = (one for one in state.programs[key] if not one.without_tangent)
            full = next((one for one in there if serves(one, call.tensors, state.device_mesh)), None)
            if full is None:
                state.programs[key].remove(prepared)
                full = prepare(before.parallel, state, call, key, training=before.parallel.training)
            told = [[write.told for write in one.left] for one in (prepared, full)]
            if full.out_spec != prepared.out_spec or told[0] != told[1]:
                raise RuntimeError(
                    "a gradient arrives for an output beside the loss, for which the step is planned again now, but "
                    "what forward gives and keeps is something else by now; call the module again, then backward"
                )
        return full.runner, before.step(full, call)

    return again
