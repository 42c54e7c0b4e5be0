"""Which line of the user's model something comes from, and the error that names it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.values import is_torchs

STACK = r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)'
VALUE_ERRORS = re.compile("(?i)data.?dependent|dynamicoutputshape|unbacked|numpy|tolist|supported seed types")
VALUES = "Control flow and shapes may not depend on tensor values; rewrite that line without them."
FLEX = (
    "FlexAttention is not built: use scaled_dot_product_attention (transformers: attn_implementation='sdpa'), which "
    "takes a mask and computes what it hides."
)
LENGTHS = "Sequences of several lengths in one tensor are not built: pad them, and ignore what is padded in the loss."
HELD = (
    "The model's code holds a tensor, in an attribute, a closure or a global, that it works on in place: make it a "
    "buffer of one of the model's modules (register_buffer), or pass it as an argument."
)
IN_PLACE = "Have forward clone the argument first."
CAUSAL_BIAS = "Give scaled_dot_product_attention is_causal=True, or a boolean mask, in the place of a CausalBias."
NO_BACKWARD = "Register its backward (torch.library.register_autograd), or detach what goes in."
CACHE = (
    "A training step has no key/value cache: leave past_key_values out, and set use_cache=False (in the call, or as "
    "model.config.use_cache = False)."
)
OBJECT = (
    "Take and return tensors, numbers, text, and lists, tuples, dicts or dataclasses of these; what an object holds is "
    "not seen."
)
ARGUMENT = (
    "Make a module a part of the model, so that it is trained, or call it outside and pass what it gives; of other "
    "objects pass the tensors and numbers."
)
ARRAY = "Give tensors: torch.from_numpy(array)."
COLLECTIVE = (
    "A program computes with the whole batch on all ranks, and would count what each rank sends as another part of it: "
    "leave the collective out where the model runs under autopar (as where there is one process)."
)
GRAPH = re.compile(r"\s*(class .*\n)?\s*def forward\(self")
NO_ROWS = re.compile(r"\[(.*, )?0[,\]]")
EMPTY = "A batch without rows has nothing to compute: leave it out."
BY_ITSELF = "Call the model with these inputs without autopar: it should run there first."
IT_RUNS = "Without autopar the model runs with these inputs, but torch.export cannot follow it"
NO_LINE = (
    ", and names no line: mostly forward catches an error of a function of torch (ask first what it would raise for), "
    "or a module that is none of Python (quantized, compiled) stands in the way."
)
NO_RUN = (
    "Without autopar it fails in the same way on tensors of these shapes without values: make the model and its inputs "
    "fit each other there. (If it runs with values, it does something else where it sees that nobody gives it any.)"
)
STILL_READ = "Compute with a clone of it, or write to it behind backward."
MOVED = "Parameters lie where the plan has them, and are cast by precision=: leave that out of forward."
NUMPY = (
    "Keep or return the tensor, and make an array of it behind the call; what forward computes with, have functions "
    "of torch compute."
)
HIDDEN_SIZE = (
    "torch's own code of a function in that line finds a size by looking at values: write it with what has one size "
    "(x[torch.triu_indices(n, n, 1)] for combinations, torch.where for what a mask picks)."
)
BY_FUNC = (
    "Gradients by torch.func, and of forward mode, are not built in forward: take them by torch.autograd.grad, for "
    "each row of a batch that of their sum."
)
CHOOSE = "A program does not: compute both and choose by torch.where, or loop as often as Python says."
DRAWN = "Make a tensor of an array that numpy draws by torch.from_numpy, and of what else is drawn by torch.tensor."
RESIZED = "Make it in the size that it has then: x.new_empty(sizes), torch.empty(sizes)."
LOST = "A script that catches it would not have {}: raise it ahead of that, or return a flag and all of that."
GROUPED = "torch traces grouped_mm of bfloat16 alone: cast both operands there, or multiply one group after the other."
ADVICE = (
    (re.compile("cache_utils|(Dynamic|Static|EncoderDecoder)Cache"), CACHE),
    (re.compile("(?i)flex_?attention"), FLEX),
    (re.compile("(?i)nested|jagged|varlen|cast NotImplemented|SymInt.{0,60}is not tracked with proxy", re.S), LENGTHS),
    (re.compile("entirely functional graph|mutating a non-functional tensor"), HELD),
    (re.compile("modified by an inplace operation"), STILL_READ),
    (re.compile(r"_apply\(\): Couldn't swap"), MOVED),
    (re.compile(r"\.numpy\(\) is not supported|expected np.ndarray \(got Array"), NUMPY),
    (re.compile("unbacked symbols"), HIDDEN_SIZE),
    (re.compile(r"Unexpected fake buffer|no attribute 'constant'|inside of a function being transformed"), BY_FUNC),
    (re.compile("a leaf Variable that requires grad is being used in an in-place"), IN_PLACE),
    (re.compile("CausalBias"), CAUSAL_BIAS),
    (re.compile("'Drawn'"), DRAWN),
    (re.compile("UncapturedHigherOrderOpError"), CHOOSE),  # of torch 2.11
    (re.compile("Expected inputs of BF16 type"), GROUPED),
    (re.compile("Attempted to set the storage of a tensor"), RESIZED),
    (re.compile("all flat_args must be KNOWN_TYPES"), ARGUMENT),
    (re.compile("Unsupported input type <class 'numpy"), ARRAY),
    (re.compile("Unsupported input type|functorch/issues/475"), OBJECT),
    (
        re.compile(
            r"torch\.distributed\.nn|c10d|ProcessGroup\w*::|meta (broadcast|all_\w+|reduce\w*|gather|scatter)_? has"
        ),
        COLLECTIVE,
    ),
    (re.compile("no autograd formula was registered"), NO_BACKWARD),
    (VALUE_ERRORS, VALUES),
)
KEYS = (
    "A table outside of the model that has its modules or tensors as keys does not know the copy that is traced: keep "
    "the table in the model, or have names as keys."
)
OWN_WORDS = {
    IN_PLACE: "an argument that requires grad is changed in place (x += ..., inplace=True of the first layer)",
    CACHE: "it takes or gives a key/value cache",
    ARGUMENT: "an argument is, or holds, a module or another object that a program does not take",
    ARRAY: "an input is a numpy array",
    OBJECT: "it takes or gives an object of a class of its own",
    COLLECTIVE: "it calls a collective itself",
    STILL_READ: "it changes in place, maybe through .data, what backward reads",
    HELD: "it changes a tensor in place that is no buffer of the model",
    MOVED: "it moves or casts a module (.to(), .cuda(), .half())",
    CHOOSE: "it branches or loops in torch's own way (torch.cond)",
    NUMPY: "it makes a numpy array of a tensor (.numpy())",
    VALUES: "it needs the values of a tensor",
    RESIZED: "it gives a tensor another size in place (resize_, set_), and looks at it in a further shape",
    DRAWN: "it computes with an array that numpy draws as if that were a tensor",
}
NUMPYS = f"{os.sep}numpy{os.sep}"  # in the names of its files
PASSED = ("transformers/utils", NUMPYS)  # through whose code models go
CLASS = re.compile("<class '([^']+)'>")
OPERATOR = re.compile(r"aten\.(\w+)")


class HeldInPlace(TraceError):
    """Forward writes to a tensor in place that is a constant to torch."""


class _WithoutGraphs:
    """Standard error, but for graphs that torch prints into it. Whoever keeps it writes on."""

    def __init__(self, real: Any) -> None:
        self.real, self.left_out = real, False

    def write(self, text: str) -> int:
        before, self.left_out = self.left_out, GRAPH.match(text) is not None
        return len(text) if self.left_out or (before and text == "\n") else self.real.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@contextlib.contextmanager
def without_torchs_log() -> Iterator[None]:
    """Where an operator refuses its operands, torch logs a page of its own lines before it raises, and prints the half
    of a model that it could trace; what it raises says the same in one line.
    """
    log = logging.getLogger("torch")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(cast(Any, _WithoutGraphs(sys.stderr))):
            yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def naming_the_line(inputs: str, by_itself: Callable[[], object], ahead: Sequence[str]) -> Iterator[None]:
    """Whatever fails within is a TraceError that names the line of the model, and the inputs if they are to blame:
    if `by_itself`, which calls the model with them, fails alike. `ahead`: what forward has set until then.
    """
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        reason = re.split(r"\n\s*\n|\nThe following|\nUser code|\nFor more", str(error).strip())[0].replace("\n", " ")[
            :400
        ]
        told = f"{type(error).__name__} {error}"
        advice = next((advice for pattern, advice in ADVICE if pattern.search(told)), "")
        if NO_ROWS.search(inputs) and isinstance(error, ZeroDivisionError):
            advice = EMPTY
        if isinstance(error, KeyError) and error.args and isinstance(error.args[0], (nn.Module, Tensor, weakref.ref)):
            advice = KEYS
        end = "" if reason.endswith(".") else "."
        line = line_of(error)
        what = f"{line}: {type(error).__name__}: {reason}{end}"
        if advice in OWN_WORDS:  # what torch says is how to register a class
            found = {OBJECT: CLASS, VALUES: OPERATOR}[advice].search(told) if advice in (OBJECT, VALUES) else None
            what = f"{line}: {OWN_WORDS[advice]}{f' ({found[1]})' if found else ''}."
        if not advice and (alone := _error_of(by_itself)) is not None and type(alone) is type(error):
            told = f"the model does not run with its inputs, {inputs}{',' * bool(line)}{what}"
            if _is_raised_by_user(error) and (lost := _lost(error, ahead)):
                raise TraceError(f"{told} {LOST.format(lost)}") from error
            raise _as_raised(error, f"{told} {NO_RUN}") from error
        if not advice:
            it_runs = IT_RUNS + (": rewrite that line." if line else NO_LINE)
            advice = it_runs if alone is None else BY_ITSELF
        kind = HeldInPlace if advice == HELD else TraceError
        raise kind(f"the model cannot be captured as one graph{what} {advice}") from error


def _as_raised(error: Exception, told: str) -> TraceError:
    """A TraceError that a script which expects such an exception of its model catches as that, too."""
    kind = type(error)
    if kind is RuntimeError or isinstance(error, (StopIteration, StopAsyncIteration)):  # a generator raises others
        return TraceError(told)
    plain = {"__init__": RuntimeError.__init__, "__str__": RuntimeError.__str__, "__module__": TraceError.__module__}
    try:
        made = type(TraceError.__name__, (TraceError, kind), plain)(told)
    except TypeError:  # a class that has no others below it, or one that is made of more than text
        return TraceError(told)
    vars(made).update(vars(error))
    return made


def _is_raised_by_user(error: Exception) -> bool:
    """Whether it is of a class, or raised by code, that is neither torch's nor Python's."""
    is_own = type(error).__module__.partition(".")[0] not in ("builtins", "torch")
    return is_own or not is_torchs(traceback.extract_tb(error.__traceback__)[-1].filename)


def _lost(error: Exception, names: Sequence[str]) -> str:
    """What whoever catches an error of the user's own would not have of what forward has done until then, in words."""
    held = [*error.args, *vars(error).values()]
    tensors = "the tensor in it" if any(isinstance(one, Tensor) for one in held) else ""
    return " and ".join(
        filter(None, (tensors, ", ".join(names) and f"what forward sets ahead of it ({', '.join(names)})"))
    )


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def line_of(error: BaseException | None) -> str:
    """The innermost line outside torch, Python and autopar in the traceback of an error, or of its causes."""
    while error is not None:
        if told := _line(traceback.extract_tb(error.__traceback__)):
            return told
        error = error.__cause__ or error.__context__
    return ""


def line_here() -> str:
    """The innermost line outside torch, Python and autopar that is running now."""
    return _line(traceback.extract_stack())


def _line(stack: traceback.StackSummary) -> str:
    for frame in reversed(stack):
        if not is_torchs(frame.filename):
            if any(part in frame.filename for part in PASSED) or frame.name == "<module>":
                continue
            return f" at {frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
    return ""


def line_outside_torch(depth: int) -> str:
    """File and line of the innermost code outside of torch, Python and autopar, of what called so many calls out."""
    frame = sys._getframe(depth + 1)
    while frame is not None and is_torchs(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def caller(depth: int) -> str:
    """The file of whoever called, so many calls further out than the function that asks."""
    return sys._getframe(depth + 1).f_code.co_filename


def line_of_node(node: torch.fx.Node) -> str:
    """The innermost line outside torch, Python and autopar from which a node was traced."""
    for path, line, code in reversed(re.findall(STACK, node.meta.get("stack_trace") or "")):
        if not is_torchs(path):
            return f" at {path}:{line} ({code.strip()})"
    return ""
