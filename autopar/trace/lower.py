"""The captured fx graph becomes a plain `Graph`: one node per operator, torch constants as `Const`, no getitem."""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import re
from collections.abc import Set
from dataclasses import replace
from typing import Any, Literal

import torch

from autopar.errors import TraceError
from autopar.ir.attention import STATES
from autopar.ir.graph import RANDOM_STATE, Arg, Const, Graph, Node, Ref, Result, TensorType
from autopar.trace.capture import Captured
from autopar.trace.strided import without_memory

DROPPED_KWARGS = ("pin_memory", "layout", "memory_format", "non_blocking")
# Nothing writes to what a functional graph has split: these and the safe ones are the same.
SAFE = {
    "aten.unsafe_split.Tensor": "aten.split.Tensor",
    "aten.unsafe_split_with_sizes.default": "aten.split_with_sizes.default",
}
WITHOUT_RESULT = (
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten.sym_constrain_range.default",
)
CHECKS = ("aten._assert_async.msg", "aten._assert_async.default")


def lower(captured: Captured) -> Graph:
    """Translate node by node; descriptors of the captured graph say what its inputs and outputs are."""
    nodes: list[Node] = []
    ref_of: dict[torch.fx.Node, Any] = {}
    home_of: dict[str, tuple[int, str]] = {}  # node -> (when it was made, its module)
    in_backward: set[str] = set()
    results: list[Result] = []
    taken = {node.name for node in captured.joint.graph.nodes if node.op != "placeholder"}
    frozen = _written_frozen(captured)
    for fx_node in captured.joint.graph.nodes:
        match fx_node.op:
            case "placeholder":
                _add_source(fx_node, captured, nodes, ref_of, taken, frozen)
                in_backward.update(node.name for node in nodes[-1:] if node.op == "tangent")
            case "get_attr":
                value = captured.constants[str(fx_node.target)]
                target = f"{fx_node.target}:{_content_hash(value)}"
                nodes.append(Node(fx_node.name, "constant", (), (), (_type(value),), target=target))
                ref_of[fx_node] = Ref(fx_node.name)
            case "call_function" if fx_node.target is operator.getitem:
                base, index = fx_node.args
                ref_of[fx_node] = Ref(ref_of[base].name, index)
            case "call_function":
                if str(fx_node.target) in WITHOUT_RESULT:
                    continue
                node = _lower_call(fx_node, ref_of)
                if any(ref.name in in_backward for ref in node.operands):  # not all that is done last is marked
                    node = replace(node, phase="backward")
                if node.phase == "backward":
                    in_backward.add(node.name)
                node = _with_home(node, home_of)
                nodes += without_memory(fx_node, node)
                home_of[node.name] = len(nodes), node.module
                ref_of[fx_node] = Ref(fx_node.name)
            case "output":
                results = _results(fx_node, ref_of, captured, frozen)
            case _:
                raise AssertionError(f"a captured graph has no {fx_node.op} nodes")
    return Graph(tuple(_forward_first(nodes)), tuple(results))


def _forward_first(nodes: list[Node]) -> list[Node]:
    """An output that forward has written to is looked at once more behind backward."""
    phases = [node.phase for node in nodes if not node.is_source]
    if "backward" not in phases or "forward" not in phases[phases.index("backward") :]:
        return nodes
    return sorted(nodes, key=lambda node: node.phase == "backward" and not node.is_source)


def _written_frozen(captured: Captured) -> Set[str]:
    """Parameters that forward writes to, and that have no gradient: a teacher that follows its student. To a program
    they are buffers, which are whole on every rank.
    """
    (output,) = captured.joint.graph.find_nodes(op="output")
    with_gradient, written = set[str](), set[str]()
    for desc in output.meta["desc"]:
        if type(desc).__name__ == "GradAOTOutput" and type(desc.grad_of).__name__ == "ParamAOTInput":
            with_gradient.add(desc.grad_of.target)
        if type(desc).__name__ == "InputMutationAOTOutput" and type(desc.mutated_input).__name__ == "ParamAOTInput":
            written.add(desc.mutated_input.target)
    return {captured.aliases.get(name, name) for name in written - with_gradient}


def _add_source(
    fx_node: torch.fx.Node,
    captured: Captured,
    nodes: list[Node],
    ref_of: dict[torch.fx.Node, Any],
    taken: set[str],
    frozen: Set[str],
) -> None:
    value = fx_node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        ref_of[fx_node] = value  # a number or None among the inputs: the graph is specialised to it
        return
    if type(fx_node.meta["desc"]).__name__ in ("ForwardTokenAOTInput", "BackwardTokenAOTInput"):
        raise _with_effects(fx_node)
    op, target = _describe_source(fx_node.meta["desc"], captured)
    if op in ("parameter", "buffer"):
        target = captured.aliases.get(target, target)  # a tied tensor is one node, under its first name
        op = "buffer" if target in frozen else op
        if known := next((node for node in nodes if (node.op, node.target) == (op, target)), None):
            ref_of[fx_node] = Ref(known.name)
            return
    phase = "backward" if op == "tangent" else "forward"
    name = fx_node.name if op == "tangent" else _unlike(taken, _readable(target))
    taken.add(name)
    nodes.append(Node(name, op, (), (), (_type(value),), phase=phase, target=target))
    ref_of[fx_node] = Ref(name)


