"""Problem files by the thousand: 1,250 damaged ones of each form. Each is refused in a sentence, or has the numbers
that stand in it, and then it has an answer.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from solver import Problem, solve
from solver.__main__ import main
from solver.contest import FORBIDDEN, read_contest
from solver.store import problem_document, read_problem, write_problem
from tests.solver.problems import MLP_5, random_problem
from tests.support.mutants import damaged, one_sentence

EACH = 50
OWN = problem_document(random_problem(1))  # with usages on edges


def refused_or_read(path: Path, read: Any, content: bytes, batch: int) -> list[tuple[str, Problem, Any]]:
    found: list[tuple[str, Problem, Any]] = []
    for case, mutant in damaged(content, range(batch * EACH, (batch + 1) * EACH)):
        path.write_bytes(mutant)
        try:
            problem = read(path)
        except ValueError as error:
            one_sentence(error, (ValueError,), case, str(path))
        else:
            found.append((case, problem, json.loads(mutant)))
            assert solve(problem, time_limit_s=5).status in ("optimal", "infeasible"), case
    return found


@pytest.mark.parametrize("batch", range(25))
def test_a_damaged_problem_is_refused_or_says_what_it_says(tmp_path: Path, batch: int) -> None:
    content = json.dumps(OWN, indent=0).encode()
    for case, problem, document in refused_or_read(tmp_path / "p.json", read_problem, content, batch):
        again = problem_document(problem)
        for field in ("costs", "limits"):
            assert again[field] == document[field], case
        for field in ("names", "usages", "edge_usages"):
            assert again[field] == document.get(field, []), case
        costs = [[src, dst, document["matrices"][k]] for src, dst, k in document["edges"]]
        assert [[src, dst, again["matrices"][k]] for src, dst, k in again["edges"]] == costs, case


@pytest.mark.parametrize("batch", range(25))
def test_a_damaged_contest_file_is_refused_or_says_what_it_says(tmp_path: Path, batch: int) -> None:
    def told(values: list[float]) -> list[float]:
        return [np.inf if value >= FORBIDDEN / 10 else value for value in values]

    content = json.dumps(MLP_5, indent=0).encode()
    for case, problem, document in refused_or_read(tmp_path / "p.json", read_contest, content, batch):
        body = document["problem"]
        nodes, edges = body["nodes"], body["edges"]
        assert [cost.tolist() for cost in problem.costs] == [*map(told, nodes["costs"])], case
        assert [edge.cost.ravel().tolist() for edge in problem.edges] == [*map(told, edges["costs"])], case
        assert [[edge.src, edge.dst] for edge in problem.edges] == edges["nodes"], case
        held = {u.item: ([u.start, u.end], u.nbytes.tolist()) for u in problem.usages}
        for item, (span, nbytes) in enumerate(zip(nodes["intervals"], nodes["usages"], strict=True)):
            assert held.get(item, (span, nbytes)) == (span, nbytes) and (item in held or span[0] == span[1]), case
        assert problem.limits.get("memory") == body.get("usage_limit"), case


# What looks like a number, and a slip of the pen: own form.
SILENT = {
    "a text for a cost": lambda d: d["costs"].__setitem__(0, ["1"] * len(d["costs"][0])),
    "a truth for a cost": lambda d: d["costs"].__setitem__(0, [True] * len(d["costs"][0])),
    "half an item": lambda d: d["edges"][0].__setitem__(0, 0.5),
    "a matrix from behind": lambda d: d["edges"][0].__setitem__(2, -1),
    "an instant as text": lambda d: d["usages"][0].__setitem__(2, "0"),
    "a limit as text": lambda d: d["limits"].update(memory="84"),
    "another spelling of edge_usages": lambda d: d.update(edge_usage=d.pop("edge_usages")),
    "a limit as a list": lambda d: d.update(limits=[["memory", 84]]),
    "bytes that cannot be counted": lambda d: d["usages"][0].__setitem__(4, [2**60] * len(d["usages"][0][4])),
}


@pytest.mark.parametrize("kind", SILENT)
def test_nothing_is_taken_for_a_number_that_is_none(tmp_path: Path, kind: str) -> None:
    document = copy.deepcopy(OWN)
    SILENT[kind](document)
    assert document != OWN
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(ValueError) as caught:
        read_problem(tmp_path / "p.json")
    one_sentence(caught.value, (ValueError,), kind, "p.json")


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_archive_is_refused(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json.gz"
    write_problem(random_problem(1), path)
    ((case, mutant),) = damaged(path.read_bytes(), range(seed * 20, seed * 20 + 1))
    path.write_bytes(mutant)
    try:
        assert problem_document(read_problem(path)) == OWN, case
    except ValueError as error:
        one_sentence(error, (ValueError,), case, str(path))
        assert main([str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solver.document.MOST", 10**6)
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(b" " * 10**7))
    with pytest.raises(ValueError, match="it has more than 1,000,000 bytes"):
        read_problem(tmp_path / "p.json.gz")


def test_nobody_waits_for_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "p.json")
    assert main([str(tmp_path / "p.json")]) == 2
    assert "it is a pipe or a device, not a file" in capsys.readouterr().err
