"""Which comes first on the GPU, cached blocks or chunks that live there; and what is left once they do."""

from dataclasses import replace

import pytest

from autopar.search.elixir import AUTHORS_MACHINE, Parameter, Training, elixir_search, gains
from autopar.search.elixir.chunks import Packing
from autopar.search.elixir.residence import share_out

GIB = 2**30
FP16, FP32, SGD = Training("fp16", "adam"), Training("fp32", "adam"), Training("fp16", "sgd")
# I and J on 1, 2, 4, 8 GPUs, in 1e-9 s per element
GAINS = {
    FP16: [(0.1905, 0.0907), (0.1074, 0.1177), (0.0576, 0.1551), (0.0299, 0.2148)],
    FP32: [(0.3810, 0.2340), (0.2148, 0.2892), (0.1152, 0.3596), (0.0598, 0.4669)],
    SGD: [(0.1905, 0.1270), (0.1074, 0.1648), (0.0576, 0.2172), (0.0299, 0.3007)],
}


@pytest.mark.parametrize("training", GAINS, ids=str)
def test_gains_on_the_authors_machine(training):
    found = [gains(ranks, training) for ranks in (1, 2, 4, 8)]
    assert [(round(g.cached_s * 1e9, 4), round(g.resident_s * 1e9, 4)) for g in found] == GAINS[training]
    assert [g.rcache_first for g in found] == [True, False, False, False]


def test_elements_with_states():
    kinds = [(dtype, optimizer) for dtype in ("fp16", "bf16", "fp32") for optimizer in ("adam", "sgd")]
    assert [Training(*kind).elements_with_states for kind in kinds] == [7, 5, 7, 5, 4, 3]


@pytest.mark.parametrize("kind", [("fp8", "adam"), ("fp16", "lion")])
def test_an_unknown_kind_of_training_is_named(kind):
    with pytest.raises(ValueError, match=r"is unknown; known are"):
        Training(*kind)


def test_another_machine_may_turn_the_order():
    slow_cpu = replace(AUTHORS_MACHINE, cpu_updates=0.5e9)
    assert gains(1, FP16).rcache_first and not gains(1, FP16, slow_cpu).rcache_first
    parameters = [Parameter(f"w{number}", 10**8) for number in range(40)]
    steps = [(parameter.name,) for parameter in parameters + parameters[::-1]]
    options = dict(capacity_bytes=16 * GIB, activation_bytes=GIB)
    blocks, states = (elixir_search(parameters, steps, rates=rates, **options) for rates in (AUTHORS_MACHINE, slow_cpu))
    assert blocks.rcache_first and not states.rcache_first
    assert states.device_chunks > blocks.device_chunks and states.cache_blocks < blocks.cache_blocks


def share(room, *, first, tied=(), ranks=1, overlap=False, checkpoint=0, blocks=10):
    packing = Packing(100, tuple(range(12)), blocks, 24)
    return share_out(
        packing,
        tied,
        room,
        training=FP16,
        ranks=ranks,
        overlap=overlap,
        checkpoint_elements=checkpoint,
        rcache_first=first,
    )


def test_with_blocks_first_chunks_get_the_rest():
    found = share(1000 + 2 * 700 + 699, first=True)
    assert found.cache_blocks == 10 and sum(found.on_device) == 2


def test_with_chunks_first_blocks_get_the_rest():
    found = share(1000 + 2 * 700, first=False)  # 4 blocks, 2 chunks, 600 elements for 6 more
    assert found.cache_blocks == 10 and sum(found.on_device) == 2
    found = share(1000 + 2 * 700 + 150, first=False)  # 2150 elements beside 4 blocks: 3 chunks, 50 left
    assert found.cache_blocks == 4 and sum(found.on_device) == 3


@pytest.mark.parametrize(
    ("options", "least"), [({}, 4), ({"overlap": True}, 6), ({"checkpoint": 401}, 6), ({"blocks": 3}, 3)]
)
def test_the_least_blocks_are_what_a_recomputed_segment_needs(options, least):
    assert not any(share(least * 100 + 699, first=False, **options).on_device)
    assert sum(share(least * 100 + 700, first=False, **options).on_device) == 1


def test_a_tied_parameter_that_is_small_enough_still_gets_in_after_chunks_did_not():
    found = share(1000 + 700 + 140, first=True, tied=(30, 19))
    assert found.on_device == (True, *[False] * 11, False, True)  # 210 needed, then 133


def test_ranks_share_the_states_of_a_chunk():
    assert sum(share(1000 + 3 * 175, first=True, ranks=4).on_device) == 3
