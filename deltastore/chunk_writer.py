"""Chunks into packs: entries of one span fill a pack, full packs go up while later chunks are encoded.

Nothing names a pack before the commit document does, so a pack that was sent and never committed is garbage, no more.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from deltastore.buckets.base import Bucket, Upload
from deltastore.layout import new_id, pack_key
from deltastore.options import PACK_BYTES
from deltastore.packs import PackColumns, PackEntry, build_pack

ENTRY_COLUMN_BYTES = 80  # of a pack, about, besides the payload
PENDING_UPLOADS = 1  # sealed packs that may wait for the one being sent: bounds memory to three packs per span in use


@dataclass(frozen=True, slots=True)
class WrittenPack:
    """A pack that this commit brings. Sizes in bytes; `head` is what stands before the payload."""

    pack_id: str
    key: str
    size: int
    head: int
    span: int
    rows: int


class _OpenPack:
    def __init__(self, span: int) -> None:
        self.pack_id = new_id()
        self.span = span
        self.entries: list[PackEntry] = []
        self.bytes = 0


class ChunkWriter:
    """Fills packs, one open pack per span, and sends those that are full.

    Args:
        bucket: where packs go.
        register: called with (key, size) before a pack is sent early, so that the index knows it as pending.
        on_columns: called with the columns of each sealed pack.

    Call `add` for each entry in chunk order, then `finish`; `abandon` after an error.
    """

    def __init__(
        self,
        bucket: Bucket,
        register: Callable[[str, int], None],
        on_columns: Callable[[PackColumns], None],
        pack_bytes: int = PACK_BYTES,
    ) -> None:
        self._bucket = bucket
        self._register = register
        self._on_columns = on_columns
        self._pack_bytes = pack_bytes
        self._open: dict[int, _OpenPack] = {}
        self._written: list[WrittenPack] = []
        self._sent: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None

    def add(self, entry: PackEntry) -> tuple[str, int]:
        """Append an entry; returns the pack id and row that name it from now on."""
        pack = self._open.get(entry.span)
        if pack is None:
            pack = self._open[entry.span] = _OpenPack(entry.span)
        pack.entries.append(entry)
        pack.bytes += len(entry.payload) + ENTRY_COLUMN_BYTES
        place = pack.pack_id, len(pack.entries) - 1
        if pack.bytes >= self._pack_bytes:
            del self._open[entry.span]
            written, upload = self._seal(pack)
            self._send(written, upload)
        return place

    def finish(self) -> tuple[list[WrittenPack], list[tuple[WrittenPack, Upload]]]:
        """Wait for what was sent; returns all packs, and those that are still to be sent, with their bytes."""
        rest = [self._seal(pack) for _, pack in sorted(self._open.items())]
        self._open.clear()
        self._join()
        return list(self._written), rest

    def abandon(self) -> None:
        """Drop what is open and wait for what is on its way. What was sent stays as garbage."""
        self._open.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _seal(self, pack: _OpenPack) -> tuple[WrittenPack, Upload]:
        built = build_pack(pack.pack_id, pack.entries)
        self._on_columns(PackColumns.parse(pack.pack_id, built.head))
        key = pack_key(pack.pack_id)
        written = WrittenPack(pack.pack_id, key, built.size, len(built.head), pack.span, len(pack.entries))
        self._written.append(written)
        return written, Upload(key, [built.head, *built.pieces])

    def _send(self, written: WrittenPack, upload: Upload) -> None:
        self._register(written.key, written.size)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="deltastore-send")
        while len(self._sent) > PENDING_UPLOADS:
            self._sent.pop(0).result()
        self._sent.append(self._pool.submit(self._bucket.put, [upload]))

    def _join(self) -> None:
        try:
            while self._sent:
                self._sent.pop(0).result()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)
                self._pool = None
