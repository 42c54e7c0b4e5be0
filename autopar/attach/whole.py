"""Whole: any optimizer on split parameters, stepped on whole copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.attach.agree import text_from
from autopar.attach.tensors import piece_as

SEEDS = 2**31


class Whole(torch.optim.Optimizer):
    """An optimizer of whole matrices: each rank steps `optimizer_class` on whole copies of all parameters, alike.

        from autopar.optim import Whole
        optimizer = Whole(parallel.parameters(), Shampoo, lr=1e-3)

    For optimizers that DTensors do not run (LAMB, LARS, Shampoo, SOAP, Prodigy, Adafactor: whatever reads norms, rows
    or factors of a matrix into tensors of its own). AdamW, SGD and other optimizers that update each number by itself
    need it not. What it costs, on the device of every rank: all parameters, gradients and states once more, whole, and
    an all-gather of all parameters and gradients at each step; no plan knows of them, so leave room with `memory=`.

    params: parameters, or groups of them, as every optimizer takes them. optimizer_class: called with copies of the
    same groups and `settings`. `param_groups` are the optimizer's own settings over the split parameters: schedulers
    work; `state` has its states of them, whole. State dicts are the optimizer's, the same on every rank, and load on
    any number of ranks. Random numbers that it draws are the same on every rank.

    Every rank must step. Values written to parameters between steps, however that is done, are seen.
    """

    _step_supports_amp_scaling = False  # gradients are unscaled before the step

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        **settings: Any,
    ) -> None:
        self._copies: dict[Tensor, nn.Parameter] = {}
        super().__init__(params, {})
        self.optimizer = optimizer_class([self._copied(group) for group in self.param_groups], **settings)
        self.defaults = self.optimizer.defaults
        self._steps, self._seed = 0, _agreed_seed([*self._copies])
        _set_settings(self.param_groups, self.optimizer.param_groups)

    def _copied(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [*map(self._copy, group["params"])]}

    def _copy(self, parameter: Tensor) -> nn.Parameter:
        copy = nn.Parameter(_whole(parameter), requires_grad=parameter.requires_grad)
        self._copies[parameter] = copy
        return copy

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "optimizer"):
            self.optimizer.add_param_group(self._copied(self.param_groups[-1]))
            _set_settings(self.param_groups, self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        _set_settings(self.optimizer.param_groups, self.param_groups)  # schedulers change ours
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        _set_settings(self.param_groups, self.optimizer.param_groups)
        self._show_states()

    def _show_states(self) -> None:
        """torch.distributed.checkpoint takes an optimizer without states for a new one, and steps it to make them."""
        states = self.optimizer.state
        self.state.clear()
        self.state.update({parameter: states[copy] for parameter, copy in self._copies.items() if copy in states})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, copy in self._copies.items():
            copy.copy_(_whole(parameter))  # versions do not tell whether it was written: a DTensor's piece has its own
            copy.grad = None if parameter.grad is None else _whole(parameter.grad)
        _set_settings(self.optimizer.param_groups, self.param_groups)
        devices = sorted({copy.get_device() for copy in self._copies.values() if copy.is_cuda})
        with torch.random.fork_rng(devices):
            torch.manual_seed((self._seed + self._steps) % SEEDS)
            self.optimizer.step()
        _set_settings(self.param_groups, self.optimizer.param_groups)  # some change their own
        self._steps += 1
        for parameter, copy in self._copies.items():
            parameter.copy_(piece_as(copy, parameter) if isinstance(parameter, DTensor) else copy)
            copy.grad = None
        self._show_states()
        return loss


def _set_settings(groups: list[dict[str, Any]], like: list[dict[str, Any]]) -> None:
    for group, other in zip(groups, like, strict=True):
        group |= {name: value for name, value in other.items() if name != "params"}


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _agreed_seed(parameters: list[Tensor]) -> int:
    """The seed of rank 0."""
    split = next((p for p in parameters if isinstance(p, DTensor)), None)
    seed = str(torch.initial_seed())
    return int(seed if split is None else text_from(0, seed, split.device_mesh)) % SEEDS
