"""Calls of operators: every strategy's call runs alone as it does in the program, is timed once, and is found again."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.calibrate import operators as timing
from autopar.calibrate.operators import NotTimed, prepare, profiler, seconds_of, time_call, where_of
from autopar.calibrate.values import bounds_of, input_bounds, random_tensor
from autopar.emit.writer import target_of
from autopar.ir.graph import Const, Graph, Node, Ref, TensorType, map_refs
from autopar.ir.mesh import Mesh
from autopar.ir.work import VIEWS
from autopar.price.calls import Call, Wanted, _orders, operations, wanted
from autopar.price.pricer import Pricer
from autopar.propose.strategies import propose
from autopar.search import ask
from autopar.trace import capture, graph_of
from cost_models.measured import Store
from tests.support.check import mesh_of
from tests.support.families import FAMILIES, VOCABULARY, Case, _gpt2, family
from tests.support.machines import FAST

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def calls_of(graph: Graph, mesh: Mesh) -> list[Wanted]:
    return wanted(operations(graph, propose(graph, mesh)[0], mesh), Pricer.on(mesh, FAST, "adamw"))


def leaves(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, tuple | list) else [made]


# --- what is called --------------------------------------------------------------------------------------------------


LARGE = ("llama", "opt", "bert", "t5", "vit")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in FAMILIES])
def test_every_call_of_every_strategy_runs_alone_and_gives_its_local_results(name: str) -> None:
    for want in calls_of(family(name).graph, mesh_of(2, 2)):
        with torch.no_grad():
            made = leaves(prepare(want.call, CPU)())
        for value, type in zip(made, want.call.outputs, strict=True):
            if type is not None:
                assert TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch.")) == type, want.call.key


def test_equal_layers_are_timed_once_and_names_do_not_count() -> None:
    two, three = (Case(*_gpt2(n_layer=layers)).graph for layers in (2, 3))
    keys = [{want.call.key for want in calls_of(graph, mesh_of(2, 2))} for graph in (two, three)]
    assert keys[0] == keys[1] and len(keys[0]) == len(calls_of(two, mesh_of(2, 2)))


def test_views_are_not_called_and_everything_else_is() -> None:
    graph = family("gpt2").graph
    called = {want.call.node.op for want in calls_of(graph, mesh_of(2))}
    assert called == {node.op for node in graph.nodes if not node.is_source} - {*VIEWS}


def tiny_graph() -> Graph:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Softmax(-1))
    return graph_of(capture(model, (torch.zeros(4, 8),), {}))


PRINT_KEYS = """
from autopar.ir.mesh import Mesh
from autopar.price.calls import operations
from autopar.propose.strategies import propose
import torch
from autopar.trace import capture, graph_of
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Softmax(-1))
graph, mesh = graph_of(capture(model, (torch.zeros(4, 8),), {})), Mesh(("a", "b"), (2, 2))
for operation in operations(graph, propose(graph, mesh)[0], mesh):
    for call in operation.calls:
        print(call and call.key)
