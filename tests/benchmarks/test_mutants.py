"""The list of mutants: each still applies, and names tests that are there. The benchmark runs them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchmarks.mutants.list import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.what)
def test_it_applies_once_and_names_tests(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text().count(mutant.old) == 1 and mutant.new != mutant.old
    named = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert named and all((ROOT / word.partition("::")[0]).exists() for word in named)


def test_there_are_enough_of_different_meaning() -> None:
    assert len({one.what for one in MUTANTS}) == len(MUTANTS) >= 40
