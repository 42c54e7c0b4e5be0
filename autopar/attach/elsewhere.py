"""What a model holds and somebody else holds, too: a meter, a list, a configuration, a plain tensor of the script.

    meter = Meter()
    parallel = autopar.compile(Model(config, meter), mesh)
    ...
    print(meter.average)

A parallel module has copies of what its model alone holds, as of its submodules. What others hold as well is the same
object in it, as in everything that wraps a model: they see what forward writes to it, and forward what they set. Python
counts who holds an object (`sys.getrefcount`); those who are more than the model's own parts are others.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from autopar.trace.modules import OF_EVERY_MODULE
from autopar.trace.sharing import lies_somewhere, storage_of

# What `copy.deepcopy` leaves as it is and leads to nothing of a model, or to everything.
ATOMS = (int, float, complex, str, bytes, type(None), type, types.ModuleType, types.CodeType, types.FrameType)


def held_elsewhere(model: nn.Module, registered: Collection[int]) -> dict[int, Any]:
    """By id, the objects and tensors that the model's modules lead to and that others hold, too, with all that those
    lead to; but for modules, and what leads to a module or to the memory of a parameter or buffer: a copy of that has
    to look at copies. `registered`: ids of parameters and buffers.
    """
    found, holders, held = _walk(model, registered)
    copied = [number for number, value in found.items() if isinstance(value, nn.Module) or number in registered]
    memories = {storage_of(value) for value in found.values() if id(value) in registered and lies_somewhere(value)}
    lying = _by_memory(found)
    copied += [number for memory in memories for number in lying.get(memory, ())]
    leading = _reached(copied, holders)
    # A tensor that has views is held once more, by torch.
    held.update({id(base) for one in found.values() if isinstance(one, Tensor) and (base := one._base) is not None})
    probe = {0: object()}
    ours = sys.getrefcount(probe[0])  # the table, and what asks
    others = [number for number in found if sys.getrefcount(found[number]) - ours > held[number]]
    leads_to: dict[int, list[int]] = {}
    for number, those in holders.items():
        for one in those:
            leads_to.setdefault(one, []).append(number)
    for those in lying.values():  # tensors of one memory are shared together
        for one in those:
            leads_to.setdefault(one, []).extend(other for other in those if other != one)
    begin = [number for number in others if number not in leading]
    return {number: found[number] for number in _reached(begin, leads_to) if number not in leading}


def _walk(model: nn.Module, registered: Collection[int]) -> tuple[dict[int, Any], dict[int, list[int]], Counter[int]]:
    """All that a model leads to, by id; the ids of what holds each; and how often each is held there."""
    found: dict[int, Any] = {id(model): model}
    holders: dict[int, list[int]] = {id(model): []}
    held: Counter[int] = Counter()
    left = [id(model)]
    while left:
        holder = left.pop()
        for value in _held_by(found[holder], registered):
            if id(value) not in found:
                found[id(value)] = value
                holders[id(value)] = []
                left.append(id(value))
            holders[id(value)].append(holder)
            held[id(value)] += 1
    return found, holders, held


def _held_by(value: Any, registered: Collection[int]) -> list[Any]:
    """What it refers to, but for atoms; what is held twice stands twice in it."""
    match value:
        case nn.Module():
            parts = [one for name, one in vars(value).items() if name not in OF_EVERY_MODULE]
            parts += [*value._modules.values(), *value._parameters.values(), *value._buffers.values()]
        case Tensor():
            parts = [*vars(value).values()] if id(value) in registered else []
        case types.FunctionType():  # and not all that there is in its module
            parts = [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
        case dict() if "__builtins__" in value:
            parts = []
        case _:
            parts = gc.get_referents(value)
    return [one for one in parts if not isinstance(one, ATOMS)]


def _by_memory(found: dict[int, Any]) -> dict[int, list[int]]:
    lying: dict[int, list[int]] = {}
    for number, value in found.items():
        if lies_somewhere(value):
            lying.setdefault(storage_of(value), []).append(number)
    return lying


def _reached(begin: list[int], leads: dict[int, list[int]]) -> set[int]:
    reached, left = set(begin), [*begin]
    while left:
        for one in leads.get(left.pop(), ()):
            if one not in reached:
                reached.add(one)
                left.append(one)
    return reached
