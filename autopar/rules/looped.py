"""What one rank does in the place of an operator, where it takes several parts: local work and sends, some in rounds.

A pattern (`autopar.rules.patterns`) writes it once, as a value. Whoever needs it reads that: its steps are priced, its
parts become instructions and memory (`autopar.lower.loops`), its work becomes code (`autopar.emit`).

Values are known by names; the node's operands, local and in the layouts in which it takes them, are "0", "1", ... What
a rank sends is called like what it then has from its other neighbour: all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.ir.graph import TensorType
from autopar.ir.layout import Layout
from autopar.ir.strides import Placed, Strides, contiguous
from autopar.rules.builder import Value
from cost_models.steps import COLLECTIVES, Comm, Compute, Loop, Step


@dataclass(frozen=True, slots=True)
class Do:
    """Local work. `write(builder, turn, *values)` is its code, against a `autopar.rules.builder.Builder`: it returns
    what it `makes` of what it `reads`. `turn` counts the rounds: 0 is before them, then come 1, 2, ..., and one more is
    behind them.

    `type`: of what it makes; None: it writes to what it reads first, and gives that back. `also`: names and types of
    what it makes beside that; its code then returns all of them, in order. `takes`: bytes that it holds while it runs,
    beside what it reads and makes. `lies`: strides of all that it makes, given how lies what it reads; None: it is
    contiguous.
    """

    name: str
    write: Callable[..., Value]
    reads: tuple[str, ...]
    makes: str
    type: TensorType | None
    step: Compute
    also: tuple[tuple[str, TensorType], ...] = ()
    takes: int = 0
    lies: Callable[[Sequence[Placed]], Sequence[Strides]] | None = None


@dataclass(frozen=True, slots=True)
class Shift:
    """Pass a value on to the next rank of the axis, the last one to the first; what the one before passes on is what
    it makes. It is under way while the work behind it runs, until that reads it, or to the end of the round.

    `to`: "mirror" where it goes to the rank that lies as far from the other end, and what that one has comes here.
    """

    reads: str
    makes: str
    type: TensorType
    to: Literal["shift", "mirror"] = "shift"  # the collective's name

    def step(self, axis: str, ranks: int) -> Comm:
        return Comm(self.to, axis, ranks, self.type.nbytes)


@dataclass(frozen=True, slots=True)
class Collective:
    """An all-gather or a reduce-scatter (`kind`) along one axis, of the leading dim of a value; `type`: of what it
    makes. It is under way as a shift is.
    """

    kind: str
    axis: str
    ranks: int
    reads: str
    makes: str
    type: TensorType

    def step(self, axis: str, ranks: int) -> Comm:
        """On its own axis, whatever the offer's is."""
        whole = self.type.nbytes if COLLECTIVES[self.kind].gathers else self.type.nbytes * self.ranks
        return Comm(self.kind, self.axis, self.ranks, whole)


Send = Shift | Collective
Part = Do | Send


