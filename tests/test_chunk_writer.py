"""Packs on their way to a bucket that is slower than the encoder: they wait in memory, then on disk, then the encoder waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from deltastore.buckets.base import Upload
from deltastore.buckets.memory import MemoryBucket
from deltastore.chunk_writer import PENDING_UPLOADS, ChunkWriter
from deltastore.digests import chunk_digest, fast_digest
from deltastore.errors import StorageError
from deltastore.packs import PackColumns, PackEntry
from deltastore.spool import Spool

SIZE = 50_000  # bytes of an entry, and a little less than a pack
SECONDS = 60.0


class SlowBucket(MemoryBucket):
    """Takes nothing before `open` is set, and then fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.error: Exception | None = None

    def put(self, uploads: Sequence[Upload]) -> None:
        assert self.open.wait(SECONDS)
        if self.error is not None:
            raise self.error
        super().put(uploads)


def entry(number: int) -> PackEntry:
    raw = np.full(SIZE, number, np.uint8)
    return PackEntry(chunk_digest(raw), fast_digest(raw), SIZE, "raw@1", raw.tobytes(), 0, None)


def writer_to(bucket: MemoryBucket, spool: Spool | None, columns: list[PackColumns]) -> ChunkWriter:
    return ChunkWriter(bucket, lambda key, size: None, columns.append, pack_bytes=SIZE, spool=spool)


def test_packs_wait_on_disk(tmp_path: Path) -> None:
    bucket, columns = SlowBucket(), list[PackColumns]()
    writer = writer_to(bucket, Spool(tmp_path / "spool", 1 << 30), columns)
    for number in range(20):
        writer.add(entry(number))  # none of them waits for the bucket
    packs, rest = writer.finish()
    assert len(packs) == len(columns) == 20
    assert rest == []
    assert list((tmp_path / "spool").iterdir()) == []  # files without names: a crash leaves none behind
    bucket.open.set()
    writer.join()
    for number, (pack, of_pack) in enumerate(zip(packs, columns, strict=True)):
        stored = of_pack.entry(0)
        assert bucket.stat([pack.key])[pack.key].size == pack.size
        assert bucket.get_range(pack.key, stored.offset, stored.stored_length) == bytes([number]) * SIZE


@pytest.mark.parametrize("room", [None, 0, 3])
def test_the_encoder_waits_when_nothing_more_may(room: int | None, tmp_path: Path) -> None:
    """`room`: packs that fit into the spool; None is no spool at all."""
    bucket = SlowBucket()
    spool = None if room is None else Spool(tmp_path, room * (SIZE + 5000))
    writer = writer_to(bucket, spool, [])
    added = list[int]()
    ready = threading.Event()
    before_waiting = PENDING_UPLOADS + 1 + (room or 0)

    def work() -> None:
        for number in range(10):
            writer.add(entry(number))
            added.append(number)
            if len(added) == before_waiting:
                ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(SECONDS)
    thread.join(0.2)
    assert len(added) == before_waiting
    bucket.open.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
    packs, _ = writer.finish()
    writer.join()
    assert None not in bucket.stat([pack.key for pack in packs]).values()


def test_a_spool_that_can_not_write_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spool = Spool(tmp_path / "file" / "spool", 1 << 30)
    assert spool.hold(Upload("packs/00/x", [b"abc"])) is None


def test_room_is_given_back(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 5)
    upload = Upload("packs/00/x", [b"abc", b"d"])
    held = spool.hold(upload)
    assert held is not None
    assert b"".join(map(bytes, held.pieces)) == b"abcd"
    assert spool.hold(Upload("packs/00/y", [b"abc"])) is None
    spool.release(upload)
    assert spool.hold(Upload("packs/00/y", [b"abc"])) is not None


@pytest.mark.parametrize("spooled", [False, True])
def test_a_failure_is_raised_and_leaves_no_thread(spooled: bool, tmp_path: Path) -> None:
    threads = threading.active_count()
    bucket = SlowBucket()
    bucket.error = StorageError("the line is cut", "timeout", True)
    bucket.open.set()
    writer = writer_to(bucket, Spool(tmp_path, 1 << 30) if spooled else None, [])

    def work() -> None:
        for number in range(20):
            writer.add(entry(number))
        writer.finish()
        writer.join()

    with pytest.raises(StorageError, match="the line is cut"):
        work()
    writer.abandon()
    assert threading.active_count() == threads
