"""A state into packs: every chunk is scanned and encoded on threads, its entries packed in order.

The result is the content of a version: structure, chunk rows and tree digest, everything that does not depend on parents.

`run` does all of it. For a commit in the background `take` scans, in the caller's time, and `finish` encodes, on another thread,
which begins when everything is scanned, or as much as the window holds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from deltastore import canonical, layout
from deltastore.baseline import Baseline
from deltastore.chunk_reader import ChunkReader
from deltastore.chunk_writer import ChunkWriter
from deltastore.codecs import Word
from deltastore.depths import Depths
from deltastore.digests import bytes_digest, tensor_digest, tree_digest
from deltastore.dtypes import dtype_of
from deltastore.encoder import Chunk, ChunkEncoder, ChunkOutcome, ChunkTask, Scan
from deltastore.errors import short_name
from deltastore.files import ByteSource
from deltastore.formats import StoredFile, StoredTensor, StructureDocument
from deltastore.handoff import Handoff
from deltastore.index.index import Index
from deltastore.manifests import ChunkRow, cut_manifests
from deltastore.options import CHUNK_ELEMENTS, INLINE_FILE_BYTES, INLINE_VALUES_BYTES, STAGING_BYTES, worker_count
from deltastore.recent_deltas import RecentDeltas
from deltastore.state import FlatState, TensorSource
from deltastore.stored_path import VALUES_PATH, FilePath, StoredPath, path_bytes
from deltastore.versions import Version
from deltastore.workers import Workers

BATCH_BYTES = 512 << 10  # small chunks are scanned together up to this size


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


State = FlatState | Iterator[tuple[str, TensorSource]]
Files = Mapping[str, bytes | TensorSource]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Scanned:
    path: StoredPath
    dtype: str
    shape: tuple[int, ...]
    rows: list[ChunkRow]


@dataclass(frozen=True, slots=True)
class _Taken:
    """A state whose chunks are all on their way: what is known without their rows."""

    tree: Any
    values: list[Any]
    large_values: bool
    scanned: list[_Scanned]
    extra: list[_Scanned]
    files: Files


class _Line(Generic[T, R]):
    """Jobs on their way through the threads: small ones in batches, a bounded number at a time, settled in order.

    Each comes with the list of rows that its chunk's row belongs to.
    """

    def __init__(
        self, workers: Workers, work: Callable[[Sequence[T]], list[R]], settle: Callable[[R, list[ChunkRow]], None]
    ) -> None:
        self._workers = workers
        self._work = work
        self._settle = settle
        self._batch: list[tuple[T, list[ChunkRow]]] = []
        self._batch_bytes = 0
        self._running: deque[tuple[Future[list[R]], list[list[ChunkRow]]]] = deque()

    def add(self, job: T, nbytes: int, rows: list[ChunkRow]) -> None:
        """Queue a job that goes over so many bytes."""
        self._batch.append((job, rows))
        self._batch_bytes += nbytes
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
        jobs = [job for job, _ in self._batch]
        self._running.append((self._workers.submit(self._work, jobs), [rows for _, rows in self._batch]))
        self._batch, self._batch_bytes = [], 0

    def _settle_oldest(self) -> None:
        future, targets = self._running.popleft()
        for result, rows in zip(future.result(), targets, strict=True):
            self._settle(result, rows)


class Scanner:
    """Scans the tensors of one commit against its parent version, and encodes what is new."""

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
        self._taken: _Taken | None = None
        self._handoff: Handoff[tuple[Scan | ChunkOutcome, list[ChunkRow]]] = Handoff(STAGING_BYTES)

    # -- the two ways ---------------------------------------------------------------------------------------------------

    def run(self, state: State, files: Files) -> Content:
        """Scan and encode everything. A stream of (name, source) is read one tensor at a time, in its order."""

        def work(tasks: Sequence[ChunkTask]) -> list[ChunkOutcome]:
            return [self._encoder.encode(self._encoder.scan(task)) for task in tasks]

        def settle(outcome: ChunkOutcome, rows: list[ChunkRow]) -> None:
            self._settle(outcome, rows)
            self._report(outcome.length)

        with Workers(worker_count(), "deltastore-scan") as workers:
            taken = self._walk(_Line(workers, work, settle), state, files)
        return self._content(taken)

    def take(self, state: State, files: Files, before_encoding: Callable[[], object]) -> None:
        """Scan everything, so that the state may change afterwards.

        Args:
            before_encoding: called before a chunk that leaves no private copy is encoded here and now: waits for the commits
                before this one.
        """

        def work(tasks: Sequence[ChunkTask]) -> list[Scan | ChunkOutcome]:
            return [self._take(task, before_encoding) for task in tasks]

        def settle(taken: Scan | ChunkOutcome, rows: list[ChunkRow]) -> None:
            self._handoff.put((taken, rows), taken.nbytes)
            self._report(taken.chunk.length if isinstance(taken, Scan) else taken.length)

        try:
            with Workers(worker_count(), "deltastore-scan") as workers:
                self._taken = self._walk(_Line(workers, work, settle), state, files)
        except BaseException as error:
            self._handoff.fail(error)
            raise
        self._handoff.close()

    def _take(self, task: ChunkTask, before_encoding: Callable[[], object]) -> Scan | ChunkOutcome:
        scan = self._encoder.scan(task)
        if scan.private:
            return scan
        before_encoding()
        return self._encoder.encode(scan)

    def give_up(self, error: BaseException) -> None:
        """`finish` will not be called, or has failed: `take` gets the error."""
        self._handoff.fail(error)

    def wait_for_work(self) -> None:
        """Wait until everything is taken, or no more can be before `finish` is called. Raises the error of `take`."""
        self._handoff.wait_for_work()

    def finish(self) -> Content:
        """Encode what `take` has taken and still takes. Raises the error of `take` when that fails."""

        def work(taken: Sequence[Scan | ChunkOutcome]) -> list[ChunkOutcome]:
            return [self._encoder.encode(each) if isinstance(each, Scan) else each for each in taken]

        with Workers(worker_count(), "deltastore-encode", background=True) as workers:
            line = _Line(workers, work, self._settle)
            try:
                for taken, rows in self._handoff:
                    line.add(taken, taken.chunk.length if isinstance(taken, Scan) else 0, rows)
                line.drain()
            except BaseException:
                line.cancel()
                raise
        assert self._taken is not None
        return self._content(self._taken)

    # -- walking over the state -----------------------------------------------------------------------------------------

    def _walk(self, line: _Line[ChunkTask, Any], state: State, files: Files) -> _Taken:
        """Put every chunk of a state and its files on the line; returns when all are through."""
        try:
            if isinstance(state, FlatState):
                tree, values = state.tree, state.values
                self._baseline.expect(sum(source_bytes(each) for each in state.tensors if not each.frozen))
                scanned = self._scan(line, zip(_first_paths(state), state.tensors, strict=True))
            else:
                names: list[str] = []
                scanned = self._scan(line, _with_paths(state, names), one_at_a_time=True)
                tree = {"d": [[name, {"x": number}] for number, name in enumerate(names)]}
                values = []
            packed: Any = [canonical.pack(value) for value in values]
            extra: list[tuple[StoredPath, TensorSource]] = [
                (FilePath(name), ByteSource(data) if isinstance(data, bytes) else data)
                for name, data in files.items()
                if not isinstance(data, bytes) or len(data) > INLINE_FILE_BYTES
            ]
            body = canonical.dumps(packed)
            if len(body) > INLINE_VALUES_BYTES:
                extra.append((VALUES_PATH, ByteSource(body)))
            return _Taken(tree, packed, len(body) > INLINE_VALUES_BYTES, scanned, self._scan(line, extra), files)
        except BaseException:
            line.cancel()
            raise

    def _content(self, taken: _Taken) -> Content:
        """What was scanned, when all rows are known."""
        everything = taken.scanned + taken.extra
        self._baseline.retain({each.path for each in everything})
        tree_id = tree_digest(
            {
                "files": _file_digests(taken),
                "state": taken.tree,
                "tensors": [tensor_digest(each.dtype, each.shape, _joined(each.rows)).hex() for each in taken.scanned],
                "values": taken.values,
            }
        )
        values = {"tensor": len(everything) - 1} if taken.large_values else taken.values
        structure = _structure(taken.tree, everything, taken.files)
        return Content(structure, [each.rows for each in everything], tree_id, values)

    def _scan(
        self, line: _Line[ChunkTask, Any], named: Iterable[tuple[Any, TensorSource]], *, one_at_a_time: bool = False
    ) -> list[_Scanned]:
        results: list[_Scanned] = []
        for path, source in named:
            if one_at_a_time and not source.frozen:
                self._baseline.expect(self._baseline.nbytes() + source_bytes(source))
            results.append(self._submit(line, path, source))
            del source  # nothing may hold this tensor while a stream makes the next one
            if one_at_a_time:
                line.drain()
        line.drain()
        return results

    def _submit(self, line: _Line[ChunkTask, Any], path: StoredPath, source: TensorSource) -> _Scanned:
        """Put the chunks of a tensor on the line."""
        scanned = _Scanned(path, source.dtype, tuple(source.shape), [])
        for task in self._tasks(path, source):
            line.add(task, task.chunk.length, scanned.rows)
        return scanned

    def _tasks(self, path: StoredPath, source: TensorSource) -> Iterator[ChunkTask]:
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
            yield ChunkTask(Chunk(index, length, word, parent, baseline, f"{label}, chunk {index}"), source, start, stop)

    def _parent_rows(self, path: StoredPath, dtype: str, nbytes: int, chunk_bytes: int) -> list[ChunkRow]:
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

    def _report(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes)

    def _find(self, digest: bytes) -> tuple[str, int] | None:
        found = self._index.dedup([digest]).get(digest)
        return None if found is None else (layout.pack_id(found[0]), found[1])


def source_bytes(source: TensorSource) -> int:
    """Bytes of all elements."""
    return math.prod(source.shape) * dtype_of(source.dtype).itemsize


def _with_paths(stream: Iterator[tuple[str, TensorSource]], names: list[str]) -> Iterator[tuple[StoredPath, TensorSource]]:
    """A stream gives names, which are noted, and the scanner wants paths."""

    def with_path(named: tuple[str, TensorSource]) -> tuple[StoredPath, TensorSource]:
        names.append(named[0])
        return (named[0],), named[1]

    return map(with_path, stream)  # a generator would hold the tensor that it gave last


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


def _file_digests(taken: _Taken) -> list[list[str]]:
    """[name, digest] of every file: that of its bytes as a tensor."""
    stored = {each.path: tensor_digest(each.dtype, each.shape, _joined(each.rows)).hex() for each in taken.extra}
    return [[name, stored.get(FilePath(name)) or bytes_digest(_inline(data))] for name, data in sorted(taken.files.items())]


def _inline(data: bytes | TensorSource) -> bytes:
    assert isinstance(data, bytes)
    return data


def _structure(tree: Any, scanned: list[_Scanned], files: Files) -> StructureDocument:
    occupied = [each for each in scanned if each.rows]
    places: dict[int, tuple[int, int]] = {}
    for shard, run in enumerate(cut_manifests([(path_bytes(each.path), len(each.rows)) for each in occupied])):
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
        size = len(data) if isinstance(data, bytes) else data.shape[0]
        stored.append(StoredFile(name=name, size=size, tensor=tensor, data=_inline(data) if tensor is None else None))
    return StructureDocument(tree=tree, tensors=tuple(tensors), files=tuple(stored))


def _joined(rows: Iterable[ChunkRow]) -> bytes:
    return b"".join(row.digest for row in rows)
