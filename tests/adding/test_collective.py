"""docs/adding.md, "A collective": one entry in `COLLECTIVES`, and bytes and seconds follow everywhere.

The toy is a broadcast as a scatter and an all-gather, both round the ring: the root's tensor goes round in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.measure.watch import KINDS, Traffic
from autopar.scale.forms import work_of
from cost_models import COLLECTIVES, Collective, Comm, Hardware, Loop, links_of, received_bytes, seconds, stream_of
from cost_models.reserve import peers_of

TOY = "toy_broadcast"
H100 = Hardware.load("h100-sxm")


def _less_one(ranks: float) -> float:
    return ranks - 1


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one place."""
    monkeypatch.setitem(COLLECTIVES, TOY, Collective(TOY, phases=2, hops=_less_one, pieces=_less_one))


def ring_broadcast(value: Tensor, ranks: int) -> tuple[list[Tensor], list[int]]:
    """What each rank has afterwards, and the bytes that each received, piece by piece as they go round the ring."""
    pieces = [*value.chunk(ranks)]
    held: list[dict[int, Tensor]] = [dict(enumerate(pieces)), *({} for _ in range(ranks - 1))]
    received = [0] * ranks

    def send(source: int, place: int) -> None:
        target = (source + 1) % ranks
        held[target][place] = held[source][place].clone()
        received[target] += pieces[place].numel() * pieces[place].element_size()

    for place in range(1, ranks):  # scatter: the piece of the last rank passes all the others
        for source in range(place):
            send(source, place)
    for away in range(ranks - 1):  # all-gather: each piece on, from the rank that has it last
        for place in range(ranks):
            send((place + away) % ranks, place)
    return [torch.cat([mine[place] for place in range(ranks)]) for mine in held], received


def test_its_closed_form_is_the_textbook_one() -> None:
    g, n, alpha, beta = sympy.symbols("g n alpha beta", positive=True)
    form = COLLECTIVES[TOY]
    assert sympy.simplify(form.received(g, n) - 2 * (g - 1) / g * n) == 0
    assert sympy.simplify(form.seconds(g, n, alpha, beta) - 2 * (g - 1) * (alpha + n / g / beta)) == 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_its_bytes_are_those_that_a_rank_receives_when_it_is_run(ranks: int) -> None:
    value = torch.randn(24 * ranks, 5)
    copies, received = ring_broadcast(value, ranks)
    assert all(torch.equal(copy, value) for copy in copies)
    nbytes = value.numel() * value.element_size()
    assert max(received) == received_bytes(Comm(TOY, "x", ranks, nbytes))
    assert received_bytes(Comm(TOY, "x", 1, nbytes)) == 0


@pytest.mark.parametrize(("names", "sizes"), [(("x",), (4,)), (("x", "y"), (2, 8)), (("x",), (16,))])
def test_its_price_is_its_closed_form_on_the_link_of_the_axis(names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    links, ranks = links_of(H100, names, sizes), sizes[0]
    link = links["x"]
    for nbytes in (2**10, 2**20, 2**30):
        by_hand = 2 * (ranks - 1) * (link.latency_s + nbytes / ranks / link.bytes_per_s)
        assert seconds(Comm(TOY, "x", ranks, nbytes), H100, links) == pytest.approx(by_hand, rel=1e-12)
    prices = [seconds(Comm(TOY, "x", ranks, nbytes), H100, links) for nbytes in (0, 1, 1000, 2**20)]
    assert prices[0] == 0 and all(less < more for less, more in pairwise(prices))
    assert seconds(Comm(TOY, "x", 1, 2**20), H100, links) == 0


def test_it_has_its_place_in_loops_streams_and_closed_forms_of_plans() -> None:
    comm, links = Comm(TOY, "x", 4, 2**20), links_of(H100, ["x"], [4])
    assert stream_of(comm) == "comm:x"
    assert seconds(Loop(3, (comm,)), H100, links) == pytest.approx(3 * seconds(comm, H100, links))
    assert work_of([comm, comm], Mesh(("x",), (4,))).received == {(TOY, "x"): 2 * received_bytes(comm)}


@pytest.mark.parametrize("gathers", [False, True])
def test_once_its_call_is_named_measured_bytes_are_the_same(
    fake_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, gathers: bool
) -> None:
    """Of a collective that `gathers`, a program gives a rank's part and a `Comm` counts the whole."""
    monkeypatch.setitem(COLLECTIVES, TOY, Collective(TOY, 2, hops=_less_one, pieces=_less_one, gathers=gathers))
    monkeypatch.setitem(KINDS, "broadcast", TOY)
    group = fake_mesh(data=4).get_group("data").group_name
    value, mesh = torch.randn(16, 3), Mesh(("data",), (4,))
    with Traffic(mesh, {group: "data"}) as traffic:
        for _ in range(2):
            torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.broadcast(value, 0, group))
    payload = 16 * 3 * 4 * (4 if gathers else 1)
    assert traffic.calls == {(TOY, "data"): 2}
    assert traffic.nbytes == {(TOY, "data"): 2 * received_bytes(Comm(TOY, "data", 4, payload))}


def test_where_every_rank_talks_to_every_other_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pairwise` decides on the link that it is priced by, and on what NCCL keeps for its peers."""
    links, sizes = links_of(H100, ["x"], [16]), {"x": 16}
    before = seconds(Comm(TOY, "x", 16, 2**30), H100, links)
    assert peers_of([(TOY, "x")], sizes) == 0
    monkeypatch.setitem(COLLECTIVES, TOY, Collective(TOY, 2, _less_one, _less_one, pairwise=True))
    assert seconds(Comm(TOY, "x", 16, 2**30), H100, links) > 2 * before
    assert peers_of([(TOY, "x")], sizes) == 15
