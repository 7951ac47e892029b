"""Fixed figures of format 1 and the knobs of this process, in one place."""

from __future__ import annotations

import os
from pathlib import Path

# -- format 1: never changed ------------------------------------------------------------------------------------------
CHUNK_ELEMENTS = 1 << 20  # storage elements per chunk, in every store
MANIFEST_ROWS = 4096  # a manifest is cut at the latest here, unless one tensor alone is larger
LADDER_BASE = 8  # spans are powers of this number
MAX_ITEMSIZE = 16  # bytes of the widest element (complex128)
MAX_CHUNK_BYTES = CHUNK_ELEMENTS * MAX_ITEMSIZE
SNAPSHOT_INTERVAL = 256  # log entries between two ref snapshots
INLINE_VALUES_BYTES = 64 << 10  # plain values up to this size sit in the commit document
INLINE_FILE_BYTES = 4 << 10  # files up to this size sit in the structure
MAX_STORED_FILE_BYTES = 1 << 48

# -- this process -------------------------------------------------------------------------------------------------------
MAX_FILE_BYTES = 64 << 20  # of one of `files=`, which are held in memory; files of a folder may be larger
PACK_BYTES = 64 << 20  # a pack is sealed when its payload reaches this size
READ_GAP_BYTES = 64 << 10  # two ranges of one pack that are closer than this are read as one
WINDOW_BYTES = 64 << 20  # decoded bytes in flight while loading
STAGING_BYTES = 256 << 20  # of a commit in the background that wait for its encoder
MAX_SPOOL_BYTES = 8 << 30  # of packs that wait on disk for a slow bucket
RECENT_DELTAS_BYTES = 64 << 20  # of deltas that a writer keeps for the next folds
SESSION_SECONDS = 3600  # lease of a writer


def worker_count() -> int:
    """Threads for scanning, coding and hashing: one per processor that this process may use, at most 16."""
    return max(1, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def available_memory() -> int | None:
    """Bytes of memory that can still be taken without swapping, within the limit of a container; None where unknown."""
    found = [value for value in (_meminfo_available(), _cgroup_available()) if value is not None]
    return min(found, default=None)


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_available() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
        inactive = [
            line.split()[1] for line in (folder / "memory.stat").read_text().splitlines() if line.startswith("inactive_file ")
        ]
        return max(0, int(limit) - int(used) + int(inactive[0]))  # files that were read are given up first
    except (OSError, ValueError, IndexError):  # no cgroup of version 2, or no limit in it
        return None
