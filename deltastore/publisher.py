"""The last steps of a commit: one batch to the bucket, read back, one SQL transaction, one log entry.

    one batch: last packs, manifests, structure, commit document      (nothing names them yet)
    read back: every name and size
    SQL transaction: the only commit point
    ref log entry, a copy of the commit document

Dying before the transaction leaves garbage only. When the branch moved meanwhile, the commit is rebased: only its document is
written again, with the new head as its parent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deltastore import canonical, layout
from deltastore.buckets.base import Bucket, Upload
from deltastore.chunk_reader import ChunkReader
from deltastore.chunk_writer import WrittenPack
from deltastore.commit_request import CommitRequest
from deltastore.errors import IntegrityError, RefConflictError, StorageError
from deltastore.formats import CommitDocument, Identity, Publish, RefEntry, to_bytes
from deltastore.history import Commit
from deltastore.index.index import Index
from deltastore.index.records import Publication, RefMovement
from deltastore.options import SESSION_SECONDS
from deltastore.placement import NewObject, Placed
from deltastore.reflog import RefLog
from deltastore.scanner import Content
from deltastore.versions import Version, Versions

MAX_REBASES = 100


@dataclass(frozen=True, slots=True)
class Draft:
    """An encoded commit. `write_id` is kept through rebases; `packs` are all that it wrote, `unsent` those still to be sent."""

    request: CommitRequest
    parent: Version | None
    write_id: str
    session: str
    content: Content
    placed: Placed
    packs: tuple[WrittenPack, ...]
    unsent: tuple[NewObject, ...]


@dataclass(frozen=True, slots=True)
class _Session:
    process: int
    lease: str
    renewed: float  # time.monotonic()


class Publisher:
    """Publishes the drafts of one open store, one at a time."""

    def __init__(self, bucket: Bucket, index: Index, versions: Versions, reader: ChunkReader, log: RefLog) -> None:
        self._bucket = bucket
        self._index = index
        self._versions = versions
        self._reader = reader
        self._log = log
        self._session: _Session | None = None
        self._warned: set[str] = set()

    # -- the lease --------------------------------------------------------------------------------------------------------

    def open_session(self) -> str:
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
        if self._session is not None and self._session.process == os.getpid():
            with contextlib.suppress(StorageError):
                self._index.close_session(self._session.lease)
        self._session = None

    # -- publishing -------------------------------------------------------------------------------------------------------

    def publish(self, draft: Draft, before: Callable[[Version], None]) -> tuple[Commit, Version]:
        """Send what is left, then try the commit point until the branch holds still.

        Args:
            before: called with the version as it will be, if the branch holds still; waits for packs that are on their way.
        """
        parent = draft.parent
        head = None if parent is None else parent.document.commit_id()
        height = 0 if parent is None else parent.height + 1
        time_of_commit = canonical.utc_now()
        sizes = {pack.key: pack.size for pack in draft.packs}
        waiting = [*draft.unsent, *draft.placed.new]
        for attempt in itertools.count():
            document = _document(draft, head, height, time_of_commit)
            version = self._version(draft, document)
            if attempt == 0:
                before(version)
            body = to_bytes(document)
            key = layout.commit_key(document.commit_id(), layout.new_id())
            waiting.append(NewObject("commit", len(body), Upload(key, [body])))
            self._upload(draft, waiting, sizes)
            waiting = []
            try:
                published = self._index.publish(self._publication(draft, document, key, body))
            except RefConflictError as conflict:
                if draft.request.expected_head is not None or attempt >= MAX_REBASES:
                    raise
                head, height = self._rebase(draft.request.branch, head, conflict)
                continue
            self._log.moved()
            self._versions.remember(published.commit_id, version)
            return Commit.from_identity(published.commit_id, document.identity), version
        raise AssertionError("unreachable")

    def _version(self, draft: Draft, document: CommitDocument) -> Version:
        version = Version(self._bucket, self._reader, document, draft.content.structure, before=draft.parent)
        for shard, manifest in enumerate(draft.placed.manifests):
            version.seed_manifest(shard, manifest)
        return version

    def _publication(self, draft: Draft, document: CommitDocument, key: str, body: bytes) -> Publication:
        request, placed, identity = draft.request, draft.placed, document.identity
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

    def _upload(self, draft: Draft, objects: Sequence[NewObject], sizes: dict[str, int]) -> None:
        """Register, send and read back; in the same call, look whether another index took over."""
        self._index.register(draft.session, [(each.key, each.kind, each.size) for each in objects])
        self._bucket.put([each.upload for each in objects])
        sizes.update((each.key, each.size) for each in objects)
        fence = self._log.fence_key
        found = self._bucket.stat([*sizes, fence])
        self._log.refuse_fenced(found[fence])
        for key, size in sizes.items():
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


def _document(draft: Draft, head: str | None, height: int, time_of_commit: str) -> CommitDocument:
    request = draft.request
    return CommitDocument(
        identity=Identity(
            parents=[] if head is None else [head],
            tree=draft.content.tree,
            message=request.message,
            author=request.author,
            time=time_of_commit,
            metadata=dict(request.metadata),
        ),
        placement=draft.placed.placement.model_copy(update={"height": height}),
        publish=Publish(ref=request.branch, expected=head, write_id=draft.write_id),
    )


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


def _full_entries(packs: Sequence[WrittenPack], reader: ChunkReader) -> Iterator[tuple[bytes, str, int]]:
    for pack in packs:
        if pack.span == 0:
            columns = reader.columns(pack.pack_id)
            for row, digest in enumerate(columns.digest):
                yield digest.tobytes(), pack.key, row
