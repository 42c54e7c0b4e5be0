"""What a TraceError says: the line, the cause, and advice that fits the cause."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn

from autopar.emit.run_all_ranks import fake_ranks
from autopar.errors import TraceError
from autopar.ir.mesh import Mesh
from autopar.trace import capture, graph_of


class Model(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.does(x)).sum()


def as_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy())


def missing_module(x: Tensor) -> Tensor:
    import nothing_there  # type: ignore[import-not-found]

    return nothing_there.of(x)


def own_error(x: Tensor) -> Tensor:
    raise ValueError("heads must divide 4")


def wrong_shapes(x: Tensor) -> Tensor:
    return x @ torch.ones(3, 3)


def missing_key(x: Tensor) -> Tensor:
    return x * {"b": 2}["a"]


@pytest.mark.parametrize(
    ("does", "told", "depends_on_values"),
    [
        (as_numpy, r"x.numpy\(\)\)\): it makes a numpy array of a tensor .*array of it behind the call", True),
        (missing_module, r"import nothing_there .*: ModuleNotFoundError: No module named 'nothing_there'\.", False),
        (own_error, r"raise ValueError.*: ValueError: heads must divide 4\.", False),
        (wrong_shapes, r"torch.ones\(3, 3\)\): RuntimeError: .*got \[2, 4\] X \[3, 3\]\.", False),
        (missing_key, r"KeyError: 'a'\.", False),
    ],
)
def test_advice_fits_the_cause(does: Callable[[Tensor], Tensor], told: str, depends_on_values: bool) -> None:
    with pytest.raises(TraceError, match=told) as caught:
        capture(Model(does), (torch.randn(2, 4),), {})
    assert __file__ in str(caught.value)
    assert ("what forward computes with, have functions of torch" in str(caught.value)) == depends_on_values
    alone = "the model does not run with its inputs, [0] float32[2, 4], at "
    assert str(caught.value).startswith(alone) != depends_on_values
    assert ("it fails in the same way on tensors of these shapes" in str(caught.value)) != depends_on_values


class Skipped(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("skipped")
        self.code = code


def skipped(x: Tensor) -> Tensor:
    raise Skipped(7)


@pytest.mark.parametrize(("does", "kind"), [(own_error, ValueError), (missing_key, KeyError), (skipped, Skipped)])
def test_a_script_that_expects_an_exception_of_its_model_catches_it(
    does: Callable[[Tensor], Tensor], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="the model does not run with its inputs") as caught:
        capture(Model(does), (torch.randn(2, 4),), {})
    assert isinstance(caught.value, TraceError) and type(caught.value).__name__ == "TraceError"
    assert getattr(caught.value, "code", 7) == 7


def test_what_runs_without_autopar_is_not_blamed_on_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_followed(*args: object, **given: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("torch.export.export", not_followed)
    with pytest.raises(TraceError) as caught:
        capture(Model(lambda x: x), (torch.randn(2, 4),), {})
    told = str(caught.value)
    assert told.startswith("the model cannot be captured as one graph") and "RuntimeError: a defect." in told
    assert "Without autopar the model runs with these inputs, but torch.export cannot follow it" in told


def test_wrong_shapes_are_one_sentence_that_names_them(capfd: pytest.CaptureFixture[str]) -> None:
    """And no page of torch's log."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
            return (self.linear(x) + scale * y).mean()

    with pytest.raises(TraceError) as caught:
        capture(Sum(), (), {"x": torch.zeros(8, 4, 8), "y": torch.zeros(7, 4, 8)})
    told = str(caught.value)
    assert told.startswith("the model does not run with its inputs, x float32[8, 4, 8], y float32[7, 4, 8], at ")
    assert "(return (self.linear(x) + scale * y).mean())" in told and "\n" not in told
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\\"])
def test_a_name_that_code_cannot_hold_is_refused(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module(name, nn.ReLU())
    with pytest.raises(TraceError, match=r"^module .* has a double quote, a backslash or a line break in its name"):
        capture(model, (torch.randn(2, 4),), {})


@pytest.mark.parametrize("name", ["a'b", "{x}", "#", "größe 🙂", "</td><script>"])
def test_any_other_name_is_a_name(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module(name, nn.Linear(4, 4))
    capture(model, (torch.randn(2, 4),), {})


def test_a_cache_is_refused_with_the_setting_that_leaves_it_out() -> None:
    from transformers import DynamicCache

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, past_key_values: object) -> Tensor:
            return self.linear(x).mean()

    with pytest.raises(TraceError, match=r"set use_cache=False \(in the call, or as model.config.use_cache = False\)"):
        capture(Caching(), (torch.randn(2, 4),), {"past_key_values": DynamicCache()})


def flex(x: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    heads = x.repeat(2, 4, 64, 4)
    return flex_attention(heads, heads, heads)[0, 0, :2, :4]


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[:1], x], layout=torch.jagged).values()


class Behind(nn.Module):
    """What is asked, behind a layer or in front of it."""

    def __init__(self, does: Callable[[Tensor], Tensor], trained: bool) -> None:
        super().__init__()
        self.linear, self.does, self.trained = nn.Linear(4, 4), does, trained

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self.linear(x)).sum() if self.trained else self.linear(self.does(x)).sum()


