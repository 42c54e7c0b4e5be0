"""What is left out of `make test` is still there to be run."""

import ast
from pathlib import Path

import pytest

from tests.conftest import THINNED, is_in_part


def test_every_thinned_test_exists() -> None:
    for file, names in THINNED.items():
        tree = ast.parse((Path(__file__).parent / file).read_text())
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert set(names) <= there, file


def test_every_slow_test_is_in_one_of_the_parts_that_commits_run() -> None:
    for number in range(300):
        name = f"tests/some/test_file.py::test_it[{number}]"
        assert [is_in_part(name, part, 3) for part in range(3)].count(True) == 1
    counts = [sum(is_in_part(f"test_{number}", part, 3) for number in range(300)) for part in range(3)]
    assert min(counts) > 70, counts
    with pytest.raises(pytest.UsageError, match="--part 3/3: of 3 parts the first is 0, the last 2"):
        is_in_part("test_it", 3, 3)
