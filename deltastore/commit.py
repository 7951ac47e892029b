"""commit(): one pass over the live tensors, one batch to the bucket, one SQL transaction, one log entry.

    resolve head ─ scan and encode every chunk, packs fill and go up meanwhile
                 ─ one batch: last packs, manifests, structure, commit document      (nothing names them yet)
                 ─ read back: every name and size
                 ─ SQL transaction: the only commit point
                 ─ ref log entry, a copy of the commit document

Dying before the transaction leaves garbage only. When the branch moved meanwhile, the commit is rebased: only its document is
written again, with the new head as its parent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltastore import canonical, layout
from deltastore.baseline import Baseline
from deltastore.buckets.base import Bucket, Upload
from deltastore.chunk_reader import ChunkReader
from deltastore.chunk_writer import ChunkWriter, WrittenPack
from deltastore.depths import Depths
from deltastore.errors import IntegrityError, InvalidInputError, RefConflictError, StorageError, short_name
from deltastore.formats import CommitDocument, Identity, Publish, RefEntry, to_bytes
from deltastore.history import Commit, check_ref_name
from deltastore.index.index import Index
from deltastore.index.records import Publication, Published, RefMovement
from deltastore.manifests import PackRef
from deltastore.options import MAX_FILE_BYTES, SESSION_SECONDS
from deltastore.placement import NewObject, Placed, place
from deltastore.recent_deltas import RecentDeltas
from deltastore.reflog import RefLog
from deltastore.scanner import Content, Scanner
from deltastore.state import FlatState, TensorSource
from deltastore.versions import Version, Versions

MAX_METADATA_BYTES = 64 << 10
MAX_REBASES = 100


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """What a caller wants committed, besides the tensors themselves."""

    message: str
    branch: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    author: str = ""
    expected_head: str | None = None  # None: whatever the head is, rebase when it moves
    tag: str | None = None  # made at the new commit, in the same transaction


@dataclass(frozen=True, slots=True)
class _Session:
    process: int
    lease: str
    renewed: float  # time.monotonic()


@dataclass(frozen=True, slots=True)
class _Draft:
    """A scanned commit on its way. `write_id` is kept through rebases; `sizes` are those of all objects that it wrote."""

    write_id: str
    session: str
    content: Content
    packs: tuple[WrittenPack, ...]
    unsent: tuple[NewObject, ...]
    sizes: dict[str, int]


class Committer:
    """The writer's side of one open store. One commit at a time; `commit` blocks until the one before is done."""

    def __init__(
        self, bucket: Bucket, index: Index, versions: Versions, reader: ChunkReader, log: RefLog, *, baseline: bool
    ) -> None:
        self._bucket = bucket
        self._index = index
        self._versions = versions
        self._reader = reader
        self._log = log
        self._baseline = Baseline(keep=baseline)
        self._depths = Depths(reader)
        self._recent = RecentDeltas()
        self._lock = os.getpid(), threading.Lock()
        self._session: _Session | None = None
        self._warned: set[str] = set()

    def commit(
        self,
        request: CommitRequest,
        state: FlatState | Iterator[tuple[str, TensorSource]],
        progress: Callable[[int], None] | None = None,
    ) -> Commit:
        """Commit a flattened state, or a stream of named tensors of which one at a time is read.

        Args:
            progress: called with the raw bytes of each chunk that was scanned.

        Raises:
            RefConflictError: the branch is not at `expected_head`, or moved to something that does not descend from it.
            IncompatibleStateError, InvalidInputError: before anything is written.
        """
        metadata = _checked_request(request)
        with self._own_lock():
            return self._commit(request, metadata, state, progress)

    def _own_lock(self) -> threading.Lock:
        """The lock of this process: a fork may have inherited one that another thread of the parent held."""
        if self._lock[0] != os.getpid():
            self._lock = os.getpid(), threading.Lock()
        return self._lock[1]

    def _commit(
        self,
        request: CommitRequest,
        metadata: dict[str, Any],
        state: FlatState | Iterator[tuple[str, TensorSource]],
        progress: Callable[[int], None] | None,
    ) -> Commit:
        self._log.fill_holes()
        head = self._head(request)
        parent = None if head is None else self._versions.get(head)
        session = self._open_session()
        writer = ChunkWriter(
            self._bucket,
            lambda key, size: self._index.register(session, [(key, "pack", size)]),
            self._reader.add_columns,
        )
        try:
            scanner = Scanner(self._reader, self._index, self._depths, self._recent, self._baseline, writer, parent, progress)
            content = scanner.run(state, request.files)
            packs, unsent = writer.finish()
        except BaseException:
            writer.abandon()
            raise
        self._reader.learn(PackRef(pack.pack_id, pack.head, pack.size) for pack in packs)
        draft = _Draft(
            write_id=str(uuid.uuid4()),
            session=session,
            content=content,
            packs=tuple(packs),
            unsent=tuple(NewObject("pack", pack.size, upload) for pack, upload in unsent),
            sizes={pack.key: pack.size for pack in packs},
        )
        placed = place(content, packs, parent, self._depths, self._reader)
        return self._publish(request, metadata, draft, placed, parent)

    def _head(self, request: CommitRequest) -> str | None:
        ref = self._index.ref(request.branch)
        if ref is not None and ref.kind != "branch":
            raise InvalidInputError(f"{request.branch!r} is a tag, and tags don't move; commit to a branch")
        head = None if ref is None else ref.commit_id
        if request.expected_head is not None and head != request.expected_head:
            raise RefConflictError(request.branch, request.expected_head, head)
        return head

    def _open_session(self) -> str:
        """The lease under which objects are registered: opened by the first commit of a process, renewed at half its time."""
        session = self._session
        if session is not None and session.process == os.getpid():
            if time.monotonic() - session.renewed < SESSION_SECONDS / 2:
                return session.lease
            try:
                self._index.renew_session(session.lease, SESSION_SECONDS)
                self._session = _Session(session.process, session.lease, time.monotonic())
                return session.lease
            except StorageError as error:
                if error.kind != "expired":
                    raise
        holder = f"{socket.gethostname()}:{os.getpid()}"
        lease = self._index.open_session("writer", holder, SESSION_SECONDS)
        self._session = _Session(os.getpid(), lease, time.monotonic())
        return lease

    def close(self) -> None:
        """Give back the lease. What was registered and not published is garbage from then on."""
        with self._own_lock():
            if self._session is not None and self._session.process == os.getpid():
                with contextlib.suppress(StorageError):
                    self._index.close_session(self._session.lease)
            self._session = None

    # -- publishing -------------------------------------------------------------------------------------------------------

    def _publish(
        self, request: CommitRequest, metadata: dict[str, Any], draft: _Draft, placed: Placed, parent: Version | None
    ) -> Commit:
        """Send what is left, then try the commit point until the branch holds still."""
        head = None if parent is None else parent.document.commit_id()
        height = 0 if parent is None else parent.height + 1
        time_of_commit = canonical.utc_now()
        waiting = [*draft.unsent, *placed.new]
        for attempt in itertools.count():
            document = CommitDocument(
                identity=Identity(
                    parents=[] if head is None else [head],
                    tree=draft.content.tree,
                    message=request.message,
                    author=request.author,
                    time=time_of_commit,
                    metadata=metadata,
                ),
                placement=placed.placement.model_copy(update={"height": height}),
                publish=Publish(ref=request.branch, expected=head, write_id=draft.write_id),
            )
            body = to_bytes(document)
            key = layout.commit_key(document.commit_id(), layout.new_id())
            waiting.append(NewObject("commit", len(body), Upload(key, [body])))
            self._upload(draft, waiting)
            waiting = []
            try:
                published = self._index.publish(self._publication(request, draft, placed, document, key, body))
            except RefConflictError as conflict:
                if request.expected_head is not None or attempt >= MAX_REBASES:
                    raise
                head, height = self._rebase(request.branch, head, conflict)
                continue
            return self._landed(published, document, draft.content, placed, parent)
        raise AssertionError("unreachable")

    def _publication(
        self, request: CommitRequest, draft: _Draft, placed: Placed, document: CommitDocument, key: str, body: bytes
    ) -> Publication:
        identity = document.identity
        own = [key, *(each.key for each in placed.new), *(pack.key for pack in draft.packs)]
        return Publication(
            session_id=draft.session,
            write_id=draft.write_id,
            commit_id=document.commit_id(),
            parents=tuple(identity["parents"]),
            tree=identity["tree"],
            height=document.placement.height,
            message=identity["message"],
            author=identity["author"],
            created_at=identity["time"],
            metadata={name: canonical.dumps(value).decode() for name, value in identity["metadata"].items()},
            object_key=key,
            own_keys=tuple(own),
            reused_keys=tuple(sorted(placed.reused())),
            edges=(*((key, target) for target in placed.targets()), *placed.edges),
            dedup=tuple(_full_entries(draft.packs, self._reader)),
            ref=request.branch,
            expected_head=document.publish.expected,
            body=body,
            tag=None if request.tag is None else _tag_movement(request, document),
            mirrored=self._log.pending_marks(),
        )

    def _upload(self, draft: _Draft, objects: Sequence[NewObject]) -> None:
        """Register, send and read back; in the same call, look whether another index took over."""
        self._index.register(draft.session, [(each.key, each.kind, each.size) for each in objects])
        self._bucket.put([each.upload for each in objects])
        draft.sizes.update((each.key, each.size) for each in objects)
        fence = self._log.fence_key
        found = self._bucket.stat([*draft.sizes, fence])
        self._log.refuse_fenced(found[fence])
        for key, size in draft.sizes.items():
            info = found[key]
            if info is None or info.size != size:
                seen = "missing" if info is None else f"{info.size} bytes"
                raise IntegrityError(
                    f"{key} was written with {size} bytes and reads back as {seen}; nothing was committed, try again"
                )

    def _rebase(self, branch: str, head: str | None, conflict: RefConflictError) -> tuple[str, int]:
        actual = conflict.actual
        if actual is None or (head is not None and not self._index.is_ancestor(head, actual)):
            raise conflict
        record = self._index.commits([actual])[actual]
        if branch not in self._warned:
            self._warned.add(branch)
            warnings.warn(
                f"another writer ({record.author}) moved {branch!r} to {actual[:12]} while this commit was made; "
                "it was put on top of that. Give expected_head= to refuse instead.",
                stacklevel=6,
            )
        return actual, record.height + 1

    def _landed(
        self, published: Published, document: CommitDocument, content: Content, placed: Placed, parent: Version | None
    ) -> Commit:
        """After the commit point: the log entry, and what the next commit builds on."""
        self._log.moved()
        version = Version(self._bucket, self._reader, document, content.structure, before=parent)
        for shard, manifest in enumerate(placed.manifests):
            version.seed_manifest(shard, manifest)
        self._versions.remember(published.commit_id, version)
        self._depths.retain(content.rows)
        return Commit.from_identity(published.commit_id, document.identity)


