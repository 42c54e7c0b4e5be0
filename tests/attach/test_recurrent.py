"""Recurrent networks, whose modules hold their parameters a second time, in lists and by weak references."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.utils import parametrizations

import autopar
from autopar.errors import TraceError
from tests.processes.compare import LOSS, adamw, near, same_gradients, same_state, same_steps
from tests.support.recurrent import CASES, Recurrent, batch_of, made


@pytest.mark.parametrize(("case", "planned_first"), [(case, False) for case in CASES] + [("lstm", True)])
def test_a_recurrent_network_trains_with_the_numbers_of_torch(one: DeviceMesh, case: str, planned_first: bool) -> None:
    plain = made(case)
    example = {"example_kwargs": batch_of(plain)} if planned_first else {}
    parallel = autopar.compile(plain, one, outputs="global", **example)
    optimizers = adamw(plain.parameters()), adamw(parallel.parameters())
    same_steps(plain, parallel, batch_of(plain), optimizers, steps=2)
    holds_its_own(parallel)


@pytest.mark.parametrize("case", ["lstm", "gru", "rnn"])
def test_the_state_goes_out_and_in_again(one: DeviceMesh, case: str) -> None:
    plain = made(case)
    parallel = autopar.compile(plain, one, outputs="global")
    data, states = batch_of(plain), [batch_of(plain)["state"]] * 2
    for _ in range(2):
        losses = []
        for place, model in enumerate((plain, parallel)):
            loss, after = model(data["x"], data["y"], states[place])
            states[place] = tuple(part.detach() for part in after) if isinstance(after, tuple) else after.detach()
            loss.backward()
            losses.append(loss)
        near(losses[1], losses[0], LOSS, "loss")
        for ours, wanted in zip(*(part if isinstance(part, tuple) else (part,) for part in states[::-1]), strict=True):
            near(ours, wanted, LOSS, "state")
    same_gradients(plain, parallel)


@pytest.mark.parametrize("batched", [True, False])
def test_an_lstm_reads_inputs_as_they_come(one: DeviceMesh, batched: bool) -> None:
    """Where no layer is in front torch keeps it whole in an export."""

    class Straight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(6, 8, num_layers=2, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            made, (h, c) = self.inner(x)
            return made.square().mean() + h.sin().mean() + c.cos().mean()

    plain = Straight()
    parallel = autopar.compile(plain, one)
    same_steps(plain, parallel, {"x": torch.randn(5, 4, 6) if batched else torch.randn(5, 6)}, steps=2)
    assert not [
        op for op in {node.op for node in parallel.plan.graph.nodes} if "mkldnn" in op or op.startswith("aten.lstm")
    ]


@pytest.mark.parametrize("planned_first", [True, False], ids=["plain tensors", "DTensors"])
def test_a_second_program_a_copy_and_a_loaded_state_are_right(one: DeviceMesh, planned_first: bool) -> None:
    plain, other = made("lstm"), made("lstm", seed=5)
    data = batch_of(plain)
    example = {"example_kwargs": data} if planned_first else {}
    parallel = autopar.compile(plain, one, outputs="global", **example)
    parallel.load_state_dict(other.state_dict())
    near(parallel(**data)[0], other(**data)[0], LOSS, "loss of what was loaded")
    parallel.load_state_dict(plain.state_dict())
    optimizers = adamw(plain.parameters()), adamw(parallel.parameters())
    same_steps(plain, parallel, data, optimizers, steps=2)
    plain.eval(), parallel.eval()
    with torch.no_grad():
        near(parallel(**data)[0], plain(**data)[0], LOSS, "loss of another program")
    copied = made("lstm", seed=6)
    copied.load_state_dict(parallel.state_dict() if planned_first else _whole(parallel.state_dict()))
    same_state(plain, copied)
    holds_its_own(parallel)


def test_hooks_and_weak_references_of_parameters_see_the_laid_out_ones(one: DeviceMesh) -> None:
    """Made before there is a plan, which puts another tensor into the same parameter."""
    plain = nn.Linear(6, 4)
    parallel = autopar.compile(plain, one, outputs="global")
    called: list[str] = []
    parallel.weight.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
    parallel.weight.register_hook(lambda gradient: called.append("made"))
    seen, x = weakref.ref(parallel.weight), torch.randn(3, 6)
    parallel(x).square().sum().backward()
    assert called == ["made", "accumulated"]
    assert seen() is parallel.weight and seen().grad is not None
    with torch.no_grad():
        parallel.weight.mul_(2)
    near(seen(), 2 * plain.weight, 1e-6, "the parameter behind the reference")


class Listed(nn.Module):
    """Parameters in a `ParameterList`, in a plain list beside it, in a dictionary, and one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.ParameterList(torch.randn(6, 6) for _ in range(2))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.kept[1]
        self.listed = [*self.kept]
        self.named = {"bias": self.tied.bias, "pair": (self.tied.weight, 3)}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return functional.mse_loss(self.tied(x) + self.named["bias"] @ self.named["pair"][0], y)


