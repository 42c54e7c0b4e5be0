"""Gradients belong to their parameters: whoever clips or scales one changes nothing else."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autopar
from tests.processes.compare import near, same_gradients


class Alike(nn.Module):
    """Three parameters with one gradient, one whose gradient is the input, and one whose gradient the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.one, self.other = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
        self.scale, self.given = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.linear(x) + self.one + self.other).square() + self.scale * x, self.given * 1


@pytest.mark.parametrize("planned_first", [True, False], ids=["plain tensors", "DTensors"])
def test_each_has_storage_of_its_own(one: DeviceMesh, planned_first: bool) -> None:
    torch.manual_seed(0)
    plain, x, tangents = Alike(), torch.randn(4, 8), (torch.ones(4, 8), torch.randn(3))
    kept = copy.deepcopy((x, *tangents))
    example = {"example_inputs": (x,)} if planned_first else {}
    parallel = autopar.compile(plain, one, outputs="global", **example)
    for model in (plain, parallel):
        torch.autograd.backward(model(x), tangents)
    assert {isinstance(parameter, DTensor) for parameter in parallel.parameters()} == {not planned_first}
    storages = {
        (grad.to_local() if isinstance(grad, DTensor) else grad).untyped_storage().data_ptr()
        for grad in (parameter.grad for parameter in parallel.parameters())
    }
    assert len(storages) == len([*parallel.parameters()])
    for model in (plain, parallel):
        for parameter in model.parameters():
            parameter.grad.mul_(2.0)
    same_gradients(plain, parallel)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (parallel, plain)]
    near(*norms, 1e-6, "the norm")
    same_gradients(plain, parallel)
    assert all(map(torch.equal, (x, *tangents), kept)), "what the caller gave was written to"


def test_accumulated_gradients_are_those_of_both_calls(one: DeviceMesh) -> None:
    plain, x = Alike(), torch.randn(4, 8)
    parallel = autopar.compile(plain, one, outputs="global", example_inputs=(x,))
    for model in (plain, parallel):
        for part in (x, 2 * x):
            sum(output.sum() for output in model(part)).backward()
    same_gradients(plain, parallel)


class WithLeaf(nn.Module):
    """Makes a leaf that requires grad, as helpers for checkpointing do, and never asks for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch["x"].detach().requires_grad_(True)).square().mean()


def test_leaves_in_forward_need_not_be_asked_for_their_gradient(one: DeviceMesh) -> None:
    plain, batch = WithLeaf(), {"x": torch.randn(4, 8)}
    parallel = autopar.compile(plain, one)
    near(parallel(batch), plain(batch), 1e-5, "loss")
    for model in (plain, parallel):
        model.zero_grad()
        model(batch).backward()
    same_gradients(plain, parallel)
    wanted = {"x": batch["x"].clone().requires_grad_(True)}
    parallel(wanted).backward()
    assert wanted["x"].grad is None, "forward detaches it"


TRANSFORMS: dict[str, Callable[[nn.Module, dict[str, Tensor], Tensor], Any]] = {
    "grad": lambda model, own, x: torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(own),
    "vmap": lambda model, own, x: torch.vmap(model)(x[:, None]),
    "jvp": lambda model, own, x: torch.func.jvp(model, (x,), (x,)),
    "jacrev": lambda model, own, x: torch.func.jacrev(model)(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # jvp's own
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("is_planned", [False, True])
def test_transforms_of_functions_are_refused(one: DeviceMesh, name: str, is_planned: bool) -> None:
    """They ended in torch's words about tensors that have no storage."""
    x, parallel = torch.randn(4, 8), autopar.compile(nn.Linear(8, 2), one)
    if is_planned:
        parallel(x)
    own = {name: value.detach() for name, value in parallel.named_parameters()}
    with pytest.raises(RuntimeError, match=r"called within a transform of torch.func .* call it outside"):
        TRANSFORMS[name](parallel, own, x)


