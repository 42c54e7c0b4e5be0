"""Policies that split every activation over two axes or three: Optimus, Tesseract's 2.5D, 3D.

    optimus-2d  on the last two axes (r, c): activations lie in blocks, tokens along r and features along c, and all
                products with weights are SUMMA in panels, of which no rank has more than two of each operand at once
    2.5d        the same, while the axis before these two splits tokens once more; it has a copy of all weights
    3d          on the last three axes (i, j, l): tokens along i and one of j and l, features along the other. A product
                with a weight gathers tokens along the one and sums features along the other, so that these two change
                places from one linear layer to the next

What lies between products has its features split, too: norms sum their statistics over the axis, attention has its
heads split, a loss its classes. Where an operator cannot split features it splits something else, so that no
activation is whole on any rank.

Xu and You, "An Efficient 2D Method for Training Super-Large Deep Learning Models" (Optimus, IPDPS 2023); Wang et al.,
"Tesseract" (ICPP 2022); Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks" (2021).
They store weights of 3D in an order of their own; here rows lie in mesh order (docs/design/0007), which moves more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, Placement, Shard
from autopar.ir.mesh import Mesh
from autopar.propose.strategies import Strategy, operand_types
from autopar.rules.products import rule_of_product
from autopar.search.policy_axis import Strategies, in_walking_order, prefer
from autopar.search.sequence_policies import DoesNotApply

OPTIMUS, TESSERACT, CUBE = "optimus-2d", "2.5d", "3d"
AXES: Mapping[str, int] = {OPTIMUS: 2, TESSERACT: 3, CUBE: 3}  # so many axes at the end of the mesh are the policy's
SUMMA = "SUMMA"

# The dim that each axis of the grid splits; or what a value is made of, where it hangs on no input.
Dims = tuple[int | None, ...]
Lies = Dims | str
WEIGHT, FREE = "weight", "free"  # gradients of weights are "weight", too
Kept = tuple[tuple[Strategy, ...], tuple[Lies, ...], bool]


def grid_of(policy: str, mesh: Mesh) -> tuple[int, ...]:
    """The axes over which the policy splits activations. Raises DoesNotApply where the mesh has too few, or where they
    are not of the sizes that the algorithm needs.
    """
    count, sizes = AXES[policy], mesh.sizes
    example = ",".join(f"{name}=2" for name in "ijl"[:count])
    if len(sizes) < count:
        raise DoesNotApply(
            f"policy {policy} needs {count} mesh axes or more, mesh {mesh} has {len(sizes)}; give --mesh {example}"
        )
    if policy == CUBE and (len({*sizes[-3:]}) > 1 or sizes[-1] == 1):
        raise DoesNotApply(f"policy {policy} needs three axes of one size, mesh {mesh} has not; give --mesh {example}")
    if 1 in sizes[-2:]:
        raise DoesNotApply(f"policy {policy} splits over the last two axes, one of mesh {mesh} has one rank")
    return tuple(range(len(sizes)))[-3 if policy == CUBE else -2 :]


def on_a_grid(policy: str, mesh: Mesh, graph: Graph, strategies: Strategies) -> dict[str, tuple[Strategy, ...]]:
    """The strategies that the policy would use on its axes. Raises DoesNotApply: to a model of which no product can be
    run so.
    """
    axes = grid_of(policy, mesh)
    walk = _Grid(axes, graph, strategies, _in_a_cube if policy == CUBE else _in_blocks)
    kept = walk.run()
    if not walk.products:
        where = ",".join(f"{mesh.names[axis]}={mesh.sizes[axis]}" for axis in axes)
        told = "batch and features" if policy == CUBE else "batch, features and panels"
        raise DoesNotApply(f"policy {policy} on {where}: no product of the model runs so, as {told} have to divide")
    return kept


class _Grid:
    """A walk through the graph, which keeps strategies and learns how every value lies. The first of the axes splits
    the batch, the last one features. `product`: how the policy does a product with activations; None where it cannot.
    `products`: how many run so.
    """

    def __init__(self, axes: tuple[int, ...], graph: Graph, strategies: Strategies, product: Product) -> None:
        self.axes, self.graph, self.strategies, self.product = axes, graph, strategies, product
        self.node_of = graph.by_name
        self.lies: dict[str, tuple[Lies, ...]] = {}
        self.known: dict[object, Kept] = {}
        self.products = 0

    def run(self) -> dict[str, tuple[Strategy, ...]]:
        kept: dict[str, tuple[Strategy, ...]] = {}
        outputs = {result.target: result.ref for result in self.graph.results if result.kind == "output"}
        for node in in_walking_order(self.graph):
            options = self.strategies[node.name]
            read = (*node.operands, *filter(None, [outputs.get(node.target)] if node.op == "tangent" else []))
            lie = tuple(self.lies[ref.name][ref.index] for ref in read)
            key = (id(options), node.op, node.outputs, lie)
            if key not in self.known:  # equal nodes share one tuple, which is what pricing them once rests on
                self.known[key] = (
                    self.source(node, options, lie) if node.is_source else self.operator(node, options, lie)
                )
            kept[node.name], self.lies[node.name], is_product = self.known[key]
            self.products += is_product
        return kept

    def at(self, layout: Layout) -> tuple[Placement, ...]:
        return tuple(layout[axis] for axis in self.axes)

    def lie(self, layout: Layout) -> Dims:
        return tuple(place.dim if isinstance(place, Shard) else None for place in self.at(layout))

    # --- sources -----------------------------------------------------------------------------------------------------

    def source(self, node: Node, options: tuple[Strategy, ...], like: tuple[Lies, ...]) -> Kept:
        (type,) = node.outputs
        assert type is not None
        if node.op == "parameter":
            return prefer(options, self._is_in_blocks, self._is_along_features), (WEIGHT,), False
        if node.op not in ("input", "tangent"):
            return options, (FREE,), False
        wanted = like[0] if like else self.as_a_batch(type)
        kept = prefer(options, lambda option: self.lie(option.gives[0]) == wanted, self._is_whole)
        return kept, (self.lie(kept[0].gives[0]),), False

    def as_a_batch(self, type: TensorType) -> Dims:
        """Tokens by all axes but the last, which splits features where there are any; numbers of tokens have none."""
        has_features = len(type.shape) in (2, 3) and not type.dtype.startswith(("int", "bool"))
        return (*(0 for _ in self.axes[1:]), len(type.shape) - 1 if has_features else None)

    def _is_in_blocks(self, option: Strategy) -> bool:
        lies = self.lie(option.gives[0])
        return None not in lies and lies[-1] != lies[-2]

    def _is_along_features(self, option: Strategy) -> bool:
        *others, last = self.lie(option.gives[0])
        return last is not None and not any(other is not None for other in others)

    def _is_whole(self, option: Strategy) -> bool:
        return all(place == REPLICATE for place in self.at(option.gives[0]))

    # --- operators ---------------------------------------------------------------------------------------------------

    def operator(self, node: Node, options: tuple[Strategy, ...], lie: tuple[Lies, ...]) -> Kept:
        if all(isinstance(one, str) for one in lie):
            return options, (WEIGHT if WEIGHT in lie else FREE,) * len(node.outputs), False
        types = operand_types(node, self.node_of)
        if rule_of_product(node, types) is not None and (kept := self.product(self, options, lie)) is not None:
            return kept
        fits = {option: self._fit(option, node, lie, types) for option in options}
        best = max(fits.values())
        kept = tuple(option for option in options if fits[option] == best)
        alike = tuple(one for one in kept if self._gives(one) == self._gives(kept[0]))
        return alike, tuple(self._made(layout) for layout in alike[0].gives), False

    def _made(self, layout: Layout) -> Lies:
        """Terms of a sum over the batch are those of a loss, or of a gradient of weights, and may stay so."""
        return WEIGHT if isinstance(layout[self.axes[0]], Partial) else self.lie(layout)

    def _gives(self, option: Strategy) -> tuple[tuple[Placement, ...], ...]:
        return tuple(self.at(layout) for layout in option.gives)

    def _fit(
        self, option: Strategy, node: Node, lie: tuple[Lies, ...], types: tuple[TensorType, ...]
    ) -> tuple[bool, bool, bool, int, int]:
        """How well an operator goes with what lies there; the first thing that differs decides: its activations are
        split along the batch by the first axis, they all are read as they lie, the largest ones are, how much of the
        results is split, how much is read as it lies.
        """
        read = [
            (type.numel, one, self.lie(take))
            for type, one, take in zip(types, lie, option.takes, strict=True)
            if not isinstance(one, str)
        ]
        most = max(size for size, *_ in read)
        results = ((type, self.lie(lies)) for type, lies in zip(node.outputs, option.gives, strict=True))
        return (
            not self._reads_terms(option) and all(took[0] == one[0] for _, one, took in read),
            all(took == one for _, one, took in read),
            all(took == one for size, one, took in read if size == most),
            sum(type.numel * sum(dim is not None for dim in dims) for type, dims in results if type is not None),
            sum(size * sum(a == b for a, b in zip(one, took, strict=True)) for size, one, took in read),
        )

    def _reads_terms(self, option: Strategy) -> bool:
        return any(isinstance(place, Partial) for take in option.takes for place in self.at(take))

    def matches(self, option: Strategy, lie: tuple[Lies, ...], axes: int | None = None) -> bool:
        """Whether activations are read as they lie, on all axes or on so many of the first, and nothing as terms of a
        sum.
        """
        pairs = zip(lie, option.takes, strict=True)
        return not self._reads_terms(option) and all(
            isinstance(one, str) or self.lie(take)[:axes] == one[:axes] for one, take in pairs
        )


def _in_blocks(grid: _Grid, options: tuple[Strategy, ...], lie: tuple[Lies, ...]) -> Kept | None:
    """SUMMA on the two axes."""

    def is_here(option: Strategy) -> bool:
        return option.body == SUMMA and all(option.roles[axis].startswith(SUMMA) for axis in grid.axes)

    loops = tuple(one for one in options if is_here(one) and grid.matches(one, lie, axes=1))
    if not loops:
        return None
    kept = prefer(loops, lambda one: grid.matches(one, lie))
    return kept, (grid.lie(kept[0].gives[0]) if WEIGHT in lie else WEIGHT,), True


def _in_a_cube(grid: _Grid, options: tuple[Strategy, ...], lie: tuple[Lies, ...]) -> Kept | None:
    """Tokens are gathered along their second axis. With a weight, the result has features along this one, and terms of
    a sum along that of the features, which make pieces of tokens of it.
    """

    def is_gathered(option: Strategy) -> bool:
        """Each activation has one axis of three for features, and one for nothing."""
        read = [grid.lie(take)[1:] for take, one in zip(option.takes, lie, strict=True) if not isinstance(one, str)]
        return all(dims.count(None) == 1 and batch not in dims for dims, batch in zip(read, batches, strict=True))

    def is_split(option: Strategy) -> bool:
        places = grid.at(option.gives[0])
        return REPLICATE not in places and sum(isinstance(place, Partial) for place in places) == 1

    batches = [one[0] for one in lie if not isinstance(one, str)]
    split = tuple(one for one in options if grid.matches(one, lie, axes=1) and is_gathered(one) and is_split(one))
    if not split:
        return None
    as_they_lie = tuple(
        one if isinstance(one, str) else (one[0], *(None if dim == one[0] else dim for dim in one[1:])) for one in lie
    )
    kept = prefer(split, lambda option: grid.matches(option, as_they_lie))
    kept = tuple(option for option in kept if option.gives == kept[0].gives)
    if WEIGHT not in lie:
        return kept, (WEIGHT,), True
    first, *others = grid.lie(kept[0].gives[0])
    return kept, ((first, *(first if dim is None else dim for dim in others)),), True


Product = Callable[[_Grid, tuple[Strategy, ...], tuple[Lies, ...]], Kept | None]
