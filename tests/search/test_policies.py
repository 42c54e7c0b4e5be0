"""Baselines: what each policy does to parameters, inputs and collectives; the search is never worse than they are.

The machine is an H100: with its latencies one all-reduce is strictly cheaper than a reduce-scatter and an all-gather.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autopar.errors import Infeasible
from autopar.ir.graph import Graph, Node, Ref, batch_size
from autopar.ir.layout import REPLICATE, Layout, Shard, replicated
from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.propose.repeated_blocks import classes_of
from autopar.propose.strategies import even_layouts
from autopar.rewrite import is_gathered_once, plain
from autopar.search import Question, Request, answer, ask, search
from autopar.search.baselines import compare, table
from autopar.search.policies import POLICIES, REWRITES, agree, policies_for, restrict
from cost_models.hardware import Hardware
from tests.support.check import difference, mesh_of
from tests.support.families import family
from tests.support.machines import FAST, SLOW
from tests.support.programs import held_before, runs

H100 = Hardware.load("h100-sxm")
NAMES = ["mlp", "gpt2", "cnn"]
MESHES = [(2,), (2, 2)]
SCALAR = 64  # bytes: losses and counts are all-reduced too


@cache
def question(name: str, sizes: tuple[int, ...], hardware: Hardware = H100) -> Question:
    return ask(family(name).graph, mesh_of(*sizes), hardware)


@cache
def plan_of(name: str, sizes: tuple[int, ...], policy: str | None, hardware: Hardware = H100) -> Plan:
    return answer(question(name, sizes, hardware), Request(policy=policy))


def weight_nodes(graph: Graph, *, matrices: bool) -> set[str]:
    """Parameters (of two dims or more, if `matrices`) and what is computed of them alone."""
    found: set[str] = set()
    for node in graph.nodes:
        (first, *_) = node.outputs
        if node.op == "parameter":
            found |= {node.name} if first is not None and (len(first.shape) > 1 or not matrices) else set()
        elif node.operands and all(ref.name in found for ref in node.operands):
            found.add(node.name)
    return found


def parameters(plan: Plan) -> list[tuple[Node, Layout]]:
    return [(node, plan.choices[node.name].gives[0]) for node in plan.graph.nodes if node.op == "parameter"]


def smallest(node: Node, mesh: Mesh) -> int:
    """The fewest bytes of a parameter that a rank can store."""
    (type,) = node.outputs
    assert type is not None
    return min(Pricer.on(mesh, H100, "adamw").local_bytes(type, layout) for layout in even_layouts(type, mesh))


def inputs(plan: Plan) -> dict[str, Layout]:
    return {node.target: plan.choices[node.name].gives[0] for node in plan.graph.nodes if node.op == "input"}


# --- the promise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "hardware"),
    [
        *((name, sizes, H100) for name in NAMES for sizes in MESHES),
        *((name, (2,), hardware) for name in NAMES for hardware in (FAST, SLOW)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_search_is_never_worse_than_a_baseline(name: str, sizes: tuple[int, ...], hardware: Hardware) -> None:
    best = plan_of(name, sizes, None, hardware)
    assert best.search["status"] == "optimal"
    for policy in policies_for(mesh_of(*sizes)):
        plan = plan_of(name, sizes, policy, hardware)
        assert best.step_seconds <= plan.step_seconds * (1 + 1e-6), policy


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_a_baseline_computes_what_the_model_computes(name: str, policy: str) -> None:
    case = family(name)
    plan = search(case.wide_graph, mesh_of(2, 2), H100, Request(policy=policy))
    off, where = difference(plan, case)
    assert off <= 1e-9, where  # float64; a term lost or counted twice is 1e-3 or more


# --- what the policies do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_data_parallel_keeps_parameters_whole_and_splits_the_batch(name: str, sizes: tuple[int, ...]) -> None:
    plan = plan_of(name, sizes, "data-parallel")
    whole = replicated(plan.mesh)
    assert all(layout == whole for _, layout in parameters(plan))
    assert set(inputs(plan).values()) == {(Shard(0),) * len(sizes)}
    weights = weight_nodes(plan.graph, matrices=False)
    for node in plan.graph.nodes:
        choice = plan.choices[node.name]
        pieces = [
            r.name for r, take in zip(node.operands, choice.takes, strict=True) if r.name in weights and take != whole
        ]
        assert not pieces, f"{node.name} reads pieces of {pieces}"


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_data_parallel_reduces_every_gradient_once(name: str) -> None:
    plan = plan_of(name, (2,), "data-parallel")
    comms = plan.comms()
    assert {comm.collective for comm in comms} == {"all_reduce"}
    reduced = sorted(comm.nbytes for comm in comms if comm.nbytes > SCALAR)
    sizes = {node.target: type.nbytes for node, _ in parameters(plan) if (type := node.outputs[0]) is not None}
    assert reduced == sorted(sizes.values())


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fsdp_stores_no_more_than_it_must(name: str, sizes: tuple[int, ...]) -> None:
    plan = plan_of(name, sizes, "fsdp")
    pricer = Pricer.on(plan.mesh, H100, "adamw")
    for node, layout in parameters(plan):
        (type,) = node.outputs
        assert type is not None
        assert pricer.local_bytes(type, layout) == smallest(node, plan.mesh), node.target
    assert set(inputs(plan).values()) == {(Shard(0),) * len(sizes)}


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_fsdp_gathers_weights_for_each_use_and_scatters_gradients(name: str) -> None:
    plan = plan_of(name, (2,), "fsdp")
    weights = weight_nodes(plan.graph, matrices=False)
    for node in plan.graph.nodes:
        if node.name in weights:
            continue
        choice = plan.choices[node.name]
        for ref, take in zip(node.operands, choice.takes, strict=True):
            assert ref.name not in weights or take == (REPLICATE,), f"{node.name} reads a piece of {ref.name}"
    split = [node.target for node, layout in parameters(plan) if layout != (REPLICATE,)]
    assert len(split) == len(parameters(plan))
    kinds = [comm.collective for comm in plan.comms() if comm.nbytes > SCALAR]
    assert kinds.count("all_gather") >= len(split)
    scattered = [
        result.target for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True)
        if result.kind == "gradient" and delivery is not None
        and [change.kind for change in delivery.changes] == ["reduce_scatter"]
    ]  # fmt: skip
    assert len(scattered) >= len(split) - 1, "all but the positions' gradient, which is smaller before it is whole"


def whole_weights(plan: Plan) -> set[str]:
    """What holds a weight that was gathered when backward begins, as the referee counts it."""
    program = lower(plan, None, Pricer.on(plan.mesh, H100, "adamw"))
    first = next(node.name for node in plan.graph.nodes if node.phase == "backward" and not node.is_source)
    held = [buffer.owner for buffer in held_before(program, runs(first)) if " resharded for " in buffer.owner]
    return {owner.split(" resharded for ")[0] for owner in held} & set(plan.parameters)


def test_zero2_gathers_each_weight_once_and_scatters_each_gradient_once() -> None:
    plan, fsdp = plan_of("mlp", (2,), "zero2"), plan_of("mlp", (2,), "fsdp")
    assert plan.parameters == fsdp.parameters
    sizes = [type.nbytes for node, _ in parameters(plan) if (type := node.outputs[0]) is not None]

    def moved(plan: Plan, collective: str) -> list[int]:
        return sorted(comm.nbytes for comm in plan.comms() if comm.collective == collective)

    assert moved(plan, "all_gather") == moved(plan, "reduce_scatter") == sorted(sizes)
    assert moved(plan, "reduce_scatter") == moved(fsdp, "reduce_scatter")
    assert len(moved(fsdp, "all_gather")) > len(sizes)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_zero2_never_gathers_a_weight_twice(name: str, sizes: tuple[int, ...]) -> None:
    plan = plan_of(name, sizes, "zero2")
    weights, seen = weight_nodes(plan.graph, matrices=False), list[Ref]()
    for node in plan.graph.nodes:
        for ref, read in zip(node.operands, plan.choices[node.name].reads, strict=True):
            seen += [ref] if ref.name in weights and read else []
    assert len(seen) == len(set(seen)) >= len(plan.parameters) / 2


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_zero2_holds_the_weights_that_backward_reads(name: str) -> None:
    plan, fsdp = plan_of(name, (2,), "zero2"), plan_of(name, (2,), "fsdp")
    read_again = {
        node.operands[0].name for node in plan.graph.nodes if is_gathered_once(node)
        and any(Ref(node.name) in reader.operands and reader.phase == "backward" for reader in plan.graph.nodes)
    }  # fmt: skip
    targets = {node.target for node in plan.graph.nodes if node.name in read_again}
    assert len(targets) >= 3 and whole_weights(plan) == targets and not whole_weights(fsdp)
    assert plan.peak_bytes["hbm"] > fsdp.peak_bytes["hbm"]


def test_the_graph_of_zero2_is_the_traced_one_but_for_what_keeps_weights(tmp_path: Path) -> None:
    plan = plan_of("gpt2", (2,), "zero2")
    assert plan.graph != family("gpt2").graph == plain(plan.graph)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").graph == plan.graph


def test_zero2_keeps_weights_where_values_are_run_again_but_not_those_on_the_host() -> None:
    pin = {"transformer.h.*": "recompute", "transformer.wte.weight": "offload-parameters"}
    plan = answer(question("gpt2", (2,)), Request(policy="zero2", pin=pin))
    repeated = [node for node in plan.graph.nodes if node.target and not node.is_source]
    assert any(node.op == "autopar.einsum" for node in repeated) and not any(map(is_gathered_once, repeated))
    once = {node.name: node.operands[0].name for node in plan.graph.nodes if is_gathered_once(node)}
    assert any(ref.name in once for node in repeated for ref in node.operands)
    assert plan.residence == {"transformer.wte.weight": "host"}
    assert "transformer_wte_weight" not in once.values() and len(once) > 10


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_gathers_no_weight_and_splits_no_batch(name: str, sizes: tuple[int, ...]) -> None:
    plan = plan_of(name, sizes, "tensor-parallel")
    assert set(inputs(plan).values()) == {replicated(plan.mesh)}
    matrices = weight_nodes(plan.graph, matrices=True)
    for node, layout in parameters(plan):
        assert node.name not in matrices or all(isinstance(place, Shard) for place in layout), node.target
    for node in plan.graph.nodes:
        for ref, read in zip(node.operands, plan.choices[node.name].reads, strict=True):
            assert ref.name not in matrices or all(change.kind != "all_gather" for change in read), node.name
    for node in plan.graph.nodes:
        if node.op == "autopar.einsum" and node.operands[1].name in matrices:
            assert Shard(0) not in plan.choices[node.name].takes[0], f"{node.name} splits the batch"


@pytest.mark.parametrize("name", ["mlp", "gpt2"])  # cnn: a weight with one even dim, split twice, is gathered whole
def test_the_mixed_policy_splits_the_batch_over_the_first_axis_only(name: str) -> None:
    plan = plan_of(name, (2, 2), "fsdp+tensor-parallel")
    assert set(inputs(plan).values()) == {(Shard(0), REPLICATE)}
    matrices = weight_nodes(plan.graph, matrices=True)
    for node, (first, last) in parameters(plan):
        assert isinstance(first, Shard), node.target
        assert isinstance(last, Shard) or node.name not in matrices, node.target
    gathered = [
        change.axis for node in plan.graph.nodes
        for ref, read in zip(node.operands, plan.choices[node.name].reads, strict=True) if ref.name in matrices
        for change in read if change.kind == "all_gather"
    ]  # fmt: skip
    assert set(gathered) == {plan.mesh.names[0]}


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_megatrons_two_axes_keep_weights_whole_over_the_first_one(name: str) -> None:
    plan = plan_of(name, (2, 2), "data-parallel+tensor-parallel")
    assert set(inputs(plan).values()) == {(Shard(0), REPLICATE)}
    matrices = weight_nodes(plan.graph, matrices=True)
    for node, (first, last) in parameters(plan):
        assert first == REPLICATE, node.target
        assert isinstance(last, Shard) or node.name not in matrices, node.target
    assert not any(comm.collective == "all_gather" and comm.axis == plan.mesh.names[0] for comm in plan.comms())
    asked = question(name, (2,))
    with pytest.raises(ValueError, match=r"policy data-parallel\+tensor-parallel needs two mesh axes or more"):
        restrict("data-parallel+tensor-parallel", asked.graph, asked.strategies, asked.pricer.mesh)


# --- where a policy cannot do what it wants --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["data-parallel", "tensor-parallel"])
def test_a_batch_and_weights_that_do_not_divide_stay_whole(policy: str) -> None:
    graph, mesh = family("mlp").graph, mesh_of(5)  # batch 12, widths 24 and 48
    plan = search(graph, mesh, H100, Request(policy=policy))
    assert not plan.comms()
    assert all(layout == (REPLICATE,) for _, layout in parameters(plan))


def test_an_axis_that_the_batch_is_too_small_for_repeats_the_work() -> None:
    graph, mesh = family("gpt2").graph, mesh_of(4, 2)  # batch 4
    plan = search(graph, mesh, H100, Request(policy="data-parallel"))
    assert batch_size(graph) == 4
    assert set(inputs(plan).values()) == {(Shard(0), REPLICATE)}
    assert {comm.axis for comm in plan.comms()} == {"a"}


def test_restricting_leaves_every_node_a_way_and_changes_no_strategy() -> None:
    asked = question("gpt2", (2, 2))
    for policy in POLICIES:
        kept = restrict(policy, asked.graph, asked.strategies, asked.pricer.mesh)
        runs = REWRITES[policy](asked.graph, ()) if policy in REWRITES else asked.graph
        assert kept.keys() == runs.by_name.keys() and all(kept.values())
        assert all(set(kept[name]) <= set(options) for name, options in asked.strategies.items())


def test_unknown_and_unfit_policies_are_refused() -> None:
    asked = question("mlp", (2,))
    with pytest.raises(ValueError, match=r"no policy 'zero'; known policies: data-parallel, fsdp"):
        restrict("zero", asked.graph, asked.strategies, asked.pricer.mesh)
    with pytest.raises(ValueError, match=r"needs two mesh axes or more, mesh a=2 has one"):
        restrict("fsdp+tensor-parallel", asked.graph, asked.strategies, asked.pricer.mesh)
    assert "fsdp+tensor-parallel" not in policies_for(mesh_of(8))


@pytest.mark.parametrize("policy", POLICIES)
def test_repeated_layers_can_be_tied_under_a_policy(policy: str) -> None:
    tied = answer(question("gpt2", (2, 2)), Request(policy=policy, tied=True))
    assert tied.step_seconds >= plan_of("gpt2", (2, 2), policy).step_seconds * (1 - 1e-6)
    layouts = {name.split(".h.")[1][2:]: set() for name in tied.parameters if ".h." in name}
    for name, layout in tied.parameters.items():
        if ".h." in name:
            layouts[name.split(".h.")[1][2:]].add(layout)
    assert all(len(found) == 1 for found in layouts.values())


def test_a_class_agrees_on_what_all_its_nodes_may_do() -> None:
    asked = question("gpt2", (2,))
    class_of, kept = classes_of(asked.graph, tied=True), dict(asked.strategies)
    member, leader = next((one, first) for one, first in class_of.items() if one != first and len(kept[first]) == 3)
    kept[leader], kept[member] = kept[leader][:2], kept[leader][1:]
    assert agree(kept, class_of)[member] == agree(kept, class_of)[leader] == kept[leader][1:2]
    kept[member] = asked.strategies[member][-1:]
    assert agree(kept, class_of)[member] == agree(kept, class_of)[leader] == (*kept[leader], *kept[member])


# --- the comparison --------------------------------------------------------------------------------------------------


def test_a_baseline_that_does_not_fit_says_what_it_needs() -> None:
    asked, memory = question("mlp", (2,)), 70_000.0
    chosen = answer(asked, Request(memory=memory))
    rows = compare(asked, chosen, Request(memory=memory, outputs="sharded", time_limit_s=60))
    row = next(row for row in rows if row.policy == "data-parallel")
    assert row.plan is None and row.needs is not None and row.needs > memory
    assert row.why.startswith("does not fit (needs ")
    assert answer(asked, Request(memory=row.needs, policy="data-parallel")).peak_bytes["hbm"] <= row.needs
    with pytest.raises(Infeasible):
        answer(asked, Request(memory=row.needs * 0.999, policy="data-parallel"))
    line = next(line for line in table(chosen, rows).splitlines() if "data-parallel" in line)
    assert row.why in line and " ms" not in line


def test_the_table_names_every_policy_and_says_that_it_is_predicted() -> None:
    asked, chosen = question("mlp", (2, 2)), plan_of("mlp", (2, 2), None)
    text = table(chosen, compare(asked, chosen, Request()))
    assert "predicted (summed)" in text.splitlines()[0]
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["this", *POLICIES]
    ratios = [float(line.split(" x ")[0].split()[-1]) for line in text.splitlines()[2:]]
    assert ratios[0] == 1 and min(ratios) == 1


def test_a_quicker_baseline_is_told_and_takes_nobodys_place() -> None:
    asked, best = question("mlp", (2,)), plan_of("mlp", (2,), None)
    for facts, why in (
        ({"tied": 1}, "the search ties repeated layers"),
        ({}, "--allow or --pin rules out what it does, or the search was cut short (--time-limit)"),
    ):
        poor = replace(best, step_seconds=1.0, bound=best.bound / 2, search={**best.search, "tied": 0, **facts})
        rows = compare(asked, poor, Request())
        line = next(line for line in table(poor, rows).splitlines() if "is quicker" in line and " fsdp " in f" {line}")
        assert line == f"  fsdp is quicker than this plan, which no report changes: {why}"
    assert "is quicker" not in table(best, compare(asked, best, Request()))


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_without_simulation_weights_gathered_once_are_told_of(name: str) -> None:
    """At whose plans that search does not look; where they are quicker, the table says so."""
    asked, chosen = question(name, (2,)), plan_of(name, (2,), None)
    rows = compare(asked, chosen, Request())
    zero2 = next(row.plan for row in rows if row.policy == "zero2")
    assert zero2 is not None
    is_quicker = zero2.step_seconds < chosen.step_seconds * (1 - 1e-3)
    assert ("zero2 is quicker than this plan" in table(chosen, rows)) == is_quicker
