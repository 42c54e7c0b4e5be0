"""Two plans of one model, side by side: what is laid out, kept and sent otherwise, and what that costs.

Operators are matched by their places in the graph that was traced, which both plans have. Modules that differ in the
same way stand together under one pattern (`autopar.plan.patterns`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.diff.account import EXACT, Account, Part, account_of
from autopar.errors import PlanMismatch
from autopar.ir.graph import Node
from autopar.ir.layout import show
from autopar.plan.fit import unlike
from autopar.plan.patterns import patterns
from autopar.plan.plan import Plan
from autopar.plan.reading import is_weighted, parameters_of, split_of, weights_of
from autopar.plan.tell import backward_homes, home, human, modes_of
from autopar.plan.value import is_product
from autopar.price.pricer import Pricer
from autopar.rewrite import plain
from cost_models.steps import DEVICE, received_bytes

PARAMETERS, PRODUCTS, RESULTS = "parameters", "products of the forward pass", "results of other operators"
ALIKE = 1e-6  # of the longer step: classes that differ by less are alike
K = TypeVar("K", bound=Hashable)
Pair = tuple[str, str]


@dataclass(frozen=True)
class Seconds:
    """Of one class, in both plans. `busy`: what its transfers take, exposed or not. `modules`: pattern -> seconds more
    in the second plan, the largest first; together the difference.
    """

    what: str
    seconds: tuple[float, float]
    busy: tuple[float, float]
    modules: tuple[tuple[str, float], ...]

    @property
    def more(self) -> float:
        return self.seconds[1] - self.seconds[0]


@dataclass(frozen=True)
class Held:
    """Bytes of one kind of buffers at the peak, in both plans."""

    what: str
    nbytes: tuple[int, int]


@dataclass(frozen=True)
class Sent:
    """A collective over an axis: how often, and the bytes that one rank receives, in both plans."""

    collective: str
    axis: str
    counts: tuple[int, int]
    nbytes: tuple[int, int]


@dataclass(frozen=True)
class Changed:
    """`count` parameters, operators or values of the modules of a pattern that are `told[0]` in the first plan and
    `told[1]` in the second.
    """

    what: str
    where: str
    told: Pair
    count: int


@dataclass(frozen=True)
class Difference:
    """`made_for`: name -> what the plans were made for, and how they are run, where that differs. `seconds`: of every
    class that either plan has; they add up to `steps`. `is_simulated`: of each plan. `layouts`, `kept`: what differs.
    """

    steps: tuple[float, float]
    is_simulated: tuple[bool, bool]
    made_for: Mapping[str, Pair]
    seconds: tuple[Seconds, ...]
    peaks: tuple[int, int]
    held: tuple[Held, ...]
    sent: tuple[Sent, ...]
    layouts: tuple[Changed, ...]
    kept: tuple[Changed, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the plans do the same, whatever they were made for."""
        alike = all(abs(one.more) <= ALIKE * max(self.steps) for one in self.seconds)
        return alike and not (self.layouts or self.kept or self.sent) and self.peaks[0] == self.peaks[1]


def difference(
    one: Plan, other: Plan, pricers: tuple[Pricer, Pricer], names: Pair = ("the first plan", "the second")
) -> Difference:
    """`pricers`: what priced each (`autopar.simulate.timeline.pricer_of`). `names`: of the plans, in errors. Raises
    PlanMismatch for plans of different models, and for one that was edited.
    """
    if one.graph is not other.graph and (told := unlike(one.graph, other.graph)) is not None:
        raise PlanMismatch(
            f"{names[0]} and {names[1]} are plans of different models, or of one that was traced otherwise: {told}; "
            "give plans of one model, with one --precision and --batch-norm"
        )
    accounts = account_of(one, pricers[0]), account_of(other, pricers[1])
    return Difference(
        (one.predicted_seconds, other.predicted_seconds),
        (one.simulated_seconds is not None, other.simulated_seconds is not None),
        _made_for(one, other), _seconds(*accounts), (one.peak_bytes[DEVICE], other.peak_bytes[DEVICE]),
        _held(*accounts), _sent(one, other), _layouts(one, other), _kept(one, other),
    )  # fmt: skip


