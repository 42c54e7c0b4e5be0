"""Does a user's rule tell the truth? Its operator is run whole, and split in every way that the rule offers.

What runs is what a plan would run: the operator in a graph of its own, with a choice for it, lowered and emitted, on
all ranks in this process (`autopar.emit.run_all_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.assemble.problem import output_name
from autopar.decide.decide import choose
from autopar.decide.referee import refereed
from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.emit.writer import target_of
from autopar.ir.graph import Const, Graph, Node, Ref, Result, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Rules, rule_in
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, propose
from autopar.rules.outside import given
from autopar.rules.patterns import is_pattern
from autopar.rules.table import rule_of
from cost_models.hardware import Hardware

MESHES = (Mesh(("x",), (2,)), Mesh(("x",), (3,)), Mesh(("x", "y"), (2, 2)))
TOLERANCE = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-4,
    "complex64": 1e-4,
    "bfloat16": 4e-2,
    "float16": 1e-2,
}
CHECKED, SUM = "checked", "aten.sum.dim_IntList"


def check_rule(rules: Rules | Iterable[Rules], op: str, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Run `op` ("toy.scaled_sum.default") on these arguments whole, and split in every way that its rule and the
    patterns of `rules` offer, on 2, on 3 and on 2 x 2 ranks; returns the ways, in words.

    Give random tensors, in float64 where the kernel has it, whose sizes are multiples of 12, on the CPU. An operator
    that backward calls is checked by itself, with its own arguments. Raises ValueError where pieces put together are
    not what the whole operator gives, to 1e-10 in float64; where the rule offers nothing; where a factor divides on
    none of these meshes; and for arguments that prove nothing. Needs a process without a process group.
    """
    brought = given(rules)
    if rule_in(brought, op) is None and not any(one.patterns for one in brought):
        known = ", ".join(name for one in brought for name in one.operators)
        raise ValueError(f"no rule for {op} is given here, only for {known or 'nothing'}")
    sample = _Sample(brought, op, args, kwargs)
    ways: dict[str, None] = {}
    tried: set[str] = set()
    for mesh in MESHES:
        with fake_ranks(mesh) as device_mesh:
            for strategy in sample.strategies(mesh):
                told = _told(strategy, mesh)
                sample.compare(strategy, mesh, device_mesh, told)
                ways[told] = None
                tried.update(strategy.roles)
    rule = rule_of(sample.node, sample.types)
    sizes_of = {} if rule is None else {factor: rule.sizes[factor] for factor in rule.splittable}
    if left := {factor: size for factor, size in sizes_of.items() if factor not in tried}:
        sizes = ", ".join(f"{factor} ({size})" for factor, size in left.items())
        raise ValueError(f"{op}: {sizes} could not be split over 2 or 3 ranks; give sizes that are multiples of 12")
    if not ways:
        raise ValueError(f"{op}: the rules offer no way to split it at these sizes; every rank would run all of it")
    return tuple(ways)


class _Sample:
    """The operator with arguments, and what it gives whole."""

    def __init__(self, rules: tuple[Rules, ...], op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.op, self.operands = op, list[Tensor]()
        target = _registered(op)
        plain = (
            tuple(self._plain(arg) for arg in args),
            tuple((k, self._plain(arg)) for k, arg in sorted(kwargs.items())),
        )
        self.whole = _results(target, args, kwargs)
        _check_telling(op, self.operands, self.whole, _results(target, args, kwargs))
        outputs = tuple(None if one is None else _type_of(one) for one in self.whole)
        self.types = tuple(map(_type_of, self.operands))
        self.node = Node(CHECKED, op, *plain, outputs, outside=rules)
        self.hardware = Hardware.known("cpu-gloo")

    def _plain(self, arg: Any) -> Any:
        match arg:
            case Tensor():
                self.operands.append(arg)
                return Ref(f"operand{len(self.operands) - 1}")
            case list() | tuple():
                return tuple(self._plain(part) for part in arg)
            case torch.dtype():
                return Const("dtype", str(arg).removeprefix("torch."))
            case _:
                return arg

    def strategies(self, mesh: Mesh) -> Iterator[Strategy]:
        """Those that split something, and whose terms of sums can be made."""
        found, _ = propose(self.graph((), 1), mesh)
        for strategy in found[CHECKED]:
            if any(self.operands[place].dtype == torch.bool for place in _partial(strategy)):
                continue
            if is_pattern(strategy.body) or any(strategy.roles):
                yield strategy

    def graph(self, partial: Sequence[int], terms: int) -> Graph:
        """The operator alone; operands at the places `partial` are sums of so many terms each."""
        nodes: list[Node] = []
        for place, type in enumerate(self.types):
            name = f"operand{place}"
            if place in partial:
                many = TensorType((terms, *type.shape), type.dtype)
                nodes.append(Node(f"terms{place}", "input", (), (), (many,), target=f"args[{place}]"))
                kept = (("dtype", Const("dtype", type.dtype)),)
                nodes.append(Node(name, SUM, (Ref(f"terms{place}"), (0,)), kept, (type,)))
            else:
                nodes.append(Node(name, "input", (), (), (type,), target=f"args[{place}]"))
        nodes.append(self.node)
        there = [place for place, type in enumerate(self.node.outputs) if type is not None]
        results = tuple(Result("output", str(place), Ref(CHECKED, place)) for place in there)
        return Graph(tuple(nodes), results).under(self.node.outside)

    def compare(self, strategy: Strategy, mesh: Mesh, device_mesh: Any, told: str) -> None:
        """Raises ValueError where the pieces are not what the whole operator gives."""
        partial = _partial(strategy)
        graph, values = self.graph(partial, mesh.ranks), dict[str, Tensor]()
        for place, value in enumerate(self.operands):
            name = f"terms{place}" if place in partial else f"operand{place}"
            values[name] = _terms(value, mesh.ranks) if place in partial else value
        try:
            plan = _plan(graph, strategy, mesh, self.hardware)
            made = run(plan, device_mesh, values).results
        except Exception as error:  # whatever the user's kernel says to pieces that it does not take
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{self.op}, {told}: the pieces do not fit together ({type(error).__name__}: {reason})"
            ) from error
        for place, whole in enumerate(self.whole):
            found = made.get(("output", str(place)))
            if whole is None or found is None:
                continue
            where = f"{self.op}, {told}: result {place}"
            if found.shape != whole.shape or found.dtype != whole.dtype:
                raise ValueError(
                    f"{where} is {_type_of(found)} put together, whole it is {_type_of(whole)}; an argument that holds "
                    "a size needs an entry in OperatorRule(local=...)"
                )
            tolerance = TOLERANCE.get(str(whole.dtype).removeprefix("torch."), 0.0)
            if not torch.allclose(found, whole, rtol=tolerance, atol=tolerance, equal_nan=True):
                off = (found.to(torch.complex128) - whole.to(torch.complex128)).abs().max()
                raise ValueError(
                    f"{where} is not what the whole operator gives, by {float(off):.3g} at most; mark the factor with "
                    "! if it cannot be split, and leave a linear alternative (| 0) out if sums do not pass through"
                )


