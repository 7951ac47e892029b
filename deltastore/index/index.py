"""The index of a store: commits, refs, objects and the log, in SQL. One transaction here is the only commit point."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from sqlalchemy import false, select, update

from deltastore.errors import AlreadyExistsError, IndexSchemaError, IntegrityError, InvalidInputError
from deltastore.index import embedded, graph, objects, publish, usage
from deltastore.index.database import BUSY_SECONDS, RECOVERY, Database
from deltastore.index.records import (
    CommitRecord,
    CommitShare,
    Meta,
    ObjectKind,
    ObjectRecord,
    ObjectTotals,
    OplogRecord,
    Publication,
    Published,
    RefKind,
    RefMovement,
    RefRecord,
    RefSnapshot,
    SessionKind,
)
from deltastore.index.tables import meta, oplog, ref


class Index:
    """The index of one store, in a SQLite file. Thread-safe, a context manager, usable on both sides of a fork.

    Each method is one transaction. All of them may raise StorageError (kind "locked" may be retried), StoreFullError
    and IntegrityError (the file is damaged); those that write also ReadOnlyError.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        store_uuid: str,
        format: int,  # noqa: A002
        epoch: int,
        features: Sequence[str] = (),
        created_at: str,
    ) -> Index:
        """Make the index of a new store and open it. One that is there already, of the same store, is just opened.

        Raises:
            AlreadyExistsError: there is an index of another store.
            IndexSchemaError: the place is on a network file system.
        """
        path = Path(path).absolute()
        first = Meta(store_uuid, format, tuple(features), epoch, 0, 0, created_at)
        embedded.create_file(path, first)
        index = cls.open(path)
        found = index.meta().store_uuid
        if found != store_uuid:
            index.close()
            raise AlreadyExistsError(f"{path} is the index of store {found}, not of {store_uuid}; choose another place")
        return index

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        read_only: bool = False,
        store_uuid: str | None = None,
        busy_seconds: float = BUSY_SECONDS,
    ) -> Index:
        """Open an index; an older one is upgraded after a copy of it was put beside it.

        Args:
            path: The SQLite file.
            read_only: Writing calls raise ReadOnlyError.
            store_uuid: Whose index it has to be.
            busy_seconds: How long to wait for other writers.

        Raises:
            StoreNotFoundError: there is no such file.
            IndexSchemaError: newer than this library, of another store, not an index, or on a network file system.
            ReadOnlyError: the file can't be written to, and `read_only` was not asked for.
        """
        path = Path(path).absolute()
        database = embedded.open_file(path, read_only, busy_seconds)
        try:
            index = cls(database)
            found = index.meta().store_uuid
            if store_uuid not in (None, found):
                raise IndexSchemaError(f"{path} is the index of another store: expected {store_uuid}, found {found}; {RECOVERY}")
        except BaseException:
            database.close()
            raise
        return index

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self._database.path

    @property
    def read_only(self) -> bool:
        """Whether writing calls raise ReadOnlyError."""
        return self._database.read_only

    # -- store and refs -----------------------------------------------------------------------------------------------

    def meta(self) -> Meta:
        """What the index knows of its store."""
        with self._database.read() as connection:
            row = connection.execute(select(meta).where(meta.c.id == 1)).first()
        if row is None:
            raise IntegrityError(f"{self.path} names no store; {RECOVERY}")
        features = tuple(json.loads(row.features))
        return Meta(row.store_uuid, row.format, features, row.epoch, row.seq, row.snapshot_seq, row.created_at)

    def ref(self, name: str) -> RefRecord | None:
        """A branch or tag by name."""
        with self._database.read() as connection:
            row = connection.execute(select(ref).where(ref.c.name == name)).first()
        return None if row is None else RefRecord(**row._mapping)

    def refs(self, kind: RefKind | None = None) -> list[RefRecord]:
        """All refs, or those of a kind, sorted by name."""
        query = select(ref).order_by(ref.c.name)
        with self._database.read() as connection:
            rows = connection.execute(query if kind is None else query.where(ref.c.kind == kind))
            return [RefRecord(**row._mapping) for row in rows]

    # -- commits ------------------------------------------------------------------------------------------------------

    def commit(self, commit_id: str) -> CommitRecord | None:
        """A commit by its full id."""
        return self.commits([commit_id]).get(commit_id)

    def commits(self, ids: Iterable[str]) -> dict[str, CommitRecord]:
        """Those of the commits that are in the index, by id."""
        with self._database.read() as connection:
            return graph.commits(connection, ids)

    def find_commits(self, prefix: str, limit: int = 5) -> list[str]:
        """At most `limit` ids that begin with `prefix` (lower-case hex digits), sorted."""
        with self._database.read() as connection:
            return graph.find_commits(connection, prefix, limit)

    def first_parents(self, commit_id: str, limit: int | None = None) -> list[CommitRecord]:
        """The commit and its first-parent ancestors, newest first. Ends before the first one that is forgotten."""
        with self._database.read() as connection:
            return graph.first_parents(connection, commit_id, limit)

    def ancestors(self, commit_id: str, limit: int | None = None) -> list[CommitRecord]:
        """The commit and all its ancestors, by (height, seq) from the top."""
        with self._database.read() as connection:
            return graph.ancestors(connection, commit_id, limit)

    def history(self, ids: Iterable[str], limit: int | None = None) -> list[CommitRecord]:
        """These commits and all their ancestors, each once, newest log entry first: children come before their parents."""
        with self._database.read() as connection:
            return graph.history(connection, ids, limit)

    def parents(self) -> dict[str, tuple[str, ...]]:
        """The parents of every commit, forgotten ones among them; commits in the order of the log."""
        with self._database.read() as connection:
            return usage.parents(connection)

    def is_ancestor(self, old: str, new: str) -> bool:
        """Whether `old` is `new` or an ancestor of it."""
        with self._database.read() as connection:
            return graph.is_ancestor(connection, old, new)

    def first_parent_at(self, commit_id: str, steps: int) -> str | None:
        """The id `steps` first-parent steps back, even of a forgotten commit; None when history ends before."""
        if steps < 0:
            raise InvalidInputError(f"steps back must be 0 or more, found {steps}")
        with self._database.read() as connection:
            return graph.first_parent_at(connection, commit_id, steps)

    def find_first_parent_with(self, commit_id: str, key: str, value: str, number: float | None = None) -> str | None:
        """The nearest of the commit and its first-parent ancestors whose metadata `key` matches.

        Args:
            value: Canonical JSON, compared as text.
            number: Matches every int or float equal to it too; a bool is no number.
        """
        with self._database.read() as connection:
            return graph.find_first_parent_with(connection, commit_id, key, value, number)

    # -- objects and sessions -----------------------------------------------------------------------------------------

    def dedup(self, digests: Iterable[bytes]) -> dict[bytes, tuple[str, int]]:
        """(pack key, row) of full copies of chunks, by digest (32 bytes); only those in live packs."""
        with self._database.read() as connection:
            return objects.find_chunks(connection, digests)

    def object_states(self, keys: Iterable[str]) -> dict[str, ObjectRecord]:
        """Those of the objects that are in the index, by key."""
        with self._database.read() as connection:
            return objects.object_states(connection, keys)

    def objects_of_commit(self, commit_id: str) -> list[str]:
        """Keys of the structure, the manifests and all packs that a commit needs; its own document is not among them.

        Raises:
            RevisionNotFoundError: no such commit.
        """
        with self._database.read() as connection:
            return objects.objects_of_commit(connection, commit_id)

    def object_totals(self) -> list[ObjectTotals]:
        """Count and bytes of objects per kind and state."""
        with self._database.read() as connection:
            return objects.object_totals(connection)

    def structures(self) -> dict[str, str]:
        """The key of the structure of every commit, by commit id."""
        with self._database.read() as connection:
            return usage.structures(connection)

    def commit_shares(self) -> dict[str, CommitShare]:
        """What every commit added and what only it needs, in bytes, by commit id in the order of the log."""
        with self._database.read() as connection:
            return usage.commit_shares(connection)

    def stored_bytes(self, ids: Iterable[str]) -> dict[str, int]:
        """The bytes of all objects that each of the commits needs, shared ones in full."""
        with self._database.read() as connection:
            return usage.stored_bytes(connection, ids)

    def needed_objects(self, ids: Iterable[str]) -> dict[int, int]:
        """Row number and bytes of every object that any of the commits needs."""
        with self._database.read() as connection:
            return usage.needed_objects(connection, ids)

    def open_session(
        self,
        kind: SessionKind,
        holder: str,
        seconds: float,
        *,
        ref: str | None = None,
        pinned_commit: str | None = None,
    ) -> str:
        """Begin a session that expires after `seconds`: what it registers or pins is kept meanwhile. Returns its id."""
        with self._database.write() as connection:
            return objects.open_session(connection, kind, holder, seconds, ref, pinned_commit)

    def renew_session(self, session_id: str, seconds: float) -> None:
        """Let a session live for `seconds` from now. StorageError (kind "expired") when it is gone."""
        with self._database.write() as connection:
            objects.renew_session(connection, session_id, seconds)

    def close_session(self, session_id: str) -> None:
        """End a session; what it registered and did not publish is garbage. Closing twice is fine."""
        with self._database.write() as connection:
            objects.close_session(connection, session_id)

    def register(self, session_id: str, new_objects: Sequence[tuple[str, ObjectKind, int]]) -> None:
        """Note (key, kind, size in bytes) of objects before they are uploaded, as pending.

        Raises:
            AlreadyExistsError: a key is taken; nothing was registered.
            StorageError: of kind "expired": the session is gone.
        """
        with self._database.write() as connection:
            objects.register(connection, session_id, new_objects)

    # -- moving refs --------------------------------------------------------------------------------------------------

    def publish(self, publication: Publication) -> Published:
        """The commit point: checks its objects, makes them live, adds the commit, moves the branch, appends to the log.

        All or nothing. When a commit with this write id has landed before, that one is returned.

        Raises:
            IntegrityError: a reused object is not live, or an own one not pending in the session; they are named.
            RefConflictError: the branch is not at `expected_head`.
            AlreadyExistsError: the commit or the tag is there already.
            InvalidInputError: the ref is a tag.
        """
        with self._database.write() as connection:
            return publish.publish(connection, publication)

    def move_ref(self, movement: RefMovement) -> int:
        """Create, move or delete a branch or tag, and append to the log. Returns the log number.

        Raises:
            AlreadyExistsError: "create", and there is a ref of this name.
            RevisionNotFoundError: no such ref of this kind, or no such commit.
            RefConflictError: the ref is not at `expected`.
        """
        with self._database.write() as connection:
            return publish.move_ref(connection, movement)

    # -- log ----------------------------------------------------------------------------------------------------------

    def oplog(self, since_seq: int = 0, limit: int | None = None) -> list[OplogRecord]:
        """Log entries with numbers above `since_seq`, in order."""
        query = select(oplog).where(oplog.c.seq > since_seq).order_by(oplog.c.seq, oplog.c.epoch).limit(limit)
        with self._database.read() as connection:
            return [OplogRecord(**row._mapping) for row in connection.execute(query)]

    def unmirrored(self) -> list[OplogRecord]:
        """Log entries that are not known to be in the bucket, in order."""
        query = select(oplog).where(oplog.c.mirrored == false()).order_by(oplog.c.seq, oplog.c.epoch)
        with self._database.read() as connection:
            return [OplogRecord(**row._mapping) for row in connection.execute(query)]

    def mark_mirrored(self, places: Iterable[tuple[int, int]]) -> None:
        """Note that log entries, given as (epoch, seq), are in the bucket."""
        with self._database.write() as connection:
            publish.mark_mirrored(connection, places)

    def commits_since(self, seq: int) -> list[CommitRecord]:
        """Commits with log numbers above `seq`, in order."""
        with self._database.read() as connection:
            return graph.commits_since(connection, seq)

    def ref_snapshot(self, since_seq: int) -> RefSnapshot:
        """All refs at one moment, and the commits with log numbers above `since_seq`."""
        with self._database.read() as connection:
            place = connection.execute(select(meta.c.epoch, meta.c.seq).where(meta.c.id == 1)).one()
            refs = [RefRecord(**row._mapping) for row in connection.execute(select(ref).order_by(ref.c.name))]
            return RefSnapshot(place.epoch, place.seq, tuple(refs), tuple(graph.commits_since(connection, since_seq)))

    def set_snapshot_seq(self, seq: int) -> None:
        """Note the number of the last ref snapshot in the bucket."""
        with self._database.write() as connection:
            connection.execute(update(meta).where(meta.c.id == 1).values(snapshot_seq=seq))