@pytest.mark.parametrize(
    ("does", "trained", "told"),
    [
        (flex, True, "FlexAttention is not built: use scaled_dot_product_attention"),
        (flex, False, "FlexAttention is not built: use scaled_dot_product_attention"),
        (nested, True, "Sequences of several lengths in one tensor are not built: pad them"),
    ],
)
def test_attention_that_is_not_built_is_refused(does: Callable[[Tensor], Tensor], trained: bool, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        capture(Behind(does, trained), (torch.randn(2, 4),), {})


def test_an_array_among_the_inputs_is_told_so() -> None:
    model = Model(lambda x: x * 2)
    with pytest.raises(TraceError, match=r"graph: an input is a numpy array\. Give tensors: torch.from_numpy"):
        capture(model, (torch.randn(2, 4).numpy(),), {})


def test_the_half_of_a_model_that_could_be_traced_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def told(x: Tensor) -> Tensor:
        print("seen", file=sys.stderr)
        return as_numpy(x)

    with pytest.raises(TraceError, match="numpy"):
        capture(Model(told), (torch.randn(2, 4),), {})
    said = capfd.readouterr().err
    assert "seen" in said and "def forward" not in said


@pytest.mark.parametrize("name", ["cholesky", "inv"])
def test_an_operator_that_does_not_check_its_operands_is_traced(name: str) -> None:
    checks_not = getattr(torch.linalg, f"{name}_ex")
    graph_of(capture(Model(lambda x: checks_not(x @ x.T + torch.eye(4))[0] @ x), (torch.randn(4, 4),), {}))


@pytest.mark.parametrize("call", ["gathered", "a number", "summed", "gathered for autograd", "sent"])
def test_a_collective_of_forward_is_refused(call: str) -> None:
    """It gathered the whole batch once for each rank: another loss, without a word."""

    def gathered(x: Tensor) -> Tensor:
        every = [torch.zeros_like(x) for _ in range(2)]
        dist.all_gather(every, x)
        return torch.cat(every)

    def a_number(x: Tensor) -> Tensor:  # gloo's own words for it say nothing of a collective
        every = [torch.tensor(0) for _ in range(2)]
        dist.all_gather(every, torch.tensor(x.shape[0]))
        return x * every[0]

    def summed(x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    def sent(x: Tensor) -> Tensor:
        from_first = x.clone()
        dist.broadcast(from_first, 0)
        return from_first

    def for_autograd(x: Tensor) -> Tensor:
        return torch.cat(torch.distributed.nn.all_gather(x))

    calls = {
        "gathered": gathered,
        "a number": a_number,
        "summed": summed,
        "gathered for autograd": for_autograd,
        "sent": sent,
    }
    with (
        fake_ranks(Mesh(("data",), (2,))),
        pytest.raises(TraceError, match=r"calls a collective itself.*leave the collective out where the model runs"),
    ):
        capture(Model(calls[call]), (torch.randn(2, 4),), {})


REPEATS = torch.tensor([2, 0, 1, 1])
SIZES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "repeats": (
        lambda x: torch.repeat_interleave(x, REPEATS + (x[0] > 100), dim=1),
        lambda x: torch.repeat_interleave(x, REPEATS + (x[0] > 100), dim=1, output_size=4),
        "say how long it becomes: output_size=",
    ),
    "counts": (
        lambda x: torch.bincount((x[:, 0] > 0).long())[:1] * x,
        lambda x: torch.bincount((x[:, 0] > 0).long(), minlength=2)[:1] * x,
        "say how many counts it gives: minlength=",
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_said_of_sizes_that_hang_on_values_helps(name: str) -> None:
    refused, instead, told = SIZES[name]
    with pytest.raises(TraceError, match=rf"depends on values at .*, and a program has one shape; {told}"):
        capture(Model(refused), (torch.randn(2, 4),), {})
    x = torch.randn(2, 4)
    torch.testing.assert_close(instead(x), refused(x))
    graph_of(capture(Model(instead), (x,), {}))


@pytest.mark.parametrize("is_held", [False, True])
def test_numbers_of_a_generator_are_refused(is_held: bool) -> None:
    held = torch.Generator().manual_seed(0)

    def drawn(x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=held if is_held else torch.Generator().manual_seed(0))

    with pytest.raises(TraceError, match=r"forward draws from a torch.Generator at .*: leave generator= out, or make"):
        capture(Model(drawn), (torch.randn(2, 4),), {})


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_a_loss_that_torch_traces_wrong_is_refused() -> None:
    """Where it is right again, this is to go."""
    x, y = torch.randn(2, 4), torch.tensor([[0, 1, -1, 0], [2, -1, 0, 0]])
    model = Model(lambda x: nn.functional.multilabel_margin_loss(x, y))
    model.linear = nn.Identity()
    traced = torch.export.export(model, (x,)).run_decompositions().module()
    assert not torch.allclose(traced(x), model(x))
    with pytest.raises(
        TraceError, match=r"multilabel_margin_loss at .*: compute that loss of what the parallel module"
    ):
        capture(model, (x,), {})


@pytest.mark.filterwarnings("ignore:.*_register_pytree_node. is deprecated:FutureWarning")  # torch's, of itself
def test_a_module_as_an_argument_is_told_as_such() -> None:
    with pytest.raises(TraceError, match=r"an argument is, or holds, a module .* Make a module a part of the model"):
        capture(Model(lambda x: x["x"]), ({"x": torch.randn(2, 4), "head": nn.Linear(2, 2)},), {})


@pytest.mark.parametrize(("given", "kind"), [(range(3), "range"), (torch.float32, "torch.dtype")], ids=str)
def test_an_object_that_is_no_container_is_named_by_its_class(given: object, kind: str) -> None:
    with pytest.raises(
        TraceError, match=rf"takes or gives an object of a class of its own \({kind}\)\. Take and return"
    ):
        capture(Model(lambda x: x["x"].sum()), ({"x": torch.randn(2, 4), "more": given},), {})
