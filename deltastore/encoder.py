"""One chunk of a commit: scan it, then decide what is stored for it and encode that.

    live tensor ──scan──▶ private copy + steps ──encode──▶ delta of span 1 ──▶ folds that the ladder owes ──▶ entries
                               └──▶ digests                      └── or a full entry, when that is smaller

A live chunk is read exactly once, by `scan`. Everything stored for it is derived from the private copy and from the steps that
the same pass extracted, so a tensor that somebody changes meanwhile gives a mixed version, never an undecodable one; and when
the copy is that of the baseline, `encode` may come after the tensor has changed.

What is stored:
* nothing, when the chunk equals the parent version's, or a full chunk that the store already has;
* else a delta to the parent version's entry, unless a full entry is smaller (tried only when the delta exceeds half of
  the full entry at the end of its chain);
* at ladder commits the folds (`deltastore.ladder`); a full entry takes the place of the widest fold that would exceed half of
  the chain's full entry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deltastore import codecs
from deltastore.baseline import TensorBaseline
from deltastore.chunk_reader import ChunkReader, ReadJob
from deltastore.codecs import Steps, Word, kernel
from deltastore.depths import Depths
from deltastore.digests import chunk_digest, fast_digest
from deltastore.ladder import FULL_SPAN, STEP_SPAN, Depth, folds
from deltastore.manifests import ChunkRow
from deltastore.options import LADDER_BASE
from deltastore.packs import PackEntry, Place, StoredEntry
from deltastore.recent_deltas import Delta, RecentDeltas
from deltastore.state import TensorSource

Array = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk to commit: number `index` of its tensor, `length` bytes, and what the parent version has in its place."""

    index: int
    length: int
    word: Word
    parent: ChunkRow | None
    baseline: TensorBaseline
    label: str


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """A chunk and where its bytes are: elements [start, stop) of `source`."""

    chunk: Chunk
    source: TensorSource
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """What a commit stores for a chunk.

    `entries` are new pack entries, narrow spans first. The manifest names `row` when it is given, else the last entry; `recent`
    is the delta of that, if a fold may sum it soon. `folded` are the places of entries that a fold now stands for.
    """

    digest: bytes
    length: int
    entries: tuple[PackEntry, ...] = ()
    row: ChunkRow | None = None
    recent: Delta | None = None
    folded: tuple[Place, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the new entries."""
        return sum(len(entry.payload) for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Scan:
    """What was taken from a live chunk.

    Attributes:
        copy: its bytes; None when it equals the parent version's.
        steps: from the parent's chunk to the copy, where that was in the baseline.
        private: the live tensor is not needed any more: the chunk is unchanged, or `copy` is the baseline's own.
    """

    chunk: Chunk
    copy: Array | None
    steps: Steps | None
    private: bool

    @property
    def nbytes(self) -> int:
        """Bytes of memory that wait for the encoder, the baseline aside."""
        return 0 if self.steps is None else self.steps.nbytes


@dataclass(frozen=True, slots=True)
class _Content:
    """A scanned chunk with its digests."""

    digest: bytes
    fingerprint: bytes
    copy: Array | None
    steps: Steps | None


class ChunkEncoder:
    """Encodes the chunks of one commit. Its `encode` may run on several threads.

    Args:
        reader: for parent chunks that are not in the baseline, and for the payloads that folds sum.
        depths: of the parent version's entries.
        recent: deltas that earlier commits wrote.
        find: content digest -> place of a full entry that the store has, or None.
        height: first-parent height of the commit.
    """

    def __init__(
        self,
        reader: ChunkReader,
        depths: Depths,
        recent: RecentDeltas,
        find: Callable[[bytes], tuple[str, int] | None],
        height: int,
    ) -> None:
        self._reader = reader
        self._depths = depths
        self._recent = recent
        self._find = find
        self._height = height
        self._local = threading.local()

    # -- scanning ---------------------------------------------------------------------------------------------------------

    def scan(self, task: ChunkTask) -> Scan:
        """Read a live chunk, once. When the result is not `private`, encode it on the same thread before scanning the next."""
        chunk = task.chunk
        parent, baseline = chunk.parent, chunk.baseline
        live = task.source.read(task.start, task.stop)
        known = None if parent is None else baseline.fingerprint(chunk.index, parent.digest)
        own = baseline.chunk(chunk.index)
        if own is None:
            if known is not None and fast_digest(live) == known:
                return Scan(chunk, None, None, private=True)
            if known is not None:
                baseline.changed = True
            copy = self._scratch("copy", chunk.length)
            np.copyto(copy, live)
            return Scan(chunk, copy, None, private=False)
        trusted = known is not None and fast_digest(own) == known
        baseline.forget(chunk.index)
        if not trusted:
            np.copyto(own, live)
            return Scan(chunk, own, None, private=True)
        steps = kernel.extract(own, live, chunk.word)
        if steps.count == 0:
            assert parent is not None
            assert known is not None
            baseline.record(chunk.index, parent.digest, known)
            return Scan(chunk, None, None, private=True)
        return Scan(chunk, own, steps, private=True)

    # -- encoding ---------------------------------------------------------------------------------------------------------

    def encode(self, scan: Scan) -> ChunkOutcome:
        """Take the digests of a scanned chunk, and encode what must be stored for it."""
        chunk = scan.chunk
        if scan.copy is None:
            return self._unchanged(chunk, None)
        digest, fingerprint = chunk_digest(scan.copy), fast_digest(scan.copy)
        chunk.baseline.record(chunk.index, digest, fingerprint)
        steps = scan.steps
        if steps is None:  # no baseline to compare with
            if chunk.parent is not None and digest == chunk.parent.digest:
                return self._unchanged(chunk, scan.copy)
            known = self._find(digest)
            if known is not None:
                return ChunkOutcome(digest, chunk.length, row=ChunkRow(*known, digest))
            if chunk.parent is not None:
                before = self._scratch("before", chunk.length)
                self._reader.read(ReadJob(chunk.parent, chunk.length, f"parent of {chunk.label}", out=before))
                steps = kernel.extract(before, scan.copy, chunk.word)
        content = _Content(digest, fingerprint, scan.copy, steps)
        if steps is None or chunk.parent is None:
            return ChunkOutcome(digest, chunk.length, (self._full(chunk, content),))
        return self._delta(chunk, content, chunk.parent, steps)

    def _unchanged(self, chunk: Chunk, copy: Array | None) -> ChunkOutcome:
        parent = chunk.parent
        assert parent is not None
        depth = self._depths.of(parent.pack_id, parent.row)
        if not depth.fold_due(self._height, changed=False):
            return ChunkOutcome(parent.digest, chunk.length, row=parent)
        fingerprint = self._reader.columns(parent.pack_id).entry(parent.row).fast_digest
        return self._fold(chunk, _Content(parent.digest, fingerprint, copy, None), depth, None)

    def _full(self, chunk: Chunk, content: _Content) -> PackEntry:
        copy = content.copy
        if copy is None:  # it did not change, so nothing was copied
            assert chunk.parent is not None
            copy = self._scratch("copy", chunk.length)
            self._reader.read(ReadJob(chunk.parent, chunk.length, chunk.label, out=copy))
        codec, payload = codecs.encode_full(copy, chunk.word)
        return PackEntry(content.digest, content.fingerprint, chunk.length, codec, payload, FULL_SPAN, None)

    def _delta(self, chunk: Chunk, content: _Content, parent: ChunkRow, steps: Steps) -> ChunkOutcome:
        depth = self._depths.of(parent.pack_id, parent.row)
        codec, payload = codecs.encode_delta(steps)
        if 2 * len(payload) > depth.root_stored:
            full = self._full(chunk, content)
            if len(full.payload) <= len(payload):
                return ChunkOutcome(content.digest, chunk.length, (full,))
        place = (parent.pack_id, parent.row)
        delta = PackEntry(content.digest, content.fingerprint, chunk.length, codec, payload, STEP_SPAN, place)
        if not depth.fold_due(self._height, changed=True):
            return ChunkOutcome(content.digest, chunk.length, (delta,), recent=codecs.uncompressed(codec, payload, steps))
        return self._fold(chunk, content, depth, delta)

    def _fold(self, chunk: Chunk, content: _Content, depth: Depth, delta: PackEntry | None) -> ChunkOutcome:
        """Sum the deltas on top of the chain into one per span that is due. `delta` holds the steps of `content`."""
        parent = chunk.parent
        assert parent is not None
        chain = self._reader.chain(parent.pack_id, parent.row)
        new = 0 if delta is None else 1
        due = list(folds([STEP_SPAN] * new + [entry.span for entry in chain], self._height))
        entries = [] if delta is None else [delta]
        row = parent if delta is None else None
        if not due:
            return ChunkOutcome(content.digest, chunk.length, tuple(entries), row)
        folded = chain[: due[-1].entries - new]
        deltas = self._deltas(folded)
        total = self._scratch("total", chunk.length)
        total[:] = 0
        if content.steps is not None:
            kernel.accumulate(total, content.steps)
        summed = 0
        recent = None
        for fold in due:
            stop = fold.entries - new
            codecs.accumulate_deltas(deltas[summed:stop], total, chunk.word)
            summed = stop
            below = chain[stop]
            steps = kernel.collect(total, chunk.word)
            recent = None
            if steps.count == 0:  # the content is that of the entry below once more
                row = ChunkRow(below.pack_id, below.row, content.digest)
                continue
            codec, payload = codecs.encode_delta(steps)
            row = None
            if fold is due[-1] and 2 * len(payload) > depth.root_stored:
                entries.append(self._full(chunk, content))
            else:
                place = (below.pack_id, below.row)
                entries.append(PackEntry(content.digest, content.fingerprint, chunk.length, codec, payload, fold.span, place))
                if fold is due[-1] and fold.span <= LADDER_BASE:  # wider ones are large, and summed hundreds of commits later
                    recent = codecs.uncompressed(codec, payload, steps)
        places = tuple((entry.pack_id, entry.row) for entry in folded)
        return ChunkOutcome(content.digest, chunk.length, tuple(entries), row, recent, places)

    def _deltas(self, entries: Sequence[StoredEntry]) -> list[tuple[str, bytes | memoryview]]:
        """The deltas of stored entries: those in memory, and the others from the store."""
        found = [self._recent.get((entry.pack_id, entry.row)) for entry in entries]
        absent = [entry for entry, delta in zip(entries, found, strict=True) if delta is None]
        payloads = self._reader.fold_payloads(absent) if absent else {}
        return [
            (entry.codec, payloads[entry.pack_id, entry.row]) if delta is None else delta
            for entry, delta in zip(entries, found, strict=True)
        ]

    def _scratch(self, name: str, length: int) -> Array:
        buffers: dict[str, Array] | None = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = {}
        found = buffers.get(name)
        if found is None or len(found) < length:
            found = buffers[name] = np.empty(length, np.uint8)
        return found[:length]
