"""pin: what a user settles by name of what mesh axes split: `{"layers.*.mlp.up": "tensor: columns"}`.

The words are those that `explain` prints of products: batch, sequence, heads, groups, columns, rows, nothing; the
name of a pattern that sends along the axis; or `ulysses`: the sequence in linear layers, heads in attention. They hold
for the products, attentions and convolutions of the module's forward pass that can be run so; what backward does with
them, and all else, stays open. So a pin takes strategies out of a question, and whatever is searched, a baseline's
plans, too, is searched among the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.plan.reading import OTHERWISE, PATTERNED, ULYSSES, is_weighted, split_of, weights_of
from autopar.plan.value import is_product
from autopar.propose.strategies import Strategy
from autopar.rules.patterns import is_pattern
from autopar.search.context import Question, Table

Splits = Mapping[str, Mapping[str, tuple[str, str]]]  # forward node -> axis -> (what it splits, the name in the pin)
SEPARATOR, BETWEEN_AXES = ":", ";"
PINNED = Table[str, Question]("the same question, with what axes split settled")


def is_split(word: str) -> bool:
    """Whether a pin says what an axis splits."""
    return SEPARATOR in word


def needs_no_axis(pin: Mapping[str, str]) -> None:
    """Raises ValueError where a pin names a mesh axis: before the mesh is known there are none."""
    if named := [name for name, word in pin.items() if is_split(word)]:
        raise ValueError(
            f"pin {named[0]!r}: {pin[named[0]]!r} names a mesh axis, and which mesh is best is what is searched; "
            "give the mesh (--mesh data=8,tensor=4), or leave it out"
        )


def splits_in(name: str, word: str) -> dict[str, str]:
    """Axis -> what it splits, of `data: batch; tensor: columns`. Raises ValueError."""
    found: dict[str, str] = {}
    for part in word.split(BETWEEN_AXES):
        axis, _, what = (one.strip() for one in part.partition(SEPARATOR))
        if not axis or not what:
            raise ValueError(
                f"pin {name!r}: {part.strip()!r} is not AXIS: WORD; write for example 'tensor: columns', or "
                "'data: batch; tensor: rows'"
            )
        if found.setdefault(axis, what) != what:
            raise ValueError(f"pin {name!r}: {axis} is to split {found[axis]} and {what}; leave one out")
    return found


def settled(question: Question, splits: Splits) -> Question:
    """The question without the strategies that do not as they are pinned; itself where nothing is.

    Raises ValueError for an axis that the mesh has not, and for what no product of that name can have.
    """
    if not splits:
        return question
    key = repr(sorted((node, sorted(axes.items())) for node, axes in splits.items()))
    return question.once(PINNED, key, lambda: _settled(question, splits))


def _settled(question: Question, splits: Splits) -> Question:
    mesh, weight_of, node_of = question.pricer.mesh, weights_of(question.graph), question.graph.by_name
    for axes in splits.values():
        for axis, (_, name) in axes.items():
            if axis not in mesh.names:
                raise ValueError(f"pin {name!r}: mesh {mesh} has no axis {axis!r}, it has {', '.join(mesh.names)}")
    strategies = dict(question.strategies)
    known: dict[tuple[int, bool, str], tuple[Strategy, ...]] = {}  # equal nodes share one tuple, still
    obeying: dict[tuple[str, str, str], list[bool]] = {}  # (name, axis, word) -> whether each product can do so
    others: dict[tuple[str, str, str], dict[str, None]] = {}  # -> what those that cannot could do
    for node, axes in splits.items():
        options, weighted = strategies[node], is_weighted(node_of[node], weight_of)
        if not any(map(is_product, options)):
            continue
        for axis, (word, name) in axes.items():
            key = id(options), weighted, f"{axis}{SEPARATOR}{word}"
            number, pin = mesh.names.index(axis), (name, axis, word)
            if key not in known:
                known[key] = tuple(one for one in options if word in _words(one, number, mesh, weighted))
            obeying.setdefault(pin, []).append(bool(known[key]))
            if not known[key]:
                could = (_words(one, number, mesh, weighted) for one in options)
                others.setdefault(pin, {}).update(dict.fromkeys(itertools.chain(*could)))
            options = known[key] or options
        strategies[node] = options
    notes = [_note(*pin, obeying.get(pin, []), others.get(pin, {})) for pin in _pins(splits)]
    return replace(question, strategies=strategies, notes=(*question.notes, *notes), found=[], proven=[], _tables={})


def _pins(splits: Splits) -> dict[tuple[str, str, str], None]:
    """(name, axis, word) of all, each once."""
    return {(name, axis, word): None for axes in splits.values() for axis, (word, name) in axes.items()}


def _note(name: str, axis: str, word: str, obeying: Sequence[bool], others: Collection[str]) -> str:
    """What a pin did, for the plan. Raises ValueError where that is nothing."""
    count = sum(obeying)
    if not others and not count:
        raise ValueError(f"pin {name!r}: no product, attention or convolution is there that {axis} could split")
    if not count:
        could = ", ".join(sorted(set(others) - {OTHERWISE}))
        raise ValueError(f"pin {name!r}: {axis} cannot split {word} there; choose of {could}, or leave it out")
    told = f"{count} of {count_of(len(obeying), 'product')}" if not all(obeying) else count_of(count, "product")
    return f"pinned: {name}, {axis}: {word} ({told})"


def _words(option: Strategy, axis: int, mesh: Mesh, weighted: bool) -> tuple[str, ...]:
    """What the axis does in a product that runs so; for what a pattern does there, its name, too. Attention that splits
    heads or the sequence does so in whatever way: "sequence (context parallel: ring)" is a way to split the sequence.
    Ulysses has a name by what it does in linear layers and what in attention.
    """
    told, is_named = split_of(option, axis, weighted), option.roles[axis] in PATTERNED
    if is_pattern(option.body) and (is_named or mesh.names[axis] in option.body_axes):
        return (told, told.partition(" (")[0], option.body) if is_named else (told, option.body)
    return (told, ULYSSES) if told == ("sequence" if weighted else "heads") else (told,)