def _made_for(one: Plan, other: Plan) -> dict[str, Pair]:
    told = [_facts(plan) for plan in (one, other)]
    if told[0]["hardware"] == told[1]["hardware"] and one.hardware_digest != other.hardware_digest:
        for facts, plan in zip(told, (one, other), strict=True):
            facts["hardware"] += f" with figures {plan.hardware_digest[:8]}"
    return {name: (told[0][name], told[1][name]) for name in told[0] if told[0][name] != told[1][name]}


def _facts(plan: Plan) -> dict[str, str]:
    return {
        "mesh": str(plan.mesh),
        "hardware": plan.hardware,
        "memory limit": "none" if plan.memory_limit is None else human(plan.memory_limit),
        "optimizer": plan.optimizer,
        "outputs": plan.outputs,
        "tf32": ", ".join(plan.tf32) or "none",
        "step time": "summed" if plan.simulated_seconds is None else "simulated",
        "buckets of gradients": human(plan.bucket_bytes) if plan.bucket_bytes else "none",
        "prefetch": "nothing overlaps" if plan.prefetch is None else str(plan.prefetch),
    }


# --- seconds and bytes -----------------------------------------------------------------------------------------------


def _seconds(one: Account, other: Account) -> tuple[Seconds, ...]:
    """Those that differ most come first."""
    modules: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for sign, account in ((-1, one), (1, other)):
        for part, seconds in account.seconds.items():
            modules[part.what][part.module] += sign * seconds
    found = [
        Seconds(
            what, (_of(one.seconds, what), _of(other.seconds, what)), (_of(one.busy, what), _of(other.busy, what)),
            _by_pattern(more),
        )
        for what, more in modules.items()
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda row: (-abs(row.more), row.what)))


def _of(parts: Mapping[Part, float], what: str) -> float:
    return sum(seconds for part, seconds in parts.items() if part.what == what)


