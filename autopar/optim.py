"""Optimizers for parallel modules; each is made around one that you have.

Streamed: an optimizer whose states lie on the host where the plan says so, and come to the device to be updated.
Whole: any optimizer, on whole copies of the parameters.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.attach.module import ParallelModule
from autopar.attach.optimizers import lay_out_states
from autopar.attach.tensors import as_dtensor, layout_of
from autopar.attach.whole import Whole
from autopar.emit.moves import settle
from autopar.machine.device import host_threads, threads
from autopar.simulate.steady_state import read_order
from autopar.trace.modules import tensors_by_name

__all__ = ["Streamed", "Whole"]

FETCH, STORE, WAIT = torch.ops.autopar.fetch, torch.ops.autopar.store, torch.ops.autopar.wait_copy


class Streamed(torch.optim.Optimizer):
    """`optimizer`, which holds parameters of `parallel`, stepped as the plan has it:

    - those on the device, all together;
    - those whose states stream, one by one: states in, update, states out;
    - those on the host, by the host, while the device still works; with `overlap` while the next forward runs.

    The same updates, whatever the plan: it says where, never what. State dicts are those of `optimizer`. Beside GPUs a
    host updates what is large with all processors of its rank but two (torchrun gives a process one thread), what is
    small with one; and torch's Adam and AdamW have their fused kernels there, where they were told neither `fused` nor
    `foreach`: torch itself takes a loop, several times as slow, whose results differ in rounding.

        from autopar.optim import Streamed
        optimizer = Streamed(torch.optim.AdamW(parallel.parameters()), parallel, overlap=True)

    overlap: a thread updates the parameters on the host, in the order in which the forward reads them, with the
    settings of `param_groups` at the time of `step`, which does not wait for it. The next forward waits for a parameter
    when it fetches it, and so does whoever reads or writes it, its gradient or its states otherwise; state dicts, the
    next backward and the next step wait for all. An error of the thread is raised there. Not seen are looks at a
    parameter's memory that were taken before (`to_local()`, `data`, an old state dict), and `optimizer.state` past this
    class. Hooks of `optimizer`'s step run in the thread, for each parameter; without `overlap`, for each part.

    Raises ValueError for `overlap` where the module's code is compiled, which takes all parameters at once, and with an
    optimizer that looks at more than one number of a parameter at a time, as Adafactor does.
    """

    # Fused optimizers take GradScaler's scale as an attribute, which this one would not hand on: gradients are unscaled
    # before the step, which is left out where they are not finite.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: torch.optim.Optimizer, parallel: ParallelModule, *, overlap: bool = False) -> None:
        self.optimizer, self.parallel, self.overlap = optimizer, parallel, overlap
        self._updates = parallel._autopar.updates
        if overlap and parallel._autopar.backend != "eager":
            raise ValueError(
                f"overlap=True needs code that fetches one parameter after the other; backend "
                f"{parallel._autopar.backend!r} compiles it into one call that takes all. Compile with backend='eager'"
            )
        if overlap and not _is_elementwise(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} does not update a piece of a parameter as it updates the whole, and with "
                "overlap=True a thread updates the piece that a rank has; use overlap=False with it"
            )
        if overlap:
            updates = self._updates  # not `self`, which holds the optimizer
            optimizer.register_state_dict_pre_hook(lambda _: updates.finish())
            optimizer.register_load_state_dict_pre_hook(lambda *_: updates.finish())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        self._updates.finish()
        return self.optimizer.state

    @state.setter
    def state(self, states: Any) -> None:
        self._updates.finish()
        self.optimizer.state = states

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.__dict__["optimizer"], name)

    def __getstate__(self) -> dict[str, Any]:
        self._updates.finish()
        return {"optimizer": self.optimizer, "parallel": self.parallel, "overlap": self.overlap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._updates = self.parallel._autopar.updates

    def __repr__(self) -> str:
        return f"Streamed({self.optimizer!r})"

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        state = self.parallel._autopar
        if state.plan is not None or state.main is not None:  # else the first step stores them
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
        self._updates.finish()
        lay_out_states(self.optimizer)  # before the thread takes them
        streams, host = self._residing("stream"), self._residing("host")
        elsewhere = {id(parameter) for parameter in (*streams, *host)}
        if self.overlap and host:
            self._begin_updates([parameter for parameter in host if parameter.ndim])
            host = [parameter for parameter in host if not parameter.ndim]  # whose states look like counters
        parts = _Parts(self.optimizer)
        parts.step(lambda parameter: id(parameter) not in elsewhere)
        for parameter in streams:
            if parameter.grad is not None:
                self._move_states(parameter, FETCH)
                parts.step(lambda other, parameter=parameter: other is parameter)
                self._move_states(parameter, STORE)
        counts = {id(parameter): self._threads_for(parameter) for parameter in host}
        for count in sorted({*counts.values()}):
            with threads(count):
                parts.step(lambda one, count=count: counts.get(id(one)) == count, fused=self._beside_gpus)
        settle()  # whoever looks at the states sees the new ones
        return loss

    def _threads_for(self, parameter: Tensor) -> int:
        """Of the host, for an update of this rank's piece."""
        return host_threads(_numel_here(parameter)) if self._beside_gpus else torch.get_num_threads()

    @property
    def _beside_gpus(self) -> bool:
        return self.parallel._autopar.device_mesh.device_type != "cpu"

    def _residing(self, where: str) -> list[Tensor]:
        parameters, _ = tensors_by_name(self.parallel)
        plan = self.parallel.plan
        wanted = {id(parameters[name]) for name, found in plan.residence.items() if found == where}
        return [parameter for group in self.param_groups for parameter in group["params"] if id(parameter) in wanted]

    def _begin_updates(self, host: Sequence[Tensor]) -> None:
        """Have the thread update these parameters, in the order in which the forward reads them."""
        parameters, _ = tensors_by_name(self.parallel)
        settings = {id(p): group for group in map(_settled, self.param_groups) for p in group["params"]}
        wanted = {id(parameter) for parameter in host if parameter.grad is not None}
        for name in read_order(self.parallel.plan):
            parameter = parameters[name]
            if id(parameter) in wanted:
                self._begin_update(name, cast(DTensor, parameter), settings[id(parameter)])

    def _begin_update(self, name: str, parameter: DTensor, settings: Mapping[str, Any]) -> None:
        state = self.optimizer.state.get(parameter, {})
        given = {key: _twin(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        twin = nn.Parameter(_twin(parameter.detach()), requires_grad=parameter.requires_grad)
        twin.grad = _twin(cast(DTensor, parameter.grad).detach())
        optimizer = _twin_of(self.optimizer, settings, twin, given)

        def work() -> None:
            with threads(self._threads_for(parameter)), _fused(optimizer, optimizer.param_groups, self._beside_gpus):
                optimizer.step()
            twin.grad = None
            (group,) = optimizer.param_groups
            if changed := [key for key, value in group.items() if key != "params" and value is not settings.get(key)]:
                raise RuntimeError(
                    f"{type(optimizer).__name__} changes {changed[0]!r} of its param_groups while it updates {name}, "
                    "which is lost where a thread updates one parameter after the other; use overlap=False with it"
                )

        def made() -> None:
            for key, value in optimizer.state.get(twin, {}).items():
                if value is not given.get(key):
                    value = _like(value, parameter) if _is_like(value, twin) else value
                    self.optimizer.state[parameter][key] = value
                elif isinstance(value, Tensor) and not isinstance(state[key], DTensor):
                    state[key].copy_(value)

        states = [value for value in state.values() if isinstance(value, DTensor)]
        self._updates.begin(parameter, states, work, made)

    def _move_states(self, parameter: Tensor, way: Any) -> None:
        """States of the parameter's size from the host to where it lies, or back."""
        state = self.optimizer.state.get(parameter, {})
        names = [name for name, value in state.items() if _is_like(value, parameter)]
        begun = [(name, *_begin(state[name], parameter, way)) for name in names]
        for name, made, source in begun:
            WAIT(made, source, name)
            state[name] = _like(made, state[name])


class _Parts:
    """One step of an optimizer, made for some of its parameters after the other. Each part begins with the settings
    with which the step began: some count steps in their groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.begun = [_settled(group) for group in optimizer.param_groups]
        self.ended: dict[int, dict[str, Any]] = {}  # number of a group -> its settings behind a part with some of it

    def step(self, wanted: Callable[[Tensor], bool], *, fused: bool = False) -> None:
        """`fused`: by fused kernels, where nobody said otherwise."""
        groups = self.optimizer.param_groups
        held = [group["params"] for group in groups]
        for group, begun, parameters in zip(groups, self.begun, held, strict=True):
            _set(group, begun)
            group["params"] = [parameter for parameter in parameters if wanted(parameter)]
        stepped = [number for number, group in enumerate(groups) if group["params"]]
        try:
            if stepped:
                with _fused(self.optimizer, [groups[number] for number in stepped], fused):
                    self.optimizer.step()
        finally:
            for group, parameters in zip(groups, held, strict=True):
                group["params"] = parameters
        for number in stepped:
            self._end(number, groups[number])
        for number, ended in self.ended.items():
            _set(groups[number], ended)

    def _end(self, number: int, group: dict[str, Any]) -> None:
        if number not in self.ended:  # most steps have one part
            self.ended[number] = _settled(group)
            return
        for name, value in self.ended[number].items():
            now = group.get(name)
            same = torch.equal(value, now) if isinstance(value, Tensor) and isinstance(now, Tensor) else value == now
            if name != "params" and not same:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} makes {name!r} of its param_groups out of all parameters of a "
                    "group, which Streamed updates one after the other: leave out 'offload-optimizer' and "
                    "'offload-parameters' (allow=), or take another optimizer"
                )


def _numel_here(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


@contextlib.contextmanager
def _fused(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], wanted: bool) -> Iterator[None]:
    """Inside, groups that leave the way of updating to torch have its fused kernels: Adam's, which DTensors have."""
    left: list[dict[str, Any]] = []
    if wanted and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        left = [group for group in groups if _is_open(group)]
    for group in left:
        group["fused"] = True
    try:
        yield
    finally:
        for group in left:
            group["fused"] = None


def _is_open(group: Mapping[str, Any]) -> bool:
    """Whether nobody has said how this group of Adam's is updated, and fused kernels can."""
    told = group["fused"] is not None or group["foreach"] is not None or group["differentiable"]
    return not told and all(parameter.is_floating_point() for parameter in group["params"])


def _set(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """The group's settings, but for its parameters. Tensors stay the same ones: schedulers hold them."""
    for name in [name for name in group if name not in settings]:
        del group[name]
    for name, value in settings.items():
        if name == "params":
            continue
        if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
            group[name].copy_(value)
        else:
            group[name] = value


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it updates pieces of a parameter as it updates the whole, tried on a small one."""
    whole = torch.linspace(0.1, 1.0, 1024).reshape(16, 64)

    def updated(value: Tensor, settings: Mapping[str, Any]) -> Tensor:
        parameter = nn.Parameter(value.clone())
        twin = _twin_of(optimizer, settings, parameter, _as_it_begins(optimizer, settings, value))
        for power in (2, 3):
            parameter.grad = value**power
            twin.step()
        return parameter.detach()

    def is_so(settings: Mapping[str, Any]) -> bool:
        return updated(whole, settings).allclose(torch.cat([updated(piece, settings) for piece in whole.chunk(2)]))

    return all(is_so(_settled(group)) for group in optimizer.param_groups if group["params"])


def _as_it_begins(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], value: Tensor) -> dict[str, Any]:
    """States of a parameter of that value, where constructors make them (Adagrad's, before torch 2.13)."""
    parameter = group["params"][0]
    begun: dict[str, Any] = {}
    for name, state in optimizer.state.get(parameter, {}).items():
        if _is_like(state, parameter):
            begun[name] = _local(state).flatten()[:1].sum().expand_as(value).clone()
        else:
            begun[name] = _twin(state) if isinstance(state, Tensor) else state
    return begun


def _settled(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group whose settings stay as they are now, whatever a scheduler does to them."""
    return {
        key: value if key == "params" else pytree.tree_map_only(Tensor, Tensor.clone, value)
        for key, value in group.items()
    }


def _twin_of(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: Tensor, state: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer of the same kind for one parameter alone."""
    twin = object.__new__(type(optimizer))
    twin.__dict__ |= optimizer.__dict__
    twin.__dict__.pop("step", None)  # a scheduler's, which would step the original
    twin.param_groups = [{**settings, "params": [parameter]}]
    twin.state = defaultdict(dict, {parameter: dict(state)} if state else {})
    return twin


def _twin(value: Tensor) -> Tensor:
    """The local tensor of a DTensor, whose memory waits for it; of a plain one, a counter, a copy."""
    return value.to_local() if isinstance(value, DTensor) else value.clone()


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
