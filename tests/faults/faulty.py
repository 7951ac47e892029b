"""Faults at chosen operations of real parts: a bucket and an engine that count, and stop at the n-th operation.

    with Faults(number=7, after=True).installed(): ...     kills this process right after its seventh operation

Operations are the calls of the bucket (also those that it makes of itself: a copy reads and writes), the SQL statements, and
the end of each SQL transaction, in one count.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

from sqlalchemy import Engine, Pool, event

import deltastore.store
from deltastore.buckets import open_bucket
from deltastore.buckets.base import ObjectInfo, Upload
from deltastore.buckets.folder import FolderBucket
from deltastore.errors import StorageError


def set_in(module: ModuleType, name: str, value: Any) -> None:
    """Set something that a module uses under this name."""
    assert name in vars(module), f"{module.__name__} does not use {name}: setting it would change nothing"
    vars(module)[name] = value


class Faults:
    """Counts operations of one process, and acts at one of them.

    Args:
        action: "kill" ends the process with SIGKILL, "raise" raises StorageError (kind "injected").
        number: the operation to act at, from 1; 0 only counts.
        after: act when the operation has had its effect, not before.
        only: act at (and count) only operations whose label begins with this.
    """

    def __init__(
        self, action: Literal["kill", "raise"] = "kill", number: int = 0, *, after: bool = False, only: str = ""
    ) -> None:
        self.labels: list[str] = []  # of the operations so far
        self.fired = False
        self._action = action
        self._number = number
        self._after = after
        self._only = only
        self._lock = threading.Lock()
        self._in_thread = threading.local()

    def rearm(self, number: int, *, after: bool = False, only: str = "") -> None:
        """Count from the start, and act at another operation."""
        with self._lock:
            self.labels, self.fired, self._number, self._after, self._only = [], False, number, after, only

    def begin(self, label: str) -> int:
        """Count an operation that is about to be done; returns its number."""
        if not label.startswith(self._only):
            return -1
        with self._lock:
            self.labels.append(label)
            number = len(self.labels)
        if not self._after:
            self._act(number, f"before {label}")
        return number

    def end(self, number: int, label: str) -> None:
        """An operation is done."""
        if self._after:
            self._act(number, f"after {label}")

    @contextmanager
    def operation(self, label: str) -> Iterator[None]:
        """Around one operation."""
        number = self.begin(label)
        yield
        self.end(number, label)

    def _act(self, number: int, where: str) -> None:
        if number != self._number:
            return
        self.fired = True
        if self._action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise StorageError(f"injected fault {where}", "injected", True)

    # -- SQL ----------------------------------------------------------------------------------------------------------

    def _before_statement(self, connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        label = f"sql {' '.join(statement.split())[:60]}"
        self._in_thread.statement = self.begin(label), label

    def _after_statement(self, *arguments: Any) -> None:
        self.end(*self._in_thread.statement)

    def _before_commit(self, connection: Any) -> None:
        self._in_thread.commit = self.begin("sql COMMIT"), "sql COMMIT"

    def _after_commit(self, *arguments: Any) -> None:
        """The connection goes back to the pool: there is no event right after a COMMIT."""
        done = getattr(self._in_thread, "commit", None)
        self._in_thread.commit = None
        if done is not None and self._action == "kill":  # the pool swallows errors
            self.end(*done)

    @contextmanager
    def installed(self) -> Iterator[Faults]:
        """Every store opened inside, and all SQL, is counted."""
        listeners: list[tuple[Any, str, Callable[..., None]]] = [
            (Engine, "before_cursor_execute", self._before_statement),
            (Engine, "after_cursor_execute", self._after_statement),
            (Engine, "commit", self._before_commit),
            (Pool, "checkin", self._after_commit),
        ]
        for listener in listeners:
            event.listen(*listener)
        set_in(deltastore.store, "open_bucket", self._open_bucket)
        try:
            yield self
        finally:
            set_in(deltastore.store, "open_bucket", open_bucket)
            for listener in listeners:
                event.remove(*listener)

    def _open_bucket(self, address: str | os.PathLike[str]) -> FaultyBucket:
        return FaultyBucket(address, self)


class FaultyBucket(FolderBucket):
    """A folder whose operations are counted, and fail or kill where they are told to."""

    def __init__(self, root: str | os.PathLike[str], faults: Faults) -> None:
        super().__init__(root)
        self._faults = faults

    def put(self, uploads: Sequence[Upload]) -> None:
        with self._faults.operation(f"put {' '.join(upload.key for upload in uploads)}"):
            super().put(uploads)

    def get(self, key: str) -> bytes:
        with self._faults.operation(f"get {key}"):
            return super().get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._faults.operation(f"get_range {key}"):
            return super().get_range(key, start, length)

    def stat(self, keys: Iterable[str]) -> dict[str, ObjectInfo | None]:
        with self._faults.operation("stat"):
            return super().stat(keys)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._faults.operation(f"list {prefix}"):
            return super().list(prefix)

    def copy(self, source: str, target: str) -> None:
        with self._faults.operation(f"copy {target}"):
            super().copy(source, target)

    def delete(self, keys: Iterable[str]) -> None:
        with self._faults.operation("delete"):
            super().delete(keys)
