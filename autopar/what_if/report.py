"""The two answers beside each other, as text and as JSON. All times are predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from autopar.plan import Plan
from autopar.plan.reading import wrapped
from autopar.plan.tell import human
from autopar.plan.value import is_product
from autopar.rewrite import plain
from autopar.search.curve import offloaded_bytes, recomputed
from autopar.search.limits import GIB
from autopar.what_if.question import Answers, Worth, fits, worth_of_memory
from cost_models.hardware import IMAGINED
from cost_models.reserve import Room
from cost_models.steps import DEVICE

NOTHING = 5e-5  # relative: differences below are none


def report(answers: Answers, name: str) -> str:
    """`name`: of the plan's file."""
    before, same, best = answers.before, answers.same, answers.best
    said: list[str] = []
    if best is None:
        said.append(f"no best plan then: {answers.why}")
    else:
        said += [_quicker(answers, best), _proven(best), _changed(same, best, answers.is_same)]
    said += _first_order(before, same)
    said += [_worth(worth, before)] if (worth := worth_of_memory(answers)) is not None else []
    head = f"{name}: {before.mesh}, {before.hardware}; what if: {told(answers)}"
    return "\n".join([head, *_table(answers), *(line for one in said for line in wrapped(one))]) + "\n"


def told(answers: Answers) -> str:
    """What is asked, in a few words."""
    imagined = answers.asked.hardware.name.partition(IMAGINED)[2]
    was, room = answers.before.memory_limit, answers.asked.room
    words = [imagined] if imagined else []
    if room is not None and imagined.endswith(f"memory {human(room.limit)}"):  # more than the device has
        words = [f"{imagined} of each device"]
    elif room is not None and (was is None or not math.isclose(was, room.tensors, rel_tol=NOTHING)):
        words.append(f"memory {human(room.limit)} of each device")
    words += [f"{key}={word}" for key, word in answers.asked.pin.items()]
    if answers.asked.allow is not None:
        words.append(f"allow {', '.join(answers.asked.allow) or 'none'}")
    return ", ".join(words) or "nothing else than it has"


# --- the table -------------------------------------------------------------------------------------------------------


def _table(answers: Answers) -> list[str]:
    plans = [answers.before, answers.same, *([] if answers.best is None else [answers.best])]
    rows: list[tuple[str, ...]] = [("", "this plan, now", "this plan then", "the best plan then")[: len(plans) + 1]]
    if any(plan.simulated_seconds is not None for plan in plans):
        rows.append(("step, simulated", *(_ms(plan.predicted_seconds) for plan in plans)))
    rows.append(("sum of its times", *(_ms(plan.step_seconds) for plan in plans)))
    parts = dict.fromkeys(part for plan in plans for part in plan.seconds_by)
    for part in parts:
        times = [plan.seconds_by.get(part, 0.0) for plan in plans]
        if any(times):
            called = part.replace("comm:", "collectives over ")
            rows.append((f"  {called}", *(_ms(seconds) for seconds in times)))
    for tier in dict.fromkeys(tier for plan in plans for tier in plan.peak_bytes):
        held = [plan.peak_bytes.get(tier, 0) for plan in plans]
        if any(held):
            rows.append((f"peak of {tier}", *map(human, held)))
    limit = _limit(answers.asked.room)
    does = ["yes" if fits(plan, answers.asked) else "no" for plan in plans[1:]]
    rows.append((f"fits{limit}", "", *does))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([f"  {first:{widths[0]}}", *(cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True))])
        for first, *cells in rows
    ]


def _limit(room: Room | None) -> str:
    return "" if room is None else f" ({human(room.tensors)} for tensors)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


# --- in words --------------------------------------------------------------------------------------------------------


def _quicker(answers: Answers, best: Plan) -> str:
    now, same, then = (plan.predicted_seconds for plan in (answers.before, answers.same, best))
    if answers.is_same:
        return f"this plan stays the best that is known; then it is {_than(then, now)} now"
    return f"the best plan then is {_than(then, same)} this plan then, {_than(then, now)} now"


def _than(seconds: float, other: float) -> str:
    if math.isclose(seconds, other, rel_tol=NOTHING):
        return "as quick as"
    share = 1 - seconds / other
    return f"{share:.2%} quicker than" if share > 0 else f"{-share:.2%} slower than"


def _proven(best: Plan) -> str:
    if not math.isfinite(best.bound) or best.bound <= 0:
        return "nothing is proven of it"
    found = (
        f"proven, of sums: none takes less than {_ms(best.bound)}; this one takes {_ms(best.step_seconds)}: gap "
        f"{100 * best.gap:.2f} %"
    )
    if best.simulated_seconds is not None and best.simulated_bound:
        found += f"; simulated: none takes less than {_ms(best.simulated_bound)}, for computing alone"
    return found


