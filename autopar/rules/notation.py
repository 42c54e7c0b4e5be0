"""The notation of sharding rules, learnt in a minute.

    m k, k n -> m n | 0 | 1

Left of the arrow stand the tensor operands (in the order of `Node.operands`), right of it the results. A word is one
dim; equal names are one **factor**, an index that the operator runs over. Split a factor over a mesh axis: each tensor
that has it is split along that dim, operands without it stay whole, a result without it is partial: the sum over the
ranks is the value (`k` above).

    b s! -> b s!                         ! : the factor is never split
    a 1, b -> a b                        1 : a dim of size one (broadcast)
    a (h d) -> a h d                     (h d) : one dim made of several factors, major first; the outermost one splits
    (h=4 k) -> (h k)                     =4 : the size, where the shapes leave it open
    a b -> b ^max                        ^max, ^min : how a result is put together where a factor is missing from it
    n c@stats, c -> n c, n ^same         ^same : factors missing from it do not matter: every rank has it whole
    v@masked_lookup d, b -> b d          @name : splitting v replaces the operator by that body (`bodies.py`)
    ., a -> a, -                         . : a tensor without dims;   - : a result that is not there (None)

Behind each `|` stands one linear alternative: operand positions that may be partial sums together, all other operands
whole; then every result is a partial sum. `| 0 | 1`: either of the two. `| 01`: only both at once. `| *`: all operands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.layout import TERMS

Dim = tuple[str, ...]  # factors of one dim, major first; () where the size is one
Shape = Sequence[int]

REDUCTIONS = (*TERMS, "same")
_FACTOR = re.compile(r"([a-z][a-z0-9_]*)(?:=(\d+))?(!)?(?:@([a-z_]+))?")
_TOKEN = re.compile(r"[()]|[^\s()]+")


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator may be split, at concrete shapes. A result that is not there has no dims, like a scalar."""

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int] = field(hash=False)
    locked: frozenset[str]
    linear: tuple[frozenset[int], ...]
    reduce: tuple[str, ...]
    bodies: Mapping[str, str] = field(hash=False)

    @property
    def splittable(self) -> tuple[str, ...]:
        """Factors that an axis may split: not locked, and outermost in every dim where they stand."""
        inner: set[str] = set()
        for dim in (dim for tensor in self.inputs + self.outputs for dim in tensor):
            inner.update([name for name in dim if self.sizes[name] != 1][1:])
        return tuple(name for name, size in self.sizes.items() if size > 1 and name not in self.locked | inner)

    @property
    def behind(self) -> Mapping[str, frozenset[str]]:
        """Factors that stand behind others in a first dim, as the sequence behind the batch where both are one dim of
        tokens -> those others. An axis may split one where axes in front of it have the others in pieces of one: what
        a rank has then is a piece of that dim, too.
        """
        found: dict[str, frozenset[str]] = {}
        never = {*self.locked, *self.bodies}
        for tensor in self.inputs + self.outputs:
            for place, dim in enumerate(tensor):
                names = [name for name in dim if self.sizes[name] != 1]
                for i, name in enumerate(names[1:], 1):
                    found[name] = found.get(name, frozenset()) | {*names[:i]}
                    never |= {name} if place or self.bodies.keys() & {*names[:i]} else set()
        return {name: others for name, others in found.items() if name not in never}


def parse(text: str, operand_shapes: Sequence[Shape], output_shapes: Sequence[Shape | None]) -> Rule:
    """Read a rule and bind it to shapes. Raises ValueError naming the part that does not fit."""
    head, *tails = text.split("|")
    left, arrow, right = head.partition("->")
    if not arrow:
        raise ValueError(f"rule {text!r} has no '->' between operands and results")
    reading = _Reading(text)
    inputs = tuple(reading.tensor(part)[0] for part in _groups(left))
    results = [reading.tensor(part) for part in _groups(right)]
    reading.bind("operand", inputs, operand_shapes)
    reading.bind(
        "result", tuple(dims for dims, _ in results), [None if shape is None else shape for shape in output_shapes]
    )
    sizes = reading.solve()
    return Rule(
        inputs=tuple(_plain(dims) for dims in inputs),
        outputs=tuple(_plain(dims) for dims, _ in results),
        sizes=sizes,
        locked=frozenset(reading.locked),
        linear=tuple(_positions(text, tail, len(inputs)) for tail in tails),
        reduce=tuple(op for _, op in results),
        bodies=reading.bodies,
    )


