"""The transactions that move refs and append to the log. Functions of a connection that is in a write transaction.

Locks are taken in one order: objects by id, then the ref, then the row of `meta`. On SQLite, where a writer is alone,
`FOR UPDATE` compiles to nothing.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, bindparam, delete, insert, select, update

from deltastore.errors import (
    AlreadyExistsError,
    IntegrityError,
    InvalidInputError,
    RefConflictError,
    RevisionNotFoundError,
)
from deltastore.index.database import batches, now
from deltastore.index.records import Body, Publication, Published, RefKind, RefMovement
from deltastore.index.tables import commit_, commit_metadata, commit_parent, dedup, edge, meta, object_, oplog, ref

_KEYS_NAMED = 5  # so many keys go into a message


class _Place(NamedTuple):
    """Where a log entry goes."""

    epoch: int
    seq: int


class _Locked(NamedTuple):
    """An object that this transaction has locked."""

    id: int
    key: str
    state: str
    session_id: str | None


class _Target(NamedTuple):
    """What a ref is and where it points."""

    kind: str
    commit_id: str


def publish(connection: Connection, publication: Publication) -> Published:
    """Make a commit visible. See `Index.publish`."""
    landed = _landed(connection, publication.write_id)
    if landed is not None:
        return landed
    ids = _lock_objects(connection, publication)
    _connect_objects(connection, publication, ids)
    _refuse_known_commit(connection, publication.commit_id)
    head = _lock_ref(connection, publication.ref)
    if head is not None and head.kind != "branch":
        raise InvalidInputError(f"{publication.ref!r} is a {head.kind}, which does not move; commit to a branch")
    actual = None if head is None else head.commit_id
    if actual != publication.expected_head:
        raise RefConflictError(publication.ref, publication.expected_head, actual)
    place = _next_place(connection, publication.snapshot_seq)
    _insert_commit(connection, publication, ids[publication.object_key], place)
    _point(connection, publication.ref, "branch", publication.commit_id, create=head is None)
    _append(connection, place, "commit", publication.body, publication.commit_id, publication.object_key)
    mark_mirrored(connection, publication.mirrored)
    if publication.tag is not None:
        move_ref(connection, publication.tag)
    return Published(publication.commit_id, place.seq, place.epoch, already=False)


def move_ref(connection: Connection, movement: RefMovement) -> int:
    """Create, move or delete a ref. See `Index.move_ref`."""
    row = _lock_ref(connection, movement.name)
    if movement.action == "create":
        _refuse_existing(movement.name, row)
    elif row is None or row.kind != movement.kind:
        other = "" if row is None else f"; there is a {row.kind} of this name"
        raise RevisionNotFoundError(f"no {movement.kind} {movement.name!r}{other}; see `deltastore {movement.kind}`")
    elif movement.expected not in (None, row.commit_id):
        raise RefConflictError(movement.name, movement.expected, row.commit_id)
    place = _next_place(connection, None)
    if movement.action == "delete":
        connection.execute(delete(ref).where(ref.c.name == movement.name))
    else:
        new = movement.new
        if new is None or connection.scalar(select(commit_.c.id).where(commit_.c.id == new)) is None:
            raise RevisionNotFoundError(f"{movement.name!r} can't point at {new}: no such commit; see `deltastore log`")
        _point(connection, movement.name, movement.kind, new, create=movement.action == "create")
    _append(connection, place, movement.log_kind, movement.body, movement.new, None)
    mark_mirrored(connection, movement.mirrored)
    return place.seq


def mark_mirrored(connection: Connection, places: Iterable[tuple[int, int]]) -> None:
    """Note that log entries, given as (epoch, seq), are in the bucket."""
    rows = [{"at_epoch": epoch, "at_seq": seq} for epoch, seq in places]
    if rows:
        at = (oplog.c.epoch == bindparam("at_epoch"), oplog.c.seq == bindparam("at_seq"))
        connection.execute(update(oplog).where(*at).values(mirrored=True), rows)


def number_of(value: str) -> float | None:
    """The number that canonical JSON of an int or float means; None for others, and for ints that no float equals."""
    packed = json.loads(value)
    match packed:
        case {"f": str(digits)} if len(packed) == 1:
            (number,) = struct.unpack(">d", bytes.fromhex(digits))
            return None if number != number else number  # NaN equals nothing
        case {"i": str(digits)} if len(packed) == 1 and len(digits) <= 310:
            whole = int(digits)
            try:
                return float(whole) if int(float(whole)) == whole else None
            except OverflowError:
                return None
    return None


# -- objects ----------------------------------------------------------------------------------------------------------


def _lock_objects(connection: Connection, publication: Publication) -> dict[str, int]:
    """Check that reused objects are live and own ones pending here, make the latter live, and give all their ids."""
    own = {*publication.own_keys, publication.object_key}
    named = (key for pair in publication.edges for key in pair)
    reused = {*publication.reused_keys, *named, *(pack for _, pack, _ in publication.dedup)} - own
    c = object_.c
    found: dict[str, _Locked] = {}
    for id_batch in batches(_sorted_ids(connection, own | reused)):
        locked = select(c.id, c.key, c.state, c.session_id).where(c.id.in_(id_batch)).order_by(c.id).with_for_update()
        found.update((row.key, _Locked(*row)) for row in connection.execute(locked))
    lost = [key for key in reused if key not in found or found[key].state != "live"]
    if lost:
        raise IntegrityError(
            f"this commit builds on {_named(lost)}: expected live, found deleted or never published; nothing was "
            "changed. Commit again: the chunks in question are then written anew"
        )
    session_id = publication.session_id
    strange = [key for key in own if key not in found or found[key].state != "pending" or found[key].session_id != session_id]
    if strange:
        raise IntegrityError(
            f"this commit brings {_named(strange)}: expected pending in session {session_id}, found otherwise, because "
            "the session expired and was cleaned up, or never registered them; nothing was changed. Commit again"
        )
    for key_batch in batches(own):
        connection.execute(update(object_).where(c.key.in_(key_batch)).values(state="live", session_id=None))
    return {key: row.id for key, row in found.items()}


def _sorted_ids(connection: Connection, keys: Collection[str]) -> list[int]:
    query = select(object_.c.id)
    return sorted(id_ for batch in batches(keys) for id_ in connection.scalars(query.where(object_.c.key.in_(batch))))


def _named(keys: Collection[str]) -> str:
    shown = ", ".join(sorted(keys)[:_KEYS_NAMED])
    more = f" and {len(keys) - _KEYS_NAMED} more" if len(keys) > _KEYS_NAMED else ""
    return f"{'object' if len(keys) == 1 else 'objects'} {shown}{more}"


def _connect_objects(connection: Connection, publication: Publication, ids: Mapping[str, int]) -> None:
    edges = [{"source_id": ids[source], "target_id": ids[target]} for source, target in publication.edges]
    _insert_missing(connection, edge, edges)
    hints = [{"digest": digest, "object_id": ids[pack], "row": row} for digest, pack, row in publication.dedup]
    _insert_missing(connection, dedup, hints)


def _insert_missing(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert the rows whose primary key is not there yet. Thousands of rows: they go to the driver as they are."""
    if not rows:
        return
    dialect = importlib.import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
    statement = dialect.insert(table).values(dict.fromkeys(rows[0])).on_conflict_do_nothing()
    compiled = statement.compile(dialect=connection.dialect)
    order = compiled.positiontup
    connection.exec_driver_sql(str(compiled), rows if order is None else [tuple(row[key] for key in order) for row in rows])


