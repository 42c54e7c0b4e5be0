"""What `python -m autopar.search --json` prints: a search as one JSON object."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autopar.ir.layout import show
from autopar.ir.precision import told
from autopar.plan import Plan
from autopar.plan.explain import DISPATCH, DISPATCHED, FUSED
from autopar.plan.utilisation import utilisation
from autopar.search import curve, meshes
from autopar.search.baselines import Row, moved
from autopar.search.reserved import RESERVED
from cost_models.reserve import Room


def document(
    model: str,
    plan: Plan,
    rows: Sequence[Row],
    points: Sequence[curve.Point],
    seconds: dict[str, float],
    room: Room,
    interrupted: bool = False,
    among: Sequence[meshes.Row] = (),
) -> dict[str, Any]:
    """What --json prints; every figure of a plan is predicted, for one rank and one step. `among`: the meshes among
    which the plan's is the best.
    """
    types = {node.target: node.outputs[0] for node in plan.graph.nodes if node.op == "parameter"}
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    per_unit = 1 if sys.platform == "darwin" else 1024
    return {
        "model": model,
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "hardware": plan.hardware,
        "optimizer": plan.optimizer,
        "outputs": plan.outputs,
        "micro_batches": plan.graph.rounds.count,
        "batch_norm": plan.batch_norm or None,
        "precision": told(plan.graph) or None,
        "tf32": list(plan.tf32),
        "memory_limit": room.limit,
        "reserve_bytes": room.left,
        "reserved_bytes": plan.search.get(RESERVED),
        **_figures(plan),
        **{fact: plan.search.get(fact) for fact in (FUSED, DISPATCHED, DISPATCH)},
        "status": plan.search.get("status"),
        "interrupted": interrupted,
        "tied": bool(plan.search.get("tied")),
        "measured": plan.search.get("measured", 0),
        "parameters": sum(type.numel for type in types.values() if type is not None),
        "layouts": {
            name: show(layout, plan.mesh, len(type.shape))
            for name, layout in plan.parameters.items()
            if (type := types[name]) is not None
        },
        "nodes": len(plan.graph.nodes),
        "variables": plan.search.get("variables"),
        "constraints": plan.search.get("constraints"),
        "items": plan.search.get("items"),
        "edges": plan.search.get("edges"),
        "candidates": [asdict(candidate) for candidate in plan.candidates],
        "notes": list(plan.notes),
        "baselines": [
            {"policy": row.policy, "batch_norm": row.batch_norm or None, "fits": row.plan is not None, "why": row.why,
             "needs_bytes": row.needs}
            | ({} if row.plan is None else _figures(row.plan))
            for row in rows
        ],
        "ms_per_gib": {
            tier: plan.search[key] for tier in plan.peak_bytes if (key := f"ms_per_gib:{tier}") in plan.search
        },
        **({"meshes": [_mesh(row) for row in among]} if among else {}),
        **({"memory_curve": curve.rows_of(points)} if points else {}),
        "seconds": seconds,
        "cpu_seconds": sum(one.ru_utime + one.ru_stime for one in usage),
        "peak_rss_bytes": usage[0].ru_maxrss * per_unit,
    }  # fmt: skip


def _mesh(row: meshes.Row) -> dict[str, Any]:
    plan = row.plan
    return {
        "mesh": dict(zip(row.mesh.names, row.mesh.sizes, strict=True)),
        "predicted_seconds": None if plan is None else plan.predicted_seconds,
        "peak_bytes": None if plan is None else dict(plan.peak_bytes),
        "floor_seconds": row.floor_s or None,
        "searched": row.searched,
        "why": row.why,
    }


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "step_seconds": plan.step_seconds,
        "simulated_seconds": plan.simulated_seconds,
        "utilisation": utilisation(plan).to_json(),
        "prefetch": plan.prefetch,
        "bound": plan.bound if math.isfinite(plan.bound) else None,
        "simulated_bound": plan.simulated_bound or None,
        "gap": plan.gap if math.isfinite(plan.gap) else None,
        "seconds_by": dict(plan.seconds_by),
        "peak_bytes": dict(plan.peak_bytes),
        "comm_bytes": [
            {"collective": collective, "axis": axis, "bytes": nbytes}
            for (collective, axis), nbytes in plan.comm_bytes.items()
        ],
        "moved_bytes": moved(plan),
        "recomputed": curve.recomputed(plan),
        "offloaded_bytes": curve.offloaded_bytes(plan),
    }
