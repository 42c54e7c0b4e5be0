"""A plan's file: reads back as the same plan, and is the same bytes everywhere."""

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

from autopar.ir.graph import Const, Graph, Node, Ref, Result, TensorType
from autopar.ir.layout import REPLICATE, TERMS, Partial, decode, encode
from autopar.ir.mesh import Mesh
from autopar.plan import Choice, Delivery, Plan
from autopar.plan.store import dumps, save
from cost_models.steps import Comm, Compute, Loop, Move
from tests.plan.nets import MESH, trace
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
    back, again = (Plan.loads(dumps(of_args(float("nan"))), "a plan") for _ in range(2))
    assert math.isnan(back.graph.nodes[1].args[1])
    assert back.graph == again.graph, "graphs are compared where a plan is checked"


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


@pytest.mark.parametrize("terms", TERMS)
def test_what_ranks_hold_in_terms_reads_back(terms: str) -> None:
    """Minima did not: rank 0 wrote a plan that the others refused."""
    layout = (Partial(terms),)
    assert decode(encode(layout)) == layout
    plan, gives = of_args(), (layout, (REPLICATE,), (REPLICATE,))
    choices = {**plan.choices, "f": replace(plan.choices["f"], gives=gives)}
    again = dumps(replace(plan, choices=choices))
    assert Plan.loads(again, "plan.json").choices["f"].gives == gives
