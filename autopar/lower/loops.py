"""The loop that stands in for an operator (`autopar.rules.looped`), as instructions.

What it sends is launched where it stands and waited for where it is first read, at the end of its segment at the
latest; where nothing runs beside compute, at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Node
from autopar.lower.listing import Listing
from autopar.lower.program import Buffer, Inner, Kind, Launch, Run, Wait, Within
from autopar.rules.looped import Do, Offer, Part, Send, makes_of, reads_of


def lowered(
    listing: Listing, node: Node, owner: str, offer: Offer, ranks: int, given: Sequence[int],
    results: Mapping[str, tuple[Kind, str]], *, beside: bool,
) -> dict[str, int]:  # fmt: skip
    """Issue the loop. `given`: the values of the operands; `results`: by the names that the loop gives them, in
    their order, what is held for whom. `beside`: sends run beside compute. Returns name -> value.
    """
    loop, axis = offer.loop, offer.axis
    env = {str(place): value for place, value in enumerate(given)}
    segment = _Segment(node, owner, axis, ranks, results, beside)
    segment.issue(listing, env, loop.before, 0)
    if loop.rounds:
        inner, head = listing.inside({*env.values()}), dict(env)
        segment.issue(inner, env, loop.round, None)
        pairs = {  # what is written in place lies where it lay
            name: (head[name], value)
            for name, value in env.items()
            if head.get(name, value) != value and listing.values[head[name]] == listing.values[value]
        }
        pairs |= {name: (head[name], env[foot]) for name, foot in loop.carried}
        listing.loop(inner, loop.rounds, tuple(pairs.values()))
        env |= {name: foot for name, (_, foot) in pairs.items()}
    segment.issue(listing, env, loop.after, loop.rounds + 1)
    return env


class _Segment:
    def __init__(
        self, node: Node, owner: str, axis: str, ranks: int, results: Mapping[str, tuple[Kind, str]], beside: bool
    ) -> None:
        self.node, self.owner, self.axis, self.ranks = node, owner, axis, ranks
        self.results, self.beside = results, beside

    def issue(self, listing: Listing, env: dict[str, int], parts: Sequence[Part], turn: int | None) -> None:
        """`env`: name -> value, which the parts change."""
        under_way: dict[str, Launch] = {}

        def wait_for(names: Sequence[str]) -> None:
            for name in names:
                if (launch := under_way.pop(name, None)) is not None:
                    listing.do(Wait(launch.number, launch.of))

        for part in parts:
            wait_for(reads_of(part))
            if isinstance(part, Do):
                self._run(listing, env, part, turn)
                continue
            under_way[part.makes] = self._launch(listing, env, part)
            if not self.beside:
                wait_for([part.makes])
        wait_for([*under_way])

    def _run(self, listing: Listing, env: dict[str, int], do: Do, turn: int | None) -> None:
        reads = tuple(env[name] for name in do.reads)
        made = {} if do.type is not None else {do.makes: listing.view(reads[0])}
        for name, type in makes_of(do):
            made[name] = listing.new(type.nbytes, *self.results.get(name, (Kind.WORKSPACE, self.owner)))
        places = {name: place for place, name in enumerate(self.results)}
        inner = Inner(self.node.name, do, turn, tuple(places.get(name) for name in made))
        takes = (Buffer(do.takes, Kind.WORKSPACE, self.owner),) if do.takes else ()
        makes = tuple(made.values())
        listing.do(Run(inner, (do.step,), reads, makes, takes=takes), makes, takes)
        env |= made

    def _launch(self, listing: Listing, env: dict[str, int], send: Send) -> Launch:
        made = listing.new(send.type.nbytes, Kind.WORKSPACE, self.owner)
        step = send.step(self.axis, self.ranks)
        launch = Launch(listing.launches, step, Within(self.node.name), (env[send.reads],), (made,))
        listing.do(launch, (made,))
        env[send.makes] = made
        return launch