def _tag_movement(request: CommitRequest, document: CommitDocument) -> RefMovement:
    assert request.tag is not None
    commit_id, identity = document.commit_id(), document.identity
    entry = RefEntry(
        action="create",
        ref_kind="tag",
        name=request.tag,
        old=None,
        new=commit_id,
        author=identity["author"],
        time=identity["time"],
    )
    return RefMovement(request.tag, "tag", "create", None, commit_id, to_bytes(entry))


def _checked_request(request: CommitRequest) -> dict[str, Any]:
    """Refuse what can't be committed before anything is read; returns the packed metadata."""
    check_ref_name(request.branch)
    if request.tag == request.branch:
        raise InvalidInputError(f"branch and tag can't both be called {request.tag!r}")
    for what, text in (("message", request.message), ("author", request.author)):
        if not isinstance(text, str):
            raise InvalidInputError(f"{what} must be a string, not {type(text).__name__}")
        canonical.pack(text)
    metadata = {}
    for name, value in request.metadata.items():
        if not isinstance(name, str):
            raise InvalidInputError(f"metadata keys must be strings, not {name!r}")
        metadata[name] = canonical.pack(_builtin_number(value))
    if len(canonical.dumps(metadata)) > MAX_METADATA_BYTES:
        raise InvalidInputError(
            f"metadata of more than {MAX_METADATA_BYTES} bytes; commit it as a file: files={{'metadata.json': …}}"
        )
    for name, data in request.files.items():
        _check_file_name(name)
        if len(data) > MAX_FILE_BYTES:
            raise InvalidInputError(f"file {short_name(name)!r} has {len(data)} bytes; files= takes up to {MAX_FILE_BYTES} each")
    return metadata


def _builtin_number(value: Any) -> Any:
    """Metrics often come as NumPy or torch scalars; metadata keeps plain numbers."""
    item = getattr(value, "item", None)
    if not isinstance(value, (bool, int, float, str)) and callable(item) and getattr(value, "ndim", None) == 0:
        return item()
    if isinstance(value, float):
        return float(value)
    return value


def _check_file_name(name: str) -> None:
    parts = name.split("/") if isinstance(name, str) else [""]
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        sizes = [0]
    if not all(0 < size <= 255 for size in sizes) or any(part in (".", "..") for part in parts) or "\0" in name or "\\" in name:
        raise InvalidInputError(f"{name!r} can't be the name of a file in a checkpoint: use a relative path with '/'")


def _full_entries(packs: Sequence[WrittenPack], reader: ChunkReader) -> Iterator[tuple[bytes, str, int]]:
    for pack in packs:
        if pack.span == 0:
            columns = reader.columns(pack.pack_id)
            for row, digest in enumerate(columns.digest):
                yield digest.tobytes(), pack.key, row
