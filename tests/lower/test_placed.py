"""How values lie in memory, said beforehand and looked at while programs run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar._compat import TorchDispatchMode, pytree
from autopar.emit import ops
from autopar.emit.emit import _Emitter
from autopar.ir.graph import Ref
from autopar.ir.mesh import Mesh
from autopar.ir.strides import contiguous, elementwise, viewed
from autopar.lower import lower
from autopar.lower.placed import Placing
from autopar.lower.program import Operator, Run
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from tests.support.families import family
from tests.support.lockstep import Lockstep, PerRank, run_all
from tests.support.machines import FAST
from tests.support.residence import ResidenceSampler

CASES = [("block", (2, 2), 3), ("rotary", (2,), 2), ("fno", (2, 2), 1), ("cnn", (2,), 1), ("parts", (2,), 1)]
CASES = [pytest.param(*case, id=case[0]) for case in CASES]
CASES += [
    pytest.param(name, (2, 2), 2, id=name, marks=pytest.mark.slow) for name in ("opt", "bert", "t5", "llama", "vit")
]


class Made(TorchDispatchMode):
    """Bytes of new storages that operators inside the context return."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: dict[int, int] = {}
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {one.untyped_storage()._cdata for one in tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for one in tensors(result):
            storage = one.untyped_storage()
            if storage._cdata not in before:
                self.nbytes[storage._cdata] = storage.nbytes()
                self.kept.append(storage)
        return result


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def told(tensor_shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Strides that mean something."""
    return [stride for size, stride in zip(tensor_shape, strides, strict=True) if size != 1]


class Watched:
    """What the first rank's values and products are seen to be: value -> tensor, product -> bytes that it copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[Ref, Tensor] = {}
        self.copied: dict[str, int] = {}
        bind = _Emitter._bind_value

        def noted(emitter: Any, value: int, ref: Ref, made: fx.Node) -> None:
            made.meta.setdefault("ref", ref)  # the first name that it gets
            bind(emitter, value, ref, made)

        monkeypatch.setattr(_Emitter, "_bind_value", noted)
        monkeypatch.setattr(Lockstep, "apply", self.apply)

    def apply(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        made: PerRank = []
        for rank in range(len(next(iter(values.values())))):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda part, rank=rank: values[part][rank])
            if node.op == "call_method":
                made.append(getattr(args[0], str(node.target))(*args[1:], **kwargs))
                continue
            with Made() as seen:
                made.append(node.target(*args, **kwargs))  # type: ignore[operator]
            ref = node.meta.get("ref")
            if rank == 0 and ref is not None:
                self.values[ref] = made[0]
                if node.target is ops.einsum:
                    result = made[0].untyped_storage()._cdata
                    self.copied[ref.name] = sum(size for key, size in seen.nbytes.items() if key != result)
        return made


def copied_by_program(plan: Plan) -> dict[str, int]:
    program = lower(plan, None, Pricer.on(plan.mesh, FAST, "adamw"))
    return {
        instruction.what.node: sum(buffer.nbytes for buffer in instruction.takes)
        for _, instruction in program
        if isinstance(instruction, Run) and isinstance(instruction.what, Operator)
    }


@pytest.mark.parametrize(("name", "sizes", "count"), CASES)
def test_values_lie_where_it_is_said_and_products_copy_what_is_said(
    monkeypatch: pytest.MonkeyPatch, name: str, sizes: tuple[int, ...], count: int
) -> None:
    case = family(name)
    sampler = ResidenceSampler(case.graph, Mesh(("data", "tensor")[: len(sizes)], sizes))
    compared = 0
    for seed in range(count):
        plan, watched = sampler.draw(seed), Watched(monkeypatch)
        run_all(plan, case.values(plan.graph), case.seed)
        placing, takes = Placing(plan), copied_by_program(plan)
        for ref, seen in watched.values.items():
            shape, strides = placing.given(ref)
            assert tuple(seen.shape) == shape, (seed, ref)
            assert told(shape, seen.stride()) == told(shape, strides), (seed, ref, plan.graph.by_name[ref.name].op)
            compared += 1
        for product, copied in watched.copied.items():
            assert takes[product] == copied, (seed, product, plan.graph.by_name[product].args[0])
    assert compared > 10


def test_the_copy_of_a_product_is_there_to_be_found() -> None:
    """Or the law above would say nothing."""
    case = family("block")
    sampler = ResidenceSampler(case.graph, Mesh(("data", "tensor"), (2, 2)))
    found = 0
    for seed in range(3):
        plan = sampler.draw(seed)
        found += sum(bool(Placing(plan).copied(node.name)) for node in plan.graph.nodes)
    assert found


# --- strides ---------------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, shape: tuple[int, ...], repeated: float = 0.2) -> Tensor:
    """Of that shape, permuted, with gaps, or with that chance repeated."""
    order = [*range(len(shape))]
    rng.shuffle(order)
    whole = torch.zeros([shape[dim] * rng.choice([1, 1, 2]) for dim in order])
    cut = whole[tuple(slice(0, shape[dim]) for dim in order)].permute([order.index(dim) for dim in range(len(shape))])
    if rng.random() < repeated:
        dim = rng.randrange(len(shape))
        cut = cut.narrow(dim, 0, 1).expand(shape)
    return cut


def test_views_are_views_where_torch_has_them() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randrange(1, 5)))
        x = drawn(rng, shape)
        parts = [p for size in shape for p in rng.choice([(size,), (1, size)] + [(2, size // 2)] * (size % 2 == 0))]
        while len(parts) > 1 and rng.random() < 0.6:
            at = rng.randrange(len(parts) - 1)
            parts[at : at + 2] = [parts[at] * parts[at + 1]]
        found = viewed(shape, x.stride(), tuple(parts))
        try:
            real = x.view(parts)
        except RuntimeError:
            assert found is None, (shape, x.stride(), parts)
        else:
            assert found is not None, (shape, x.stride(), parts)
            assert told(tuple(parts), found) == told(tuple(parts), real.stride()), (shape, x.stride(), parts)


def test_sums_lie_as_torch_lays_them() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        shape = tuple(rng.choice([1, 2, 3, 4]) for _ in range(rng.randrange(1, 5)))
        operands = [
            drawn(rng, shape, repeated=0.0),
            drawn(rng, tuple(rng.choice([1, size]) for size in shape)[rng.randrange(2) :] or (1,)),
        ]
        made = operands[0] + operands[1]
        found = elementwise(shape, [(tuple(one.shape), one.stride()) for one in operands])
        assert told(shape, found) == told(shape, made.stride()), [(one.shape, one.stride()) for one in operands]


def test_contiguous_is_what_torch_calls_so() -> None:
    for shape in itertools.product([1, 2, 3], repeat=3):
        assert contiguous(shape) == torch.empty(shape).stride()
