"""Where forward draws from Python's or numpy's own random generator, and what stands there while it is traced."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar._compat import FakeTensor, FakeTensorMode, pytree
from autopar.errors import TraceError
from autopar.trace.ahead import INSTEAD
from autopar.trace.asked import Asked
from autopar.trace.drawn import Draws
from autopar.trace.drawn_arrays import Drawn
from autopar.trace.drawn_objects import GENERATOR, among_objects
from autopar.trace.lines import NUMPYS, caller, line_here
from autopar.trace.numbers import Number
from autopar.trace.numpys import is_array
from autopar.trace.outside import states_outside, undrawn, unlike
from autopar.trace.values import is_torchs

# Modules with functions that draw from their own generator, that generator, and functions that are none of its methods.
GENERATORS = (
    (random, GENERATOR, ()),
    (np.random, vars(np.random.mtrand)["_rand"], ("seed", "ranf", "sample")),
)
MOST_TRACES = 5
FUNCTIONS = (types.FunctionType, staticmethod, classmethod)
STATES = ("getstate", "setstate", "get_state", "set_state")


@dataclass(frozen=True, eq=False)  # nobody compares globals
class Site:
    """Where the name of a function is that draws, and is given no tensors but masks and numbers: `held` is a dict of
    globals, or the class of a module.
    """

    held: Any
    name: str
    was: Any

    def put(self, value: Any) -> None:
        if isinstance(self.held, dict):
            self.held[self.name] = value
        else:
            setattr(self.held, self.name, value)


MADE = ((np.random, "default_rng"), (np.random, "RandomState"), (random, "Random"))
ALWAYS = (
    *(Site(vars(where), name, vars(where)[name]) for where, name in MADE),
    *(Site(vars(where), name, vars(where)[name]) for where, *_ in GENERATORS for name in STATES if name in vars(where)),
)


@dataclass
class _Seen:
    """What a run shows: the first `line` that draws, the globals of all code that does, and for each draw the calls
    that it was made in, which are given no tensors, the outermost last. `gave`: of these what gives no tensors either.
    """

    line: str | None = None
    globals: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    draws: list[list[tuple[types.FrameType, list[Site]]]] = field(default_factory=list[Any])
    gave: set[types.FrameType] = field(default_factory=set[types.FrameType])

    def sites(self) -> list[Site]:
        found = dict[tuple[int, str], Site]()
        for calls in self.draws:
            known = [sites for frame, sites in calls if frame in self.gave and sites]
            found |= {(id(site.held), site.name): site for site in (known[-1] if known else ())}
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
        with mode, undrawn(unlike(states_outside())):
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

    def run_again(self, model: nn.Module, asked: Asked) -> None:
        """`Draws.run_again`, of the model as it is now."""
        modules = dict(model.named_modules(remove_duplicate=False))
        self.draws.run_again(modules, lambda number: asked.value(number, asked.arguments.values))

    def refuse_others(self, state: tuple[int, int]) -> None:
        """Raise TraceError where something has drawn since that was the `random_state`, behind the export."""
        if random_state() != state:
            raise TraceError(
                "something that forward calls draws from Python's or numpy's generator where no trace sees it (in a "
                "torch.autograd.Function, a function or property that is cached, a branch that is taken by values), "
                "and a program would repeat that: draw in the module's forward, ahead of that, and pass the numbers"
            )

    @contextlib.contextmanager
    def standing(self, model: nn.Module) -> Iterator[None]:
        """Inside, what forward of `model` draws is noted."""
        self.draws.paths_of = {id(vars(module)): path for path, module in model.named_modules()}
        sites = [*self.sites, *ALWAYS, Site(vars(torch), "from_numpy", torch.from_numpy)]
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
        if site in ALWAYS:
            return _refusing(was) if site.name in STATES else _seeded(was)
        if was is torch.from_numpy:
            return partial(_from_numpy, was)
        if isinstance(site.held, type) and isinstance(was, types.FunctionType):

            def method(module: Any, *args: Any, **kwargs: Any) -> Any:
                return draws.called(partial(was, module), args, kwargs, module, site.name)

            return method
        if isinstance(was, classmethod):
            return classmethod(lambda kind, *args, **kwargs: draws.called(partial(was.__func__, kind), args, kwargs))
        plain: Callable[..., Any] = was.__func__ if isinstance(was, staticmethod) else was

        def function(*args: Any, **kwargs: Any) -> Any:
            if is_torchs(caller(1)):  # torch's own numbers for a trace
                with undrawn():
                    return plain(*args, **kwargs)
            if (chosen := among_objects(plain, args, draws.are_at_once)) is not None:
                return chosen(draws.called, args, kwargs)
            return draws.called(plain, args, kwargs)

        return staticmethod(function) if isinstance(was, staticmethod) else function


def _from_numpy(function: Callable[..., Any], array: Any) -> Any:
    """`torch.from_numpy`, of what is drawn too; of others by a function that is seen, and does the same."""
    if type(array) is Drawn:
        return array.shared()
    if isinstance(array, FakeTensor):  # stands for an array that scipy gives (`autopar.trace.assignments`)
        return array
    return torch.as_tensor(array) if is_array(array) else function(array)


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    def states(*args: Any, **kwargs: Any) -> Any:
        if is_torchs(caller(1)):
            return function(*args, **kwargs)
        raise TraceError(
            f"forward asks for the state of Python's or numpy's generator, or sets it{line_here()}, and what it draws "
            "is drawn ahead of each call: do that outside of forward"
        )

    return states


class _Kind(type):
    """Of classes that stand for the one that they are made from."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__bases__[0])


