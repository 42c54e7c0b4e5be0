"""Streamed: an optimizer whose states lie on the host where the plan says so, and come to the device to be updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.attach.module import ParallelModule
from autopar.attach.tensors import as_dtensor, layout_of
from autopar.emit.moves import settle
from autopar.modules import tensors_by_name

FETCH, STORE, WAIT = torch.ops.autopar.fetch, torch.ops.autopar.store, torch.ops.autopar.wait_copy


class Streamed(torch.optim.Optimizer):
    """`optimizer`, which holds parameters of `parallel`, stepped as the plan has it:

    - those on the device, all together;
    - those whose states stream, one by one: states in, update, states out;
    - those on the host, by the host, while the device still works.

    The same updates, whatever the plan: it says where, never what. State dicts are those of `optimizer`.

        from autopar.optim import Streamed
        optimizer = Streamed(torch.optim.AdamW(parallel.parameters()), parallel)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parallel: ParallelModule) -> None:
        self.optimizer, self.parallel = optimizer, parallel

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return f"Streamed({self.optimizer!r})"

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        for parameter in self._residing("stream"):
            self._move_states(parameter, STORE)
        settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        streams, host = self._residing("stream"), self._residing("host")
        elsewhere = {id(parameter) for parameter in (*streams, *host)}
        self._step(lambda parameter: id(parameter) not in elsewhere)
        for parameter in streams:
            if parameter.grad is not None:
                self._move_states(parameter, FETCH)
                self._step(lambda other, parameter=parameter: other is parameter)
                self._move_states(parameter, STORE)
        on_host = {id(parameter) for parameter in host}
        self._step(lambda parameter: id(parameter) in on_host)
        settle()  # whoever looks at the states sees the new ones
        return loss

    def _residing(self, where: str) -> list[Tensor]:
        parameters, _ = tensors_by_name(self.parallel)
        plan = self.parallel.plan
        wanted = {id(parameters[name]) for name, found in plan.residence.items() if found == where}
        return [parameter for group in self.param_groups for parameter in group["params"] if id(parameter) in wanted]

    def _step(self, wanted: Callable[[Tensor], bool]) -> None:
        """The optimizer's own step, on some of its parameters."""
        groups = [(group, group["params"]) for group in self.param_groups]
        try:
            for group, parameters in groups:
                group["params"] = [parameter for parameter in parameters if wanted(parameter)]
            if any(group["params"] for group, _ in groups):
                self.optimizer.step()
        finally:
            for group, parameters in groups:
                group["params"] = parameters

    def _move_states(self, parameter: Tensor, way: Any) -> None:
        """States of the parameter's size from the host to where it lies, or back."""
        state = self.optimizer.state.get(parameter, {})
        names = [name for name, value in state.items() if _is_like(value, parameter)]
        begun = [(name, *_begin(state[name], parameter, way)) for name in names]
        for name, made, source in begun:
            WAIT(made, source, name)
            state[name] = _like(made, state[name])


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _begin(value: Tensor, parameter: Tensor, way: Any) -> tuple[Tensor, Tensor]:
    source, device = _local(value), _local(parameter).device
    if way is STORE:
        return STORE(source, "state"), source
    return (source if source.is_cuda else FETCH(source, device, "state")), source


def _like(local: Tensor, value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        return as_dtensor(local, value.shape, layout_of(value), value.device_mesh)
    return local
