"""What the page of meshes says of its rows."""

from benchmarks.meshes import Row, markdown, of_models

ROWS = [
    Row("a", "data=2,tensor=2", 0.009, 0.0123),
    Row("a", "data=4", 0.010, 0.012),
    Row("b", "data=4", 0.020, 0.030),
    Row("b", "data=2,tensor=2", 0.021, 0.020),
]


def test_the_chosen_mesh_stays_the_first() -> None:
    assert {name: rows[0].mesh for name, rows in of_models(ROWS).items()} == {"a": "data=2,tensor=2", "b": "data=4"}


def test_a_page_says_what_was_missed() -> None:
    text = markdown(ROWS, 4, 21, "command")
    assert "within 5% of the quickest for 1 of 2 models; b: 1.50 times." in text
    assert "| a | data=2,tensor=2 | 9.00 | 12.30 | 1.02 | chosen |" in text
    assert "| b | data=2,tensor=2 | 21.00 | 20.00 | 1.00 |  |" in text