def _describe_source(desc: Any, captured: Captured) -> tuple[str, str]:
    match type(desc).__name__:
        case "ParamAOTInput":
            return "parameter", desc.target
        case "BufferAOTInput":
            return "buffer", desc.target
        case "PlainAOTInput":
            return "input", captured.leaves[desc.idx][0]
        case "TangentAOTInput" if type(desc.output).__name__ == "InputMutationAOTOutput":
            raise _written(desc.output.mutated_input, captured)
        case "TangentAOTInput":
            return "tangent", str(desc.output.idx)
        case other:
            raise NotImplementedError(f"this torch describes a graph input as {other}, which autopar does not know")


def _with_effects(token: torch.fx.Node) -> TraceError:
    """What to say of an operator that does something beside what it gives, as those do that check their operands."""
    first = next(iter(token.users))
    _, op, *args = first.args
    name = next((str(arg).removeprefix("torch.") for arg in args if isinstance(arg, str)), "")
    if type(token.meta["desc"]).__name__.startswith("Backward"):
        return TraceError(
            f"the gradient of {_source_line(first)} checks the values that it is given ({name or op}), and a program "
            "has no such checks: detach what goes in there, or compute it of what the parallel module gives"
        )
    if "_linalg_check_errors" in str(op):
        return TraceError(
            f"a function of torch.linalg at {_source_line(first)} checks the values that it is given, and a program "
            "has no such checks: write it by torch.linalg.inv, solve or cholesky, which are checked in each call"
        )
    return TraceError(
        f"{op} at {_source_line(first)} has effects beside what it gives, which a program has not: leave it out of "
        "forward"
    )


def _written(desc: Any, captured: Captured) -> TraceError:
    """What to say of a parameter or an argument that forward writes to."""
    op, target = _describe_source(desc, captured)
    if op == "parameter":
        return TraceError(
            f"forward changes parameter {target} in place, which trains, and a program does not; "
            "change it after optimizer.step(), under torch.no_grad()"
        )
    if not target.startswith("["):  # a buffer that is an attribute in the trace, as what it is set to has a gradient
        return TraceError(
            f"forward writes what has a gradient to {target} in place, which it keeps for the next call, and a program "
            "does not: detach it first (x.detach())"
        )
    return TraceError(
        f"forward changes its argument {target} in place, and the caller's tensor would stay as it is; "
        "have forward clone it first"
    )


def _results(
    fx_node: torch.fx.Node, ref_of: dict[torch.fx.Node, Any], captured: Captured, frozen: Set[str]
) -> list[Result]:
    results: dict[tuple[str, str], Result] = {}

    def add(kind: Literal["output", "gradient", "buffer"], target: str, ref: Any) -> None:
        """Of a tied tensor's names export reads one only: the others give nothing."""
        key = kind, captured.aliases.get(target, target) if kind != "output" else target
        found = Result(kind, key[1], ref if isinstance(ref, Ref) else None)
        known = results.get(key)
        if known is not None and known.ref is not None and found.ref is not None:
            raise NotImplementedError(
                f"{kind} {target} comes under two names of one tied tensor, which is not built yet"
            )
        if known is None or known.ref is None:
            results[key] = found

    values: Any = fx_node.args[0]
    for value, desc in zip(values, fx_node.meta["desc"], strict=True):
        ref = ref_of[value] if isinstance(value, torch.fx.Node) else None
        match type(desc).__name__:
            case "PlainAOTOutput":
                add("output", str(desc.idx), ref)
            case "InputMutationAOTOutput":
                op, target = _describe_source(desc.mutated_input, captured)
                if op != "buffer" and captured.aliases.get(target, target) not in frozen:
                    raise _written(desc.mutated_input, captured)
                add("buffer", target, ref)
            case "GradAOTOutput" if type(desc.grad_of).__name__ == "ParamAOTInput":
                add("gradient", desc.grad_of.target, ref)
            case "GradAOTOutput" if type(desc.grad_of).__name__ == "PlainAOTInput":
                add("gradient", captured.leaves[desc.grad_of.idx][0], ref)
            case "GradAOTOutput":
                raise NotImplementedError(f"gradients with respect to {desc.grad_of} are not built yet")
            case "NoneType":
                pass
            case other:
                raise NotImplementedError(
                    f"this torch describes a graph output as {other}, which autopar does not know"
                )
    return list(results.values())


