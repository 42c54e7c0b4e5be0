"""Which of several objects Python draws, or in which order: by the places that it draws, each of which is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from autopar.trace.numbers import Number
from autopar.trace.values import CONSTANT

Called = Callable[[Callable[..., Any], Any, Any], Any]  # of a function that draws, its arguments and named ones
GENERATOR = vars(random)["_inst"]


def among_objects(function: Any, args: Sequence[Any], at_once: bool) -> Callable[[Called, Any, Any], Any] | None:
    """What does as `random.choice`, `choices`, `sample` or `shuffle` does with what are no numbers; None where it is
    another function, or is given numbers. `at_once`: which of several numbers it is is to be known, too.
    """
    name = getattr(function, "__name__", "")
    if getattr(function, "__self__", None) is not GENERATOR or name not in ("choice", "choices", "sample", "shuffle"):
        return None
    if not args or not hasattr(args[0], "__len__") or isinstance(args[0], range):
        return None
    if name == "shuffle":
        return _shuffled if type(args[0]) is list else None
    if not len(args[0]) or (not at_once and all(isinstance(one, (int, float, Number)) for one in args[0])):
        return None

    def chosen(called: Called, args: Any, kwargs: Any) -> Any:
        objects, *rest = args
        places = called(function, (range(len(objects)), *rest), kwargs)
        return objects[int(places)] if name == "choice" else [objects[int(place)] for place in places]

    return chosen


def in_another_order(count: int) -> list[int]:
    """Places from 0 on, shuffled."""
    places = [*range(count)]
    random.shuffle(places)
    return places


def _shuffled(called: Called, args: Any, kwargs: Any) -> None:
    objects, *_ = args
    places = called(in_another_order, (len(objects),), kwargs)
    if all(isinstance(one, CONSTANT) for one in objects) and objects == [*range(len(objects))]:
        objects[:] = places  # as numbers of each call
        return
    objects[:] = [objects[int(place)] for place in places]
