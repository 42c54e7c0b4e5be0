"""A plan's file: reads back as the same plan, is the same bytes everywhere, and no damage passes unseen."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.errors import PlanMismatch
from autopar.ir.graph import Const, Graph, Node, Ref, Result, TensorType
from autopar.ir.layout import REPLICATE
from autopar.ir.mesh import Mesh
from autopar.plan import Choice, Delivery, Plan
from autopar.plan.store import dumps, save
from cost_models.steps import Comm, Compute, Loop, Move
from tests.plan.nets import MESH, sign, trace
from tests.support.plans import PlanSampler

ROOT = Path(__file__).parents[2]


def of_args(*args, steps=(), **facts) -> Plan:
    """A plan of two nodes, the second with these arguments and steps."""
    made = TensorType((4, 0), "bfloat16")
    nodes = (
        Node("x", "input", (), (), (made,), target="['x']"),
        Node("f", "aten.f.default", (Ref("x"), *args), (("dtype", Const("dtype", "bfloat16")),), (made, None, made)),
    )
    whole, reads = (REPLICATE,), len(nodes[1].operands)
    choices = {
        "x": Choice(("",), (), (whole,), "", (), 1, (), ()),
        "f": Choice(("",), (whole,) * reads, (whole,) * 3, "", (), 1, steps, ((),) * reads),
    }
    results = Result("output", "0", Ref("f", 2)), Result("output", "1", None)
    given = {
        "memory_limit": None,
        "step_seconds": 0.1,
        "bound": 0.1,
        "peak_bytes": {"hbm": 8},
        "seconds_by": {},
        **facts,
    }
    return Plan(
        Graph(nodes, results), Mesh(("data",), (2,)), "h100-sxm", "d", "adamw", outputs="sharded", choices=choices,
        deliveries=(Delivery((), whole), None), **given,
    )  # fmt: skip


# --- round trips -----------------------------------------------------------------------------------------------------


def test_a_plan_reads_back_as_it_was(plan, tmp_path):
    path = tmp_path / "plan.json"
    save(plan, path)
    assert Plan.load(path) == plan
    assert plan.comm_bytes and any(map(math.isinf, _floats(plan)))  # otherwise this test says little


def _floats(plan: Plan) -> list[float]:
    return [arg for node in plan.graph.nodes for arg in node.args if isinstance(arg, float)]


def test_methods_of_plan_do_the_same(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == dumps(plan)
    assert Plan.load(str(tmp_path / "plan.json")) == plan


@pytest.mark.parametrize("seed", range(5))
def test_random_plans_read_back(graph, seed):
    sampler = PlanSampler(graph, MESH)
    drawn = sampler.draw(seed)
    assert Plan.loads(dumps(drawn), "a plan") == drawn


def families():
    import transformers as T

    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    ids = torch.zeros(4, 16, dtype=torch.int64)
    text = {"input_ids": ids, "labels": ids}
    image = {"pixel_values": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4, dtype=torch.int64)}
    yield (
        "llama",
        T.LlamaForCausalLM,
        T.LlamaConfig(**small, num_key_value_heads=2, vocab_size=104, use_cache=False),
        text,
    )
    yield "opt", T.OPTForCausalLM, T.OPTConfig(
        num_hidden_layers=2, hidden_size=64, ffn_dim=96, num_attention_heads=4, vocab_size=104, word_embed_proj_dim=64,
        max_position_embeddings=64, use_cache=False), text  # fmt: skip
    yield "bert", T.BertForMaskedLM, T.BertConfig(**small, vocab_size=104), text
    yield "t5", T.T5ForConditionalGeneration, T.T5Config(
        num_layers=2, d_model=64, d_kv=16, d_ff=96, num_heads=4, vocab_size=104, decoder_start_token_id=0,
        use_cache=False), text  # fmt: skip
    yield "vit", T.ViTForImageClassification, T.ViTConfig(**small, image_size=32, patch_size=8, num_labels=10), image


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "opt", "bert", "t5", "vit")]
)
def test_plans_of_real_models_read_back(family):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model, config, inputs = next((rest for name, *rest in families() if name == family))
    graph = trace(model(config).train(), **inputs)
    drawn = PlanSampler(graph, Mesh(("data", "tensor"), (2, 2))).draw(0)
    assert Plan.loads(dumps(drawn), family) == drawn


def test_a_convolution_with_batch_norm_reads_back():
    class Conv(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)

        def forward(self, x):
            return self.norm(self.conv(x)).relu().sum()

    drawn = PlanSampler(trace(Conv(), torch.zeros(4, 3, 8, 8)), MESH).draw(1)
    assert any(result.kind == "buffer" for result in drawn.graph.results)
    assert Plan.loads(dumps(drawn), "a plan") == drawn


@pytest.mark.parametrize(
    "arg",
    [
        float("-inf"), float("inf"), 0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, 1.0, 1, 0, -3, 2**70,
        True, False, None, "", "a \" \\ \n b", "größe", "\ud800", "inf", (), (1, (2.0, (None,))),
        (Ref("x"), None, Ref("x")), Const("device", "cpu"), 2 - 1j, complex(-0.0, float("-inf")),
    ],
)  # fmt: skip
def test_an_argument_keeps_value_and_type(arg):
    plan = of_args(arg)
    back = Plan.loads(dumps(plan), "a plan")
    assert back == plan
    found = back.graph.nodes[1].args[1]
    assert type(found) is type(arg) and repr(found) == repr(arg)


def test_nan_survives():
    back = Plan.loads(dumps(of_args(float("nan"))), "a plan")
    assert math.isnan(back.graph.nodes[1].args[1])


def test_an_unknown_argument_is_refused_when_writing():
    with pytest.raises(TypeError, match="type bytes has no place in a plan"):
        dumps(of_args(b"1"))


def test_every_kind_of_step_reads_back():
    body = (Comm("broadcast", "data", 2, 96), Compute("mm", 1.5, 2.5, "float16", 2, "matmul"), Move("hbm", "host", 7))
    plan = of_args(steps=(Loop(3, body, overlap=True), *body))
    assert Plan.loads(dumps(plan), "a plan") == plan


@pytest.mark.parametrize("limit", [None, 7e9, 1, float("inf")])
def test_a_memory_limit_reads_back(limit):
    assert Plan.loads(dumps(of_args(memory_limit=limit)), "a plan").memory_limit == limit


def test_facts_and_notes_read_back():
    plan = of_args(notes=("one", "two"), prefetch=2, search={"status": "optimal", "nodes": 3, "seconds": 0.25})
    assert Plan.loads(dumps(plan), "a plan") == plan


# --- the text --------------------------------------------------------------------------------------------------------


def test_the_text_does_not_depend_on_the_order_of_mappings(plan):
    def shuffled(mapping):
        names = list(mapping)
        random.Random(0).shuffle(names)
        return {name: mapping[name] for name in names}

    other = replace(plan, **{f: shuffled(getattr(plan, f)) for f in ("choices", "peak_bytes", "seconds_by", "search")})
    assert dumps(other) == dumps(plan) == dumps(Plan.loads(dumps(plan), "a plan"))


MAKE = """
import sys
from autopar.plan.store import save
from tests.plan.nets import net_graph, plan_of, sharded
save(plan_of(net_graph(), layout_of=sharded), sys.argv[1])
"""


def test_another_process_with_another_hash_seed_writes_the_same_bytes(plan, tmp_path):
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", MAKE, str(tmp_path / "plan.json")], check=True, cwd=ROOT, env=env, timeout=120
    )
    assert (tmp_path / "plan.json").read_text() == dumps(plan)


def test_one_node_stands_on_one_line(plan):
    lines = dumps(plan).splitlines()
    for node in plan.graph.nodes:
        (line,) = [line for line in lines if line.startswith(f'{{"name": "{node.name}",')]
        assert json.loads(line.rstrip(","))["op"] == node.op


def test_equal_choices_stand_once(plan):
    content = json.loads(dumps(plan))
    assert (
        len(content["choices"])
        == len({json.dumps(choice) for choice in content["choices"]})
        < len(content["nodes"]) / 2
    )


def test_white_space_is_of_no_account(plan):
    assert Plan.loads(json.dumps(json.loads(dumps(plan)), indent=2).replace("\n", "\r\n"), "a plan") == plan


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_failed_save_leaves_the_old_file_and_nothing_else(plan, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(plan, path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


def test_a_save_replaces_what_a_link_points_to(plan, tmp_path):
    (tmp_path / "kept.json").write_text("old")
    (tmp_path / "plan.json").symlink_to(tmp_path / "kept.json")
    save(plan, tmp_path / "plan.json")
    assert (tmp_path / "plan.json").is_symlink() and Plan.load(tmp_path / "kept.json") == plan


def test_a_saved_file_is_as_readable_as_any_other(plan, tmp_path):
    save(plan, tmp_path / "plan.json")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "other").stat().st_mode


# --- damage ----------------------------------------------------------------------------------------------------------


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
