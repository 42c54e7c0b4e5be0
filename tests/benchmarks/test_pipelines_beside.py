"""Tables that put pipelines beside what people do: small rows are searched, and words say what rows show."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from benchmarks import published_plans, slow_links
from benchmarks.published_plans import Published
from benchmarks.slow_links import Found, Row
from cost_models.hardware import Hardware

SMALL = Published("small", "nobody", "a100-80gb", 4, 256, 4, 128, 16, Mesh(("pipe", "data", "tensor"), (2, 2, 2)), 4)


def silent(text: str) -> None:
    pass


def row(link: float, fsdp: float | None, pipe: float | None) -> Row:
    return Row(link, Found(fsdp, "fsdp"), None, Found(pipe, "1f1b"))


def test_the_crossing_is_between_the_rows_that_it_names() -> None:
    rows = [row(100, 1.0, 2.0), row(50, 1.5, 2.0), row(25, 3.0, 2.1), row(12.5, None, 2.2)]
    assert slow_links.crossing(rows) == "FSDP is the quicker down to 50 GB/s, stages are from 25 GB/s down."
    assert slow_links.crossing(rows[:2]) == "FSDP is the quicker on all of these links."
    assert slow_links.crossing(rows[2:]) == "Stages are the quicker on all of these links."
    text = slow_links.markdown(rows, "a model", 12.0)
    assert (
        "| 25 (1600) | 3.00 s (fsdp) | - | 2.10 s (1f1b) | 1.43 |" in text
        and "| 12.5 (800) | fsdp | - | 2.20 s (1f1b) | - |" in text
    )


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [1, 2])
def test_no_published_plan_is_quicker_than_the_search(pipe: int) -> None:
    of = (
        SMALL if pipe == 2 else Published(*(*vars(SMALL).values(),)[:8], Mesh(("pipe", "data", "tensor"), (1, 2, 2)), 4)
    )
    found = published_plans.compared(of, published_plans.gpt(of), silent)
    assert found.published is not None and found.searched is not None and found.is_quicker
    assert "The search's plan is never slower (1 rows)." in published_plans.markdown([found])


@pytest.mark.slow
def test_slow_links_slow_fsdp_down_and_stages_hardly() -> None:
    graph, known = slow_links.llama(8, 64), Hardware.load("h100-sxm")
    quick, slow = (slow_links.with_links(known, link) for link in (50.0, 5.0))
    fsdp = [slow_links.by_hand(graph, hardware, silent).seconds for hardware in (quick, slow)]
    found = slow_links.in_stages(graph, quick, 16, silent)
    stages = [slow_links.priced_again(found, hardware).seconds for hardware in (quick, slow)]
    assert fsdp[0] and fsdp[1] and stages[0] and stages[1]
    assert stages[0] == pytest.approx(found.step_seconds, rel=1e-9)
    assert stages[0] < stages[1] < fsdp[1]
    assert fsdp[1] - fsdp[0] > 10 * (stages[1] - stages[0])
