"""The cache folder of this machine: where it is, how it is laid out, and the locks that say what is in use.

    <root>/stores/<store uuid>/<kind>/<name>/        an entry
    <root>/stores/<store uuid>/<kind>/<name>/lock    locked (flock) by the process that uses it

Everything in an entry can be made again. What nobody has locked may be deleted at any time, by `deltastore cache` or by hand.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from deltastore.errors import InvalidInputError, ReadOnlyError, StorageError, StoreFullError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

STORES = "stores"
LOCK_NAME = "lock"
KINDS = ("baseline", "spool")
LOOK_SECONDS = 0.1

_TAKEN = (errno.EAGAIN, errno.EACCES)
_NOT_IMPLEMENTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: `cache_dir`, else DELTASTORE_CACHE, else `$HF_HOME/deltastore`. It need not exist.

    HF_HOME is found as `huggingface_hub` does, without its import: `$XDG_CACHE_HOME/huggingface` or `~/.cache/huggingface`.
    """
    given = os.fspath(cache_dir) if cache_dir is not None else os.environ.get("DELTASTORE_CACHE")
    if given:
        return _expanded(given)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "deltastore"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "deltastore"


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser().absolute()


def entry_folder(root: Path, store_uuid: str, kind: str, name: str) -> Path:
    """Where an entry is. Raises InvalidInputError for parts that are no plain file names, and for an unknown kind."""
    if kind not in KINDS:
        raise InvalidInputError(f"kind {kind!r}; expected one of {', '.join(map(repr, KINDS))}")
    for part in (store_uuid, name):
        if not part or part.startswith(".") or any(sign in part for sign in "/\\\0:"):
            raise InvalidInputError(f"{part!r} can't name a folder of the cache; expected a plain file name")
    return root / STORES / store_uuid / kind / name


class EntryLock:
    """An entry that this process uses. A context manager; the lock goes with the process at the latest."""

    def __init__(self, folder: Path, file: int) -> None:
        self.folder = folder
        self._file = file
        self._pid = os.getpid()

    def release(self) -> None:
        """Let others use or delete the entry. Harmless when called twice; in a forked child the parent's lock stays."""
        file, self._file = self._file, -1
        if file < 0:
            return
        if os.getpid() == self._pid:  # also when a forked child still has the file open
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def lock_entry(folder: Path, *, create: bool = True) -> EntryLock | None:
    """Take an entry for this process. Waits no longer than somebody may take who only looks whether it is in use.

    Args:
        folder: made when it is missing. With `create=False` it must be there, and taking it does not count as use.

    Returns:
        The lock. None when another process, or another lock of this one, has it; when the entry is missing and `create` is
        False; and where the file system has no locks (see `locks_work`): there nothing is ever deleted for you, so a folder
        with a name that nobody else can have may be used without one.

    Raises:
        StoreFullError, ReadOnlyError, StorageError: the folder or its lock can't be made.
    """
    if fcntl is None:
        return None
    path = folder / LOCK_NAME
    patience = time.monotonic() + LOOK_SECONDS
    while True:
        try:
            if create:
                folder.mkdir(parents=True, exist_ok=True)
            elif not folder.is_dir():
                return None
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o666)
        except FileNotFoundError:
            if create:  # deleted between the two calls
                continue
            return None
        except OSError as error:
            raise _translated(error, folder) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(file, path):
                if create:
                    os.utime(file)  # the time of the last use
                return EntryLock(folder, file)
        except OSError as error:
            os.close(file)
            if error.errno in _TAKEN and create and time.monotonic() < patience:
                time.sleep(0.01)
                continue
            if error.errno in (*_TAKEN, *_NOT_IMPLEMENTED):
                return None
            raise _translated(error, folder) from error
        os.close(file)  # somebody deleted the entry while we took the lock of what it was


def locks_work(folder: Path) -> bool:
    """Whether the file system of an existing folder has locks. Some network file systems don't (flock gives ENOSYS)."""
    if fcntl is None:
        return False
    try:
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NOT_IMPLEMENTED
    finally:
        os.close(file)
    return True


def _is_same(file: int, path: Path) -> bool:
    """Whether the open file is still what stands under its path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _translated(error: OSError, folder: Path) -> Exception:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"{folder}: {reason}; free some space, with `deltastore cache prune` for example")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ReadOnlyError(f"{folder}: {reason}; choose another cache folder with DELTASTORE_CACHE")
    return StorageError(f"{folder}: {reason}; check the cache folder, or choose another with DELTASTORE_CACHE")
