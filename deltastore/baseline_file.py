"""A baseline in a memory-mapped file, which the next process may go on with.

    <folder>/<slot>/lock          held while a process uses the slot
                    data          copies of tensors, in blocks that are allocated before they are mapped: a full disk would kill
                                  whoever touches a mapped page that has no place on it
                    table.json    clean or dirty, the commit, and per tensor where its copy is and the fingerprints of its chunks

The table is marked dirty before the first byte of `data` changes, and clean when the file is closed in good order. Only a clean
one is used again. What is wrong with a file is never an error: it is a cache.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from deltastore.cache_folder import EntryLock, lock_entry, locks_work
from deltastore.errors import StorageError, StoreFullError
from deltastore.options import MAX_CHUNK_BYTES

Array = np.ndarray[tuple[int], np.dtype[np.uint8]]
Fingerprint = tuple[bytes, bytes]  # BLAKE3 (32 bytes) and xxh3-128 (16 bytes) of a chunk

FORMAT = 1
SLOTS = 64  # processes that may keep a baseline of one store at a time
BLOCK_BYTES = 256 << 20  # the largest block that is allocated for small tensors
FIRST_BLOCK_BYTES = 1 << 20
_UNKNOWN = bytes(48)  # in place of the fingerprint of a chunk that is not trusted


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor of the table: canonical path, its copy (None: fingerprints only), and what its chunks are."""

    path: str
    data: Array | None
    chunk_bytes: int
    fingerprints: tuple[Fingerprint | None, ...]


