"""Numbers that forward finds as the call before has left them: as on one process, and no program for each."""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import autopar
from autopar._compat import pytree
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients
from tests.support.counting import (
    MODELS,
    WITH_TENSORS,
    Anneals,
    Branches,
    Counts,
    HasState,
    InTraining,
    Masks,
    Memories,
    Returns,
    counted,
)

PROGRAMS = {
    Branches: 4,
    InTraining: 3,
    Memories: 6,
}  # with which steps are found again; others have a first, and one of many


def same_numbers(parallel: nn.Module, plain: nn.Module) -> None:
    ours, theirs = counted(parallel), counted(plain)
    assert ours.keys() == theirs.keys()
    for name, right in theirs.items():
        assert type(ours[name]) is type(right), name
        (made, spec), (wanted, as_wanted) = pytree.tree_flatten(ours[name]), pytree.tree_flatten(right)
        assert spec == as_wanted, name
        for one, other in zip(made, wanted, strict=True):
            if isinstance(other, Tensor):
                near(one, other, 1e-5, name)
            else:
                assert type(one) is type(other) and one == pytest.approx(other, rel=1e-6), name


def loss_and_rest(given: Any) -> tuple[Tensor, Any]:
    return given if isinstance(given, Tensor) else given[0], () if isinstance(given, Tensor) else given[1:]


@pytest.mark.parametrize("kind", [*MODELS, *WITH_TENSORS], ids=lambda kind: kind.__name__)
def test_a_model_that_counts_trains_as_on_one_process(one: DeviceMesh, kind: type[nn.Module]) -> None:
    plain = kind()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(8):
        x = torch.randn(5, 8)
        losses = []
        for model in (parallel, plain):
            model.train(step not in (3, 6)).zero_grad()
            losses.append(loss_and_rest(model(x)))
            losses[-1][0].backward()
        near(losses[0][0], losses[1][0], 1e-5, f"loss of step {step}")
        assert losses[0][1] == losses[1][1]
        same_numbers(parallel, plain)
        same_gradients(plain, parallel)
        for (name, buffer), (_, right) in zip(parallel.named_buffers(), plain.named_buffers(), strict=True):
            near(buffer, right, 1e-5 if right.dtype == torch.float32 else 1e-2, name)
    assert len(parallel._autopar.prepared()) <= PROGRAMS.get(kind, 3)


def test_a_script_sets_it_anew(one: DeviceMesh) -> None:
    """Between calls, to another number, and to one of another type, which is another program."""
    plain = Anneals()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for value in (None, 10, None, 0.5, None):
        x = torch.randn(5, 8)
        for model in (plain, parallel):
            if value is not None:
                model.step = value
        near(parallel(x), plain(x), 1e-5, f"with {value}")
        same_numbers(parallel, plain)


