"""verify(): is everything there, and is it what it says?

The structure check looks at every object that the index names: present, of the right size, parseable, and consistent with the
others. With `read_data` every stored entry that a commit needs is decoded once and its digests are compared. Nothing is
changed, and the check goes on past damage: every broken object is named, with the commits that it breaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltastore.buckets.base import Bucket
from deltastore.chunk_reader import ChunkReader, ReadJob
from deltastore.digests import bytes_digest, chunk_digest, tensor_digest, tree_digest
from deltastore.errors import DeltaStoreError, FormatError
from deltastore.formats import StoredFile
from deltastore.index.index import Index
from deltastore.index.records import CommitRecord
from deltastore.layout import pack_key
from deltastore.manifests import ChunkRow
from deltastore.versions import Version, Versions, read_object


@dataclass(frozen=True, slots=True)
class Problem:
    """Something broken: the object, what is wrong with it, and ids of the commits that need it."""

    key: str
    message: str
    commits: tuple[str, ...]


@dataclass(slots=True)
class _Work:
    problems: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    commits: int = 0
    objects: int = 0
    chunks: int = 0
    bytes_read: int = 0

    def add(self, key: str, message: str, commit: str) -> None:
        self.problems.setdefault((key, message), set()).add(commit)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and what is broken. True when all is well.

    Attributes:
        chunks: distinct chunks decoded; bytes_read: their raw bytes. Both 0 without `read_data`.
    """

    commits: int
    objects: int
    chunks: int
    bytes_read: int
    problems: tuple[Problem, ...]

    def __bool__(self) -> bool:
        return not self.problems


