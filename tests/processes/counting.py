"""Models that count in attributes of their modules: alike on all ranks, whatever of the model each of them runs."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

import autopar
from tests.processes.compare import near, same_gradients
from tests.processes.hooked import NEAR, SMALL, inputs_of
from tests.processes.pipelines import Blocks, mesh_of
from tests.processes.worker import Ranks
from tests.support.counting import counted
from tests.support.meters import MODELS as METERS
from tests.support.meters import Normalises, kept, same
from tests.support.teachers import Contrast


class Part(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + self.calls / 10)


class Annealed(Blocks):
    """Parts that count, a weight that changes, and one branch that is taken in some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Part, self.layers))
        self.temperature = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.temperature = max(0.8, self.temperature * 0.9) + 0.1 * math.exp(-self.temperature)
        loss = super().forward(x / self.temperature, y)
        return loss * 2 if self.layers[3].calls % 3 == 0 else loss


def check_that_all_ranks_count(ranks: Ranks) -> None:
    """Where the batch is split, where layers are, in micro-batches, in stages, and of rows of each rank's own."""
    torch.manual_seed(0)
    flat = autopar.init_mesh("cpu")
    given = (
        (flat, {}),
        (flat, {"micro_batches": 2}),
        (mesh_of(ranks), {"micro_batches": 2}),
        (flat, {"inputs": "local"}),
    )
    for mesh, options in given:
        plain = Annealed().double()
        parallel = autopar.compile(copy.deepcopy(plain), mesh, **options, **SMALL)
        for step in range(4):
            inputs = inputs_of(8 * ranks.count)
            rows = slice(8 * ranks.rank, 8 * ranks.rank + 8) if "inputs" in options else slice(None)
            losses: list[Tensor] = []
            for model, of in ((parallel, rows), (plain, slice(None))):
                model.zero_grad()
                losses.append(model(**{name: value[of] for name, value in inputs.items()}))
                losses[-1].backward()
            near(losses[0], losses[1], NEAR, f"{options}, step {step}: loss")
            assert counted(parallel) == counted(plain), f"{options}, step {step}"
            same_gradients(plain, parallel)


class HasState(nn.Module):
    """A tuple that each call makes anew, a list that each writes to, and an array of numpy."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.state: tuple[Tensor, float] | None = None
        self.memory: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state, self.memory = (torch.zeros_like(x), 0.5), [x.new_zeros(8)]
        state, decay = self.state
        made = self.inner(x + decay * state + self.memory[0])
        self.memory[0] = 0.5 * self.memory[0] + made.detach().mean(0)
        self.state = made.detach(), decay * 0.9
        self.array = made.detach().numpy()
        return made


class Stateful(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(HasState, self.layers))


def check_states_that_are_carried(ranks: Ranks) -> None:
    """Of rows: where the batch is split, where layers are, in micro-batches, in stages."""
    torch.manual_seed(0)
    flat, two = autopar.init_mesh("cpu"), {"micro_batches": 2}
    for mesh, options in ((flat, {}), (flat, two), (mesh_of(ranks), two)):
        plain = Stateful().double()
        parallel = autopar.compile(copy.deepcopy(plain), mesh, **options, **SMALL)
        for step in range(4):
            inputs, losses = inputs_of(8 * ranks.count), list[Tensor]()
            for model in (parallel, plain):
                model.zero_grad()
                losses.append(model(**inputs))
                losses[-1].backward()
            near(losses[0], losses[1], NEAR, f"{options}, step {step}: loss")
            for number, (ours, theirs) in enumerate(zip(parallel.layers, plain.layers, strict=True)):
                told = f"{options}, step {step}: layer {number}"
                near(ours.state[0], theirs.state[0], NEAR, told)
                near(ours.memory[0], theirs.memory[0], NEAR, told)
                assert ours.state[1] == theirs.state[1], told
                near(torch.tensor(ours.array), torch.tensor(theirs.array), NEAR, told)
            same_gradients(plain, parallel)


class Membrane(nn.Module):
    """A buffer that forward sets to what has a gradient, of as many rows as the batch has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("membrane", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        self.membrane = (0.5 * self.membrane if len(self.membrane) else 0.0) + made
        return torch.tanh(self.membrane)


class Spiking(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Membrane, self.layers))


