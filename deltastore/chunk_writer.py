"""Chunks into packs: entries of one span fill a pack, full packs go up while later chunks are encoded.

Nothing names a pack before the commit document does, so a pack that was sent and never committed is garbage, no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from deltastore.buckets.base import Bucket, Upload
from deltastore.layout import new_id, pack_key
from deltastore.options import PACK_BYTES
from deltastore.packs import PackColumns, PackEntry, build_pack
from deltastore.spool import Spool
from deltastore.workers import Workers

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
        spool: takes sealed packs when the bucket is slower than the encoder; without one the encoder waits.

    Call `add` for each entry in chunk order, then `finish` and `join`; `abandon` after an error.
    """

    def __init__(
        self,
        bucket: Bucket,
        register: Callable[[str, int], None],
        on_columns: Callable[[PackColumns], None],
        pack_bytes: int = PACK_BYTES,
        spool: Spool | None = None,
    ) -> None:
        self._bucket = bucket
        self._register = register
        self._on_columns = on_columns
        self._pack_bytes = pack_bytes
        self._spool = spool
        self._open: dict[int, _OpenPack] = {}
        self._written: list[WrittenPack] = []
        self._sent: list[Future[None]] = []
        self._workers: Workers | None = None

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
        """All packs, and those that are still to be sent, with their bytes."""
        rest = [self._seal(pack) for _, pack in sorted(self._open.items())]
        self._open.clear()
        return list(self._written), rest

    def join(self) -> None:
        """Wait until all that was sent is in the bucket."""
        try:
            while self._sent:
                self._sent.pop(0).result()
        except BaseException:
            self.abandon()
            raise
        self._close()

    def abandon(self) -> None:
        """Drop what is open and wait for what is on its way. What was sent stays as garbage."""
        self._open.clear()
        for future in self._sent:
            future.cancel()
        self._close()

    def _seal(self, pack: _OpenPack) -> tuple[WrittenPack, Upload]:
        built = build_pack(pack.pack_id, pack.entries)
        self._on_columns(PackColumns.parse(pack.pack_id, built.head))
        key = pack_key(pack.pack_id)
        written = WrittenPack(pack.pack_id, key, built.size, len(built.head), pack.span, len(pack.entries))
        self._written.append(written)
        return written, Upload(key, [built.head, *built.pieces])

    def _send(self, written: WrittenPack, upload: Upload) -> None:
        self._register(written.key, written.size)
        if self._workers is None:
            self._workers = Workers(1, "deltastore-send")
        self._sent = [future for future in self._sent if not future.done() or future.exception() is not None]
        if len(self._sent) > PENDING_UPLOADS:
            spooled = None if self._spool is None else self._spool.hold(upload)
            if spooled is None:
                while len(self._sent) > PENDING_UPLOADS:
                    self._sent.pop(0).result()
            else:
                upload = spooled
        sent = self._workers.submit(self._bucket.put, [upload])
        if self._spool is not None:
            sent.add_done_callback(functools.partial(_release, self._spool, upload))
        self._sent.append(sent)

    def _close(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()


def _release(spool: Spool, upload: Upload, sent: Future[None]) -> None:  # noqa: ARG001
    """A pack was sent, or failed, or was given up: nothing of it is on disk any more."""
    spool.release(upload)