def _groups(side: str) -> list[str]:
    return [part.strip() for part in side.split(",")] if side.strip() else []


def _plain(dims: tuple[Dim, ...] | None) -> tuple[Dim, ...]:
    return () if dims is None else dims


def _positions(text: str, tail: str, count: int) -> frozenset[int]:
    tail = tail.strip()
    places = range(count) if tail == "*" else [int(digit) for digit in tail if digit.isdigit()]
    if not places or (tail != "*" and not tail.isdigit()) or max(places) >= count:
        raise ValueError(f"rule {text!r}: linear part {tail!r} does not name positions of its {count} operands")
    return frozenset(places)


class _Reading:
    """What has been read of one rule so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.order: list[str] = []
        self.locked: set[str] = set()
        self.bodies: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.equations: list[tuple[str, Dim, int]] = []

    def tensor(self, part: str) -> tuple[tuple[Dim, ...] | None, str]:
        """Dims and reduction of one tensor; None for a result that is not there."""
        words, caret, op = part.partition("^")
        op = op.strip() if caret else "sum"
        if op not in REDUCTIONS:
            raise ValueError(f"rule {self.text!r}: ^{op} is none of {', '.join(REDUCTIONS)}")
        if words.strip() == "-":
            return None, op
        if words.strip() == ".":
            return (), op
        dims: list[Dim] = []
        group: list[str] | None = None
        for token in _TOKEN.findall(words):
            if token == "(" and group is None:
                group = []
            elif token == ")" and group is not None:
                dims.append(tuple(group))
                group = None
            elif group is not None:
                group.extend(self.factor(token))
            else:
                dims.append(self.factor(token))
        names = [name for dim in dims for name in dim]
        if group is not None or not dims or len(set(names)) != len(names):
            raise ValueError(
                f"rule {self.text!r}: cannot read {part!r}: empty, brackets open, or a factor stands there twice"
            )
        return tuple(dims), op

    def factor(self, token: str) -> Dim:
        if token == "1":
            return ()
        match = _FACTOR.fullmatch(token)
        if match is None:
            raise ValueError(
                f"rule {self.text!r}: {token!r} is not a factor; write name, name!, name=size or name@body"
            )
        name, size, lock, body = match.groups()
        if name not in self.order:
            self.order.append(name)
        if size:
            self.equations.append((f"{token} itself", (name,), int(size)))
        if lock:
            self.locked.add(name)
        if body:
            self.bodies[name] = body
        return (name,)

    def bind(self, kind: str, tensors: tuple[tuple[Dim, ...] | None, ...], shapes: Sequence[Shape | None]) -> None:
        if len(tensors) != len(shapes):
            raise ValueError(f"rule {self.text!r} describes {len(tensors)} {kind}s, the operator has {len(shapes)}")
        for place, (dims, shape) in enumerate(zip(tensors, shapes, strict=True)):
            if (dims is None) != (shape is None) or (
                dims is not None and shape is not None and len(dims) != len(shape)
            ):
                told = None if shape is None else list(shape)
                raise ValueError(f"rule {self.text!r}: {kind} {place} has shape {told}, which does not fit its words")
            if dims is not None and shape is not None:
                self.equations += [(f"{kind} {place}", dim, size) for dim, size in zip(dims, shape, strict=True)]

    def solve(self) -> dict[str, int]:
        """Sizes of all factors: a dim is the product of its factors."""
        todo, progress = self.equations, True
        while todo and progress:
            later: list[tuple[str, Dim, int]] = []
            for where, dim, size in todo:
                unknown = [name for name in dim if name not in self.sizes]
                known = math.prod(self.sizes.get(name, 1) for name in dim)
                if len(unknown) > 1:
                    later.append((where, dim, size))
                elif unknown and known and size % known == 0:
                    self.sizes[unknown[0]] = size // known
                elif unknown or known != size:
                    raise ValueError(
                        f"rule {self.text!r}: {where} has a dim of size {size} where ({' '.join(dim)}) makes {known}"
                    )
            todo, progress = later, len(later) < len(todo)
        if todo:
            names = " ".join(todo[0][1])
            raise ValueError(
                f"rule {self.text!r}: the sizes of ({names}) do not follow from the shapes; write name=size"
            )
        return {name: self.sizes[name] for name in self.order}