class Heads(nn.Module):
    """Two heads upon one body, of which a user trains now the one, now the other; and a number beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.alone = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x).relu()
        return {"one": self.one(hidden), "other": self.other(hidden), "alone": self.alone.square().sum()}


@pytest.mark.parametrize("planned_first", [True, False], ids=["plain tensors", "DTensors"])
def test_what_no_loss_was_made_of_has_no_gradient(one: DeviceMesh, planned_first: bool) -> None:
    """An optimizer with momentum or weight decay would move a parameter whose gradient is zeros."""
    torch.manual_seed(0)
    plain, x = Heads(), torch.randn(4, 8)
    models = [plain, autopar.compile(copy.deepcopy(plain), one, **({"example_inputs": (x,)} if planned_first else {}))]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5) for model in models]
    used = [("one",), ("other",), ("one", "other"), ("alone",), ("one", "alone")]
    for names in used:
        for model, optimizer in zip(models, optimizers, strict=True):
            found = model(x)
            sum(found[name].square().mean() for name in names).backward()
            without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
            assert without == {name for name, _ in plain.named_parameters()} - {
                name
                for name, _ in plain.named_parameters()
                if name.split(".")[0] in names or (name.startswith("body") and names != ("alone",))
            }
            optimizer.step()
            optimizer.zero_grad()
    ours = models[1].state_dict()
    for name, parameter in plain.named_parameters():
        near(ours[name], parameter.detach(), 1e-6, name)


# Outputs that look at one storage, and what a script makes of them.
VIEWS: dict[str, tuple[Callable[[Tensor, nn.Linear], Any], Callable[[Any], Tensor]]] = {
    "a view": (lambda y, _: (y, y.t()), lambda o: o[1].square().sum()),
    "both": (lambda y, _: (y, y.t()), lambda o: o[0].square().sum() + 3 * o[1].sum()),
    "rows": (lambda y, _: (y[0], y[1:]), lambda o: o[0].sum() - o[1].square().sum()),
    "pooled": (lambda y, _: {"hidden": y, "pooled": y[:, 0]}, lambda o: o["hidden"].square().sum() + o["pooled"].sum()),
    "detached": (lambda y, _: (y, y.detach()), lambda o: (o[0] * o[1]).sum()),
    "a loss and its log": (lambda y, _: {"loss": y.sum(), "log": {"ce": y.sum().detach()}}, lambda o: o["loss"]),
    "one loss, looked at": (lambda y, _: _twice(y.square().mean()), lambda o: o[0] * (1 + o[1])),
    "a loss of one row": (lambda y, _: (y.square().mean(), y.square().mean().view(1)), lambda o: o[1].sum()),
    "parts": (lambda y, _: y.chunk(2, -1), lambda o: o[0].square().sum() - o[1].sum()),
    "twice": (lambda y, _: (y, y), lambda o: o[0].square().sum() + o[1].sum()),
    "a view twice": (lambda y, _: _twice_a_view(y), lambda o: o[0].square().sum() + o[1].sum()),
    "a view twice beside what it is of": (
        lambda y, _: (*_twice_a_view(y), y),
        lambda o: o[0].square().sum() + o[2].sum(),
    ),
    "a parameter": (lambda y, layer: (y.sum(), layer.weight), lambda o: o[0] + o[1].square().sum()),
    "a view of a parameter": (lambda y, layer: (y.sum(), layer.weight.t()[0]), lambda o: o[0] + o[1].square().sum()),
}


def _twice(loss: Tensor) -> tuple[Tensor, Tensor]:
    return loss, loss.detach()


def _twice_a_view(y: Tensor) -> tuple[Tensor, Tensor]:
    return (turned := y.t()), turned


class Viewed(nn.Module):
    def __init__(self, of: Callable[[Tensor, nn.Linear], Any]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(8, 8), of

    def forward(self, x: Tensor) -> Any:
        return self.of(self.layer(x), self.layer)


@pytest.mark.parametrize("what", VIEWS)
def test_outputs_that_are_views_of_each_other_have_their_own_gradients(one: DeviceMesh, what: str) -> None:
    torch.manual_seed(0)
    of, used = VIEWS[what]
    plain, x = Viewed(of), torch.randn(4, 8)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for model in (plain, parallel):
        used(model(x)).backward()
    assert plain.layer.weight.grad is not None
    same_gradients(plain, parallel)
