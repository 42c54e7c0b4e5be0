"""Replays of published tables: the rows as data, what comes out, and the commands."""

from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.replay import report
from benchmarks.replay.__main__ import main, outcomes_of
from benchmarks.replay.llama import SHAPES
from benchmarks.replay.optimus import optimus
from benchmarks.replay.pipelines import PARAMETERS
from benchmarks.replay.rows import machine, torchtitan

MISSES = {"8b-8-cp": 0.17, "8b-8-cp2": 0.25}  # row -> how far its time is off, at most


# --- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_row_comes_out_within_its_target() -> None:
    """15 % in time, 10 % in memory, 10 % in ratios between rows of one kind and table: no later change may lose them
    unseen. Two rows of long sequences miss theirs, and ratios between those of float8, which the page says.
    """
    outcomes, _ = outcomes_of(torchtitan())
    reported = [one for one in outcomes if one.row.use == "reported"]
    assert len(reported) == 28
    for one in reported:
        limit = 0.10 if one.row.kind == "asynchronous tensor parallel" else 0.15
        assert abs(one.time_error) <= limit or one.row.name in MISSES, (one.row.name, one.time_error)
        if one.row.name in MISSES:
            assert limit < abs(one.time_error) <= MISSES[one.row.name], (one.row.name, one.time_error)
    for one in outcomes:
        assert one.memory_error is None or abs(one.memory_error) <= 0.10, (one.row.name, one.memory_error)
    for one, other in combinations(reported, 2):
        if (one.row.source, one.row.kind) == (other.row.source, other.row.kind) and "float8" not in one.row.kind:
            ratio = (1 + one.time_error) / (1 + other.time_error)
            assert 1 / 1.1 <= ratio <= 1.1, (one.row.name, other.row.name, ratio)
    longer = [one for one in reported if "long" in one.row.kind]  # from the shortest on, and each is slower
    assert [one.tokens_per_s for one in longer] == sorted((one.tokens_per_s for one in longer), reverse=True)


# --- the data --------------------------------------------------------------------------------------------------------


def test_every_row_is_complete_and_says_where_it_stands() -> None:
    table = torchtitan()
    for row in table.rows:
        assert row.source.url.startswith("https://github.com/pytorch/") and row.source.date[:2] == "20"
        assert row.tokens_per_s > 0 and row.sequence > 0 and row.local_batch > 0 and row.mesh.ranks > 1
        assert row.use == "not modelled" or row.model in SHAPES
        if row.use != "not modelled":
            assert machine(row.source.hardware).name == row.source.hardware
    assert {row.name for row in table.rows if row.use == "fit"} == {row.name for row in table.fitted_on.values()}


def test_what_is_fitted_on_is_published_elsewhere_than_what_is_reported() -> None:
    table = torchtitan()
    fitted_on = {row.source.url for row in table.fitted_on.values()}
    assert not fitted_on & {row.source.url for row in table.rows if row.use == "reported"}
    two_d = optimus()
    assert {two_d.row(name).use for name in two_d.fitted.values()} == {"fit"}
    assert sum(row.use == "fit" for row in two_d.rows) == len(two_d.fitted)


def test_tokens_per_second_become_seconds_of_a_step() -> None:
    table = torchtitan()
    # 2 sequences of 8192 tokens on each of 8 GPUs; 5762 tokens/s on each: 16384 / 5762
    assert table.row("8b-8").seconds == pytest.approx(2.84345, abs=1e-5)
    # 16 sequences on each of 32 groups, 256 GPUs: 512 * 8192 / (597.3 * 256) = 4194304 / 152908.8
    assert table.row("70b-256-tp8").seconds == pytest.approx(27.43010, abs=1e-5)
    assert table.row("70b-256-tp8").batch == 512


