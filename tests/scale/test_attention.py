"""Attention with dropout grows with the sequence, and has closed forms, but for its blocks of scores."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.ir.attention import ATTENTION
from autopar.ir.graph import Graph
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.scale.elsewhere import plan_at
from autopar.scale.forms import totals
from autopar.scale.grow import growth_of
from autopar.scale.growth import Growth, usual_sources
from autopar.search import Request, search
from autopar.trace import capture, graph_of
from cost_models.formulas import at, form_of, terms
from cost_models.hardware import Hardware
from tests.support.check import mesh_of

CPU = Hardware.load("cpu-gloo")


@cache
def gpt2() -> Graph:
    """With its default dropout, for which the CPU has no kernel but plain products of blocks."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=64))
    ids = torch.randint(0, 64, (8, 16))
    graph = graph_of(capture(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}))
    assert any(node.op == ATTENTION and node.args[6] for node in graph.nodes)
    return graph


@cache
def found() -> tuple[Plan, Growth, Pricer]:
    plan = search(gpt2(), mesh_of(2), CPU, Request(simulation=False))
    return plan, growth_of(plan.graph, usual_sources(plan.graph)), Pricer.on(plan.mesh, CPU, plan.optimizer)


def test_it_grows_with_batch_and_sequence() -> None:
    _, growth, _ = found()
    assert growth.base == {"batch": 8, "sequence": 16}


def test_closed_forms_give_the_peak_of_today() -> None:
    plan, growth, pricer = found()
    form = totals(plan, growth, pricer)
    assert form.peak(form.here) == plan_at(plan, growth, growth.base, pricer).peak_bytes["hbm"]


@pytest.mark.parametrize("sizes", [(16, 16), (8, 32), (8, 512), (2**14, 16)], ids=str)
def test_at_other_sizes_they_give_the_peak_of_there(sizes: tuple[int, int]) -> None:
    """Where all scores are one block, and where they are several, which stop to grow."""
    plan, growth, pricer = found()
    batch, sequence = sizes
    form, values = totals(plan, growth, pricer), {"batch": batch, "sequence": sequence}
    there = plan_at(plan, growth, values, pricer)
    assert form.peak({**form.here, **values}) == there.peak_bytes["hbm"]


def test_scores_are_a_number_in_what_is_told_of_today() -> None:
    plan, growth, pricer = found()
    form = totals(plan, growth, pricer)
    assert form.scores
    told = [terms(one) for one in form.highest(form.here).values()]
    assert {name for one in told for powers in one for name, _ in powers} <= {*form.here}
    assert sum(at(form_of(one), form.here) for one in told) == form.peak(form.here)
