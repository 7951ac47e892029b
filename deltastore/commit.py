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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from deltastore import canonical, layout
from deltastore.baseline import Baseline
from deltastore.buckets.base import Bucket, Upload
from deltastore.chunk_reader import ChunkReader
from deltastore.chunk_writer import ChunkWriter, WrittenPack
from deltastore.encoder import Depths, chain_packs
from deltastore.errors import IntegrityError, InvalidInputError, RefConflictError, StorageError, StoreFencedError
from deltastore.formats import (
    CommitDocument,
    ManifestPlace,
    ObjectPlace,
    PackPlace,
    Placement,
    Publish,
    StructureDocument,
    to_bytes,
)
from deltastore.history import Commit, History, Version, check_ref_name, shorten
from deltastore.index.index import Index
from deltastore.index.records import Publication, Published
from deltastore.manifests import ChunkRow, Manifest, PackRef
from deltastore.options import MAX_FILE_BYTES, SESSION_SECONDS
from deltastore.reflog import RefLog
from deltastore.scanner import Content, Scanner
from deltastore.state import FlatState, TensorSource

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


@dataclass(frozen=True, slots=True)
class _Session:
    process: int
    lease: str
    renewed: float  # time.monotonic()


class Committer:
    """The writer's side of one open store. One commit at a time; `commit` blocks until the one before is done."""

    def __init__(
        self, bucket: Bucket, index: Index, history: History, reader: ChunkReader, log: RefLog, *, baseline: bool
    ) -> None:
        self._bucket = bucket
        self._index = index
        self._history = history
        self._reader = reader
        self._log = log
        self._baseline = Baseline(keep=baseline)
        self._depths = Depths(reader)
        self._lock = threading.Lock()
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
        with self._lock:
            return self._commit(request, metadata, state, progress)

    def _commit(
        self,
        request: CommitRequest,
        metadata: dict[str, Any],
        state: FlatState | Iterator[tuple[str, TensorSource]],
        progress: Callable[[int], None] | None,
    ) -> Commit:
        write_id = str(uuid.uuid4())
        self._log.fill_holes()
        head = self._head(request)
        parent = None if head is None else self._history.version(head)
        height = 0 if parent is None else parent.height + 1
        session = self._open_session()
        writer = ChunkWriter(
            self._bucket,
            lambda key, size: self._index.register(session, [(key, "pack", size)]),
            self._reader.add_columns,
        )
        try:
            scanner = Scanner(self._reader, self._index, self._depths, self._baseline, writer, parent, progress)
            content = scanner.run(state, request.files)
            packs, unsent = writer.finish()
        except BaseException:
            writer.abandon()
            raise
        self._reader.learn(PackRef(pack.pack_id, pack.head, pack.size) for pack in packs)
        return self._publish(request, metadata, write_id, session, parent, head, height, content, packs, unsent)

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
        with self._lock:
            if self._session is not None and self._session.process == os.getpid():
                with contextlib.suppress(StorageError):
                    self._index.close_session(self._session.lease)
            self._session = None

    # -- publishing -------------------------------------------------------------------------------------------------------

    def _publish(
        self,
        request: CommitRequest,
        metadata: dict[str, Any],
        write_id: str,
        session: str,
        parent: Version | None,
        head: str | None,
        height: int,
        content: Content,
        packs: list[WrittenPack],
        unsent: list[tuple[WrittenPack, Upload]],
    ) -> Commit:
        objects = _Objects()
        for pack, upload in unsent:
            objects.add(upload.key, "pack", pack.size, upload)
        structure = self._place_structure(parent, content.structure, objects)
        manifests, built = self._place_manifests(parent, content, objects)
        tables = {
            place.key: [layout.pack_key(ref.pack_id) for ref in manifest.packs] for place, manifest in built if manifest
        }
        table = sorted({layout.pack_id(key) for keys in tables.values() for key in keys})
        numbers = {pack_id: number for number, pack_id in enumerate(table)}
        placed = [
            place.model_copy(update={"packs": [numbers[ref.pack_id] for ref in manifest.packs]}) if manifest else place
            for place, manifest in built
        ]
        identity = {
            "parents": [] if head is None else [head],
            "tree": content.tree,
            "message": request.message,
            "author": request.author,
            "time": _now(),
            "metadata": metadata,
        }
        brought = [PackPlace(key=p.key, size=p.size, head=p.head, span=p.span, rows=p.rows) for p in packs]
        mine = {pack.key for pack in packs}
        reused = {key for keys in tables.values() for key in keys} - mine
        reused |= {place.key for place, manifest in built if manifest is None}
        if structure.key not in objects.sizes:
            reused.add(structure.key)
        for attempt in itertools.count():
            placement = Placement(
                height=height,
                structure=structure,
                manifests=placed,
                pack_table=table,
                packs=brought,
                values=content.values,
            )
            document = CommitDocument(
                identity=identity,
                placement=placement,
                publish=Publish(ref=request.branch, expected=head, write_id=write_id),
            )
            commit_id, body = document.commit_id(), to_bytes(document)
            key = layout.commit_key(commit_id, layout.new_id())
            objects.add(key, "commit", len(body), Upload(key, [body]))
            self._upload(session, objects)
            edges = [
                (key, structure.key),
                *((key, place.key) for place in placed),
                *((key, pack.key) for pack in packs),
            ]
            edges += [(source, target) for source, targets in tables.items() for target in targets]
            publication = Publication(
                session_id=session,
                write_id=write_id,
                commit_id=commit_id,
                object_key=key,
                tree=content.tree,
                height=height,
                parents=tuple(identity["parents"]),
                message=request.message,
                author=request.author,
                created_at=str(identity["time"]),
                metadata={name: canonical.dumps(value).decode() for name, value in metadata.items()},
                own_keys=tuple(objects.of_commit(key, packs)),
                reused_keys=tuple(sorted(reused)),
                edges=tuple(edges),
                dedup=tuple(_full_entries(packs, self._reader)),
                ref=request.branch,
                expected_head=head,
                body=body,
                mirrored=self._log.pending_marks(),
            )
            try:
                published = self._index.publish(publication)
            except RefConflictError as conflict:
                if request.expected_head is not None or attempt >= MAX_REBASES:
                    raise
                head, height = self._rebase(request.branch, head, conflict)
                identity["parents"] = [head]
                continue
            return self._landed(published, document, content, manifests)
        raise AssertionError("unreachable")

    def _place_structure(self, parent: Version | None, structure: StructureDocument, objects: _Objects) -> ObjectPlace:
        if parent is not None and parent.structure == structure:
            return parent.document.placement.structure
        body = to_bytes(structure)
        key = layout.structure_key(layout.new_id())
        objects.add(key, "structure", len(body), Upload(key, [body]))
        return ObjectPlace(key=key, size=len(body))

    def _place_manifests(
        self, parent: Version | None, content: Content, objects: _Objects
    ) -> tuple[list[Manifest], list[tuple[ManifestPlace, Manifest | None]]]:
        """Manifests of the version, and for each its place with the manifest when it is new (None when it is reused)."""
        shards: dict[int, list[ChunkRow]] = {}
        for stored, rows in zip(content.structure.tensors, content.rows, strict=True):
            if rows:
                shards.setdefault(stored.shard, []).extend(rows)
        manifests: list[Manifest] = []
        built: list[tuple[ManifestPlace, Manifest | None]] = []
        before = [] if parent is None else parent.document.placement.manifests
        for shard in range(len(shards)):
            rows = shards[shard]
            if parent is not None and shard < len(before):
                known = parent.manifest(shard)
                if known.rows(0, len(known)) == rows:
                    manifests.append(known)
                    built.append((before[shard].model_copy(update={"packs": None}), None))
                    continue
            packs = [self._reader.pack_ref(pack_id) for pack_id in chain_packs(self._depths, rows)]
            manifest = Manifest.from_rows(packs, rows)
            body = manifest.build()
            key = layout.manifest_key(layout.new_id())
            objects.add(key, "manifest", len(body), Upload(key, [body]))
            manifests.append(manifest)
            built.append((ManifestPlace(key=key, size=len(body), rows=len(rows), packs=[]), manifest))
        return manifests, built

    def _upload(self, session: str, objects: _Objects) -> None:
        """Register, send and read back what is not in the bucket yet; also look whether another index took over."""
        fresh = objects.take_unsent()
        self._index.register(session, [(key, kind, size) for key, kind, size, _ in fresh])
        self._bucket.put([upload for *_, upload in fresh])
        fence = layout.epoch_key(self._index.meta().epoch + 1)
        found = self._bucket.stat([*objects.sizes, fence])
        if found[fence] is not None:
            raise StoreFencedError(
                f"another machine has taken over this store ({fence} exists), so this index may not write any more; "
                "nothing was committed; open the store anew"
            )
        for key, size in objects.sizes.items():
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
        record = self._history.record(actual)
        if branch not in self._warned:
            self._warned.add(branch)
            warnings.warn(
                f"another writer ({record.author}) moved {branch!r} to {actual[:12]} while this commit was made; "
                "it was put on top of that. Give expected_head= to refuse instead.",
                stacklevel=6,
            )
        return actual, record.height + 1

    def _landed(
        self, published: Published, document: CommitDocument, content: Content, manifests: list[Manifest]
    ) -> Commit:
        """After the commit point: log entry, snapshot, and what the next commit builds on."""
        self._log.moved()
        version = Version(self._bucket, self._reader, document, content.structure)
        for shard, manifest in enumerate(manifests):
            version.seed_manifest(shard, manifest)
        self._history.remember(published.commit_id, version)
        self._depths.retain({(row.pack_id, row.row) for rows in content.rows for row in rows})
        identity = document.identity
        return Commit(
            published.commit_id,
            tuple(identity["parents"]),
            content.tree,
            identity["message"],
            identity["author"],
            datetime.fromisoformat(identity["time"]),
            {name: canonical.unpack(value) for name, value in identity["metadata"].items()},
        )