def check_membranes(ranks: Ranks) -> None:
    """Through two calls, where the batch is split, and where layers are."""
    torch.manual_seed(0)
    for mesh in (autopar.init_mesh("cpu"), autopar.init_mesh("cpu", tensor=ranks.count)):
        plain = Spiking().double()
        parallel = autopar.compile(copy.deepcopy(plain), mesh, **SMALL)
        for sequence in range(3):
            calls = [inputs_of(8 * ranks.count) for _ in range(2)]
            for model in (parallel, plain):
                model.zero_grad()
                for layer in model.layers:
                    layer.membrane = layer.membrane.detach() * 0
                sum(model(**inputs) for inputs in calls).backward()
            same_gradients(plain, parallel)
            for number, (ours, theirs) in enumerate(zip(parallel.layers, plain.layers, strict=True)):
                near(ours.membrane, theirs.membrane, NEAR, f"{mesh}, sequence {sequence}: layer {number}")


def check_meters_and_tensors_in_place(ranks: Ranks) -> None:
    """In objects, counters and attributes: where the batch is split, and where layers are."""
    for mesh in (autopar.init_mesh("cpu"), autopar.init_mesh("cpu", tensor=ranks.count)):
        for kind in METERS:
            torch.manual_seed(0)
            plain = kind()
            parallel = autopar.compile(copy.deepcopy(plain), mesh, **SMALL)
            for call in range(4):
                torch.manual_seed(call)
                x = torch.randn(8 * ranks.count, 4)[: 3 if kind is Normalises else None]
                for model in (parallel, plain):
                    model.zero_grad()
                    model(x).backward()
                for name, gradient in parallel.named_parameters():
                    near(gradient.grad.full_tensor(), plain.get_parameter(name).grad, 1e-4, f"{kind}, {call}: {name}")
                same(kept(parallel), kept(plain))


class Centred(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mean)


class Running(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Centred, self.layers))


def check_buffers_that_parts_set(ranks: Ranks) -> None:
    """To new tensors, of the whole batch: where it is split, where layers are, in stages, and of rows of each rank."""
    torch.manual_seed(0)
    flat = autopar.init_mesh("cpu")
    for mesh, options in ((flat, {}), (mesh_of(ranks), {"micro_batches": 1}), (flat, {"inputs": "local"})):
        plain = Running().double()
        parallel = autopar.compile(copy.deepcopy(plain), mesh, **options, **SMALL)
        for step in range(3):
            inputs = inputs_of(8 * ranks.count)
            rows = slice(8 * ranks.rank, 8 * ranks.rank + 8) if "inputs" in options else slice(None)
            for model, of in ((parallel, rows), (plain, slice(None))):
                model.zero_grad()
                model(**{name: value[of] for name, value in inputs.items()}).backward()
            same_gradients(plain, parallel)
            for (name, buffer), (_, right) in zip(parallel.named_buffers(), plain.named_buffers(), strict=True):
                near(buffer, right, NEAR, f"{options}, step {step}: {name}")


def check_a_teacher_and_a_queue(ranks: Ranks) -> None:
    """Where the batch is split, where layers are, and of rows of each rank's own; in calls without training, too."""
    torch.manual_seed(0)
    flat, grid = autopar.init_mesh("cpu"), autopar.init_mesh("cpu", tensor=ranks.count)
    for mesh, options in ((flat, {}), (grid, {"allow": ()}), (flat, {"inputs": "local"})):
        plain = Contrast().double()
        parallel = autopar.compile(copy.deepcopy(plain), mesh, **options, **SMALL)
        for step in range(5):
            inputs = inputs_of(4 * ranks.count)
            rows = slice(4 * ranks.rank, 4 * ranks.rank + 4) if "inputs" in options else slice(None)
            for model, of in ((parallel, rows), (plain, slice(None))):
                model.train(step != 2).zero_grad()
                model(**{name: value[of] for name, value in inputs.items()}).backward()
            same_gradients(plain, parallel)
            ours, theirs = parallel.full_state_dict(rank0_only=False), plain.state_dict()
            assert [*ours] == [*theirs]
            for name, right in theirs.items():
                near(ours[name], right, NEAR, f"{options}, step {step}: {name}")
