"""Every private name of torch that autopar uses, executed once: what breaks first with another version of torch."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import parametrizations, parametrize
from transformers.utils import torch_compilable_check

from autopar import _compat


def test_every_name_is_exercised_here():
    assert set(_compat.__all__) == {name.removeprefix("check_") for name in globals() if name.startswith("check_")}


def check_FakeStore() -> None:
    dist.init_process_group("fake", store=_compat.FakeStore(), rank=0, world_size=4)
    try:
        assert dist.get_world_size() == 4
    finally:
        dist.destroy_process_group()


def check_FakeTensor() -> None:
    with _compat.FakeTensorMode():
        assert isinstance(torch.empty(2, 3), _compat.FakeTensor)


def check_FakeTensorMode() -> None:
    with _compat.FakeTensorMode():
        assert (torch.empty(1 << 20, 1 << 20) @ torch.empty(1 << 20, 2)).shape == (1 << 20, 2)


def check_HashStore() -> None:
    store = _compat.HashStore()
    store.set("key", "value")
    assert store.get("key") == b"value"


def check_LocalTensor() -> None:
    pieces = {0: torch.ones(2), 1: torch.full((2,), 3.0)}
    assert _compat.LocalTensor(pieces)._local_tensors[1].tolist() == [3.0, 3.0]


def check_LocalTensorMode() -> None:
    value = _compat.LocalTensor({0: torch.ones(2), 1: torch.full((2,), 3.0)})
    with _compat.LocalTensorMode(frozenset({0, 1})):
        doubled = value * 2
    assert doubled._local_tensors[1].tolist() == [6.0, 6.0]


def check_check_tensor_all_with() -> None:
    """Transformers' checks go through it where a model is exported (tests/attach/test_checks.py)."""
    _compat.check_tensor_all_with(ValueError, torch.tensor([True, True]))
    with pytest.raises(ValueError, match="not so"):
        _compat.check_tensor_all_with(ValueError, torch.tensor([True, False]), lambda: "not so")


