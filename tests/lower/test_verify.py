"""The verifier: programs of plans with one thing wrong are refused; so are hand-made ones with loops and sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.lower import Program, lower
from autopar.lower.memory import peaks
from autopar.lower.program import (
    Alloc,
    Buffer,
    Free,
    Instruction,
    Kind,
    Launch,
    Loop,
    Operator,
    Peer,
    Read,
    Receive,
    Run,
    SendTo,
    Wait,
)
from autopar.lower.verify import ProgramError, verify, verify_together
from autopar.price.pricer import Pricer
from autopar.simulate.events import events
from cost_models.hardware import Hardware
from cost_models.simulator import COMPUTE, play
from cost_models.steps import Comm, Compute
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.residence import ResidenceSampler

H100 = Hardware.load("h100-sxm")


def edited(program: Program, phase: str, instructions: list[Instruction]) -> Program:
    return replace(program, instructions={**program.instructions, phase: tuple(instructions)})


def spoiled(program: Program) -> Iterator[tuple[str, Program]]:
    """Every program with one allocation, release, wait or launch left out, said twice, or a release too early."""
    for phase in ("forward", "backward"):
        issued = [*program.instructions[phase]]
        for at, one in enumerate(issued):
            without = issued[:at] + issued[at + 1 :]
            if isinstance(one, Alloc | Free | Wait | Launch):
                yield f"{phase} {at} left out: {one}", edited(program, phase, without)
                yield f"{phase} {at} twice: {one}", edited(program, phase, [*issued[:at], one, *issued[at:]])
            if isinstance(one, Free) and one.buffer.kind is not Kind.TANGENT:  # its owner keeps it
                before = next(i for i in range(at - 1, -1, -1) if not isinstance(issued[i], Alloc | Free))
                moved = [*without[:before], one, *without[before:]]
                yield f"{phase} {at} too early: {one}", edited(program, phase, moved)
            if isinstance(one, Run) and any(value is not None for value in one.makes):
                yield f"{phase} {at} made twice: {one}", edited(program, phase, [*issued[:at], one, *issued[at:]])


@pytest.mark.parametrize("prefetch", [None, 1])
def test_a_program_with_one_thing_wrong_is_none(prefetch: int | None) -> None:
    sampler = ResidenceSampler(family("mlp").graph, mesh_of(2, 2), H100)
    program = lower(replace(sampler.draw(1), bucket_bytes=3000), prefetch, sampler.pricer)
    verify(program)
    count = 0
    for what, wrong in spoiled(program):
        count += 1
        with pytest.raises(ProgramError):
            verify(wrong)
            pytest.fail(f"not seen: {what}")
    assert count > 300


# --- by hand ---------------------------------------------------------------------------------------------------------


def buffer(name: str, nbytes: int = 64) -> Buffer:
    return Buffer(nbytes, Kind.VALUE, name)


GIVEN, ONE, TWO = buffer("given"), buffer("one"), buffer("two", 32)
SUM = Comm("all_reduce", "a", 4, 64)
OF = Read("reader", 0)


def program(*body: Instruction, values: tuple[tuple[Buffer, ...], ...] = ((GIVEN,), (ONE,), (TWO,), (ONE,))) -> Program:
    return Program({"forward": body}, (GIVEN,), values, {"x": 0})


def run(reads: tuple[int, ...], *makes: int) -> Run:
    return Run(Operator("op"), (Compute("op", 0.0, 1e6, "float32", 1, "elementwise"),), reads, makes)


def test_what_is_written_in_place_is_read_by_nobody_else() -> None:
    def summed(*behind: Instruction) -> Program:
        sums = Launch(0, SUM, OF, (1,), (3,), in_place=True)
        return program(Alloc(ONE), run((0,), 1), sums, Wait(0, OF), *behind, Free(ONE))

    verify(summed(run((3,))))
    with pytest.raises(ProgramError, match="reads value 1, which was overwritten"):
        verify(summed(run((1,))))
    with pytest.raises(ProgramError, match="writes in place what it does not read"):
        verify(program(Launch(0, SUM, OF, (0,), (3,), in_place=True), Wait(0, OF), values=((GIVEN,), (), (), (GIVEN,))))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([run((1,))], r"forward 0: Run: reads value 1 before it is there"),
        ([run((0,), 1)], "makes value 1 where no memory is for one"),
        ([Alloc(ONE), Launch(0, SUM, OF, (0,), (1,)), run((1,)), Wait(0, OF), Free(ONE)], "reads value 1 before it is"),
        ([Alloc(ONE), Launch(0, SUM, OF, (0,), (1,)), Free(ONE), Wait(0, OF)], "one is freed while launch 0 needs it"),
        ([Alloc(ONE), Launch(0, SUM, OF, (0,), (1,))], r"the end of forward: nobody waits for launches \[0\]"),
        ([Wait(0, OF)], "nothing is under way that is called 0"),
        ([Alloc(ONE), run((0,), 1)], "one is never freed"),
        ([Free(GIVEN)], "given is freed, and is resident"),
        ([Alloc(ONE), Alloc(ONE)], "one is allocated twice"),
        ([Alloc(ONE), run((0,), 1), run((0,), 1), Free(ONE)], "makes value 1 a second time"),
        ([Free(ONE)], "one is freed, and is not there"),
    ],
)
def test_each_rule_says_what_is_wrong(body: list[Instruction], why: str) -> None:
    with pytest.raises(ProgramError, match=why):
        verify(program(*body))


# A ring: each round sends on what the one before received, and adds to a sum.

HERE, NEXT, TOTAL, MORE = buffer("here"), buffer("next"), buffer("total", 128), buffer("more", 128)
RING = ((GIVEN,), (HERE,), (NEXT,), (TOTAL,), (MORE,))
NEIGHBOUR = Peer("a", 1)


def ring(rounds: int = 3, *, keeps: bool = False, carried: tuple[tuple[int, int], ...] = ((1, 2), (3, 4))) -> Program:
    body: list[Instruction] = [
        SendTo(0, NEIGHBOUR, "block", 64, (1,)),
        Alloc(NEXT),
        Receive(1, Peer("a", -1), "block", 64, (2,)),
        Alloc(MORE),
        run((1, 3), 4),
        Free(TOTAL),
        Wait(0, OF),
        Wait(1, OF),
    ]
    if not keeps:
        body.append(Free(HERE))
    loop = Loop(rounds, tuple(body), carried)
    around = [Alloc(HERE), run((0,), 1), Alloc(TOTAL), run((0,), 3), loop, run((4,)), Free(NEXT), Free(MORE)]
    return program(*around, values=RING)


def test_a_ring_keeps_the_rules() -> None:
    verify(ring())
    verify_together({at: ring() for at in range(3)} | {}, "b")


def test_a_ring_is_played_round_by_round() -> None:
    mesh, rounds = Mesh(("a",), (4,)), 3
    pricer = Pricer.on(mesh, H100, "sgd")
    timeline = play(events(ring(rounds), Graph((), ()), pricer, told=False))
    assert sum(event.stream == "comm:a" for event in timeline.events) == 2 * rounds
    computed = [event for event in timeline.events if event.stream == COMPUTE and event.seconds]
    assert len(computed) == rounds + 3
    link = pricer.resharder.links["a"]
    assert timeline.busy_s["comm:a"] == pytest.approx(2 * rounds * (link.latency_s + 64 / link.bytes_per_s))
    memory = timeline.memory["hbm"]
    assert memory.levels[0] == memory.levels[-1] == 64
    assert memory.peak_bytes == peaks(ring(rounds))["hbm"] == 64 + 64 + 64 + 128 + 128


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (ring(keeps=True), "its foot: does not leave the memory that it found"),
        (ring(carried=((3, 4),)), "does not leave the memory that it found"),
        (ring(carried=((1, 4), (3, 2))), "carries 128 bytes where it found 64"),
    ],
)
def test_a_loop_leaves_what_it_finds(wrong: Program, why: str) -> None:
    with pytest.raises(ProgramError, match=why):
        verify(wrong)


def test_what_is_launched_in_a_round_is_waited_for_in_it() -> None:
    body = (Alloc(ONE), Launch(0, SUM, OF, (0,), (1,)))
    with pytest.raises(ProgramError, match="does not leave"):
        verify(program(Loop(2, body), Wait(0, OF), Free(ONE)))


def stage(*what: tuple[str, int, str]) -> Program:
    """A rank that sends and receives: (way, offset, tag)."""
    body: list[Instruction] = [Alloc(ONE)]
    for number, (way, offset, tag) in enumerate(what):
        peer = Peer("pipe", offset)
        if way == "send":
            body += [SendTo(number, peer, tag, 64, (0,)), Wait(number, OF)]
        else:
            value = 1 if not number else 3
            body += [Receive(number, peer, tag, 64, (value,)), Wait(number, OF)]
    return program(*body, Free(ONE))


def test_what_one_stage_sends_the_next_receives_in_that_order() -> None:
    first = stage(("send", 1, "a"), ("send", 1, "b"))
    verify_together({0: first, 1: stage(("receive", -1, "a"), ("receive", -1, "b"))}, "pipe")
    for second in (stage(("receive", -1, "b"), ("receive", -1, "a")), stage(("receive", -1, "a"))):
        with pytest.raises(ProgramError, match=r"rank 0 of axis pipe sends rank 1 \[\('a', 64\), \('b', 64\)\], which"):
            verify_together({0: first, 1: second}, "pipe")
