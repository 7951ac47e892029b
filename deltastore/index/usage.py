"""What commits take, counted over objects and edges. Functions of a connection; `Index` brings the transaction.

Edges have two levels: commit → structure, manifest and the packs it brought; manifest → every pack that its chunks touch. So
whatever is asked here is a union of three parts: the documents themselves, what they name, and what their manifests name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Select, Subquery, case, func, select, union, union_all

from deltastore.index.database import batches
from deltastore.index.records import CommitShare
from deltastore.index.tables import commit_, commit_parent, edge, object_

_EPOCH = 1 << 40  # log numbers stay below: the moment of a commit is epoch * _EPOCH + seq


def parents(connection: Connection) -> dict[str, tuple[str, ...]]:
    """The parents of every commit, forgotten ones among them; commits in the order of the log."""
    found: dict[str, list[str]] = {id_: [] for id_ in connection.scalars(select(commit_.c.id).order_by(_moment()))}
    by_position = select(commit_parent.c.commit_id, commit_parent.c.parent_id).order_by(
        commit_parent.c.commit_id, commit_parent.c.position
    )
    for id_, parent in connection.execute(by_position):
        found[id_].append(parent)
    return {id_: tuple(each) for id_, each in found.items()}


def structures(connection: Connection) -> dict[str, str]:
    """The key of the structure of every commit."""
    query = (
        select(commit_.c.id, object_.c.key)
        .join(edge, edge.c.source_id == commit_.c.object_id)
        .join(object_, object_.c.id == edge.c.target_id)
        .where(object_.c.kind == "structure")
    )
    return {row.id: row.key for row in connection.execute(query)}


def commit_shares(connection: Connection) -> dict[str, CommitShare]:
    """What each commit added and what only it needs, in the order of the log.

    Linear in the edges: the first and the last commit that need an object are found level by level. An object is added by
    the first, and is that one's alone when the last is the same.
    """
    moment = _moment()
    documents = select(commit_.c.object_id.label("id"), moment.label("first"), moment.label("last"))
    named = (
        select(edge.c.target_id.label("id"), func.min(moment).label("first"), func.max(moment).label("last"))
        .join(commit_, commit_.c.object_id == edge.c.source_id)
        .group_by(edge.c.target_id)
        .subquery()
    )
    through = (
        select(edge.c.target_id, func.min(named.c.first), func.max(named.c.last))
        .join(named, named.c.id == edge.c.source_id)
        .group_by(edge.c.target_id)
    )
    users = union_all(documents, select(named.c.id, named.c.first, named.c.last), through).subquery()
    spans = (
        select(users.c.id, func.min(users.c.first).label("first"), func.max(users.c.last).label("last"))
        .group_by(users.c.id)
        .subquery()
    )
    alone = case((spans.c.first == spans.c.last, object_.c.size), else_=0)
    sums = (
        select(spans.c.first, func.sum(object_.c.size), func.sum(alone))
        .join(object_, object_.c.id == spans.c.id)
        .group_by(spans.c.first)
    )
    found = {first: CommitShare(int(added), int(unique)) for first, added, unique in connection.execute(sums)}
    by_moment = connection.execute(select(commit_.c.id, moment).order_by(moment))
    return {id_: found[at] for id_, at in by_moment}


def stored_bytes(connection: Connection, ids: Iterable[str]) -> dict[str, int]:
    """The bytes of all objects that each of the commits needs, its document included; shared ones in full."""
    found: dict[str, int] = {}
    for batch in batches(dict.fromkeys(ids)):
        needs = _needs(batch)
        query = select(needs.c.commit, func.sum(object_.c.size)).join(object_, object_.c.id == needs.c.object)
        found.update((id_, int(size)) for id_, size in connection.execute(query.group_by(needs.c.commit)))
    return found


def needed_objects(connection: Connection, ids: Iterable[str]) -> dict[int, int]:
    """Row number and bytes of every object that any of the commits needs, their documents included."""
    found: dict[int, int] = {}
    for batch in batches(dict.fromkeys(ids)):
        needs = _needs(batch)
        query = select(object_.c.id, object_.c.size).where(object_.c.id.in_(select(needs.c.object)))
        found.update((id_, size) for id_, size in connection.execute(query))
    return found


def _needs(ids: list[str]) -> Subquery:
    """Pairs (commit, object), each once."""
    chosen = select(commit_.c.id, commit_.c.object_id).where(commit_.c.id.in_(ids)).cte("chosen")
    named = (
        select(chosen.c.id, edge.c.target_id).select_from(chosen).join(edge, edge.c.source_id == chosen.c.object_id).cte("named")
    )
    through = select(named.c.id, edge.c.target_id).select_from(named).join(edge, edge.c.source_id == named.c.target_id)
    parts: list[Select[Any]] = [
        select(chosen.c.id.label("commit"), chosen.c.object_id.label("object")),
        select(named.c.id, named.c.target_id),
        through,
    ]
    return union(*parts).subquery("needs")


def _moment() -> Any:
    return commit_.c.epoch * _EPOCH + commit_.c.seq
