"""Pipeline cuts against every cut there is, a textbook dynamic program, a played 1F1B schedule, and sums by hand.

How long the large case takes, in seconds: `pytest tests/solver/test_pipeline.py -k large_chain --durations=5`. On
2026-11-20, one of two shared cores of an AMD EPYC, Python 3.11, numpy 2.4: 0.35 without a limit, 0.4 to 0.8 with one,
and up to twice that while the other core was busy.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from solver import (
    PipelineProblem,
    Stage,
    StageOption,
    StageTable,
    Value,
    additive_stages,
    chain_cuts,
    cut_pipeline,
    pipeline_cost,
    stage_table,
)
from tests.solver.pipelines import every_cut, large_pipeline, play_1f1b, random_pipeline, textbook


@pytest.mark.parametrize("block", range(10))
def test_no_cut_is_cheaper_and_none_is_missed(block):
    outcomes = {"cut": 0, "bytes": 0, "stages": 0}
    for seed in range(300 * block, 300 * block + 300):
        problem = random_pipeline(seed)
        cuts = list(every_cut(problem))
        best = min((seconds for seconds, nbytes in cuts if nbytes <= problem.limit_bytes), default=math.inf)
        solution = cut_pipeline(problem)
        assert solution.seconds == best, seed  # sums of whole numbers: equal to the bit
        if solution.cut is not None:
            outcomes["cut"] += 1
            assert solution.cost == pipeline_cost(problem, solution.cut)
            assert solution.cost.fits and solution.cost.seconds == best
        else:
            least = min((nbytes for _, nbytes in cuts), default=None)
            outcomes["stages" if least is None else "bytes"] += 1
            assert solution.explanation and solution.least_bytes == least, seed
    assert min(outcomes.values()) > 5, outcomes  # the sample has some of each


def test_no_cut_is_cheaper_where_no_two_sums_agree():
    for seed in range(300):
        problem = random_pipeline(seed, whole=False)
        costs = [seconds for seconds, nbytes in every_cut(problem) if nbytes <= problem.limit_bytes]
        assert cut_pipeline(problem).seconds == pytest.approx(min(costs, default=math.inf), rel=1e-12), seed


def test_longer_chains_agree_with_the_textbook_program():
    counts = set()
    for seed in range(40):
        problem = random_pipeline(seed, layers=7, devices=8, options=1)
        problem = replace(problem, micro_batches=1 + seed % 12)
        solution = cut_pipeline(problem)
        assert solution.seconds == textbook(problem), seed
        counts.add(len(solution.cut or ()))
    assert max(counts) >= 5  # stages far from the end are counted too


# --- the meaning of the formula ------------------------------------------------------------------------------------


def test_a_played_1f1b_step_takes_no_longer_and_holds_as_many():
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(300):
        count, batches, share = int(rng.integers(1, 7)), int(rng.integers(1, 13)), rng.uniform(0.2, 0.5)
        stage_s, send_s = rng.uniform(1, 4, count), rng.uniform(0, 2, count - 1)
        table = additive_stages(stage_s[:, None, None], np.full((count, 1, 1), 3.0), np.full((count, 1, 1), 5.0))
        problem = PipelineProblem(table, (1,), count, batches, send_s)
        cost = pipeline_cost(problem, [Stage(layer, layer, 0, 0) for layer in range(count)])
        seconds, most = play_1f1b(stage_s * share, stage_s * (1 - share), send_s, batches)
        assert most == cost.in_flight
        assert seconds <= cost.seconds * (1 + 1e-12)  # sums in another order
        ratios.append(seconds / cost.seconds)
    assert np.mean(ratios) > 0.85  # measured 0.90, with sends as long as half a stage
    assert play_1f1b([1.0] * 4, [2.0] * 4, [0.0] * 3, 32)[0] == 4 * 3 + 31 * 3  # equal stages, no sends: exactly


def equal_layers(layers, seconds, groups, *, devices, batches, send_s=0.0, **kwargs):
    """Layers that n devices run n times as fast."""
    share = np.array(groups)[None, :, None]
    table = additive_stages(*(np.full((layers, len(groups), 1), amount) / share for amount in (seconds, 60.0, 12.0)))
    return PipelineProblem(table, groups, devices, batches, np.full(layers - 1, send_s), **kwargs)


def test_a_group_that_is_n_times_as_fast_needs_no_pipeline():
    solution = cut_pipeline(equal_layers(8, 3.0, (1, 2, 4), devices=4, batches=5))
    assert solution.cut == (Stage(0, 7, 2, 0),)
    assert solution.seconds == 5 * 8 * 3 / 4


def test_only_single_devices_are_filled_evenly():
    # Two layers each: 4 stages of 6 s, 3 sends of 0.5 s, then 4 more micro-batches behind the slowest, 6.5 s.
    solution = cut_pipeline(equal_layers(8, 3.0, (1,), devices=4, batches=5, send_s=0.5))
    assert [(stage.first, stage.last) for stage in solution.cut] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert solution.seconds == 4 * 6 + 3 * 0.5 + 4 * 6.5


def test_one_micro_batch_is_not_sent_about():
    # Nothing overlaps with one micro-batch: the fewest sends win, though four devices are there.
    solution = cut_pipeline(equal_layers(8, 3.0, (1,), devices=4, batches=1, send_s=0.5))
    assert solution.cut == (Stage(0, 7, 0, 0),)
    assert cut_pipeline(replace(equal_layers(8, 3.0, (1,), devices=4, batches=1), use_all=True)).cost.devices == 4


def test_memory_in_flight_at_a_tight_limit():
    """Three layers on three devices, 4 micro-batches: the first stage holds 3, the next 2, the last 1.

    Each layer saves 10, 9, 8 bytes beside 70, 81, 90: 70 + 3*10 = 100, 81 + 2*9 = 99, 90 + 8 = 98. At 100 bytes all
    three stages fit, at 99 the first must save less: its other option saves 9, takes 7 s instead of 5, 70 + 3*9 = 97.
    """
    fast = {0: StageOption(5, 70, 10), 1: StageOption(4, 81, 9), 2: StageOption(6, 90, 8)}
    lean = {0: StageOption(7, 70, 9)}
    table = stage_table(3, 1, lambda i, k, _: [offer[i] for offer in (fast, lean) if i == k and i in offer])
    problem = PipelineProblem(table, (1,), 3, 4, np.array([0.25, 0.5]), limit_bytes=100)
    roomy = cut_pipeline(problem)
    assert [stage.option for stage in roomy.cut] == [0, 0, 0]
    assert (roomy.cost.nbytes, roomy.cost.in_flight) == ((100, 99, 98), (3, 2, 1))
    assert roomy.seconds == 5.25 + 4.5 + 6 + 3 * 6
    tight = cut_pipeline(replace(problem, limit_bytes=99))
    assert [stage.option for stage in tight.cut] == [1, 0, 0]
    assert tight.cost.nbytes == (97, 99, 98)
    assert tight.seconds == 7.25 + 4.5 + 6 + 3 * 7.25
    short = cut_pipeline(replace(problem, limit_bytes=98.5))
    assert (short.cut, short.seconds, short.least_bytes) == (None, math.inf, 99)


def test_fewer_micro_batches_than_stages_are_all_in_flight():
    """With 2 micro-batches the first stage holds 2, not 3: 70 + 2*10 = 90 bytes are enough (by Alpa's count 100)."""
    table = additive_stages(
        np.array([5.0, 4, 6])[:, None, None], np.array([70.0, 61, 50])[:, None, None], np.full((3, 1, 1), 10.0)
    )
    problem = PipelineProblem(table, (1,), 3, 2, np.array([0.25, 0.5]), limit_bytes=90)
    solution = cut_pipeline(problem)
    assert (solution.cost.in_flight, solution.cost.nbytes) == ((2, 2, 1), (90, 81, 60))
    assert solution.seconds == 5.25 + 4.5 + 6 + 6
    assert cut_pipeline(replace(problem, micro_batches=3)).least_bytes == 100


# --- a large case --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit_bytes", [math.inf, 20e9, 12e9])
def test_a_large_chain_is_cut_better_than_evenly(limit_bytes):
    problem = large_pipeline(limit_bytes)
    even = {}
    for group, devices in enumerate(problem.groups):
        bounds = [round(96 * stage * devices / 64) for stage in range(64 // devices + 1)]
        for option in (0, 1):
            cut = [Stage(first, end - 1, group, option) for first, end in itertools.pairwise(bounds)]
            cost = pipeline_cost(problem, cut)
            if cost.fits:
                even[devices, option] = cost.seconds
    solution = cut_pipeline(problem)
    assert solution.cost.fits and solution.cost.devices <= 64
    assert even and solution.seconds <= 0.95 * min(even.values()), (solution.seconds, even)


# --- laws ----------------------------------------------------------------------------------------------------------


def test_a_larger_limit_more_devices_or_fewer_micro_batches_never_cost_more():
    for seed in range(150):
        problem = replace(random_pipeline(seed), use_all=False)
        seconds = cut_pipeline(problem).seconds
        assert cut_pipeline(replace(problem, limit_bytes=problem.limit_bytes + 4)).seconds <= seconds
        assert cut_pipeline(replace(problem, devices=problem.devices + 1)).seconds <= seconds
        if problem.micro_batches > 1:
            assert cut_pipeline(replace(problem, micro_batches=problem.micro_batches - 1)).seconds <= seconds


@pytest.mark.parametrize("unit", [2.0**-40, 2.0**40])
def test_the_units_do_not_matter(unit):
    for seed in range(60):
        problem = random_pipeline(seed, whole=False)
        table = problem.stages
        scaled = replace(
            problem,
            stages=StageTable(table.seconds * unit, table.fixed_bytes * unit, table.saved_bytes * unit),
            send_s=problem.send_s * unit,
            limit_bytes=problem.limit_bytes * unit,
        )
        assert cut_pipeline(scaled).cut == cut_pipeline(problem).cut


def test_times_that_hardly_differ_are_told_apart():
    table = stage_table(2, 1, lambda i, k, _: [StageOption(1e-7 * (1 + i + k), 3, 2), StageOption(1e-7, 3, 2)])
    problem = PipelineProblem(table, (1,), 2, 1000, np.array([3e-9]))
    assert cut_pipeline(problem).cut == (Stage(0, 1, 0, 1),)


def test_the_same_problem_gives_the_same_cut():
    problem = equal_layers(6, 2.0, (1, 2), devices=4, batches=6)  # many cuts cost the same
    assert len({cut_pipeline(problem).cut for _ in range(3)}) == 1


def test_the_smallest_limit_that_is_named_works_and_the_next_below_does_not():
    tried = 0
    for seed in range(200):
        problem = random_pipeline(seed, whole=False)
        least = cut_pipeline(problem).least_bytes
        if least is not None:
            tried += 1
            assert cut_pipeline(replace(problem, limit_bytes=least)).cost.fits
            assert cut_pipeline(replace(problem, limit_bytes=np.nextafter(least, 0))).cut is None
    assert tried > 20


# --- why nothing fits ----------------------------------------------------------------------------------------------


def test_a_layer_that_fits_nowhere_is_named_with_its_bytes():
    fixed = np.array([20.0, 90, 30])[:, None, None]
    table = additive_stages(np.full((3, 1, 1), 2.5), fixed, np.full((3, 1, 1), 4.0))
    names = ("embed", "experts", "head")
    solution = cut_pipeline(PipelineProblem(table, (1,), 3, 8, np.array([1, 1.5]), limit_bytes=80, names=names))
    # experts first in a stage of its own, one stage behind it: 90 + 2 * 4
    assert solution.least_bytes == 98
    for part in (
        "no cut fits 80 bytes a device",
        "layer 1 (experts) on 1 device: 90 fixed + 2 in flight x 4 saved",
        "No stage at all with layer 1 (experts) holds less than 98",
        "Allow 98 bytes (18 more)",
        "larger groups",
    ):
        assert part in solution.explanation


def test_the_last_layer_is_named_with_the_bytes_of_one_micro_batch():
    fixed = np.array([20.0, 30, 90])[:, None, None]
    table = additive_stages(np.full((3, 1, 1), 2.5), fixed, np.full((3, 1, 1), 4.0))
    solution = cut_pipeline(PipelineProblem(table, (1,), 3, 8, np.array([1, 1.5]), limit_bytes=80))
    assert "No stage at all with layer 2 holds less than 94. Allow 94 bytes (14 more)" in solution.explanation


def test_layers_that_fit_alone_but_not_together_are_named_as_a_stage():
    table = additive_stages(np.full((3, 1, 1), 2.5), np.array([40.0, 41, 42])[:, None, None], np.full((3, 1, 1), 3.0))
    solution = cut_pipeline(PipelineProblem(table, (1,), 2, 8, np.array([1, 1.5]), limit_bytes=80))
    # two devices for three layers: 40 + 41 and 42, or 40 and 41 + 42; the last holds one micro-batch
    assert solution.least_bytes == 41 + 42 + 2 * 3
    assert "layer 1 to layer 2 on 1 device: 83 fixed + 1 in flight x 6 saved. Allow 89" in solution.explanation


@pytest.mark.parametrize(
    ("offered", "groups", "devices", "use_all", "part"),
    [
        (lambda i, k, g: not i <= 1 <= k, (1,), 4, False, "layer 1 is in no stage offered on 4 devices or fewer; give"),
        (lambda i, k, g: g == 0 or not i <= 1 <= k, (8, 1), 4, False, "layer 1 is in no stage offered on 4 devices"),
        (lambda i, k, g: i == 1, (1,), 3, False, "layer 0 is in no stage"),
        (
            lambda i, k, g: i == k,
            (1,),
            2,
            False,
            "3 layers take at least 3 devices in the stages that are offered, but",
        ),
        (lambda i, k, g: k - i == 2 or g, (2, 4), 3, True, "exactly 3 devices, but 2 would do; give so many, or set"),
        (lambda i, k, g: k - i == 1, (1,), 3, False, "get past layer 1; offer a stage that begins with layer 2"),
    ],
)
def test_stages_that_no_limit_would_help_are_explained(offered, groups, devices, use_all, part):
    table = stage_table(3, len(groups), lambda i, k, g: [StageOption(2.5, 7, 3)] if offered(i, k, g) else [])
    problem = PipelineProblem(table, groups, devices, 4, np.array([0.5, 1.5]), 1e9, use_all)
    solution = cut_pipeline(problem)
    assert (solution.cut, solution.least_bytes) == (None, None)
    assert part in solution.explanation


# --- tables and cuts -----------------------------------------------------------------------------------------------


def test_layers_add_up_and_temporaries_count_once():
    table = additive_stages(
        seconds=[[[2.0, 3]], [[4, 5]], [[6, 9]]],
        fixed_bytes=[[[10.0, 11]], [[20, 22]], [[40, 44]]],
        saved_bytes=[[[1.0, 0.5]], [[2, 0.25]], [[4, 0.125]]],
        peak_bytes=[[[100.0, 3]], [[300, 1]], [[200, 2]]],
    )
    assert table.seconds[0, 2, 0].tolist() == [12, 17]
    assert table.fixed_bytes[0, 2, 0].tolist() == [70 + 300, 77 + 3]
    assert table.fixed_bytes[2, 2, 0].tolist() == [40 + 200, 44 + 2]
    assert table.saved_bytes[1, 2, 0].tolist() == [6, 0.375]
    assert table.seconds[2, 0, 0].tolist() == [math.inf, math.inf]  # ends before it begins


def test_equal_layers_make_equal_stages():
    table = additive_stages(np.full((9, 1, 1), 0.1), np.full((9, 1, 1), 0.7), np.full((9, 1, 1), 0.3))
    for array in (table.seconds, table.fixed_bytes, table.saved_bytes):
        assert len({float(array[first, first + 3, 0, 0]) for first in range(6)}) == 1


def test_a_layer_without_an_option_forbids_the_stages_that_have_it():
    table = additive_stages([[[2.0]], [[np.inf]], [[3.0]]], [[[5.0]], [[np.nan]], [[6.0]]], np.full((3, 1, 1), 4.0))
    assert np.isfinite(table.seconds[:, :, 0, 0]).tolist() == [[True, False, False], [False] * 3, [False, False, True]]


def test_a_skip_crosses_every_cut_between_its_ends():
    values = [
        Value("embed", ("attn", "add"), 7),  # the skip: crosses the cuts behind embed, attn and mlp, once each
        Value("attn", ("mlp",), 20),
        Value("mlp", ("add",), 300),
        Value("add", ("head", "loss"), 4000),
        Value("head", ("loss",), 50_000),
        Value("loss", (), 600_000),  # nobody reads it
    ]
    assert chain_cuts(("embed", "attn", "mlp", "add", "head", "loss"), values).tolist() == [7, 27, 307, 4000, 54_000]
    # two values of one operator add up
    assert chain_cuts("ab", [Value("a", ("b",), 3), Value("a", ("b",), 5)]).tolist() == [8]
    assert chain_cuts("a", []).tolist() == []


# --- what makes no sense -------------------------------------------------------------------------------------------

GOOD = additive_stages(*(np.full((3, 2, 1), amount) for amount in (2.5, 7.0, 3.0)))
SEND_S = np.array([0.5, 1.5])


def broken(name, value, at=(0, 1, 1, 0)):
    arrays = {field: getattr(GOOD, field).copy() for field in ("seconds", "fixed_bytes", "saved_bytes")}
    arrays[name][at] = value
    return StageTable(**arrays)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: broken("seconds", -2.0), r"seconds of layers 0 to 1 on group 1, option 0 are -2; they must not"),
        (lambda: broken("seconds", np.nan), r"seconds of layers 0 to 1 .* are nan"),
        (lambda: broken("fixed_bytes", -3), r"fixed_bytes of layers 0 to 1 .* are -3; they must be finite and not"),
        (lambda: broken("saved_bytes", np.inf), r"saved_bytes of layers 0 to 1 .* are inf"),
        (lambda: StageTable(np.full((3, 2, 1, 1), 2.0), np.ones(3), np.ones(3)), r"seconds have shape \(3, 2, 1, 1\)"),
        (lambda: StageTable(GOOD.seconds, GOOD.fixed_bytes[:2], GOOD.saved_bytes), r"fixed_bytes have shape \(2, 3,"),
        (lambda: PipelineProblem(GOOD, (1,), 4, 8, SEND_S), r"1 groups are given, but the table of stages has 2"),
        (lambda: PipelineProblem(GOOD, (1, 0), 4, 8, SEND_S), r"devices of group 1 is 0; at least 1"),
        (lambda: PipelineProblem(GOOD, (1, 2), 0, 8, SEND_S), r"devices is 0; at least 1"),
        (lambda: PipelineProblem(GOOD, (1, 2), 4.5, 8, SEND_S), r"devices is 4.5; a whole number"),
        (lambda: PipelineProblem(GOOD, (1, 2), 4, 0, SEND_S), r"micro_batches is 0; at least 1 is needed"),
        (lambda: PipelineProblem(GOOD, (1, 2), 4, 8, SEND_S[:1]), r"send_s has shape \(1,\); 3 layers have 2 cuts"),
        (lambda: PipelineProblem(GOOD, (1, 2), 4, 8, -SEND_S), r"send_s behind layer 0 is -0.5; it must be finite"),
        (lambda: PipelineProblem(GOOD, (1, 2), 4, 8, SEND_S, -80.0), r"limit_bytes is -80; it must not be negative"),
        (lambda: PipelineProblem(GOOD, (1, 2), 4, 8, SEND_S, math.nan), r"limit_bytes is nan"),
        (lambda: PipelineProblem(GOOD, (1, 2), 4, 8, SEND_S, names=("a", "b")), r"2 names for 3 layers"),
        (lambda: PipelineProblem(broken("seconds", 1e299), (1, 2), 4, 8, SEND_S), r"overflows; use a larger unit"),
        (lambda: additive_stages([[2.0, 3.0]], [[1.0, 2.0]], [[1.0, 2.0]]), r"\[layers, groups, options\] is needed"),
        (lambda: additive_stages([[[2.0]]], [[[1.0, 2.0]]], [[[1.0]]]), r"fixed_bytes of the layers have shape"),
        (lambda: additive_stages([[[2.0]], [[-1.0]]], [[[1.0]]] * 2, [[[1.0]]] * 2), r"seconds of the layers go down"),
        (lambda: additive_stages([[[2.0]]], [[[1.0]]], [[[-5.0]]]), r"saved_bytes of the layers go down to -5"),
        (lambda: chain_cuts("ab", [Value("b", ("a",), 3)]), r"'a' reads 'b' but does not come after it"),
        (lambda: chain_cuts("ab", [Value("a", ("c",), 3)]), r"'c' is not in the order"),
        (lambda: chain_cuts("aba", []), r"'a' stands in the order twice"),
        (lambda: chain_cuts("ab", [Value("a", ("b",), -3)]), r"'a' gives -3 bytes"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_a_sentence(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ([], "cover 0 of 3 layers"),
        ([Stage(0, 1, 0, 0)], "cover 2 of 3 layers"),
        ([Stage(0, 0, 0, 0), Stage(2, 2, 0, 0)], "stage 1 has layers 2 to 2; it must begin with layer 1"),
        ([Stage(0, 5, 0, 0)], "stage 0 has layers 0 to 5"),
        ([Stage(0, 2, 2, 0)], "stage 0 names group 2, but they are 0 to 1"),
        ([Stage(0, 2, 0, -1)], "stage 0 names option -1, but they are 0 to 0"),
    ],
)
def test_the_referee_refuses_what_is_no_cut(cut, words):
    with pytest.raises(ValueError, match=words):
        pipeline_cost(PipelineProblem(GOOD, (1, 2), 4, 8, SEND_S), cut)


def test_the_referee_says_what_does_not_fit():
    problem = PipelineProblem(GOOD, (1, 2), 3, 8, SEND_S, limit_bytes=20)
    two = pipeline_cost(problem, [Stage(0, 0, 0, 0), Stage(1, 2, 1, 0)])
    assert (two.nbytes, two.devices, two.fits) == ((13, 20), 3, True)
    assert two.seconds == 2.5 + 0.5 + 5 + 7 * 5
    assert not pipeline_cost(replace(problem, limit_bytes=19), [Stage(0, 0, 0, 0), Stage(1, 2, 1, 0)]).fits
    assert not pipeline_cost(problem, [Stage(0, 0, 1, 0), Stage(1, 2, 1, 0)]).fits  # 4 devices of 3
    assert not pipeline_cost(replace(problem, use_all=True), [Stage(0, 2, 0, 0)]).fits  # 1 device of 3
    forbidden = PipelineProblem(broken("seconds", np.inf, (0, 2, 0, 0)), (1, 2), 3, 1, SEND_S)
    assert pipeline_cost(forbidden, [Stage(0, 2, 0, 0)]).seconds == math.inf