def _lower_call(fx_node: torch.fx.Node, ref_of: dict[torch.fx.Node, Any]) -> Node:
    if "auto_functionalized" in str(fx_node.target):
        raise TraceError(
            f"{fx_node.args[0]} at {_source_line(fx_node)} writes to its arguments (mutates_args), and a plan has only "
            "operators that make new tensors: register one that returns what it writes"
        )
    if str(fx_node.target) in CHECKS:
        told = next((arg for arg in fx_node.args if isinstance(arg, str)), "a condition")
        raise TraceError(
            f"forward checks the values of a tensor while it runs ({told!r} at {_source_line(fx_node)}), and a program "
            "has no such checks: check them before the call, and leave it out of forward"
        )
    value = fx_node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(one, (tuple, list)) for one in values):
        raise TraceError(
            f"{fx_node.target} at {_source_line(fx_node)} gives a list of tensors beside others, and those of a plan "
            "give one list of all: register one that gives those in one list (-> list[Tensor])"
        )
    outputs = tuple(map(_type, values))
    if str(fx_node.target) in STATES:
        outputs = _of_attention(str(fx_node.target), outputs)
    kwargs = tuple((key, _arg(arg, ref_of)) for key, arg in sorted(fx_node.kwargs.items()) if key not in DROPPED_KWARGS)
    if str(fx_node.target) == "aten.clone.default" and "memory_format" in fx_node.kwargs:
        kwargs = (("memory_format", Const("memory_format", "contiguous_format")),)
    is_backward = fx_node.meta.get("partitioner_tag") == "is_backward"
    return Node(
        fx_node.name,
        SAFE.get(str(fx_node.target), str(fx_node.target)),
        tuple(_arg(arg, ref_of) for arg in fx_node.args),
        kwargs,
        outputs,
        phase="backward" if is_backward else "forward",
        module=_module_path(fx_node),
        source=_source_line(fx_node),
    )


def _of_attention(op: str, outputs: tuple[TensorType | None, ...]) -> tuple[TensorType | None, ...]:
    """A result without elements is none, and a state of random numbers says so."""
    there = [None if type is None or type.numel == 0 else type for type in outputs]
    place = STATES[op]
    if place is not None and (state := there[place]) is not None:
        there[place] = TensorType(state.shape, RANDOM_STATE)
    return tuple(there)


def _with_home(node: Node, home_of: dict[str, tuple[int, str]]) -> Node:
    """A sum of gradients comes from no module: it belongs to that of the value which was made last."""
    if node.module or node.phase == "forward":
        return node
    _, home = max((home_of[ref.name] for ref in node.operands if ref.name in home_of), default=(0, ""))
    return replace(node, module=home)


def _type(value: Any) -> TensorType | None:
    if not isinstance(value, torch.Tensor):
        return None
    return TensorType(tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))


def _arg(arg: Any, ref_of: dict[torch.fx.Node, Any]) -> Arg:
    match arg:
        case torch.fx.Node():
            return ref_of[arg]
        case tuple() | list():
            return tuple(_arg(part, ref_of) for part in arg)
        case torch.dtype():
            return Const("dtype", str(arg).removeprefix("torch."))
        case torch.device():
            return Const("device", arg.type)
        case torch.layout():
            return Const("layout", str(arg).removeprefix("torch."))
        case torch.memory_format():
            return Const("memory_format", str(arg).removeprefix("torch."))
        case float() if math.isnan(arg):
            return math.nan  # one object, which equals itself where tuples are compared
        case None | bool() | int() | float() | complex() | str():
            return arg
        case _:
            raise NotImplementedError(
                f"an operator argument of type {type(arg).__name__} ({arg!r}) is not known to autopar"
            )


def _module_path(fx_node: torch.fx.Node) -> str:
    stack = fx_node.meta.get("nn_module_stack") or fx_node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path)


def _source_line(fx_node: torch.fx.Node) -> str:
    """`modeling_gpt2.py:581 causal_mask = create_causal_mask(`: the innermost line of the user's code."""
    found = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', fx_node.meta.get("stack_trace") or "")
    if not found:
        return ""
    path, line, code = found[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line} {code.strip()}"


def _unlike(taken: set[str], name: str) -> str:
    """The name, numbered where it is taken."""
    if name not in taken:
        return name
    return next(one for n in itertools.count(1) if (one := f"{name}_{n}") not in taken)


def _readable(target: str) -> str:
    name = re.sub(r"\W+", "_", target).strip("_")
    return f"arg_{name}" if not name or name[0].isdigit() else name


def _content_hash(value: torch.Tensor) -> str:
    if value.numel() == 0:
        return "empty"
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()[:12]