def check_TorchDispatchMode() -> None:
    seen: list[str] = []

    class Mode(_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
    assert "aten.add.Tensor" in seen


def check_aot_export_joint_with_descriptors() -> None:
    from contextlib import ExitStack

    with ExitStack() as stack, _compat.FakeTensorMode():
        joint = _compat.aot_export_joint_with_descriptors(
            stack, nn.Linear(3, 2), (torch.empty(4, 3),), {}, decompositions=None
        )
        described = {type(n.meta["desc"]).__name__ for n in joint.graph_module.graph.find_nodes(op="placeholder")}
        (output,) = joint.graph_module.graph.find_nodes(op="output")
    assert described == {"ParamAOTInput", "PlainAOTInput", "TangentAOTInput"}
    assert "GradAOTOutput" in {type(desc).__name__ for desc in output.meta["desc"]}


def check_cuda_sleep() -> None:
    if torch.cuda.is_available():
        _compat.cuda_sleep(1000)
        torch.cuda.synchronize()
    assert callable(_compat.cuda_sleep)


def check_wrap_dtensor_dispatch() -> None:
    dispatcher = DTensor._op_dispatcher
    before, seen, whole = dict(vars(dispatcher)), list[str](), list[str]()

    def beside(theirs: Any, op: Any, *rest: Any) -> Any:
        seen.append(str(op))
        return theirs(op, *rest)

    def laid_out(theirs: Any, op: Any, args: Any, *rest: Any) -> Any:
        try:
            return theirs(op, args, *rest)
        except NotImplementedError:
            whole.append(str(op))
            return args[0]

    dist.init_process_group("fake", store=_compat.FakeStore(), rank=0, world_size=2)
    try:
        _compat.wrap_dtensor_dispatch(beside, lambda theirs, *args: theirs(*args), laid_out)
        split = distribute_tensor(torch.randn(7, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        torch.fmod(split, torch.tensor(2.0))
        assert seen == ["aten.fmod.Tensor"]
        backward = torch.ops.aten.hardtanh_backward.default
        assert backward(split, split, -1.0, 1.0) is split and whole == [str(backward)]
    finally:
        vars(dispatcher).clear()
        vars(dispatcher).update(before)
        dist.destroy_process_group()


def check_dtensor_handlers() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    operator, asked = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default, list[str]()
    theirs = _compat.dtensor_handlers[operator]
    dist.init_process_group("fake", store=_compat.FakeStore(), rank=0, world_size=1)
    _compat.dtensor_handlers[operator] = lambda op, args, kwargs: asked.append(str(op))
    try:
        gradient = DTensor.from_local(torch.randn(2), init_device_mesh("cpu", (1,)), [Replicate()], run_check=False)
        operator([gradient], torch.zeros(()), torch.ones(()))
    finally:
        _compat.dtensor_handlers[operator] = theirs
        dist.destroy_process_group()
    assert asked == ["aten._amp_foreach_non_finite_check_and_unscale_.default"]


def check_functional_collectives() -> None:
    assert hasattr(_compat.functional_collectives, "all_reduce")
    assert callable(torch.ops._c10d_functional.all_gather_into_tensor.default)


def check_fx_graph_cse() -> None:
    traced = torch.fx.symbolic_trace(lambda x: torch.sin(x) + torch.sin(x))
    merged = torch.fx.GraphModule(torch.nn.Module(), _compat.fx_graph_cse(traced.graph))
    assert sum(node.target is torch.sin for node in merged.graph.nodes) == 1


def check_distribute_tensors() -> None:
    held = torch.zeros(2)
    state = {"a": held}
    _compat.distribute_tensors()(state, ["a", "b"], torch.device("cpu"), object())
    assert state == {"a": held}  # what is a tensor stays


def check_replace_distribute_tensors() -> None:
    plain, seen = _compat.distribute_tensors(), list[object]()
    try:
        _compat.replace_distribute_tensors(lambda *given: seen.append(given))
        _compat.distribute_tensors()({}, ["a"])
    finally:
        _compat.replace_distribute_tensors(plain)
    assert seen == [({}, ["a"])] and _compat.distribute_tensors() is plain


def check_is_transforming() -> None:
    seen: list[bool] = []
    torch.vmap(lambda x: (seen.append(_compat.is_transforming()), x)[1])(torch.ones(2, 2))
    assert seen == [True] and not _compat.is_transforming()


def check_keeps_graph() -> None:
    seen, x = list[bool](), torch.randn(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(_compat.keeps_graph()))
    made = x.sum()
    made.backward(retain_graph=True)
    made.backward()
    assert seen == [True, False]


def check_is_batched() -> None:
    seen, x = list[bool](), torch.randn(2, requires_grad=True)
    made = x * 2
    made.register_hook(lambda gradient: seen.append(_compat.is_batched(gradient)))
    torch.autograd.grad(made, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(made, x, torch.ones(2))
    torch.vmap(lambda one: (seen.append(_compat.is_batched(one)), one)[1])(torch.ones(2, 2))
    assert seen == [True, False, True]


def check_is_in_backward() -> None:
    seen, x = list[bool](), torch.randn(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(_compat.is_in_backward()))
    x.sum().backward()
    assert seen == [True] and not _compat.is_in_backward()


def check_is_wanted() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
            return given[0] * given[1]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            asked.append([_compat.is_wanted(function) for function, _ in ctx.next_functions])
            return gradient, gradient, None

    asked, leaves = list[list[bool]](), [torch.randn(3, requires_grad=True) for _ in range(2)]
    for wanted in leaves:
        made = Product.apply(*(leaf * 2 for leaf in leaves), torch.ones(1))
        torch.autograd.grad(made.sum(), wanted)
    assert asked == [[True, False, False], [False, True, False]]
    Product.apply(*leaves, torch.ones(1)).sum().backward()
    assert asked[-1] == [True, True, False]


def check_outside_modes() -> None:
    with _compat.FakeTensorMode():
        assert isinstance(torch.ones(2), _compat.FakeTensor)
        with _compat.outside_modes():
            assert torch.ones(2).sum().item() == 2


class Told(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "told"


def check_without_parametrization_cache() -> None:
    layer = parametrizations.weight_norm(nn.Linear(3, 3))
    with parametrize.cached():
        held = layer.weight
        with _compat.without_parametrization_cache():
            assert layer.weight is not held and layer.weight is not layer.weight
        assert layer.weight is held


def gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def check_scripted_as_written() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripts are deprecated
        scripted = torch.jit.script(gate)

    x = torch.randn(3, requires_grad=True)
    for _ in range(3):
        scripted(x).sum().backward()
    assert type(scripted(x).grad_fn).__name__ != "MulBackward0"  # of a plan of torch's
    with _compat.scripted_as_written():
        assert type(scripted(x).grad_fn).__name__ == "MulBackward0"


def check_keeping_grad_modes() -> None:
    class Within(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                y = x * 2
                with torch.no_grad():
                    z = x.exp()
                return y * z

    def modes() -> list[bool]:
        parts = torch.export.export(Within(), (torch.ones(2, requires_grad=True),), strict=False).graph_module.modules()
        return [node.args[0] for part in parts for node in part.graph.nodes if "set_grad_enabled" in str(node.target)]

    with _compat.keeping_grad_modes():
        assert modes() == [False]


def check_checking_truths() -> None:
    with _compat.checking_truths({"no": torch.tensor(False)}.get), pytest.raises(ValueError, match="told"):
        torch_compilable_check("no", "told")


def check_without_torch_function() -> None:
    held = torch.ones(2).as_subclass(Told)
    assert held + 1 == "told"
    with _compat.without_torch_function():
        assert (held + 1).sum().item() == 4


def check_with_torch_function() -> None:
    with _compat.without_torch_function(), _compat.with_torch_function():
        assert torch.ones(2).as_subclass(Told) + 1 == "told"


def check_total_norm() -> None:
    assert _compat.total_norm()([torch.tensor([3.0, 4.0])], 2.0, False, None).item() == 5.0


def check_replace_total_norm() -> None:
    plain, weight = _compat.total_norm(), torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([6.0, 8.0])
    try:
        _compat.replace_total_norm(lambda tensors, *rest: plain(tensors, *rest) * 2)
        assert torch.nn.utils.clip_grad_norm_([weight], 5.0).item() == 20.0
        assert weight.grad.norm().item() == pytest.approx(2.5)
        assert torch.nn.utils.get_total_norm([weight.grad]).item() == pytest.approx(5.0)
    finally:
        _compat.replace_total_norm(plain)
    assert torch.nn.utils.clip_grad_norm_([weight], 5.0).item() == pytest.approx(2.5)


def check_named_dims() -> None:
    assert _compat.named_dims()([1], 3) == [1] and _compat.named_dims()(None, 3) is None


def check_replace_named_dims() -> None:
    named = _compat.named_dims()
    asked: list[object] = []
    dist.init_process_group("fake", store=_compat.FakeStore(), rank=0, world_size=2)
    try:
        _compat.replace_named_dims(lambda dims, ndim: asked.append(dims) or named(dims, ndim))
        mesh = init_device_mesh("cpu", (2,))
        distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)]).sum([1])
        assert [1] in asked
    finally:
        _compat.replace_named_dims(named)
        dist.destroy_process_group()


def check_default_store() -> None:
    dist.init_process_group("gloo", store=_compat.HashStore(), rank=0, world_size=1)
    try:
        other = _compat.default_store().clone()
        assert other.add("counted", 1) == 1 and _compat.default_store().add("counted", 1) == 2
        assert other.check(["counted"]) and not other.check(["nothing"])
        other.set("key", "value")
        assert other.compare_set("key", "", "later") == b"value" and other.compare_set("new", "", "first") == b"first"
    finally:
        dist.destroy_process_group()


def check_global_forward_hooks() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert len(_compat.global_forward_hooks) == 1
    handle.remove()
    assert not _compat.global_forward_hooks


def check_global_forward_pre_hooks() -> None:
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    assert len(_compat.global_forward_pre_hooks) == 1
    handle.remove()
    assert not _compat.global_forward_pre_hooks


def check_pytree() -> None:
    leaves, spec = _compat.pytree.tree_flatten_with_path({"a": [1, 2]})
    assert [_compat.pytree.keystr(path) for path, _ in leaves] == ["['a'][0]", "['a'][1]"]
    assert _compat.pytree.tree_unflatten([3, 4], spec) == {"a": [3, 4]}


def check_group_named() -> None:
    dist.init_process_group("fake", store=_compat.FakeStore(), rank=1, world_size=4)
    try:
        group = _compat.group_named(dist.group.WORLD.group_name)
        assert (group.rank(), group.size()) == (1, 4)
    finally:
        dist.destroy_process_group()


def check_groups_like() -> None:
    dist.init_process_group("fake", store=_compat.FakeStore(), rank=0, world_size=6)
    try:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        assert _compat.groups_like(mesh.get_group("a").group_name) == [[0, 3], [1, 4], [2, 5]]
        assert _compat.groups_like(mesh.get_group("b").group_name) == [[0, 1, 2], [3, 4, 5]]
    finally:
        dist.destroy_process_group()


def check_told_of_export() -> None:
    asked = list[bool]()

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for names in ((), (__file__,)):
                with _compat.told_of_export(lambda file, names=names: file in names):
                    asked.extend(map(bool, (torch.compiler.is_compiling(), torch.compiler.is_exporting())))
            asked.append(torch.compiler.is_compiling())
            return x + 1

    torch.export.export(Asks(), (torch.ones(2),), strict=False)
    assert asked[:5] == [False, False, True, True, True]


def test_each_name_does_what_we_use_it_for():
    for name in _compat.__all__:
        globals()[f"check_{name}"]()
