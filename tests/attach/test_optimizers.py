"""An optimizer that was made from the plain model would train nothing, and others do what DTensors cannot; their step
says so.
"""

import contextlib
import copy
import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autopar
from autopar.optim import Whole
from tests.processes.compare import MakeOptimizer, adamw, near, sgd
from tests.processes.models import batch, net


@pytest.mark.parametrize("make", [adamw, sgd])
def test_an_optimizer_of_the_plain_model_is_refused_at_its_step(one: DeviceMesh, make: MakeOptimizer) -> None:
    plain = net()
    optimizer = make(plain.parameters())  # as scripts for DistributedDataParallel make it
    parallel = autopar.compile(plain, one)
    parallel(**batch()).backward()
    with pytest.raises(
        RuntimeError, match=r"holds \S+ and \d+ more parameters of the plain model.*behind autopar.comp"
    ):
        optimizer.step()


def test_both_models_train_side_by_side(one: DeviceMesh) -> None:
    """What a comparison does: each has an optimizer of its own, in any order, also while the other has no gradients."""
    plain = net()
    parallel = autopar.compile(plain, one)
    optimizers = adamw(parallel.parameters()), adamw(plain.parameters())
    for model, optimizer in zip((parallel, plain), optimizers, strict=True):
        model(**batch()).backward()
        before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()
        optimizer.step()
        assert not torch.equal(before, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for optimizer in optimizers:
        optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.step()  # without gradients anywhere, as torch has it: nothing happens


def test_an_optimizer_goes_on_where_its_parallel_module_is_gone(one: DeviceMesh) -> None:
    plain = net()
    optimizer = adamw(plain.parameters())
    parallel = autopar.compile(plain, one)
    parallel(**batch()).backward()
    del parallel
    gc.collect()
    optimizer.step()
    plain(**batch()).backward()
    optimizer.step()


def test_an_optimizer_that_calls_its_closure_itself_is_no_whole_one(one: DeviceMesh) -> None:
    parallel = autopar.compile(torch.nn.Linear(4, 4), one)
    with pytest.raises(ValueError, match="LBFGS calls the closure of its step itself"):
        autopar.optim.Whole(parallel.parameters(), torch.optim.LBFGS, lr=0.1)


def listed(name: str, *args: Any, **kwargs: Any) -> Any:
    """An operator on lists, as optimizers beyond torch's own call it."""
    return getattr(torch, f"_foreach_{name}")(*args, **kwargs)


class Listed(torch.optim.Optimizer):
    """What optimizers beyond torch's own do to lists: operators for which DTensors have no rule."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    def trained(self) -> list[Tensor]:
        return [one for group in self.param_groups for one in group["params"] if one.grad is not None]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        parameters = self.trained()
        gradients = [one.grad for one in parameters]
        for one in parameters:
            self.state[one].setdefault("most", torch.zeros_like(one))
            self.state[one].setdefault("last", torch.zeros_like(one))
        most, last = ([self.state[one][name] for one in parameters] for name in ("most", "last"))
        listed("maximum_", most, listed("abs", gradients))
        listed("clamp_min_", most, 1e-3)
        listed("addcdiv_", parameters, listed("add", gradients, last, alpha=0.5), most, value=-0.01)
        listed("copy_", last, gradients)


class Rows(Listed):
    """A state of rows, which is a tensor of its own."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for one in self.trained():
            state = self.state[one].setdefault("rows", torch.zeros(one.shape[0]))
            state.add_(one.grad.square().reshape(one.shape[0], -1).mean(1))
            one.sub_(one.grad / (1 + state.sqrt()).reshape(-1, *(1 for _ in one.shape[1:])), alpha=0.01)


class Wrong(Listed):
    def step(self, closure: None = None) -> None:
        raise RuntimeError("a learning rate of 0 is none")


def test_operators_on_lists_run_on_what_is_split(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = net()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    models = plain, parallel
    optimizers = [Listed(model.parameters()) for model in models]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(**batch()).backward()
            assert any(isinstance(parameter, DTensor) for parameter in model.parameters()) == (model is parallel)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in parallel.full_state_dict().items():
        near(value, plain.state_dict()[name], 1e-6, name)


def test_an_optimizer_that_DTensors_do_not_run_says_how_it_runs(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = net()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for model in (plain, parallel):
        model(**batch()).backward()
    told = r"Rows does not run on parameters that are split; step it on whole copies: autopar.optim.Whole\(parallel.par"
    with pytest.raises(RuntimeError, match=told) as refused:
        Rows(parallel.parameters()).step()
    assert "DTensor" in str(refused.value) and refused.value.__cause__ is not None
    Rows(plain.parameters()).step()
    Whole(parallel.parameters(), Rows).step()
    for name, value in parallel.full_state_dict().items():
        near(value, plain.state_dict()[name], 1e-6, name)
    with pytest.raises(RuntimeError, match=r"^a learning rate of 0 is none$"):
        Wrong(parallel.parameters()).step()


@pytest.mark.parametrize("planned", [True, False])
def test_a_model_that_is_trained_before_the_first_call_is_told(one: DeviceMesh, planned: bool) -> None:
    """Until then both have the same values; where there is a plan from the start, each has its own."""
    plain = net()
    parallel = autopar.compile(plain, one, **({"example_kwargs": batch()} if planned else {}))
    before = plain.first.weight.detach().clone()
    plain(**batch()).backward()
    sgd(plain.parameters()).step()
    with contextlib.nullcontext() if planned else pytest.warns(UserWarning, match="7 more of the model were"):
        parallel(**batch())
    assert torch.equal(parallel.full_state_dict()["first.weight"], before) == planned


def test_whole_tensors_in_lists_of_pieces_are_refused(one: DeviceMesh) -> None:
    """A dim of size 1 of a piece would be repeated over the whole tensor, without a word."""
    autopar.compile(net(), one)
    split, whole = (distribute_tensor(torch.ones(2, 4), one, [where]) for where in (Shard(0), Replicate()))
    for first, second in ((split, torch.ones(2, 4)), (torch.ones(2, 4), split)):
        with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor .2, 4. and DTensor .2, 4., of which each"):
            listed("add_", [first], [second])
    for first, second in ((whole, torch.ones(2, 4)), (torch.ones(2, 4), whole), (split, whole)):
        near(listed("add", [first], [second])[0], torch.full((2, 4), 2.0), 0.0, "the sum")
    listed("add_", [split], [torch.tensor(1.0)])


class Counts(torch.nn.Module):
    """What it takes out of tensors are numbers of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other, self.mean = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.square().mean().item()
        return (hidden * (1 + self.mean)).square().mean()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_closures_compute_as_if_no_optimizer_called_them(kind: Any, one: DeviceMesh) -> None:
    """The first call among them, which is traced, and a part of the module that is called by itself."""
    torch.manual_seed(0)
    plain = Counts()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    optimizers = [kind(model.parameters(), lr=0.1) for model in (plain, parallel)]
    for _ in range(3):
        x, losses = torch.randn(5, 4), list[Tensor]()
        for model, optimizer in zip((plain, parallel), optimizers, strict=True):

            def closure(model: Any = model, optimizer: Any = optimizer, x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = model(x) + model.other(x).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        near(losses[1], losses[0], 1e-4, "loss")
    assert parallel.mean == pytest.approx(plain.mean, rel=1e-4)
