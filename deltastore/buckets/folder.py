"""Objects as files in a folder.

An object is written to `.staging/`, synced, and only then linked to its name, so it appears whole or not at all, and
never over another one. Directories are synced last: when `put` returns, a power cut takes nothing back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from deltastore import space
from deltastore.buckets.base import Capabilities, ObjectInfo, Upload, check_key, check_prefix
from deltastore.buffers import as_memory
from deltastore.errors import (
    AlreadyExistsError,
    InvalidInputError,
    ReadOnlyError,
    StorageError,
    StoreFullError,
)
from deltastore.layout import FOLDERS, STORE_KEY, new_id

if TYPE_CHECKING:
    from deltastore.buffers import Bytes

STAGING = ".staging"
STALE_SECONDS = 24 * 3600  # what a crash left in the staging folder is removed after this time
PIECES_PER_WRITE = 512  # half of the IOV_MAX of Linux and macOS
COMPARE_BYTES = 1 << 20

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.ELOOP}  # ELOOP: a link in place of an object
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_OPEN_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class FolderBucket:
    """See `Bucket`. The folder is made by the first `put`. Holds no open files, so it may be used across a fork."""

    capabilities = Capabilities(exclusive=True, server_copy=True, local=True, persistent=True)

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.realpath(root))
        self.url = self.root.as_uri()
        self._durable: set[Path] = set()  # folders whose entry in their parent this process has synced
        self._inside: set[Path] = set()  # folders that were seen to be no link
        self._staging_cleaned = False

    # -- writing ------------------------------------------------------------------------------------------------------

    def put(self, uploads: Sequence[Upload]) -> None:
        """See `Bucket.put`. Nothing appears before all bytes of the batch are on the disk."""
        targets = [(upload, self._path(upload.key)) for upload in uploads]
        if not targets:
            return
        staged: list[Path] = []
        key = targets[0][0].key
        try:
            unsynced = self._make_folders(target for _, target in targets)
            self._clean_staging()
            for upload, _ in targets:
                key = upload.key
                staged.append(self.root / STAGING / new_id())
                _write_file(staged[-1], upload.pieces)
            # syncing after all are written lets the disk work on them together
            for temporary in staged:
                _sync(temporary)
            for (upload, target), temporary in zip(targets, staged, strict=True):
                key = upload.key
                self._publish(temporary, target, upload)
                unsynced.add(target.parent)
            for folder in unsynced:
                _sync(folder)
            self._durable.update(self._folders(target for _, target in targets))
        except OSError as error:
            self._refuse(error, key, "write")
        finally:
            for temporary in staged:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)

    def copy(self, source: str, target: str) -> None:
        """See `Bucket.copy`."""
        self.put([Upload(target, [self.get(source)])])

    def delete(self, keys: Iterable[str]) -> None:
        """See `Bucket.delete`."""
        touched = set()
        key = ""
        try:
            for key in keys:
                path = self._path(key)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
                    touched.add(path.parent)
            for folder in touched:
                _sync(folder)
        except OSError as error:
            self._refuse(error, key, "delete")

    def _publish(self, temporary: Path, target: Path, upload: Upload) -> None:
        """Give a finished file its name. A link, unlike a rename, fails when the name is taken."""
        try:
            target.hardlink_to(temporary)
        except FileExistsError:
            self._check_same(target, upload)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(target):  # a file system without links: the race stays open, the rest holds
                self._check_same(target, upload)
            else:
                temporary.rename(target)

    def _check_same(self, path: Path, upload: Upload) -> None:
        info = path.lstat()
        if stat.S_ISREG(info.st_mode) and info.st_size == upload.size and self._equals(upload):
            return
        raise AlreadyExistsError(
            f"{self.root}: {upload.key} exists with other content ({info.st_size} bytes, expected {upload.size}); "
            "objects are never rewritten, so another writer uses this store: open it anew"
        )

    def _equals(self, upload: Upload) -> bool:
        at = 0
        for piece in upload.pieces:
            view = as_memory(piece)
            for start in range(0, len(view), COMPARE_BYTES):
                part = view[start : start + COMPARE_BYTES]
                if self.get_range(upload.key, at, len(part)) != part:
                    return False
                at += len(part)
        return True

    def _make_folders(self, targets: Iterable[Path]) -> set[Path]:
        """Make the folders of targets, and staging. Returns the folders that got an entry which may not be durable."""
        unsynced = set()
        missing = self.root
        while not missing.is_dir():
            missing = missing.parent
            unsynced.add(missing)
        staging = self.root / STAGING
        staging.mkdir(parents=True, exist_ok=True)
        self._check_inside(staging, STAGING)
        for folder in self._folders(targets):
            if folder not in self._durable:
                # also when it exists: another process may have made it and not synced it yet
                folder.mkdir(parents=True, exist_ok=True)
                unsynced.add(folder.parent)
        return unsynced

    def _folders(self, targets: Iterable[Path]) -> set[Path]:
        """All folders between the root and the targets, without the root."""
        found: set[Path] = set()
        for target in targets:
            folder = target.parent
            while folder != self.root and folder not in found:
                found.add(folder)
                folder = folder.parent
        return found

    def _clean_staging(self) -> None:
        """Once per bucket: remove what a crash left behind long ago. Nothing names these files."""
        if self._staging_cleaned:
            return
        self._staging_cleaned = True
        oldest = time.time() - STALE_SECONDS
        for path in (self.root / STAGING).iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process may clean, too
                info = path.lstat()
                if stat.S_ISREG(info.st_mode) and info.st_mtime < oldest:
                    path.unlink()

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """See `Bucket.get`."""
        return self._read(key, 0, None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `Bucket.get_range`."""
        if start < 0 or length < 0:
            raise InvalidInputError(f"{key}: can't read {length} bytes at {start}")
        return self._read(key, start, length)

    def _read(self, key: str, start: int, length: int | None) -> bytes:
        try:
            file = os.open(self._path(key), _OPEN_READ)
            try:
                info = os.fstat(file)
                if not stat.S_ISREG(info.st_mode):
                    raise StorageError(f"{self.root}: {key} is not a regular file", "io", key=key)
                if length is None:
                    length = info.st_size
                if start + length > info.st_size:  # known before anything is allocated
                    self._refuse_truncated(key, info.st_size, start + length)
                data = os.pread(file, length, start)
                while len(data) < length:  # one call reads at most about 2 GiB
                    more = os.pread(file, length - len(data), start + len(data))
                    if not more:
                        self._refuse_truncated(key, start + len(data), start + length)
                    data += more
                return data
            finally:
                os.close(file)
        except OSError as error:
            self._refuse(error, key, "read")

    def stat(self, keys: Iterable[str]) -> dict[str, ObjectInfo | None]:
        """See `Bucket.stat`."""
        found: dict[str, ObjectInfo | None] = {}
        for key in keys:
            try:
                info = self._path(key).lstat()
            except (FileNotFoundError, NotADirectoryError):
                found[key] = None
            except OSError as error:
                self._refuse(error, key, "look at")
            else:
                found[key] = _info(key, info) if stat.S_ISREG(info.st_mode) else None
        return found

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Bucket.list`. Only regular files in the folders of a store are seen, never the index beside them."""
        check_prefix(prefix)
        for start in [prefix] if prefix else sorted([*FOLDERS, STORE_KEY]):
            try:
                yield from self._walk(start)
            except OSError as error:
                self._refuse(error, start, "list")

    def _walk(self, key: str) -> Iterator[ObjectInfo]:
        path = self.root / key
        self._check_inside(path.parent, key)
        try:
            info = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISREG(info.st_mode) and (key == STORE_KEY or "/" in key):
            yield _info(key, info)
        elif stat.S_ISDIR(info.st_mode):
            for entry in sorted(path.iterdir()):
                yield from self._walk(f"{key}/{entry.name}")

    def free_bytes(self) -> int | None:
        """See `Bucket.free_bytes`: what the file system gives to those who are not root."""
        return space.free_bytes(self.root)

    def close(self) -> None:
        """Nothing is held open."""

    # -- paths and errors ---------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        path = self.root / check_key(key)
        self._check_inside(path.parent, key)
        return path

    def _check_inside(self, folder: Path, key: str) -> None:
        """Refuse a link on the way to an object: it could lead out of the folder."""
        if folder in self._inside:
            return
        if os.path.realpath(folder) != str(folder):  # never raises, whatever loops there are
            raise StorageError(
                f"{self.root}: a symbolic link stands in the path of {key}; objects of a store are never read through "
                "links: put the folder itself there",
                "denied",
                key=key,
            )
        if folder.is_dir():
            self._inside.add(folder)

    def _refuse(self, error: OSError, key: str, action: str) -> NoReturn:
        """Raise the error of this library for one of the operating system."""
        where, reason = f"{self.root}: can't {action} {key}", error.strerror or str(error)
        if error.errno in _FULL:
            raise StoreFullError(f"{where}: {reason}; nothing was changed: free some space and try again") from error
        if error.errno == errno.EROFS:
            raise ReadOnlyError(f"{where}: {reason}; open the store with read_only=True to read it") from error
        if error.errno in _DENIED:
            raise StorageError(f"{where}: {reason}; check the folder and its owner and mode", "denied", key=key) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise StorageError(f"{where}: it is not there", "missing", key=key) from error
        retryable = error.errno in (errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
        kind = "timeout" if error.errno == errno.ETIMEDOUT else "io"
        raise StorageError(f"{where}: {reason}", kind, retryable, key) from error

    def _refuse_truncated(self, key: str, size: int, expected: int) -> NoReturn:
        raise StorageError(f"{self.root}: {key} has {size} bytes, expected at least {expected}", "truncated", key=key)


def _write_file(path: Path, pieces: Sequence[Bytes]) -> None:
    file = os.open(path, _OPEN_NEW, 0o666)
    try:
        left = [cast("bytes", piece) for piece in pieces if len(piece)]
        first = 0
        while first < len(left):
            written = os.writev(file, left[first : first + PIECES_PER_WRITE])
            while first < len(left) and written >= len(left[first]):
                written -= len(left[first])
                first += 1
            if written:
                left[first] = cast("bytes", as_memory(left[first])[written:])
    finally:
        os.close(file)


def _sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(file)
    except OSError as error:
        # some network file systems can't sync folders
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not stat.S_ISDIR(os.fstat(file).st_mode):
            raise
    finally:
        os.close(file)


def _info(key: str, info: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, info.st_size, datetime.fromtimestamp(info.st_mtime, UTC))
