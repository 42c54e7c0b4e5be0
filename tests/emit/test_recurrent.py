"""Loops of recurrent layers, beside torch's own, and what they hold."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.emit import recurrent
from autopar.ir.work import RECURRENT, temporary_bytes
from autopar.measure.memory import LiveBytes
from tests.rules.harness import make_call, resolve

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
STEPS, BATCH, WIDTH = 7, 5, 6


def given_to(name: str, width: int = WIDTH, batch: int = BATCH, steps: int = STEPS) -> dict[str, Tensor]:
    """What the operator reads, by torch's names of it, drawn at random."""
    count = GATES[name] * width
    sizes = {"gates": (steps, batch, count), "h": (batch, width), "c": (batch, width), "weight": (count, width)}
    drawn = {one: torch.randn(size, dtype=torch.float64) for one, size in sizes.items()}
    if name != "lstm":
        del drawn["c"]
    return drawn | ({"bias": torch.randn(count, dtype=torch.float64)} if name == "gru" else {})


def torchs(name: str, given: dict[str, Tensor], relu: bool) -> tuple[Tensor, ...]:
    """The same by torch's layer, whose inputs are the gates themselves."""
    width, count = given["h"].shape[1], given["gates"].shape[2]
    inputs, none = torch.eye(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    weights = [inputs, given["weight"], none, given.get("bias", none)]
    states = [given[one].unsqueeze(0) for one in ("h", "c") if one in given]
    function: Any = {"lstm": torch.lstm, "gru": torch.gru, "rnn": torch.rnn_relu if relu else torch.rnn_tanh}[name]
    told = states if name == "lstm" else states[0]
    made, *ends = function(given["gates"], told, weights, True, 1, 0.0, True, False, False)
    assert made.shape[2] == width
    return (made, ends[1][0]) if name == "lstm" else (made,)


CASES = [("lstm", False), ("gru", False), ("rnn", False), ("rnn", True)]


@pytest.mark.parametrize(("width", "batch", "steps"), [(6, 5, 7), (1, 1, 1), (3, 1, 2), (4, 2, 1)])
@pytest.mark.parametrize(("name", "relu"), CASES)
def test_states_and_gradients_are_those_of_torch(name: str, relu: bool, width: int, batch: int, steps: int) -> None:
    given = {key: one.requires_grad_() for key, one in given_to(name, width, batch, steps).items()}
    wanted = torchs(name, given, relu)
    more = (relu,) if name == "rnn" else ()
    plain = [one.detach() for one in given.values()]
    made = getattr(recurrent, name)(*plain, *more)
    made = made if isinstance(made, tuple) else (made,)
    for one, other in zip(made, wanted, strict=False):
        torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)
    grads = [torch.randn_like(one) for one in wanted]
    read = {"lstm": [*plain[1:], made[0], *made[2:]], "gru": [*plain, made[0]], "rnn": [*plain[1:], made[0], relu]}[
        name
    ]
    found = getattr(recurrent, f"{name}_backward")(*grads, *read)
    for key, one, other in zip(given, found, torch.autograd.grad(wanted, given.values(), grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11, msg=key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GATES)
def test_states_in_halves_are_near(name: str, dtype: torch.dtype) -> None:
    given = {key: one / 4 for key, one in given_to(name).items()}
    wanted, *_ = torchs(name, given, False)
    made = getattr(recurrent, name)(*(one.to(dtype) for one in given.values()), *((False,) if name == "rnn" else ()))
    made = made if isinstance(made, Tensor) else made[0]
    assert made.dtype == dtype and (made.double() - wanted).abs().max() < 0.01


@pytest.mark.parametrize("op", RECURRENT)
def test_a_loop_holds_what_it_is_said_to(op: str) -> None:
    """Beside its results, and what goes from step to step."""
    name, more = op.split(".")[1], (False,) if "rnn" in op else ()
    forward = given_to(name.removesuffix("_backward"), 16, 8, 200)
    args: list[Any] = [*forward.values()]
    if name != "lstm" and name.endswith("_backward"):
        made = getattr(recurrent, name.removesuffix("_backward"))(*args, *more)
        made, *rest = made if isinstance(made, tuple) else (made,)
        args = {
            "lstm_backward": lambda: [made, rest[0], *args[1:], made, *rest[1:]],
            "gru_backward": lambda: [made, *args, made],
            "rnn_backward": lambda: [made, *args[1:], made],
        }[name]()
    call = make_call(op, (*args, *more))
    with LiveBytes() as live:
        live.watch(args)
        results = resolve(op)(*args, *more)
    held = (
        live.peak
        - sum(one.nbytes for one in {id(one): one for one in args}.values())
        - sum(one.nbytes for one in (results if isinstance(results, tuple) else (results,)))
    )
    state = 8 * 8 * 16  # bytes of one
    assert abs(held - temporary_bytes(call.node, call.types)) <= 10 * state
