"""What the page of predictions says of its rows."""

from benchmarks.predictions import Row, markdown, verdict


def row(model: str, processes: int, plan: str, predicted_s: float, measured_s: float) -> Row:
    return Row(model, processes, plan, predicted_s, measured_s, 90.0, 100.0, True)


ROWS = [
    row("mlp", 2, "searched", 1.0, 1.25),
    row("mlp", 2, "fsdp", 2.0, 1.0),
    row("mlp", 4, "searched", 3.0, 3.0),
    row("mlp", 4, "fsdp", 4.0, 5.0),
]


def test_the_verdict_tells_error_rank_and_how_good_the_predicted_best_is():
    text = "\n".join(verdict(ROWS))
    assert "- all: 4 plans of 1 models, rank correlation (Spearman) 0.800" in text
    assert "median absolute error of the step time 20% (worst 100%)" in text
    assert "- on 2: 2 plans of 1 models, rank correlation (Spearman) -1.000" in text
    assert "mlp on 2: predicted best (searched) takes 1.25 times as long as the measured best (fsdp)" in text
    assert "mlp on 4: predicted best (searched) takes 1.00 times as long as the measured best (searched)" in text
    assert "peak memory 0.90 to 0.90" in text and "equal in 4 of 4" in text


def test_the_page_has_a_line_for_each_plan():
    text = markdown(ROWS, "a command")
    assert "`a command`" in text
    assert "| mlp | 2 | fsdp | 2000.00 | 1000.00 | +100% | 0.0 | 0.0 | equal |" in text
