"""A plan out of a cache runs for what it is, whatever its file says of it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.plan import Plan
from tests.processes.models import batch, net


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is free on this machine: the last of the list."""
    free = [1e12]
    monkeypatch.setattr(sys.modules["autopar.compile"], "memory_bytes", lambda *_: free[-1])
    return free


def compiled(one: DeviceMesh | autopar.Devices, cache: Path) -> Plan:
    plan = autopar.compile(net(), one, cache=cache, example_kwargs=batch(), allow="none").plan
    assert plan is not None
    return plan


def test_what_a_kept_plan_takes_is_computed_again(one: DeviceMesh, tmp_path: Path, room: list[float]) -> None:
    honest = compiled(one, tmp_path)
    (file,) = tmp_path.glob("*.plan.json")
    lies = {"peak_bytes": {"hbm": 1, "host": 1}, "step_seconds": 9.0, "bound": 0.0, "seconds_by": {"compute": 9.0}}
    replace(honest, **lies).save(file)
    assert compiled(one, tmp_path) == replace(honest, bound=0.0)
    room.append(honest.peak_bytes["hbm"] - 1)
    replace(honest, **lies, memory_limit=room[-1]).save(file)
    with pytest.raises(autopar.Infeasible):  # though a plan of one byte lies there
        compiled(one, tmp_path)


@pytest.mark.parametrize(
    "lie",
    [{"bound": 1.0, "step_seconds": 1.0}, {"optimizer": "sgd"}, {"hardware_digest": "0" * 64}, {"outputs": "global"}],
    ids=str,
)
def test_a_kept_plan_that_contradicts_itself_is_made_anew(
    one: DeviceMesh, tmp_path: Path, room: list[float], lie: dict[str, object]
) -> None:
    honest = compiled(one, tmp_path)
    (file,) = tmp_path.glob("*.plan.json")
    replace(honest, **lie).save(file)  # type: ignore[arg-type]
    found = compiled(one, tmp_path)
    assert found.choices == honest.choices and found.peak_bytes == honest.peak_bytes
    if "outputs" not in lie:
        assert found.gap <= honest.gap and Plan.load(file) == found


def test_a_link_in_the_cache_chooses_no_file_to_be_written(one: DeviceMesh, tmp_path: Path, room: list[float]) -> None:
    cache, mine = tmp_path / "cache", tmp_path / "mine"
    honest = compiled(one, cache)
    (file,) = cache.glob("*.plan.json")
    file.unlink()
    mine.write_text("mine")
    file.symlink_to(mine)
    assert compiled(one, cache) == honest
    assert mine.read_text() == "mine" and not file.is_symlink() and Plan.load(file) == honest


def test_a_plan_that_decided_its_mesh_is_kept_for_so_many_devices(
    fake_mesh: Callable[..., DeviceMesh], tmp_path: Path, room: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = autopar.Devices(fake_mesh(data=4))
    first = compiled(devices, tmp_path)
    (file,) = tmp_path.glob("*.plan.json")
    assert first.mesh.ranks == 4 and Plan.load(file).mesh == first.mesh

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("searched again")

    with monkeypatch.context() as patched:
        patched.setattr("autopar.planner.best_mesh", never)
        assert compiled(devices, tmp_path) == first
        other = autopar.compile(net(), fake_mesh(data=2), example_kwargs=batch(), allow="none").plan
        other.save(file)  # of two devices: it counts for nothing
        with pytest.raises(AssertionError, match="searched again"):
            compiled(autopar.Devices(fake_mesh(data=4)), tmp_path)