def _seeded(kind: Any) -> Any:
    """Stands for a class of generators, or what makes one: without a seed each call would draw from another."""
    is_class = isinstance(kind, type)

    def made(*args: Any, **kwargs: Any) -> Any:
        if not any(one is not None for one in (*args, *kwargs.values())) and not is_torchs(caller(1 + is_class)):
            raise TraceError(f"forward draws from a generator that has no seed{line_here()}: {INSTEAD}")
        if any(isinstance(one, Number) or type(one) is Drawn for one in (*args, *kwargs.values())):
            raise TraceError(f"forward draws the seed of a generator{line_here()}: {INSTEAD}")
        return kind(*args, **kwargs)

    def __new__(_: Any, *args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs)

    return _Kind(kind.__name__, (kind,), {"__new__": __new__}) if is_class else made


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


def _calls_without_tensors(frame: types.FrameType | None) -> Iterator[tuple[types.FrameType, list[Site]]]:
    """The functions that run in this frame and further out, as far as they are given no tensors."""
    while frame is not None and not is_torchs(frame.f_code.co_filename):
        code = frame.f_code
        if not code.co_name.startswith("<") and not code.co_flags & inspect.CO_GENERATOR:
            given = code.co_argcount + code.co_kwonlyargcount + sum(map(bool, (code.co_flags & 4, code.co_flags & 8)))
            values = [frame.f_locals.get(name) for name in code.co_varnames[:given]]
            tensors = [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]
            if code.co_name == "forward" or any(one.is_floating_point() or one.is_complex() for one in tensors):
                return  # masks and lengths may be arguments
            yield frame, [*_sites(frame, values[0] if values else None)]
        frame = frame.f_back


def _sites(frame: types.FrameType, first: Any) -> Iterator[Site]:
    """Where names of the function are that runs in `frame`, and is given `first`."""
    outer = frame.f_back
    while outer is not None and outer.f_code.co_name.startswith("<"):
        outer = outer.f_back
    if outer is None:
        return
    caller_is = outer.f_locals.get(outer.f_code.co_varnames[0]) if outer.f_code.co_argcount else None
    kinds = [kind for of in (first, caller_is) if isinstance(of, nn.Module) for kind in type(of).__mro__]
    kinds += first.__mro__ if isinstance(first, type) else ()
    for held in (*kinds, outer.f_globals, frame.f_globals):
        for name, value in (held if isinstance(held, dict) else vars(held)).items():
            if isinstance(value, FUNCTIONS) and _code(value) is frame.f_code:
                yield Site(held, name, value)


def _code(value: Any) -> types.CodeType | None:
    return getattr(value.__func__ if isinstance(value, staticmethod | classmethod) else value, "__code__", None)


def _is_of_numbers(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(one, bool | int | float | np.generic | np.ndarray) for one in leaves)


def _distinct(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*{id(one): one for one in found}.values()]


def random_state() -> tuple[int, int]:
    """That of Python's and numpy's own generators, to compare."""
    pythons, (name, keys, *rest) = states_outside()  # of which one is a normal number that is left over
    return hash(pythons), hash((name, keys.tobytes(), *rest))
