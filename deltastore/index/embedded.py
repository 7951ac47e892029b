"""The file of an embedded index: made whole or not at all, checked and upgraded when it is opened."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import uuid
from dataclasses import asdict
from pathlib import Path

from sqlalchemy import insert

from deltastore.errors import IndexSchemaError, ReadOnlyError, StorageError, StoreFullError, StoreNotFoundError
from deltastore.index.database import RECOVERY, SCHEMA, Database, translated
from deltastore.index.filesystems import refuse_network
from deltastore.index.records import Meta
from deltastore.index.tables import meta


def create_file(path: Path, first: Meta) -> None:
    """Make an index that holds nothing but its `meta` row. Whoever is first wins; an existing file stays as it is.

    Raises:
        IndexSchemaError: the place is on a network file system.
        ReadOnlyError, StoreFullError, StorageError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_network(path.parent)
        if not path.exists():
            _build(path, first)
    except OSError as error:
        raise _translate(error, path) from error


def open_file(path: Path, read_only: bool, busy_seconds: float) -> Database:
    """Open an index of the current schema; an older one is upgraded first. See `Index.open`."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreNotFoundError(f"no index at {path}; {RECOVERY}") from error
    except OSError as error:
        raise _translate(error, path) from error
    refuse_network(path.parent)
    if not read_only and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        raise ReadOnlyError(f"{path} or its folder can't be written to; open the store with read_only=True to read")
    database = Database(path, read_only=read_only, busy_seconds=busy_seconds)
    try:
        _bring_up_to_date(database)
    except BaseException:
        database.close()
        raise
    return database


def _bring_up_to_date(database: Database) -> None:
    revision = database.revision()
    if revision == SCHEMA:
        return
    if revision is None:
        raise IndexSchemaError(f"{database.path} is not a deltastore index; {RECOVERY}")
    migrate = importlib.import_module("deltastore.index.migrate")  # brings in alembic
    if not migrate.is_known(revision):
        raise IndexSchemaError(
            f"{database.path} has schema {revision}, this deltastore knows {SCHEMA}: a newer version wrote it; "
            "`pip install -U deltastore`"
        )
    if database.read_only:
        raise IndexSchemaError(
            f"{database.path} has schema {revision}, this deltastore needs {SCHEMA}; open the store once for writing, "
            "which upgrades it"
        )
    migrate.upgrade_file(database.path)


def _build(path: Path, first: Meta) -> None:
    """Make the index under another name, then give it its own, so that nobody ever sees a part of one."""
    migrate = importlib.import_module("deltastore.index.migrate")
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        part.touch(exist_ok=False)
        with translated(part):
            migrate.upgrade(migrate.sqlite_url(part))
        database = Database(part)
        try:
            with database.write() as connection:
                row = asdict(first) | {"id": 1, "features": json.dumps(first.features)}
                connection.execute(insert(meta), row)
        finally:
            database.close()
        _move_into_place(part, path)
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            part.with_name(part.name + suffix).unlink(missing_ok=True)


def _move_into_place(part: Path, path: Path) -> None:
    try:
        path.hardlink_to(part)  # unlike a renaming, it never replaces what is there
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        if not path.exists():
            part.rename(path)
    with contextlib.suppress(OSError):  # not every system opens folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _translate(error: OSError, path: Path) -> StorageError | StoreFullError | ReadOnlyError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"no space left for {path}; free some and try again ({error})")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ReadOnlyError(f"no permission for {path} ({error}); check who owns the folder, or choose another place")
    return StorageError(f"{path}: {error}; check the disk and the path", "io")
