"""Programs of real plans keep every rule; of small ones every byte is counted by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod

import pytest

from autopar.ir.graph import Graph, Node, Ref, Result, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, Shard
from autopar.ir.mesh import Mesh
from autopar.lower import Program, lower
from autopar.lower.memory import peaks, peaks_by_phase
from autopar.lower.program import Alloc, Free, Inner, Launch, Local, Operator, Run, Update, Wait
from autopar.lower.verify import flat, verify
from autopar.plan import Choice, Delivery, Plan
from autopar.plan.value import Decision
from autopar.price.pricer import Pricer
from autopar.price.reshard import Reshard, Work
from cost_models.hardware import Hardware
from cost_models.simulator import play
from cost_models.steps import Comm, Compute
from tests.support.check import mesh_of
from tests.support.families import FAMILIES, family
from tests.support.plans import PlanSampler
from tests.support.residence import ResidenceSampler

H100 = Hardware.load("h100-sxm")
MESH = Mesh(("a",), (4,))
S0, S1, P, R = Shard(0), Shard(1), Partial("sum"), REPLICATE


@cache
def drawn(name: str, sizes: tuple[int, ...], seed: int) -> tuple[Plan, Pricer]:
    sampler = PlanSampler(family(name).graph, mesh_of(*sizes), H100)
    return sampler.draw(seed), sampler.pricer


@cache
def hosted(name: str, sizes: tuple[int, ...], seed: int) -> tuple[Plan, Pricer]:
    sampler = ResidenceSampler(family(name).graph, mesh_of(*sizes), H100)
    return sampler.draw(seed), sampler.pricer


def programs(plan: Plan, pricer: Pricer) -> list[Program]:
    return [
        lower(replace(plan, bucket_bytes=nbytes), prefetch, replace(pricer, bucket_bytes=nbytes))
        for nbytes in (0, 3000, 1 << 20)
        for prefetch in (None, 0, 1, 3)
    ]


# --- real plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_random_plan_becomes_a_program(name: str, sizes: tuple[int, ...]) -> None:
    for program in programs(*drawn(name, sizes, 0)):
        verify(program)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "block", "cnn", "gpt2"])
def test_so_does_one_with_the_host_in_it(name: str, sizes: tuple[int, ...]) -> None:
    for seed in range(3):
        for program in programs(*hosted(name, sizes, seed)):
            verify(program)


@pytest.mark.parametrize("name", ["mlp", "block", "cnn", "gpt2"])
def test_every_program_of_a_plan_does_the_same_work(name: str) -> None:
    """Whatever is launched ahead: the same operators on the same values, the same steps of transfers."""
    plan, pricer = hosted(name, (2, 2), 1)

    def work(prefetch: int | None) -> tuple[set[object], list[str]]:
        found = [one for one in flat(lower(plan, prefetch, pricer)) if isinstance(one, Run | Launch)]
        ran = {one.what.node for one in found if isinstance(one, Run) and isinstance(one.what, Operator | Inner)}
        return ran, sorted(repr(step) for one in found for step in (one.steps if isinstance(one, Run) else (one.step,)))

    alone = work(None)
    assert alone[0] == {node.name for node in plan.graph.nodes if not node.is_source} - {
        node.name for node in plan.graph.nodes if node.op in ("autopar.store", "autopar.fetch")
    }
    assert all(work(prefetch) == alone for prefetch in (0, 1, 3))


def test_without_overlap_every_wait_stands_behind_its_launch() -> None:
    for name in ("block", "gpt2"):
        for program in [one for drawing in (hosted, drawn) for one in programs(*drawing(name, (2, 2), 0))[::4]]:
            issued = [one for _, one in program if not isinstance(one, Alloc | Free)]
            for one, behind in pairwise(issued):
                if isinstance(one, Launch):
                    assert behind == Wait(one.number, one.of)


def test_the_scan_holds_what_the_timeline_holds() -> None:
    from autopar.simulate.events import events

    for name in ("mlp", "block", "cnn"):
        for seed in range(3):
            plan, pricer = hosted(name, (2,), seed)
            for program in programs(plan, pricer):
                memory = play(events(program, plan.graph, pricer)).memory
                assert {tier: found.peak_bytes for tier, found in memory.items()} == peaks(program)
                assert max(peaks_by_phase(program).values()) == peaks(program)["hbm"]


def test_a_negative_prefetch_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch is -1"):
        lower(drawn("mlp", (2,), 0)[0], -1)


# --- parts of layout changes -----------------------------------------------------------------------------------------

CHANGES = [
    Reshard("a", before, after, TensorType(shape, "float32"))
    for shape in ((8, 4, 12), (1, 8, 4), (8, 1, 4))
    for before in (S0, S1, P, R)
    for after in (S0, S1, Shard(2), R)
    if before != after
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_parts_of_a_layout_change_take_what_it_takes(change: Reshard) -> None:
    parts, taken = change.parts(4), dict[object, float]()
    for part in parts:
        for step in part.steps:
            taken[step] = taken.get(step, 0.0) + part.share
    assert taken == dict.fromkeys(change.steps(4), 1.0)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_parts_of_a_layout_change_make_what_the_search_counts(change: Reshard) -> None:
    """`rooms`, counted again: beside the tensor that it starts from, and when that is gone."""
    beside = alone = held = 0
    has_source = True
    for part in change.parts(4):
        if part.made is None:
            continue
        held += part.made
        beside, alone = (max(beside, held), alone) if has_source else (beside, max(alone, held))
        held, has_source = part.made, False  # what it is made of is let go
    assert (beside, alone) == change.rooms(4)


@pytest.mark.parametrize(
    ("before", "after", "works"),
    [
        (S0, R, []),
        (S1, R, [Work.FROM_FRONT]),
        (P, R, []),
        (P, S0, []),
        (P, S1, [Work.TO_FRONT]),
        (S0, S1, [Work.TO_FRONT]),
        (S1, S0, [Work.FROM_FRONT]),
        (S1, Shard(2), [Work.TO_FRONT, Work.FROM_FRONT]),
        (R, S1, [Work.PIECE]),
    ],
)
def test_what_is_reordered_for_which_change(before: object, after: object, works: list[Work]) -> None:
    """By hand: a collective works on the leading dim; pieces along another one go there, or come from there."""
    change = Reshard("a", before, after, TensorType((8, 4, 12), "float32"))  # type: ignore[arg-type]
    parts = change.parts(4)
    assert [part.what for part in parts if part.what is not None] == works
    reordered = sum(part.share for part in parts for step in part.steps if isinstance(step, Compute))
    assert reordered == (1.0 if works else 0.0)


# --- by hand ---------------------------------------------------------------------------------------------------------


def choice(takes: list[Layout], gives: list[Layout], reads: list[tuple[Reshard, ...]]) -> Choice:
    steps = (Compute("op", 1.0, 1.0, "float32"),) if takes else ()
    return Choice((), tuple(takes), tuple(gives), "", (), 1, steps, tuple(reads))


def change(before: object, after: object, *shape: int) -> Reshard:
    return Reshard("a", before, after, TensorType(shape, "float32"))  # type: ignore[arg-type]


def net() -> Decision:
    """w [8, 4] in rows over 4 ranks is gathered and multiplied with x [2, 8]; the loss is y's sum; w's gradient is
    partial, and scattered.
    """
    tensor = TensorType
    nodes = (
        Node("w", "parameter", (), (), (tensor((8, 4), "float32"),), "forward", "w"),
        Node("x", "input", (), (), (tensor((2, 8), "float32"),), "forward", "x"),
        Node("y", "aten.mm.default", (Ref("x"), Ref("w")), (), (tensor((2, 4), "float32"),)),
        Node("flat", "aten.view.default", (Ref("y"),), (), (tensor((8,), "float32"),)),
        Node("loss", "aten.sum.default", (Ref("flat"),), (), (tensor((), "float32"),)),
        Node("t", "tangent", (), (), (tensor((), "float32"),), "backward", "0"),
        Node("g", "aten.op.default", (Ref("t"), Ref("x")), (), (tensor((8, 4), "float32"),), "backward"),
    )
    results = (Result("output", "0", Ref("loss")), Result("gradient", "w", Ref("g")))
    choices = {
        "w": choice([], [(S0,)], []),
        "x": choice([], [(R,)], []),
        "y": choice([(R,), (R,)], [(R,)], [(), (change(S0, R, 2, 4),)]),
        "flat": choice([(R,)], [(R,)], [()]),
        "loss": choice([(R,)], [(R,)], [()]),
        "t": choice([], [(R,)], []),
        "g": choice([(R,), (R,)], [(P,)], [(), ()]),
    }
    deliveries = (Delivery((), (R,)), Delivery((change(P, S0, 8, 4),), (S0,)))
    return Decision(Graph(nodes, results), MESH, choices, deliveries)


def test_a_small_step_by_hand() -> None:
    """Bytes of one of 4 ranks: w 32, x 64, gathered w 128, y 32, loss 4, g 128, its piece 32, coordinates 8; with SGD
    there is nothing beside.
    """
    program = lower(net(), None, Pricer.on(MESH, H100, "sgd"))
    verify(program)
    told: list[str] = []
    for phase, one in program:
        match one:
            case Alloc(buffer):
                told.append(f"+{buffer.nbytes}")
            case Free(buffer):
                told.append(f"-{buffer.nbytes}")
            case Run(Operator(node)):
                told.append(node)
            case Run(Update(name)):
                told.append(f"update {name}")
            case Run(Local(work)):
                told.append(work.value)
            case Launch(step=Comm() as step):
                told.append(step.collective)
            case Wait():
                told.append("wait")
            case _:
                raise AssertionError((phase, one))
    assert " ".join(told) == (
        "+128 all_gather wait +32 y -128 flat +4 loss -32 "
        "+4 +128 g +32 reduce_scatter wait -4 -128 "
        "+0 update w -0 -4 -32"
    )
    resident = 32 + 64 + 8
    assert sum(buffer.nbytes for buffer in program.resident) == resident
    assert peaks(program) == {"hbm": resident + 4 + 4 + 128 + 32}
    assert peaks_by_phase(program) == {
        "forward": resident + 128 + 32, "backward": resident + 4 + 4 + 128 + 32, "optimizer": resident + 4 + 32
    }  # fmt: skip


def test_a_view_of_a_gathered_weight_keeps_it() -> None:
    decision = net()
    nodes = tuple(
        replace(node, args=(Ref("w"),), outputs=(TensorType((32,), "float32"),)) if node.name == "flat" else node
        for node in decision.graph.nodes
    )
    choices = {**decision.choices, "flat": choice([(R,)], [(R,)], [(change(S0, R, 2, 4),)])}
    program = lower(replace(decision, graph=Graph(nodes, decision.graph.results), choices=choices), None)
    verify(program)
    order = [one for _, one in program if isinstance(one, Alloc | Free | Run)]
    ran = {at: one.what for at, one in enumerate(order) if isinstance(one, Run)}
    place = {what.node: at for at, what in ran.items() if isinstance(what, Operator)}
    gathered = [one.buffer for one in order if isinstance(one, Alloc) and "resharded for flat" in one.buffer.owner]
    assert [buffer.nbytes for buffer in gathered] == [128]
    assert order.index(Free(gathered[0])) > place["loss"]


def test_gradients_that_are_one_value_are_taken_apart() -> None:
    """Whoever is given a gradient may write to it."""
    decision = net()
    nodes = (Node("v", "parameter", (), (), (TensorType((8, 4), "float32"),), "forward", "v"), *decision.graph.nodes)
    results = (*decision.graph.results, Result("gradient", "v", Ref("g")))
    choices = {**decision.choices, "v": choice([], [(P,)], [])}
    deliveries = (decision.deliveries[0], Delivery((), (P,)), Delivery((), (P,)))
    program = lower(replace(decision, graph=Graph(nodes, results), choices=choices, deliveries=deliveries), None)
    verify(program)
    one, other = (program.values[program.results[place]][0] for place in (1, 2))
    assert one is not other and one.nbytes == other.nbytes == 128
    copies = [i for _, i in program if isinstance(i, Run) and isinstance(i.what, Local) and i.what.work is Work.CLONE]
    assert len(copies) == 1


def test_two_unfilled_buckets_by_hand() -> None:
    """Gradients of 128, 128 and 64 bytes, the last in another dtype: two rows, each allocated beside what it is of."""
    shapes = {"u": ((8, 4), "float32"), "v": ((8, 4), "float32"), "w": ((8, 4), "bfloat16")}
    nodes: list[Node] = []
    choices: dict[str, Choice] = {}
    for name, (shape, dtype) in shapes.items():
        nodes.append(Node(name, "parameter", (), (), (TensorType(shape, dtype),), "forward", name))
        choices[name] = choice([], [(R,)], [])
    for name, (shape, dtype) in shapes.items():
        nodes.append(Node(f"g{name}", "aten.op.default", (Ref(name),), (), (TensorType(shape, dtype),), "backward"))
        choices[f"g{name}"] = choice([(R,)], [(P,)], [()])
    results = tuple(Result("gradient", name, Ref(f"g{name}")) for name in shapes)
    deliveries = tuple(
        Delivery((Reshard("a", P, R, TensorType(shape, dtype)),), (R,)) for shape, dtype in shapes.values()
    )
    decision = Decision(Graph(tuple(nodes), results), MESH, choices, deliveries, bucket_bytes=1 << 20)
    program = lower(decision, 1)
    verify(program)
    sums = [one for _, one in program if isinstance(one, Launch)]
    assert [(one.step.nbytes, len(one.of.results), one.in_place) for one in sums] == [(256, 2, True), (64, 1, False)]  # type: ignore[union-attr]
    assert prod(buffer.nbytes for buffer in program.resident) == 8 * 128 * 128 * 64
    # The three gradients, the row of two beside them; then the row stays, and the sum of the third beside the third.
    assert peaks(program)["hbm"] - (8 + 128 + 128 + 64) == 128 + 128 + 64 + 256


def test_the_optimizer_steps_one_kind_of_parameter_after_the_other() -> None:
    """By hand, 128 bytes each, AdamW on a CPU: two copies of one parameter at a time, of which one is there a little
    longer. The host works beside the device; states stream for one parameter at a time.
    """
    names = ("d1", "s1", "h1", "d2", "s2")
    residence = {"s1": "stream", "s2": "stream", "h1": "host"}
    nodes, choices, deliveries = [], dict[str, Choice](), []
    tensor = TensorType((8, 4), "float32")
    for name in names:
        nodes.append(Node(name, "parameter", (), (), (tensor,), "forward", name))
        choices[name] = choice([], [(R,)], [])
    for name in names:
        nodes.append(Node(f"g{name}", "aten.op.default", (Ref(name),), (), (tensor,), "backward"))
        choices[f"g{name}"] = choice([(R,)], [(R,)], [()])
        deliveries.append(Delivery((), (R,)))
    results = tuple(Result("gradient", name, Ref(f"g{name}")) for name in names)
    decision = Decision(Graph(tuple(nodes), results), MESH, choices, tuple(deliveries), residence)
    pricer = Pricer.on(MESH, Hardware.load("cpu-gloo"), "adamw")
    told: list[str] = []
    for one in lower(decision, 1, pricer).instructions["optimizer"]:
        match one:
            case Run(Update(name)) | Launch(of=Update(name)) | Wait(of=Update(name)):
                told.append(f"{type(one).__name__.lower()} {name}")
            case Alloc(buffer):
                told.append(f"+{buffer.nbytes}")
            case Free(buffer):
                told.append(f"-{buffer.nbytes}")
            case _:
                raise AssertionError(one)
    streamed = "+256 launch {0} wait {0} +256 run {0} -256 launch {0} wait {0} -256"
    assert " ".join(told) == " ".join(
        [
            "+256 launch h1",
            "+256 run d1 -256 +128 +256 run d2 -128 -256",
            streamed.format("s1"),
            streamed.format("s2"),
            "wait h1 -256",
            " ".join(["-128"] * 5),
        ]
    )
