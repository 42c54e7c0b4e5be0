"""Axes called by what they do in a plan: "data" where one splits the batch, "tensor" where it splits weights.

A search over meshes does not know beforehand what an axis will be good for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from autopar.ir.mesh import Mesh
from autopar.plan.axes import uses
from autopar.plan.value import Choice, PlanValue
from autopar.price.reshard import Reshard
from cost_models.steps import Comm, Loop, Step, axes_of, over

P = TypeVar("P", bound=PlanValue)
CALLED = {"batch": "data", "sequence": "sequence", "columns": "tensor", "rows": "tensor", "heads": "tensor"}
COMM = "comm:"  # in front of an axis in `seconds_by`
EXPOSED = "exposed:"  # and among the facts of a search


def names_of(plan: PlanValue) -> tuple[str, ...]:
    """A name for each axis, by most of the arithmetic of the products with parameters that it splits: "data",
    "sequence", "tensor"; "data", too, where it splits none of that. Several that do the same are numbered, outermost
    first: data, data2.
    """
    kinds: list[str] = []
    for use in uses(plan):
        flops: Counter[str] = Counter()
        for what, part in use.products.items():
            if what in CALLED:
                flops[CALLED[what]] += int(part)
        kinds.append(min(flops, key=lambda kind: (-flops[kind], kind)) if flops else "data")
    found: list[str] = []
    for place, kind in enumerate(kinds):
        before = kinds[:place].count(kind)
        found.append(f"{kind}{before + 1}" if before else kind)
    return tuple(found)


def renamed(plan: P, names: tuple[str, ...]) -> P:
    """The same plan with other names of its axes, outermost first."""
    if names == plan.mesh.names:
        return plan
    to = dict(zip(plan.mesh.names, names, strict=True))

    def axis(told: str) -> str:
        return over([to[one] for one in axes_of(told)])

    def changes(before: tuple[Reshard, ...]) -> tuple[Reshard, ...]:
        return tuple(replace(change, axis=axis(change.axis)) for change in before)

    def step(one: Step) -> Step:
        match one:
            case Comm():
                return replace(one, axis=axis(one.axis))
            case Loop():
                return replace(one, body=tuple(map(step, one.body)))
            case _:
                return one

    def choice(one: Choice) -> Choice:
        return replace(
            one,
            body_axes=tuple(map(axis, one.body_axes)),
            steps=tuple(map(step, one.steps)),
            reads=tuple(map(changes, one.reads)),
        )

    done: dict[int, Choice] = {}  # many nodes share a choice
    for one in plan.choices.values():
        if id(one) not in done:
            done[id(one)] = choice(one)
    return replace(
        plan,
        mesh=Mesh(names, plan.mesh.sizes),
        choices={name: done[id(one)] for name, one in plan.choices.items()},
        deliveries=tuple(
            None if one is None else replace(one, changes=changes(one.changes), once=changes(one.once))
            for one in plan.deliveries
        ),
        seconds_by=_keys(plan.seconds_by, COMM, to),
        search=_keys(plan.search, EXPOSED, to),
    )


V = TypeVar("V")


def _keys(figures: Mapping[str, V], prefix: str, to: Mapping[str, str]) -> dict[str, V]:
    """The figures under the new names of axes; of those called otherwise (streams of copies), under theirs."""

    def named(key: str) -> str:
        axis = key.removeprefix(prefix)
        return prefix + to[axis] if key.startswith(prefix) and axis in to else key

    return {named(key): figure for key, figure in figures.items()}
