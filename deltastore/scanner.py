"""A state into packs: every chunk is scanned and encoded on threads, its entries packed in order.

The result is the content of a version: structure, chunk rows and tree digest, everything that does not depend on parents.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltastore import canonical, layout
from deltastore.baseline import Array, Baseline
from deltastore.chunk_reader import ChunkReader
from deltastore.chunk_writer import ChunkWriter
from deltastore.codecs import Word
from deltastore.depths import Depths
from deltastore.digests import bytes_digest, tensor_digest, tree_digest
from deltastore.dtypes import dtype_of
from deltastore.encoder import ChunkEncoder, ChunkOutcome, ChunkTask
from deltastore.errors import short_name
from deltastore.formats import StoredFile, StoredTensor, StructureDocument
from deltastore.index.index import Index
from deltastore.manifests import ChunkRow, cut_manifests
from deltastore.options import CHUNK_ELEMENTS, INLINE_FILE_BYTES, INLINE_VALUES_BYTES, worker_count
from deltastore.recent_deltas import RecentDeltas
from deltastore.state import FlatState, TensorSource
from deltastore.versions import Version

BATCH_BYTES = 512 << 10  # small chunks are scanned together up to this size


@dataclass(frozen=True, slots=True)
class FilePath:
    """Stands for the path of a large file among the paths of tensors."""

    name: str


VALUES_PATH = FilePath("")  # plain values that are too large for the commit document; no file has this name


@dataclass(frozen=True, slots=True)
class Content:
    """A scanned state.

    Attributes:
        rows: chunk rows of each stored tensor, in the order of `structure.tensors`.
        tree: the tree digest.
        values: what `placement.values` becomes.
    """

    structure: StructureDocument
    rows: list[list[ChunkRow]]
    tree: str
    values: Any


_Window = deque[tuple[Future[ChunkOutcome], list[ChunkRow]]]  # chunks in work, in order, and where their rows go


@dataclass(frozen=True, slots=True)
class _Scanned:
    path: Any
    dtype: str
    shape: tuple[int, ...]
    rows: list[ChunkRow]


class ByteSource:
    """Bytes held in memory, as a tensor of uint8."""

    dtype = "uint8"
    frozen = False

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.shape: tuple[int, ...] = (len(data),)

    def read(self, start: int, stop: int) -> Array:
        """Elements [start, stop)."""
        return self._data[start:stop]


class _Line:
    """Tasks on their way through the threads: small ones in batches, a bounded number at a time, settled in order."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        encoder: ChunkEncoder,
        settle: Callable[[ChunkOutcome, list[ChunkRow]], None],
    ) -> None:
        self._pool = pool
        self._encoder = encoder
        self._settle = settle
        self._batch: list[tuple[ChunkTask, list[ChunkRow]]] = []
        self._batch_bytes = 0
        self._running: deque[tuple[Future[list[ChunkOutcome]], list[list[ChunkRow]]]] = deque()

    def add(self, task: ChunkTask, rows: list[ChunkRow]) -> None:
        """Queue a task whose row goes to `rows`."""
        self._batch.append((task, rows))
        self._batch_bytes += task.length
        if self._batch_bytes >= BATCH_BYTES:
            self._submit()
        if len(self._running) > 3 * worker_count():
            self._settle_oldest()

    def drain(self) -> None:
        """Finish everything that was added."""
        if self._batch:
            self._submit()
        while self._running:
            self._settle_oldest()

    def cancel(self) -> None:
        """Drop what has not begun."""
        for future, _ in self._running:
            future.cancel()

    def _submit(self) -> None:
        tasks = [task for task, _ in self._batch]
        self._running.append((self._pool.submit(self._encoder.encode_all, tasks), [rows for _, rows in self._batch]))
        self._batch, self._batch_bytes = [], 0

    def _settle_oldest(self) -> None:
        future, targets = self._running.popleft()
        for outcome, rows in zip(future.result(), targets, strict=True):
            self._settle(outcome, rows)


