"""Seconds of single operators, as they were measured on a device: a small database that outlives the process.

One row per operator, its arguments, and what the time holds for (`Where`). SQLite in WAL mode: any number of processes
may read and write at once, and none loses what another wrote. Nothing in the file is believed: a row with nonsense in
it, or whose digest is not that of its values, is left out with a warning; a file that is no database is set aside; one
with anything in it but our table (a view, a trigger) is not used, as reading it could run what others wrote. Whatever
goes wrong costs measurements, never the search.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import sqlite3
import stat
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

Key = tuple[str, str]  # the operator, and its arguments: types, memory order and constants, as text

VERSION = 2
OURS = 0x61757470  # PRAGMA application_id: "autp"
BUSY_S = 30.0  # how long to wait for other processes
SHORTEST_S, LONGEST_S = 1e-10, 1e5  # of one operator
BESIDE = ("-wal", "-shm", "-journal")  # files that SQLite keeps beside a database

TABLE = f"""
CREATE TABLE operators (
    operator TEXT NOT NULL CHECK (typeof(operator) = 'text' AND length(operator) > 0),
    arguments TEXT NOT NULL CHECK (typeof(arguments) = 'text' AND length(arguments) > 0),
    device TEXT NOT NULL CHECK (typeof(device) = 'text' AND length(device) > 0),
    torch TEXT NOT NULL CHECK (typeof(torch) = 'text' AND length(torch) > 0),
    threads INTEGER NOT NULL CHECK (typeof(threads) = 'integer' AND threads >= 0),
    precision TEXT NOT NULL CHECK (typeof(precision) = 'text' AND length(precision) > 0),
    seconds REAL NOT NULL CHECK (typeof(seconds) = 'real' AND seconds > 0 AND seconds < {LONGEST_S}),
    measured_at REAL NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (operator, arguments, device, torch, threads, precision)
) WITHOUT ROWID
""".strip()
OURS_ALONE = ("table", "operators", TABLE)
FIND = """
SELECT operator, arguments, seconds, digest FROM operators
WHERE device = ? AND torch = ? AND threads = ? AND precision = ? ORDER BY operator, arguments
"""
KEEP = """
INSERT INTO operators VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET seconds = excluded.seconds, measured_at = excluded.measured_at, digest = excluded.digest
"""


class MeasuredWarning(UserWarning):
    """Something in the database of measured operators was left out; the message names the file."""


@dataclass(frozen=True, slots=True)
class Where:
    """What a measurement holds for. A row of another device, torch, number of threads or precision never matches.

    `threads`: of the processor; 0 where the device is none. `precision`: torch's setting for float32 products.
    """

    device: str
    torch: str
    threads: int
    precision: str


class _Unusable(Exception):
    """A database that is healthy, but not ours to read: the message says why."""


class _Older(Exception):
    """A database that an older autopar has written: the message says of which version."""


class Store:
    """The database in the file `path`, made at the first write. Closes at the end of a `with` block.

    A file that is no database, or a damaged one, is renamed to `<name>.broken-<number>` with a warning, and an empty
    one takes its place. Where the file cannot be used for another reason (another version, no right to read, a full
    disk), a warning says so, nothing is known and nothing is kept.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # which one was opened
        self._given_up = False

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def known(self, where: Where) -> dict[Key, float]:
        """Seconds of every operator that was measured there."""
        if not os.path.exists(self.path):
            return {}

        def read(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            return connection.execute(FIND, astuple(where)).fetchall()

        found: dict[Key, float] = {}
        wrong: list[str] = []
        for row in self._try(read, []):
            match row:
                case str(operator), str(arguments), float(seconds), digest if (
                    operator and arguments and SHORTEST_S < seconds < LONGEST_S
                    and digest == _digest((operator, arguments), where, seconds)
                ):  # fmt: skip
                    found[operator, arguments] = seconds
                case _:
                    wrong.append(repr(row))
        if wrong:
            _warn(f"{self.path}: {len(wrong)} rows make no sense and are ignored, the first is {wrong[0][:200]}")
        return found

    def keep(self, where: Where, seconds: Mapping[Key, float]) -> None:
        """Write all of it or nothing; what was known of the same operators is replaced. Raises ValueError for a time
        that is none, or a key with an empty part.
        """
        for key, value in seconds.items():
            if not (all(key) and SHORTEST_S < value < LONGEST_S):
                raise ValueError(f"{' '.join(key)}: {value} seconds cannot be kept")
        rows = [
            (*key, *astuple(where), float(value), time.time(), _digest(key, where, float(value)))
            for key, value in seconds.items()
        ]

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(KEEP, rows)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

        if rows:
            self._try(write, None)

    # --- the file ----------------------------------------------------------------------------------------------------

    def _try(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """What `work` gives; tried again after a damaged file was set aside. Every error becomes a warning."""
        for _ in range(2):
            if self._given_up:
                return otherwise
            try:
                if self._connection is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with _alone_in(self.path.parent):  # nobody takes away, beside a damaged file, what is made here
                        self._file = _inode(self.path)
                        self._connection = _opened(self.path)
                return work(self._connection)
            except _Unusable as why:
                self._give_up(str(why))
            except _Older as why:
                self._set_aside(str(why))
            except sqlite3.Error as error:
                if _is_damage(error):
                    self._set_aside(f"{error}"[:200])
                else:
                    self._give_up(f"{error}"[:200])
            except UnicodeDecodeError:  # sqlite3 quotes the schema in its error, and that is no text
                self._set_aside("its schema is damaged")
            except OSError as error:
                self._give_up(f"{error.strerror}")
        self._give_up("it was damaged twice in a row")
        return otherwise

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self.close()
        _warn(f"the measured operators in {self.path} are not used, and nothing is kept there: {why}")

    def _set_aside(self, why: str) -> None:
        """Rename the file, with the two that SQLite keeps beside it, unless another process just did."""
        self.close()
        aside = f"{self.path}.broken-{secrets.token_hex(3)}"
        try:
            with _alone_in(self.path.parent):
                if self._file is not None and _inode(self.path) == self._file:
                    os.replace(self.path, aside)
                    for tail in BESIDE:
                        with suppress(FileNotFoundError):
                            os.replace(f"{self.path}{tail}", f"{aside}{tail}")
                    _warn(f"the measured operators in {self.path} cannot be read ({why}); the file is now {aside}")
        except OSError as trouble:
            self._give_up(f"it cannot be read ({why}) and cannot be moved away ({trouble.strerror})")


def _warn(text: str) -> None:
    """On one line: what SQLite says of a damaged file has pieces of it."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    warnings.warn(shown, MeasuredWarning, stacklevel=2)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _alone_in(folder: Path) -> Generator[None]:
    """One process at a time, where the file system knows locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the extended codes share their low byte
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _opened(path: Path) -> sqlite3.Connection:
    """A connection to a database of our schema, made if there is none. Raises sqlite3.Error, OSError, _Unusable."""
    for one in (path, *(Path(f"{path}{tail}") for tail in BESIDE)):
        if one.exists() and not stat.S_ISREG(one.stat().st_mode):
            raise _Unusable(f"{one.name} is a folder, a pipe or a device, not a file")
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    connection.text_factory = _text
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        if _is_empty(connection):
            _make(connection)
        found = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if found != OURS:
            raise _Unusable("it is the database of another program")
        if 0 < version < VERSION:
            raise _Older(f"it is of version {version}, this autopar writes version {VERSION}")
        if version != VERSION:
            raise _Unusable(f"it is of version {version}, this autopar writes version {VERSION}")
        if connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall() != [OURS_ALONE]:
            raise _Unusable("it has something else in it than our table, which is not to be run")
        _waiting(lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone())
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _digest(key: Key, where: Where, seconds: float) -> str:
    """Of a row: SQLite has no check sums, and a bit that flips in a time makes another time."""
    return hashlib.sha256(repr((*key, *astuple(where), seconds)).encode(errors="surrogatepass")).hexdigest()[:16]


def _text(value: bytes) -> str:
    return value.decode(errors="replace")  # what is no UTF-8 matches nothing


def _waiting(work: Callable[[], object]) -> None:
    """Changing the journal needs the file for itself, and SQLite does not always wait for that by itself."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            work()
            return
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _is_empty(connection: sqlite3.Connection) -> bool:
    with closing(connection.execute("SELECT 1 FROM sqlite_master LIMIT 1")) as rows:
        return rows.fetchone() is None


def _make(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    if _is_empty(connection):  # nobody was quicker
        connection.execute(TABLE)
        connection.execute(f"PRAGMA application_id = {OURS}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")