# -- commits ----------------------------------------------------------------------------------------------------------


def _landed(connection: Connection, write_id: str) -> Published | None:
    c = commit_.c
    row = connection.execute(select(c.id, c.seq, c.epoch).where(c.write_id == write_id)).first()
    return None if row is None else Published(row.id, row.seq, row.epoch, already=True)


def _refuse_known_commit(connection: Connection, commit_id: str) -> None:
    seq = connection.scalar(select(commit_.c.seq).where(commit_.c.id == commit_id))
    if seq is not None:
        raise AlreadyExistsError(
            f"commit {commit_id} is in the store already, as log entry {seq}; see `deltastore show {commit_id[:16]}`"
        )


def _insert_commit(connection: Connection, publication: Publication, object_id: int, place: _Place) -> None:
    p = publication
    row = {
        "id": p.commit_id,
        "object_id": object_id,
        "tree": p.tree,
        "height": p.height,
        "message": p.message,
        "author": p.author,
        "created_at": p.created_at,
        "write_id": p.write_id,
        "seq": place.seq,
        "epoch": place.epoch,
    }
    connection.execute(insert(commit_), row)
    parents = [{"commit_id": p.commit_id, "position": position, "parent_id": parent} for position, parent in enumerate(p.parents)]
    if parents:
        connection.execute(insert(commit_parent), parents)
    metadata = [
        {"commit_id": p.commit_id, "key": key, "value": value, "number": number_of(value)} for key, value in p.metadata.items()
    ]
    if metadata:
        connection.execute(insert(commit_metadata), metadata)


# -- refs and log -----------------------------------------------------------------------------------------------------


def _lock_ref(connection: Connection, name: str) -> _Target | None:
    locked = select(ref.c.kind, ref.c.commit_id).where(ref.c.name == name).with_for_update()
    row = connection.execute(locked).first()
    return None if row is None else _Target(*row)


def _refuse_existing(name: str, row: _Target | None) -> None:
    if row is not None:
        raise AlreadyExistsError(
            f"{name!r} is there already: a {row.kind} at commit {row.commit_id}; delete it first or take another name"
        )


def _point(connection: Connection, name: str, kind: RefKind, commit_id: str, *, create: bool) -> None:
    moment = now(connection)
    if create:
        row = {"name": name, "kind": kind, "commit_id": commit_id, "version": 1, "updated_at": moment}
        connection.execute(insert(ref), row)
    else:
        moved = {"commit_id": commit_id, "version": ref.c.version + 1, "updated_at": moment}
        connection.execute(update(ref).where(ref.c.name == name).values(moved))


def _next_place(connection: Connection, snapshot_seq: int | None) -> _Place:
    """Take the next log number. The row stays locked until the transaction ends, so that the log has no gaps."""
    row = connection.execute(select(meta.c.epoch, meta.c.seq).where(meta.c.id == 1).with_for_update()).one()
    taken = {"seq": row.seq + 1} if snapshot_seq is None else {"seq": row.seq + 1, "snapshot_seq": snapshot_seq}
    connection.execute(update(meta).where(meta.c.id == 1).values(taken))
    return _Place(row.epoch, row.seq + 1)


def _append(connection: Connection, place: _Place, kind: str, body: Body, commit_id: str | None, commit_key: str | None) -> None:
    row = {
        "epoch": place.epoch,
        "seq": place.seq,
        "kind": kind,
        "body": body if isinstance(body, bytes) else body(place.seq),
        "commit_id": commit_id,
        "commit_key": commit_key,
        "mirrored": False,
        "created_at": now(connection),
    }
    connection.execute(insert(oplog), row)
