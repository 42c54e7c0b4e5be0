"""Is a plan right? Its outputs, every gradient and every buffer against the model on one device."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from autopar.emit.run_all_ranks import Ran
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.rewrite import plain
from tests.support.families import Case, Reference
from tests.support.lockstep import run_all
from tests.support.wide import as_double

AXES = ("a", "b", "c", "d")


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(AXES[: len(sizes)], sizes)


def worst_difference(ran: Ran, wanted: Reference) -> tuple[float, str]:
    """The largest difference relative to the largest entry of its tensor, and where it is.

    Every result must have its counterpart: a gradient that one side lacks counts as infinitely wrong. A gradient that
    is zero by symmetry (a bias in front of a batch norm) has no largest entry of its own; there one part in 100 of the
    largest gradient of all is the unit.
    """
    size = max((grad.abs().max().item() for grad in wanted.gradients.values() if grad is not None), default=1.0)
    worst, where = 0.0, "nothing"
    for kind, name, ours, theirs in _pairs(ran, wanted):
        if (ours is None) != (theirs is None):
            return float("inf"), f"{kind} {name}: {'missing' if ours is None else 'not wanted'}"
        if ours is None or theirs is None:
            continue
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return float(
                "inf"
            ), f"{kind} {name}: {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"
        if not theirs.numel():
            continue
        unit = max(as_double(theirs).abs().max().item(), 1e-2 * size if kind == "gradient" else 1e-6)
        off = (as_double(ours) - as_double(theirs)).abs().max().item() / unit
        if not off <= worst:  # nan is the worst of all
            worst, where = off, f"{kind} {name}"
    return worst, where


def _pairs(ran: Ran, wanted: Reference) -> Iterator[tuple[str, str, Tensor | None, Tensor | None]]:
    for (kind, name), value in ran.results.items():
        match kind:
            case "output":
                yield kind, name, value, wanted.outputs.get(name)
            case "gradient":
                yield kind, name, value, wanted.gradients[name]
            case _:
                yield kind, name, value, wanted.buffers[name]
    told = {id(wanted.gradients[name]) for kind, name in ran.results if kind == "gradient"}
    for name, grad in wanted.gradients.items():
        if grad is not None and id(grad) not in told:  # tied parameters share one gradient
            yield "gradient", name, None, grad


def difference(plan: Plan, case: Case) -> tuple[float, str]:
    """`worst_difference` of a plan of the case's graph, or of its wide graph, run by all ranks in lockstep."""
    traced = plan.graph if plan.graph in (case.wide_graph, case.graph) else plain(plan.graph)
    wide = traced == case.wide_graph
    assert wide or traced == case.graph
    ran, _ = run_all(plan, case.values(plan.graph), case.seed)
    return worst_difference(ran, case.wide_reference if wide else case.reference)
