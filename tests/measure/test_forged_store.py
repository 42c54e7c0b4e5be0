"""Databases of measured operators that others have made: nothing of theirs runs, no time is another, nobody waits."""

from __future__ import annotations

import os
import sqlite3
import time
import warnings
from pathlib import Path
from random import Random

import pytest

from cost_models import measured
from cost_models.measured import BESIDE, TABLE, MeasuredWarning, Store
from tests.measure.test_store import HERE, MM, filled, refuses

SECONDS = {("aten.mm.default", f"(float32[{i}, {i}])"): 1e-3 * (i + 1) for i in range(60)}
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
COLUMNS = "operator, arguments, device, torch, threads, precision, seconds, measured_at, digest"

FORGED = {
    "an endless view": f"DROP TABLE operators; CREATE VIEW operators AS {ENDLESS} SELECT i AS operator, i AS arguments,"
    " i AS device, i AS torch, i AS threads, i AS precision, 1.0 AS seconds, 1.0 AS measured_at, '' AS digest FROM n",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON operators BEGIN DELETE FROM operators; END",
    "a table beside": "CREATE TABLE more (x)",
    "an index over an expression": "CREATE INDEX i ON operators (seconds + 1)",
    "a column less": "DROP TABLE operators; CREATE TABLE operators (operator TEXT, seconds REAL)",
    "no checks": f"DROP TABLE operators; CREATE TABLE operators ({COLUMNS})",
    "a virtual table": "DROP TABLE operators; CREATE VIRTUAL TABLE operators USING fts5(operator, seconds)",
    "a generated column": TABLE.replace(
        "digest TEXT NOT NULL", "digest TEXT GENERATED ALWAYS AS (hex(randomblob(999999999)))"
    ).replace("CREATE", "DROP TABLE operators; CREATE"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_what_is_not_our_table_alone_is_not_run(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "operators.sqlite3"
    filled(path, 3)
    connection = sqlite3.connect(path)
    try:
        connection.executescript(FORGED[kind])
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite cannot make it: {error}")
    finally:
        connection.close()
    began = time.monotonic()
    refuses(path, "it has something else in it than our table")
    assert time.monotonic() - began < 5


def test_an_older_database_makes_place(tmp_path: Path) -> None:
    path = tmp_path / "operators.sqlite3"
    filled(path, 3)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    with Store(path) as store:
        with pytest.warns(MeasuredWarning, match="it is of version 1, this autopar writes version 2"):
            assert store.known(HERE) == {}
        store.keep(HERE, {MM: 1e-3})
        assert store.known(HERE) == {MM: 1e-3}
    assert len([*tmp_path.glob("*.broken-*")]) >= 1


@pytest.mark.parametrize("seconds", [2e-3, 1e-300, -1.0, 0.0, 1e30, float("inf"), "2e-3", "soon", b"1"])
def test_a_row_that_somebody_has_edited_is_left_out(tmp_path: Path, seconds: object) -> None:
    path = tmp_path / "operators.sqlite3"
    filled(path, 3)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("UPDATE operators SET seconds = ? WHERE arguments = '(float32[1, 1])'", (seconds,))
    connection.close()
    with Store(path) as store, pytest.warns(MeasuredWarning, match="1 rows make no sense and are ignored"):
        assert set(store.known(HERE)) == {("aten.mm.default", f"(float32[{i}, {i}])") for i in (0, 2)}


def test_a_time_of_another_operator_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "operators.sqlite3"
    with Store(path) as store:
        store.keep(HERE, SECONDS)
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE operators SET (seconds, digest) = (SELECT seconds, digest FROM operators WHERE arguments = ?) "
            "WHERE arguments = ?", ("(float32[50, 50])", "(float32[1, 1])"),
        )  # fmt: skip
    connection.close()
    with Store(path) as store, pytest.warns(MeasuredWarning, match="1 rows make no sense"):
        assert len(store.known(HERE)) == len(SECONDS) - 1


# --- what is no file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["", *BESIDE])
def test_nobody_waits_for_a_pipe(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "operators.sqlite3"
    os.mkfifo(f"{path}{tail}")
    refuses(path, f"{path.name}{tail} is a folder, a pipe or a device, not a file")


def test_a_link_that_leads_nowhere_knows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "operators.sqlite3"
    path.symlink_to(tmp_path / "no folder" / "there")
    with Store(path) as store:
        assert store.known(HERE) == {}
        with pytest.warns(MeasuredWarning, match="unable to open database file"):
            store.keep(HERE, {MM: 1e-3})


def test_a_database_that_another_process_holds_is_waited_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "operators.sqlite3"
    filled(path, 3)
    monkeypatch.setattr(measured, "BUSY_S", 0.2)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("DELETE FROM operators")
    try:
        refuses(path, "database is locked")
    finally:
        holder.close()


# --- by the thousand -------------------------------------------------------------------------------------------------

EACH = 50


@pytest.mark.parametrize("batch", range(20))
def test_a_damaged_database_loses_times_and_changes_none(tmp_path: Path, batch: int) -> None:
    """1,000 of them: bits flipped, blocks overwritten, cut short, in the file or the one beside it."""
    whole = tmp_path / "whole.sqlite3"
    with Store(whole) as store:
        store.keep(HERE, SECONDS)
    content = whole.read_bytes()
    for seed in range(batch * EACH, (batch + 1) * EACH):
        draw, damaged = Random(seed), bytearray(content)
        at, length = draw.randrange(len(damaged)), draw.choice((1, 1, 8, 600))
        match seed % 5:
            case 0:
                del damaged[at:]
            case 1:
                damaged[at : at + length] = draw.randbytes(length)
            case 2:
                damaged[at : at + length] = bytes(length)
            case _:
                for _ in range(draw.choice((1, 1, 4, 40))):
                    damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path = tmp_path / f"{seed}.sqlite3"
        path.write_bytes(damaged)
        if seed % 7 == 0:
            Path(f"{path}{draw.choice(BESIDE)}").write_bytes(draw.randbytes(length * 64))
        with warnings.catch_warnings(record=True) as told, Store(path) as store:
            warnings.simplefilter("always")
            known = store.known(HERE)
        assert known.items() <= SECONDS.items(), seed
        for warning in told:
            assert warning.category is MeasuredWarning and str(path) in str(warning.message), seed
            assert "\n" not in str(warning.message), seed
