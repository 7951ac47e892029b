"""One chunk of a commit: scan it, decide what is stored for it, encode that.

    live tensor ──one pass──▶ private copy + steps ──▶ delta of span 1 ──▶ folds that the ladder owes ──▶ entries
                                   └──▶ digests              └── or a full entry, when that is smaller

A live chunk is read exactly once. Everything stored for it is derived from the private copy and from the steps that the same
pass extracted, so a tensor that somebody changes meanwhile gives a mixed version, never an undecodable one.

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
class ChunkTask:
    """One chunk to commit: elements [start, stop) of `source`, `length` bytes, and what the parent version has in its place."""

    source: TensorSource
    index: int
    start: int
    stop: int
    length: int
    word: Word
    parent: ChunkRow | None
    baseline: TensorBaseline | None
    label: str


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


@dataclass(frozen=True, slots=True)
class _Scan:
    digest: bytes
    fingerprint: bytes
    copy: Array | None  # the private copy; None when the chunk is unchanged and none was made
    steps: Steps | None  # against the parent's chunk; None when there is none
    unchanged: bool = False
    known: tuple[str, int] | None = None  # the store has this content as a full entry


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

    def encode_all(self, tasks: Sequence[ChunkTask]) -> list[ChunkOutcome]:
        """Scan and encode some chunks, one after the other."""
        return [self.encode(task) for task in tasks]

    def encode(self, task: ChunkTask) -> ChunkOutcome:
        """Scan one chunk and encode what must be stored for it."""
        scan = self._scan(task)
        if scan.known is not None:
            return ChunkOutcome(scan.digest, task.length, row=ChunkRow(*scan.known, scan.digest))
        if scan.unchanged:
            assert task.parent is not None
            depth = self._depths.of(task.parent.pack_id, task.parent.row)
            if not depth.fold_due(self._height, changed=False):
                return ChunkOutcome(scan.digest, task.length, row=task.parent)
            return self._fold(task, scan, depth, None, None)
        if scan.steps is None or task.parent is None:
            return ChunkOutcome(scan.digest, task.length, (self._full(task, scan),))
        return self._delta(task, scan, task.parent, scan.steps)

    # -- scanning ---------------------------------------------------------------------------------------------------------

    def _scan(self, task: ChunkTask) -> _Scan:
        parent, baseline = task.parent, task.baseline
        live = task.source.read(task.start, task.stop)
        if parent is not None and baseline is not None:
            if baseline.data is None:
                fingerprint = baseline.fingerprint(task.index, parent.digest)
                if fingerprint is not None and fast_digest(live) == fingerprint:
                    return _Scan(parent.digest, fingerprint, None, None, unchanged=True)
            elif baseline.holds(task.index, parent.digest):
                return self._compare(task, parent, baseline, live)
        return self._copy(task, live)

    def _compare(self, task: ChunkTask, parent: ChunkRow, baseline: TensorBaseline, live: Array) -> _Scan:
        copy = baseline.chunk(task.index)
        fingerprint = baseline.fingerprint(task.index, parent.digest)
        assert copy is not None
        assert fingerprint is not None
        baseline.forget(task.index)
        steps = kernel.extract(copy, live, task.word)
        if steps.count == 0:
            baseline.record(task.index, parent.digest, fingerprint)
            return _Scan(parent.digest, fingerprint, copy, None, unchanged=True)
        digest, fingerprint = chunk_digest(copy), fast_digest(copy)
        baseline.record(task.index, digest, fingerprint)
        return _Scan(digest, fingerprint, copy, steps)

    def _copy(self, task: ChunkTask, live: Array) -> _Scan:
        """No copy to compare with: hash a fresh one, and fetch the parent's chunk only when the digests differ."""
        parent, baseline = task.parent, task.baseline
        copy = baseline.chunk(task.index) if baseline is not None else None
        if copy is None:
            copy = self._scratch("copy", task.length)
        if baseline is not None:
            baseline.forget(task.index)
        np.copyto(copy, live)
        digest, fingerprint = chunk_digest(copy), fast_digest(copy)
        if baseline is not None:
            baseline.record(task.index, digest, fingerprint)
        if parent is not None and digest == parent.digest:
            return _Scan(digest, fingerprint, copy, None, unchanged=True)
        known = self._find(digest)
        if known is not None or parent is None:
            return _Scan(digest, fingerprint, copy, None, known=known)
        before = self._scratch("before", task.length)
        self._reader.read(ReadJob(parent, task.length, f"parent of {task.label}", out=before))
        return _Scan(digest, fingerprint, copy, kernel.extract(before, copy, task.word))

    # -- encoding ---------------------------------------------------------------------------------------------------------

    def _full(self, task: ChunkTask, scan: _Scan) -> PackEntry:
        copy = scan.copy
        if copy is None:  # a frozen tensor that did not change
            assert task.parent is not None
            copy = self._scratch("copy", task.length)
            self._reader.read(ReadJob(task.parent, task.length, task.label, out=copy))
        codec, payload = codecs.encode_full(copy, task.word)
        return PackEntry(scan.digest, scan.fingerprint, task.length, codec, payload, FULL_SPAN, None)

    def _delta(self, task: ChunkTask, scan: _Scan, parent: ChunkRow, steps: Steps) -> ChunkOutcome:
        depth = self._depths.of(parent.pack_id, parent.row)
        codec, payload = codecs.encode_delta(steps)
        if 2 * len(payload) > depth.root_stored:
            full = self._full(task, scan)
            if len(full.payload) <= len(payload):
                return ChunkOutcome(scan.digest, task.length, (full,))
        place = (parent.pack_id, parent.row)
        delta = PackEntry(scan.digest, scan.fingerprint, task.length, codec, payload, STEP_SPAN, place)
        if not depth.fold_due(self._height, changed=True):
            return ChunkOutcome(scan.digest, task.length, (delta,), recent=codecs.uncompressed(codec, payload, steps))
        return self._fold(task, scan, depth, delta, steps)

    def _fold(self, task: ChunkTask, scan: _Scan, depth: Depth, delta: PackEntry | None, newest: Steps | None) -> ChunkOutcome:
        """Sum the deltas on top of the chain into one per span that is due. `newest` are the steps of `delta`."""
        parent = task.parent
        assert parent is not None
        chain = self._reader.chain(parent.pack_id, parent.row)
        new = 0 if delta is None else 1
        due = list(folds([STEP_SPAN] * new + [entry.span for entry in chain], self._height))
        entries = [] if delta is None else [delta]
        row = parent if delta is None else None
        if not due:
            return ChunkOutcome(scan.digest, task.length, tuple(entries), row)
        folded = chain[: due[-1].entries - new]
        deltas = self._deltas(folded)
        total = self._scratch("total", task.length)
        total[:] = 0
        if newest is not None:
            kernel.accumulate(total, newest)
        summed = 0
        recent = None
        for fold in due:
            stop = fold.entries - new
            codecs.accumulate_deltas(deltas[summed:stop], total, task.word)
            summed = stop
            below = chain[stop]
            steps = kernel.collect(total, task.word)
            recent = None
            if steps.count == 0:  # the content is that of the entry below once more
                row = ChunkRow(below.pack_id, below.row, scan.digest)
                continue
            codec, payload = codecs.encode_delta(steps)
            row = None
            if fold is due[-1] and 2 * len(payload) > depth.root_stored:
                entries.append(self._full(task, scan))
            else:
                place = (below.pack_id, below.row)
                entries.append(PackEntry(scan.digest, scan.fingerprint, task.length, codec, payload, fold.span, place))
                if fold is due[-1] and fold.span <= LADDER_BASE:  # wider ones are large, and summed hundreds of commits later
                    recent = codecs.uncompressed(codec, payload, steps)
        places = tuple((entry.pack_id, entry.row) for entry in folded)
        return ChunkOutcome(scan.digest, task.length, tuple(entries), row, recent, places)

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
