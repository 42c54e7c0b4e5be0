"""What a model returns besides tensors, and what is hung on it, before it is traced.

Key/value caches of transformers models come back from every call whose configuration has `use_cache`, which is the
default. In training nobody reads them: they are left out, and a note says so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.builtin import STOOD_FOR
from autopar.trace.calls import flatten_inputs, with_argument
from autopar.trace.changed import with_copies
from autopar.trace.checks import Check
from autopar.trace.closures import with_parts
from autopar.trace.code import CODE
from autopar.trace.counted import called
from autopar.trace.derivatives import TANGENTS, Derivative, gradients_of
from autopar.trace.drawn_arrays import refuse_kept
from autopar.trace.formulas import Asked, Counted, with_plain_keys
from autopar.trace.given import GivenBack, Rewritten, given_in, rewritten
from autopar.trace.independent import holds_fakes
from autopar.trace.installed import hung_on, take_back
from autopar.trace.left import is_kept, is_made
from autopar.trace.modules import HOOKS, OF_EVERY_MODULE
from autopar.trace.numbers import TEXT, Array, Number
from autopar.trace.reads import Reads
from autopar.trace.records import make_known, make_states_known
from autopar.trace.sharing import NOWHERE, Memory
from autopar.trace.values import MISSING, SCALARS, copied, few_in, own_names


@dataclass(frozen=True)
class Returned:
    """What the traced forward gives: the model's own outputs, and tensors that it keeps as attributes of modules, or
    lists, tuples and dicts of some. `left`: what it writes elsewhere, as `autopar.trace.left.Left.writes`; `changed`:
    what it makes of arguments in place, by path; `given`: what containers among them hold then, and which of them it
    returns. `numbers`: which leaves of these are numbers to whoever calls; `arrays`: which are arrays of numpy.
    `memory`: where they lie. `checks`, `truths`: as `autopar.trace.checks.Checks` has them; `taken`: of each of
    `autopar.trace.branches.Branches.taken` how many are true.
    """

    outputs: Any
    kept: dict[tuple[str, str], Any]
    left: list[Any]
    changed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    given: list[Rewritten | GivenBack] = field(default_factory=list[Rewritten | GivenBack])
    numbers: frozenset[int] = frozenset()
    arrays: frozenset[int] = frozenset()
    memory: Memory = NOWHERE
    checks: dict[Check, Tensor] = field(default_factory=dict[Check, Tensor])
    truths: list[Tensor] = field(default_factory=list[Tensor])
    taken: list[Tensor] = field(default_factory=list[Tensor])

    @property
    def parts(self) -> list[Any]:
        """What holds its leaves, in their order: first the model's own outputs."""
        kept, changed, checks = ([*one.values()] for one in (self.kept, self.changed, self.checks))
        return [self.outputs, kept, self.left, self.given, changed, checks, self.truths, self.taken]

    @property
    def beside(self) -> list[Any]:
        """The leaves that are no outputs of the model."""
        return pytree.tree_leaves(self.parts[1:])


def _together(parts: Any, names: Any) -> Returned:
    outputs, kept, left, given, changed, holds, truths, taken = parts
    of_kept, of_checks, numbers, arrays, memory, _, of_changed, *_ = names
    by_name = (dict(zip(*one, strict=True)) for one in ((of_kept, kept), (of_changed, changed), (of_checks, holds)))
    kept, changed, checks = by_name
    return Returned(
        outputs, kept, [*left], changed, [*given], numbers, arrays, memory, checks, [*truths], [*taken]
    )  # fmt: skip


def numbers_of(spec: pytree.TreeSpec) -> frozenset[int]:
    """`Returned.numbers`, from the tree of one."""
    return spec.context[2]


def arrays_of(spec: pytree.TreeSpec) -> frozenset[int]:
    """`Returned.arrays`, likewise."""
    return spec.context[3]


def given_and_kept(spec: pytree.TreeSpec) -> int:
    """How many leaves it has, from its tree, but for those that are checked or say what branches are taken."""
    return spec.num_leaves - len(spec.context[1]) - spec.context[7] - len(taken_of(spec))


def taken_of(spec: pytree.TreeSpec) -> tuple[str, ...]:
    """The outputs of `Returned.taken`, likewise."""
    count = spec.context[5]
    return tuple(str(place) for place in range(spec.num_leaves - count, spec.num_leaves))


