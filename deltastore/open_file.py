"""A file read and written by position from several threads, with typed errors.

Never mapped into memory: a file that another process truncates, or a full disk, gives an error here and not a signal.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from pathlib import Path

import numpy as np

from deltastore.errors import FormatError, NotFoundError, StorageError, StoreFullError
from deltastore.state import Array


class OpenFile:
    """A file that several threads read and write by position."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        try:
            self._fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise storage_error(error, path) from error
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, os.close, self._fd)

    def close(self) -> None:
        """Close it; later calls fail instead of reaching another file that got the same number."""
        self._fd = -1
        self._close()

    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> Array:
        """Exactly `length` bytes at `offset`, read-only. Raises FormatError when the file is shorter, StorageError."""
        parts = []
        try:
            while length:
                part = self._read_some(offset, length)
                if not part:
                    raise FormatError(f"{self.path} ends {length} bytes too early; it was cut short: fetch or save it again")
                parts.append(part)
                offset += len(part)
                length -= len(part)
        except OSError as error:
            raise storage_error(error, self.path) from error
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8) if parts else np.empty(0, np.uint8)

    def write(self, offset: int, data: Array | bytes) -> None:
        """Write all of a buffer of bytes at `offset`. Raises StoreFullError, StorageError."""
        rest = memoryview(data)  # type: ignore[arg-type]
        try:
            while rest:
                count = self._write_some(offset, rest)
                offset += count
                rest = rest[count:]
        except OSError as error:
            raise storage_error(error, self.path) from error

    def truncate(self, size: int) -> None:
        """Make the file this long."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise storage_error(error, self.path) from error

    def sync(self) -> None:
        """Return when everything is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise storage_error(error, self.path) from error

    def _read_some(self, offset: int, length: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._fd, length, offset)
        with self._lock:  # Windows
            os.lseek(self._fd, offset, os.SEEK_SET)
            return os.read(self._fd, length)

    def _write_some(self, offset: int, data: memoryview) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._fd, data, offset)
        with self._lock:
            os.lseek(self._fd, offset, os.SEEK_SET)
            return os.write(self._fd, data)


def storage_error(error: OSError, path: Path) -> Exception:
    """The error of this library that stands for a failed system call on `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFullError(f"no space left for {path}: {error.strerror}; free some and try again")
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"there is no file {path}")
    if isinstance(error, PermissionError):
        return StorageError(f"{path}: {error.strerror}; check who may use it", "denied")
    return StorageError(f"{path}: {error.strerror}; try again", "io")
