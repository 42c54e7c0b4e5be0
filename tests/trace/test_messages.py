"""What a TraceError says: the line, the cause, and advice that fits the cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.trace import TraceError, capture


class Model(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.does(x)).sum()


def control_flow(x: Tensor) -> Tensor:
    return x + 1 if x.mean() > 0 else x


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
        (control_flow, r"x \+ 1 if x.mean\(\) > 0 else x\): GuardOnDataDependent", True),
        (as_numpy, r"x.numpy\(\)\)\): RuntimeError: .numpy\(\) is not supported", True),
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
    assert ("Control flow and shapes may not depend" in str(caught.value)) == depends_on_values
    assert ("without autopar: it should run there first" in str(caught.value)) != depends_on_values


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
