"""Objects of the bucket, the sessions that write or pin them, and what keeps them alive. Functions of a connection."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, delete, func, insert, select, update

from deltastore.errors import AlreadyExistsError, RevisionNotFoundError, StorageError
from deltastore.index.database import batches, now
from deltastore.index.records import ObjectKind, ObjectRecord, ObjectTotals, SessionKind
from deltastore.index.tables import commit_, dedup, edge, lease, object_


def open_session(
    connection: Connection, kind: SessionKind, holder: str, seconds: float, ref: str | None, pinned_commit: str | None
) -> str:
    """A new session, alive for `seconds`."""
    session_id = uuid.uuid4().hex
    row = {
        "id": session_id,
        "kind": kind,
        "holder": holder,
        "ref": ref,
        "pinned_commit": pinned_commit,
        "created_at": now(connection),
        "expires_at": now(connection, seconds),
    }
    connection.execute(insert(lease), row)
    return session_id


def renew_session(connection: Connection, session_id: str, seconds: float) -> None:
    """Let a session live for `seconds` from now."""
    statement = update(lease).where(lease.c.id == session_id).values(expires_at=now(connection, seconds))
    if connection.execute(statement).rowcount == 0:
        raise _expired(session_id)


def close_session(connection: Connection, session_id: str) -> None:
    """End a session. What it registered and did not publish is garbage from now on."""
    connection.execute(delete(lease).where(lease.c.id == session_id))


def register(connection: Connection, session_id: str, objects: Sequence[tuple[str, ObjectKind, int]]) -> None:
    """Note (key, kind, size) of objects that are about to be uploaded."""
    if connection.scalar(select(lease.c.id).where(lease.c.id == session_id).with_for_update(read=True)) is None:
        raise _expired(session_id)
    if there := object_states(connection, [key for key, _, _ in objects]):
        raise AlreadyExistsError(
            f"object {next(iter(there))} is registered already, and names are never used twice; commit again"
        )
    moment = now(connection)
    rows = [
        {"key": key, "kind": kind, "state": "pending", "size": size, "session_id": session_id, "created_at": moment}
        for key, kind, size in objects
    ]
    if rows:
        connection.execute(insert(object_), rows)


def object_states(connection: Connection, keys: Iterable[str]) -> dict[str, ObjectRecord]:
    """Those of the objects that are in the index."""
    c = object_.c
    query = select(c.key, c.kind, c.state, c.size, c.session_id, c.created_at)
    return {
        row.key: ObjectRecord(*row)
        for batch in batches(dict.fromkeys(keys))
        for row in connection.execute(query.where(c.key.in_(batch)))
    }


def objects_of_commit(connection: Connection, commit_id: str) -> list[str]:
    """The keys of all that a commit keeps alive beyond its own document."""
    start = connection.scalar(select(commit_.c.object_id).where(commit_.c.id == commit_id))
    if start is None:
        raise RevisionNotFoundError(f"commit {commit_id} is not in the index; see `deltastore log`")
    reached = select(edge.c.target_id).where(edge.c.source_id == start).cte("reached", recursive=True)
    reached = reached.union(select(edge.c.target_id).where(edge.c.source_id == reached.c.target_id))
    query = select(object_.c.key).where(object_.c.id.in_(select(reached.c.target_id))).order_by(object_.c.id)
    return list(connection.scalars(query))


def object_totals(connection: Connection) -> list[ObjectTotals]:
    """Count and bytes per kind and state."""
    c = object_.c
    query = select(c.kind, c.state, func.count(), func.sum(c.size)).group_by(c.kind, c.state).order_by(c.kind, c.state)
    return [ObjectTotals(kind, state, count, int(size)) for kind, state, count, size in connection.execute(query)]


def find_chunks(connection: Connection, digests: Iterable[bytes]) -> dict[bytes, tuple[str, int]]:
    """(pack key, row) of full copies of chunks, in packs that are live."""
    query = select(dedup.c.digest, object_.c.key, dedup.c.row).join(object_, object_.c.id == dedup.c.object_id)
    return {
        bytes(digest): (key, row)
        for batch in batches(dict.fromkeys(digests))
        for digest, key, row in connection.execute(query.where(dedup.c.digest.in_(batch), object_.c.state == "live"))
    }


def _expired(session_id: str) -> StorageError:
    return StorageError(f"session {session_id} has expired or is closed; commit again", "expired")
