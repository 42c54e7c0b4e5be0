"""Rules and patterns that a user's own package brings, as one value.

The nodes of a graph that is made under them carry it (`Node.outside`): whoever has a node has its rule, and two graphs
in one process know nothing of each other's.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, cast

Identity = tuple[str, str, str]  # package, version, digest: what a plan's file records
_OPERATOR = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*")
_SPOKEN = re.compile(r"[\w.+-]{1,100}", re.ASCII)  # of a package and a version, which messages and files show


@dataclass(frozen=True, eq=False)
class OperatorRule:
    """How an operator may be split, and what it costs.

    rule: in the notation that opens `autopar/rules/notation.py`, or a function (node, types of its operands) that
    writes it, or gives None where that use of the operator cannot be split.
    local: position of an argument that holds a size -> function of an `autopar.rules.local.Local` that gives what it is
    on one rank. Operators without sizes among their arguments need none.
    flops: function (node, types of its operands) -> flops of the whole operator. Without it the operator is priced by
    the bytes that it moves, and the plan says so.
    nbytes: function (node, types of its operands, types of its results), types as one rank has them -> bytes read and
    written in device memory. Without it each operand and each result counts once.
    kind: which units do its flops: matmul, attention, conv, elementwise.
    """

    rule: str | Callable[[Any, Any], str | None]
    local: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict[int, Callable[[Any], Any]])
    flops: Callable[[Any, Any], float] | None = None
    nbytes: Callable[[Any, Any, Any], float] | None = None
    kind: Literal["matmul", "attention", "conv", "elementwise"] = "elementwise"


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules of one package: `Rules("toy", "1.0", {"toy.scaled_sum.default": "a b -> a | 0"})`.

    operators: torch name with its overload -> its rule, as text, as the function that writes it, or in full. patterns:
    name -> pattern (`autopar.rules.patterns`), which is tried on every operator. What is given is copied. Raises
    ValueError for names that nothing can have.
    """

    package: str
    version: str
    operators: Mapping[str, OperatorRule | str | Callable[[Any, Any], str | None]] = field(
        default_factory=dict[str, Any]
    )
    patterns: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])

    def __post_init__(self) -> None:
        for what, told in (("package", self.package), ("version", self.version)):
            if not _SPOKEN.fullmatch(told):
                raise ValueError(f"rules: {what} {told!r} is no name; write letters, digits and any of . _ + -")
        for op in self.operators:
            if not _OPERATOR.fullmatch(op):
                base = op.replace("::", ".")
                raise ValueError(
                    f"rules of {self.package}: {op!r} is no operator with its overload; write for example "
                    f"{base if base.count('.') == 1 else 'toy.scaled_sum'}.default"
                )
        for name in self.patterns:
            if not name.strip() or not name.isprintable():
                raise ValueError(f"rules of {self.package}: a pattern is called {name!r}; give it a name")
        full = {op: one if isinstance(one, OperatorRule) else OperatorRule(one) for op, one in self.operators.items()}
        object.__setattr__(self, "operators", MappingProxyType(full))
        object.__setattr__(self, "patterns", MappingProxyType(dict(self.patterns)))
        _ = self.digest  # a source that cannot be read is told here

    @cached_property
    def digest(self) -> str:
        """Hash (hex) of all that a plan rests on: texts, and the source files of functions. Raises ValueError for a
        function whose source nobody can read.
        """
        told = [[op, _told(rule, f"{self.package}: {op}")] for op, rule in sorted(self.operators.items())]
        told += [[name, _told(made, f"{self.package}: {name}")] for name, made in sorted(self.patterns.items())]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    @property
    def identity(self) -> Identity:
        return self.package, self.version, self.digest

    def rule(self, op: str) -> OperatorRule | None:
        found = self.operators.get(op)
        assert found is None or isinstance(found, OperatorRule)
        return found


def _told(part: object, where: str, within: tuple[object, ...] = ()) -> object:
    """Plain values that stand for the part, equal in every process. `within`: functions that it is a part of."""
    match part:
        case None | str() | bool() | int() | float():
            return part
        case tuple():
            return [_told(one, where, within) for one in cast("tuple[object, ...]", part)]
        case OperatorRule():
            sizes = [[place, _told(how, where)] for place, how in sorted(part.local.items())]
            return [*(_told(one, where) for one in (part.rule, part.flops, part.nbytes, part.kind)), sizes]
        case _ if callable(part):
            return "itself" if part in within else _source(part, where, (*within, part))
        case _:
            raise ValueError(
                f"rules of {where}: {part!r} is none of text, number, tuple and function, and no digest can tell it"
            )


def _source(function: Any, where: str, within: tuple[object, ...]) -> list[object]:
    """Where it stands, all of its file, as helpers beside it count, too, and what it holds."""
    try:
        path = inspect.getsourcefile(function)
    except TypeError:  # something builtin, or an object with a call
        path = None
    lines = [] if path is None or not inspect.isfunction(function) else linecache.getlines(path)
    if not lines:
        raise ValueError(f"rules of {where}: the source of {function!r} cannot be read; define the function in a file")
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [_told(one, where, within) for one in (*(function.__defaults__ or ()), *held)]
    file = hashlib.sha256("".join(lines).encode()).hexdigest()
    return [function.__qualname__, function.__code__.co_firstlineno, file, parts]


def told(identity: Identity) -> str:
    """`toy 1.0 (1a2b3c4d)`, as notes and errors have it."""
    package, version, digest = identity
    return f"{package} {version} ({digest[:8]})"


def rule_in(outside: Sequence[Rules], op: str) -> OperatorRule | None:
    """The rule of an operator among those of several packages, of which one at most has it."""
    return next((rule for rules in outside if (rule := rules.rule(op)) is not None), None)