def changed_of(spec: pytree.TreeSpec) -> dict[int, str]:
    """The leaves of `Returned.changed`, and their paths, likewise."""
    return dict(enumerate(spec.context[6], given_and_kept(spec) - len(spec.context[6])))


def memory_of(spec: pytree.TreeSpec) -> Memory:
    """`Returned.memory`, likewise."""
    return spec.context[4]


pytree.register_pytree_node(
    Returned,
    lambda one: (
        one.parts,
        (
            [*one.kept],
            [*one.checks],
            one.numbers,
            one.arrays,
            one.memory,
            len(one.taken),
            [*one.changed],
            len(one.truths),
        ),
    ),
    _together,
    serialized_type_name="autopar.Returned",
)


def settle(model: nn.Module, notes: list[str]) -> bool:
    """Make a copy of a model, which is nobody else's, ready to be traced: hooks of the whole module are for whoever
    calls the parallel one, and key/value caches are not wanted. Whether the model itself would have made one.
    """
    for kind in HOOKS:
        getattr(model, kind).clear()
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
        notes.append("the key/value cache (config.use_cache) is left out: a training step does not read it")
    checkpoints = any(
        getattr(module, "gradient_checkpointing", False) and module.training for module in model.modules()
    )
    return bool(caching) and not checkpoints


def returning(
    model: nn.Module,
    reads: Reads,
    notes: list[str],
    derivatives: Sequence[Derivative] = (),
    changed: Set[str] = frozenset(),
) -> None:
    """Let the copy's forward return, beside its outputs without caches, the tensors that it sets as attributes; of
    derivatives these alone. `changed`: arguments that it changes, by path.
    """
    forward = model.forward
    modules = dict(model.named_modules())

    @functools.wraps(forward)
    def returned(*args: Any, **kwargs: Any) -> Returned:
        arguments = dict(flatten_inputs(args, kwargs)[0])
        kwargs.pop(TANGENTS, None)
        args, kwargs, theirs = with_copies(args, kwargs, changed)
        before, given = hung_on(modules), given_in(args, kwargs)
        parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), _versions(model)
        had = {path: dict(vars(module)) for path, module in modules.items()}
        reads.is_open = True
        try:
            outputs = _without_caches(forward(*args, **kwargs), notes)
            make_known(outputs)
        except Exception as error:
            theirs.fails(error)
            reads.ahead += [*(name for _, name in reads.written), *(f"argument {path}" for path in theirs.written())]
            reads.ahead += sorted(name for name, was in _versions(model).items() if buffers.get(name) != was)
            with contextlib.suppress(TraceError):
                reads.left.take(modules)  # a script may go on with what it keeps
            raise
        finally:
            reads.is_open = False
        _refuse_parameters(parameters, model, reads)
        reads.see_what_is_set_otherwise(had, modules)
        take_back(modules, before, reads)
        _refuse_text([after for _, after, _ in reads.written.values()])
        kept_as = ((f"keeps in {called(place)}", after) for place, (_, after, _) in reads.written.items())
        refuse_kept([("returns", outputs), *kept_as])
        _refuse_rows(modules)
        in_arguments = rewritten(given, outputs)
        kept = _kept(reads, modules)
        outputs = pytree.tree_map(
            lambda leaf: leaf, with_plain_keys(outputs)
        )  # they may be what is written to, which is undone now
        made = Returned(outputs, kept, reads.left.take(modules), theirs.changed(), in_arguments)
        made = _with_tensors(_known(made, reads.counting.asked))
        if not derivatives:
            return made
        return Returned(gradients_of(model, derivatives, made, arguments), {}, [])

    if derivatives:
        returned.__signature__ = with_argument(forward, TANGENTS)  # type: ignore[attr-defined]
    model.forward = returned


def _refuse_rows(modules: Mapping[str, nn.Module]) -> None:
    """Raises TraceError where an attribute holds what stands for rows that a mask picks, or for a list of them."""
    seen = set[int]()
    for path, module in modules.items():
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE and _holds_rows(value, seen):
                raise TraceError(
                    f"forward keeps rows that a mask picks, or a list of them, in {called((path, name))}, and how many "
                    "there are depends on values: keep all rows and the mask, or how many there are"
                )


def _holds_rows(value: Any, seen: set[int], depth: int = 6) -> bool:
    if isinstance(value, (Tensor, nn.Module, Number, *SCALARS)) or id(value) in seen or not depth:
        return False
    if type(value) in STOOD_FOR:
        return True
    seen.add(id(value))
    parts = [*(own_names(value) or {}).values()] or few_in(value)
    return any(_holds_rows(part, seen, depth - 1) for part in parts)


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """What tells a buffer from what it is once it was written to."""
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}