def test_the_shapes_have_the_models_parameters() -> None:
    published = {"llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.55e9, "llama-2-13b": 13.02e9, "llama-2-70b": 68.98e9}
    published |= PARAMETERS
    for name, shape in SHAPES.items():
        attention = shape["width"] * shape["width"] * (2 + 2 * shape["kv_heads"] / shape["heads"])
        layer = attention + 3 * shape["width"] * shape["hidden"] + 2 * shape["width"]
        numel = shape["layers"] * layer + (2 * shape["vocabulary"] + 1) * shape["width"]
        assert numel == pytest.approx(published[name], rel=1e-3), name


# --- the commands ----------------------------------------------------------------------------------------------------


def test_the_command_prints_published_predicted_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["torchtitan", "--rows", "ao-8b-8", "8b-8-compile"]) == 0
    out = capsys.readouterr().out
    fit, line = (
        next(line for line in out.splitlines() if line.startswith(f"{name} ")) for name in ("ao-8b-8", "8b-8-compile")
    )
    assert "fitted on" in fit and " 6150  " in fit
    assert " 6667  " in line and line.count("%") == 3
    assert "time, h100-grand-teton: 1 rows" in out and "fitted on the time of ao-8b-8" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["torchtitan", "--rows", "405b-512-pp"], "not modelled: pipeline stages"),
        (["torchtitan", "--rows", "9b"], "no row '9b'; known rows: ao-8b-8"),
        (["torchtitan", "--rows", "8b-8", "--write"], "leave --rows away"),
    ],
)
def test_a_row_that_cannot_be_replayed_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_only_the_generated_section_of_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "replay.md"
    page.write_text("before\n<!-- optimus: generated -->\nold\n<!-- optimus: end -->\nafter\n")
    monkeypatch.setattr(report, "PAGE", page)
    report.write("optimus", "new", 1.0)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("-->\nafter\n") and "new" in text and "old" not in text
    with pytest.raises(ValueError, match="torchtitan: generated"):
        report.write("torchtitan", "new", 1.0)


@pytest.mark.slow
def test_the_targets_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """8B and 70B within 15 % in time and 10 % in memory, ratios between rows of one table within 10 %."""
    rows = [row.name for row in torchtitan().rows if row.use != "not modelled" and "float8" not in row.kind]
    assert main(["torchtitan", "--rows", *rows]) == 0
    out = capsys.readouterr().out
    worst = [float(line.split("worst ")[1].split(" %")[0]) for line in out.splitlines() if "worst " in line]
    limits = [15.0, 10.0, 15.0, 10.0]  # time: H100, with asynchronous tensor parallel, A100; memory
    assert len(worst) == 4 and all(abs(error) <= limit for error, limit in zip(worst, limits, strict=True)), out
    off = [float(line.split("at most ")[1].split(" %")[0]) for line in out.splitlines() if line.startswith("ratios")]
    assert len(off) == 4 and max(off) <= 10.0, out


@pytest.mark.slow
def test_optimus_and_megatron_on_frontera(capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows fit the links; Megatron's others are within 15 % in time. Of Optimus over Megatron the two kinds of
    broadcasts bracket what was published on 64 ranks, of a step and of its forward pass; the more ranks, the more it
    gains, from less than nothing; and the search's own plan is quicker than either.
    """
    assert main(["optimus"]) == 0
    out = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in out if line.startswith("megatron")]
    assert [row[6] for row in rows[:2]] == ["fitted", "fitted"]
    assert all(abs(float(row[6])) < 15 for row in rows[2:])

    told = [line for line in out if " with tree broadcasts, " in line]
    pairs = [[float(part.split()[0]) for part in line.split("predicted ")[1].split(", ")] for line in told]
    assert len(pairs) == 5
    *steps, forward = pairs
    assert steps[-1][0] < 1.48 < steps[-1][1] and forward[0] < 1.78 < forward[1], told
    for tree_or_pipelined in zip(*steps, strict=True):
        assert [*tree_or_pipelined] == sorted(tree_or_pipelined) and tree_or_pipelined[0] < 1.0 < tree_or_pipelined[-1]
    own = [line for line in out if line.startswith("the plan of the search")]
    assert len(own) == 4
    for line in own:
        over_optimus, over_megatron = (float(part.split(" times")[0].split()[-1]) for part in line.split(", ")[-2:])
        assert over_optimus > 1.0 and over_megatron > 1.0, line