class Scanner:
    """Scans the tensors of one commit against its parent version."""

    def __init__(
        self,
        reader: ChunkReader,
        index: Index,
        depths: Depths,
        recent: RecentDeltas,
        baseline: Baseline,
        writer: ChunkWriter,
        parent: Version | None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._index = index
        self._depths = depths
        self._recent = recent
        self._baseline = baseline
        self._writer = writer
        self._parent = parent
        self._progress = progress
        height = 0 if parent is None else parent.height + 1
        self._encoder = ChunkEncoder(reader, depths, recent, self._find, height)
        self._new_full: dict[bytes, ChunkRow] = {}
        self._before = _stored_by_path(parent)

    def run(self, state: FlatState | Iterator[tuple[str, TensorSource]], files: Mapping[str, bytes]) -> Content:
        """Scan everything. A stream of (name, source) is read one tensor at a time, in its order."""
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="deltastore-scan") as pool:
            try:
                if isinstance(state, FlatState):
                    tree, values = state.tree, state.values
                    scanned = self._scan(pool, zip(_first_paths(state), state.tensors, strict=True))
                else:
                    scanned = self._scan(pool, map(_with_path, state), one_at_a_time=True)
                    tree = {"d": [[each.path[0], {"x": number}] for number, each in enumerate(scanned)]}
                    values = []
                packed: Any = [canonical.pack(value) for value in values]
                extra = [(FilePath(name), ByteSource(data)) for name, data in files.items() if len(data) > INLINE_FILE_BYTES]
                body = canonical.dumps(packed)
                if len(body) > INLINE_VALUES_BYTES:
                    extra.append((VALUES_PATH, ByteSource(body)))
                scanned_extra = self._scan(pool, extra)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        everything = scanned + scanned_extra
        self._baseline.retain({each.path for each in everything})
        tree_id = tree_digest(
            {
                "files": [[name, bytes_digest(data)] for name, data in sorted(files.items())],
                "state": tree,
                "tensors": [tensor_digest(each.dtype, each.shape, _joined(each.rows)).hex() for each in scanned],
                "values": packed,
            }
        )
        placed_values = {"tensor": len(everything) - 1} if len(body) > INLINE_VALUES_BYTES else packed
        return Content(_structure(tree, everything, files), [each.rows for each in everything], tree_id, placed_values)

    def _scan(
        self, pool: ThreadPoolExecutor, named: Iterable[tuple[Any, TensorSource]], *, one_at_a_time: bool = False
    ) -> list[_Scanned]:
        results: list[_Scanned] = []
        line = _Line(pool, self._encoder, self._settle)
        try:
            for path, source in named:
                results.append(self._submit(line, path, source))
                del source  # nothing may hold this tensor while a stream makes the next one
                if one_at_a_time:
                    line.drain()
            line.drain()
        except BaseException:
            line.cancel()
            raise
        return results

    def _submit(self, line: _Line, path: Any, source: TensorSource) -> _Scanned:
        """Put the chunks of a tensor on the line."""
        scanned = _Scanned(path, source.dtype, tuple(source.shape), [])
        for task in self._tasks(path, source):
            line.add(task, scanned.rows)
        return scanned

    def _tasks(self, path: Any, source: TensorSource) -> Iterator[ChunkTask]:
        dtype = dtype_of(source.dtype)
        elements = math.prod(source.shape)
        nbytes, chunk_bytes = elements * dtype.itemsize, CHUNK_ELEMENTS * dtype.itemsize
        chunks = -(-elements // CHUNK_ELEMENTS)
        parents = self._parent_rows(path, source.dtype, nbytes, chunk_bytes)
        baseline = self._baseline.tensor(path, nbytes, chunk_bytes, chunks, frozen=source.frozen)
        word = Word(dtype.word, dtype.floating)
        label = f"file {path.name!r}" if isinstance(path, FilePath) else f"tensor {short_name('.'.join(map(str, path)))!r}"
        for index in range(chunks):
            start, stop = index * CHUNK_ELEMENTS, min((index + 1) * CHUNK_ELEMENTS, elements)
            parent = parents[index] if index < len(parents) else None
            length = (stop - start) * dtype.itemsize
            yield ChunkTask(source, index, start, stop, length, word, parent, baseline, f"{label}, chunk {index}")

    def _parent_rows(self, path: Any, dtype: str, nbytes: int, chunk_bytes: int) -> list[ChunkRow]:
        """The parent version's rows of chunks that have the same place and length; a resized tensor keeps its whole ones."""
        before = self._before.get(path)
        if before is None or self._parent is None or self._parent.tensors[before].dtype.name != dtype:
            return []
        rows = self._parent.rows(before)
        known = self._parent.tensors[before].nbytes
        return rows if known == nbytes else rows[: min(known, nbytes) // chunk_bytes]

    def _settle(self, outcome: ChunkOutcome, rows: list[ChunkRow]) -> None:
        """Take the outcome of a task: its entries into packs, its row into the version."""
        row = outcome.row
        for entry in outcome.entries:
            added = self._new_full.get(entry.digest) if entry.base is None else None  # the same content twice in this commit
            if added is None:
                place = self._writer.add(entry)
                self._depths.add(place, entry)
                added = ChunkRow(*place, entry.digest)
                if entry.base is None:
                    self._new_full[entry.digest] = added
            if outcome.row is None:
                row = added
        assert row is not None
        rows.append(row)
        self._recent.remove(outcome.folded)
        if outcome.recent is not None:
            self._recent.add((row.pack_id, row.row), outcome.recent)
        if self._progress is not None:
            self._progress(outcome.length)

    def _find(self, digest: bytes) -> tuple[str, int] | None:
        found = self._index.dedup([digest]).get(digest)
        return None if found is None else (layout.pack_id(found[0]), found[1])


def _with_path(named: tuple[str, TensorSource]) -> tuple[Any, TensorSource]:
    """A stream gives names, the scanner wants paths. A function, because a generator would hold the tensor it gave last."""
    return (named[0],), named[1]


def _first_paths(state: FlatState) -> list[Any]:
    paths: dict[int, Any] = {}
    for path, number in state.leaves:
        paths.setdefault(number, path)
    return [paths[number] for number in range(len(state.tensors))]


def _stored_by_path(parent: Version | None) -> dict[Any, int]:
    if parent is None:
        return {}
    found: dict[Any, int] = dict(parent.leaves)
    for file in parent.structure.files:
        if file.tensor is not None:
            found[FilePath(file.name)] = file.tensor
    values = parent.document.placement.values
    if isinstance(values, dict):
        found[VALUES_PATH] = values["tensor"]
    return found


def _structure(tree: Any, scanned: list[_Scanned], files: Mapping[str, bytes]) -> StructureDocument:
    occupied = [each for each in scanned if each.rows]
    places: dict[int, tuple[int, int]] = {}
    for shard, run in enumerate(cut_manifests([(_path_bytes(each.path), len(each.rows)) for each in occupied])):
        position = 0
        for number in run:
            places[id(occupied[number])] = shard, position
            position += len(occupied[number].rows)
    tensors = []
    numbers: dict[Any, int] = {}
    for number, each in enumerate(scanned):
        shard, position = places.get(id(each), (0, 0))
        tensors.append(StoredTensor(dtype=each.dtype, shape=each.shape, shard=shard, position=position))
        numbers[each.path] = number
    stored = []
    for name, data in sorted(files.items()):
        tensor = numbers.get(FilePath(name))
        stored.append(StoredFile(name=name, size=len(data), tensor=tensor, data=data if tensor is None else None))
    return StructureDocument(tree=tree, tensors=tuple(tensors), files=tuple(stored))


def _path_bytes(path: Any) -> bytes:
    return canonical.dumps(["file", path.name] if isinstance(path, FilePath) else [canonical.pack(part) for part in path])


def _joined(rows: Iterable[ChunkRow]) -> bytes:
    return b"".join(row.digest for row in rows)
