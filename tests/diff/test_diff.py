"""Two plans beside each other: seconds by class add up to the step, whatever the plans; and what the command says."""

import json
import random
from dataclasses import replace

import pytest

from autopar.diff import account_of, difference, in_a_line, report, sentence
from autopar.diff.__main__ import main
from autopar.errors import PlanMismatch
from autopar.plan import Plan
from autopar.plan.tell import modes_of
from autopar.search import Request, answer, ask
from autopar.search.overlap_loop import best_prefetch
from autopar.simulate.timeline import pricer_of
from cost_models.hardware import Hardware
from cost_models.steps import DEVICE, received_bytes
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.plans import PlanSampler
from tests.support.residence import ResidenceSampler

H100, CPU = Hardware.load("h100-sxm"), Hardware.load("cpu-gloo")


def played(plan: Plan) -> Plan:
    best = best_prefetch(plan, pricer_of(plan), None)
    return replace(best.plan, simulated_seconds=best.seconds)


def policies(name: str, sizes: tuple[int, ...], hardware: Hardware) -> list[Plan]:
    question = ask(family(name).graph, mesh_of(*sizes), hardware)
    return [answer(question, Request(policy=policy)) for policy in ("data-parallel", "zero2", "tensor-parallel")]


def plans_of(name: str) -> list[Plan]:
    """Random legal plans, with offload and without, and plans of policies; summed, and simulated."""
    graph = family(name).graph
    summed = [PlanSampler(graph, mesh_of(2, 2), H100).draw(seed) for seed in range(2)]
    summed += [ResidenceSampler(graph, mesh_of(*sizes), H100).draw(7) for sizes in ((2,), (2, 2))]
    summed += policies(name, (2,), H100)
    on_cpu = policies(name, (2,), CPU)
    return [*summed, *map(played, summed), *on_cpu]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("cnn", "gpt2", "t5")]


@pytest.mark.parametrize("name", ["mlp", *SLOW])
def test_seconds_by_class_add_up_to_each_step_and_to_the_difference(name):
    plans = plans_of(name)
    assert {plan.simulated_seconds is None for plan in plans} == {True, False}
    for plan in plans:
        account = account_of(plan, pricer_of(plan))
        assert sum(account.seconds.values()) == pytest.approx(plan.predicted_seconds, rel=1e-9)
        assert sum(account.held.values()) == plan.peak_bytes[DEVICE]
        assert all(seconds >= 0 for seconds in account.seconds.values())
        assert all(account.seconds[part] <= busy * (1 + 1e-9) for part, busy in account.busy.items())
    rng = random.Random(name)
    for _ in range(12):
        one, other = rng.sample(plans, 2)
        found = difference(one, other, (pricer_of(one), pricer_of(other)))
        for place, plan in enumerate((one, other)):
            assert sum(row.seconds[place] for row in found.seconds) == pytest.approx(plan.predicted_seconds, rel=1e-9)
            assert sum(row.nbytes[place] for row in found.held) == plan.peak_bytes[DEVICE]
        most = max(one.predicted_seconds, other.predicted_seconds)
        explained = sum(row.more for row in found.seconds)
        assert explained == pytest.approx(other.predicted_seconds - one.predicted_seconds, abs=1e-9 * most)
        for row in found.seconds:
            assert sum(more for _, more in row.modules) == pytest.approx(row.more, abs=1e-9 * most)
        sent = [sum(map(received_bytes, plan.comms())) for plan in (one, other)]
        assert sum(row.nbytes[1] - row.nbytes[0] for row in found.sent) == sent[1] - sent[0]
        assert report(found).startswith(("B is", "B takes", "B does")) and in_a_line(found)


def test_the_other_way_round_everything_is_turned():
    one, other = map(played, policies("mlp", (2,), H100)[:2])
    there = difference(one, other, (pricer_of(one), pricer_of(other)))
    back = difference(other, one, (pricer_of(other), pricer_of(one)))
    assert {row.what: row.seconds for row in there.seconds} == {row.what: row.seconds[::-1] for row in back.seconds}
    assert {(*row.told, row.where) for row in there.layouts} == {(*row.told[::-1], row.where) for row in back.layouts}
    assert there.layouts, "data-parallel and zero2 keep parameters in the same pieces"


def test_a_plan_does_what_it_does():
    plan = played(policies("mlp", (2,), H100)[0])
    found = difference(plan, plan, (pricer_of(plan),) * 2)
    assert found.is_empty and sentence(found).startswith("B does what A does")


def test_what_is_recomputed_and_offloaded_is_told():
    sampler = ResidenceSampler(family("block").graph, mesh_of(2), H100)
    plain = sampler.plan({}, {}, random.Random(1))
    modes: set[str] = set()
    for seed in range(3, 7):
        other = sampler.draw(seed)
        found = difference(plain, other, (sampler.pricer,) * 2)
        values = [row for row in found.kept if row.what == "values"]
        places = [row for row in found.kept if row.what != "values"]
        assert {row.told[1] for row in values} == {*modes_of(other).values()}
        assert sum(row.count for row in values) == len(modes_of(other))
        assert sum(row.count for row in places) == len(other.residence)
        modes |= {row.told[1] for row in values}
    assert modes == {"recomputed", "offloaded"}


def test_a_plan_that_was_edited_is_refused():
    plan = policies("mlp", (2,), H100)[0]
    with pytest.raises(PlanMismatch, match="the plan says that a step takes"):
        account_of(replace(plan, step_seconds=2 * plan.step_seconds), pricer_of(plan))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two plans of a model, one of another, one that a profile of one's own priced, and that profile."""
    folder = tmp_path_factory.mktemp("plans")
    one, other, _ = policies("mlp", (2,), H100)
    played(one).save(folder / "one.json")
    played(other).save(folder / "other.json")
    policies("cnn", (2,), H100)[0].save(folder / "cnn.json")
    own = replace(H100, name="own", launch_s=2 * H100.launch_s)
    policies("mlp", (2,), own)[0].save(folder / "own.json")
    return folder


def run(files, capsys, *arguments: str) -> tuple[int, str, str]:
    status = main([str(files / one) if one.endswith(".json") else one for one in arguments])
    return status, *capsys.readouterr()


def test_the_command_prints_a_sentence_first_and_json_has_all_of_it(files, capsys):
    status, text, err = run(files, capsys, "one.json", "other.json")
    assert (status, err) == (0, "") and text.startswith("B is ") and "mostly because of" in text
    assert max(map(len, text.splitlines())) <= 160
    status, text, _ = run(files, capsys, "one.json", "other.json", "--json")
    told = json.loads(text)
    steps = [Plan.load(files / name).predicted_seconds for name in ("one.json", "other.json")]
    assert status == 0 and told["steps"] == steps
    assert [sum(row["seconds"][i] for row in told["seconds"]) for i in (0, 1)] == pytest.approx(steps, rel=1e-9)


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("one.json", "none.json"), "none.json cannot be read"),
        (("one.json", "cnn.json"), "or of one that was traced otherwise: the first has input"),
        (("one.json", "own.json"), "own"),
        (("one.json",), "required: B"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_status_2(files, capsys, arguments, told):
    status, out, err = run(files, capsys, *arguments)
    assert (status, out) == (2, "") and told in err and len(err.splitlines()) == 1
