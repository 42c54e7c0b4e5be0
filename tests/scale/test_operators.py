"""Every strategy of every rule: its closed form, with numbers put in, is what the strategy says in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
import torch

from autopar.assemble.liveness import holds_storage
from autopar.ir.graph import Node, Ref, TensorType
from autopar.ir.layout import local_type
from autopar.ir.mesh import Mesh
from autopar.ir.work import flops_of
from autopar.propose.strategies import Strategy, make_strategy, node_strategies
from autopar.rules.notation import Rule
from autopar.rules.patterns import PATTERNS
from autopar.rules.table import RULES, rule_of
from autopar.scale import operator_forms
from autopar.scale.forms import work_of
from cost_models.formulas import at, symbol
from tests.rules import samples_nn, samples_pointwise, samples_reduce, samples_shape
from tests.rules.harness import make_call

torch.manual_seed(0)
SAMPLES = {
    **samples_pointwise.samples(), **samples_shape.samples(), **samples_reduce.samples(), **samples_nn.samples(),
}  # fmt: skip
MESHES = [Mesh(("data", "tensor"), (2, 3)), Mesh(("data", "tensor", "third"), (2, 2, 3))]

Sample = tuple[Node, tuple[TensorType, ...], Rule]


def samples_of(op: str) -> Iterator[Sample]:
    for args, kwargs in SAMPLES[op]:
        call = make_call(op, args, kwargs)
        rule = call.rule
        if rule is not None:
            yield call.node, call.types, rule


def check(sample: Sample, strategy: Strategy, mesh: Mesh) -> None:
    node, types, rule = sample
    form = operator_forms(node, rule, strategy.roles, mesh, [type.dtype for type in types])
    here = {**form.sizes, **dict(zip(mesh.names, mesh.sizes, strict=True))}
    numbers = work_of(strategy.steps, mesh)
    told = f"{node} as {strategy.roles}"
    assert float(at(form.work.flops, here)) == numbers.flops, told  # both rounded once
    assert at(form.work.moved, here) == numbers.moved, told
    assert {key: at(payload, here) for key, payload in form.work.payload.items()} == numbers.payload, told
    assert {key: at(got, here) for key, got in form.work.received.items()} == {
        key: Fraction(got) if isinstance(got, int) else pytest.approx(got) for key, got in numbers.received.items()
    }, told
    held = 0
    if holds_storage(node.op):
        outputs = zip(node.outputs, strategy.gives, strict=True)
        held = sum(local_type(type, layout, mesh).nbytes for type, layout in outputs if type is not None)
    assert at(form.held, here) == held, told


def some(strategies: Sequence[Strategy], count: int) -> Sequence[Strategy]:
    """So many, spread over all of them; the first replicates everything."""
    return strategies[:: max(1, len(strategies) // count)]


def of_rules(sample: Sample, mesh: Mesh) -> list[Strategy]:
    """Loops have no closed forms."""
    return [strategy for strategy in node_strategies(*sample, mesh) if strategy.body not in PATTERNS]


@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_closed_forms_equal_numbers(op: str):
    for sample in samples_of(op):
        for strategy in some(of_rules(sample, MESHES[0]), 4):
            check(sample, strategy, MESHES[0])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_closed_forms_equal_numbers_for_every_strategy(op: str, mesh: Mesh):
    for sample in samples_of(op):
        for strategy in some(of_rules(sample, mesh), 60):
            check(sample, strategy, mesh)


def test_every_rule_is_covered():
    assert set(RULES) == set(SAMPLES)


def test_a_product_reads_like_the_textbook():
    """m k, k n -> m n with m over data and k over tensor: each rank does 2 MNK / (data tensor) flops."""
    node = Node("mm", "aten.mm.default", (Ref("a"), Ref("b")), (), (TensorType((8, 12), "float32"),))
    types = (TensorType((8, 6), "float32"), TensorType((6, 12), "float32"))
    rule = rule_of(node, types)
    assert rule is not None
    form = operator_forms(node, rule, ("m", "k"), Mesh(("data", "tensor"), (2, 3)), ["float32", "float32"])
    m, k, n, data, tensor = map(symbol, ("M", "K", "N", "data", "tensor"))
    assert form.work.flops == 2 * m * n * k / (data * tensor)
    assert form.held == 4 * m * n / data
    assert form.sizes == {"M": 8, "K": 6, "N": 12}


def test_a_softmax_over_a_split_dim_sums_twice_per_row():
    op = "aten._log_softmax.default"
    node, types, rule = next(sample for sample in samples_of(op) if len(sample[1][0].shape) == 2)
    row, column = (dim[0] for dim in rule.inputs[0])
    split = row if rule.bodies.get(row) else column
    mesh = Mesh(("data", "tensor"), (2, 3))
    form = operator_forms(node, rule, (split, ""), mesh, [types[0].dtype])
    itemsize, kept = 8, symbol((column if split == row else row).upper())
    assert form.work.payload == {("all_reduce", "data"): 2 * kept * itemsize}
    strategy = make_strategy(node, types, rule, (split, ""), mesh, *flops_of(node, types))
    check((node, types, rule), strategy, mesh)
