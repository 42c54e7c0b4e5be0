"""What the runner of outside scripts says of scripts whose verdict is known; what its page says of rows."""

import pytest

from benchmarks.outside import catalogue
from benchmarks.outside.ranks import rows_of
from benchmarks.outside.report import markdown, summary
from benchmarks.outside.worker import is_rounding


@pytest.mark.slow
def test_right_wrong_and_refused_are_told_apart() -> None:
    names, here = ["right", "wrong", "refused", "right"], "tests.benchmarks.outside_scripts"
    options = {"packages": None, "limit_s": 60.0, "dtypes": ["float32"], "links": "easy", "catalogue": here}
    rows = list(rows_of(names, (2,), **options))
    assert [(row["name"], row["verdict"]) for row in rows] == list(zip(names, [*names[:3], "right"], strict=True))
    right, wrong, refused, _ = rows
    assert right["share"] < 0.2 and max(off for off, _ in right["off"].values()) < 1e-4
    assert "loss by" in wrong["told"] and wrong["float64"]
    assert refused["told"].startswith("TraceError: ") and "outside_scripts.py" in refused["told"]


def test_a_page_counts_and_tells() -> None:
    rows = [
        {"name": "a", "mesh": [2], "verdict": "right", "share": 0.1, "told": "", "seconds": 1},
        {"name": "b", "mesh": [2], "verdict": "refused", "told": "TraceError: x | y", "seconds": 1},
        {"name": "a", "mesh": [2, 2], "verdict": "right", "share": 0.5, "told": "", "seconds": 1},
        {"name": "b", "mesh": [2, 2], "verdict": "crash", "told": "no end", "seconds": 1},
    ]
    assert summary(rows).splitlines()[2:] == ["| 2 | 2 | 1 | 1 | 0 | 0 | 1 |", "| 2x2 | 2 | 1 | 0 | 0 | 1 | 0 |"]
    text = markdown(rows, {"a": "no dropout"})
    assert "| a | right | 10% | right | 50% | no dropout |" in text
    assert "| b | refused |  | crash |  | TraceError: x \\| y; no end |" in text


@pytest.mark.parametrize(
    ("after", "told", "verdict", "rounds"),
    [
        (1e-12, "", "right", True),
        (3e-9, "gradient by 3e-09", "wrong", True),
        (0.5, "gradient by 0.5", "wrong", False),
        (3e-9, "gradient by 3e-09; ranks differ", "wrong", False),
    ],
)
def test_rounding_shrinks_with_the_precision(after: float, told: str, verdict: str, rounds: bool) -> None:
    row = {"verdict": "wrong", "told": "gradient by 0.5", "off": {"gradient": [0.5, "a"]}}
    again = {"verdict": verdict, "told": told, "off": {"gradient": [after, "a"]}}
    assert is_rounding(row, again) == rounds


def test_every_script_has_a_name_of_its_own() -> None:
    names = [script.name for script in catalogue.scripts()]
    assert len(set(names)) == len(names) >= 16