@pytest.mark.parametrize("planned_first", [True, False], ids=["plain tensors", "DTensors"])
def test_parameters_in_lists_are_those_that_are_trained(one: DeviceMesh, planned_first: bool) -> None:
    plain, data = Listed(), {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    parallel = autopar.compile(plain, one, **({"example_kwargs": data} if planned_first else {}))
    same_steps(plain, parallel, data, steps=3)
    assert parallel.listed[0] is parallel.kept[0] and parallel.listed[1] is parallel.tied.weight
    assert parallel.named["bias"] is parallel.tied.bias and parallel.named["pair"][0] is parallel.kept[1]
    parallel.eval()
    plain.eval()
    near(parallel(**data), plain(**data), LOSS, "loss of another program")


class Weak(nn.Module):
    """Reads a parameter by a weak reference only, which stays with the model that it was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.seen = weakref.ref(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.seen()).square().sum()


class Hidden(nn.Module):
    """Layers in a plain list, which torch does not list among the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = [nn.Linear(6, 6)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.first(x)).square().sum()


@pytest.mark.parametrize("kind", [Weak, Hidden])
def test_a_trained_tensor_that_is_no_parameter_of_the_model_is_refused(one: DeviceMesh, kind: type[nn.Module]) -> None:
    """It would count as a constant: right in the first step, never trained."""
    plain = kind()
    parallel = autopar.compile(plain, one)
    with pytest.raises(TraceError, match=r"test_recurrent\.py:\d+ .*requires grad.* register"):
        parallel(torch.randn(3, 6))


def holds_its_own(parallel: Recurrent | Any) -> None:
    """The second list holds the parameters that are trained, under a deep copy too."""
    inner = parallel.inner
    for name, listed in zip(inner._flat_weights_names, inner._flat_weights, strict=True):
        assert listed is inner.get_parameter(name), name
    assert copy.deepcopy(inner._flat_weights_names) == [name for name, _ in inner.named_parameters()]


def _whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in state.items()}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (nn.LSTM, {"bidirectional": True, "batch_first": True}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.GRU, {"bias": False}),
        (nn.RNN, {}),
    ],
)
def test_dropout_between_layers_is_drawn(kind: type[Any], given: dict[str, Any], one: DeviceMesh) -> None:
    """As the model draws it. What torch takes such layers apart into has none."""
    torch.manual_seed(0)
    plain = kind(4, 3, 3, dropout=0.5, **given)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(5, 2, 4)
    for mode in (True, False, True):
        made: list[Tensor] = []
        for model in (plain, parallel):
            model.train(mode).zero_grad()
            torch.manual_seed(1)
            output, state = model(x)
            parts = state if isinstance(state, tuple) else (state,)
            made.append(torch.cat([output.flatten(), *(part.flatten() for part in parts), torch.rand(1)]))
            made[-1].square().sum().backward()
        near(made[1], made[0], 1e-5, f"train({mode})")
        same_gradients(plain, parallel)