class BaselineFile:
    """One slot, locked and mapped. Belongs to the process that opened it. See `open`."""

    def __init__(self, folder: Path, lock: EntryLock) -> None:
        self.folder = folder
        self._lock = lock
        self._file = os.open(folder / "data", os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._blocks: list[mmap.mmap] = []
        self._views: list[Array] = []
        self._used = 0  # bytes of the last block
        self._kept: dict[str, KeptTensor] = {}

    @classmethod
    def open(cls, folder: Path, head: str | None) -> Self:
        """Take a slot that nobody uses: the one left by the commit `head`, else any.

        Raises:
            StoreFullError, StorageError: there is no room, or the folder can't be used.
        """
        try:
            for slot in _slots(folder, head):
                lock = lock_entry(slot)
                if lock is None:
                    continue
                try:
                    file = cls(slot, lock)
                    file._begin(head)
                except BaseException:
                    lock.release()
                    raise
                return file
        except OSError as error:
            raise _translated(error, folder) from error
        reason = f"all its {SLOTS} places for baselines are in use" if locks_work(folder) else "its file system has no locks"
        raise StorageError(
            f"{folder} can't hold a baseline: {reason}; choose another cache_dir=, or baseline='ram' or 'none'", "io"
        )

    def take(self, path: str) -> KeptTensor | None:
        """What the process before left of a tensor; given once."""
        return self._kept.pop(path, None)

    def allocate(self, nbytes: int) -> Array:
        """Mapped memory of its own for a tensor, uint8[nbytes].

        Raises:
            StoreFullError, StorageError: there is no room on the disk.
        """
        if not self._views or self._used + nbytes > len(self._views[-1]):
            total = sum(map(len, self._views))
            size = max(nbytes, min(BLOCK_BYTES, total), FIRST_BLOCK_BYTES)
            size += -size % mmap.ALLOCATIONGRANULARITY
            try:
                _reserve(self._file, total, size)
                self._map(total, size)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, total)
                raise _translated(error, self.folder) from error
        start, self._used = self._used, self._used + nbytes
        return self._views[-1][start : start + nbytes]

    def close(self, commit: str | None, tensors: Sequence[KeptTensor]) -> None:
        """Write everything back, and mark it clean: the copy of `commit`. Without a commit it stays dirty."""
        try:
            if commit is not None:
                for block in self._blocks:
                    block.flush()
                os.fsync(self._file)
                self._write_table(commit, tensors)
        except OSError:
            pass  # it stays dirty; the next process reads from the store
        finally:
            self._views.clear()
            self._kept.clear()
            self._blocks.clear()  # unmapped with the last array that points into them
            os.close(self._file)
            self._lock.release()

    # -- the table ------------------------------------------------------------------------------------------------------

    def _begin(self, head: str | None) -> None:
        """Take over what the last process left for `head`, or start empty; mark the slot dirty."""
        table = _read_table(self.folder)
        if table is not None and head is not None and table.get("commit") == head:
            with contextlib.suppress(LookupError, TypeError, ValueError, OSError):
                self._take_over(table)
        if not self._kept:
            self._views.clear()
            self._blocks.clear()
            os.ftruncate(self._file, 0)
        _write(self.folder / "table.json", {"format": FORMAT, "clean": False})

    def _take_over(self, table: dict[str, Any]) -> None:
        total = os.fstat(self._file).st_size
        sizes = [int(size) for size in table["blocks"]]
        if sum(sizes) != total or any(size <= 0 for size in sizes):
            raise ValueError("blocks do not make up the file")
        start = 0
        for size in sizes:
            self._map(start, size)
            start += size
        self._used = int(table["used"])
        kept = {}
        for path, block, offset, nbytes, chunk_bytes, packed in table["tensors"]:
            if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
                raise ValueError("no size of a chunk")
            known = base64.b64decode(packed, validate=True)
            pieces = [known[at : at + 48] for at in range(0, len(known), 48)]
            fingerprints = tuple(None if piece == _UNKNOWN else (piece[:32], piece[32:]) for piece in pieces)
            data = None
            if block is not None:
                if not (0 <= block < len(self._views) and 0 <= offset <= offset + nbytes <= len(self._views[block])):
                    raise ValueError("a copy outside of its block")
                data = self._views[block][offset : offset + nbytes]
            kept[path] = KeptTensor(path, data, chunk_bytes, fingerprints)
        self._kept = kept

    def _write_table(self, commit: str, tensors: Sequence[KeptTensor]) -> None:
        starts = [view.ctypes.data for view in self._views]
        rows = []
        live = 0
        for each in tensors:
            packed = b"".join(_UNKNOWN if known is None else known[0] + known[1] for known in each.fingerprints)
            block = offset = None
            nbytes = 0
            if each.data is not None and not each.data.nbytes:
                continue
            if each.data is not None:
                address, nbytes = each.data.ctypes.data, each.data.nbytes
                inside = [n for n, at in enumerate(starts) if at <= address < at + len(self._views[n])]
                if not inside:
                    continue  # it was made in memory
                block, offset = inside[0], address - starts[inside[0]]
            live += nbytes
            rows.append([each.path, block, offset, nbytes, each.chunk_bytes, base64.b64encode(packed).decode()])
        sizes = [len(view) for view in self._views]
        if 4 * live < sum(sizes) and sum(sizes) > BLOCK_BYTES:
            return  # mostly tensors that are gone: the next process starts with an empty file
        table = {"format": FORMAT, "clean": True, "commit": commit, "blocks": sizes, "used": self._used, "tensors": rows}
        _write(self.folder / "table.json", table)

    def _map(self, start: int, size: int) -> None:
        block = mmap.mmap(self._file, size, offset=start)
        self._blocks.append(block)
        self._views.append(np.frombuffer(block, np.uint8))
        self._used = 0


def _slots(folder: Path, head: str | None) -> list[Path]:
    """Slots in the order to try: left by `head`, then the others by number."""
    every = [folder / str(number) for number in range(SLOTS)]
    return sorted(every, key=lambda slot: (_read_table(slot) or {}).get("commit") != head if slot.is_dir() else True)


def _read_table(slot: Path) -> dict[str, Any] | None:
    """The table of a slot when that is clean."""
    try:
        table = json.loads((slot / "table.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    usable = isinstance(table, dict) and table.get("format") == FORMAT and table.get("clean") is True
    return table if usable else None


def _write(path: Path, document: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _reserve(file: int, start: int, size: int) -> None:
    """Have blocks of the disk behind a range of a file, not only a hole."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, size)
        return
    zeros = bytes(1 << 20)
    for at in range(start, start + size, len(zeros)):
        os.pwrite(file, zeros[: start + size - at], at)


def _translated(error: OSError, folder: Path) -> StorageError | StoreFullError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFullError(f"no room for a baseline in {folder} ({error}); free some, or choose baseline='ram' or 'none'")
    return StorageError(f"{folder} can't hold a baseline ({error}); give another cache_dir=, or baseline='ram' or 'none'", "io")
