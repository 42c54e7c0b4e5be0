"""Files in, JSON out: the contest's form, our own, the command line, and what bad input is told."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from solver import Edge, EdgeUsage, Problem, Usage, evaluate, solve
from solver.contest import contest_document, contest_problem, read_contest, write_contest
from solver.store import read_problem, write_problem
from tests.solver.problems import MLP_5, random_problem

ROOT = Path(__file__).resolve().parents[2]
IOPDDL = ROOT.parent / "shared" / "iopddl"


def instance(letter: str) -> Problem:
    path = IOPDDL / f"asplos-2025-iopddl-{letter}.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return read_contest(path)


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
def test_a_problem_survives_our_own_file(tmp_path, name):
    for seed in range(20):
        problem = random_problem(seed)
        write_problem(problem, tmp_path / name)
        again = read_problem(tmp_path / name)
        assert again.limits == problem.limits
        picks = [len(cost) - 1 for cost in problem.costs]
        assert evaluate(again, picks) == evaluate(problem, picks)
        assert solve(again).cost == solve(problem).cost
    assert [path.name for path in tmp_path.iterdir()] == [name]  # no temporary file is left


def test_shared_matrices_are_written_once_and_shared_again(tmp_path):
    cost = np.array([[0.0, np.inf], [1.0, 2.0]])
    costs = (np.zeros(2), np.zeros(2), np.zeros(2))
    write_problem(Problem(costs, (Edge(0, 1, cost), Edge(1, 2, cost))), tmp_path / "p.json")
    again = read_problem(tmp_path / "p.json")
    assert again.edges[0].cost is again.edges[1].cost
    assert (again.edges[0].cost == cost).all()


def test_the_contest_form_is_read_and_written(tmp_path):
    problem = contest_problem(MLP_5)
    write_contest(problem, tmp_path / "mlp.json.gz", name="mlp-5")
    assert contest_document(read_contest(tmp_path / "mlp.json.gz"), name="mlp-5") == MLP_5


def broken(change):
    document = copy.deepcopy(MLP_5)
    change(document["problem"])
    return document


BAD = {
    "no field 'nodes'": lambda p: p.pop("nodes"),
    "no field 'costs'": lambda p: p["nodes"].pop("costs"),
    "edge 0 joins 2 and 3 strategies but has 2 costs, not 6": lambda p: p["edges"]["costs"].__setitem__(0, [1, 2]),
    r"interval of node 1 is \[6, 2\): it ends before": lambda p: p["nodes"]["intervals"].__setitem__(1, [6, 2]),
    "costs of node 0 overflow": lambda p: p["nodes"]["costs"].__setitem__(0, [0, 10**19]),
    "costs of node 0 overflow: 10000": lambda p: p["nodes"]["costs"].__setitem__(0, [0, 10**22]),
    "costs of edge 1 overflow": lambda p: p["edges"]["costs"].__setitem__(1, [10**400] * 9),
    "edge 2 joins nodes 2 and 9, but the nodes are 0 to 4": lambda p: p["edges"]["nodes"].__setitem__(2, [2, 9]),
    "node 0 has 2 costs but 3 usages": lambda p: p["nodes"]["usages"].__setitem__(0, [1, 2, 3]),
    "usage_limit is 'much'": lambda p: p.__setitem__("usage_limit", "much"),
    "bytes run from -1 to 20": lambda p: p["nodes"]["usages"].__setitem__(0, [-1, 20]),
    "node 0: costs have shape": lambda p: (
        p["nodes"]["costs"].__setitem__(0, []),
        p["nodes"]["usages"].__setitem__(0, []),
        p["edges"].update(nodes=[], costs=[]),
    ),
}


@pytest.mark.parametrize("message", sorted(BAD))
def test_bad_contest_input_gets_one_clear_sentence(message):
    message_seen = message if "10000" not in message else "costs of node 0 overflow"
    with pytest.raises(ValueError, match=message_seen):
        contest_problem(broken(BAD[message]))


def test_a_problem_that_does_not_fit_together_is_refused():
    two = (np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match=r"edge 0 from a to b: its costs have shape \(3, 2\).* make it \(2, 3\)"):
        Problem(two, (Edge(0, 1, np.zeros((3, 2))),), names=("a", "b"))
    with pytest.raises(ValueError, match="item 1: costs contain nan"):
        Problem((np.zeros(2), np.array([0, np.nan])), ())
    with pytest.raises(ValueError, match="edge 0: costs contain -inf"):
        Problem(two, (Edge(0, 1, np.full((2, 3), -np.inf)),))
    with pytest.raises(ValueError, match=r"usage 0 of hbm by item 0: its interval \[3, 1\) ends before it starts"):
        Problem(two, (), (Usage(0, "hbm", 3, 1, np.zeros(2)),))
    with pytest.raises(ValueError, match="usage 0 names item 7"):
        Problem(two, (), (Usage(7, "hbm", 0, 1, np.zeros(2)),))
    with pytest.raises(ValueError, match="edge usage 0 names edge 0, but the edges are 0 to -1"):
        Problem(two, (), (), (EdgeUsage(0, "hbm", 0, 1, np.zeros((2, 3))),))
    with pytest.raises(ValueError, match="limit of hbm is -1"):
        Problem(two, (), limits={"hbm": -1})
    with pytest.raises(ValueError, match="overflows"):
        Problem((np.array([1e308]), np.array([1e308])), ())


def run_solver(*arguments):
    command = [sys.executable, "-m", "solver", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_line_prints_one_json_object_last(tmp_path):
    (tmp_path / "mlp.json").write_text(json.dumps(MLP_5))
    done = run_solver(tmp_path / "mlp.json", "--time-limit", "10", "--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["status"], answer["cost"], answer["choice"]) == ("optimal", 31, [1, 1, 1, 1, 1])
    assert set(answer) == {"status", "cost", "bound", "gap", "seconds", "price_per_gib", "choice"}
    assert answer["price_per_gib"] == {"memory": pytest.approx(2 / 40 * 2**30)}


def test_the_command_line_reads_standard_input():
    command = [sys.executable, "-m", "solver", "-"]
    for text, status in ((json.dumps(MLP_5), 0), ("{", 2)):
        done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=120)
        assert done.returncode == status
        assert json.loads(done.stdout)["cost"] == 31 if status == 0 else "python -m solver: " in done.stderr


def test_the_command_line_says_what_is_wrong_and_exits_with_2(tmp_path):
    (tmp_path / "bad.json").write_text(json.dumps(broken(BAD["no field 'nodes'"])))
    (tmp_path / "half.json").write_text('{"problem": ')
    for name, message in (
        ("bad.json", "no field 'nodes'"),
        ("half.json", "is not JSON"),
        ("none.json", "No such file"),
    ):
        done = run_solver(tmp_path / name)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_an_infeasible_file_is_an_answer_not_an_error(tmp_path):
    (tmp_path / "tight.json").write_text(json.dumps(broken(lambda p: p.update(usage_limit=50))))
    done = run_solver(tmp_path / "tight.json")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, answer["status"], answer["choice"]) == (3, "infeasible", [])
    assert "the smallest workable limit is 56 bytes" in done.stderr


def test_contest_instance_g_is_proven():
    solution = solve(instance("G"), time_limit_s=60)
    assert (solution.status, solution.cost) == ("optimal", 217_039)


@pytest.mark.slow
@pytest.mark.parametrize(("letter", "best"), [("A", 6_548_553_650), ("C", 84_102_392_579), ("P", 651_833_115_436)])
def test_large_contest_instances_are_proven(letter, best):
    solution = solve(instance(letter), time_limit_s=60)
    assert solution.status == "optimal"
    assert solution.cost == pytest.approx(best, rel=2e-7)
