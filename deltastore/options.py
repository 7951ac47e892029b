"""Fixed figures of format 1 and the knobs of this process, in one place."""

from __future__ import annotations

import os

# -- format 1: never changed ------------------------------------------------------------------------------------------
CHUNK_ELEMENTS = 1 << 20  # storage elements per chunk, in every store
MANIFEST_ROWS = 4096  # a manifest is cut at the latest here, unless one tensor alone is larger
LADDER_BASE = 8  # spans are powers of this number
MAX_ITEMSIZE = 16  # bytes of the widest element (complex128)
MAX_CHUNK_BYTES = CHUNK_ELEMENTS * MAX_ITEMSIZE
SNAPSHOT_INTERVAL = 256  # log entries between two ref snapshots
INLINE_VALUES_BYTES = 64 << 10  # plain values up to this size sit in the commit document
INLINE_FILE_BYTES = 4 << 10  # files up to this size sit in the structure
MAX_FILE_BYTES = 64 << 20

# -- this process -------------------------------------------------------------------------------------------------------
PACK_BYTES = 64 << 20  # a pack is sealed when its payload reaches this size
READ_GAP_BYTES = 64 << 10  # two ranges of one pack that are closer than this are read as one
WINDOW_BYTES = 64 << 20  # decoded bytes in flight while loading
RECENT_DELTAS_BYTES = 64 << 20  # of deltas that a writer keeps for the next folds
SESSION_SECONDS = 3600  # lease of a writer


def worker_count() -> int:
    """Threads for scanning, coding and hashing: one per processor that this process may use, at most 16."""
    return max(1, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
