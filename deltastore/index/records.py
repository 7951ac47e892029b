"""What goes into the index and comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

ObjectKind = Literal["pack", "manifest", "structure", "commit"]
ObjectState = Literal["pending", "live"]
RefKind = Literal["branch", "tag"]
SessionKind = Literal["writer", "reader", "branch"]

# The bytes of a log entry, or how to make them once its number is known. Called inside the transaction: quick and pure.
Body = bytes | Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Meta:
    """What the index knows of its store: `seq` is the last used log number, `snapshot_seq` the last snapshot's."""

    store_uuid: str
    format: int
    features: tuple[str, ...]
    epoch: int
    seq: int
    snapshot_seq: int
    created_at: str


@dataclass(frozen=True, slots=True)
class RefRecord:
    """A branch or tag. `version` counts its movements."""

    name: str
    kind: RefKind
    commit_id: str
    version: int
    updated_at: str


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A commit. `metadata` maps each key to its value as canonical JSON; `object_key` names the commit document."""

    id: str
    parents: tuple[str, ...]
    tree: str
    height: int
    message: str
    author: str
    created_at: str
    metadata: Mapping[str, str]
    write_id: str
    seq: int
    epoch: int
    object_key: str


@dataclass(frozen=True, slots=True)
class RefSnapshot:
    """All refs as of log entry `seq`, and the commits since an earlier entry, in log order."""

    epoch: int
    seq: int
    refs: tuple[RefRecord, ...]
    commits: tuple[CommitRecord, ...]


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """An object of the bucket. `session_id`: the session that is writing it, None once it is live. `size` in bytes."""

    key: str
    kind: ObjectKind
    state: ObjectState
    size: int
    session_id: str | None
    created_at: str


@dataclass(frozen=True, slots=True)
class ObjectTotals:
    """How many objects of a kind there are, and their bytes."""

    kind: ObjectKind
    state: ObjectState
    count: int
    size: int


@dataclass(frozen=True, slots=True)
class CommitShare:
    """The part of a commit in what is stored, in bytes: of objects that came with it, and of those only it needs."""

    added: int
    unique: int


@dataclass(frozen=True, slots=True)
class OplogRecord:
    """A log entry: `body` are its exact bytes, `commit_key` the bucket key that it is a copy of, if any."""

    epoch: int
    seq: int
    kind: str
    body: bytes
    commit_id: str | None
    commit_key: str | None
    mirrored: bool
    created_at: str


@dataclass(frozen=True, slots=True)
class Publication:
    """Everything that one commit transaction does.

    Args:
        session_id: The session that registered `own_keys`.
        write_id: Drawn once per `commit()` call, kept through its retries.
        commit_id, parents, tree, height, message, author, created_at: The commit.
        metadata: Key to value, as canonical JSON.
        object_key: The commit document; one of the session's own objects.
        own_keys: Objects that this session registered and that become live.
        reused_keys: Live objects of earlier commits that this one needs, beyond those that `edges` and `dedup` name.
        edges: (source key, target key): who keeps whom alive.
        dedup: (chunk digest of 32 bytes, pack key, row): full entries that later commits may reuse.
        ref: The branch to move.
        expected_head: The commit that the branch must point at; None when it must not exist yet.
        body: The log entry, or a function of its number.
        tag: A tag to create at this commit in the same transaction, with a log entry of its own.
        mirrored: (epoch, seq) of earlier log entries that are in the bucket by now.
        snapshot_seq: The number of a ref snapshot that is in the bucket by now.
    """

    session_id: str
    write_id: str
    commit_id: str
    parents: tuple[str, ...]
    tree: str
    height: int
    message: str
    author: str
    created_at: str
    metadata: Mapping[str, str]
    object_key: str
    own_keys: Collection[str]
    reused_keys: Collection[str]
    edges: Collection[tuple[str, str]]
    dedup: Collection[tuple[bytes, str, int]]
    ref: str
    expected_head: str | None
    body: Body = field(repr=False)
    tag: RefMovement | None = None
    mirrored: Collection[tuple[int, int]] = ()
    snapshot_seq: int | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """The commit that landed and its log entry. `already`: an earlier try with the same write id had landed."""

    commit_id: str
    seq: int
    epoch: int
    already: bool


@dataclass(frozen=True, slots=True)
class RefMovement:
    """A branch or tag that is made, moved or deleted without a new commit.

    Args:
        name, kind: The ref.
        action: "create" (must not exist), "move" or "delete" (must exist).
        expected: The commit that it must point at now; None leaves that open. Not for "create".
        new: The commit that it shall point at; None for "delete".
        body: The log entry, or a function of its number.
        log_kind: The kind of the log entry.
        mirrored: (epoch, seq) of earlier log entries that are in the bucket by now.
    """

    name: str
    kind: RefKind
    action: Literal["create", "move", "delete"]
    expected: str | None
    new: str | None
    body: Body = field(repr=False)
    log_kind: str = "ref"
    mirrored: Collection[tuple[int, int]] = ()
