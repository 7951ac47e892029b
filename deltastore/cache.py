"""The entries of the cache folder: what there is, and deleting what nobody uses.

    plan = plan_prune(root, older_than=7 * 86400)
    for entry in plan.delete: ...
    freed = run_cleaning(plan)

An entry is deleted under its lock, and moved away before its files go, so that nobody ever finds half of one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltastore.cache_folder import KINDS, LOCK_NAME, STORES, cache_root, lock_entry, locks_work
from deltastore.errors import StorageError

DELETED = "deleted"  # entries are moved here first; what a crash leaves is deleted by the next cleaning
BLOCK = 512  # bytes that st_blocks counts


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry of the cache folder.

    Attributes:
        store: uuid of the store that it belongs to.
        kind: "baseline" or "spool".
        bytes: on the disk, in allocated blocks.
        last_used: seconds since the epoch.
        in_use: a process has it now, or nobody can tell because the file system has no locks.
    """

    folder: Path
    store: str
    kind: str
    name: str
    bytes: int
    last_used: float
    in_use: bool


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What a cleaning would delete, and what stays although it was meant, because it is in use.

    Attributes:
        bytes_before: of all entries.
        leftovers: moved away by a cleaning that was cut off; they go too.
    """

    root: Path
    delete: tuple[CacheEntry, ...]
    kept_in_use: tuple[CacheEntry, ...]
    bytes_before: int
    leftovers: tuple[Path, ...]

    @property
    def bytes_after(self) -> int:
        """Of the entries that stay."""
        return self.bytes_before - sum(entry.bytes for entry in self.delete)


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a cleaning did. `skipped` came into use since it was planned."""

    deleted: tuple[CacheEntry, ...]
    skipped: tuple[CacheEntry, ...]

    @property
    def bytes_freed(self) -> int:
        """On the disk."""
        return sum(entry.bytes for entry in self.deleted)


def list_entries(root: Path | None = None) -> list[CacheEntry]:
    """All entries, the one that was used longest ago first. `root` is `cache_root()` by default; it need not exist."""
    root = cache_root() if root is None else root
    locks = locks_work(root)
    entries = [_entry(folder, locks) for folder in _folders(root)]
    return sorted(entries, key=lambda entry: (entry.last_used, entry.folder))


def plan_prune(root: Path, older_than: float = 0) -> CachePlan:
    """Delete what nobody uses and nobody has used for `older_than` seconds."""
    return _plan(root, [entry for entry in list_entries(root) if entry.last_used <= time.time() - older_than])


def plan_cap(root: Path, max_bytes: int) -> CachePlan:
    """Delete what was used longest ago, until all entries together take at most `max_bytes`; what is in use stays."""
    entries = list_entries(root)
    excess = sum(entry.bytes for entry in entries) - max_bytes
    chosen = []
    for entry in entries:
        if excess <= 0:
            break
        chosen.append(entry)
        excess -= 0 if entry.in_use else entry.bytes
    return _plan(root, chosen)


def run_cleaning(plan: CachePlan) -> CacheReport:
    """Delete what the plan says and nobody has begun to use meanwhile.

    Raises:
        StorageError: something can't be deleted.
    """
    deleted: list[CacheEntry] = []
    skipped: list[CacheEntry] = []
    for entry in plan.delete:
        (deleted if _delete(plan.root, entry) else skipped).append(entry)
    for leftover in plan.leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    return CacheReport(tuple(deleted), tuple(skipped))


def _plan(root: Path, chosen: list[CacheEntry]) -> CachePlan:
    delete = tuple(entry for entry in chosen if not entry.in_use)
    kept = tuple(entry for entry in chosen if entry.in_use)
    leftovers = tuple(_subfolders(root / DELETED))
    return CachePlan(root, delete, kept, sum(entry.bytes for entry in list_entries(root)), leftovers)


def _delete(root: Path, entry: CacheEntry) -> bool:
    lock = lock_entry(entry.folder, create=False)
    if lock is None:  # in use by now, or gone
        return False
    aside = root / DELETED / uuid.uuid4().hex
    try:
        with lock:
            aside.parent.mkdir(exist_ok=True)
            entry.folder.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise StorageError(f"can't delete {entry.folder}: {error}; check its owner and mode, or delete it by hand") from error
    for folder in (entry.folder.parent, entry.folder.parent.parent):  # of the kind and of the store, once they are empty
        with contextlib.suppress(OSError):
            folder.rmdir()
    return True


def _folders(root: Path) -> Iterator[Path]:
    for store in _subfolders(root / STORES):
        for kind in KINDS:
            yield from _subfolders(store / kind)


def _subfolders(folder: Path) -> list[Path]:
    """Real folders, no links: what lies behind a link is not ours to delete."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"can't look into the cache folder {folder}: {error}; check its owner and mode") from error


def _entry(folder: Path, locks: bool) -> CacheEntry:
    size, last = _size_and_time(folder)
    kind = folder.parent
    return CacheEntry(folder, kind.parent.name, kind.name, folder.name, size, last, not locks or _is_in_use(folder))


def _is_in_use(folder: Path) -> bool:
    """Whether somebody holds the lock. An entry without a lock file is not used by anybody yet."""
    if not (folder / LOCK_NAME).exists():
        return False
    lock = lock_entry(folder, create=False)
    if lock is not None:
        lock.release()
    return lock is None


def _size_and_time(folder: Path) -> tuple[int, float]:
    """Bytes on the disk and the time of the last change of a file below; what vanishes meanwhile counts as nothing."""
    size, last = 0, 0.0
    for parent, _, names in os.walk(folder):
        for path in [Path(parent), *(Path(parent, name) for name in names)]:
            with contextlib.suppress(OSError):
                info = path.lstat()
                size += getattr(info, "st_blocks", -(-info.st_size // BLOCK)) * BLOCK
                last = max(last, info.st_mtime if path != folder else 0)
    with contextlib.suppress(OSError):
        last = last or folder.stat().st_mtime
    return size, last
