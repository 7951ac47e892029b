"""The SQLite file of an index: connections, transactions, and its errors in our words."""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, NullPool, Pool, QueuePool, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError

from deltastore.errors import (
    DeltaStoreError,
    IntegrityError,
    InvalidInputError,
    ReadOnlyError,
    StorageError,
    StoreFullError,
)

SCHEMA = "0001"  # the revision in migrations/ that this code works with
VERSION_TABLE = "deltastore_alembic_version"
BUSY_SECONDS = 60.0
RECOVERY = "every object is still in the bucket: put the index back from a backup"  # what to do about a lost index
FORK_SECONDS = 5.0  # so long a fork waits for the transactions of other threads

T = TypeVar("T")

_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_inherited: list[Pool] = []  # connections of the parent process: kept, so that this process never closes them


class Database:
    """A pool of connections to one SQLite file. Thread-safe; usable on both sides of a fork.

    Every method raises our own errors: StorageError (kind "locked" is retryable), StoreFullError, IntegrityError,
    ReadOnlyError.
    """

    def __init__(self, path: Path, *, read_only: bool = False, busy_seconds: float = BUSY_SECONDS) -> None:
        self.path = path
        self.read_only = read_only
        self._busy_seconds = busy_seconds
        # Even a reader of a WAL database writes the file of shared memory beside it. Where it can't and nobody is
        # writing, SQLite may take the file as it stands; each reading then looks anew, because a writer may come.
        written = os.access(path.parent, os.W_OK) or path.with_name(path.name + "-wal").exists()
        immutable = read_only and not written
        self._mode = "mode=ro&immutable=1" if immutable else "mode=ro" if read_only else "mode=rw"
        pool: dict[str, object] = {"poolclass": NullPool} if immutable else {"poolclass": QueuePool, "max_overflow": -1}
        self._engine = create_engine("sqlite://", creator=self._connect, hide_parameters=True, **pool)
        self._pid = os.getpid()
        _databases.add(self)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?{self._mode}",
            uri=True,
            timeout=self._busy_seconds,
            isolation_level=None,  # BEGIN is ours
            check_same_thread=False,  # the pool hands a connection to one thread at a time
        )
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
            if not self.read_only:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that reads: everything in it sees one moment."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write; there is one at a time. An exception undoes all of it."""
        if self.read_only:
            raise ReadOnlyError(f"{self.path} was opened read-only; open the store without read_only to write")
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection]:
        with _gate.transaction():
            self._notice_fork()
            with translated(self.path), self._engine.begin() as connection:
                connection.exec_driver_sql(begin)
                yield connection

    def revision(self) -> str | None:
        """The schema revision in the file; None when it is no index."""
        with self.read() as connection:
            return revision_of(connection)

    def close(self) -> None:
        """Close the connections."""
        self._notice_fork()
        self._engine.dispose()

    def close_idle(self) -> None:
        """Close the connections that nobody is using just now."""
        if os.getpid() == self._pid:
            self._engine.dispose()

    def _notice_fork(self) -> None:
        if os.getpid() != self._pid:
            _inherited.append(self._engine.pool)
            self._engine.dispose(close=False)
            self._pid = os.getpid()


class _ForkGate:
    """Keeps forks and transactions apart.

    SQLite has mutexes and a table of locks per process. A child would inherit both as another thread's transaction left
    them: it would hang, or find the file locked for ever. And a fork without open connections leaves nothing to inherit
    (https://sqlite.org/howtocorrupt.html, 2.6). So a fork waits until no other thread is in a transaction, keeps new ones
    waiting, and closes what is idle.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, int] = {}  # open transactions per thread
        self._forks = 0

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Around a transaction of this thread."""
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._forks or thread in self._inside)
            self._inside[thread] = self._inside.get(thread, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[thread] -= 1
                if not self._inside[thread]:
                    del self._inside[thread]
                    self._changed.notify_all()

    def before_fork(self) -> None:
        """Wait for other threads, but not for ever: one may be waiting for another process."""
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: self._inside.keys() <= {threading.get_ident()}, FORK_SECONDS)
        for database in list(_databases):
            database.close_idle()

    def after_in_parent(self) -> None:
        """Let transactions go on."""
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def after_in_child(self) -> None:
        """Other threads are gone; one of them may have held the lock."""
        thread = threading.get_ident()
        self._changed = threading.Condition()
        self._inside = {thread: self._inside[thread]} if thread in self._inside else {}
        self._forks = 0


_gate = _ForkGate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_gate.before_fork, after_in_parent=_gate.after_in_parent, after_in_child=_gate.after_in_child)


def revision_of(connection: Connection) -> str | None:
    """The schema revision of a database; None when it is no index of ours."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return None if found is None else str(found)


def now(connection: Connection, plus_seconds: float = 0.0) -> str:
    """The time by the clock of the database, which for SQLite is that of this machine: UTC, microseconds, `Z`."""
    assert connection.dialect.name == "sqlite"
    moment = datetime.now(UTC) + timedelta(seconds=plus_seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def batches(values: Iterable[T], size: int = 900) -> Iterator[list[T]]:
    """Cut values into runs that fit one statement: SQLite may be built to take no more than 999 bound values."""
    iterator = iter(values)
    while batch := list(islice(iterator, size)):
        yield batch


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the file system into ours."""
    try:
        yield
    except DBAPIError as error:
        raise _translate(error.orig or error, path) from error
    except sqlite3.Error as error:
        raise _translate(error, path) from error
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidInputError(f"a value can't be stored in the index: {error}") from error


def _translate(error: BaseException, path: Path) -> DeltaStoreError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the rest are details of the primary code
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageError(f"{path} is locked by another process that is writing; try again ({error})", "locked", True)
    if code == sqlite3.SQLITE_FULL:
        return StoreFullError(f"no space left for {path}; nothing was changed. Free some space and try again ({error})")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT):
        return IntegrityError(f"{path} is damaged ({error}); {RECOVERY}")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return ReadOnlyError(
            f"{path} can't be written to ({error}); check its permissions and those of its folder, or open it read-only"
        )
    if code == sqlite3.SQLITE_CONSTRAINT:
        return IntegrityError(f"{path} refused a change that would break its references ({error}); nothing was changed")
    if code == sqlite3.SQLITE_TOOBIG:
        return InvalidInputError(f"a value is too large for the index ({error})")
    return StorageError(f"{path}: {error}; check the disk, and that the folder exists and is accessible", "io")
