"""Where forward draws from Python's or numpy's own random generator, and what stands there while it is traced."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar._compat import FakeTensorMode, pytree
from autopar.errors import TraceError
from autopar.trace.drawn import INSTEAD, Drawn, Draws
from autopar.trace.lines import NUMPYS, caller, line_here
from autopar.trace.values import is_torchs

# Modules with functions that draw from their own generator, that generator, and functions that are none of its methods.
GENERATORS = (
    (random, vars(random)["_inst"], ()),
    (np.random, vars(np.random.mtrand)["_rand"], ("seed", "ranf", "sample")),
)
MOST_TRACES = 5
_DEFAULT_RNG = np.random.default_rng
STATES = ("getstate", "setstate", "get_state", "set_state")


@dataclass(frozen=True)
class Site:
    """Where the name of a function is that draws, and is given no tensors but masks and numbers: in globals, or in the
    class of a module.
    """

    held: dict[str, Any] | type
    name: str
    was: Any

    def put(self, value: Any) -> None:
        if isinstance(self.held, dict):
            self.held[self.name] = value
        else:
            setattr(self.held, self.name, value)


@dataclass
class _Seen:
    """What a run shows: the first `line` that draws, the globals of all code that does, and for each draw the calls
    that it was made in, which are given no tensors, the outermost last. `gave`: of these what gives no tensors either.
    """

    line: str | None = None
    globals: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    draws: list[list[tuple[types.FrameType, Site | None]]] = field(default_factory=list[Any])
    gave: set[types.FrameType] = field(default_factory=set[types.FrameType])

    def sites(self) -> list[Site]:
        found = dict[tuple[int, str], Site]()
        for calls in self.draws:
            sites = [site for frame, site in calls if frame in self.gave and site is not None]
            if sites:
                found[id(sites[-1].held), sites[-1].name] = sites[-1]
        return [*found.values()]


@dataclass
class Drawing:
    """What stands in the place of functions that draw, while `draws` is noted."""

    draws: Draws = field(default_factory=Draws)
    sites: list[Site] = field(default_factory=list[Site])
    traces: int = 0  # since it was seen that something is drawn

    def is_settled(self) -> bool:
        """Whether the last trace was given all that forward draws. Raises TraceError where none is."""
        self.traces += self.draws.are_there
        if self.traces > MOST_TRACES:
            raise TraceError(
                f"how much forward draws from Python's or numpy's generator hangs on what it draws: {INSTEAD}"
            )
        return not self.draws.are_there or (self.traces > 1 and self.draws.are_as_given)

    def look(self, model: nn.Module, call: Any, mode: FakeTensorMode) -> bool:
        """See where forward draws, as far as it runs without values; False where it does not. Raises TraceError, with
        the line, where that was seen before, and it still does.
        """
        args, kwargs = call
        with mode:
            seen = _run_and_see(lambda: nn.Module.__call__(model, *args, **kwargs))
        if seen.line is None:
            return False
        if self.draws.are_there:
            raise TraceError(
                f"a random number that Python or numpy draws at {seen.line} would be the same at every call; {INSTEAD}"
            )
        self.draws.are_there = True
        self.sites = seen.sites() + [
            Site(held, name, value)
            for held in [*(vars(module) for module, *_ in GENERATORS), *_distinct(seen.globals)]
            for name, value in held.items()
            if _is_generators(value)
        ]
        return True

    @contextlib.contextmanager
    def standing(self, model: nn.Module) -> Iterator[None]:
        """Inside, what forward of `model` draws is noted."""
        self.draws.paths_of = {id(vars(module)): path for path, module in model.named_modules()}
        sites = [*self.sites, Site(vars(np.random), "default_rng", np.random.default_rng)]
        if self.draws.are_there:
            sites.append(Site(vars(torch), "from_numpy", torch.from_numpy))
        stand_ins = [self._stand_in(site) for site in sites]
        self.draws.in_place_of = {id(one): site.was for one, site in zip(stand_ins, sites, strict=True)}
        try:
            for site, one in zip(sites, stand_ins, strict=True):
                site.put(one)
            yield
        finally:
            self.draws.in_place_of = {}
            for site in sites:
                site.put(site.was)

    def _stand_in(self, site: Site) -> Any:
        draws, was = self.draws, site.was
        if site.name == "default_rng":
            return _seeded
        if site.name == "from_numpy":
            return lambda array: array.tensor() if type(array) is Drawn else was(array)
        if isinstance(site.held, type) and isinstance(was, types.FunctionType):

            def method(module: Any, *args: Any, **kwargs: Any) -> Any:
                if draws.is_drawing or not draws.knows((args, kwargs)):
                    return was(module, *args, **kwargs)
                return draws.computed(module, args, kwargs, site.name)

            return method
        plain: Callable[..., Any] = was.__func__ if isinstance(was, staticmethod) else was

        def function(*args: Any, **kwargs: Any) -> Any:
            is_run = draws.is_drawing or not draws.knows((args, kwargs))  # where it is, what it draws with is noted
            return plain(*args, **kwargs) if is_run else draws.computed(plain, args, kwargs)

        return staticmethod(function) if isinstance(was, staticmethod) else function


def _seeded(*args: Any, **kwargs: Any) -> np.random.Generator:
    """`np.random.default_rng`: without a seed each call would draw from another generator."""
    if not any(one is not None for one in (*args, *kwargs.values())) and not is_torchs(caller(1)):
        raise TraceError(f"forward draws from a generator of numpy's that has no seed{line_here()}: {INSTEAD}")
    return _DEFAULT_RNG(*args, **kwargs)


def _is_generators(value: Any) -> bool:
    """Whether that is a function that draws from Python's or numpy's own generator."""
    for module, generator, others in GENERATORS:
        if getattr(value, "__self__", None) is generator:
            return getattr(value, "__name__", "") not in STATES
        if any(value is vars(module).get(name) for name in others):
            return True
    return False


def _run_and_see(run: Callable[[], object]) -> _Seen:
    seen, at, states = _Seen(), list[types.FrameType](), [random_state()]
    wanted = set[types.FrameType]()

    def step(frame: types.FrameType, event: str, arg: Any) -> Any:
        if is_torchs(frame.f_code.co_filename) or NUMPYS in frame.f_code.co_filename:
            return None
        if (now := random_state()) != states[-1] and at:
            seen.line = seen.line or f"{at[-1].f_code.co_filename}:{at[-1].f_lineno}"
            seen.globals.append(at[-1].f_globals)
            seen.draws.append(calls := [*_calls_without_tensors(at[-1])])
            wanted.update(one for one, _ in calls)
        states[-1] = now
        if event == "return" and frame in wanted and _is_of_numbers(arg):
            seen.gave.add(frame)
        if event == "line":
            at[:] = [frame]
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        run()
    except Exception:  # without values it goes no further: whose numbers it needed may be what draws
        seen.gave.update(frame for calls in seen.draws[-1:] for frame, _ in calls)
    finally:
        sys.settrace(before)
    return seen


def _calls_without_tensors(frame: types.FrameType | None) -> Iterator[tuple[types.FrameType, Site | None]]:
    """The functions that run in this frame and further out, as far as they are given no tensors."""
    while frame is not None and not is_torchs(frame.f_code.co_filename):
        code = frame.f_code
        if not code.co_name.startswith("<"):
            given = code.co_argcount + code.co_kwonlyargcount + sum(map(bool, (code.co_flags & 4, code.co_flags & 8)))
            values = [frame.f_locals.get(name) for name in code.co_varnames[:given]]
            tensors = [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]
            if code.co_name == "forward" or any(one.is_floating_point() or one.is_complex() for one in tensors):
                return  # masks and lengths may be arguments
            yield frame, _site(frame, values[0] if values else None)
        frame = frame.f_back


def _site(frame: types.FrameType, first: Any) -> Site | None:
    """Where the name of the function is that runs in `frame`, and is given `first`; None where that is nowhere."""
    outer = frame.f_back
    while outer is not None and outer.f_code.co_name.startswith("<"):
        outer = outer.f_back
    if outer is None:
        return None
    caller_is = outer.f_locals.get(outer.f_code.co_varnames[0]) if outer.f_code.co_argcount else None
    for of in (first, caller_is):
        for kind in type(of).__mro__ if isinstance(of, nn.Module) else ():
            for name, value in vars(kind).items():
                if isinstance(value, types.FunctionType | staticmethod) and _code(value) is frame.f_code:
                    return Site(kind, name, value)
    names = outer.f_globals
    return next((Site(names, name, value) for name, value in names.items() if _code(value) is frame.f_code), None)


def _code(value: Any) -> types.CodeType | None:
    return getattr(value.__func__ if isinstance(value, staticmethod) else value, "__code__", None)


def _is_of_numbers(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(one, bool | int | float | np.generic | np.ndarray) for one in leaves)


def _distinct(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*{id(one): one for one in found}.values()]


def random_state() -> tuple[int, int]:
    """That of Python's and numpy's own generators, to compare."""
    name, keys, place, *_ = np.random.get_state()
    return hash(random.getstate()), hash((name, keys.tobytes(), place))  # type: ignore[union-attr]
