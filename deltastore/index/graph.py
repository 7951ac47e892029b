"""Questions about commits and their ancestry. Functions of a connection; `Index` brings the transaction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import CTE, Connection, Select, literal, or_, select

from deltastore.index.database import batches
from deltastore.index.records import CommitRecord
from deltastore.index.tables import commit_, commit_metadata, commit_parent, object_

UNBOUNDED = (1 << 31) - 1  # no history is that long


def commits(connection: Connection, ids: Iterable[str]) -> dict[str, CommitRecord]:
    """Those of the commits that are in the index."""
    found: dict[str, CommitRecord] = {}
    for batch in batches(dict.fromkeys(ids)):
        found.update(_load(connection, batch))
    return found


def find_commits(connection: Connection, prefix: str, limit: int) -> list[str]:
    """Ids that begin with lower-case hex digits, sorted."""
    within = commit_.c.id.between(prefix, prefix + "g")  # "g" sorts after every hex digit
    return list(connection.scalars(select(commit_.c.id).where(within).order_by(commit_.c.id).limit(limit)))


def commits_since(connection: Connection, seq: int) -> list[CommitRecord]:
    """Commits whose log number is above `seq`, in the order of the log."""
    found = _load(connection, select(commit_.c.id).where(commit_.c.seq > seq))
    return sorted(found.values(), key=lambda record: (record.seq, record.epoch))


def first_parents(connection: Connection, commit_id: str, limit: int | None) -> list[CommitRecord]:
    """The commit and its first-parent ancestors, newest first, up to the first one that is forgotten."""
    bound = UNBOUNDED if limit is None else min(limit, UNBOUNDED) - 1
    if bound < 0:
        return []
    found = _load(connection, select(_first_parent_chain(commit_id, bound).c.id))
    return list(_walk(found, commit_id))


def ancestors(connection: Connection, commit_id: str, limit: int | None) -> list[CommitRecord]:
    """The commit and all its ancestors, highest and newest first."""
    within = commit_.c.id.in_(select(_ancestry(commit_id).c.id))
    newest = select(commit_.c.id).where(within).order_by(commit_.c.height.desc(), commit_.c.seq.desc()).limit(limit)
    return sorted(_load(connection, newest).values(), key=lambda record: (record.height, record.seq), reverse=True)


def history(connection: Connection, ids: Iterable[str], limit: int | None) -> list[CommitRecord]:
    """The commits and all their ancestors, each once, by log entry from the newest: children before their parents."""
    within: set[str] = set()
    for batch in batches(dict.fromkeys(ids)):
        within.update(connection.scalars(select(_ancestry(*batch).c.id)))
    c = commit_.c
    queries = (select(c.epoch, c.seq, c.id).where(c.id.in_(batch)) for batch in batches(within))
    places = sorted((tuple(row) for query in queries for row in connection.execute(query)), reverse=True)
    newest = [place[2] for place in places[: None if limit is None else max(0, limit)]]
    found = commits(connection, newest)
    return [found[id_] for id_ in newest]


def is_ancestor(connection: Connection, old: str, new: str) -> bool:
    """Whether `old` is `new` or one of its ancestors."""
    ancestry = _ancestry(new)
    return connection.scalar(select(ancestry.c.id).where(ancestry.c.id == old).limit(1)) is not None


def first_parent_at(connection: Connection, commit_id: str, steps: int) -> str | None:
    """The id that many first-parent steps back; None when history ends before. It may be one that is forgotten."""
    if steps > UNBOUNDED:
        return None
    chain = _first_parent_chain(commit_id, steps)
    return connection.scalar(select(chain.c.id).where(chain.c.depth == steps))


def find_first_parent_with(connection: Connection, commit_id: str, key: str, value: str, number: float | None) -> str | None:
    """The nearest of the commit and its first-parent ancestors whose metadata `key` has this value or number."""
    matches = commit_metadata.c.value == value
    if number is not None and not math.isnan(number):
        matches = or_(matches, commit_metadata.c.number == number)
    chain = _first_parent_chain(commit_id, UNBOUNDED)
    query = select(chain.c.id).join(commit_metadata, commit_metadata.c.commit_id == chain.c.id)
    return connection.scalar(query.where(commit_metadata.c.key == key, matches).order_by(chain.c.depth).limit(1))


def _first_parent_chain(commit_id: str, bound: int) -> CTE:
    """(id, depth) of the first-parent ancestors at most `bound` steps back."""
    chain = select(literal(commit_id).label("id"), literal(0).label("depth")).cte("chain", recursive=True)
    step = select(commit_parent.c.parent_id, chain.c.depth + 1).where(
        commit_parent.c.commit_id == chain.c.id, commit_parent.c.position == 0, chain.c.depth < bound
    )
    return chain.union_all(step)


def _ancestry(*ids: str) -> CTE:
    """The ids of the commits and all their ancestors."""
    start = select(literal(ids[0]).label("id")) if len(ids) == 1 else select(commit_.c.id).where(commit_.c.id.in_(ids))
    ancestry = start.cte("ancestry", recursive=True)
    return ancestry.union(select(commit_parent.c.parent_id).where(commit_parent.c.commit_id == ancestry.c.id))


def _walk(found: dict[str, CommitRecord], commit_id: str) -> Iterator[CommitRecord]:
    record = found.get(commit_id)
    while record is not None:
        yield record
        record = found.get(record.parents[0]) if record.parents else None


def _load(connection: Connection, ids: Select[Any] | Sequence[str]) -> dict[str, CommitRecord]:
    parents: defaultdict[str, list[str]] = defaultdict(list)
    by_position = select(commit_parent.c.commit_id, commit_parent.c.parent_id).order_by(
        commit_parent.c.commit_id, commit_parent.c.position
    )
    for commit_id, parent_id in connection.execute(by_position.where(commit_parent.c.commit_id.in_(ids))):
        parents[commit_id].append(parent_id)
    metadata: defaultdict[str, dict[str, str]] = defaultdict(dict)
    by_key = select(commit_metadata.c.commit_id, commit_metadata.c.key, commit_metadata.c.value).order_by(
        commit_metadata.c.commit_id, commit_metadata.c.key
    )
    for commit_id, key, value in connection.execute(by_key.where(commit_metadata.c.commit_id.in_(ids))):
        metadata[commit_id][key] = value
    c = commit_.c
    rows = connection.execute(
        select(*(c.id, c.tree, c.height, c.message, c.author, c.created_at, c.write_id, c.seq, c.epoch, object_.c.key))
        .join(object_, object_.c.id == c.object_id)
        .where(c.id.in_(ids))
    )
    return {
        id_: CommitRecord(
            id_,
            tuple(parents.get(id_, ())),
            tree,
            height,
            message,
            author,
            created_at,
            metadata.get(id_, {}),
            write_id,
            seq,
            epoch,
            object_key,
        )
        for id_, tree, height, message, author, created_at, write_id, seq, epoch, object_key in rows
    }
