"""A plan at a glance: figures that are the plan's, and a fragment for notebooks that needs nothing else."""

from dataclasses import replace

from autopar.plan.explain import explain
from autopar.plan.glance import figures, to_fragment
from autopar.plan.reading import ms
from autopar.plan.tell import human


def test_the_figures_are_those_of_the_plan(plan):
    value_of = {one.name: one.value for one in figures(plan)}
    assert value_of["step time"] == ms(plan.predicted_seconds)
    assert value_of["memory peak, hbm"] == human(plan.peak_bytes["hbm"])
    assert value_of["proven gap"] == f"{100 * plan.gap:.2f} %"
    assert "proven gap" in value_of and next(figures(plan)).note.startswith(plan.measure)


def test_a_gap_is_of_the_measure_that_its_bound_is_of(plan):
    simulated = plan.step_seconds * 0.9
    found = replace(plan, prefetch=2, simulated_seconds=simulated, search={"simulated_bound_s": simulated * 0.8})
    (gap,) = [one for one in figures(found) if one.name == "proven gap"]
    assert gap.value == "20.00 %" and ms(simulated * 0.8) in gap.note
    (unknown,) = [one for one in figures(replace(plan, bound=0.0)) if one.name == "proven gap"]
    assert unknown.value == "unknown"


def test_memory_is_told_beside_its_limit(plan):
    found = replace(plan, memory_limit=plan.peak_bytes["hbm"] * 2.0)
    (memory,) = [one for one in figures(found) if one.name == "memory peak, hbm"]
    assert memory.share == 0.5 and "50 % of the limit" in memory.note
    assert all(one.share is None for one in figures(replace(plan, memory_limit=None)))


def test_a_notebook_shows_the_figures_and_all_of_the_text(plan):
    odd = replace(plan, hardware="<b>&")
    fragment = to_fragment(odd)
    assert plan._repr_html_() == to_fragment(plan)
    assert "&lt;b&gt;&amp;" in fragment and "<b>&" not in fragment
    assert fragment.count("<tr>") == len([*figures(odd)]) and fragment.endswith("</pre></details>")
    assert explain(plan).splitlines()[0] in to_fragment(plan)
