"""Damage to a plan's file: whatever was cut off, edited or signed anew is refused in one sentence that says what."""

import json
import random

import pytest

from autopar.errors import PlanMismatch
from autopar.plan import Plan
from autopar.plan.store import dumps
from tests.plan.nets import sign


def message(text: str) -> str:
    with pytest.raises(PlanMismatch) as caught:
        Plan.loads(text, "plan.json")
    told = str(caught.value)
    assert told.startswith("plan.json") and "python -m autopar.search" in told and "\n" not in told
    return told


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_refused(plan, part):
    text = dumps(plan)
    assert "cut short" in message(text[: int(len(text) * part)])


def test_any_edit_is_refused(plan):
    text = dumps(plan)
    rng = random.Random(0)
    for _ in range(60):
        at = rng.randrange(len(text))
        edited = text[:at] + rng.choice("0123456789abcRSP") + text[at + 1 :]
        if edited != text:
            message(edited)


def test_an_edited_number_is_told(plan):
    text = dumps(plan)
    assert "was edited or damaged: it says digest" in message(text.replace('"step_seconds": ', '"step_seconds": 9'))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "cut short"),
        ("[]", "no autopar plan"),
        ("{}", "no field autopar_plan"),
        ('{"autopar_plan": 1}', "version 1, this autopar reads version 2"),
        ('{"autopar_plan": true}', "version True"),
        ('{"autopar_plan": "2"}', "version '2'"),
        ('{"autopar_plan": 2}', "digest None"),
        ('{"autopar_plan": 2, "bound": NaN}', "NaN is not JSON"),
        ('{"autopar_plan": 2, "bound": 1e999}', "too large"),
        ('{"autopar_plan": 2, "autopar_plan": 2}', "stands twice"),
        ("[" * 100_000, "damaged"),
        ("9" * 10_000, "damaged"),
    ],
)
def test_what_is_no_plan_is_told(text, told):
    assert told in message(text)


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(PlanMismatch, match="not a text file"):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "plan.json")


def _set(place: str, value):
    """Set `a.0.b` in the content; a value of ... deletes."""

    def edit(content):
        *path, last = [int(part) if part.lstrip("-").isdigit() else part for part in place.split(".")]
        at = content
        for part in path:
            at = at[part]
        if value is ...:
            del at[last]
        else:
            at[last] = value

    return edit