class Penalised(nn.Module):
    """What a recurrent layer makes of a sequence, and, `inside`, how fast that changes."""

    def __init__(self, kind: type[nn.RNNBase], inside: bool, **options: Any) -> None:
        super().__init__()
        self.inner, self.inside = kind(4, 5, **options).double(), inside

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if self.inside else x
        made = self.inner(x)[0].tanh().sum((0, 2)).exp().mean()
        if not self.inside:
            return made
        (slope,) = torch.autograd.grad(made, x, create_graph=True)
        return made + slope.square().sum()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTM, {"bidirectional": True}), (nn.GRU, {"num_layers": 2}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})],
)
def test_gradients_of_gradients_of_recurrent_layers(
    one: DeviceMesh, kind: type[nn.RNNBase], options: dict[str, Any], inside: bool
) -> None:
    plain = Penalised(kind, inside, **options)
    parallel = autopar.compile(plain, one)
    for model in (plain, parallel):
        torch.manual_seed(3)
        x = torch.randn(3, 6, 4, dtype=torch.float64)
        if inside:
            model(x).backward()
            continue
        x.requires_grad_()
        loss = model(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
    same_gradients(plain, parallel)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_layer_is_one_operator_whatever_its_steps(one: DeviceMesh, kind: type[nn.RNNBase]) -> None:
    counts = []
    for steps in (3, 50):
        parallel = autopar.compile(kind(4, 5), one, example_kwargs={"input": torch.randn(steps, 2, 4)})
        counts.append(len(parallel.plan.graph.nodes))
    assert counts[0] == counts[1] < 40


class Remade(nn.Module):
    """A recurrent layer whose states' matrix is made of others in every call."""

    def __init__(self, kind: type[nn.RNNBase], remake: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.inner = remake(kind(6, 6), "weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0].square().mean()


@pytest.mark.parametrize(
    "remake", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_weights_that_are_made_of_others(
    one: DeviceMesh, kind: type[nn.RNNBase], remake: Callable[..., nn.Module]
) -> None:
    """Spectral norms change buffers each time when they are asked for."""
    models: list[nn.Module] = []
    for _ in range(2):  # a copy would ask, too
        torch.manual_seed(4)
        models.append(Remade(kind, remake))
    plain, parallel = models[0], autopar.compile(models[1], one)
    same_steps(plain, parallel, {"x": torch.randn(5, 3, 6)}, steps=3)
    same_state(plain, parallel)


def runs_in_bfloat16() -> bool:
    """Whether oneDNN, which autocast takes, has it for this CPU."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.randn(2, 1, 2))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_autocast_casts_layers_as_torch_does(one: DeviceMesh, kind: type[nn.RNNBase]) -> None:
    """No further from the numbers of float64 than twice what torch is, over many steps."""
    plain, x = kind(8, 6, num_layers=2), torch.randn(200, 3, 8)
    if kind is nn.LSTM and not runs_in_bfloat16():
        pytest.skip("torch has no LSTM under autocast on this CPU")
    exact, parallel = copy.deepcopy(plain).double(), autopar.compile(plain, one, outputs="global")
    (wanted, _), off = exact(x.double()), []
    wanted.square().mean().backward()
    for model in (plain, parallel):
        with torch.autocast("cpu", torch.bfloat16):
            made, _ = model(x)
        made.float().square().mean().backward()
        off.append([(made.double() - wanted).abs().mean()])
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            off[-1].append((ours.grad.double() - theirs.grad).norm() / theirs.grad.norm())
        assert made.dtype == (torch.float32 if kind is nn.GRU else torch.bfloat16)
    assert all(ours <= 2 * theirs for theirs, ours in zip(*off, strict=True)), off


class Led(nn.Module):
    """Its own parts, through all that leads to them weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.all, self.named = weakref.WeakSet([self.linear]), weakref.WeakValueDictionary(one=self.other)
        self.by = weakref.WeakKeyDictionary({self.linear: 3.0})

    def forward(self, x: Tensor) -> Tensor:
        made = self.named["one"](x) * self.by[self.linear]
        for part in self.all:
            made = made + part(x)
        return made.square().mean()


def test_what_leads_to_parts_weakly_leads_to_those_that_are_trained(one: DeviceMesh) -> None:
    plain, models = Led(), [Led()]
    models[0].load_state_dict(plain.state_dict())
    parallel, data = autopar.compile(models.pop(), one), {"x": torch.randn(3, 4)}
    gc.collect()
    same_steps(plain, parallel, data, steps=2)
