"""The autocast of a GPU, spelled out: what it casts becomes casts in the exported model, so that no autocast is left.

Models are traced on the CPU, whose autocast casts other operators. But autocast looks at nothing but the device of its
operands, and a fake tensor can say that it lies on a GPU where there is none. So a model with such an autocast is
exported on such tensors: its own code then sees the dtypes that it would see there. Each operator of what was exported
is called under that autocast, and what it casts is noted. Then it is called without, on operands that are cast before:
only if that runs the same operators on the same operands are the casts put in front of it. Otherwise it is refused by
name. What has its casts is traced on the CPU as any other model.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate, map_arg

from autopar._compat import FakeTensorMode, TorchDispatchMode, pytree
from autopar.errors import TraceError
from autopar.trace.ambient import GIVE_PRECISION, AutocastState, autocast_as, autocast_state, without_autocast
from autopar.trace.lines import line_of, line_of_node
from autopar.trace.origins import tensors_in

CAST = torch.ops.aten._to_copy.default
OPERATOR: Any = type(torch.ops.aten._to_copy.default)
CHECK = torch.ops.aten._assert_tensor_metadata.default


class Autocast(NamedTuple):
    """Whether it is on, and what it casts to."""

    enabled: bool
    dtype: torch.dtype


NONE = Autocast(False, torch.bfloat16)


def spell_out(
    module: fx.GraphModule, inputs: Sequence[Any], around: Autocast, device: str, mode: FakeTensorMode
) -> None:
    """Put the casts of `device`'s autocast into an exported module. `around`: the one it is called under; `inputs`: its
    flat (fake) inputs. Regions of the autocast of another device do nothing there, and are switched off, too.

    Raises TraceError, with the line, for an operator under autocast of which neither can be done.
    """
    spelling = _Spelling(device, mode)
    with torch.no_grad(), without_autocast():
        spelling.run(module, inputs, around)


@contextlib.contextmanager
def naming_autocast(device: str, on_its_tensors: bool) -> Iterator[None]:
    """Where a model is exported on fake tensors of a device for which this torch is not built, some of what it does
    (indexing, statistics of batch norms) asks for the device: a TraceError with the line says so.
    """
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        if not on_its_tensors or "not linked with support for" not in str(error):
            raise
        raise TraceError(
            f"autocast is on, and what {device} casts is not known to this torch, which was built without {device}"
            f"{line_of(error)}: use one that was, or leave autocast out and {GIVE_PRECISION}"
        ) from error


def bring_home(module: fx.GraphModule, trained: Collection[str], mode: FakeTensorMode) -> None:
    """Let an exported module be one of the CPU: its tensors, and those that it makes.

    `trained`: names of parameters that require grad, which none does on a device that is not there: torch's autograd
    would look for it.
    """
    named = module.named_parameters(remove_duplicate=False)
    train = {id(parameter) for name, parameter in named if name in trained}
    home: dict[int, Tensor] = {}
    held: list[Tensor] = []  # so that ids stay theirs

    def of(value: Tensor) -> Tensor:
        if id(value) not in home:
            held.append(value)
            with mode:
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            home[id(value)] = nn.Parameter(made, id(value) in train) if isinstance(value, nn.Parameter) else made
        return home[id(value)]

    for part in module.modules():
        places: Any = (part._parameters, part._buffers, vars(part))
        for tensors in places:
            for name, value in tensors.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    tensors[name] = of(value)
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _at_home)
            part.recompile()


def _at_home(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


class _Record(TorchDispatchMode):
    """The operators that run within. Tensors go by numbers, those of `operands` first, beside their dtypes.

    `strip`: casts of operands are left out and noted in `casts`, number -> dtype; what they make has their number.
    """

    def __init__(self, operands: Sequence[Tensor], strip: bool) -> None:
        super().__init__()
        self.held: list[Tensor] = []  # so that ids stay theirs
        self.number: dict[int, int] = {}
        self.count = 0
        self.strip, self.casts = strip, dict[int, set[torch.dtype]]()
        self.seen: list[object] = []
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        for operand in operands:
            self._of(operand)
        self.operands = self.count

    def _of(self, tensor: Tensor) -> int:
        if id(tensor) not in self.number:
            self.held.append(tensor)
            self.count += 1
            self.number[id(tensor)] = self.count
        return self.number[id(tensor)]

    def _told(self, value: Any) -> object:
        return (self._of(value), value.dtype) if isinstance(value, Tensor) else repr(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # autocast asks where an operand lies
            return made
        if self.strip and args and isinstance(args[0], Tensor) and self._of(args[0]) <= self.operands:
            number = self._of(args[0])
            if func is CAST and made.dtype != args[0].dtype and made.device == args[0].device:
                self.casts.setdefault(number, set()).add(made.dtype)
                self.held.append(made)
                self.number[id(made)] = number
                return made
        self.calls.append((func, args, kwargs, made))
        leaves = [self._told(leaf) for leaf in pytree.tree_leaves(args)]
        self.seen.append((str(func), leaves, [(name, self._told(value)) for name, value in sorted(kwargs.items())]))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._of(leaf)
        return made


class _Spelling:
    def __init__(self, device: str, mode: FakeTensorMode) -> None:
        self.device, self.mode = device, mode

    def run(self, module: fx.GraphModule, inputs: Sequence[Any], around: Autocast) -> Any:
        """Outputs of the module, whose nodes get their casts."""
        value_of: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in [*module.graph.nodes]:
            if node.op == "placeholder":
                value_of[node] = next(given)
            elif node.op == "get_attr":
                value_of[node] = operator.attrgetter(str(node.target))(module)
            elif node.target is CHECK:  # of dtypes as they were without casts
                module.graph.erase_node(node)
            elif node.op == "output":
                return map_arg(node.args[0], value_of.__getitem__)
            else:
                value_of[node] = self.value(module, node, value_of, around)
        raise AssertionError("a graph without an output")

    def value(self, module: fx.GraphModule, node: fx.Node, value_of: dict[fx.Node, Any], around: Autocast) -> Any:
        call: Any = map_arg((node.args, node.kwargs), value_of.__getitem__)
        args, kwargs = call
        name = getattr(node.target, "__name__", str(node.target))
        if name == "wrap_with_autocast":
            device, dtype, enabled, cached, part, *rest = args
            inside = Autocast(enabled, dtype or torch.get_autocast_dtype(device)) if device == self.device else around
            node.args = (device, dtype, False, cached, *node.args[4:])
            return self.run(part, rest, inside)
        if name == "wrap_with_set_grad_enabled":
            return self.run(args[1], args[2:], around)
        if node.op == "call_module":
            part: Any = module.get_submodule(str(node.target))
            return self.run(part, args, around)
        if node.op == "call_method":
            target: Callable[..., Any] = getattr(torch.Tensor, str(node.target))
        else:
            assert callable(node.target)
            target = node.target
        if not around.enabled:
            with self.mode:
                return target(*args, **kwargs)
        if getattr(target, "namespace", "") == "higher_order":
            self.refuse(node, name)
        return self.cast(node, target, value_of, (args, kwargs), around)

    def cast(
        self, node: fx.Node, target: Callable[..., Any], value_of: dict[fx.Node, Any], call: Any, around: Autocast
    ) -> Any:
        """The value of an operator under autocast, and its casts in front of it."""
        args, kwargs = call
        operands = tensors_in((args, kwargs))

        def record(args: Any, kwargs: Any, under: Autocast, strip: bool) -> tuple[_Record | None, Any]:
            tensors = tensors_in((args, kwargs))
            try:
                with self.mode, _Record(tensors, strip) as found, autocast_as(self.state(under)):
                    return found, target(*args, **kwargs)
            except (RuntimeError, TypeError):
                if under.enabled:
                    raise
                return None, None

        off = Autocast(False, around.dtype)
        as_is, value = record(args, kwargs, around, strip=False)
        without, _ = record(args, kwargs, off, strip=False)
        assert as_is is not None
        if without is not None and without.seen == as_is.seen:
            return value
        stripped, _ = record(args, kwargs, around, strip=True)
        assert stripped is not None
        if stripped.casts and all(len(dtypes) == 1 for dtypes in stripped.casts.values()):
            numbered = ((id(one), stripped.number[id(one)]) for one in operands)
            dtype_of = {key: min(stripped.casts[n], key=str) for key, n in numbered if n in stripped.casts}
            cast_args, cast_kwargs = self.with_casts(call, dtype_of)
            same, _ = record(cast_args, cast_kwargs, off, strip=True)
            named = {one: dtype_of[key] for one in node.all_input_nodes if (key := id(value_of[one])) in dtype_of}
            is_same = same is not None and same.seen == stripped.seen and not same.casts
            if is_same and len({id(value_of[one]) for one in named}) == len(dtype_of) and not _changes(target):
                _insert(node, named)
                return value
        if self.write(node, as_is, value, value_of):
            return value
        self.refuse(node, str(target))
        raise AssertionError

    def write(self, node: fx.Node, found: _Record, value: Any, value_of: dict[fx.Node, Any]) -> bool:
        """Put what an operator ran under autocast in its place: some casts are of values in between."""
        if any(func._schema.is_mutable for func, *_ in found.calls) or not isinstance(value, Tensor):
            return False
        made = {id(value_of[one]): one for one in node.all_input_nodes}

        def known(leaf: Any) -> Any:
            return made[id(leaf)] if isinstance(leaf, Tensor) else leaf

        try:
            for func, args, kwargs, result in found.calls:
                with node.graph.inserting_before(node):
                    call = node.graph.call_function(func, pytree.tree_map(known, args), pytree.tree_map(known, kwargs))
                    call.meta = {key: kept for key, kept in node.meta.items() if key != "val"}
                    if isinstance(result, Tensor):
                        made[id(result)] = call
                        continue
                    for place, part in enumerate(result):
                        if isinstance(part, Tensor):
                            made[id(part)] = node.graph.call_function(operator.getitem, (call, place))
            last = made[id(value)]
        except KeyError:  # a tensor that came from elsewhere
            return False
        node.replace_all_uses_with(last)
        value_of[last] = value
        node.graph.erase_node(node)
        return True

    def with_casts(self, call: Any, dtype_of: dict[int, torch.dtype]) -> Any:
        made: dict[int, Tensor] = {}

        def cast(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) not in dtype_of:
                return leaf
            if id(leaf) not in made:
                with self.mode:
                    made[id(leaf)] = leaf.to(dtype_of[id(leaf)])
            return made[id(leaf)]

        return pytree.tree_map(cast, call)

    def state(self, around: Autocast) -> AutocastState:
        others = ((device, False, dtype) for device, _, dtype in autocast_state() if device != self.device)
        return (*others, (self.device, around.enabled, str(around.dtype).removeprefix("torch.")))

    def refuse(self, node: fx.Node, name: str) -> None:
        raise TraceError(
            f"what autocast of {self.device} does to {name}{line_of_node(node)} cannot be spelled out as casts, as it "
            "changes its operands or gives more than a tensor; call it outside of autocast, or leave autocast out and "
            f"{GIVE_PRECISION}"
        )


def _insert(node: fx.Node, dtype_of: dict[fx.Node, torch.dtype]) -> None:
    """Casts in front of the node, of those operands that have a dtype there."""
    cast_of: dict[fx.Node, fx.Node] = {}
    for operand, dtype in dtype_of.items():
        with node.graph.inserting_before(node):
            cast_of[operand] = node.graph.call_method("to", (operand, dtype))
        cast_of[operand].meta = {key: kept for key, kept in node.meta.items() if key != "val"}
    node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda one: cast_of.get(one, one))


def _changes(target: Callable[..., Any]) -> bool:
    """Whether it changes an operand, which a cast would keep from the model."""
    return isinstance(target, OPERATOR) and target._schema.is_mutable