def test_numbers_are_not_rounded_to_the_dtype_of_the_parameters(one: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    class Falls(Counts):
        def forward(self, x: Tensor) -> Tensor:
            self.scale = self.scale * 0.999
            return self.loss(x).float() * self.scale

    plain = Falls()
    parallel = autopar.compile(copy.deepcopy(plain), one, precision=policy)
    x = torch.randn(5, 8)
    first, *others = [parallel(x).item() for _ in range(4)]
    for number, other in enumerate(others, 1):
        assert other / first == pytest.approx(0.999**number, rel=1e-6)


def test_a_gradient_that_plans_the_step_again_finds_the_numbers_of_its_forward(one: DeviceMesh) -> None:
    class Beside(Branches):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.scale = self.scale * 0.5
            return super().forward(x), self.a(x) * self.scale * (1 if self.step < 3 else 2)

    plain = Beside()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(5):
        x = torch.randn(5, 8)
        for model in (parallel, plain):
            model.zero_grad()
            loss, beside = model(x)
            (loss + beside.sum() if step in (1, 4) else loss).backward()
        same_numbers(parallel, plain)
        same_gradients(plain, parallel)


def right_with_a_program_for_each(parallel: nn.Module, plain: nn.Module, x: Tensor, calls: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model is traced and planned for the")
        for step in range(calls):
            near(parallel(x), plain(x), 1e-6, f"step {step}")
            same_numbers(parallel, plain)


def test_a_number_that_python_needs_anew_in_each_call_is_refused(one: DeviceMesh) -> None:
    """Right with a program for each, as there may be few values; not for ever."""

    class Sizes(Counts):
        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            return self.loss(x[:, :8]) + sum(self.a(x).mean() for _ in range(self.step))

    plain = Sizes()
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.randn(5, 8)
    right_with_a_program_for_each(parallel, plain, x, calls=8)
    told = r"forward changes self\.step from call to call, and needs it as a number of Python's at .*test_counted.py"
    with pytest.raises(TraceError, match=told):
        parallel(x)


def test_a_list_that_grows_in_each_call_is_refused(one: DeviceMesh) -> None:
    class Grows(Counts):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            loss = self.loss(x)
            self.kept = [*self.kept, loss.detach()]
            return loss + sum(self.kept)

    plain = Grows()
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.randn(5, 8)
    right_with_a_program_for_each(parallel, plain, x, calls=8)
    with pytest.raises(TraceError, match=r"what forward keeps in self\.kept at .*test_counted.py.* grows"):
        parallel(x)


def test_a_copy_and_a_state_go_on_by_themselves(one: DeviceMesh) -> None:
    parallel = autopar.compile(Returns(), one)
    x = torch.randn(5, 8)
    assert [parallel(x)[1] for _ in range(3)] == [1, 2, 3]
    other = copy.deepcopy(parallel)
    assert [other(x)[1] for _ in range(2)] == [4, 5]
    assert parallel(x)[1] == 4


def test_a_mask_is_made_anew_where_batches_have_another_length(one: DeviceMesh) -> None:
    """A program for each length, and for the mask that it finds."""
    plain = Masks()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step, rows in enumerate((4, 4, 6, 6, 4, 6, 4)):
        x = torch.randn(rows, 8)
        for model in (parallel, plain):
            model.zero_grad()
            model(x).backward()
        same_numbers(parallel, plain)
        same_gradients(plain, parallel)
        assert len(parallel._autopar.prepared()) <= min(step + 1, 6)


def test_gradients_go_back_through_a_state_that_calls_hand_on(one: DeviceMesh) -> None:
    """Several calls, then one backward: time steps by the script's own loop. What is set in between counts."""

    class Recurrent(HasState):
        def forward(self, x: Tensor) -> Tensor:
            assert self.state is not None
            self.state = torch.tanh(self.a(x) + self.a(self.state))
            return self.b(self.state).square().mean()

    plain = Recurrent()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(2):
        steps, losses = torch.randn(3, 5, 8), list[Tensor]()
        for model in (parallel, plain):
            model.zero_grad()
            model.state = torch.full((5, 8), 0.3)
            losses.append(torch.stack([model(x) for x in steps]).sum())
            losses[-1].backward()
        near(losses[0], losses[1], 1e-5, "loss")
        same_gradients(plain, parallel)


def kind_is(value: Any, kind: type = float) -> bool:
    """What a default is was settled before anything stands for `float`."""
    return kind is float and isinstance(value, float)


WHAT_PYTHON_KNOWS: dict[str, Callable[[Any], Any]] = {
    "its text": lambda model: 2 if str(model.step) == "1" else 1,
    "a type": lambda model: 2.5 if kind_is(float(model.step)) else model.step,
    "a key": lambda model: {2: 2, 3: 3}.get(model.step, 1),
    "an index": lambda model: [3.0, 1.5, 2.5][model.step % 3],
    "a size": lambda model: len(torch.zeros(model.step)),
    "an error": lambda model: attempt(lambda: math.log(2 - model.step)),
    "bits": lambda model: (model.step << 2) ^ 1,
    "a power": lambda model: 2**model.step,
    "a member": lambda model: 2 if model.step in {1, 3} else 4,
    "rounded to digits": lambda model: round(model.step * 0.37, 1),
    "its bits": lambda model: attempt(lambda: model.step.bit_length()),
}


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:
        return 5


@pytest.mark.parametrize("what", WHAT_PYTHON_KNOWS)
def test_what_only_a_number_of_python_can_answer_has_a_program_of_its_own(one: DeviceMesh, what: str) -> None:
    class Asks(Counts):
        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            return self.loss(x) * WHAT_PYTHON_KNOWS[what](self)

    plain = Asks()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(5, 8)
    for step in (0, 1, 2, 0, 1):
        plain.step = parallel.step = step
        near(parallel(x), plain(x), 1e-6, f"step {step}")
        same_numbers(parallel, plain)
    assert len(parallel._autopar.prepared()) <= 3


def test_code_that_asks_for_its_class_is_told_the_one_of_python(one: DeviceMesh) -> None:
    class Asks(Counts):
        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            by = 2 if type(self.step) is int and isinstance(type(self), type) and type(x) is not type else 1
            made = type("Made", (object,), {"by": by})
            return self.loss(x) * made.by / self.step

    plain = Asks()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(3):
        x = torch.randn(5, 8)
        near(parallel(x), plain(x), 1e-6, f"step {step}")
        same_numbers(parallel, plain)
    assert not {"type", "int", "float"} & {*globals()}
    assert len(parallel._autopar.prepared()) == 1


def test_it_is_an_instance_of_its_class(one: DeviceMesh) -> None:
    class Asks(Counts):
        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            by = self.step if isinstance(self.step, int) and not isinstance(self.step, float) else 7
            match self.step:
                case 2:
                    by = by * 3
                case numbers.Number():
                    by = by * 5
                case _:
                    by = by * 11
            return self.loss(x) * copy.copy(by)

    plain = Asks()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(4):
        x = torch.randn(5, 8)
        near(parallel(x), plain(x), 1e-6, f"step {step}")
        same_numbers(parallel, plain)


def test_integers_may_be_larger_than_a_tensor_holds(one: DeviceMesh) -> None:
    """Python's have no end; what a program makes of them would have one."""

    class Grows(Counts):
        def forward(self, x: Tensor) -> Tensor:
            self.step = (self.step or 1) * 1_000_003
            return self.loss(x) * (self.step % 7)

    plain = Grows()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    right_with_a_program_for_each(parallel, plain, torch.randn(5, 8), calls=6)
    assert plain.step > 2**63


def test_lists_and_dicts_that_forward_makes_are_another_ones_in_each_call(one: DeviceMesh) -> None:
    """A script may put something into them; those that were there before are the same."""
    shared = [7]

    class Makes(Counts):
        def __init__(self) -> None:
            super().__init__()
            self.own = [8]

        def forward(self, x: Tensor) -> Tensor:
            self.made, self.table, self.of_all, self.also = [], {"a": [1]}, shared, self.own
            return self.loss(x)

    parallel = autopar.compile(Makes(), one)
    own = parallel.own
    for _ in range(3):
        parallel(torch.randn(5, 8))
        assert parallel.made == [] and parallel.table == {"a": [1]}
        parallel.made.append(1), parallel.table["a"].append(2)
        assert parallel.of_all is shared and parallel.also is own


def test_a_list_that_forward_writes_to_stays_the_same_list(one: DeviceMesh) -> None:
    plain = Memories()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    held = {model: model.memory for model in (plain, parallel)}
    for step in range(3):
        x = torch.randn(5, 8)
        for model in (plain, parallel):
            model(x)
        for ours, theirs in zip(held[parallel], held[plain], strict=True):
            near(ours, theirs, 1e-5, f"step {step}")


def test_a_gradient_goes_back_through_states_that_the_first_call_makes(one: DeviceMesh) -> None:
    """Which a program for the first call, and one for later ones, hand on."""

    class Recurrent(Counts):
        def __init__(self) -> None:
            super().__init__()
            self.states: tuple[Tensor, Tensor] | None = None

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.states or (x.new_zeros(5, 8), x.new_ones(5, 8))
            first = torch.tanh(self.a(x) + self.a(first))
            self.states = first, second * first
            return self.b(first + self.states[1]).square().mean()

    plain = Recurrent()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(2):
        steps, losses = torch.randn(3, 5, 8), list[Tensor]()
        for model in (parallel, plain):
            model.zero_grad()
            model.states = None
            losses.append(torch.stack([model(x) for x in steps]).sum())
            losses[-1].backward()
        near(losses[0], losses[1], 1e-5, "loss")
        same_gradients(plain, parallel)


class Telling(nn.Module):
    """Gives and keeps what only Python makes of numbers that it counts, and where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.tau, self.seen = nn.Linear(4, 4), 0, 1.0, {}

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        self.calls, self.tau = self.calls + 1, self.tau * 0.9
        self.seen = {"shape": x.shape, "tau": round(self.tau, 3)}
        told = {"tau": round(self.tau, 2), "of": [self.calls ^ 3, x.shape[:1]]}
        return self.inner(x).mean() / self.tau, told


def test_what_python_makes_of_counted_numbers_is_given_by_one_program(one: DeviceMesh) -> None:
    plain, x = Telling(), torch.randn(3, 4)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(4):
        (ours, told), (wanted, wanted_told) = parallel(x), plain(x)
        torch.testing.assert_close(ours, wanted)
        assert told == wanted_told and parallel.seen == plain.seen
        assert type(told["tau"]) is float and type(parallel.seen["shape"]) is type(told["of"][1]) is torch.Size
    assert len(parallel._autopar.prepared()) == 1
