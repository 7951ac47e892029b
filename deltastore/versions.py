"""Where the bytes of a commit are: its structure, its manifests, the chunk rows of its tensors."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deltastore.buckets.base import Bucket
from deltastore.chunk_reader import ChunkReader
from deltastore.dtypes import DType, dtype_of
from deltastore.errors import (
    FormatError,
    IncompatibleStateError,
    IntegrityError,
    RevisionNotFoundError,
    StorageError,
    UnsupportedFormatError,
    short_name,
)
from deltastore.forks import renew_in_children
from deltastore.formats import CommitDocument, StructureDocument, parse_commit, parse_structure
from deltastore.index.index import Index
from deltastore.manifests import ChunkRow, Manifest, PackRef
from deltastore.options import CHUNK_ELEMENTS
from deltastore.state import Path, leaf_paths, path_name, strip_wrapper_prefixes

VERSIONS_CACHED = 4


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

    def __init__(
        self,
        bucket: Bucket,
        reader: ChunkReader,
        document: CommitDocument,
        structure: StructureDocument,
        before: Version | None = None,
    ) -> None:
        """`before` is a version that may have the same structure, which then needs no second look."""
        self._bucket = bucket
        self._reader = reader
        self._manifests: dict[int, Manifest] = {}
        self.document = document
        self.structure = structure
        self.tensors: list[TensorInfo]
        self.names: list[str]
        self.leaves: list[tuple[tuple[Any, ...], int]]
        self._labels: dict[int, str]
        if before is not None and before.structure == structure:
            self.tensors, self.names, self.leaves, self._labels = before.tensors, before.names, before.leaves, before._labels
            return
        self.tensors = [TensorInfo(dtype_of(t.dtype), tuple(t.shape), t.shard, t.position) for t in structure.tensors]
        self.leaves = leaf_paths(structure.tree)
        self.names = [path_name(path) for path, _ in self.leaves]
        self._labels = {}
        last = max((number for _, number in self.leaves), default=-1)
        if last >= len(self.tensors):
            raise FormatError(f"the structure names tensor {last}, but lists {len(self.tensors)}; run `deltastore verify`")

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
                key = self.document.placement.structure.key
                raise FormatError(f"{key}: names manifest {shard}, the commit document has {len(placed)}", key)
            key = placed[shard].key
            with _naming(key):
                found = Manifest.parse(read_object(self._bucket, key, placed[shard].size), key)
            self._reader.learn(found.packs)
            self._manifests[shard] = found
        return found

    def seed_manifest(self, shard: int, manifest: Manifest) -> None:
        """Hand over a manifest that was just written."""
        self._manifests[shard] = manifest

    def packs(self) -> list[PackRef]:
        """Every pack that holds a part of this version; reads all its manifests."""
        found: dict[str, PackRef] = {}
        for shard in range(len(self.document.placement.manifests)):
            found.update((ref.pack_id, ref) for ref in self.manifest(shard).packs)
        return list(found.values())

    def rows(self, tensor: int) -> list[ChunkRow]:
        """Where each chunk of a stored tensor is."""
        info = self.tensors[tensor]
        if info.chunks == 0:
            return []
        manifest = self.manifest(info.shard)
        end = info.position + info.chunks
        if end > len(manifest):
            key = self.document.placement.structure.key
            raise FormatError(f"{key}: tensor {tensor} needs rows up to {end} of a manifest that has {len(manifest)}", key)
        return manifest.rows(info.position, end)

    def label(self, tensor: int) -> str:
        """How messages call a stored tensor."""
        if not self._labels:
            labels = {file.tensor: f"file {short_name(file.name)!r}" for file in self.structure.files if file.tensor is not None}
            for name, (_, number) in zip(self.names, self.leaves, strict=True):
                labels.setdefault(number, f"tensor {short_name(name)!r}")
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


class Versions:
    """Loads versions of one store; the last few stay in memory. Thread-safe."""

    def __init__(self, bucket: Bucket, index: Index, reader: ChunkReader) -> None:
        self._bucket = bucket
        self._index = index
        self._reader = reader
        self._recent: OrderedDict[str, Version] = OrderedDict()
        self._lock = threading.Lock()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """See `deltastore.forks`."""
        self._lock = threading.Lock()

    def get(self, commit_id: str) -> Version:
        """A version by commit id.

        Raises:
            RevisionNotFoundError: the index does not know the commit.
            IntegrityError: its documents are missing, malformed, or those of another commit; names the object.
        """
        with self._lock:
            found = self._recent.get(commit_id)
            if found is not None:
                self._recent.move_to_end(commit_id)
                return found
        record = self._index.commit(commit_id)
        if record is None:
            raise RevisionNotFoundError(f"commit {commit_id} is not in the index; see `deltastore log`")
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
            self._recent[commit_id] = version
            self._recent.move_to_end(commit_id)
            while len(self._recent) > VERSIONS_CACHED:
                self._recent.popitem(last=False)
