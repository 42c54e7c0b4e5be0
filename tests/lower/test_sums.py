"""Gradients that a step's micro-batches add up: each as it is made."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.ir.rounds import wide
from autopar.lower import lower
from autopar.lower.memory import outputs_before, peaks
from autopar.lower.program import Alloc, Free, Instruction, Kind, Local, Program, Run, Send
from autopar.lower.verify import verify
from autopar.measure.memory import LiveBytes
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.price.reshard import Work
from autopar.rewrite.micro_batches import in_rounds
from cost_models.hardware import Hardware
from cost_models.steps import DEVICE
from tests.assemble.drawn import drawn
from tests.support.check import mesh_of
from tests.support.families import Case, family
from tests.support.lockstep import zeros
from tests.support.machines import FAST
from tests.support.plans import PlanSampler

SLOW = pytest.mark.slow
NAMES = ["mlp", "block", "gpt2", *(pytest.param(name, marks=SLOW) for name in ("llama", "t5", "vit"))]
H100 = Hardware.load("h100-sxm")


class Lossy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def plans(name: str, sizes: tuple[int, ...], count: int) -> list[Plan]:
    sampler = PlanSampler(rounds_of(name), mesh_of(*sizes))
    return [sampler.draw(seed) for seed in range(count)]


def rounds_of(name: str) -> Graph:
    return in_rounds(family(name).wide_graph, 2)


def sums(program: Program) -> Iterator[tuple[int, Run, int]]:
    """(where it stands in backward, the instruction, the place of its gradient)"""
    for at, one in enumerate(program.instructions["backward"]):
        match one:
            case Run(Local(Work.ADD_UP, Send((place,)))):
                yield at, one, place
            case _:
                pass


def needed(instructions: tuple[Instruction, ...]) -> set[int]:
    return {value for one in instructions for value in getattr(one, "reads", ())}


@pytest.mark.parametrize("bucket_bytes", [0, 3000])
@pytest.mark.parametrize("name", NAMES)
def test_each_is_added_up_as_it_is_made_and_gone(name: str, bucket_bytes: int) -> None:
    for plan in plans(name, (2,), 3):
        pricer = Pricer.on(plan.mesh, FAST, "adamw", bucket_bytes, plan.graph.rounds)
        for prefetch in (None, 1):
            program = lower(plan, prefetch, pricer)
            verify(program)
            backward, found = program.instructions["backward"], [*sums(program)]
            trained = {node.target for node in plan.graph.trained}
            assert {plan.graph.results[place].target for _, _, place in found} == trained
            assert len(found) == len(trained)
            for at, run, place in found:
                gradient, _ = run.reads
                (total,) = (one for value in run.makes if value is not None for one in program.values[value])
                assert total.kind is Kind.ADDED_UP and total in program.resident
                assert program.results[place] == run.makes[0]
                ref = plan.graph.results[place].ref
                assert ref is not None and total.nbytes % torch.empty((), dtype=_dtype(plan, place)).element_size() == 0
                behind = backward[at + 1 :]
                later = {one for value in needed(behind) for one in program.values[value]}
                own = {one for one in program.values[gradient] if one not in later and one not in program.resident}
                gone = set[object]()
                for one in behind:
                    if not isinstance(one, Free):
                        break
                    gone.add(one.buffer)
                assert own <= gone, f"{plan.graph.results[place].target} is held behind its sum"


def _dtype(plan: Plan, place: int) -> torch.dtype:
    ref = plan.graph.results[place].ref
    assert ref is not None
    return getattr(torch, wide(plan.graph.type_of(ref).dtype))


@pytest.mark.parametrize("name", NAMES)
def test_any_picks_cost_what_the_problem_says_and_hold_no_more(name: str) -> None:
    """Also where gradients wait for others to be summed with."""
    of = rounds_of(name)
    for sizes, hardware, bucket_bytes in (((1,), FAST, 0), ((2,), FAST, 3000), ((2, 2), H100, 1 << 20)):
        pricer = Pricer.on(mesh_of(*sizes), hardware, "adamw", bucket_bytes, of.rounds)
        found = drawn(of, pricer, ("recompute",))
        for seed in range(3):
            wrong = found.wrong(found.tidy(random.Random(seed)))
            assert not wrong, (sizes, seed, wrong[:3])


class Prefixes(nn.Module):
    """Gradients of parameters are slices of what is far larger."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ParameterList([torch.randn(4, 16) for _ in range(12)])
        self.register_buffer("rest", torch.randn(508, 16))
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        for first in self.first:
            made = (made + torch.cat([first, self.rest])).sin()
        return made.square().mean()