def _plan(graph: Graph, strategy: Strategy, mesh: Mesh, hardware: Hardware) -> Any:
    """The graph with the strategy for the operator, and operands that come as it takes them."""
    offered, _ = propose(graph, mesh)
    picks: dict[str, Strategy] = {CHECKED: strategy}
    for place, takes in enumerate(strategy.takes):
        name = f"operand{place}"
        if f"terms{place}" in offered:
            picks[name] = next(one for one in offered[name] if one.gives[0] == takes)
            picks[f"terms{place}"] = _source(picks[name].takes[0])
        else:
            picks[name] = _source(takes)
    for result in graph.results:
        assert result.ref is not None
        gives = strategy.gives[result.ref.index]
        picks[output_name(result.target)] = _source(tuple(REPLICATE if isinstance(p, Partial) else p for p in gives))
    pricer = Pricer.on(mesh, hardware, "none")
    choices, deliveries = choose(graph, picks.__getitem__, pricer)
    return refereed(graph, choices, deliveries, pricer, objective=None, bound=0.0, memory=None, outputs="sharded")


def _source(layout: Layout) -> Strategy:
    return Strategy(("",) * len(layout), (), (layout,), "", (), 1, ())


def _partial(strategy: Strategy) -> list[int]:
    """Places of operands that are sums over ranks."""
    return [place for place, takes in enumerate(strategy.takes) if any(isinstance(one, Partial) for one in takes)]


def _told(strategy: Strategy, mesh: Mesh) -> str:
    """`a over x=2, sum of operand 0 over y=2`."""
    words = [
        f"{f'sum of operand {role[1:]}' if role.startswith('+') else role} over {name}={size}"
        for role, name, size in zip(strategy.roles, mesh.names, mesh.sizes, strict=True)
        if role
    ]
    return ", ".join([*([strategy.body] if is_pattern(strategy.body) else []), *words])


def _registered(op: str) -> Callable[..., Any]:
    try:
        target = target_of(op)
    except ValueError as error:
        raise ValueError(f"{op} is no operator that torch knows; import the library that registers it") from error
    if getattr(getattr(target, "_schema", None), "is_mutable", False):
        raise ValueError(f"{op} writes to its arguments, and a plan has only operators that make new tensors")
    return target


def _results(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor | None]:
    with torch.no_grad():
        made = target(*args, **kwargs)
    return list(made) if isinstance(made, (tuple, list)) else [made]


def _check_telling(
    op: str, operands: Sequence[Tensor], once: Sequence[Tensor | None], again: Sequence[Tensor | None]
) -> None:
    """Raises ValueError where numbers prove nothing."""
    for one, other in zip(once, again, strict=True):
        if one is not None and other is not None and not torch.equal(one.nan_to_num(), other.nan_to_num()):
            raise ValueError(f"{op} gives other numbers each time: an operator that draws may not have a rule")
    for place, value in enumerate(operands):
        if value.is_floating_point() and value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            raise ValueError(f"{op}: all numbers of operand {place} are equal, which proves little; give random ones")


def _terms(value: Tensor, count: int) -> Tensor:
    """So many random terms whose sum it is."""
    draw = torch.randn if value.is_floating_point() or value.is_complex() else _integers
    terms = [draw(value.shape, dtype=value.dtype) for _ in range(count - 1)]
    return torch.stack([*terms, value - sum(terms, torch.zeros_like(value))])


def _integers(shape: Any, dtype: Any) -> Tensor:
    return torch.randint(-9, 9, shape, dtype=dtype)


def _type_of(value: Tensor) -> TensorType:
    return TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."))
