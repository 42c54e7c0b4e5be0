"""The search for a chunk size: against a sweep that tries every size, at its limits, and in what it refuses."""

import random

import pytest

from autopar.search.elixir import DoesNotFit, Parameter, Training, elixir_search
from autopar.search.elixir.belady import move_count
from autopar.search.elixir.chunks import Sizes, choose_chunks, pack, sizes_to_try, sweep

MI = 2**20
GIB = 2**30


def every_size(numels, steps, room, sizes, reserved):
    """(size, blocks, moves) of least cost, the smaller size of equals; or None."""
    best = None
    for size in range(sizes.interval, sizes.most + 1, sizes.interval):
        blocks = room // sizes.interval * sizes.interval // size - reserved
        if size < max(*numels, sizes.base) or blocks < 1:
            continue
        chunk_of = pack(numels, size)
        blocks = min(blocks, chunk_of[-1] + 1)
        trace = [{chunk_of[position] for position in step} for step in steps]
        if max(map(len, trace)) <= blocks:
            moves = move_count(trace, blocks)
            if best is None or moves * size < best[2] * best[0]:
                best = size, blocks, moves
    return best


def random_problem(seed):
    draw = random.Random(seed)
    numels = [draw.choice((1, 2, 3, draw.randint(1, 32))) for _ in range(draw.randint(2, 20))]
    steps = [draw.sample(range(len(numels)), draw.randint(1, 2)) for _ in range(draw.randint(1, 15))]
    return numels, steps, draw.randint(1, 400), Sizes(32, 96, draw.choice((1, 2, 3, 5))), draw.choice((0, 2))


def test_sizes_that_change_nothing_are_rightly_left_out():
    outcomes = set()
    for seed in range(400):
        numels, steps, room, sizes, reserved = random_problem(seed)
        found = sweep(numels, steps, room, sizes, reserved=reserved)
        got = found and (found.elements, found.blocks, found.moves)
        assert got == every_size(numels, steps, room, sizes, reserved), seed
        outcomes.add(bool(found) and found.elements > 32 + sizes.interval)
    assert outcomes == {True, False}, "no case in which a size beyond the first wins"