def _kept(reads: Reads, modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], Any]:
    """`Returned.kept`. The modules have it no more: the trace shall not see that it was set."""
    kept: dict[tuple[str, str], Any] = {}
    for place, held in reads.counting.refill(modules).items():
        make_states_known(held)
        reads.written[place] = held, held, ""
    for (path, name), (before, after, _) in reads.written.items():
        if isinstance(after, Counted):  # known without the program
            continue
        if is_kept(after):
            # a list may be one that is written to, which is undone behind this
            kept[path, name] = copied(with_plain_keys(after))
            attributes = vars(modules[path])
            attributes.pop(name, None)
            if before is not MISSING:
                attributes[name] = before
        elif any(map(is_made, pytree.tree_leaves(after))) or _keeps(after):
            raise TraceError(
                f"forward keeps tensors in {called((path, name))}, a "
                f"{type(after).__name__}; return them, or keep each as an attribute of its own"
            )
    return kept


def _refuse_parameters(before: Mapping[str, nn.Parameter], model: nn.Module, reads: Reads) -> None:
    """Raises TraceError where forward gives a module a parameter, or keeps one in an attribute."""
    now = dict(model.named_parameters(remove_duplicate=False))
    known = set(map(id, before.values()))
    kept = [
        called(place)
        for place, (_, after, _) in reads.written.items()
        if not isinstance(after, nn.Module) and any(id(leaf) in known for leaf in pytree.tree_leaves(after))
    ]
    names = [f"self.{name}" for name in {**before, **now} if before.get(name) is not now.get(name)]
    if found := [*names, *kept]:
        raise TraceError(
            f"forward sets {found[0]} to a parameter, or to what holds one, or takes one away, which a program does "
            "not do at every call: set it in __init__, or take the parameter from its module"
        )


def _keeps(value: Any) -> bool:
    """Whether it is an object of the user's that holds tensors of the trace."""
    return not isinstance(value, (nn.Module, *CODE)) and holds_fakes([value])


def _known(returned: Returned, asked: Asked) -> Returned:
    """The same with numbers of Python in the place of counted ones, which each call knows without the program."""
    leaves, spec = pytree.tree_flatten(returned)
    known = {place: one for place, one in enumerate(leaves) if type(one) is Counted and one.asked is asked}
    asked.returned = {place: one.formula.number for place, one in known.items()}
    if not known:
        return returned
    return pytree.tree_unflatten([one.now if place in known else one for place, one in enumerate(leaves)], spec)


def _with_tensors(returned: Returned) -> Returned:
    """The same with tensors in the place of numbers out of them. Raises TraceError where one is in text."""
    leaves, spec = pytree.tree_flatten(returned)
    _refuse_text(leaves)
    numbers = frozenset(place for place, leaf in enumerate(leaves) if isinstance(leaf, Number))
    if not numbers:
        return returned
    arrays = frozenset(place for place in numbers if isinstance(leaves[place], Array))
    leaves = [leaf.tensor if isinstance(leaf, Number) else leaf for leaf in leaves]
    return replace(pytree.tree_unflatten(leaves, spec), numbers=numbers - arrays, arrays=arrays)


def _without_caches(value: Any, notes: list[str]) -> Any:
    """The same structure with None in the place of every cache."""
    if any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(value).__mro__):
        told = f"an output of type {type(value).__name__} is left out: a training step does not read it"
        if told not in notes:
            notes.append(told)
        return None
    if isinstance(value, Mapping):
        changed = {key: _without_caches(part, notes) for key, part in value.items()}
        if all(changed[key] is value[key] for key in changed):
            return value
        if is_dataclass(value):
            names = {one.name for one in fields(value)}
            return replace(value, **{key: part for key, part in changed.items() if key in names})  # type: ignore[type-var]
        return type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        parts = [_without_caches(part, notes) for part in value]
        if all(part is before for part, before in zip(parts, value, strict=True)):
            return value
        return with_parts(value, parts)
    return value


def _refuse_text(values: Sequence[Any]) -> None:
    """Raises TraceError where one is text that a value was written into."""
    if found := next((one for one in values if isinstance(one, str) and TEXT in one), None):
        raise TraceError(
            f"forward returns or keeps text with a value in it, {found!r}, and a program makes no "
            "text: return or keep the value, and write it outside"
        )
