"""Which dims of a graph grow with the batch, the sequence, or whatever else its inputs have in them.

A plan's graph has numbers for sizes. Here each dim of each value becomes a product of the sizes that grow and of
numbers: `batch * sequence`, `sequence + 1`, `12`. Some dims of the inputs are named by the caller, parameters and
buffers keep their sizes, and the rest follows from the operators' own factor rules, forwards and backwards: equal
factors are equal sizes. So a size is known by where it comes from, never by its value: 16 heads are not a batch of 16.

Three kinds of facts are used, each only where those before it leave a size open:

    rules      one factor has one size in all tensors of an operator; a gradient has the shape of its parameter
    arguments  what a slice leaves, or a pad adds, if the numbers in its arguments do not grow themselves
    numbers    a size that nothing else tells stays what it is. Where it stands among an operator's arguments, and is
               the number of exactly one growing size, it is taken to be that; either way it is listed in `assumed`

Contradictions, and sizes that depend on a growing one in a way that no rule tells (a strided convolution along the
sequence), are refused with the operator's name.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.ir.graph import HELD, RANDOM_STATE, Graph, Node, Ref
from autopar.propose.strategies import Signature, operand_types, signature_of
from autopar.rules.notation import Dim, Rule
from autopar.rules.spelling import arg
from autopar.rules.table import rule_of
from autopar.scale.growth import SEQUENCE, CannotGrow, Growth, Sources
from autopar.scale.sizes import Part, Size, are_equal, names_in, number, product, told, value_of

# Operators with sizes among their arguments: what such a size is cannot be read off the operands.
SIZED = (
    "arange",
    "full",
    "zeros",
    "ones",
    "empty",
    "new_",
    "expand",
    "repeat",
    "slice",
    "split",
    "chunk",
    "select_backward",
    "batch_norm_in_parts",
)


def growth_of(graph: Graph, sources: Sources) -> Growth:
    """Follow the named dims through the graph. Raises CannotGrow, and ValueError for a dim that does not exist."""
    return _Follow(graph, sources).run()


def growth_where_possible(graph: Graph, sources: Sources) -> tuple[Growth, dict[str, str]]:
    """Growth in as many of the names as can be, and for each of the others why it cannot."""
    left, why = dict(sources), dict[str, str]()
    while True:
        try:
            return growth_of(graph, left), why
        except CannotGrow as error:
            blamed = sorted(error.names & left.keys()) or sorted(left)
            # Of several, the sequence is what models fix; the batch may still grow.
            name = SEQUENCE if SEQUENCE in blamed else blamed[-1]
            why[name] = str(error)
            del left[name]


@dataclass(slots=True)
class _Operator:
    """A node, its rule at its present shapes, and what is known of its factors."""

    node: Node
    rule: Rule
    tensors: tuple[tuple[Ref, tuple[Dim, ...]], ...]
    known: dict[str, Size] = field(default_factory=dict[str, Size])


class _Follow:
    def __init__(self, graph: Graph, sources: Sources) -> None:
        self.graph = graph
        self.sources = {name: tuple(dims) for name, dims in sources.items()}
        self.base: dict[str, int] = {}
        self.cells: dict[Ref, list[Size | None]] = {}
        self.operators: dict[str, _Operator] = {}
        self.equal: dict[Ref, list[Ref]] = defaultdict(list)
        self.users: dict[str, list[str]] = defaultdict(list)
        self.todo: deque[str] = deque()
        self.assumed: list[tuple[Ref, int, Size]] = []

    def run(self) -> Growth:
        self._open()
        self._name_inputs()
        self.todo.extend(node.name for node in self.graph.nodes)
        self._settle()
        for by in (self._by_arguments, self._as_it_is):
            for node in self.graph.nodes:
                if self._is_open(node):
                    self._by_arguments(node)
                    self._settle()
                if self._is_open(node):
                    by(node)
                    self._settle()
        return Growth(
            self.graph,
            self.base,
            {ref: tuple(size for size in cell if size is not None) for ref, cell in self.cells.items()},
            {name: operator.known for name, operator in self.operators.items()},
            {name: operator.rule for name, operator in self.operators.items()},
            self.sources,
            tuple(self.assumed),
        )

    # --- what there is -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Cells of all dims; those of parameters and buffers, and dims of size one, are known."""
        rules: dict[Signature, Rule | None] = {}
        node_of = self.graph.by_name
        for node in self.graph.nodes:
            fixed = node.op in ("parameter", "buffer")
            for index, type in enumerate(node.outputs):
                shape = type.shape if type is not None else ()
                self.cells[Ref(node.name, index)] = [number(n) if fixed or n <= 1 else None for n in shape]
                if type is not None and type.dtype == RANDOM_STATE:
                    self.cells[Ref(node.name, index)][-1] = number(type.shape[-1])  # as many numbers, whatever is drawn
            for ref in node.operands:
                self.users[ref.name].append(node.name)
            if node.is_source:
                continue
            types = operand_types(node, node_of)
            key = signature_of(node, types)
            if key not in rules:
                rules[key] = rule_of(node, types)
            if (rule := rules[key]) is not None:
                results = [Ref(node.name, index) for index in range(len(node.outputs))]
                pairs = [*zip(node.operands, rule.inputs, strict=True), *zip(results, rule.outputs, strict=True)]
                tensors = tuple((ref, dims) for ref, dims in pairs if dims)
                self.operators[node.name] = _Operator(node, rule, tensors)
        named = {(node.op, node.target): Ref(node.name) for node in self.graph.nodes if node.is_source}
        like = {"gradient": HELD, "buffer": ("buffer",), "output": ("tangent",)}
        for result in self.graph.results:
            others = (named.get((op, result.target)) for op in like[result.kind])
            other = next((one for one in others if one is not None), None)
            if result.ref is not None and other is not None:
                self.equal[result.ref].append(other)
                self.equal[other].append(result.ref)

    def _name_inputs(self) -> None:
        inputs = {node.target: Ref(node.name) for node in self.graph.nodes if node.op == "input"}
        for name, dims in self.sources.items():
            for target, dim in dims:
                if target not in inputs:
                    raise ValueError(f"no input {target!r}; this plan has {', '.join(inputs) or 'none'}")
                type = self.graph.type_of(inputs[target])
                if not 0 <= dim < len(type.shape):
                    raise ValueError(f"input {target} is {type}, it has no dim {dim}")
                size = type.shape[dim]
                if size < 2:
                    raise CannotGrow(
                        f"{name} is {size} in this plan (dim {dim} of {target}), and dims of size one are not told "
                        f"apart; search a plan with a {name} of 2 or more",
                        {name},
                    )
                if self.base.setdefault(name, size) != size:
                    raise ValueError(f"{name} is {self.base[name]} in one input and {size} in dim {dim} of {target}")
                if (known := self.cells[inputs[target]][dim]) is not None:
                    raise ValueError(f"dim {dim} of {target} is both {told(known)} and {name}")
                self.cells[inputs[target]][dim] = (Part(name, 0),)

    # --- rules -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Rules, until they say nothing new."""
        waiting = set(self.todo)
        while self.todo:
            name = self.todo.popleft()
            waiting.discard(name)
            for changed in self._visit(name):
                for other in dict.fromkeys((changed.name, *self.users[changed.name])):
                    if other not in waiting:
                        waiting.add(other)
                        self.todo.append(other)

    def _visit(self, name: str) -> set[Ref]:
        changed: set[Ref] = set()
        for index in range(len(self.graph.by_name[name].outputs)):
            for other in self.equal.get(Ref(name, index), []):
                for dim, size in enumerate(self.cells[Ref(name, index)]):
                    if size is not None and self._set(other, dim, size, name):
                        changed.add(other)
        if (operator := self.operators.get(name)) is None:
            return changed
        news = True
        while news:
            news = False
            for ref, dims in operator.tensors:
                cell = self.cells[ref]
                for dim, factors in enumerate(dims):
                    inside = [factor for factor in factors if operator.rule.sizes[factor] != 1]
                    size = cell[dim]
                    if size is not None:
                        news |= self._learn(operator, inside, size)
                    elif all(factor in operator.known for factor in inside):
                        cell[dim] = product([part for factor in inside for part in operator.known[factor]])
                        changed.add(ref)
                        news = True
                    elif (same := self._same_dim(operator, factors)) is not None:
                        cell[dim] = same
                        changed.add(ref)
                        news = True
        return changed

    def _same_dim(self, operator: _Operator, factors: Dim) -> Size | None:
        """The size of a dim that is made of the same factors, where it is known and theirs are not."""
        for ref, dims in operator.tensors:
            for dim, others in enumerate(dims):
                if others == factors and (size := self.cells[ref][dim]) is not None:
                    return size
        return None

    def _learn(self, operator: _Operator, factors: list[str], size: Size) -> bool:
        """What a dim of this size says of the factors that it is made of."""
        wanted = [operator.rule.sizes[factor] for factor in factors]
        pieces = [size] if len(factors) == 1 else self._cut(size, wanted)
        news = False
        for factor, piece in zip(factors, pieces or [], strict=False):
            known = operator.known.get(factor)
            if known is None:
                operator.known[factor] = piece
                news = True
            elif not are_equal(known, piece):
                raise self._conflict(operator.node, known, piece)
        return news

    def _cut(self, size: Size, wanted: list[int]) -> list[Size] | None:
        """The size as a product of factors of the wanted values, in their order; None where it is not clear how."""
        left, found = list(size), list[Size]()
        for want in wanted:
            taken: list[Part] = []
            while want > 1:
                if not left:
                    return None
                part = left.pop(0)
                value = part.at(self.base)
                if want % value == 0:
                    taken.append(part)
                    want //= value
                elif not part.name and value % want == 0:
                    taken.append(Part("", want))
                    left.insert(0, Part("", value // want))
                    want = 1
                else:
                    return None
            found.append(product(taken))
        return found if not left else None

    def _set(self, ref: Ref, dim: int, size: Size, by: str) -> bool:
        """Whether that was new."""
        known = self.cells[ref][dim]
        if known is None:
            self.cells[ref][dim] = size
        elif not are_equal(known, size):
            raise self._conflict(self.graph.by_name[by], known, size)
        return known is None

    def _conflict(self, node: Node, one: Size, two: Size) -> CannotGrow:
        names = names_in(one) ^ names_in(two) or names_in(one) | names_in(two)
        return CannotGrow(
            f"{_where(node)} takes a size of {value_of(one, self.base)} for {told(one)} and for {told(two)}", names
        )

    # --- what rules leave open ---------------------------------------------------------------------------------------

    def _is_open(self, node: Node) -> bool:
        return any(None in self.cells[Ref(node.name, index)] for index in range(len(node.outputs)))

    def _by_arguments(self, node: Node) -> None:
        for ref, dim, size in self._argued(node):
            if value_of(size, self.base) != self.graph.type_of(ref).shape[dim]:
                continue
            if self._set(ref, dim, size, node.name):
                self.todo.extend(dict.fromkeys((node.name, *self.users[ref.name])))

    def _argued(self, node: Node) -> Iterator[tuple[Ref, int, Size]]:
        out = Ref(node.name)
        match node.op:
            case "aten.slice.Tensor" | "aten.slice_backward.default":
                backward = node.op == "aten.slice_backward.default"
                at = 2 if backward else 1
                whole, piece = (out, node.operands[0]) if backward else (node.operands[0], out)
                dim: int = arg(node, at, "dim", 0) % len(self.cells[out])
                limits = (arg(node, at + 1, "start"), arg(node, at + 2, "end"), arg(node, at + 3, "step", 1))
                taken = self._missing(self.graph.type_of(whole).shape[dim], *limits)
                if taken is None:
                    return
                if not backward and (size := self._plus(self.cells[whole][dim], -taken)) is not None:
                    yield piece, dim, size
                if backward and (size := self._plus(self.cells[piece][dim], taken)) is not None:
                    yield whole, dim, size
            case "aten.constant_pad_nd.default":
                rank, pads = len(self.cells[out]), node.args[1]
                for place in range(len(pads) // 2):
                    dim, more = rank - 1 - place, pads[2 * place] + pads[2 * place + 1]
                    if (size := self._plus(self.cells[node.operands[0]][dim], more)) is not None:
                        yield out, dim, size
            case "aten.cat.default":
                dim: int = arg(node, 1, "dim", 0) % len(self.cells[out])
                parts = [self.cells[ref][dim] for ref in node.operands if len(self.cells[ref]) == len(self.cells[out])]
                if (size := self._sum(parts)) is not None:
                    yield out, dim, size
            case "aten.split.Tensor" | "aten.split_with_sizes.default":
                dim: int = arg(node, 2, "dim", 0) % len(self.cells[out])
                size, count = self.cells[node.operands[0]][dim], len(node.outputs)
                if size and not size[0].name and size[0].plus % count == 0:
                    for index in range(count):
                        yield Ref(node.name, index), dim, product([Part("", size[0].plus // count), *size[1:]])
            case _:
                return

    def _missing(self, size: int, start: int | None, end: int | None, step: int) -> int | None:
        """How much less a slice has than the whole; None where it does not count from the ends."""
        start = start or 0
        end = size if end is None or end >= size else end
        if step != 1 or start < 0 or 0 <= end < size:
            return None
        return start - min(end, 0)

    def _plus(self, size: Size | None, more: int) -> Size | None:
        if size is None or len(size) > 1:
            return None
        part = size[0] if size else Part("", 1)
        return product([Part(part.name, part.plus + more)])

    def _sum(self, sizes: list[Size | None]) -> Size | None:
        """A growing size and numbers, or equal ones."""
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        growing = [size for size in known if names_in(size)]
        if len(growing) == 1:
            rest = sum(value_of(size, {}) for size in known if not names_in(size))
            return self._plus(growing[0], rest)
        if len(growing) == len(known) and len(set(known)) == 1:
            return product([Part("", len(known)), *known[0]])
        return None

    def _as_it_is(self, node: Node) -> None:
        """What nobody tells stays a number, unless it comes out of a size that grows."""
        sized = node.op.partition(".")[2].startswith(SIZED)
        if not sized and not node.is_source and (grown := self._lost(node)):
            raise CannotGrow(
                f"{_where(node)} makes a size from {told(grown)} in a way that is not known here", names_in(grown)
            )
        for index in range(len(node.outputs)):
            ref = Ref(node.name, index)
            for dim, size in enumerate(self.cells[ref]):
                if size is None:
                    value = self.graph.type_of(ref).shape[dim]
                    same = [name for name, base in self.base.items() if base == value] if sized else []
                    found = (Part(same[0], 0),) if len(same) == 1 else number(value)
                    self.cells[ref][dim] = found
                    self.todo.extend(dict.fromkeys((node.name, *self.users[node.name])))
                    if sized and (names_in(found) or not self._cuts_a_number(node, dim)):
                        self.assumed.append((ref, dim, found))

    def _cuts_a_number(self, node: Node, dim: int) -> bool:
        """Whether it takes some places of a dim that does not grow."""
        if not node.op.startswith(("aten.slice.", "aten.split")):
            return False
        return not names_in(self.cells[node.operands[0]][dim] or ())

    def _lost(self, node: Node) -> Size | None:
        """A growing size of an operand that is in no result as a factor of its own."""
        operator = self.operators.get(node.name)
        kept: set[str] = set()
        if operator is not None:
            kept = {factor for dims in operator.rule.outputs for dim in dims for factor in dim}
        for ref in node.operands:
            for dim, size in enumerate(self.cells[ref]):
                if size is not None and names_in(size):
                    factors = () if operator is None else dict(operator.tensors).get(ref, ())[dim]
                    if operator is None or not factors or not {*factors} <= operator.known.keys() & kept:
                        return size
        return None


def _where(node: Node) -> str:
    place = node.module or node.target or node.op
    return f"%{node.name} ({place}{f', {node.source}' if node.source else ''})"