"""


def test_keys_are_the_same_in_another_process() -> None:
    told = subprocess.run(
        [sys.executable, "-c", PRINT_KEYS], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    graph, mesh = tiny_graph(), mesh_of(2, 2)
    keys = [call and call.key for one in operations(graph, propose(graph, mesh)[0], mesh) for call in one.calls]
    assert told.splitlines() == [str(key) for key in keys] and len(set(keys)) > 30


def test_keys_say_what_is_called() -> None:
    keys = {want.call.key for want in calls_of(family("gpt2").graph, mesh_of(2))}
    product = "('b s k, k h -> b s h', float32[2, 12, 48], float32[48, 192]) -> float32[2, 12, 192]"
    assert ("autopar.einsum", product) in keys
    assert ("aten.mul.Tensor", "(float32[2, 12, 192], float32[2, 12, 192]) -> float32[2, 12, 192]") in keys
    bodies = {operator for operator, _ in keys if " by " in operator}
    assert f"aten._log_softmax.default by log_softmax, 2 of {VOCABULARY}" in bodies
    assert f"aten.embedding.default by masked_lookup, 2 of {VOCABULARY}" in bodies


def one_call(op: str, args: tuple[Any, ...], types: Sequence[TensorType], out: TensorType, split: bool = False) -> Call:
    """The call of a single operator on sources x0, x1, ...; `split`: of a strategy that splits it."""
    sources = tuple(Node(f"x{i}", "input", (), (), (type,), target=f"[{i}]") for i, type in enumerate(types))
    graph = Graph((*sources, Node("made", op, args, (), (out,))), ())
    return calls_of(graph, mesh_of(2))[-1 if split else 0].call


def test_an_operand_that_stands_twice_is_one_tensor() -> None:
    type = TensorType((4, 6), "float32")
    squared = one_call("aten.mul.Tensor", (Ref("x0"), Ref("x0")), [type], type)
    product = one_call("aten.mul.Tensor", (Ref("x0"), Ref("x1")), [type, type], type)
    assert squared.key == ("aten.mul.Tensor", "(float32[4, 6], =%0) -> float32[4, 6]") != product.key
    assert len(prepare(squared, CPU).operands) == 2 and len(prepare(product, CPU).operands) == 3  # and the coordinate


# --- how operands lie in memory --------------------------------------------------------------------------------------


def run(graph: Graph, values: dict[str, Tensor]) -> dict[Ref, Tensor]:
    """Every value of the graph on one device."""
    found: dict[Ref, Tensor] = {}

    def plain(arg: Any) -> Any:
        if isinstance(arg, Const):
            return CPU if arg.kind == "device" else getattr(torch, arg.value)
        return [plain(part) for part in arg] if isinstance(arg, tuple) else arg

    for node in graph.nodes:
        (type, *_) = node.outputs
        if node.is_source:
            assert type is not None
            made: Any = values.get(node.name, torch.ones(type.shape, dtype=getattr(torch, type.dtype)))
        elif node.op == "autopar.share":
            made = found[node.operands[0]]
        else:
            args, kwargs = map_refs((node.args, tuple(v for _, v in node.kwargs)), found.__getitem__)
            made = target_of(node.op)(
                *plain(args), **dict(zip([k for k, _ in node.kwargs], plain(kwargs), strict=True))
            )
        found |= {Ref(node.name, i): value for i, value in enumerate(leaves(made))}
    return found


@pytest.mark.parametrize(("name", "least"), [("mlp", 1.0), ("cnn", 1.0), ("gpt2", 0.9)])
def test_operands_lie_in_memory_as_in_a_real_run(name: str, least: float) -> None:
    """But for those that attention and elementwise operators leave as their operands lay, and for pieces of slices."""
    graph = family(name).graph
    with torch.no_grad():
        real = run(graph, family(name).values(graph))
    orders, right, all = _orders(graph), 0, 0

    def strides(value: Tensor) -> list[tuple[int, int]]:
        return [(size, step) for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]

    for node in graph.nodes:
        for ref in node.operands if not node.is_source and node.op not in VIEWS else ():
            ours = random_tensor(graph.type_of(ref), CPU, order=orders[ref])
            right, all = right + (strides(ours) == strides(real[ref])), all + 1
    assert right >= least * all, f"{right} of {all}"


def test_a_tensor_is_made_in_the_order_that_is_asked_for() -> None:
    type = TensorType((2, 3, 4), "float32")
    assert random_tensor(type, CPU).stride() == (12, 4, 1)
    assert random_tensor(type, CPU, order=(1, 2, 0)).stride() == (1, 8, 2)
    assert random_tensor(type, CPU, order=(2, 0)).stride() == (1, 0, 2)
    assert random_tensor(TensorType((), "float32"), CPU).shape == ()


# --- values ----------------------------------------------------------------------------------------------------------


def test_places_are_random_within_range_and_other_integers_are_zero() -> None:
    type = TensorType((500,), "int64")
    places = random_tensor(type, CPU, 7)
    assert set(places.tolist()) == set(range(7)) and not random_tensor(type, CPU).any()
    assert not random_tensor(type, CPU, 0).any()
    for dtype in ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn"):
        floats = random_tensor(TensorType((500,), dtype), CPU).double()
        assert floats.min() > 0.05 and floats.max() <= 1.01
    assert set(random_tensor(TensorType((99,), "bool"), CPU).tolist()) == {True, False}
    assert random_tensor(TensorType((9,), "complex64"), CPU).isfinite().all()


def types(*shapes: tuple[int, ...]) -> list[TensorType]:
    return [TensorType(shape, "float32") for shape in shapes]


x0, x1, x2 = (Ref("", i) for i in range(3))


@pytest.mark.parametrize(
    ("op", "args", "shapes", "bounds"),
    [
        ("aten.embedding.default", (x0, x1), [(50, 4), (3,)], {1: 50}),
        ("aten.embedding_dense_backward.default", (x0, x1, 50, -1, False), [(3, 4), (3,)], {1: 50}),
        ("aten.index_select.default", (x0, 1, x1), [(5, 6), (3,)], {1: 6}),
        ("aten.gather.default", (x0, -1, x1), [(5, 6), (5, 2)], {1: 6}),
        ("aten.index.Tensor", (x0, (None, x1, x2)), [(5, 6, 7), (2,), (2,)], {1: 6, 2: 7}),
        ("aten.nll_loss_forward.default", (x0, x1, None, 1, -100), [(8, 9), (8,)], {1: 9}),
        ("aten.nll_loss_forward.default", (x0, x1, None, 1, -100), [(9,), ()], {1: 9}),
        ("aten.nll_loss2d_forward.default", (x0, x1, None, 1, -100), [(8, 9, 2, 2), (8, 2, 2)], {1: 9}),
        ("aten.add.Tensor", (x0, x1), [(8,), (8,)], {}),
    ],
)
def test_it_is_known_which_integers_are_places(op: str, args: Any, shapes: Any, bounds: dict[int, int]) -> None:
    assert bounds_of(op, args, types(*shapes)) == bounds


def test_the_inputs_of_a_model_are_places_where_it_looks_something_up() -> None:
    graph = family("gpt2").graph
    names = {node.target: node.name for node in graph.nodes if node.op == "input"}
    assert input_bounds(graph) == {names["['input_ids']"]: VOCABULARY, names["['labels']"]: VOCABULARY}
    pictures = family("vit").graph
    (labels,) = (node.name for node in pictures.nodes if node.target == "['labels']")
    assert input_bounds(pictures) == {labels: 12}


# --- timing ----------------------------------------------------------------------------------------------------------


def profiled(name: str, path: Path, budget_s: float = 60.0, said: list[str] | None = None):
    graph, mesh = family(name).graph, mesh_of(2)
    timed = profiler("cpu", budget_s, FAST, path, (said if said is not None else []).append)
    return calls_of(graph, mesh), timed(calls_of(graph, mesh))


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_every_operator_of_a_small_model_gets_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "EACH_S", 0.003)
    monkeypatch.setattr(timing.seconds_of, "__defaults__", (0.003,))
    said: list[str] = []
    calls, found = profiled(name, tmp_path / "operators", said=said)
    assert found.notes == () and found.seconds.keys() == {want.call.key for want in calls}
    assert all(1e-8 < seconds < 1.0 for seconds in found.seconds.values())
    assert {operator.split(" ")[0] for operator, _ in found.seconds} == {want.call.node.op for want in calls}
    assert said[-1] == f"timed {len(calls)} calls" and said[0].endswith(f"0 known, {len(calls)} not")
    with Store(tmp_path / "operators") as store:
        assert store.known(where_of(CPU)) == found.seconds

    def never(*_: object) -> float:
        raise AssertionError("what is known is not timed again")

    monkeypatch.setattr(timing, "time_call", never)
    assert profiled(name, tmp_path / "operators")[1] == found
    assert profiled(name, tmp_path / "operators", budget_s=0)[1] == found


def test_a_large_product_takes_longer_than_a_small_one() -> None:
    def product(size: int) -> float:
        type = TensorType((size, size), "float32")
        call = one_call("aten.mm.default", (Ref("x0"), Ref("x1")), [type, type], type)
        return seconds_of(prepare(call, CPU), timing.Clock(CPU, 1), 0.05)

    small, large = product(32), product(512)
    assert large > 20 * small > 0


def test_the_time_is_a_median_behind_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, taken = [0.0], iter([100.0, 3.0, 2.0, 9.0, 1.0, 50.0, *[2.5] * 100])

    class Fake(timing.Clock):
        def now(self) -> float:
            return clock[0]

    def call() -> None:
        clock[0] += next(taken)

    assert seconds_of(call, Fake(CPU, 1), limit_s=0.0) == 3.0  # of 3, 2, 9, 1, 50


def test_nothing_is_timed_without_time_and_the_note_says_so(tmp_path: Path) -> None:
    calls, found = profiled("mlp", tmp_path / "operators", budget_s=0.0)
    assert found.seconds == {} and not (tmp_path / "operators").exists()
    assert found.notes == (
        f"{len(calls)} of {len(calls)} calls of operators are left to the formula: there were 0 s to time them",
    )


def test_when_time_runs_out_the_important_ones_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def slowly(want: Wanted, *_: object) -> float:
        clock[0] += 1.0
        return 1e-3

    monkeypatch.setattr(timing, "time_call", slowly)
    said: list[str] = []
    calls, found = profiled("mlp", tmp_path / "operators", budget_s=9.5, said=said)
    assert list(found.seconds) == [want.call.key for want in calls[:10]]
    assert found.notes == (
        f"{len(calls) - 10} of {len(calls)} calls of operators are left to the formula: there were 9.5 s to time them",
    )
    assert f"timed 3 of {len(calls)} calls, 3 of 9.5 s" in said
    spent = profiler("cpu", 15.0, FAST, tmp_path / "of two")  # all questions of one search share its seconds
    assert [len(spent(calls).seconds) for _ in range(2)] == [15, 15]
    _, more = profiled("mlp", tmp_path / "operators", budget_s=9.5)  # goes on where it stopped
    assert list(more.seconds)[:20] == [want.call.key for want in calls[:20]]


@pytest.mark.parametrize(("count", "first"), [(1, "aten.mm.default"), (50, "aten.relu.default")])
def test_strategies_of_one_operator_stand_together_the_dearest_operator_first(count: int, first: str) -> None:
    """By the formula a product of these takes 0.5 us, a relu 0.03 us."""
    type = TensorType((64, 64), "float32")
    source = Node("x0", "input", (), (), (type,), target="[0]")
    product = Node("product", "aten.mm.default", (Ref("x0"), Ref("x0")), (), (type,))
    relus = (Node(f"relu{i}", "aten.relu.default", (Ref("x0"),), (), (type,)) for i in range(count))
    order = calls_of(Graph((source, product, *relus), ()), mesh_of(2))
    ops = [want.call.node.op for want in order]
    assert ops == sorted(ops, key=lambda op: op != first) and set(ops) == {"aten.mm.default", "aten.relu.default"}
    of_first = [want.seconds for want in order if want.call.node.op == first]
    assert of_first == sorted(of_first, reverse=True) and len(of_first) > 1


def test_what_fails_keeps_the_formula_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Call, device: torch.device) -> Any:
        if call.node.op == "aten.gelu.default":
            raise RuntimeError("no kernel\n  for this")
        if call.node.op == "aten.mse_loss.default":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return lambda: None

    monkeypatch.setattr(timing, "prepare", broken)
    calls, found = profiled("mlp", tmp_path / "operators")
    lost = [want for want in calls if want.call.node.op in ("aten.gelu.default", "aten.mse_loss.default")]
    gelus = [want for want in lost if want.call.node.op == "aten.gelu.default"]
    assert found.seconds.keys() == {want.call.key for want in calls if want not in lost}
    (note,) = found.notes
    assert note.startswith(f"{len(lost)} calls of operators cannot be timed and keep the formula: ")
    assert f"aten.gelu.default: RuntimeError: no kernel for this ({len(gelus)})" in note
    assert f"out of memory ({len(lost) - len(gelus)})" in note


def test_what_would_not_fit_or_writes_into_its_operand_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "prepare", lambda *_: pytest.fail("tried"))
    type = TensorType((1024,), "float32")
    call = one_call("aten.relu.default", (Ref("x0"),), [type], type)
    clock = timing.Clock(CPU, 1)
    with pytest.raises(NotTimed, match="needs more memory than is free"):
        time_call(Wanted(call, 1e-6, 8192), clock, room=10_000)
    inplace = one_call("aten.relu_.default", (Ref("x0"),), [type], type)
    with pytest.raises(NotTimed, match=r"aten\.relu_\.default writes into its operand"):
        time_call(Wanted(inplace, 1e-6, 8192), clock, room=1e9)


def test_random_numbers_of_the_user_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.seconds_of, "__defaults__", (0.0,))

    class Dropping(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x, 0.5).sum()

    graph = graph_of(capture(Dropping(), (torch.zeros(8, 8),), {}))
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    question = ask(graph, mesh_of(2), FAST, profile=profiler("cpu", 60.0, FAST, tmp_path / "operators"))
    assert any("dropout" in operator for operator, _ in question.measured)
    assert torch.equal(torch.rand(4), wanted)


def test_a_processor_goes_by_its_name_and_threads() -> None:
    here = where_of(CPU)
    assert here.threads == 1 and here.torch == torch.__version__ and here.precision == "highest"
    torch.set_num_threads(2)
    assert where_of(CPU).threads == 2
