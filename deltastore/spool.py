"""Packs on disk that wait for a slow bucket, so that neither memory nor the encoder has to."""

from __future__ import annotations

import mmap
import tempfile
import threading
from pathlib import Path

from deltastore.buckets.base import Upload
from deltastore.buffers import as_memory
from deltastore.forks import renew_in_children


class Spool:
    """Holds uploads in files without a name, which vanish with the process. Thread-safe.

    Args:
        folder: where; made when it is needed.
        limit: bytes that may wait; beyond it `hold` declines.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """See `deltastore.forks`: a child holds nothing."""
        self._lock = threading.Lock()
        self._held = {}

    def hold(self, upload: Upload) -> Upload | None:
        """The same upload, its bytes mapped from disk; None when there is no room for it."""
        with self._lock:
            if sum(self._held.values()) + upload.size > self._limit:
                return None
            self._held[upload.key] = upload.size
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                for piece in upload.pieces:
                    file.write(as_memory(piece))
                file.flush()
                mapped = mmap.mmap(file.fileno(), upload.size, access=mmap.ACCESS_READ)
        except OSError:  # a full disk, or none to write to: the encoder waits instead
            self.release(upload)
            return None
        return Upload(upload.key, [memoryview(mapped)])

    def release(self, upload: Upload) -> None:
        """The bucket has it."""
        with self._lock:
            self._held.pop(upload.key, None)