@dataclass(frozen=True, slots=True)
class Looped:
    """`before`, then `round` so many times as `rounds` says (0: not at all), then `after`.

    `carried`: (name at the head of a round, name at its foot): what a round leaves under the second name, the next one
    and `after` find under the first. A value at the head lies in memory of its own, made in `before`; it is gone once
    its round does not need it any more. `gives`: the names of the node's results, all of them made here.
    """

    before: tuple[Part, ...]
    rounds: int
    round: tuple[Part, ...]
    carried: tuple[tuple[str, str], ...]
    after: tuple[Part, ...]
    gives: tuple[str, ...]

    def steps(self, axis: str, ranks: int) -> tuple[Step, ...]:
        """What one rank performs: a loop for each segment, as work and sends of one run beside each other."""

        def of(parts: tuple[Part, ...]) -> Iterator[Step]:
            for part in parts:
                yield part.step if isinstance(part, Do) else part.step(axis, ranks)

        segments = ((1, self.before), (self.rounds, self.round), (1, self.after))
        return tuple(Loop(rounds, tuple(of(parts))) for rounds, parts in segments if rounds and parts)

    def turns(self, rounds: int | None = None) -> Iterator[tuple[int, bool, Part]]:
        """(turn, whether it is the last of its segment, part), in order; `rounds`: no more than so many."""
        count = self.rounds if rounds is None else min(rounds, self.rounds)
        segments = [self.before, *[self.round] * count, self.after]
        for turn, parts in enumerate(segments):
            for at, part in enumerate(parts):
                yield turn, at == len(parts) - 1, part

    def lies(self, operands: Sequence[Placed]) -> tuple[Strides, ...]:
        """The strides of what it gives, given how its operands lie."""
        env = {str(place): placed for place, placed in enumerate(operands)}
        for turn, ends, part in self.turns(rounds=1):
            made = makes_of(part)
            if not made:  # written in place: it lies as it lay
                env[part.makes] = env[reads_of(part)[0]]
            elif isinstance(part, Do) and part.lies is not None:
                strides = part.lies([env[name] for name in part.reads])
                env |= {name: (type.shape, one) for (name, type), one in zip(made, strides, strict=True)}
            else:
                env |= {name: (type.shape, contiguous(type.shape)) for name, type in made}
            if ends and turn == 1 <= self.rounds:
                env |= {head: env[foot] for head, foot in self.carried}
        return tuple(env[name][1] for name in self.gives)

    def workspace(self, beside: bool) -> int:
        """Bytes that it holds beside operands and results, at most. Until a result is made, others have its room.
        `beside`: sends run beside work, and hold what they send until they are waited for.
        """
        env: dict[str, int] = {}  # name -> the number of what it stands for by now
        sizes: list[int] = []
        last: dict[int, int] = {}  # number -> the part that needs it last
        made: list[list[int]] = []
        takes: list[int] = []
        sent: dict[str, int] = {}  # what a send makes -> the number of what it sends, until that is waited for
        for at, (turn, ends, part) in enumerate(self.turns(rounds=2)):
            last |= {env[name]: at for name in reads_of(part) if name in env}
            last |= {
                number: max(last[number], at - 1) for name in reads_of(part) if (number := sent.pop(name, -1)) >= 0
            }
            if beside and not isinstance(part, Do) and part.reads in env:
                sent[part.makes] = env[part.reads]
            made.append([])
            takes.append(part.takes if isinstance(part, Do) else 0)
            for name, type in makes_of(part):
                sizes.append(type.nbytes)
                env[name] = len(sizes) - 1
                made[at].append(env[name])
                last[env[name]] = at
            if part.type is None:
                env[part.makes] = env[reads_of(part)[0]]
            if ends:
                last |= dict.fromkeys(sent.values(), at)
                sent = {}
                if 0 < turn <= min(2, self.rounds):
                    env |= {head: env[foot] for head, foot in self.carried}
        results = {env[name] for name in self.gives}
        most = level = 0
        for at, numbers in enumerate(made):
            level += sum(sizes[number] for number in numbers)
            most = max(most, level + takes[at])
            level -= sum(sizes[one] for one, until in last.items() if until == at and one not in results)
        return most - sum(sizes[one] for one in results)


@dataclass(frozen=True, slots=True)
class Offer:
    """One way in which a pattern runs a node. `roles`: what each axis does, in words that no rule uses where it sends;
    with the pattern's name they say which offer it is. `axis`: the one it sends along; of several, what they are
    together. `takes`, `gives`: layouts.
    """

    roles: tuple[str, ...]
    axis: str
    takes: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    loop: Looped


def reads_of(part: Part) -> tuple[str, ...]:
    return part.reads if isinstance(part, Do) else (part.reads,)


def makes_of(part: Part) -> tuple[tuple[str, TensorType], ...]:
    """Names and types of what lies in memory of its own."""
    own = () if part.type is None else ((part.makes, part.type),)
    return (*own, *part.also) if isinstance(part, Do) else own
