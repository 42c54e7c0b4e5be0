"""torch.autocast around the call and in the model: the casts that torch makes, in the program and nowhere else."""

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

import autopar
from autopar.errors import TraceError
from autopar.trace.ambient import ambient_state, autocast_state
from tests.processes.compare import near, whole

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Mixed(nn.Module):
    """Products with a tied weight, a part without autocast, norms with statistics, and a loss, with regions or without.

    No biases: torch adds one within a product and we behind it, which rounds once more.
    """

    def __init__(self, region: torch.dtype | None = None, inner_off: bool = True) -> None:
        super().__init__()
        self.region, self.inner_off = region, inner_off
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.third, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 12, bias=False)
        self.second.weight = self.first.weight
        self.layer, self.batch = nn.LayerNorm(16), nn.BatchNorm1d(16)

    def body(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.second(functional.gelu(self.layer(self.first(x))))
        if self.inner_off:
            with torch.autocast("cpu", enabled=False):
                made = self.third(made.to(x.dtype))
        return functional.cross_entropy(self.last(torch.tanh(self.batch(made))), y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inside = torch.autocast("cpu", dtype=self.region) if self.region else contextlib.nullcontext()
        with inside:
            return self.body(x, y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randint(0, 12, (8,))


def step(
    model: nn.Module, x: Tensor, y: Tensor, around: torch.dtype | None, *, backward_inside: bool = False
) -> Tensor:
    model.zero_grad()
    with torch.autocast("cpu", dtype=around) if around else contextlib.nullcontext():
        loss = model(x, y)
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return loss


def same(plain: nn.Module, parallel: nn.Module, losses: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Losses to the last bits of float32: the products are the same, rounded alike. Where a weight is read twice, torch
    adds its two gradients in the low precision and we in float32.
    """
    near(losses[1], losses[0], 1e-6, "loss")
    for name, parameter in plain.named_parameters():
        within = 2 * ROUNDING[dtype] if name == "first.weight" else 1e-5
        near(parallel.get_parameter(name).grad, parameter.grad, within, f"gradient of {name}", 1e-7)
    for name, buffer in plain.named_buffers():
        near(parallel.get_buffer(name), buffer, 1e-6, name)


def products(parallel: autopar.ParallelModule) -> set[str]:
    graph = parallel.plan.graph
    return {graph.type_of(ref).dtype for n in graph.nodes if n.op == "autopar.einsum" for ref in n.operands}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["around", "inside", "both"])
def test_autocast_gives_the_numbers_that_it_gives_in_torch(one: DeviceMesh, where: str, dtype: torch.dtype) -> None:
    plain = Mixed(region=dtype if where != "around" else None)
    around = dtype if where != "inside" else None
    parallel = autopar.compile(plain, one)
    for _ in range(2):
        x, y = batch()
        same(plain, parallel, (step(plain, x, y, around), step(parallel, x, y, around)), dtype)
    assert products(parallel) == {str(dtype).removeprefix("torch."), "float32"}, "float32 is the part without"
    loss = step(copy.deepcopy(plain).requires_grad_(True), x, y, None if where == "around" else around)
    assert (loss != step(plain, x, y, around)) == (where == "around"), "without autocast it is another number"


def test_a_program_runs_without_autocast_also_where_backward_is_called_within(one: DeviceMesh) -> None:
    plain = Mixed()
    parallel, (x, y) = autopar.compile(plain, one), batch()
    wanted = step(plain, x, y, torch.bfloat16)
    losses = wanted, step(parallel, x, y, torch.bfloat16, backward_inside=True)
    same(plain, parallel, losses, torch.bfloat16)


def test_tracing_leaves_autocast_and_its_cache_as_they_are(one: DeviceMesh) -> None:
    plain, (x, y) = Mixed(region=torch.float16), batch()
    parallel = autopar.compile(plain, one)
    before = autocast_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = autocast_state()
        wanted = plain(x, y)
        parallel(x, y)
        assert autocast_state() == inside and torch.is_autocast_cache_enabled()
        near(copy.deepcopy(plain)(x, y), wanted, 1e-6, "loss")
        broken = autopar.compile(nn.Linear(5, 5), one)
        with pytest.raises(TraceError):
            broken(x)
        assert autocast_state() == inside
    assert autocast_state() == before


def test_the_state_tells_device_dtype_and_default_dtype() -> None:
    states = [ambient_state()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states.append(ambient_state())
    with torch.autocast("cpu", dtype=torch.float16):
        states.append(ambient_state())
    torch.set_default_dtype(torch.float64)
    try:
        states.append(ambient_state())
    finally:
        torch.set_default_dtype(torch.float32)
    assert states[0] == ("float32", (("cpu", False, "bfloat16"), *states[0][1][1:]))
    assert states[2][1][0] == ("cpu", True, "float16") and states[3][0] == "float64"
    assert len(set(states)) == 4 and ambient_state() == states[0]


def test_autocast_beside_a_precision_casts_once(one: DeviceMesh) -> None:
    plain, (x, y) = Mixed(inner_off=False), batch()
    plain.batch = nn.Identity()  # torch has no batch norm of bfloat16 with statistics of float32
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    parallel = autopar.compile(plain, one, precision=precision)
    step(parallel, x, y, torch.bfloat16)
    assert products(parallel) == {"bfloat16"}
    casts = [n for n in parallel.plan.graph.nodes if n.op == "aten._to_copy.default" and n.phase == "forward"]
    assert len({n.operands for n in casts}) == len(casts)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_takes_half_precision_beside_float32(one: DeviceMesh, affine: bool) -> None:
    """As in each block of a diffusion model; its parameters stay as they are on CPUs."""
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.GroupNorm(4, 8, affine=affine), nn.SiLU(), nn.Conv2d(8, 3, 3, bias=False)
    )
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.randn(4, 3, 8, 8)
    outputs = list[Tensor]()
    for model in (parallel, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(model(x))
        outputs[-1].float().square().mean().backward()
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    near(outputs[0].float(), outputs[1].float(), 4 * ROUNDING[torch.bfloat16], "output")
    for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        near(whole(ours.grad), theirs.grad, 8 * ROUNDING[torch.bfloat16], "gradient")


class Held(nn.Module):
    """Gradients are off for a part of what an autocast context, or its absence, stands around."""

    def __init__(self, way: str, enabled: bool) -> None:
        super().__init__()
        self.linear, self.way, self.enabled = nn.Linear(6, 6), way, enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            h = self.linear(x)
            match self.way:
                case "beside":
                    with torch.no_grad():
                        scale = h.exp().clamp(max=2.0)
                    h = h * scale
                case "in place":
                    with torch.no_grad():
                        h.clamp_(max=0.3)
                case "data":
                    h.data.mul_(2)
                case _:
                    with torch.no_grad():
                        h = h + self.linear(x)
                        with torch.enable_grad():
                            h = h * self.linear(h)
        return h.square().mean()


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("way", ["beside", "in place", "data", "nested"])
def test_gradients_are_off_within_a_context_where_they_are_off(one: DeviceMesh, way: str, enabled: bool) -> None:
    torch.manual_seed(0)
    plain = Held(way, enabled)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(8, 6)
    parallel(x).backward(), plain(x).backward()
    within = 8 * ROUNDING[torch.bfloat16] if enabled else 1e-5
    for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        near(whole(ours.grad), theirs.grad, within, way)
