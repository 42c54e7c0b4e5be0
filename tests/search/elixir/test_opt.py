"""Elixir's decisions for OPT models, one line for each GPU: numbers found with a port of its search, and by itself.

Half precision, Adam, overlap, the authors' machine. The port also walks the tied embedding, so that its states are
somewhere: in the fifth line Elixir's own search function leaves 55 blocks.
"""

import re
from functools import cache

import pytest

from autopar.search.elixir import Training, elixir_search
from tests.search.elixir.opt import VOCABULARY, checkpoint_elements, hidden, opt

GIB = 2**30
EMBEDDING = "V h"  # the hook's copy: of the largest module
LAYER = "5 h^2"

# model, GPU GiB, activations GiB, ranks | blocks, moves | blocks left | chunks and tied on GPU | host GB, without tied
BY_EMBEDDING = """
6.7B  16 4 1 | 60 268 | 60 |  0 | no  |  94.1  91.2
6.7B  32 6 1 | 97 194 | 97 |  9 | no  |  85.6  82.7
6.7B  80 6 1 | 97 194 | 97 | 61 | no  |  36.7  33.8
6.7B 132 6 1 | 97 194 | 97 | 97 | yes |   0     0
6.7B  40 6 4 | 97 194 | 50 | 97 | yes |   0     0
13B   40 6 1 | 81 162 | 81 |  2 | no  | 177.6 174.0
13B  132 6 1 | 81 162 | 81 | 44 | no  |  85.1  81.5
30B   40 6 1 | 46 296 | 46 |  0 | no  | 423.8 418.7
30B   40 6 4 | 46 296 |  6 | 24 | no  | 320.2 315.1
30B   80 6 4 | 97 194 |  7 | 61 | no  | 160.5 155.4
"""
# Those that a smaller copy changes; the other lines stay.
BY_LAYER = """
6.7B  16 4 1 | 62 264 | 62 |  0 | no  |  94.1  91.2
6.7B  80 6 1 | 97 194 | 97 | 62 | no  |  35.8  32.9
6.7B  40 6 4 | 97 194 | 52 | 97 | yes |   0     0
30B   80 6 4 | 97 194 |  6 | 62 | no  | 156.1 151.1
"""
# elements of a chunk, MiB | chunks, waste
CHUNKS = {
    "6.7B": (67_141_632, 128.06, 97, 60_178_432),
    "13B": (157_351_936, 300.12, 81, 149_426_176),
    "30B": (308_346_880, 588.12, 97, 295_456_768),
}


def table(text):
    for line in text.strip().splitlines():
        model, *numbers = re.split(r"[\s|]+", line)
        key = (model, *map(int, numbers[:3]))
        yield key, (*map(int, numbers[3:7]), numbers[7] == "yes", *map(float, numbers[8:]))


TABLE = dict(table(BY_EMBEDDING))
WITH_LAYER = TABLE | dict(table(BY_LAYER))


@cache
def model_of(name):
    return opt(name)


def plan_for(model, capacity, activation, ranks, hook, **options):
    parameters, steps = model_of(model)
    h = hidden(model)
    return elixir_search(
        parameters,
        steps,
        capacity_bytes=capacity * GIB,
        activation_bytes=activation * GIB,
        ranks=ranks,
        hook_elements=VOCABULARY * h if hook == EMBEDDING else 5 * h * h,
        checkpoint_elements=checkpoint_elements(model),
        **options,
    )


def test_models_have_their_published_size():
    totals = {model: sum(parameter.numel for parameter in model_of(model)[0]) for model in CHUNKS}
    assert totals == {"6.7B": 6_658_473_984, "13B": 12_853_473_280, "30B": 29_974_540_288}


@pytest.mark.parametrize("key", TABLE, ids=lambda key: "-".join(map(str, key)))
@pytest.mark.parametrize(("hook", "expected"), [(EMBEDDING, TABLE), (LAYER, WITH_LAYER)], ids=[EMBEDDING, LAYER])
def test_decisions_are_those_of_elixir(key, hook, expected):
    plan = plan_for(*key, hook)
    assert (
        plan.blocks,
        plan.moves,
        plan.cache_blocks,
        plan.device_chunks,
        plan.tied_on_device,
        round(plan.host_bytes / 1e9, 1),
        round(plan.host_bytes_without_tied / 1e9, 1),
    ) == expected[key]
    mib = round(plan.chunk_elements * 2 / 2**20, 2)
    assert (plan.chunk_elements, mib, plan.packed_chunks, plan.waste_elements) == CHUNKS[key[0]]


def test_every_parameter_has_a_place():
    parameters, _ = model_of("13B")
    plan = plan_for("13B", 40, 6, 1, EMBEDDING)
    assert [name for chunk in plan.chunks for name in chunk.names][:-1] == [p.name for p in parameters[1:]]
    assert plan.chunk_of["emb.weight"] == plan.packed_chunks
    assert plan.chunk_of["pos.weight"] == 0 and plan.is_on_device["pos.weight"]
    assert plan.chunk_of["39.fc2.weight"] == 80 and not plan.is_on_device["39.fc2.weight"]
    assert not plan.is_on_device["emb.weight"]


def test_each_chunk_holds_what_is_in_it_and_the_walk_goes_in_order():
    parameters, _ = model_of("6.7B")
    numel_of = {parameter.name: parameter.numel for parameter in parameters}
    plan = plan_for("6.7B", 80, 6, 1, EMBEDDING)
    padding = [chunk.elements - sum(numel_of[name] for name in chunk.names) for chunk in plan.chunks]
    assert min(padding) >= 0 and sum(padding) == plan.waste_elements
    here = [chunk.on_device for chunk in plan.chunks]
    assert here == sorted(here, reverse=True)


def test_buffers_and_a_fraction_are_less_memory():
    plan = plan_for("6.7B", 30, 6, 1, EMBEDDING)
    assert plan_for("6.7B", 32, 6, 1, EMBEDDING, buffer_bytes=2 * GIB) == plan
    assert plan_for("6.7B", 60, 6, 1, EMBEDDING, fraction=0.5) == plan


def test_full_precision_keeps_four_words_of_an_element():
    plan = plan_for("6.7B", 80, 6, 1, EMBEDDING, training=Training("fp32", "adam"))
    off = [chunk.elements for chunk in plan.chunks if not chunk.on_device]
    assert off and plan.host_bytes == 16 * sum(off)
