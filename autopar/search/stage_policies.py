"""Baselines in pipeline stages: what people do by hand, as one policy for all stages of an even cut, priced alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import Infeasible, NoAnswerInTime, NotCut
from autopar.ir.mesh import Mesh
from autopar.plan.tell import human
from autopar.search.context import Progress, Question
from autopar.search.cutting import Cutting
from autopar.search.less_memory import running_all_again
from autopar.search.orders import within_stage
from autopar.search.pipeline import Pipeline
from autopar.search.request import Request
from autopar.search.search import answer
from autopar.search.sequence_policies import DoesNotApply

STAGED: Mapping[str, str] = {
    "gpipe": "as many operators in each stage, all forwards in front of all backwards, data-parallel within a stage "
    "(Huang et al. 2018)",
    "1f1b": "the same with one forward, one backward in turn (Narayanan et al. 2021, PipeDream-Flush)",
    "megatron-3d": "1f1b, with tensor-parallel on the last axis of a stage's mesh and data-parallel on the others "
    "(Narayanan et al. 2021)",
}
FITS = {False: "yes", True: "yes, with layers run again"}
SCHEDULE_OF = {"gpipe": "gpipe", "1f1b": "1f1b", "megatron-3d": "1f1b"}


@dataclass(frozen=True)
class StagedRow:
    """A policy and its pipeline; without one, `why` there is none. `again`: its layers are run again in backward, as it
    does not fit otherwise.
    """

    policy: str
    found: Pipeline | None
    why: str = ""
    again: bool = False


def within(policy: str, mesh: Mesh) -> str:
    """The policy of `autopar.search.policies` that all stages have, each on this mesh. Raises DoesNotApply."""
    if policy != "megatron-3d":
        return "data-parallel"
    if mesh.ranks == 1:
        raise DoesNotApply("a stage has one rank, and megatron-3d splits weights over the last axis of its mesh")
    return "data-parallel+tensor-parallel" if len(mesh.sizes) > 1 else "tensor-parallel"


def compare_staged(
    question: Question,
    mesh: Mesh,
    request: Request,
    policies: Sequence[str],
    *,
    order: tuple[int, str] | None = None,
    progress: Progress = lambda text: None,
) -> tuple[StagedRow, ...]:
    """A row for each policy: the question's micro-batches on that mesh, in the memory that is requested. `order`:
    stages on each rank and their schedule; None: one, and the policy's own.
    """
    rows: list[StagedRow] = []
    for policy in policies:
        rows.append(_row(question, mesh, request, policy, order or (1, SCHEDULE_OF[policy])))
        one = rows[-1]
        progress(f"baseline {policy}: {one.why or _ms(one.found)}")
    return tuple(rows)


def _row(question: Question, mesh: Mesh, request: Request, policy: str, order: tuple[int, str]) -> StagedRow:
    found, limit = _found(question, mesh, request, policy, order), request.memory
    if isinstance(found, str):
        return StagedRow(policy, None, found)
    if limit is None or found.peak_bytes <= limit:
        return StagedRow(policy, found)
    needs = found.peak_bytes
    if (saving := running_all_again(question, request)) is not None:
        again = _found(question, mesh, saving, policy, order)
        if not isinstance(again, str):
            if again.peak_bytes <= limit:
                return StagedRow(policy, again, again=True)
            needs = min(needs, again.peak_bytes)
    return StagedRow(policy, None, f"does not fit (needs {human(needs)})")


def _found(question: Question, mesh: Mesh, request: Request, policy: str, order: tuple[int, str]) -> Pipeline | str:
    """The pipeline of a policy, whatever memory it takes, or why there is none."""
    try:
        stages = within(policy, within_stage(mesh))
        asked = replace(request, policy=stages, allow=None, memory=None, simulation=False)
        whole = answer(question, asked)
        chunks, schedule = order
        cutting = Cutting.of(whole, mesh, question.pricer.hardware, ((chunks, (schedule,)),), request.memory)
        even = cutting.cuts.even()
        return cutting.pipeline(*(cutting.cuts.best() if even is None else even))
    except (DoesNotApply, NotCut) as error:
        return str(error)
    except Infeasible as error:
        return f"does not fit: {error}"
    except NoAnswerInTime:
        return f"no answer in {request.time_limit_s:g} s"


def _ms(found: Pipeline | None) -> str:
    return "" if found is None else f"{found.step_seconds * 1e3:.3f} ms a step"


def table(chosen: Pipeline, rows: Sequence[StagedRow]) -> str:
    """The comparison as text, one line per policy."""
    lines: list[tuple[str, ...]] = [("policy", "ms per step", "bubble", "peak per rank", "to this plan", "fits")]
    for row in (StagedRow("this plan", chosen), *rows):
        name, found = row.policy, row.found
        if found is None:
            lines.append((name, *"-" * 4, row.why))
            continue
        lines.append(
            (
                name, f"{found.step_seconds * 1e3:.3f}", f"{100 * found.bubble:.1f} %", human(found.peak_bytes),
                f"{found.step_seconds / chosen.step_seconds:.2f} x", FITS[row.again],
            )
        )  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    head = (
        f"baselines, simulated: one training step on {chosen.mesh}, {chosen.whole.hardware}, in "
        f"{chosen.schedule.micro_batches} micro-batches"
    )
    body = [
        "  " + "  ".join((name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)), fits))
        for name, *cells, fits in lines
    ]
    return "\n".join([head, *body]) + "\n"


def documents(chosen: Pipeline, rows: Sequence[StagedRow]) -> list[dict[str, object]]:
    """The same for --json."""
    return [
        {
            "policy": row.policy,
            "simulated_seconds": None if row.found is None else row.found.step_seconds,
            "peak_bytes": None if row.found is None else row.found.peak_bytes,
            "to_this_plan": None if row.found is None else row.found.step_seconds / chosen.step_seconds,
            "recomputed": row.again,
            "why": row.why,
        }
        for row in rows
    ]