def test_looks_that_wait_for_a_bucket_hold_what_they_look_at() -> None:
    of = in_rounds(Case(Prefixes(), {"x": torch.randn(8, 512, 16)}).wide_graph, 2)
    found = drawn(of, Pricer.on(mesh_of(2), FAST, "adamw", 3000, of.rounds), ("recompute",))
    for seed in range(15, 25):
        wrong = found.wrong(found.tidy(random.Random(seed)))
        assert not wrong, (seed, wrong[:3])


def test_the_problem_knows_that_they_are_gone() -> None:
    """Gradients of many wide layers are never there together."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    of = in_rounds(Case(Lossy(model), {"x": torch.randn(4, 64)}).wide_graph, 2)
    found = drawn(of, Pricer.on(mesh_of(1), FAST, "sgd", 0, of.rounds), ("recompute",))
    every = sum(parameter.numel() * 4 for parameter in model.parameters())
    for seed in range(5):
        picks = found.tidy(random.Random(seed))
        said = found.priced(picks)
        stays = sum(one.nbytes for one in lower(found.plan(picks, said), None, found.pricer).resident)
        assert said.peak[DEVICE] < stays + every / 2


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_micro_batch_are_what_the_program_says(name: str) -> None:
    """On one process: the most that is held in backward, beside what is resident, sums included."""
    (plan,) = plans(name, (1,), 1)
    case, graph = family(name), plan.graph

    def part(value: torch.Tensor, dim: int | None) -> torch.Tensor:
        return value if dim is None else value.chunk(2, dim)[0]

    program, lowered = emit(plan, {axis: "" for axis in plan.mesh.groups}), lower(plan, None)
    values = {
        key: part(value.detach().clone(), graph.rounds.cut.get(key))  # of the batch, which is there as a whole
        for key, value in case.values(graph).items()
    }
    inputs = [values[node.name] for node in program.inputs]
    own = [torch.tensor(0) for _ in plan.mesh.groups]
    so_far = [zeros(type) for type in program.added_up]
    ones = [torch.ones((), dtype=getattr(torch, type.dtype)) for n in program.tangents if (type := n.outputs[0])]
    live = LiveBytes()
    live.watch([inputs, own, so_far])
    with live, torch.no_grad():
        torch.manual_seed(0)
        outputs = program.forward(*inputs, *own)
        saved = [*outputs[len(program.results) :]]
        given = dict(zip(((one.kind, one.target) for one, _ in program.results), outputs, strict=False))
        del outputs
        for place, result in enumerate(graph.results):  # what is cut goes where the whole is
            if graph.rounds.times(place):
                given.pop((result.kind, result.target), None)
        live.watch(ones)
        assert program.backward is not None
        made = program.backward(saved, *ones, *own, so_far)
    assert all(one is None for one in made)
    once = [one.clone() for one in so_far if one is not None]
    with torch.no_grad():
        torch.manual_seed(0)
        outputs = program.forward(*inputs, *own)
        program.backward([*outputs[len(program.results) :]], *ones, *own, so_far)
    again = [one for one in so_far if one is not None]
    assert all(torch.equal(total, one * 2) and one.any() for total, one in zip(again, once, strict=True))
    wholes = sum(buffer.nbytes for buffer in lowered.resident if buffer.kind is Kind.OUTPUT)
    wholes += outputs_before(lowered)  # which nobody holds here
    assert live.peak == peaks(lowered)[DEVICE] - wholes, live.peak_after
    held = sum(one.numel() * one.element_size() for one in so_far if one is not None)
    assert held == sum(buffer.nbytes for buffer in lowered.resident if buffer.kind is Kind.ADDED_UP)
    kinds = [one.buffer.kind for _, one in lowered if isinstance(one, Alloc)]
    assert Kind.ADDED_UP not in kinds
