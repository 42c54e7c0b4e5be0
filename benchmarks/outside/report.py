"""Rows as a table, and how many of them are what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VERDICTS = ("right", "refused", "wrong", "crash", "unusable")
NO_DROPOUT = "no dropout"
LITTLE = 0.2  # of the arithmetic: what may run whole on every rank in a plan that splits the work


HEAD = """# Outside models and snippets

`{command}`, {day}, torch {torch}, {machine}, gloo, one thread a process.

Configurations with random weights of packages that know nothing of autopar, few layers and narrow, and snippets as
tutorials have them. Each trains for 3 steps on random batches of 4, then is evaluated on one of 3, with autopar and as
plain PyTorch on one process. Right: losses, gradients, weights, buffers and outputs agree (losses and weights within
1e-5 of the largest entry, gradients and outputs within 1e-4), and are the same on all ranks. What is off by more in
float32 is tried in float64: it is rounding where that agrees within 1e-9, or is off by 1e8 times less than float32
(nets of batch norms over few numbers amplify what they round), and wrong otherwise. Dropout and other random numbers
are set to nothing, as they rightly differ. Plans are made for links as quick as memory, so that all that a rule
can split is split; whole: the share of the arithmetic of a step that every rank repeats nevertheless.

"""


def mesh_name(row: Mapping[str, Any]) -> str:
    return "x".join(map(str, row["mesh"]))


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line for each mesh."""
    lines = ["| mesh | scripts | right | refused | wrong | crash | right, at most 20 % whole on every rank |"]
    lines.append("|---|---|---|---|---|---|---|")
    for mesh in dict.fromkeys(map(mesh_name, rows)):
        here = [row for row in rows if mesh_name(row) == mesh and row["verdict"] != "unusable"]
        counts = [sum(row["verdict"] == verdict for row in here) for verdict in VERDICTS[:4]]
        little = sum(row["verdict"] == "right" and row["share"] <= LITTLE for row in here)
        lines.append(f"| {mesh} | {len(here)} | {' | '.join(map(str, counts))} | {little} |")
    return "\n".join(lines)


def without_rule(row: Mapping[str, Any]) -> list[str]:
    """Operators that run whole on every rank; what they compute is counted as one flop an entry."""
    told = (note.partition(" has no sharding rule") for note in row.get("notes", []))
    found = [name for name, mark, _ in told if mark]
    return [name.removeprefix("aten.").removesuffix(".default") for name in found]


def markdown(rows: Sequence[Mapping[str, Any]], told: Mapping[str, str]) -> str:
    """The summary, then a line for each script: its verdict on each mesh, and what runs whole on every rank."""
    meshes = list(dict.fromkeys(map(mesh_name, rows)))
    of = {(row["name"], mesh_name(row)): row for row in rows}
    head = ["script", *(f"{mesh}{what}" for mesh in meshes for what in ("", ", whole")), "told"]
    lines = [summary(rows), "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in dict.fromkeys(row["name"] for row in rows):
        here = [of.get((name, mesh)) for mesh in meshes]
        cells: list[str] = []
        for row in here:
            cells += ["", ""] if row is None else [row["verdict"], f"{row['share']:.0%}" if "share" in row else ""]
        said = dict.fromkeys(row["told"] for row in here if row is not None and row.get("told"))
        without = dict.fromkeys(one for row in here if row is not None for one in without_rule(row))
        said |= {f"no rule for {', '.join(without)}": None} if without else {}
        if any(row.get("dropped") for row in here if row is not None) and told.get(name) != NO_DROPOUT:
            said = {NO_DROPOUT: None} | said
        notes = "; ".join(part for part in (told.get(name, ""), *said) if part)
        lines.append(f"| {name} | {' | '.join(cells)} | {_cell(notes)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    return text if len(text) <= 240 else text[:237] + "..."
