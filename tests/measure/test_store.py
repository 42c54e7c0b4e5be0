"""The database of measured operators: nothing is lost, nothing is believed, no damage stops a search. No torch here."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from cost_models.measured import VERSION, MeasuredWarning, Store, Where, _digest

ROOT = Path(__file__).parents[2]
HERE = Where("NVIDIA H200", "2.13.0+cu130", 0, "highest")
MM, ADD = ("aten.mm.default", "(float32[8, 8]) -> float32[8, 8]"), ("aten.add.Tensor", "(float32[8]) -> float32[8]")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "operators.sqlite3"


def files(path: Path) -> set[str]:
    return {one.name.rpartition(".broken-")[0] + ".broken" if ".broken-" in one.name else one.name
            for one in path.parent.iterdir() if not one.name.endswith(("-wal", "-shm"))}  # fmt: skip


def test_what_is_kept_is_known_in_another_process_and_to_the_last_digit(path: Path) -> None:
    with Store(path) as store:
        assert store.known(HERE) == {} and not path.exists()  # reading makes no file
        store.keep(HERE, {MM: 0.1 + 0.2, ADD: 3e-7})
    told = subprocess.run(
        [sys.executable, "-c", "import sys; from tests.measure.test_store import *; "
         "print(sorted(Store(sys.argv[1]).known(HERE).items()))", str(path)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert told.strip() == repr(sorted({MM: 0.1 + 0.2, ADD: 3e-7}.items()))


def test_a_new_time_replaces_the_old_one(path: Path) -> None:
    with Store(path) as store:
        store.keep(HERE, {MM: 1e-3})
        store.keep(HERE, {MM: 2e-3, ADD: 1e-6})
        assert store.known(HERE) == {MM: 2e-3, ADD: 1e-6}


@pytest.mark.parametrize(
    "change", [{"device": "NVIDIA H100"}, {"torch": "2.12.0+cu130"}, {"threads": 1}, {"precision": "high"}], ids=str
)
def test_what_was_measured_elsewhere_never_matches(path: Path, change: dict[str, object]) -> None:
    elsewhere = replace(HERE, **change)
    with Store(path) as store:
        store.keep(elsewhere, {MM: 1e-3})
        assert store.known(HERE) == {}
        store.keep(HERE, {MM: 2e-3})
        assert store.known(elsewhere) == {MM: 1e-3} and store.known(HERE) == {MM: 2e-3}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e6])
def test_a_time_that_is_none_is_not_kept(path: Path, seconds: float) -> None:
    with Store(path) as store:
        with pytest.raises(ValueError, match="seconds cannot be kept"):
            store.keep(HERE, {ADD: 1e-6, MM: seconds})
        assert store.known(HERE) == {}  # all or nothing
        with pytest.raises(ValueError, match="cannot be kept"):
            store.keep(HERE, {("", "(x)"): 1e-6})


# --- many at once ----------------------------------------------------------------------------------------------------

WRITE = """
import sys, time
from tests.measure.test_store import HERE, Path, Store
number, path, gate = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
Path(f"{gate}.{number}").touch()
while not gate.exists():
    time.sleep(0.001)
with Store(path) as store:
    for i in range(60):
        store.keep(HERE, {("own", f"{number} {i}"): 1e-3, ("shared", str(i)): (number + 1) * 1e-3})