def test_more_memory_never_moves_more_elements():
    for seed in range(50):
        numels, steps, _, sizes, reserved = random_problem(seed)
        costs = [
            found.moves * found.elements if (found := sweep(numels, steps, room, sizes, reserved=reserved)) else 10**9
            for room in range(0, 600, 15)
        ]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("largest", "count", "nbytes", "base_mib", "interval"),
    [
        (1, 8, 2, 32, 1024),  # the least of everything
        (17 * MI, 8, 2, 64, 1024),
        (16 * MI, 8, 4, 64, 1024),  # exactly filled
        (64 * MI, 515, 2, 128, 32 * 1024),  # OPT-6.7B
        (64 * MI, 512, 2, 128, 16 * 1024),
    ],
)
def test_the_range_of_sizes_grows_with_the_largest_parameter(largest, count, nbytes, base_mib, interval):
    sizes = sizes_to_try([1] * (count - 1) + [largest], nbytes)
    base = base_mib * MI // nbytes
    assert sizes == Sizes(base, 3 * base, interval // nbytes)


def test_a_parameter_never_spans_two_chunks():
    assert pack([3, 3, 4, 7, 10, 1], 10) == (0, 0, 0, 1, 2, 3)


def layers(count, numel, **options):
    return [Parameter(f"w{number}", numel, **options) for number in range(count)]


def there_and_back(parameters):
    forward = [(parameter.name,) for parameter in parameters]
    return forward + forward[::-1]


def test_no_block_left_by_overlap_is_an_error_not_an_endless_loop():
    parameters = layers(8, 40 * MI)
    options = dict(parameter_bytes=2, ranks=1)
    steps = [(at,) for at in range(8)]
    with pytest.raises(DoesNotFit) as caught:
        choose_chunks(parameters, steps, 100 * MI, overlap=True, **options)
    assert str(caught.value).startswith(
        "not one block fits beside the 2 kept free for overlap: the smallest chunk has 67,108,864 elements "
        "(the largest parameter, 'w0', has 41,943,040), so at least 201,326,592 elements are needed, "
        "but there is room for 104,857,600: 96,468,992 too few."
    )
    assert choose_chunks(parameters, steps, 100 * MI, overlap=False, **options).blocks == 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_budget_ends_in_a_plan_or_in_a_sentence(overlap, ranks):
    parameters = [*layers(8, 40 * MI), Parameter("emb", 30 * MI, tied=True)]
    fits = []
    for tenth in range(120):
        options = dict(capacity_bytes=tenth * GIB / 10, activation_bytes=GIB / 4, ranks=ranks, overlap=overlap)
        try:
            plan = elixir_search(parameters, there_and_back(parameters[:8]), **options)
        except DoesNotFit as error:
            assert "Give more GPU memory" in str(error)
            fits.append(False)
        else:
            assert plan.cache_blocks * plan.chunk_elements <= plan.room
            assert plan.chunk_elements % ranks == 0
            fits.append(True)
    assert fits == sorted(fits) and set(fits) == {True, False}


def test_no_room_names_what_takes_it():
    with pytest.raises(
        DoesNotFit, match=r"1 of 16\.00 GiB, less 2 GiB .* 1\.25 x 12\.00 GiB of activations, is room for 0 "
    ):
        elixir_search(layers(2, 5), [], capacity_bytes=16 * GIB, activation_bytes=12 * GIB)
    with pytest.raises(DoesNotFit, match=r"tied parameters and the copies of hooks alone take 16,106,127,367"):
        elixir_search(layers(2, 5), [], capacity_bytes=16 * GIB, activation_bytes=0, hook_elements=16_106_127_367)


def test_a_step_wider_than_the_blocks_is_named():
    parameters = layers(4, 40 * MI)
    with pytest.raises(DoesNotFit, match=r"step 1 uses 4 chunks of 67,108,864 elements at once, .* gives 1 blocks"):
        choose_chunks(parameters, [(0,), (0, 1, 2, 3)], 200 * MI, parameter_bytes=2, overlap=True, ranks=1)


def test_a_small_model_is_one_chunk():
    parameters = layers(5, 7)
    plan = elixir_search(parameters, there_and_back(parameters), capacity_bytes=3 * GIB, activation_bytes=0, ranks=4)
    assert (plan.chunk_elements, plan.packed_chunks, plan.waste_elements) == (36, 1, 1)
    assert (plan.blocks, plan.moves, plan.cache_blocks, plan.device_chunks) == (1, 2, 1, 1)
    assert plan.tied_on_device, "there is none"


def test_one_chunk_that_does_not_fit_is_refused():
    room_of = dict(capacity_bytes=2 * GIB + 100, activation_bytes=0)
    with pytest.raises(DoesNotFit, match=r"1 blocks of 50 elements .* room for 47: 3 too few"):
        elixir_search(layers(5, 10), [("w0",)], training=Training("fp16", "adam"), **room_of)


def test_tied_parameters_alone_need_no_blocks():
    plan = elixir_search(layers(2, 9, tied=True), [("w0",)], capacity_bytes=3 * GIB, activation_bytes=0, ranks=2)
    assert (plan.packed_chunks, plan.blocks, plan.cache_blocks, plan.moves) == (0, 0, 0, 0)
    assert [chunk.elements for chunk in plan.chunks] == [10, 10] and plan.tied_on_device


def test_a_parameter_that_no_step_uses_has_a_chunk_and_never_moves():
    parameters = layers(8, 40 * MI)
    options = dict(capacity_bytes=20 * GIB, activation_bytes=0)
    used = elixir_search(parameters[:4], there_and_back(parameters[:4]), **options)
    more = elixir_search(parameters, there_and_back(parameters[:4]), **options)
    assert more.moves == used.moves and more.packed_chunks > used.packed_chunks


@pytest.mark.parametrize(
    ("parameters", "steps", "options", "message"),
    [
        (layers(2, 3) * 2, [], {}, r"'w0' stands twice in the list"),
        (layers(2, 3), [("w0",), ("w1", "v")], {}, r"step 1 uses 'v', which is not among the 2 parameters"),
        (layers(2, 3), [], {"ranks": 0}, r"0 ranks; at least 1"),
        (layers(2, 3), [], {"fraction": 1.5}, r"fraction 1\.5 of the GPU's memory"),
    ],
)
def test_senseless_arguments_are_named(parameters, steps, options, message):
    with pytest.raises(ValueError, match=message):
        elixir_search(parameters, steps, capacity_bytes=4 * GIB, activation_bytes=0, **options)


def test_a_parameter_has_elements():
    with pytest.raises(ValueError, match=r"'w' has 0 elements"):
        Parameter("w", 0)
