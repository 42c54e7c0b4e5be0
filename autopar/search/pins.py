"""pin: what a user settles by name, of forward values ("save", "recompute", "offload-activations"), of parameters
("device", "offload-parameters", "offload-optimizer"), and of products ("tensor: columns", `autopar.search.splits`).

A name is that of a module or a parameter, or a pattern as in `fnmatch`, whose `*` matches dots, too; it stands for all
that lies below. Of two names that say different things the later one counts. "recompute" and "offload-activations"
are obeyed where that can be: what leaves its layer and what draws random numbers is not run again, and of a module only
some values may be needed in backward at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from autopar.ir.graph import Graph, Node
from autopar.ir.work import VIEWS
from autopar.rewrite import RECOMPUTE, SAVE, Again, widened
from autopar.search.context import Question
from autopar.search.memory_options import MODES, RESIDENCES
from autopar.search.splits import Splits, is_split, settled, splits_in


@dataclass(frozen=True)
class Pinned:
    """`modes`: forward node -> what is to become of it; `residence`: parameter -> where it is to live; both as plans
    call it. `splits`: forward node -> axis -> what it is to split.
    """

    modes: Mapping[str, str] = field(default_factory=dict[str, str])
    residence: Mapping[str, str] = field(default_factory=dict[str, str])
    splits: Splits = field(default_factory=dict[str, dict[str, tuple[str, str]]])


def pinned(pin: Mapping[str, str], graph: Graph) -> Pinned:
    """What the names mean in this graph.

    Raises ValueError for a name that nothing has, and for what nothing of that name can have.
    """
    if not pin:
        return Pinned()
    node_of, module_of = graph.by_name, _modules(graph)
    trained = {node.target for node in graph.trained}
    parameters = [node.target for node in graph.nodes if node.op == "parameter"]
    again = {one.origin: one for one in widened(graph).again.values()}
    modes: dict[str, str] = {}
    residence: dict[str, str] = {}
    splits: dict[str, dict[str, tuple[str, str]]] = {}
    said: dict[str, dict[tuple[str, str], str]] = {}  # name -> (of what, which side of it) -> word
    for name, word in pin.items():
        inside = [node for node, module in module_of.items() if _is_below(module, name)]
        held = [parameter for parameter in parameters if _is_below(parameter, name)]
        if not inside and not held:
            paths = sorted({*module_of.values(), *parameters})
            near = get_close_matches(name, paths, 1, 0.0)
            raise ValueError(
                f"pin {name!r} is no module or parameter of the model; did you mean {near[0]!r}? Tied parameters "
                "go by the first of their names"
            )
        if is_split(word):
            if not inside:
                raise ValueError(f"pin {name!r}: {word!r} is for modules, and it is a parameter; name its module")
            told = {axis: (what, name) for axis, what in splits_in(name, word).items()}
            said[name] = {(node, axis): what for node in inside for axis, (what, _) in told.items()}
            for node in inside:
                splits[node] = {**splits.get(node, {}), **told}
        elif word in RESIDENCES:
            if not held:
                raise ValueError(
                    f"pin {name!r}: {word!r} is for parameters, and it has none of its own; {_words(MODES)}"
                )
            if word == "offload-optimizer" and (frozen := [one for one in held if one not in trained]):
                raise ValueError(
                    f"pin {name!r}: {word!r} is for optimizer states, and {frozen[0]} has none, being frozen; "
                    "choose device or offload-parameters"
                )
            said[name] = {(parameter, "lives"): word for parameter in held}
            residence |= dict.fromkeys(held, RESIDENCES[word])
        elif word in MODES:
            if not inside:
                raise ValueError(f"pin {name!r}: {word!r} is for modules, and it is a parameter; {_words(RESIDENCES)}")
            _check(name, word, MODES[word], [(node_of[node], again[node]) for node in inside if node in again])
            said[name] = {(node, "comes back"): word for node in inside}
            modes |= dict.fromkeys(inside, MODES[word])
        else:
            raise ValueError(
                f"pin {name!r}: {word!r} is not known; {_words((*MODES, *RESIDENCES))}; or what a mesh axis "
                "splits, as in 'tensor: columns'"
            )
    _check_order(said)
    return Pinned(modes, residence, splits)


def obeyable(pin: Mapping[str, str], question: Question) -> tuple[dict[str, str], list[str]]:
    """Of the pins of a module those that something in this graph of it can obey, and of the others the sentences that
    say why not. A module's later graphs have other shapes, or other parameters that train, than the pins were made for.
    """
    left: dict[str, str] = {}
    told: list[str] = []
    for name, word in reversed([*pin.items()]):  # what a later one says counts
        more = {name: word, **left}
        try:
            settled(question, pinned(more, question.graph).splits)
        except ValueError as refusal:
            told.append(str(refusal))
        else:
            left = more
    return left, told


def _check_order(said: Mapping[str, Mapping[tuple[str, str], str]]) -> None:
    """Raises ValueError for a name of which all that it says is said otherwise by later ones."""
    last = {what: word for told in said.values() for what, word in told.items()}
    for name, told in said.items():
        if told and all(last[what] != word for what, word in told.items()):
            over = next(other for other in reversed([*said]) if told.keys() & said[other].keys())
            raise ValueError(
                f"pin {name!r} does nothing: {over!r} stands behind it and says something else of the same; "
                f"put {name!r} behind {over!r}, or leave it out"
            )


def _words(known: Iterable[str]) -> str:
    words = [*known]
    return f"choose {', '.join(words[:-1])} or {words[-1]}"


def _check(name: str, word: str, mode: str, values: list[tuple[Node, Again]]) -> None:
    if mode == SAVE or any(mode in one.modes for node, one in values if node.op not in VIEWS):
        return
    if not any(node.op not in VIEWS for node, _ in values):
        why = "backward reads nothing of it"
    elif mode == RECOMPUTE:
        why = "of what backward reads of it nothing can run again: it leaves its layer, or draws random numbers"
    else:
        why = "nothing that backward reads of it can be sent to the host: only some results of an operator are read"
    raise ValueError(f"pin {name!r}: {word!r} is not to be had, {why}; choose save, or leave it out")


def _is_below(path: str, name: str) -> bool:
    """Whether the path, or a module that it lies in, has the name."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: count + 1]), name) for count in range(len(parts)))


def _modules(graph: Graph) -> dict[str, str]:
    """Forward operator -> its module; of a view without one, that of what it looks at."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.phase == "forward" and not node.is_source:
            inherits = node.op in VIEWS and not node.module and node.operands
            found[node.name] = found.get(node.operands[0].name, "") if inherits else node.module
    return found
