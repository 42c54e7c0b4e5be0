"""Whole: any optimizer on split parameters, stepped on whole copies of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.attach.agree import text_from
from autopar.attach.tensors import piece_as

SEEDS = 2**31


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step makes none without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


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

    Every rank must step. Values written to parameters between steps, however that is done, are seen, and so are states
    that are reset and parameters that are taken out of groups. Methods of the optimizer's own (`train()` and `eval()`
    of schedule-free ones) are handed on; every rank must call them.
    """

    _step_supports_amp_scaling = False  # gradients are unscaled before the step

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        **settings: Any,
    ) -> None:
        self._copies: dict[Tensor, nn.Parameter] = {}
        self._shown: dict[Tensor, Any] = {}  # states of parameters as `state` had them last
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []  # a group, and that of the optimizer inside
        super().__init__(params, {})
        self.optimizer = optimizer_class([self._copied(group) for group in self.param_groups], **settings)
        self.defaults = self.optimizer.defaults
        if needs_closure(self.optimizer):
            raise ValueError(
                f"{type(self.optimizer).__name__} calls the closure of its step itself, between changes of its "
                "parameters, which would be those of the whole copies only; use it as it is, or take another optimizer"
            )
        self._steps, self._seed = 0, _agreed_seed([*self._copies])
        self._pair()
        self._show_states()

    def __getattr__(self, name: str) -> Any:
        """What the optimizer inside has beyond torch's own: methods see the parameters, and what they write is kept."""
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self.optimizer, name)
        if not callable(found):
            return found

        def called(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                self._begin()
                result = found(*args, **kwargs)
                self._end()
            return result

        return called

    def __getstate__(self) -> dict[str, Any]:
        names = ("_copies", "_shown", "_pairs", "optimizer", "_steps", "_seed")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in names}}

    def _copied(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [*map(self._copy, group["params"])]}

    def _copy(self, parameter: Tensor) -> nn.Parameter:
        if parameter not in self._copies:
            self._copies[parameter] = nn.Parameter(_whole(parameter), requires_grad=parameter.requires_grad)
        return self._copies[parameter]

    def _pair(self) -> None:
        """The groups and those inside stand in one order when they were just made or loaded."""
        self._pairs = [*zip(self.param_groups, self.optimizer.param_groups, strict=True)]
        self._set_ours()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "optimizer"):
            self._set_inside()
            self.optimizer.add_param_group(self._copied(self.param_groups[-1]))
            self._pair()

    def state_dict(self) -> dict[str, Any]:
        self._set_inside()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._set_inside()
        self.optimizer.load_state_dict(state_dict)
        self._pair()
        self._show_states()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        devices = sorted({copy.get_device() for copy in self._copies.values() if copy.is_cuda})
        with torch.random.fork_rng(devices):
            torch.manual_seed((self._seed + self._steps) % SEEDS)
            self.optimizer.step()
        self._steps += 1
        self._end()
        return loss

    def _begin(self) -> None:
        """The optimizer inside has the parameters, gradients, groups, settings and states that are here."""
        self._set_inside()
        for parameter, copy in self._copies.items():
            copy.copy_(_whole(parameter))  # versions do not tell whether it was written: a DTensor's piece has its own
            copy.grad = None if parameter.grad is None else _whole(parameter.grad)

    def _end(self) -> None:
        """What it has made of them is here."""
        self._set_ours()  # some change their settings
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for parameter, copy in self._copies.items():
            copy.grad = None
            if id(parameter) in held:
                parameter.copy_(piece_as(copy, parameter) if isinstance(parameter, DTensor) else copy)
        self._show_states()

    def _set_inside(self) -> None:
        """Groups that were taken out, parameters that were, settings that schedulers change, states that were reset."""
        inside_of = {id(group): inside for group, inside in self._pairs}
        if any(id(group) not in inside_of for group in self.param_groups):
            raise ValueError("a group was put into param_groups of Whole by hand; use add_param_group")
        self.optimizer.param_groups[:] = [inside_of[id(group)] for group in self.param_groups]
        for group, inside in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            _set_settings(inside, group)
            inside["params"] = [*map(self._copy, group["params"])]
        for parameter, copy in self._copies.items():
            now = self.state.get(parameter)
            if now is self._shown.get(parameter):
                continue
            if now is None:
                self.optimizer.state.pop(copy, None)
            else:
                self.optimizer.state[copy] = now

    def _set_ours(self) -> None:
        for group, inside in self._pairs:
            _set_settings(group, inside)

    def _show_states(self) -> None:
        """torch.distributed.checkpoint takes an optimizer without states for a new one, and steps it to make them."""
        states = self.optimizer.state
        self._shown = {parameter: states[copy] for parameter, copy in self._copies.items() if copy in states}
        self.state.clear()
        self.state.update(self._shown)


def _set_settings(group: dict[str, Any], like: dict[str, Any]) -> None:
    group |= {name: value for name, value in like.items() if name != "params"}


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _agreed_seed(parameters: list[Tensor]) -> int:
    """The seed of rank 0."""
    split = next((p for p in parameters if isinstance(p, DTensor)), None)
    seed = str(torch.initial_seed())
    return int(seed if split is None else text_from(0, seed, split.device_mesh)) % SEEDS