def _by_pattern(more: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Modules in which it is more stand together, and those in which it is less; and those in which it is the same."""
    small = EXACT * sum(map(abs, more.values()))
    groups: dict[int, list[str]] = defaultdict(list)
    for module, seconds in more.items():
        groups[0 if abs(seconds) <= small else 1 if seconds > 0 else -1].append(module)
    found = [
        (pattern, sum(more[name] for name in names))
        for told in patterns(groups).values()
        for pattern, names in told.items()
    ]
    return tuple(sorted(((told, s) for told, s in found if s), key=lambda row: (-abs(row[1]), row[0])))


def _held(one: Account, other: Account) -> tuple[Held, ...]:
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for number, account in enumerate((one, other)):
        for buffer, nbytes in account.held.items():
            kinds[buffer.kind.value][number] += nbytes
    found = [Held(what, (first, second)) for what, (first, second) in kinds.items()]
    return tuple(sorted(found, key=lambda row: (-abs(row.nbytes[1] - row.nbytes[0]), row.what)))


def _sent(one: Plan, other: Plan) -> tuple[Sent, ...]:
    counts: dict[Pair, list[int]] = defaultdict(lambda: [0, 0])
    nbytes: dict[Pair, list[int]] = defaultdict(lambda: [0, 0])
    for number, plan in enumerate((one, other)):
        for comm in plan.comms():
            counts[comm.collective, comm.axis][number] += 1
            nbytes[comm.collective, comm.axis][number] += received_bytes(comm)
    found = [
        Sent(*key, (counts[key][0], counts[key][1]), (nbytes[key][0], nbytes[key][1]))
        for key in counts
        if counts[key][0] != counts[key][1] or nbytes[key][0] != nbytes[key][1]
    ]
    return tuple(sorted(found, key=lambda row: (-abs(row.nbytes[1] - row.nbytes[0]), row.collective, row.axis)))


# --- what is done otherwise ------------------------------------------------------------------------------------------


def _layouts(one: Plan, other: Plan) -> tuple[Changed, ...]:
    """Layouts of parameters, what axes split of the products, layouts of what other operators make: in this order."""
    found: dict[str, dict[Pair, list[str]]] = {PARAMETERS: {}, PRODUCTS: {}, RESULTS: {}}
    told = [_laid_out(plan) for plan in (one, other)]
    where = _modules(one)
    for (what, name, first), (_, _, second) in zip(*told, strict=True):
        if first != second:
            place = name if what == PARAMETERS else where[name]
            found[what].setdefault((first, second), []).append(place)
    sizes = {node.target: type.nbytes for node, type in parameters_of(one)}
    return tuple(row for what, groups in found.items() for row in _folded(what, groups, sizes))


def _laid_out(plan: Plan) -> list[tuple[str, str, str]]:
    """(what it is, its name, how it is laid out) of every node of the traced graph."""
    graph, weight_of = plain(plan.graph), weights_of(plan.graph)
    sources = sorted((node for node in graph.nodes if node.is_source), key=lambda node: (node.op, node.target))
    found: list[tuple[str, str, str]] = []
    for node in (*sources, *(node for node in graph.nodes if not node.is_source)):
        choice = plan.choices[node.name]
        if not node.is_source and node.phase == "forward" and is_product(choice):
            weighted = is_weighted(plan.graph.by_name[node.name], weight_of)
            splits = {axis: split_of(choice, place, weighted) for place, axis in enumerate(plan.mesh.names)}
            told = ", ".join(f"{axis} splits {split}" for axis, split in splits.items() if split != "nothing")
            found.append((PRODUCTS, node.name, told or "repeated on every rank"))
            continue
        layouts = zip(node.outputs, choice.gives, strict=True)
        told = ", ".join(show(layout, plan.mesh, len(type.shape)) for type, layout in layouts if type is not None)
        is_parameter = node.op == "parameter"
        found.append((PARAMETERS if is_parameter else RESULTS, node.target if is_parameter else node.name, told))
    return found


def _modules(plan: Plan) -> dict[str, str]:
    return {node.name: home(node) for node in plan.graph.nodes} | backward_homes(plan)


def _kept(one: Plan, other: Plan) -> tuple[Changed, ...]:
    """What is kept until backward, recomputed or offloaded; and where parameters and their states live."""
    pairs = [*zip(_operators(one), _operators(other), strict=True)]
    modes, modes_there = modes_of(one), modes_of(other)
    values: dict[Pair, list[str]] = defaultdict(list)
    for node, there in pairs:
        told = modes.get(node.name, "as it is"), modes_there.get(there.name, "as it is")
        if told[0] != told[1]:
            values[told].append(home(node))
    residences: dict[Pair, list[str]] = defaultdict(list)
    for name in sorted({*one.residence, *other.residence}):
        told = one.residence.get(name, "device"), other.residence.get(name, "device")
        if told[0] != told[1]:
            residences[told].append(name)
    return (*_folded("values", values), *_folded("residence of parameters", residences))


def _operators(plan: Plan) -> list[Node]:
    return [node for node in plain(plan.graph).nodes if not node.is_source and node.phase == "forward"]


def _folded(
    what: str, groups: Mapping[Pair, Sequence[str]], sizes: Mapping[str, int] | None = None
) -> Iterable[Changed]:
    """A row for each pattern, those of the most first, or of the largest `sizes`; parameters of one module stand
    together.
    """
    rows: dict[tuple[str, Pair], list[tuple[str, int]]] = defaultdict(list)
    weight: dict[tuple[str, Pair], int] = defaultdict(int)
    for told, found in patterns({told: _counted(names) for told, names in groups.items()}).items():
        for pattern, members in found.items():
            module, _, last = pattern.rpartition(".") if "parameters" in what and " " not in pattern else (pattern,) * 3
            count = sum(groups[told].count(member) for member in members)
            rows[module, told].append((last, count))
            weight[module, told] += sum((sizes or {}).get(member, 0) for member in members) or count
    return [
        Changed(what, _joined(module, [last for last, _ in parts]), told, sum(count for _, count in parts))
        for (module, told), parts in sorted(rows.items(), key=lambda row: -weight[row[0]])
    ]


def _joined(module: str, names: Sequence[str]) -> str:
    if [*names] == [module]:
        return module or "(model)"
    return f"{module}.{names[0]}" if len(names) == 1 and module else f"{module or '(model)'}: {', '.join(names)}"


def _counted(names: Collection[K]) -> tuple[K, ...]:
    return tuple(dict.fromkeys(names))