"""


def write_at_once(path: Path, gate: Path, count: int = 4) -> list[str]:
    """Four processes that begin to write at the same moment; what each says on stderr."""
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "always", "-c", WRITE, str(number), str(path), str(gate)],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for number in range(count)
    ]  # fmt: skip
    until = time.monotonic() + 60
    while not all(Path(f"{gate}.{number}").exists() for number in range(count)) and time.monotonic() < until:
        time.sleep(0.01)
    gate.touch()
    said = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0] * count, said
    return said


def test_processes_that_write_at_once_lose_nothing(path: Path, tmp_path: Path) -> None:
    """The file does not exist when they begin: making it is part of the race."""
    assert write_at_once(path, tmp_path / "gate") == [""] * 4
    with Store(path) as store:
        known = store.known(HERE)
    assert len(known) == 4 * 60 + 60
    assert {known["own", f"{number} {i}"] for number in range(4) for i in range(60)} == {1e-3}
    assert {known["shared", str(i)] for i in range(60)} <= {1e-3, 2e-3, 3e-3, 4e-3}


def test_processes_that_find_a_damaged_file_set_it_aside_once(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database, and long enough to be looked at twice" * 100)
    said = write_at_once(path, tmp_path / "gate")
    assert "".join(said).count("MeasuredWarning: ") == 1
    assert files(path) == {path.name, f"{path.name}.broken"}
    with Store(path) as store:
        assert len(store.known(HERE)) == 4 * 60 + 60


def test_what_a_killed_process_had_kept_is_there(path: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE.replace("60", "100000"), "0", str(path), str(gate)], cwd=ROOT
    )
    until = time.monotonic() + 60
    with Store(path) as store:
        while len(store.known(HERE)) < 20 and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(store.known(HERE)) >= 20
        store.keep(HERE, {MM: 1e-3})
        assert store.known(HERE)[MM] == 1e-3


# --- damage ----------------------------------------------------------------------------------------------------------


def filled(path: Path, count: int = 300) -> None:
    with Store(path) as store:
        store.keep(HERE, {("aten.mm.default", f"(float32[{i}, {i}])"): 1e-3 for i in range(count)})


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def scribbled(content: bytes) -> bytes:
    return content[:4096] + b"\xff" * 4096 * 3 + content[4096 * 4 :]


def headless(content: bytes) -> bytes:
    return b"\0" * 100 + content[100:]


def replaced(_: bytes) -> bytes:
    return b"garbage" * 99


@pytest.mark.parametrize("damage", [cut, scribbled, headless, replaced])
def test_a_damaged_file_is_set_aside_and_the_next_search_begins_anew(path: Path, damage) -> None:
    filled(path)
    broken = damage(path.read_bytes())
    path.write_bytes(broken)
    with Store(path) as store:
        with pytest.warns(
            MeasuredWarning, match=rf"in {path} cannot be read \(.*\); the file is now {path}.broken-"
        ) as told:
            assert store.known(HERE) == {}
        assert len(told) == 1
        store.keep(HERE, {MM: 1e-3})
        assert store.known(HERE) == {MM: 1e-3}
    (aside,) = path.parent.glob("*.broken-*")
    assert aside.read_bytes() == broken


def test_an_empty_file_is_an_empty_database(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with Store(path) as store:
        assert store.known(HERE) == {}
        store.keep(HERE, {MM: 1e-3})
        assert store.known(HERE) == {MM: 1e-3}


def refuses(path: Path, why: str) -> None:
    """One warning, nothing known, nothing kept."""
    with Store(path) as store:
        with pytest.warns(MeasuredWarning, match=rf"in {path} are not used, and nothing is kept there: {why}") as told:
            store.keep(HERE, {MM: 1e-3})
            assert store.known(HERE) == {}
        assert len(told) == 1


def test_a_file_of_another_version_is_left_alone(path: Path) -> None:
    filled(path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    refuses(path, f"it is of version {VERSION + 1}, this autopar writes version {VERSION}")
    assert path.read_bytes() == before and files(path) == {path.name}


def test_the_database_of_another_program_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE operators (name TEXT)")
    connection.close()
    before = path.read_bytes()
    refuses(path, "it is the database of another program")
    assert path.read_bytes() == before


def test_a_folder_in_its_place_is_told(path: Path) -> None:
    path.mkdir(parents=True)
    refuses(path, "operators.sqlite3 is a folder, a pipe or a device, not a file")


def test_a_file_in_the_place_of_its_folder_is_told(path: Path) -> None:
    path.parent.write_text("")
    refuses(path, "File exists")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_told(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o500)
    refuses(path, "unable to open database file")


# --- nonsense --------------------------------------------------------------------------------------------------------

ROW = (*MM, *astuple(HERE), 1e-3, 0.0, _digest(MM, HERE, 1e-3))


def with_value(place: int, value: object) -> tuple[object, ...]:
    return (*ROW[:place], value, *ROW[place + 1 :])


NONSENSE = [with_value(0, ""), with_value(1, ""), with_value(1, b"\xff\xfe"), with_value(6, -1.0), with_value(6, 0.0),
            with_value(6, float("inf")), with_value(6, "soon"), with_value(6, b"1"), with_value(6, 1e9)]  # fmt: skip
PUT = "INSERT INTO operators VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


@pytest.mark.parametrize("row", [*NONSENSE, with_value(0, None), with_value(2, None), with_value(6, None)], ids=repr)
def test_the_table_itself_refuses_nonsense(path: Path, row: tuple[object, ...]) -> None:
    filled(path, 1)
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="constraint failed"):
        connection.execute(PUT, row)
    connection.close()


def test_rows_of_nonsense_are_left_out_with_one_warning(path: Path) -> None:
    filled(path, 3)
    for number, row in enumerate(NONSENSE):
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA ignore_check_constraints = ON")
        key = [f"{part}{number}" if part and isinstance(part, str) else part for part in row[:2]]
        connection.execute(PUT, (*key, *row[2:]))
        connection.close()
    with Store(path) as store:
        with pytest.warns(
            MeasuredWarning, match=rf"{path}: {len(NONSENSE)} rows make no sense and are ignored"
        ) as told:
            assert len(store.known(HERE)) == 3
        assert len(told) == 1
