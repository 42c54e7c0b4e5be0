"""The stages of a pipeline, one behind the other in one process, each by a plan of its own on all ranks of its mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from autopar.emit.run_all_ranks import Ran
from autopar.plan import Plan
from autopar.rewrite.stages import Stage
from tests.support.lockstep import run_all


def run_stages(stages: Sequence[Stage], plans: Sequence[Plan], values: Mapping[str, Tensor], seed: int = 0) -> Ran:
    """`values`: of the whole graph, by node name. Forwards in order, then all again from behind with gradients: what a
    stage gives does not hang on the tangents that its first run has.
    """
    sent: dict[str, Tensor] = {}
    for stage, plan in zip(stages, plans, strict=True):
        ran, _ = run_all(plan, {**values, **_by_name(plan, "input", sent)}, seed)
        for channel in stage.sends:
            value = ran.results["output", channel]
            assert value is not None
            sent[channel] = value
    back: dict[str, Tensor] = {}
    found: dict[tuple[str, str], Tensor | None] = {}
    for stage, plan in reversed([*zip(stages, plans, strict=True)]):
        given = {**values, **_by_name(plan, "input", sent), **_by_name(plan, "tangent", back)}
        ran, _ = run_all(plan, given, seed)
        back = {}
        for (kind, target), value in ran.results.items():
            if kind == "gradient" and target in stage.gives_back:
                assert value is not None
                back[target] = value
            elif target not in stage.sends:
                before = found.get((kind, target))
                found[kind, target] = value if before is None else before if value is None else before + value
    return Ran(found)


def _by_name(plan: Plan, op: str, channels: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {node.name: channels[node.target] for node in plan.graph.nodes if node.op == op and node.target in channels}