def run_verify(
    bucket: Bucket,
    index: Index,
    versions: Versions,
    reader: ChunkReader,
    commit_ids: Sequence[str],
    *,
    read_data: bool,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check these commits. `progress` is called with 1 per commit."""
    work = _Work()
    seen_objects: set[str] = set()
    seen_chunks: set[tuple[str, int]] = set()
    broken_objects: dict[str, str] = {}
    for commit_id in commit_ids:
        work.commits += 1
        keys = index.objects_of_commit(commit_id)
        states = index.object_states([key for key in keys if key not in seen_objects])
        found = bucket.stat(list(states))
        for key, record in states.items():
            seen_objects.add(key)
            work.objects += 1
            info = found[key]
            if info is None:
                broken_objects[key] = "missing from the bucket"
            elif info.size != record.size:
                broken_objects[key] = f"has {info.size} bytes, the index expects {record.size}"
        for key in keys:
            if key in broken_objects:
                work.add(key, broken_objects[key], commit_id)
        try:
            _check_document(bucket, index, index.commits([commit_id])[commit_id], work)
            version = versions.get(commit_id)
            _check_manifests(version, reader, commit_id, work)
            _check_version(version, reader, commit_id, work)
            _check_tree(version, reader, commit_id, work, read_data=read_data)
            if read_data:
                _read_version(version, reader, commit_id, seen_chunks, work)
        except DeltaStoreError as error:
            work.add(_key_of(error), str(error), commit_id)
        if progress is not None:
            progress(1)
    problems = tuple(Problem(key, message, tuple(sorted(commits))) for (key, message), commits in work.problems.items())
    return VerifyReport(work.commits, work.objects, work.chunks, work.bytes_read, problems)


def _check_document(bucket: Bucket, index: Index, record: CommitRecord, work: _Work) -> None:
    """A commit document is byte for byte the log entry that the index holds."""
    for entry in index.oplog(record.seq - 1, limit=1):
        if entry.commit_id == record.id and entry.body != read_object(bucket, record.object_key):
            work.add(record.object_key, "is not the document that was committed, which the index holds", record.id)


def _check_manifests(version: Version, reader: ChunkReader, commit_id: str, work: _Work) -> None:
    """The pack tables say of each pack what its own head says."""
    for number, place in enumerate(version.document.placement.manifests):
        for ref in version.manifest(number).packs:
            try:
                columns = reader.columns(ref.pack_id)
            except DeltaStoreError:
                continue  # the chunks in it are reported by name
            if (columns.head, columns.size) != (ref.head, ref.size):
                sizes = f"head {ref.head} and size {ref.size}, the pack has {columns.head} and {columns.size}"
                work.add(place.key, f"its table gives {pack_key(ref.pack_id)} {sizes}", commit_id)


def _check_tree(version: Version, reader: ChunkReader, commit_id: str, work: _Work, *, read_data: bool) -> None:
    """Structure, chunk digests, files and plain values together have the tree digest that the commit id stands for."""
    values: Any = version.document.placement.values
    if isinstance(values, dict):
        if not read_data:
            return  # they are a tensor of their own
        values = _parse_values(b"".join(_chunks(version, values["tensor"], reader)))
    own = 1 + max((number for _, number in version.leaves), default=-1)  # those of files and of large values follow
    document = {
        "files": [
            [file.name, _file_digest(version, file)] for file in sorted(version.structure.files, key=lambda file: file.name)
        ],
        "state": version.structure.tree,
        "tensors": [_tensor_digest(version, number).hex() for number in range(own)],
        "values": values,
    }
    found, expected = tree_digest(document), version.document.identity["tree"]
    if found != expected:
        key = version.document.placement.structure.key
        work.add(key, f"it and its manifests have the tree digest {found}, commit {commit_id} expects {expected}", commit_id)


def _tensor_digest(version: Version, number: int) -> bytes:
    info = version.tensors[number]
    return tensor_digest(info.dtype.name, info.shape, b"".join(row.digest for row in version.rows(number)))


def _file_digest(version: Version, file: StoredFile) -> str:
    if file.tensor is not None:
        return _tensor_digest(version, file.tensor).hex()
    return bytes_digest(file.data or b"")


def _chunks(version: Version, number: int, reader: ChunkReader) -> Iterator[bytes]:
    info = version.tensors[number]
    for index, row in enumerate(version.rows(number)):
        out = np.empty(info.chunk_length(index), np.uint8)
        reader.read(ReadJob(row, len(out), f"{version.label(number)}, chunk {index}", out=out))
        yield out.tobytes()


def _parse_values(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the plain values are no JSON: {str(error)[:200]}") from error


def _check_version(version: Version, reader: ChunkReader, commit_id: str, work: _Work) -> None:
    """Every row resolves to a full entry, inside the manifest's pack table."""
    for number, info in enumerate(version.tensors):
        if not info.chunks:
            continue
        table = {ref.pack_id for ref in version.manifest(info.shard).packs}
        for index, row in enumerate(version.rows(number)):
            label = f"{version.label(number)}, chunk {index}"
            try:
                chain = reader.chain(row.pack_id, row.row)
            except DeltaStoreError as error:
                work.add(_key_of(error), f"{label}: {error}", commit_id)
                continue
            if chain[0].digest != row.digest or chain[0].raw_length != info.chunk_length(index):
                work.add(pack_key(row.pack_id), f"{label}: the pack's columns do not agree with the manifest", commit_id)
            outside = {entry.pack_id for entry in chain} - table
            if outside:
                work.add(
                    version.document.placement.manifests[info.shard].key,
                    f"{label}: packs {sorted(outside)} are not in its table",
                    commit_id,
                )


def _read_version(version: Version, reader: ChunkReader, commit_id: str, seen: set[tuple[str, int]], work: _Work) -> None:
    for number, info in enumerate(version.tensors):
        for index, row in enumerate(version.rows(number)):
            _read_chunk(version, number, index, row, info.chunk_length(index), reader, commit_id, seen, work)


def _read_chunk(
    version: Version,
    number: int,
    index: int,
    row: ChunkRow,
    length: int,
    reader: ChunkReader,
    commit_id: str,
    seen: set[tuple[str, int]],
    work: _Work,
) -> None:
    if (row.pack_id, row.row) in seen:
        return
    label = f"{version.label(number)}, chunk {index}"
    out = np.empty(length, np.uint8)
    try:
        reader.read(ReadJob(row, length, label, out=out))
        if chunk_digest(out) != row.digest:
            problem = f"{label}: the decoded chunk does not have its BLAKE3 digest {row.digest.hex()}"
            work.add(pack_key(row.pack_id), problem, commit_id)
            return
    except DeltaStoreError as error:
        work.add(_key_of(error), str(error), commit_id)
        return
    seen.add((row.pack_id, row.row))
    work.chunks += 1
    work.bytes_read += length


def _key_of(error: DeltaStoreError) -> str:
    """The object that an error is about."""
    return getattr(error, "key", None) or "store"
