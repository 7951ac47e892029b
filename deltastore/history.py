"""What is committed: revisions, commits, and where the chunks of a version are."""

from __future__ import annotations

import difflib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from deltastore import canonical
from deltastore.buckets.base import Bucket
from deltastore.chunk_reader import ChunkReader
from deltastore.dtypes import DType, dtype_of
from deltastore.errors import (
    FormatError,
    IncompatibleStateError,
    IntegrityError,
    InvalidInputError,
    RevisionNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from deltastore.formats import CommitDocument, Identity, StructureDocument, parse_commit, parse_structure
from deltastore.index.index import Index
from deltastore.index.records import CommitRecord
from deltastore.manifests import ChunkRow, Manifest
from deltastore.options import CHUNK_ELEMENTS
from deltastore.state import Path, leaf_names, leaf_paths, strip_wrapper_prefixes

VERSIONS_CACHED = 4
SHORT_ID = 8  # hex digits at least, for a commit id prefix

_REVISION = re.compile(r"(?P<name>.+?)(?:@\{(?P<key>[^={}]+)=(?P<value>[^{}]*)\})?(?P<steps>(?:~[0-9]{0,9})*)", re.DOTALL)
_REF_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
_HEX = re.compile(r"[0-9a-f]{8,64}")
_ONLY_HEX = re.compile(r"[0-9A-Fa-f]{8,}")


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit.

    Attributes:
        id: 64 hex digits; equal ids mean equal content, history, message, author, time and metadata.
        tree: digest of the content alone; equal trees mean equal bits.
        created_at: in UTC.
    """

    id: str
    parents: tuple[str, ...]
    tree: str
    message: str
    author: str
    created_at: datetime
    metadata: dict[str, Any] = field(hash=False)

    @classmethod
    def from_record(cls, record: CommitRecord) -> Commit:
        """The public face of an index row."""
        metadata = {key: canonical.unpack(json.loads(value)) for key, value in record.metadata.items()}
        created_at = datetime.fromisoformat(record.created_at)
        return cls(record.id, record.parents, record.tree, record.message, record.author, created_at, metadata)

    @classmethod
    def from_identity(cls, commit_id: str, identity: Identity) -> Commit:
        """The public face of a commit document."""
        return cls(
            commit_id,
            tuple(identity["parents"]),
            identity["tree"],
            identity["message"],
            identity["author"],
            datetime.fromisoformat(identity["time"]),
            {name: canonical.unpack(value) for name, value in identity["metadata"].items()},
        )

    @property
    def short_id(self) -> str:
        """The first 12 hex digits."""
        return self.id[:12]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor: dtype, shape, and where its chunk rows are (manifest number, first row)."""

    dtype: DType
    shape: tuple[int, ...]
    shard: int
    position: int

    @property
    def elements(self) -> int:
        """Number of storage elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.dtype.itemsize

    @property
    def chunks(self) -> int:
        """Number of chunks: none for an empty tensor."""
        return -(-self.elements // CHUNK_ELEMENTS)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk."""
        return CHUNK_ELEMENTS * self.dtype.itemsize

    def chunk_length(self, index: int) -> int:
        """Bytes of chunk `index`."""
        return min(self.chunk_bytes, self.nbytes - index * self.chunk_bytes)


class Version:
    """A commit with all that says where its bytes are. Manifests are read when they are needed."""

    def __init__(self, bucket: Bucket, reader: ChunkReader, document: CommitDocument, structure: StructureDocument) -> None:
        self._bucket = bucket
        self._reader = reader
        self._manifests: dict[int, Manifest] = {}
        self.document = document
        self.structure = structure
        self.tensors = [TensorInfo(dtype_of(t.dtype), tuple(t.shape), t.shard, t.position) for t in structure.tensors]
        self.names: list[str] = leaf_names(structure.tree)
        self.leaves: list[tuple[tuple[Any, ...], int]] = leaf_paths(structure.tree)
        last = max((number for _, number in self.leaves), default=-1)
        if last >= len(self.tensors):
            raise FormatError(f"the structure names tensor {last}, but lists {len(self.tensors)}; run `deltastore verify`")
        self._labels: dict[int, str] = {}

    @property
    def height(self) -> int:
        """First-parent height of the commit."""
        return self.document.placement.height

    def manifest(self, shard: int) -> Manifest:
        """A manifest by its number in the commit document."""
        found = self._manifests.get(shard)
        if found is None:
            placed = self.document.placement.manifests
            if not 0 <= shard < len(placed):
                raise FormatError(f"the structure names manifest {shard}, the commit document has {len(placed)}")
            key = placed[shard].key
            with _naming(key):
                found = Manifest.parse(read_object(self._bucket, key, placed[shard].size), key)
            self._reader.learn(found.packs)
            self._manifests[shard] = found
        return found

    def seed_manifest(self, shard: int, manifest: Manifest) -> None:
        """Hand over a manifest that was just written."""
        self._manifests[shard] = manifest

    def rows(self, tensor: int) -> list[ChunkRow]:
        """Where each chunk of a stored tensor is."""
        info = self.tensors[tensor]
        if info.chunks == 0:
            return []
        manifest = self.manifest(info.shard)
        end = info.position + info.chunks
        if end > len(manifest):
            raise FormatError(f"tensor {tensor} needs rows up to {end} of a manifest that has {len(manifest)}")
        return manifest.rows(info.position, end)

    def label(self, tensor: int) -> str:
        """How messages call a stored tensor."""
        if not self._labels:
            labels = {file.tensor: f"file {shorten(file.name)!r}" for file in self.structure.files if file.tensor is not None}
            for name, (_, number) in zip(self.names, self.leaves, strict=True):
                labels.setdefault(number, f"tensor {shorten(name)!r}")
            self._labels = labels
        return self._labels.get(tensor, f"stored tensor {tensor}")


def match_leaves(left: Sequence[tuple[Path, str]], right: Sequence[tuple[Path, str]]) -> dict[int, int]:
    """Which leaves of two states, given as (path, name), are the same: positions in `left` to positions in `right`.

    Leaves match by typed path, else by name, else by name without wrapper prefixes. A name that several leaves of one side
    share matches nothing: a guess would put the values of one tensor into another.
    """
    pairs: dict[int, int] = {}
    for key_of in (_typed_path, _name, _bare_name):
        taken = set(pairs.values())
        free = _unique((key_of(leaf), at) for at, leaf in enumerate(right) if at not in taken)
        for key, at in _unique((key_of(leaf), at) for at, leaf in enumerate(left) if at not in pairs).items():
            if key in free:
                pairs[at] = free[key]
    return pairs


def _typed_path(leaf: tuple[Path, str]) -> Any:
    return tuple((type(key), key) for key in leaf[0])


def _name(leaf: tuple[Path, str]) -> str:
    return leaf[1]


def _bare_name(leaf: tuple[Path, str]) -> str:
    return strip_wrapper_prefixes(leaf[1])


def _unique(keyed: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    found: dict[Any, int] = {}
    repeated = set()
    for key, at in keyed:
        if found.setdefault(key, at) != at:
            repeated.add(key)
    return {key: at for key, at in found.items() if key not in repeated}


def shorten(name: str, limit: int = 120) -> str:
    """A name for a message: very long ones lose their middle."""
    return name if len(name) <= limit else f"{name[: limit // 2]}…{name[-limit // 3 :]}"


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Errors about the content of an object carry its key."""
    try:
        yield
    except FormatError as error:
        raise type(error)(str(error), error.key or key) from error
    except IncompatibleStateError as error:  # a dtype that this version does not know
        raise UnsupportedFormatError(f"{key}: {error}", key) from error


def read_object(bucket: Bucket, key: str, size: int | None = None) -> bytes:
    """A whole small object; damage is an IntegrityError that names it."""
    try:
        data = bucket.get(key)
    except StorageError as error:
        if error.kind in ("missing", "truncated"):
            raise IntegrityError(f"{key}: {error}; run `deltastore verify` to see what it breaks", key) from error
        raise
    if size is not None and len(data) != size:
        found = f"has {len(data)} bytes, expected {size}"
        raise IntegrityError(f"{key}: {found}; run `deltastore verify` to see what it breaks", key)
    return data


def check_ref_name(name: str) -> None:
    """Raises InvalidInputError unless `name` may be that of a branch or tag."""
    if not isinstance(name, str) or not _REF_NAME.fullmatch(name) or ".." in name or _ONLY_HEX.fullmatch(name):
        raise InvalidInputError(
            f"{shorten(str(name))!r} can't be the name of a branch or tag: it must match {_REF_NAME.pattern}, hold no '..', "
            "and not be 8 or more hex digits only"
        )


class History:
    """Resolves revisions and loads versions of one store. Thread-safe."""

    def __init__(self, bucket: Bucket, index: Index, reader: ChunkReader) -> None:
        self._bucket = bucket
        self._index = index
        self._reader = reader
        self._versions: OrderedDict[str, Version] = OrderedDict()
        self._lock = threading.Lock()

    # -- revisions ----------------------------------------------------------------------------------------------------------

    def resolve(self, revision: str) -> str:
        """The commit id that a revision names: branch, tag, id prefix of ≥ 8 hex digits, `x~3`, `x@{key=value}`.

        Raises:
            RevisionNotFoundError: nothing answers to it; the message names near misses.
        """
        if not isinstance(revision, str) or not (match := _REVISION.fullmatch(revision)):
            raise InvalidInputError(
                f"not a revision: {revision!r}; use a branch, a tag, main~3, main@{{step=100}} or a commit id"
            )
        commit_id = self._resolve_name(match["name"], revision)
        if match["key"] is not None:
            commit_id = self._find_metadata(commit_id, match["key"], match["value"], revision)
        steps = sum(1 if part == "" else int(part) for part in match["steps"].split("~")[1:])
        if steps == 0:
            return commit_id
        found = self._index.first_parent_at(commit_id, steps)
        if found is None:
            raise RevisionNotFoundError(
                f"{revision!r}: the history ends before {steps} steps back; see `deltastore log {match['name']}`"
            )
        return found

    def _resolve_name(self, name: str, revision: str) -> str:
        ref = self._index.ref(name)
        if ref is not None:
            return ref.commit_id
        lowered = name.lower()
        if _HEX.fullmatch(lowered):
            found = self._index.find_commits(lowered, limit=3)
            if len(found) == 1:
                return found[0]
            if found:
                raise RevisionNotFoundError(f"{name!r} is ambiguous: {', '.join(each[:16] for each in found)}; give more digits")
        names = [ref.name for ref in self._index.refs()]
        near = difflib.get_close_matches(name[:255], names, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "see `deltastore branch` and `deltastore tag`"
        if not names:
            hint = "the store has no commits yet"
        raise RevisionNotFoundError(f"no branch, tag or commit {shorten(revision)!r}; {hint}")

    def _find_metadata(self, commit_id: str, key: str, text: str, revision: str) -> str:
        value: Any = {"true": True, "false": False}.get(text, text)
        try:
            number: float | None = float(text)
        except ValueError:
            number = None
        packed = canonical.dumps(canonical.pack(value)).decode()
        found = self._index.find_first_parent_with(commit_id, key, packed, number)
        if found is None:
            raise RevisionNotFoundError(
                f"{shorten(revision)!r}: no ancestor has metadata {key}={text}; see `deltastore log --json`"
            )
        return found

    # -- commits ------------------------------------------------------------------------------------------------------------

    def record(self, commit_id: str) -> CommitRecord:
        """The index row of a commit that must exist."""
        record = self._index.commit(commit_id)
        if record is None:
            raise RevisionNotFoundError(f"commit {commit_id} is not in the index")
        return record

    def commit(self, revision: str) -> Commit:
        """The commit that a revision names."""
        return Commit.from_record(self.record(self.resolve(revision)))

    def log(self, revision: str, limit: int | None) -> list[Commit]:
        """First-parent history, newest first."""
        return [Commit.from_record(record) for record in self._index.first_parents(self.resolve(revision), limit)]

    def version(self, commit_id: str) -> Version:
        """A version by commit id; the last few stay in memory."""
        with self._lock:
            found = self._versions.get(commit_id)
            if found is not None:
                self._versions.move_to_end(commit_id)
                return found
        record = self.record(commit_id)
        key = record.object_key
        with _naming(key):
            document = parse_commit(read_object(self._bucket, key), key)
        if document.commit_id() != commit_id:
            found_id = document.commit_id()
            raise IntegrityError(f"{key}: its identity is that of commit {found_id}, expected {commit_id}", key)
        placed = document.placement.structure
        with _naming(placed.key):
            structure = parse_structure(read_object(self._bucket, placed.key, placed.size), placed.key)
            version = Version(self._bucket, self._reader, document, structure)
        self.remember(commit_id, version)
        return version

    def remember(self, commit_id: str, version: Version) -> None:
        """Keep a version in memory."""
        with self._lock:
            self._versions[commit_id] = version
            self._versions.move_to_end(commit_id)
            while len(self._versions) > VERSIONS_CACHED:
                self._versions.popitem(last=False)
