"""Arguments that forward changes in place (`autopar.trace.changed`), or puts something into (`autopar.trace.given`), in
a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.attach.guards import Guards
from autopar.attach.prepared import Prepared
from autopar.errors import TraceError
from autopar.trace.calls import Call
from autopar.trace.given import At, GivenBack, Had, Rewritten, given_in, let_hold, part_at, with_theirs
from autopar.trace.outputs import Returned
from autopar.trace.sharing import has_storage, storage_of


def with_copies(call: Call, own: Call, changed: Mapping[int, int]) -> Call:
    """The call, of copies of what it changes, which stays as it is until `write_back`. `own`: as the caller made it,
    of a rank's own rows; `changed`: leaf of what forward gives -> place among the tensors of the call. Raises
    TraceError where it cannot be changed alone; RuntimeError where gradients stand against it.
    """
    leaves, spec = pytree.tree_flatten((call.args, dict(sorted(call.kwargs.items()))))  # as `call.tensors` stand
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for number in changed.values():
        _check(own, number)
        leaves[places[number]] = leaves[places[number]].clone()
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return replace(call, args=args, kwargs=kwargs, tensors=tuple(leaves[place] for place in places))


def write_back(call: Call, changed: Mapping[int, int], leaves: Mapping[int, Any]) -> None:
    """Let what the caller has given be what forward has made of it."""
    for leaf, number in changed.items():
        if leaves[leaf].dtype == call.tensors[number].dtype:  # of what was cast first the caller's stays as it is
            call.tensors[number].copy_(leaves[leaf])


def refuse_shared(call: Call, prepared: Prepared) -> None:
    """Raises TraceError where a container that forward writes to is another argument, too, or what forward reads
    elsewhere: a program was made for one that nothing else sees.
    """
    there = given_in(*call.given)
    known = {id(one.container): one.path for one in reversed(there)}
    found = list[tuple[str, str]]()
    for at in prepared.rewritten:
        container = _theirs(call, at)
        also = [one.path for one in there if one.container is container][1:]
        found += [(known[id(container)], name) for name in [*also, _read_as(prepared.guards, container)] if name]
    for write in prepared.left:
        container = write.container(prepared.modules)
        found += [(known[id(container)], write.name)] if id(container) in known else []
    if found:
        path, other = found[0]
        raise TraceError(
            f"forward writes to its argument {path}, which is {other} in this call, too, and a program would not see "
            "that: pass a copy"
        )


def _read_as(guards: Guards, container: Any) -> str | None:
    """What forward calls it, which reads it elsewhere; None where it does not."""
    places = [*(place for place, _, _ in guards.changing), *(place for place, _ in guards.whole)]
    named = (guards.named[id(place), key] for place, key in places if place.get(key, None) is container)
    return next(named, None)


def outputs_of(call: Call, made: Returned) -> Any:
    """What forward returns. Lets containers of the caller hold what it has put into them; where it returns one, that is
    returned itself.
    """
    if not made.given:
        return made.outputs
    had = Had(partial(_theirs, call), made.outputs)
    given_back = [(one.within, had.theirs(one.at)) for one in made.given if isinstance(one, GivenBack)]
    held = [
        (had.theirs(one.at), {key: had.of(part) for key, part in one.parts.items()})
        for one in made.given
        if isinstance(one, Rewritten)
    ]
    for container, parts in held:
        let_hold(container, parts)
    outputs = made.outputs
    for within, container in given_back:
        outputs = with_theirs(outputs, within, container)
    return outputs


def _theirs(call: Call, at: At) -> Any:
    args, kwargs = call.given
    return part_at(args[at[0]] if isinstance(at[0], int) else kwargs[at[0]], at[1:])


def _check(call: Call, number: int) -> None:
    tensor, others = call.tensors[number], (*call.tensors[:number], *call.tensors[number + 1 :])
    told = f"forward changes an argument {list(tensor.shape)} in place"
    if tensor.requires_grad and torch.is_grad_enabled() and (tensor.is_leaf or tensor.retains_grad):
        what = "is a leaf and requires grad" if tensor.is_leaf else "retains its gradient"
        raise RuntimeError(f"{told} that {what}, which a program does not: have forward clone it first")
    if isinstance(tensor, DTensor):
        raise TraceError(
            f"{told}, which is a DTensor in this call, and a program writes to none: have forward clone it first"
        )
    if not tensor.is_contiguous():
        raise TraceError(
            f"{told} that lies in another order than that of its dims, or with gaps, where views and copies are others "
            "than in a program: pass x.contiguous(), or have forward clone it first"
        )
    if any(has_storage(one) and storage_of(one) == storage_of(tensor) for one in others):
        raise TraceError(
            f"{told}, which shares its memory with another argument of this call, and a program would not see that: "
            "have forward clone it first"
        )
