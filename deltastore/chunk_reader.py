"""Chunks out of packs: locate, fetch in few ranges, decode along the chain, verify.

A delta names its base physically, so a chain is resolved from pack columns alone. Every read is checked: the length of each
range, the xxh3-128 of each decoded chunk, and its BLAKE3 digest too when the store is opened with `trust="none"`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from deltastore import codecs
from deltastore.buckets.base import Bucket
from deltastore.digests import chunk_digest, fast_digest
from deltastore.errors import FormatError, IntegrityError, StorageError
from deltastore.forks import renew_in_children
from deltastore.layout import pack_key
from deltastore.manifests import ChunkRow, PackRef
from deltastore.options import READ_GAP_BYTES, WINDOW_BYTES, worker_count
from deltastore.packs import PackColumns, StoredEntry, head_length

MAX_CHAIN = 512  # the ladder gives 7 per span; anything longer is a cycle or damage
RANGE_BYTES = 8 << 20  # the most that one coalesced read asks for
FIRST_READ = 64 << 10  # of a pack whose head length is not known
SMALL_PACK_BYTES = 4 << 20  # a pack up to this size is read whole when most of it will be needed
KEPT_BYTES = 32 << 20  # of such packs that stay in memory
SMALL_BATCH_BYTES = 2 << 20  # decoded bytes that are worth a task of their own
COLUMNS_CACHED = 4096  # packs whose columns stay parsed

Array = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class ReadJob:
    """One chunk to read: either into `out`, or into a scratch buffer that is handed to `deliver`.

    `length` is the raw length in bytes, `label` what messages call it ("tensor 'x', chunk 3").
    """

    row: ChunkRow
    length: int
    label: str
    out: Array | None = None
    deliver: Callable[[Array], None] | None = None


class ChunkReader:
    """Reads chunks of one store. Thread-safe."""

    def __init__(self, bucket: Bucket, *, verify_digests: bool = False) -> None:
        self._bucket = bucket
        self._verify_digests = verify_digests
        self._refs: dict[str, PackRef] = {}
        self._columns: dict[str, PackColumns] = {}
        self._kept: dict[str, Future[memoryview]] = {}  # small packs, whole
        self._kept_bytes = 0
        self._lock = threading.Lock()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """See `deltastore.forks`: what another thread was reading at the time never arrives."""
        self._lock = threading.Lock()
        self._kept = {}
        self._kept_bytes = 0

    # -- columns and chains -------------------------------------------------------------------------------------------

    def learn(self, packs: Iterable[PackRef]) -> None:
        """Remember head lengths and sizes that a manifest or a writer knows, which saves a request per pack."""
        for ref in packs:
            self._refs.setdefault(ref.pack_id, ref)

    def add_columns(self, columns: PackColumns) -> None:
        """Seed the cache with the columns of a pack that was just written."""
        with self._lock:
            self._columns[columns.pack_id] = columns

    def pack_ref(self, pack_id: str) -> PackRef:
        """Head length and size of a pack."""
        if pack_id not in self._refs:
            self._load_columns(pack_id)
        return self._refs[pack_id]

    def columns(self, pack_id: str) -> PackColumns:
        """The parsed columns of a pack, fetched at first use.

        Raises:
            IntegrityError: the pack is missing or malformed.
        """
        found = self._columns.get(pack_id)
        return self._load_columns(pack_id) if found is None else found

    def _load_columns(self, pack_id: str) -> PackColumns:
        key = pack_key(pack_id)
        ref = self._refs.get(pack_id)
        try:
            if ref is None:
                info = self._bucket.stat([key])[key]
                if info is None:
                    raise IntegrityError(f"{key} is missing from the bucket; run `deltastore verify` to see what it breaks", key)
                first = self._bucket.get_range(key, 0, min(info.size, FIRST_READ))
                ref = PackRef(pack_id, head_length(first), info.size)
                if ref.head > info.size:
                    raise FormatError(f"{key}: its head of {ref.head} bytes is longer than the object of {info.size}", key)
                head = first[: ref.head] if ref.head <= len(first) else self._bucket.get_range(key, 0, ref.head)
            else:
                whole = self._kept.get(pack_id)
                head = self._bucket.get_range(key, 0, ref.head) if whole is None else bytes(whole.result()[: ref.head])
        except StorageError as error:
            raise _as_integrity(error, key) from error
        try:
            columns = PackColumns.parse(pack_id, head)
        except FormatError as error:
            raise type(error)(str(error), key) from error
        if columns.size != ref.size:
            raise FormatError(f"{key}: its columns describe {columns.size} bytes, expected {ref.size}", key)
        self._refs.setdefault(pack_id, ref)
        with self._lock:
            self._columns[pack_id] = columns
            while len(self._columns) > COLUMNS_CACHED:  # the oldest; reading needs no lock then
                del self._columns[next(iter(self._columns))]
        return columns

    def chain(self, pack_id: str, row: int, known: Container[tuple[str, int]] = ()) -> list[StoredEntry]:
        """The entries that are decoded to read one, widest first, the full one last; those behind one in `known` are left out.

        Raises:
            FormatError: the chain has no full end, or its entries differ in raw length.
        """
        entries: list[StoredEntry] = []
        while True:
            entry = self.columns(pack_id).entry(row)
            entries.append(entry)
            delta = codecs.is_delta(entry.codec)
            if entry.raw_length != entries[0].raw_length:
                raise _malformed(entry, "a delta and its base differ in raw length")
            if delta != (entry.base is not None):
                raise _malformed(entry, "a delta without a base" if delta else "a full entry that names a base")
            if entry.base is None or entry.base in known:
                return entries
            if len(entries) >= MAX_CHAIN:
                raise _malformed(entries[0], "its chain of bases has no end")
            pack_id, row = entry.base

    # -- bytes ----------------------------------------------------------------------------------------------------------

    def payloads(self, entries: Iterable[StoredEntry]) -> dict[tuple[str, int], bytes | memoryview]:
        """The stored bytes of some entries, neighbours of one pack fetched as one range."""
        found: dict[tuple[str, int], bytes | memoryview] = {}
        wanted = {}
        for entry in entries:
            pack = self._kept.get(entry.pack_id)
            if pack is None:
                wanted[entry.pack_id, entry.row] = entry
            else:
                found[entry.pack_id, entry.row] = pack.result()[entry.offset : entry.offset + entry.stored_length]
        ordered = sorted(wanted.values(), key=lambda entry: (entry.pack_id, entry.offset))
        for group in _coalesced(ordered):
            start = group[0].offset
            length = group[-1].offset + group[-1].stored_length - start
            data = self._range(group[0].pack_id, start, length)
            for entry in group:
                begin = entry.offset - start
                found[entry.pack_id, entry.row] = data[begin : begin + entry.stored_length]
        return found

    def _range(self, pack_id: str, start: int, length: int) -> memoryview:
        key = pack_key(pack_id)
        try:
            data = memoryview(self._bucket.get_range(key, start, length))
        except StorageError as error:
            raise _as_integrity(error, key) from error
        if len(data) != length:
            raise IntegrityError(f"{key}: asked for {length} bytes at {start}, got {len(data)}", key)
        return data

    def fold_payloads(self, entries: Iterable[StoredEntry]) -> dict[tuple[str, int], bytes | memoryview]:
        """As `payloads`, for folds: every chunk of a commit asks for entries of the same few packs, so small ones are kept."""
        entries = list(entries)
        for pack_id in {entry.pack_id for entry in entries}:
            self._keep(self.pack_ref(pack_id))
        return self.payloads(entries)

    def _keep(self, ref: PackRef) -> None:
        """Read a small pack whole, once for all threads. The oldest leave when there are more than `KEPT_BYTES` of them."""
        if ref.size > SMALL_PACK_BYTES or ref.pack_id in self._kept:
            return
        self._refs.setdefault(ref.pack_id, ref)
        pack: Future[memoryview] = Future()
        with self._lock:
            if self._kept.setdefault(ref.pack_id, pack) is not pack:
                return
            self._kept_bytes += ref.size
            while self._kept_bytes > KEPT_BYTES:
                self._forget(next(iter(self._kept)))
        try:
            pack.set_result(self._range(ref.pack_id, 0, ref.size))
        except BaseException as error:
            with self._lock:
                if self._kept.get(ref.pack_id) is pack:
                    self._forget(ref.pack_id)
            pack.set_exception(error)  # whoever needs the pack says for which tensor
            if not isinstance(error, Exception):
                raise

    def _forget(self, pack_id: str) -> None:
        if self._kept.pop(pack_id, None) is not None:
            self._kept_bytes -= self._refs[pack_id].size

    def read(self, job: ReadJob) -> None:
        """Read one chunk."""
        self._read_batch([job])

    def read_many(
        self,
        jobs: Iterable[ReadJob],
        done: Callable[[int], None] | None = None,
        total: int | None = None,
        packs: Iterable[PackRef] = (),
    ) -> None:
        """Read chunks on several threads, a bounded number of bytes at a time.

        Args:
            jobs: consumed lazily, so that buffers may be made while reading goes on.
            done: called with the raw bytes of each finished batch.
            total: raw bytes of all jobs, where known: towards the end threads then take smaller batches and end together.
            packs: those of which nearly everything is wanted: small ones are read whole, as far as memory for them goes.

        Raises:
            IntegrityError: a chunk is missing, malformed or not what its digest says; names the tensor and the object.
        """
        workers = worker_count()
        batches = _batches(jobs, workers, total)
        kept = list(_within(packs, KEPT_BYTES))
        if workers == 1:
            for ref in kept:
                self._keep(ref)
            for batch in batches:
                self._read_batch(batch)
                if done is not None:
                    done(sum(job.length for job in batch))
            return
        pending: dict[Future[None], int] = {}
        with ThreadPoolExecutor(workers, thread_name_prefix="deltastore-read") as pool:
            try:
                for ref in kept:
                    pool.submit(self._keep, ref)
                for batch in batches:
                    pending[pool.submit(self._read_batch, batch)] = sum(job.length for job in batch)
                    if len(pending) >= 2 * workers:
                        _reap(pending, done)
                while pending:
                    _reap(pending, done)
            except BaseException:
                for future in pending:
                    future.cancel()
                raise

    def read_successions(self, successions: Iterable[Sequence[ReadJob]], done: Callable[[int], None] | None = None) -> None:
        """Read the same chunks of several versions, each version of a chunk by a job without `out`, on several threads.

        A chunk that is stored as a delta on the job before is decoded from there, so a line of versions takes one full chunk
        and one delta each. Bytes in flight are bounded as in `read_many`, and the same is raised.
        """
        pending: dict[Future[None], int] = {}
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="deltastore-read") as pool:
            try:
                for jobs in successions:
                    pending[pool.submit(self._read_succession, jobs)] = sum(job.length for job in jobs)
                    if len(pending) >= 2 * worker_count():
                        _reap(pending, done)
                while pending:
                    _reap(pending, done)
            except BaseException:
                for future in pending:
                    future.cancel()
                raise

    def _read_succession(self, jobs: Sequence[ReadJob]) -> None:
        out = np.empty(jobs[0].length, np.uint8)
        before: tuple[str, int] | None = None
        for job in jobs:
            at = job.row.pack_id, job.row.row
            try:
                if at != before:
                    chain = self.chain(*at, known=() if before is None else (before,))
                    self._decode(job.row, chain, self.payloads(chain), out)
            except IntegrityError as error:
                raise error.within(job.label) from error
            before = at
            if job.deliver is not None:
                job.deliver(out)

    def _read_batch(self, batch: Sequence[ReadJob]) -> None:
        chains = []
        for job in batch:
            try:
                chains.append(self.chain(job.row.pack_id, job.row.row))
            except IntegrityError as error:
                raise error.within(job.label) from error
        try:
            payloads = self.payloads(entry for chain in chains for entry in chain)
        except IntegrityError as error:
            raise error.within(f"{batch[0].label} and what is read with it") from error
        scratch: Array | None = None
        for job, chain in zip(batch, chains, strict=True):
            if job.out is not None:
                out = job.out
            else:
                if scratch is None or len(scratch) < job.length:
                    scratch = np.empty(job.length, np.uint8)
                out = scratch[: job.length]
            try:
                self._decode(job.row, chain, payloads, out)
            except IntegrityError as error:
                raise error.within(job.label) from error
            if job.deliver is not None:
                job.deliver(out)

    def _decode(
        self,
        row: ChunkRow,
        chain: Sequence[StoredEntry],
        payloads: dict[tuple[str, int], bytes | memoryview],
        out: Array,
    ) -> None:
        """Decode a chunk into `out`, which holds the base already when the chain ends with a delta."""
        top = chain[0]
        if top.digest != row.digest:
            found = f"holds digest {top.digest.hex()[:16]}…, the manifest expects {row.digest.hex()[:16]}…"
            raise _damaged(top, found)
        if top.raw_length != len(out):
            raise _damaged(top, f"holds {top.raw_length} bytes, expected {len(out)}")
        entry = chain[-1]
        deltas = chain[:-1] if entry.base is None else chain
        try:
            if entry.base is None:
                codecs.decode_full(entry.codec, payloads[entry.pack_id, entry.row], out)
            for index in codecs.apply_together([(each.codec, payloads[each.pack_id, each.row]) for each in deltas], out):
                entry = deltas[index]
                codecs.apply_delta(entry.codec, payloads[entry.pack_id, entry.row], out)
        except FormatError as error:
            raise type(error)(f"{_place(entry)}: {error}", pack_key(entry.pack_id)) from error
        if fast_digest(out) != top.fast_digest:
            through = f" through {len(chain) - 1} deltas from {_place(chain[-1])}" if len(chain) > 1 else ""
            raise _damaged(
                top,
                f"decoded{through}, the chunk does not have its xxh3-128 {top.fast_digest.hex()}; "
                "run `deltastore verify --read-data` to see what is damaged",
            )
        if self._verify_digests and chunk_digest(out) != row.digest:
            raise _damaged(top, f"the decoded chunk does not have its BLAKE3 digest {row.digest.hex()}")


def _place(entry: StoredEntry) -> str:
    return f"{pack_key(entry.pack_id)} row {entry.row}"


def _damaged(entry: StoredEntry, what: str) -> IntegrityError:
    return IntegrityError(f"{_place(entry)}: {what}", pack_key(entry.pack_id))


def _malformed(entry: StoredEntry, what: str) -> FormatError:
    return FormatError(f"{_place(entry)}: {what}", pack_key(entry.pack_id))


def _reap(pending: dict[Future[None], int], done: Callable[[int], None] | None) -> None:
    finished, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in finished:
        size = pending.pop(future)
        future.result()
        if done is not None:
            done(size)


def _within(packs: Iterable[PackRef], most: int) -> Iterator[PackRef]:
    """Small packs, together at most so many bytes."""
    for ref in packs:
        if ref.size <= min(most, SMALL_PACK_BYTES):
            most -= ref.size
            yield ref


def _batches(jobs: Iterable[ReadJob], workers: int, total: int | None) -> Iterator[list[ReadJob]]:
    """Jobs in batches of one share of the window or of what is left, whichever is smaller (guided self-scheduling)."""
    most = WINDOW_BYTES // (2 * workers)
    left = total or 0
    batch: list[ReadJob] = []
    size = 0
    for job in jobs:
        limit = most if total is None else min(most, max(SMALL_BATCH_BYTES, left // (2 * workers)))
        if batch and size + job.length > limit:
            yield batch
            left -= size
            batch, size = [], 0
        batch.append(job)
        size += job.length
    if batch:
        yield batch


def _coalesced(ordered: Iterable[StoredEntry]) -> Iterator[list[StoredEntry]]:
    group: list[StoredEntry] = []
    for entry in ordered:
        if group:
            last = group[-1]
            gap = entry.offset - (last.offset + last.stored_length)
            total = entry.offset + entry.stored_length - group[0].offset
            if entry.pack_id == last.pack_id and 0 <= gap <= READ_GAP_BYTES and total <= RANGE_BYTES:
                group.append(entry)
                continue
            yield group
        group = [entry]
    if group:
        yield group


def _as_integrity(error: StorageError, key: str) -> StorageError | IntegrityError:
    """A missing or short object is damage of the store; any other failure stays what it is."""
    if error.kind in ("missing", "truncated"):
        return IntegrityError(f"{key}: {error}; run `deltastore verify` to see what it breaks", key)
    return error