class _Objects:
    """What a commit writes besides early packs: sizes, kinds and the uploads that are still to be sent."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._unsent: list[tuple[str, str, int, Upload]] = []

    def add(self, key: str, kind: str, size: int, upload: Upload) -> None:
        self.sizes[key] = size
        self._unsent.append((key, kind, size, upload))

    def take_unsent(self) -> list[tuple[str, str, int, Upload]]:
        taken, self._unsent = self._unsent, []
        return taken

    def of_commit(self, commit_key: str, packs: list[WrittenPack]) -> Iterator[str]:
        """All new keys that the commit of this document brings; documents of lost races stay garbage."""
        yield from (pack.key for pack in packs)
        for key in self.sizes:
            if not key.startswith(("packs/", "commits/")) or key == commit_key:
                yield key


def _checked_request(request: CommitRequest) -> dict[str, Any]:
    """Refuse what can't be committed before anything is read; returns the packed metadata."""
    check_ref_name(request.branch)
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
            raise InvalidInputError(
                f"file {shorten(name)!r} has {len(data)} bytes; files= takes up to {MAX_FILE_BYTES} each"
            )
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
    if any(part in ("", ".", "..") or "\0" in part or len(part.encode()) > 255 for part in parts) or "\\" in name:
        raise InvalidInputError(f"{name!r} can't be the name of a file in a checkpoint: use a relative path with '/'")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _full_entries(packs: list[WrittenPack], reader: ChunkReader) -> Iterator[tuple[bytes, str, int]]:
    for pack in packs:
        if pack.span == 0:
            columns = reader.columns(pack.pack_id)
            for row, digest in enumerate(columns.digests()):
                yield digest, pack.key, row