EDITS = [
    ("hardware", ..., "the plan has no field 'hardware'"),
    ("extra", 1, "the plan has the unknown field 'extra'"),
    ("hardware", 7, "hardware is 7, not a text"),
    ("mesh", [], r"mesh is [], not an object"),
    ("mesh.sizes", [4], "mesh is not possible (mesh has 2 axis names and 1 sizes"),
    ("mesh.sizes", [4, -2], "mesh.sizes[1] is -2, which is negative"),
    ("mesh.sizes", [3, 2], "does not divide"),
    ("mesh.sizes", [2, 2], "has the layout change"),
    ("mesh.names", ["data", "data"], "repeat"),
    ("mesh.names", ["other", "tensor"], "has the layout change (data: "),
    ("mesh", {"names": ["data"], "sizes": [4]}, "mesh axes"),
    ("memory_limit", "much", "memory_limit is 'much', not a number"),
    ("memory_limit", True, "memory_limit is True, not a number"),
    ("bound", {"float": "huge"}, "bound is 'huge', not inf, -inf or nan"),
    ("bound", {"float": "inf", "x": 1}, "bound has the unknown field 'x'"),
    ("bound", {"float": "nan"}, "bound is nan, and the step takes"),
    ("bound", 1e9, "no bound of what plans take at least"),
    ("step_seconds", {"float": "inf"}, "step_seconds is inf, which is no time"),
    ("step_seconds", -1.0, "step_seconds is -1.0, which is no time"),
    ("simulated_seconds", {"float": "nan"}, "simulated_seconds is nan, which is no time"),
    ("memory_limit", 0, "memory_limit is 0, which is no room"),
    ("peak_bytes", {"host": 1}, "peak_bytes is of ['host']; it must be of hbm"),
    ("peak_bytes", {"hbm": 1, "disk": 1}, "peak_bytes is of ['disk', 'hbm']; it must be of hbm"),
    ("peak_bytes", {"hbm": 10**400}, "peak_bytes.hbm is a number of 1329 bits, which is too large"),
    ("outputs", "some", "outputs is 'some', not sharded or global"),
    ("optimizer", "lion", "optimizer is 'lion', not adamw or"),
    ("hardware", "\x1b[2J", "which has characters that cannot be shown"),
    ("step_seconds", None, "step_seconds is None, not a number"),
    ("peak_bytes", {"hbm": 1.5}, "peak_bytes.hbm is 1.5, not a whole number"),
    ("seconds_by", {"compute": "x"}, "seconds_by.compute is 'x', not a number"),
    ("notes", "a note", "notes is 'a note', not a list"),
    ("notes", [1], "notes[0] is 1, not a text"),
    ("prefetch", -1, "prefetch is -1, which is negative"),
    ("prefetch", "2", "prefetch is '2', not a whole number"),
    ("search", {"status": []}, "search.status is [], not a number"),
    ("choices", [], "nodes[0].choice is 0, but there are 0 choices"),
    ("choices.0.gives", ["Q S0"], "unknown part 'Q'"),
    ("choices.0.gives", ["R  R"], "not a layout such as"),
    ("choices.0.gives", ["R"], "on a mesh of 2 axes"),
    ("choices.0.gives", ["S7 R"], "does not divide"),
    ("choices.0.roles", [""], "mesh axes"),
    ("choices.0.body", "warp", "runs the local body 'warp', which this autopar does not have"),
    ("choices.0.body_axes", ["pipe"], "works over axis 'pipe'"),
    ("choices.0.body_size", 1.0, "choices[0].body_size is 1.0, not a whole number"),
    ("choices.0.steps", [["sleep", 1]], "no step that this autopar knows"),
    ("choices.0.steps", [["comm", "gossip", "data", 4, 8]], "no collective 'gossip'"),
    ("choices.0.steps", [["comm", "all_reduce", "pipe", 4, 8]], "works over axis 'pipe'"),
    ("choices.0.steps", [["comm", "all_reduce", "data", 2, 8]], "all_reduce of 2 ranks over 'data' on mesh"),
    ("choices.0.steps", [["compute", "mm", -1.0, 0.0, "float32", 1, "matmul"]], "flops is -1.0"),
    ("choices.0.steps", [["move", "hbm", "disk", 1]], "no memory tier 'disk'"),
    ("choices.0.steps", [["loop", 0, True, []]], "a loop of 0 rounds"),
    ("choices.0.steps", [["loop", 10**9, True, [["move", "hbm", "host", 1]]]], "loops of 1000000000 steps, more than"),
    ("choices.0.body", "ring", "runs the pattern 'ring' as it does not offer it"),
    ("choices.0.reads", [[]], "number of operands"),
    ("choices.0.reads", [[["data", "R", "P", "float32[1]"]]], "no step leads from"),
    ("choices.0.reads", [[["data", "S0"]]], "has 2 entries, not 4"),
    ("choices.0.reads", [[["data", "S0 R", "R", "float32[1]"]]], "not one placement"),
    ("choices.0.speed", 1, "choices[0] has the unknown field 'speed'"),
    ("nodes.0.choice", -1, "nodes[0].choice is -1"),
    ("nodes.0.choice", ..., "nodes[0] has no field 'choice'"),
    ("nodes.0.phase", "sideways", "not forward or backward"),
    ("nodes.0.outputs", ["float33[4]"], "not a type such as float32[4, 16]"),
    ("nodes.0.outputs", ["float32[4,16]"], "not a type such as"),
    ("nodes.0.outputs", ["float32[٤]"], "nodes[0]"),
    ("nodes.0.name", "nobody", "before it is defined"),
    ("nodes.0.outputs", [], "before it is defined"),
    ("nodes.0.args", ["more"], "and not one tensor that is there from the start"),
    ("nodes.0.outputs", ["float32[9999999999, 9999999999]"], "which is too large"),
    ("nodes.0.args", [{"ref": ["x", "y"]}], "which is no argument"),
    ("nodes.0.args", [{"code": "os.system"}], "which is no argument"),
    ("nodes.0.args", [{"ref": "nobody"}], "uses %nobody[0] before it is defined"),
    ("nodes.0.kwargs", [["a"]], "nodes[0].kwargs[0] has 1 entries, not 2"),
    ("nodes.0.colour", "red", "nodes[0] has the unknown field 'colour'"),
    ("results.0.kind", "guess", "not output, gradient or buffer"),
    ("results.0.ref", ["nobody", 0], "which is not defined"),
    ("results.0.ref", ..., "has a value or a delivery, but not both"),
    ("results.0.layout", "S0 R", "results[0]"),
    ("results.0.changes", ..., "results[0] has no field 'changes'"),
]


@pytest.mark.parametrize(
    ("place", "value", "told"), EDITS, ids=[f"{place}={value!r}"[:50] for place, value, _ in EDITS]
)
def test_a_signed_edit_is_told(content, place, value, told):
    _set(place, value)(content)
    assert told in message(sign(content))


def test_a_signed_copy_without_an_edit_passes(content, plan):
    assert Plan.loads(sign(content), "a plan") == plan


def test_a_layout_change_that_leads_elsewhere_is_told(content):
    reads = next(read for choice in content["choices"] for read in choice["reads"] if read)
    reads.pop()
    assert "its layout changes lead to" in message(sign(content))


def test_forward_behind_backward_is_told(content):
    last = max(number for number, node in enumerate(content["nodes"]) if node.get("phase") == "backward")
    content["nodes"][last]["phase"] = "forward"
    assert "is of the forward pass, and stands behind nodes of backward" in message(sign(content))


def test_any_signed_damage_is_a_plan_mismatch_or_a_plan(content):
    """Whatever stands in place of any value, reading ends in one of two ways."""
    rng = random.Random(0)
    text = json.dumps(content)
    for _ in range(80):
        damaged = json.loads(text)
        at = damaged
        while True:
            key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], (dict, list)) or not at[key] or rng.random() < 0.1:
                at[key] = rng.choice([None, True, -1, 0, 1.5, "", "R", [], {}, [[]], {"ref": 1}, {"float": "nan"}])
                break
            at = at[key]
        damaged["autopar_plan"] = 2
        try:
            Plan.loads(sign(damaged), "plan.json")
        except PlanMismatch as error:
            assert "\n" not in str(error)
