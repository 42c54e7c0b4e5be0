"""A mesh of one process needs no launcher; and whatever else of a parallel module one process can show."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.attach.tensors import as_dtensor, layout_of, piece_as, piece_of, placements_of
from autopar.ir.layout import REPLICATE, Shard
from autopar.ir.mesh import Mesh
from autopar.machine.device import hardware_or_here, memory_bytes
from autopar.trace.calls import by_name
from cost_models.hardware import Hardware
from tests.processes.compare import adamw, near, same_gradients, same_state, same_steps, sgd
from tests.processes.models import Logits, Net, Several, batch, net


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_training_needs_no_launcher(one: DeviceMesh) -> None:
    plain = net()
    parallel = autopar.compile(plain, one)
    losses = same_steps(plain, parallel, batch())
    assert losses[-1] < losses[0]
    assert parallel.plan.comm_bytes == {} and parallel.plan.hardware == "cpu-gloo"


def test_without_axes_a_mesh_has_one_for_the_data() -> None:
    mesh = autopar.init_mesh("cpu")
    try:
        assert mesh.mesh_dim_names == ("data",) and mesh.size() == 1
        with pytest.raises(
            ValueError, match=r"the mesh 2x4 has 8 ranks, but 1 process runs; start 8 processes \(torchrun"
        ):
            autopar.init_mesh("cpu", data=2, tensor=4)
    finally:
        dist.destroy_process_group()


def test_the_group_of_a_mesh_of_devices_serves_their_hosts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL alone refuses parameters on the host: they could be neither clipped nor put together."""
    begun: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: begun.append(backend))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(autopar.machine.device, "init_device_mesh", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    autopar.init_mesh("cuda", data=1)
    autopar.init_mesh("cpu", data=1)
    assert begun == ["cpu:gloo,cuda:nccl", "gloo"]


@pytest.mark.parametrize("made_first", [True, False], ids=["optimizer first", "call first"])
@pytest.mark.parametrize(("make", "options"), [(sgd, {}), (adamw, {"fused": True}), (adamw, {"foreach": True})])
def test_optimizers_made_before_the_plan_train_too(one: DeviceMesh, make, options, made_first: bool) -> None:
    plain = net()
    parallel = autopar.compile(plain, one)
    if not made_first:
        parallel(**batch()), plain(**batch())
    optimizers = make(plain.parameters(), **options), make(parallel.parameters(), **options)
    same_steps(plain, parallel, batch(), optimizers, steps=2)


def test_parameters_are_taken_over_when_the_plan_is_made(one: DeviceMesh) -> None:
    """Until the first call, values may still be loaded into the user's model; from then on the two are apart."""
    plain = net(seed=1)
    parallel = autopar.compile(plain, one)
    plain.load_state_dict(net(seed=2).state_dict())
    with pytest.warns(UserWarning, match="were written to between autopar.compile and the parallel module"):
        near(parallel(**batch()), net(seed=2)(**batch()), 1e-5, "loss")
    with torch.no_grad():
        plain.head.bias.add_(1)
    near(parallel.head.bias, net(seed=2).head.bias, 0.0, "a parameter")


def test_loading_before_the_plan_leaves_the_users_model_alone(one: DeviceMesh) -> None:
    plain, other = net(seed=1), net(seed=2)
    for state in (other.state_dict(), autopar.compile(other, one).state_dict()):  # plain tensors, DTensors
        parallel = autopar.compile(plain, one)
        parallel.load_state_dict(state)
        same_state(other, parallel, 0.0)
        same_state(net(seed=1), plain, 0.0)
        near(parallel(**batch()), net(seed=2)(**batch()), 1e-5, "loss")


def test_assigning_a_state_dict_keeps_dtensors(one: DeviceMesh) -> None:
    parallel = autopar.compile(net(seed=1), one)
    parallel(**batch())
    parallel.load_state_dict(net(seed=2).state_dict(), assign=True)
    assert all(isinstance(parameter, DTensor) for parameter in parallel.parameters())


def test_a_part_can_be_loaded(one: DeviceMesh) -> None:
    parallel = autopar.compile(net(seed=1), one, example_kwargs=batch())
    parallel.head.load_state_dict(net(seed=2).head.state_dict())
    near(parallel.head.weight, net(seed=2).head.weight, 0.0, "a part")
    near(parallel.second.weight, net(seed=1).second.weight, 0.0, "the rest")


def test_a_copy_of_the_users_class_with_its_methods(one: DeviceMesh) -> None:
    plain = net()
    parallel = autopar.compile(plain, one)
    assert isinstance(parallel, Net) and type(parallel).__name__ == "ParallelNet" and type(plain) is Net
    assert parallel.describe() == plain.describe()
    parallel.name_of_user = "changed"
    assert plain.name_of_user == "mine"
    assert parallel.third.weight is parallel.first.weight
    assert str(parallel).startswith("ParallelNet(")
    for told in ("plan", "program", "graph_module"):
        with pytest.raises(RuntimeError, match="there is no plan yet: call the module once"):
            getattr(parallel, told)


def test_the_code_says_where_each_line_is_from(one: DeviceMesh) -> None:
    parallel = autopar.compile(net(), one, example_kwargs=batch())
    lines = [line for line in parallel.program.code.splitlines() if " = torch.ops.aten" in line or "einsum(" in line]
    assert lines and all("  # " in line for line in lines)
    assert any("# first; linear.py:" in line and "[_, _]" in line for line in lines)


def test_ties_survive_to_empty(one: DeviceMesh) -> None:
    with torch.device("meta"):
        empty = Net()
        shapes = {name: torch.empty_like(value, device="meta") for name, value in batch().items()}
    assert empty.third.weight is empty.first.weight
    parallel = autopar.compile(empty, one, example_kwargs=shapes)
    with pytest.raises(RuntimeError, match=r"parameter \S+ is on the meta device .* call to_empty\(device=...\)"):
        parallel(**batch())
    parallel.to_empty(device="cpu")
    assert parallel.third.weight is parallel.first.weight and parallel.scale.requires_grad is False
    plain = net()
    parallel.load_state_dict(plain.state_dict())
    same_steps(plain, parallel, batch(), steps=2)


def test_gradients_of_some_outputs_only(one: DeviceMesh) -> None:
    plain, data = net(Several), batch()
    parallel = autopar.compile(plain, one, outputs="global")
    made, wanted = parallel(data, scale=3.0), plain(data, scale=3.0)
    assert isinstance(made["logits"], Tensor) and not isinstance(made["logits"], DTensor)
    made["pair"][0].sum().backward(), wanted["pair"][0].sum().backward()
    same_gradients(plain, parallel)
    for given, options in ((data, {"scale": 2.0}), (data, {"scale": 0.5}), ({**data, "z": data["x"]}, {"scale": 0.5})):
        made, wanted = parallel(given, **options), plain(given, **options)  # other arguments are other programs
        near(made["logits"], wanted["logits"], 1e-5, "logits")
    with pytest.raises(TypeError, match="missing a required argument"):
        parallel()


def test_a_model_without_trainable_parameters_runs(one: DeviceMesh) -> None:
    plain = net(Logits).requires_grad_(False).eval()
    parallel = autopar.compile(plain, one)
    near(parallel(batch()["x"]), plain(batch()["x"]), 1e-5, "logits", 1e-6)


def test_a_parameter_without_elements_takes_no_memory(one: DeviceMesh) -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.linear = nn.Parameter(torch.empty(0, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.cat([x, self.prompt])).square().sum()

    plain, x = Prompted(), torch.randn(3, 4)
    parallel = autopar.compile(plain, one)
    plain(x).backward(), parallel(x).backward()
    near(parallel.linear.weight.grad, plain.linear.weight.grad, 1e-5, "gradient")
    assert parallel.prompt.grad is None or parallel.prompt.grad.shape == (0, 4)


def test_a_cache_is_used_and_mended(one: DeviceMesh, tmp_path: Path) -> None:
    """With memory left to what is free, too, which is never the same twice."""
    first = autopar.compile(net(), one, cache=tmp_path, example_kwargs=batch())
    (file,) = tmp_path.glob("*.plan.json")
    before = file.stat().st_mtime_ns
    again = autopar.compile(net(), one, cache=tmp_path, example_kwargs=batch())
    assert again.plan == first.plan and file.stat().st_mtime_ns == before
    file.write_text(file.read_text()[:-100])
    mended = autopar.compile(net(), one, cache=tmp_path, example_kwargs=batch()).plan
    assert mended.choices == first.plan.choices and autopar.Plan.load(file) == mended
    replace(mended, memory_limit=1e5).save(file)  # found when little was free: there may be a better one now
    autopar.compile(net(), one, cache=tmp_path, example_kwargs=batch())
    assert autopar.Plan.load(file).memory_limit != 1e5
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "nothing else is left there"


def test_one_call_has_one_spelling() -> None:
    def forward(x, y, *, flag=False, **more):
        raise AssertionError

    def loose(*args, **kwargs):
        raise AssertionError

    wanted = ((), {"x": 1, "y": 2, "flag": True, "z": 3})
    assert by_name(forward, (1,), {"y": 2, "flag": True, "z": 3}) == wanted
    assert by_name(forward, (1, 2), {"flag": True, "z": 3}) == wanted
    assert by_name(loose, (1, 2), {"z": 3}) == ((1, 2), {"z": 3})


def test_pieces_put_together_are_the_whole() -> None:
    value, mesh = torch.arange(48.0).reshape(8, 6), Mesh(("a", "b"), (2, 2))
    for layout in ((Shard(0), Shard(0)), (Shard(1), Shard(0)), (REPLICATE, Shard(1)), (REPLICATE, REPLICATE)):
        pieces = {(i, j): piece_of(value, layout, mesh, (i, j)) for i in range(2) for j in range(2)}
        match layout:
            case (Shard(0), Shard(0)):
                made = torch.cat([pieces[0, 0], pieces[0, 1], pieces[1, 0], pieces[1, 1]])
            case (Shard(1), Shard(0)):
                made = torch.cat([torch.cat([pieces[i, 0], pieces[i, 1]]) for i in range(2)], 1)
            case (_, Shard(1)):
                made = torch.cat([pieces[1, 0], pieces[1, 1]], 1)
            case _:
                made = pieces[1, 1]
        assert torch.equal(made, value)
        assert all(piece.is_contiguous() for piece in pieces.values())


def test_pieces_lie_where_torch_puts_them(fake_mesh) -> None:
    from torch.distributed.tensor import distribute_tensor

    device_mesh, value = fake_mesh(data=2, tensor=2), torch.arange(48.0).reshape(8, 6)
    for layout in ((Shard(0), Shard(0)), (Shard(1), Shard(0)), (REPLICATE, Shard(1))):
        theirs = distribute_tensor(value, device_mesh, placements_of(layout), src_data_rank=None)
        assert layout_of(theirs) == layout
        ours = piece_as(value, theirs)
        assert torch.equal(ours.to_local(), theirs.to_local()) and ours.stride() == theirs.stride()
        assert as_dtensor(ours.to_local(), value.shape, layout, device_mesh).placements == theirs.placements


@pytest.mark.parametrize(
    ("memory", "wanted"),
    [
        ("70GiB", 70 * 2**30),
        (" 512 MB ", 512e6),
        ("1.5kib", 1536),
        (1000, 1000),
        (0.5, 40e9),
        (1.0, 80e9),
        (2.0, 2.0),
        (None, 80e9),
    ],
)
def test_sizes_of_memory(memory, wanted: float) -> None:
    assert memory_bytes(memory, Hardware.load("h100-sxm")) == wanted


@pytest.mark.parametrize("memory", ["70", "GiB", ".GiB", "1.2.3GiB", "-1GiB", "0B", 0, -5, 0.0, True, "7 parsecs"])
def test_what_is_no_size_of_memory(memory) -> None:
    with pytest.raises(ValueError, match=r"memory .* for example 70GiB"):
        memory_bytes(memory, Hardware.load("h100-sxm"))


def test_hardware_is_named_given_or_found(tmp_path: Path) -> None:
    given = Hardware.load("h100-sxm")
    assert hardware_or_here(given, "cpu") is given
    assert hardware_or_here("h100-sxm", "cpu") == given
    given.save(tmp_path / "mine.toml")
    assert hardware_or_here(tmp_path / "mine.toml", "cpu") == given
    with pytest.raises(ValueError, match=r"no hardware profile 'h1000'; did you mean h100-sxm\? known profiles: .*rtx"):
        hardware_or_here("h1000", "cpu")


def test_an_offline_plan_runs_without_a_search(
    one: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    autopar.compile(net(), one, example_kwargs=batch()).plan.save(tmp_path / "plan.json")

    def no_search(*args, **kwargs):
        raise AssertionError("searched")

    monkeypatch.setattr(sys.modules["autopar.planner"], "answer", no_search)
    plain = net()
    parallel = autopar.compile(plain, one, plan=tmp_path / "plan.json")
    same_steps(plain, parallel, batch(), steps=2)
    twin = copy.deepcopy(plain)
    assert type(twin) is Net