def _changed(same: Plan, best: Plan, is_same: bool) -> str:
    """In which decisions the best plan is another one."""
    products = [node.name for node in plain(same.graph).nodes if is_product(same.choices[node.name])]
    other = sum(same.choices[name].roles != best.choices[name].roles for name in products if name in best.choices)
    changes = [f"{other} of {len(products)} products are split otherwise"] if other else []
    stored = sum(best.parameters.get(name) != layout for name, layout in same.parameters.items())
    changes += [f"{stored} parameters lie otherwise"] if stored else []
    for what, was, now in (
        ("operators that run twice", recomputed(same), recomputed(best)),
        ("parameters on the host", len(same.residence), len(best.residence)),
    ):
        changes += [f"{what} {was} -> {now}"] if was != now else []
    if (was := offloaded_bytes(same)) != (now := offloaded_bytes(best)):
        changes.append(f"offloaded {human(was)} -> {human(now)}")
    sent = [_sent(plan) for plan in (same, best)]
    for axis in dict.fromkeys([*sent[0], *sent[1]]):
        was, now = (human(by_axis.get(axis, 0)) for by_axis in sent)
        changes += [f"received over {axis} {was} -> {now}"] if was != now else []
    if same.prefetch != best.prefetch:
        told = ["none" if one.prefetch is None else str(one.prefetch) for one in (same, best)]
        changes.append(f"prefetch {told[0]} -> {told[1]}")
    if is_same or not changes:
        return "what changes: nothing of note"
    return f"what changes: {'; '.join(changes)}"


def _sent(plan: Plan) -> dict[str, int]:
    """Axis, or several at once -> bytes that a rank receives in a step."""
    found: dict[str, int] = {}
    for (_, axis), nbytes in plan.comm_bytes.items():
        found[axis] = found.get(axis, 0) + nbytes
    return found


def _first_order(before: Plan, same: Plan) -> Iterator[str]:
    saved = before.step_seconds - same.step_seconds
    if abs(saved) > NOTHING * before.step_seconds:
        word = "saves" if saved > 0 else "loses"
        yield (
            f"first order: this plan {word} {_ms(abs(saved))} of the sum of its times; the best sum then is no larger "
            "than this plan's"
        )


def _worth(worth: Worth, before: Plan) -> str:
    much, more = human(abs(worth.more_bytes)), worth.more_bytes > 0
    by_price, solved = abs(worth.by_price_s), worth.solved_s if more else -worth.solved_s
    price = before.search[f"ms_per_gib:{DEVICE}"]
    assert isinstance(price, float)
    return (
        f"memory: {much} {'more' if more else 'less'} for tensors {'saves about' if more else 'costs about'} "
        f"{_ms(by_price)} of the best sum by the shadow price ({price:.3g} ms for a GiB at the limit of before), "
        f"solved: {_ms(solved)}"
    )


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_json(answers: Answers, name: str) -> dict[str, Any]:
    """Seconds are of a step, bytes of a rank."""
    worth, room, best = worth_of_memory(answers), answers.asked.room, answers.best
    return {
        "plan": name,
        "mesh": str(answers.before.mesh),
        "what_if": told(answers),
        "hardware": answers.asked.hardware.name,
        "hardware_digest": answers.asked.hardware.digest,
        "limit_bytes": None if room is None else room.limit,
        "before": _plan(answers.before),
        "same": {**_plan(answers.same), "fits": answers.fits},
        "best": None if best is None else {
            **_plan(best),
            "is_same": answers.is_same,
            "bound": best.bound if math.isfinite(best.bound) else None,
            "gap": best.gap if math.isfinite(best.gap) else None,
            "simulated_bound": best.simulated_bound,
            "changes": _changed(answers.same, best, answers.is_same),
        },
        "why": None if answers.why is None else str(answers.why),
        "memory": None if worth is None else {
            "more_bytes": worth.more_bytes,
            "saves_by_price_s": worth.by_price_s,
            "saves_solved_s": worth.solved_s,
            "ms_per_gib": worth.by_price_s * 1e3 * GIB / worth.more_bytes if worth.more_bytes else None,
        },
    }  # fmt: skip


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "predicted_seconds": plan.predicted_seconds,
        "simulated_seconds": plan.simulated_seconds,
        "step_seconds": plan.step_seconds,
        "seconds_by": dict(plan.seconds_by),
        "peak_bytes": dict(plan.peak_bytes),
    }
