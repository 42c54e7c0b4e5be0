"""The command line where several machines, or numbers of devices, are asked for: a table in the place of a plan."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autopar.errors import BadArgument, Infeasible, NoAnswerInTime
from autopar.ir.words import count_of
from autopar.machine.cli import INTERRUPTED, writable, writing
from autopar.machine.device import device_type_of
from autopar.search import sizing, stopping
from autopar.search.command.arguments import Asked, files_read
from autopar.search.command.posing import in_best_rounds, posed
from autopar.search.context import Progress
from autopar.search.problems import Stop
from autopar.search.request import Request
from autopar.search.sizing import Point, Sizing, counted
from autopar.trace import Captured
from cost_models.whole_file import write_whole

ONE_PLAN = (
    "output", "html", "dot", "trace", "problem", "memory_curve", "baselines", "policy", "profile", "top",
)  # fmt: skip  # what belongs to a plan, by the names of the arguments
NOT_SEARCHED = "not searched: interrupted"
OF_A_TABLE = ("price", "tokens", "days", "picture")


def request_of(given: argparse.Namespace, asked: Asked) -> Request:
    """What the arguments request of a search."""
    return Request(
        outputs=given.outputs, time_limit_s=given.time_limit, pin=asked.pin, allow=asked.allow,
        simulation=not given.no_simulation,
    )  # fmt: skip


def is_sizing(given: argparse.Namespace) -> bool:
    """Whether a table is asked for, if only of one line."""
    return any(getattr(given, name) is not None for name in OF_A_TABLE)


def sized(given: argparse.Namespace, several: Sequence[Asked], progress: Progress, check: Callable[[], None]) -> int:
    """Print the table; returns the exit status. Raises as the search of one plan does, where no point has a plan.

    Ctrl-C: the points that were found by then are the table, and it says which were not.
    """
    prices, picture = _checked(given, several)
    captured: dict[str, Captured] = {}
    points: list[Point] = []
    errors: list[Exception] = []
    check()
    with stopping.until_pressed(lambda: progress(stopping.AGAIN)) as stop:
        with contextlib.redirect_stdout(sys.stderr):
            for asked in several:
                points.append(_point(given, asked, captured, progress, errors, stop))
        interrupted = stop()
        first = next((point.plan for point in points if point.plan is not None), None)
        if first is None:
            raise KeyboardInterrupt if interrupted else errors[0]
        unit, per_step = counted(first)
        found = Sizing(tuple(points), unit, per_step, prices, given.tokens, given.days)
        if picture is not None:
            with writing(picture):
                write_whole(picture, sizing.picture(found))
            progress(f"wrote {picture}")
        text = sizing.told(found)
        if given.json:
            text = json.dumps(sizing.document(found), indent=1, allow_nan=False) + "\n"
        print(text, end="", flush=True)
    if interrupted:
        print(f"autopar.search: {stopping.TABLE}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _point(
    given: argparse.Namespace,
    asked: Asked,
    captured: dict[str, Captured],
    progress: Progress,
    errors: list[Exception],
    stop: Stop,
) -> Point:
    """The best plan of so many devices; the model is traced once for each type of device."""
    kind, devices = device_type_of(asked.hardware), asked.meshes[0].ranks
    if stop():
        return Point(asked.hardware.name, devices, None, NOT_SEARCHED)
    progress(f"{count_of(devices, 'device')} of {asked.hardware.name}")
    posing = posed(asked, given.optimizer, captured.get(kind), progress)
    captured[kind] = posing.captured
    try:
        _, best = in_best_rounds(posing, request_of(given, asked), progress, stop)
        plan = best.plan
    except (Infeasible, NoAnswerInTime) as error:
        if stop():
            return Point(asked.hardware.name, devices, None, NOT_SEARCHED)
        errors.append(error)
        why = "does not fit" if isinstance(error, Infeasible) else "no answer in time"
        return Point(asked.hardware.name, devices, None, why)
    if stop():  # the best by then: in a table it would stand beside others as if it was the best there is
        return Point(asked.hardware.name, devices, None, NOT_SEARCHED)
    return Point(asked.hardware.name, devices, plan)


def _checked(given: argparse.Namespace, several: Sequence[Asked]) -> tuple[Mapping[str, float], Path | None]:
    """Prices by machine, and the file of the picture. Raises BadArgument."""
    table = "several devices or machines give one"
    if (one := next((name for name in OF_A_TABLE if getattr(given, name) is not None), None)) is not None:
        table = f"--{one} gives one"
    for name in ONE_PLAN:
        if given.top > 1 if name == "top" else getattr(given, name):
            flag = "-o" if name == "output" else "--" + name.replace("_", "-")
            raise BadArgument(f"{flag} is about one plan, not about a table, and {table}; leave one of the two out")
    for flag, value in (("--tokens", given.tokens), ("--days", given.days)):
        if value is not None and not 0 < value < math.inf:
            raise BadArgument(f"{flag} {value:g} makes no sense; give a number above 0")
    if given.days is not None and given.tokens is None:
        raise BadArgument("--days says within what time, and not for how much; give --tokens, for example 1e12")
    picture = None if given.picture is None else writable(given.picture, "--picture", files_read(given))
    if picture is not None and picture.suffix != ".svg":
        raise BadArgument(f"--picture {given.picture} is no picture; name a file.svg")
    return _prices(given.price, list(dict.fromkeys(asked.hardware.name for asked in several))), picture


def _prices(text: str | None, machines: Sequence[str]) -> dict[str, float]:
    """Machine -> what an hour of a device costs."""
    if text is None:
        return {}
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0 < price < math.inf:
            raise BadArgument(
                f"--price {part.strip()!r} is no price; write 2.5, or {machines[0]}=2.5 with commas between"
            )
        if equals and name not in machines:
            raise BadArgument(f"--price names {name!r}; of the table are {', '.join(machines)}")
        priced = {name: price} if equals else dict.fromkeys(machines, price)
        if twice := next((machine for machine in priced if machine in found), None):
            raise BadArgument(f"--price says twice what {twice} costs; leave one out")
        found |= priced
    return found
